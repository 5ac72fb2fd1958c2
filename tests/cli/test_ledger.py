"""`effectfence ledger …`: what an operator sees and says."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from effectfence import EffectCert, EffectFence, Replay
from effectfence.cli import main
from tests.cli.conftest import fill, request

BY = ("--by", "ada", "--reason", "seen in the books")


def names(path):
    return sorted(path.name for path in Path(path).iterdir())


# --- looking --------------------------------------------------------------------------------------


def test_verify_says_how_much_is_whole(effectfence, ledger):
    code, out, err = effectfence("ledger", "verify", ledger)
    assert (code, err) == (0, "")
    assert out.startswith(f"{ledger} is whole: ")
    whole = json.loads(effectfence("ledger", "verify", ledger, "--json")[1])
    assert whole["whole"] is True
    assert whole["bytes"] == os.path.getsize(ledger)


def test_verify_of_a_damaged_ledger_names_line_and_byte_and_exits_1(effectfence, ledger):
    content = Path(ledger).read_bytes()
    Path(ledger).write_bytes(content.replace(b'"agent":"bob"', b'"agent":"eve"', 1))
    for verb in ("verify", "list", "stats"):
        code, out, err = effectfence("ledger", verb, ledger)
        assert (code, out) == (1, "")
        assert "is damaged at line 3 (byte " in err
        assert err.count("\n") == 1


def test_list_shows_every_intent_one_a_line(effectfence, ledger):
    code, out, err = effectfence("ledger", "list", ledger)
    assert (code, err) == (0, "")
    states = sorted(line.split()[:2] for line in out.splitlines())
    done = ["done", "done"]
    assert states == [["cleared", "cleared"], done, done, ["unknown", "unknown"]]
    assert [line for line in out.splitlines() if " in scope tenant-a, " in line]


def test_list_of_one_state_as_json_lines(effectfence, ledger):
    _, out, _ = effectfence("ledger", "list", ledger, "--state", "unknown", "--json")
    (record,) = map(json.loads, out.splitlines())
    assert record["intent"] == "unknown"
    assert record["reason"] == "the line went dead"


def test_a_scope_is_looked_into_by_name(effectfence, ledger):
    _, out, _ = effectfence("ledger", "list", ledger, "--scope", "tenant-a", "--json")
    (record,) = map(json.loads, out.splitlines())
    assert record["cert"]["result"] == {"tenant": "a"}


def test_show_of_an_unknown_outcome_says_what_to_do(effectfence, ledger):
    code, out, _ = effectfence("ledger", "show", ledger, "unknown")
    assert code == 0
    assert "reason           the line went dead" in out
    assert f"effectfence ledger settle {ledger} 'unknown' --result JSON" in out


def test_show_of_a_finished_effect_has_its_certificate(effectfence, ledger):
    _, out, _ = effectfence("ledger", "show", ledger, "done")
    assert 'result           {"ok": true}' in out
    assert "DOES NOT VERIFY" not in out
    _, out, _ = effectfence("ledger", "show", ledger, "done", "--json")
    assert EffectCert.model_validate(json.loads(out)["cert"]).verify()


def test_stats_count_the_states(effectfence, ledger):
    _, out, _ = effectfence("ledger", "stats", ledger, "--json")
    counted = json.loads(out)
    assert counted["bytes"] == os.path.getsize(ledger)
    del counted["bytes"], counted["path"]
    assert counted == {
        "intents": 4,
        "domains": 4,
        "scoped_elsewhere": 1,
        "in_flight": 0,
        "expired": 0,
        "unknown": 1,
        "done": 1,
        "cleared": 1,
    }
    assert "scoped elsewhere  1" in effectfence("ledger", "stats", ledger)[1]


@pytest.mark.parametrize("verb", ["verify", "list", "show", "stats", "settle", "clear", "compact"])
def test_no_verb_makes_a_ledger_that_is_not_there(verb, effectfence, tmp_path):
    path = tmp_path / "nowhere" / "effects.jsonl"
    more = ["an-intent"] if verb in ("show", "settle", "clear") else []
    more += BY if verb in ("settle", "clear") else []
    more += ["--result", "1"] if verb == "settle" else []
    code, out, err = effectfence("ledger", verb, path, *more)
    assert (code, out) == (2, "")
    assert err == f"effectfence: there is no ledger at {path}\n"
    assert names(tmp_path) == []


def test_the_ledger_may_come_from_the_environment(effectfence, ledger, monkeypatch):
    monkeypatch.setenv("EFFECTFENCE_LEDGER", ledger)
    assert effectfence("ledger", "verify")[0] == 0
    assert effectfence("ledger", "show", "done")[0] == 0


def test_options_may_stand_between_ledger_and_intent(effectfence, ledger):
    assert json.loads(effectfence("ledger", "show", ledger, "--json", "done")[1])


def test_recorded_text_cannot_steer_the_terminal(effectfence, tmp_path):
    path = tmp_path / "effects.jsonl"
    evil = "pay\x1b[2J\x07\u202e\x9b31m\r\n\x7f"

    async def record():
        async with EffectFence.open(path) as fence:
            attempt = await fence.prepare(request(evil, args={evil: evil}, agent=evil, tool=evil))
            await fence.abort(attempt.prepared, evil)

    asyncio.run(record())
    for arguments in (
        ["list", path],
        ["list", path, "--json"],
        ["show", path, evil],
        ["show", path, "x" + evil],
        ["settle", path, evil, "--result", "1", *BY],
        ["clear", path, evil, *BY],
    ):
        _, out, err = effectfence("ledger", *arguments)
        shown = (out + err).replace("\n", "")
        assert shown.isprintable(), (arguments, shown)
        assert "\\x1b[2J" in shown or "\\u001b[2J" in shown


# --- saying ---------------------------------------------------------------------------------------


def test_settle_is_what_a_retry_then_gets(effectfence, ledger):
    code, out, err = effectfence("ledger", "settle", ledger, "unknown", "--result", '{"id":9}', *BY)
    assert (code, err) == (0, "")
    assert out.startswith("settled: unknown ran, certificate ")

    async def retry():
        async with EffectFence.open(ledger) as fence:
            return await fence.prepare(request("unknown"))

    admission = asyncio.run(retry())
    assert isinstance(admission, Replay)
    assert admission.cert.result == {"id": 9}
    assert "who" not in out


def test_settle_prints_the_certificate_as_json(effectfence, ledger):
    _, out, _ = effectfence("ledger", "settle", ledger, "unknown", "--result", "1", "--json", *BY)
    assert EffectCert.model_validate(json.loads(out)).verify()


def test_clear_makes_it_runnable_again(effectfence, ledger):
    code, out, _ = effectfence("ledger", "clear", ledger, "unknown", *BY)
    assert (code, out) == (0, "cleared: unknown did not run, and may be run again\n")

    async def retry():
        async with EffectFence.open(ledger) as fence:
            return await fence.prepare(request("unknown"))

    assert asyncio.run(retry()).prepared.attempt == 2


def test_a_word_is_kept_with_who_and_why(effectfence, ledger):
    effectfence("ledger", "clear", ledger, "unknown", *BY)
    assert '"by":"ada"' in Path(ledger).read_text()
    assert '"reason":"seen in the books"' in Path(ledger).read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["settle", "nothing", "--result", "1", *BY], 1, "nothing is recorded for 'nothing'"),
        (["clear", "nothing", *BY], 1, "nothing is recorded for 'nothing'"),
        (["show", "nothing"], 1, "nothing is recorded for 'nothing'"),
        (["settle", "done", "--result", "1", *BY], 1, "already committed with another result"),
        (["clear", "done", *BY], 1, "it ran, and its outcome would be forgotten"),
        (["settle", "unknown", "--result", "{1", *BY], 2, "not JSON"),
        (["settle", "unknown", "--result", "NaN", *BY], 2, "NaN"),
        (["settle", "unknown", "--result", "1", "--by", "", "--reason", "x"], 2, "by"),
    ],
)
def test_a_refused_word_is_one_sentence(arguments, code, says, effectfence, ledger):
    verb, intent, *rest = arguments
    got, out, err = effectfence("ledger", verb, ledger, intent, *rest)
    assert (got, out) == (code, "")
    assert says in err
    assert err.startswith("effectfence: ")
    assert err.count("\n") == 1


async def test_the_ledger_may_be_in_use_by_a_living_holder(tmp_path, capsys):
    path = tmp_path / "effects.jsonl"
    async with EffectFence.open(path) as fence:
        prepared = (await fence.prepare(request("held"))).prepared
        for verb in ("verify", "list", "stats", "compact"):
            assert await asyncio.to_thread(main, ["ledger", verb, str(path)]) == 0
        assert "in_flight  held" in capsys.readouterr().out
        word = ["ledger", "clear", str(path), "held", *BY]
        assert await asyncio.to_thread(main, word) == 1
        assert "its holder may still be running it" in capsys.readouterr().err
        settle = ["ledger", "settle", str(path), "held", "--result", "1", *BY, "--force"]
        assert await asyncio.to_thread(main, settle) == 0
        assert (await fence.commit(prepared, 1)).result == 1


def test_compact_keeps_what_is_alive(effectfence, ledger):
    before = effectfence("ledger", "list", ledger)[1]
    code, out, _ = effectfence("ledger", "compact", ledger)
    assert code == 0
    assert "bytes before" in out
    assert sorted(map(first_two, effectfence("ledger", "list", ledger)[1].splitlines())) == sorted(
        map(first_two, before.splitlines())
    )
    assert effectfence("ledger", "verify", ledger)[0] == 0


def first_two(line):
    return line.split()[:2]


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ledger", "list"], "no ledger: name its path, or set EFFECTFENCE_LEDGER"),
        (["ledger", "list", "a", "b"], "expected [LEDGER]"),
        (["ledger", "show"], "expected [LEDGER] INTENT"),
        (["ledger", "show", "a", "b", "c"], "expected [LEDGER] INTENT"),
        (["ledger", "list", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["ledger", "list", "a", "--state", "lost"], "invalid choice: 'lost'"),
        (["ledger", "settle", "a", "b", "--result", "1"], "--by, --reason"),
        (["ledger", "list", "memory:"], "can only be seen from inside its process"),
        (["ledger", "list", "mysql://u:secret@h/d"], "no store for mysql://"),
        (["ledger"], "VERB"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_wrong_use_exits_2(arguments, says, effectfence):
    code, out, err = effectfence(*arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "secret" not in err


@pytest.mark.parametrize(
    "kind",
    ["folder", "pipe", "link", "writable by others"],
    ids=lambda kind: kind.replace(" ", "-"),
)
def test_a_file_that_cannot_be_a_ledger_is_refused_in_one_sentence(kind, effectfence, tmp_path):
    path = tmp_path / "effects.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        asyncio.run(fill(tmp_path / "real.jsonl"))
        path.symlink_to("real.jsonl")
    else:
        asyncio.run(fill(path))
        path.chmod(0o666)
    for verb in ("list", "verify"):
        code, out, err = effectfence("ledger", verb, path)
        if (kind, verb) == ("writable by others", "verify"):
            assert code == 0  # a copy may be looked at wherever it lies
            continue
        assert (code, out) == (1, "")
        assert "is unavailable" in err
        assert err.count("\n") == 1
