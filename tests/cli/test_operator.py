"""The person on call: finds what nobody knows, sees what was said of it, says what is true, and
hands certificates on. On a ledger in use, by processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from effectfence import EffectFence, OutcomeUnknown, Replay
from tests.cli.conftest import ROOT, request, start

BY = ("--by", "ada", "--reason", "seen in the books")


def lines(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


def intents(out: str) -> list[str]:
    return sorted(line["intent"] for line in lines(out))


async def claimed(fence: EffectFence, name: str, **more: Any) -> Any:
    admission = await fence.prepare(request(name, **more))
    return admission.prepared  # type: ignore[union-attr]  # it is fresh


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    child = start(*arguments, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


# --- finding --------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> str:
    """Several tools, agents and domains, and a scope inside a scope."""
    path = tmp_path / "many.jsonl"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            for number, (tool, agent) in enumerate(
                [("pay", "bob"), ("pay", "eve"), ("mail", "bob"), ("mail", "eve")]
            ):
                more = {"tool": tool, "agent": agent, "domain": f"of:{tool}"}
                await fence.abort(await claimed(fence, f"{tool}-{number}", **more), "cut off")
            inner = fence.scoped("a/b@c%").scoped("inner")
            await inner.abort(await claimed(inner, "deep"), "cut off")

    asyncio.run(record())
    return str(path)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), ["deep", "mail-2", "mail-3", "pay-0", "pay-1"]),
        (("--tool", "mail"), ["mail-2", "mail-3"]),
        (("--agent", "eve"), ["mail-3", "pay-1"]),
        (("--tool", "pay", "--agent", "eve"), ["pay-1"]),
        (("--domain", "of:pay"), ["pay-0", "pay-1"]),
        (("--state", "done"), []),
        (("--older-than", "1h"), []),
        (("--newer-than", "1 h"), ["deep", "mail-2", "mail-3", "pay-0", "pay-1"]),
        (("--older-than", "0"), ["deep", "mail-2", "mail-3", "pay-0", "pay-1"]),
        (("--scope", "a/b@c%"), ["deep"]),
        (("--scope", "a/b@c%", "--scope", "inner"), ["deep"]),
        (("--scope", "inner"), []),
    ],
)
def test_a_list_is_narrowed_by_what_is_known(
    effectfence: Any, many: str, flags: tuple[str, ...], found: list[str]
) -> None:
    code, out, err = effectfence("ledger", "list", many, "--json", *flags)
    assert (code, err) == (0, "")
    assert intents(out) == found


def test_a_list_may_be_cut_short(effectfence: Any, many: str) -> None:
    assert len(lines(effectfence("ledger", "list", many, "--json", "--limit", "2")[1])) == 2
    assert effectfence("ledger", "list", many, "--limit", "0")[1] == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--older-than", "soon"), "'soon' is no age, such as 90s, 15m, 2h or 7d"),
        (("--newer-than", "-1s"), "expected one argument"),
        (("--limit", "few"), "'few' is no number"),
    ],
)
def test_what_is_no_age_and_no_number_is_wrong_use(
    effectfence: Any, many: str, flags: tuple[str, ...], says: str
) -> None:
    code, out, err = effectfence("ledger", "list", many, *flags)
    assert (code, out) == (2, "")
    assert says in err


def test_a_name_that_is_not_there_brings_the_one_that_may_be_meant(
    effectfence: Any, many: str
) -> None:
    for verb, *more in (["show"], ["clear", *BY], ["settle", "--result", "1", *BY]):
        code, out, err = effectfence("ledger", verb, many, "pay-O", *more)
        assert (code, out) == (1, "")
        assert re.search(r"; is 'pay-\d' meant\?\n$", err)
        _, _, err = effectfence("ledger", verb, many, "deep", *more)
        assert "it is in a scope: --scope 'a/b@c%' --scope 'inner'" in err


# --- what was said --------------------------------------------------------------------------------


def test_show_tells_who_said_what_and_why(effectfence: Any, tmp_path: Path) -> None:
    path = tmp_path / "effects.jsonl"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            await fence.release(await claimed(fence, "pay"), "no route to it")
            await fence.abort(await claimed(fence, "pay"), "cut off")
            await fence.clear("pay", by="ada", reason="not in the books")
            await claimed(fence, "pay")
            await fence.settle("pay", 1, by="bob", reason="seen\x1b[2J", force=True)

    asyncio.run(record())
    _, out, _ = effectfence("ledger", "show", path, "pay")
    said = [line for line in out.splitlines() if line.startswith(("release", "clear", "settle"))]
    assert [line.split()[0] for line in said] == ["release", "clear", "settle"]
    assert "by ada, seq 2" in said[1]
    assert said[1].endswith(": not in the books")
    assert "by bob (forced), seq 3" in said[2]
    assert said[2].endswith(r": seen\x1b[2J")
    history = json.loads(effectfence("ledger", "show", path, "pay", "--json")[1])["history"]
    assert [word["word"] for word in history] == ["release", "clear", "settle"]


def test_a_word_shows_although_nothing_else_stands(effectfence: Any, tmp_path: Path) -> None:
    path = tmp_path / "effects.jsonl"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            await fence.release(await claimed(fence, "pay"), "no route to it")

    asyncio.run(record())
    code, out, err = effectfence("ledger", "show", path, "pay")
    assert code == 1
    assert out.endswith(": no route to it\n")
    assert err == f"effectfence: nothing is recorded for 'pay' in {path}\n"


def test_words_of_a_scope_are_its_own(effectfence: Any, tmp_path: Path) -> None:
    path = tmp_path / "effects.jsonl"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            for one in (fence, fence.scoped("tenant-a")):
                await one.abort(await claimed(one, "pay"), "cut off")
                await one.clear("pay", by=f"ops of {one._scope or 'all'}", reason="no")

    asyncio.run(record())
    assert "ops of tenant-a" not in effectfence("ledger", "show", path, "pay")[1]
    scoped = effectfence("ledger", "show", path, "pay", "--scope", "tenant-a")[1]
    assert "by ops of tenant-a, seq 1 in scope tenant-a" in scoped


def test_a_word_about_an_attempt_that_is_over_is_refused(effectfence: Any, ledger: str) -> None:
    assert "--attempt 1 --by YOU" in effectfence("ledger", "show", ledger, "unknown")[1]
    assert effectfence("ledger", "clear", ledger, "unknown", *BY, "--attempt", "1")[0] == 0

    async def again() -> None:
        async with EffectFence.open(ledger) as fence:
            await fence.abort(await claimed(fence, "unknown"), "cut off again")

    asyncio.run(again())
    settle = ("ledger", "settle", ledger, "unknown", "--result", "1", *BY)
    code, out, err = effectfence(*settle, "--attempt", "1")
    assert (code, out) == (1, "")
    assert "in attempt 2 by now: the word is about attempt 1. Nothing changed" in err
    assert effectfence(*settle, "--attempt", "2")[0] == 0


# --- as it happens --------------------------------------------------------------------------------


def test_tail_shows_the_last_decisions_then_each_new_one(ledger: str) -> None:
    """Of another process, and words too; until it is interrupted."""

    async def more() -> None:
        async with EffectFence.open(ledger) as fence:
            await fence.run(request("fresh\x1b[2J"), lambda: 1)
            await fence.clear("unknown", by="ada", reason="not in the books")

    with running("ledger", "tail", ledger, "-n", "3", "--json") as tail:
        assert tail.stdout is not None
        last = [json.loads(tail.stdout.readline()) for _ in range(3)]
        assert ["tenant-a"] in [decision["scope"] for decision in last]  # what was recorded last
        asyncio.run(more())
        seen: list[dict[str, Any]] = []
        while not any(one.get("by") == "ada" for one in seen):
            line = tail.stdout.readline()
            assert line.strip("\n").isprintable()
            seen.append(json.loads(line))
        states = [one.get("state") for one in seen if one["intent"] == "fresh\x1b[2J"]
        assert states[-1] == "done"
        tail.send_signal(signal.SIGINT)
        assert tail.wait(30) == -signal.SIGINT


def test_tail_can_be_narrowed(ledger: str) -> None:
    async def more() -> None:
        async with EffectFence.open(ledger) as fence:
            await fence.run(request("of bob"), lambda: 1)
            await fence.run(request("of eve", agent="eve"), lambda: 1)

    with running("ledger", "tail", ledger, "-n", "0", "--agent", "eve") as tail:
        assert tail.stdout is not None
        wait_until_it_follows(ledger, tail)
        asyncio.run(more())
        while "of eve" not in (line := tail.stdout.readline()):
            assert "pay by eve" in line


def wait_until_it_follows(ledger: str, tail: subprocess.Popen[str]) -> None:
    """What is recorded under a name of its own comes out then."""

    async def knock(number: int) -> None:
        async with EffectFence.open(ledger) as fence:
            await fence.run(request(f"knock-{number}", agent="eve"), lambda: 1)

    assert tail.stdout is not None
    for number in range(1000):
        asyncio.run(knock(number))
        if select.select([tail.stdout], [], [], 0.05)[0]:
            return


def test_a_watched_list_goes_on_with_what_changes(ledger: str) -> None:
    async def more() -> None:
        async with EffectFence.open(ledger) as fence:
            await fence.settle("unknown", 1, by="ada", reason="seen")
            await fence.abort(await claimed(fence, "another"), "cut off")

    with running("ledger", "list", ledger, "--state", "unknown", "--watch", "--json") as watch:
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["intent"] == "unknown"
        asyncio.run(more())
        assert json.loads(watch.stdout.readline())["intent"] == "another"


def test_a_reader_that_leaves_ends_it_quietly(many: str) -> None:
    with running("ledger", "list", many, "--watch") as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.stdout.close()

        async def more() -> None:
            async with EffectFence.open(many) as fence:
                for number in range(1000):
                    if watch.poll() is not None:
                        return
                    await fence.run(request(f"more-{number}"), lambda: 1)

        asyncio.run(more())
        assert watch.wait(30) == 128 + signal.SIGPIPE
        assert watch.stderr is not None
        assert watch.stderr.read() == ""


# --- certificates ---------------------------------------------------------------------------------


@pytest.fixture
def chained(tmp_path: Path) -> str:
    """quote -> charge -> mail, and one whose cause is of another ledger."""
    path = tmp_path / "chained.jsonl"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            parent = None
            for name in ("quote", "charge", "mail"):
                cert = await fence.run(request(name, parent=parent), lambda: {"big": 2**70})
                parent = cert.hash
            await fence.run(request("stray", parent="0" * 64), lambda: 1)

    asyncio.run(record())
    return str(path)


def test_an_export_holds_every_certificate_after_its_cause_and_verifies(
    effectfence: Any, chained: str, tmp_path: Path
) -> None:
    path = tmp_path / "certificates.jsonl"
    code, out, err = effectfence("ledger", "export", chained, "--output", path)
    assert (code, err) == (0, "")
    assert out == f"4 certificates in {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert intents(path.read_text()) == ["charge", "mail", "quote", "stray"]
    order = [line["intent"] for line in lines(path.read_text())]
    assert order.index("quote") < order.index("charge") < order.index("mail")
    assert effectfence("ledger", "export", chained)[1] == path.read_text()
    for place in (path, chained):
        code, out, err = effectfence("ledger", "verify", place)
        assert (code, err) == (0, "")
        assert "4 certificates, 2 causes followed; 1 causes are not here (such as that of" in out
        facts = json.loads(effectfence("ledger", "verify", place, "--json")[1])
        assert (facts["whole"], facts["certificates"], facts["causes_not_here"]) == (True, 4, 1)


@pytest.mark.parametrize(
    ("altered", "says"),
    [
        (lambda cert: cert | {"result": 2}, "certificate of 'quote' does not verify"),
        (lambda cert: cert | {"parent": "f" * 64}, "certificate of 'quote' does not verify"),
        (lambda cert: cert | {"hash": "f" * 64}, "certificate of 'quote' does not verify"),
        (lambda cert: cert | {"more": 1}, "no certificate: more: Extra inputs"),
        (lambda cert: {n: v for n, v in cert.items() if n != "seq"}, "no certificate: seq: Field"),
        (lambda cert: [[]], "no certificate: it: Input should be"),
        (lambda cert: 7, "no certificate: it: Input should be"),
    ],
)
def test_an_altered_export_names_the_line_and_exits_1(
    effectfence: Any, chained: str, tmp_path: Path, altered: Any, says: str
) -> None:
    path = tmp_path / "certificates.jsonl"
    effectfence("ledger", "export", chained, "--output", path)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([*rest, json.dumps(altered(json.loads(first)))]) + "\n")
    code, out, err = effectfence("ledger", "verify", path)
    assert (code, out) == (1, "")
    assert f"{path}, line 4: " in err
    assert says in err
    facts = json.loads(effectfence("ledger", "verify", path, "--json")[1])
    assert facts["whole"] is False
    assert len(facts["problems"]) == 1


def test_a_line_that_is_not_json_is_a_problem_and_the_others_are_checked(
    effectfence: Any, chained: str, tmp_path: Path
) -> None:
    path = tmp_path / "certificates.jsonl"
    effectfence("ledger", "export", chained, "--output", path)
    path.write_text(path.read_text() + '{"intent": \x1b[2J\n')
    code, _, err = effectfence("ledger", "verify", path)
    assert code == 1
    assert "line 5: no certificate: " in err
    assert err.replace("\n", "").isprintable()


def verify_input(text: str, *arguments: str) -> tuple[int, str, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "effectfence", "ledger", "verify", "-", *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_one_certificate_on_standard_input_with_the_chain_that_caused_it(
    effectfence: Any, chained: str
) -> None:
    shown = effectfence("ledger", "show", chained, "mail", "--json")[1]
    cert = json.loads(shown)["cert"]
    for text in (shown, json.dumps(cert), json.dumps(cert, indent=2), json.dumps([cert])):
        code, out, err = verify_input(text)
        assert (code, err) == (0, "")
        assert "1 certificates, 0 causes followed; 1 causes are not here" in out
    code, out, _ = verify_input(json.dumps(cert), "--parents", chained)
    assert code == 0
    assert [line.split()[2] for line in out.splitlines() if "caused by" in line] == [
        "charge,",
        "quote,",
    ]
    assert "3 certificates, 2 causes followed\n" in out
    code, out, err = verify_input(json.dumps(cert | {"result": 1}))
    assert (code, out) == (1, "")
    assert "does not verify" in err


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_nothing_on_standard_input_is_wrong_use(text: str) -> None:
    code, out, err = verify_input(text)
    assert (code, out) == (2, "")
    assert err == "effectfence: standard input holds no certificate\n"


def test_an_export_that_cannot_be_written_leaves_nothing(
    effectfence: Any, chained: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    for place in (tmp_path, tmp_path / "nowhere" / "certificates.jsonl"):
        code, out, err = effectfence("ledger", "export", chained, "--output", place)
        assert (code, out) == (2, "")
        assert "a file's name, in a folder that is there, is wanted" in err
    assert sorted(tmp_path.iterdir()) == before


def test_an_export_never_replaces_a_ledger(effectfence: Any, chained: str, tmp_path: Path) -> None:
    before = Path(chained).read_bytes()
    link = tmp_path / "link"
    link.symlink_to(chained)
    for place in (chained, link, "/dev/null"):
        code, out, err = effectfence("ledger", "export", chained, "--output", place)
        assert (code, out) == (2, "")
        assert "only an earlier export is replaced" in err
    assert Path(chained).read_bytes() == before
    again = tmp_path / "certificates.jsonl"
    for _ in range(2):
        assert effectfence("ledger", "export", chained, "--output", again)[0] == 0


def test_a_proposed_command_runs_nothing_that_was_recorded(
    effectfence: Any, tmp_path: Path
) -> None:
    path, evil = tmp_path / "effects.jsonl", "it's $(touch pwned) `touch pwned`"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            await fence.abort(await claimed(fence, evil), "cut off")

    asyncio.run(record())
    out = effectfence("ledger", "show", path, evil)[1]
    (command,) = [line for line in out.splitlines() if "ledger clear" in line]
    said = subprocess.run(
        ["sh", "-c", command.replace("effectfence", "printf '%s\\n'", 1)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert evil in said.stdout.splitlines()
    assert not (tmp_path / "pwned").exists()


# --- secrets --------------------------------------------------------------------------------------


def test_what_a_request_ignored_is_in_no_verb(effectfence: Any, tmp_path: Path) -> None:
    path = tmp_path / "effects.jsonl"

    async def record() -> None:
        async with EffectFence.open(path) as fence:
            args = {"amount": 10, "token": "s3cret"}
            await fence.run(request("pay", args=args, ignore=("token",)), lambda: 1)

    asyncio.run(record())
    for verb in (["list", "--json"], ["show", "pay"], ["show", "pay", "--json"], ["export"]):
        out = effectfence("ledger", verb[0], path, *verb[1:])[1]
        assert "pay" in out
        assert "s3cret" not in out
    assert "s3cret" not in path.read_text()


# --- the whole way --------------------------------------------------------------------------------

WORKER = """
    import asyncio, sys
    from effectfence import EffectFence, EffectRequest
    async def main():
        async with EffectFence.open(sys.argv[1]) as fence:
            request = EffectRequest(
                intent="charge:1", domain="order:1", tool="charge", args={}, agent="worker"
            )
            async with fence.effect(request):
                with open(sys.argv[2], "a") as log:
                    log.write("charged\\n")
                print("charged", flush=True)
                await asyncio.Event().wait()
    asyncio.run(main())
"""


@pytest.mark.parametrize("verb", ["settle", "clear"])
def test_a_worker_dies_after_the_charge_and_somebody_who_knows_says_what_is_true(
    effectfence: Any, tmp_path: Path, verb: str
) -> None:
    """CASES 19 and 20, from the operator's side."""
    ledger, log = tmp_path / "effects.jsonl", tmp_path / "charges"
    program = [sys.executable, "-c", textwrap.dedent(WORKER), str(ledger), str(log)]
    word = ["--result", '{"charge": 9}', *BY] if verb == "settle" else [*BY]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "charged\n"
        code, _, err = effectfence("ledger", verb, ledger, "charge:1", *word)
        assert code == 1
        assert "its holder may still be running it" in err
        worker.kill()
    (found,) = lines(effectfence("ledger", "list", ledger, "--state", "unknown", "--json")[1])
    assert (found["intent"], found["reason"]) == ("charge:1", "its process died")
    assert (
        f"effectfence ledger {verb} {ledger} 'charge:1'"
        in (effectfence("ledger", "show", ledger, "charge:1")[1])
    )

    async def ask() -> Any:
        async with EffectFence.open(ledger) as fence:
            more = {"domain": "order:1", "tool": "charge", "args": {}, "agent": "worker"}
            return await fence.prepare(request("charge:1", **more))

    with pytest.raises(OutcomeUnknown):
        asyncio.run(ask())
    assert effectfence("ledger", verb, ledger, "charge:1", *word)[0] == 0
    admission = asyncio.run(ask())
    if verb == "settle":
        assert isinstance(admission, Replay)
        assert admission.cert.result == {"charge": 9}
    else:
        assert admission.prepared.attempt == 2
    assert log.read_text() == "charged\n"
