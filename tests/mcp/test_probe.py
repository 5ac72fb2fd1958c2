"""`effectfence probe`, with real processes: what it proves of which server, and that it fires
nothing that it was not told to."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from effectfence.mcp import evidence
from effectfence.mcp.evidence import INCONCLUSIVE, NOT_AGAIN, ONE, PROVEN, Kind, Outcome
from tests.mcp.peer import alive, end_all

REPOSITORY = Path(__file__).parents[2]
ORDER = ("--args", '{"order_id": "o-1", "amount_cents": 4200}')
CHARGE = ("--tool", "charge_card", *ORDER)
PROVEN_EXIT, WRONG_USE, INCONCLUSIVE_EXIT = 1, 2, 3


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Till:
    """A folder with the books of a server, and the probe run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.books = folder / "charges.jsonl"
        self.mark = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith("EFFECTFENCE_")}
        core = {k: v for k, v in os.environ.items() if k == "EFFECTFENCE_CORE"}
        self.env = {
            **kept,
            **core,
            "PYTHONPATH": str(REPOSITORY),
            "XDG_STATE_HOME": str(folder / "state"),
            "TILL_MARK": self.mark,
        }
        self.observe = ("--observe", f"touch {shlex.quote(str(self.books))}; cat {self.books}")

    def server(self, *seconds: str) -> list[str]:
        module = ("-m", "effectfence.mcp.charge_server")
        return [sys.executable, *module, str(self.books), *seconds]

    def odd(self, kind: str) -> list[str]:
        script = str(Path(__file__).with_name("odd_charges.py"))
        return [sys.executable, script, kind, str(self.books)]

    def wrap(self, command: list[str]) -> list[str]:
        return [sys.executable, "-m", "effectfence", "wrap", "--", *command]

    def start(self, *options: str, command: list[str]) -> subprocess.Popen[bytes]:
        """What it says goes into files: a pipe would wait for whoever was left behind."""
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "effectfence", "probe", *options, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.env,
                cwd=self.folder,
            )

    def probe(self, *options: str, command: list[str]) -> Said:
        with self.start(*options, command=command) as probe:
            try:
                code = probe.wait(100)
            finally:
                probe.kill()
        assert alive(self.mark) == [], "the probe left processes behind"
        return self.said(code)

    def said(self, code: int) -> Said:
        return Said(code, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def charges(self) -> int:
        return len(self.books.read_text().splitlines()) if self.books.exists() else 0


@pytest.fixture
def till(tmp_path):
    till = Till(tmp_path)
    yield till
    end_all(alive(till.mark))


# --- a server that fires twice, and the same one behind the fence ---------------------------------


@pytest.mark.parametrize(
    ("mode", "calls"), [("race", 12), ("lost-answer", 2), ("crash", 2)], ids=str
)
def test_each_mode_proves_that_the_raw_server_fires_twice(till, mode, calls):
    said = till.probe(*CHARGE, "--mode", mode, "--json", command=till.server())
    assert (said.code, said.json["verdict"]) == (PROVEN_EXIT, PROVEN)
    assert said.json["distinct_effects"] == said.json["succeeded"] == till.charges() == calls
    assert "charge_id: ch_" in said.json["difference"]


@pytest.mark.parametrize("mode", ["race", "lost-answer", "crash"])
def test_each_mode_finds_one_effect_behind_the_fence(till, mode):
    said = till.probe(*CHARGE, "--mode", mode, "--json", command=till.wrap(till.server()))
    assert (said.code, till.charges()) == (0, 1), said
    assert said.json["verdict"] == ONE
    assert said.json["distinct_effects"] == 1
    assert said.json["replays"] == said.json["calls"] - 1


def test_a_crash_is_timed_by_the_effect_itself_and_the_raw_server_fires_again(till):
    options = (*CHARGE, "--mode", "crash", *till.observe, "--timeout", "4", "--json")
    said = till.probe(*options, command=till.server("60"))
    assert (said.code, said.json["distinct_effects"], till.charges()) == (PROVEN_EXIT, 2, 2)
    assert said.json["transport_failures"] == 2, "killed at work; and it answers after a minute"


@pytest.mark.parametrize("timed_by", ["effect", "time"])
def test_after_a_crash_the_fence_does_not_run_it_again(till, timed_by):
    timing = till.observe if timed_by == "effect" else ("--kill-after", "2")
    options = (*CHARGE, "--mode", "crash", *timing, "--json")
    said = till.probe(*options, command=till.wrap(till.server("60")))
    assert (said.code, said.json["verdict"], till.charges()) == (0, NOT_AGAIN, 1), said
    assert (said.json["refused"], said.json["transport_failures"]) == (1, 1)
    assert "SIGKILL" in said.json["failures"][0]


def test_a_second_probe_of_the_same_action_behind_the_fence_fires_nothing(till):
    for verdict in (ONE, NOT_AGAIN):
        said = till.probe(*CHARGE, "--json", command=till.wrap(till.server()))
        assert (said.code, said.json["verdict"], till.charges()) == (0, verdict, 1)


def test_a_report_for_people_names_the_numbers_the_verdict_and_the_way_out(till):
    said = till.probe(*CHARGE, command=till.server())
    assert said.code == PROVEN_EXIT
    lines = [line.split() for line in said.out.splitlines()]
    assert ["succeeded", "12"] in lines
    assert ["tool", "errors", "0"] in lines
    assert ["transport", "failures", "0"] in lines
    assert any(line[:3] == ["DISTINCT", "effects", "12"] for line in lines)
    assert "PROVEN DOUBLE-FIRE: " in said.out
    assert "effectfence wrap --" in said.out


# --- what proves nothing --------------------------------------------------------------------------


def test_equal_answers_prove_nothing_until_the_effects_are_counted(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("equal"))
    assert (said.code, said.json["verdict"]) == (INCONCLUSIVE_EXIT, INCONCLUSIVE)
    assert (said.json["distinct_answers"], said.json["succeeded"]) == (1, 12)
    assert "equal answers prove nothing" in said.json["because"]

    said = till.probe(*CHARGE, *till.observe, "--json", command=till.odd("equal"))
    assert (said.code, said.json["verdict"]) == (PROVEN_EXIT, PROVEN)
    assert said.json["observed"] == {"before": 12, "after": 24, "effects": 12, "how": "its lines"}


def test_equal_answers_behind_the_fence_are_replays_and_so_one_effect(till):
    said = till.probe(*CHARGE, "--json", command=till.wrap(till.odd("equal")))
    assert (said.code, said.json["verdict"], till.charges()) == (0, ONE, 1)


def test_answers_that_differ_by_a_clock_are_no_proof(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("clock"))
    assert (said.code, said.json["verdict"]) == (INCONCLUSIVE_EXIT, INCONCLUSIVE)
    assert said.json["distinct_answers"] == 12


def test_a_server_that_says_of_each_duplicate_something_else_is_not_accused(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("deduplicating"))
    assert (said.code, said.json["verdict"]) == (INCONCLUSIVE_EXIT, INCONCLUSIVE)
    assert (said.json["distinct_answers"], till.charges()) == (12, 1)
    said = till.probe(
        *("--tool", "charge_card", "--args", '{"order_id": "o-2", "amount_cents": 1}'),
        *(*till.observe, "--json"),
        command=till.odd("deduplicating"),
    )
    assert (said.code, said.json["verdict"], said.json["distinct_effects"]) == (0, ONE, 1)


def test_what_is_remembered_in_memory_alone_is_forgotten_by_the_next_process(till):
    """Each further question of this mode goes to a new one."""
    options = (*CHARGE, "--mode", "lost-answer", "--calls", "3", "--json")
    said = till.probe(*options, command=till.odd("deduplicating"))
    assert (said.code, said.json["distinct_effects"], till.charges()) == (PROVEN_EXIT, 3, 3)


def test_a_tool_that_says_that_it_only_reads_is_not_accused_by_its_answers(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("reading"))
    assert (said.code, said.json["distinct_effects"]) == (INCONCLUSIVE_EXIT, 12)
    said = till.probe(*CHARGE, *till.observe, "--json", command=till.odd("reading"))
    assert said.code == PROVEN_EXIT, "what was counted was no reading"


@pytest.mark.parametrize("observed", [False, True])
def test_errors_say_nothing_of_the_effect_but_the_count_does(till, observed):
    options = till.observe if observed else ()
    said = till.probe(*CHARGE, *options, "--json", command=till.odd("declining"))
    assert (said.json["tool_errors"], said.json["failures"]) == (12, ["card declined"])
    assert said.code == (PROVEN_EXIT if observed else INCONCLUSIVE_EXIT)


def test_json_rpc_errors_are_counted_apart(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("refusing"))
    assert (said.code, said.json["json_rpc_errors"]) == (INCONCLUSIVE_EXIT, 12)
    assert said.json["failures"] == ["no charges today (-32000)"]


def test_a_result_that_wants_more_input_is_no_success(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("asking"))
    assert (said.code, said.json["tool_errors"]) == (INCONCLUSIVE_EXIT, 12)


def test_an_observer_that_looks_elsewhere_is_told_so(till):
    said = till.probe(*CHARGE, "--observe", "echo 7", "--json", command=till.server())
    assert (said.code, said.json["distinct_effects"]) == (INCONCLUSIVE_EXIT, 0)
    assert "does it look where this tool acts?" in said.json["because"]


# --- servers that misbehave -----------------------------------------------------------------------


def test_a_server_that_dies_of_the_call_is_a_transport_failure(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("dying"))
    assert (said.code, said.json["transport_failures"]) == (INCONCLUSIVE_EXIT, 12)
    assert said.json["failures"] == ["effectfence-charges was killed by SIGKILL"]


def test_a_call_that_hangs_ends_with_its_time(till):
    options = (*CHARGE, "--timeout", "0.5", *till.observe, "--json")
    said = till.probe(*options, command=till.odd("hanging"))
    assert (said.code, said.json["transport_failures"]) == (PROVEN_EXIT, 12)
    assert said.json["failures"] == ["no answer within 0.5 s"]


def test_lines_that_are_no_messages_are_passed_over_and_counted(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("noisy"))
    assert (said.code, said.json["succeeded"]) == (PROVEN_EXIT, 12)
    assert said.json["stray_lines"] == 12 * 4


def test_a_servers_own_requests_are_answered_and_change_no_count(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("curious"))
    assert (said.code, said.json["succeeded"], said.json["stray_lines"]) == (PROVEN_EXIT, 12, 0)


@pytest.mark.parametrize(("kind", "version"), [("modern", "2026-07-28"), ("paging", "2025-11-25")])
def test_both_eras_and_listings_of_many_pages_are_spoken(till, kind, version):
    said = till.probe(*CHARGE, "--json", command=till.odd(kind))
    assert (said.code, said.json["protocol"]) == (PROVEN_EXIT, version)
    assert (said.json["distinct_effects"], said.json["server"]) == (12, "effectfence-charges")


def test_a_server_that_ignores_its_end_is_ended_with_all_that_it_started(till):
    said = till.probe(*CHARGE, "--json", command=till.odd("stubborn"))
    assert (said.code, said.json["succeeded"]) == (PROVEN_EXIT, 12)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_ends_the_probe_and_the_server(till, number):
    with till.start(*CHARGE, command=till.odd("hanging")) as probe:
        try:
            while not till.charges():
                assert probe.poll() is None
                time.sleep(0.01)
            probe.send_signal(number)
            code = probe.wait(60)
        finally:
            probe.kill()
    assert alive(till.mark) == []
    assert (code, till.said(code).out) == (128 + number, "")


# --- wrong use: one sentence, exit 2, and nothing fired -------------------------------------------


def nothing_fired(till: Till, said: Said, sentence: str) -> None:
    assert (said.code, said.out, till.charges()) == (WRONG_USE, "", 0)
    last = said.err.splitlines()[-1]
    assert last.startswith("effectfence: ")
    assert sentence in last
    assert "Traceback" not in said.err


def test_a_typo_in_the_tools_name_lists_what_there_is(till):
    said = till.probe("--tool", "charge_cart", *ORDER, command=till.server())
    nothing_fired(till, said, "no tool 'charge_cart'; it has: charge_card, list_charges")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--args", "{1"), "--args is not JSON"),
        (("--args", '{"n": NaN}'), "there is no NaN in JSON"),
        (("--args", "[" * 100_000), "--args is not JSON"),
        (("--args", "[1]"), "--args is not a JSON object"),
        ((*ORDER, "--calls", "1"), "--calls is 1"),
        ((*ORDER, "--calls", "1001"), "--calls is 1001"),
        ((*ORDER, "--observe", "cat there/is/none"), "nothing was fired: cat: there/is/none"),
        ((*ORDER, "--observe", "kill -9 $$"), "nothing was fired: it was killed by signal 9"),
    ],
)
def test_what_can_not_be_carried_out_is_said_before_anything_fires(till, options, sentence):
    said = till.probe("--tool", "charge_card", *options, command=till.server())
    nothing_fired(till, said, sentence)


def test_an_observer_that_does_not_end_is_given_up_before_anything_fires(till):
    options = (*CHARGE, "--observe", "sleep 600 | sleep 600", "--timeout", "0.5")
    nothing_fired(till, till.probe(*options, command=till.server()), "did not end within 0.5 s")


def test_without_a_command_it_says_where_one_goes(till):
    nothing_fired(till, till.probe(*CHARGE, command=[]), "put its command after `--`")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["/nowhere/server"], "server could not be started: No such file or directory"),
        ([str(REPOSITORY)], "could not be started: Permission denied"),
        (["sh", "-c", "exit 3"], "sh ended with exit code 3 before it could answer the handshake"),
        (["sh", "-c", "kill -9 $$"], "sh was killed by SIGKILL before it could answer"),
    ],
)
def test_a_command_that_does_not_start_is_told_in_a_sentence(till, command, sentence):
    nothing_fired(till, till.probe(*CHARGE, command=command), sentence)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("mute", "did not answer the handshake within 1 s"),
        ("unlisted", "did not list its tools within 1 s"),
        ("toolless", "lists no tools: no tools here (-32601)"),
        ("strange", "refused the handshake: only 1999-01-01 (-32022)"),
    ],
)
def test_a_server_that_can_not_be_asked_is_not_fired_at(till, kind, sentence):
    said = till.probe(*CHARGE, "--start-timeout", "1", command=till.odd(kind))
    nothing_fired(till, said, sentence)


def test_who_fires_at_a_server_of_their_own_is_warned(till):
    warning = "about to call charge_card 3 times, for real"
    assert warning in till.probe(*CHARGE, "--calls", "3", command=till.odd("equal")).err
    assert "for real" not in till.probe(*CHARGE, "--calls", "3", command=till.server()).err


# --- what answers prove, and what a count is ------------------------------------------------------

NOW = 1_796_000_000.0


def text(*blocks: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": block} for block in blocks]}


def structured(**value: Any) -> dict[str, Any]:
    return {"content": [], "structuredContent": value}


DIFFERENT_EFFECTS = {
    "an id in a text": (text("charged: ch_1a"), text("charged: ch_2b")),
    "a number in a text": (text("Created issue #17"), text("Created issue #18")),
    "an id": (structured(charge_id="ch_1a"), structured(charge_id="ch_2b")),
    "an id without digits": (structured(noteId="brave-otter"), structured(noteId="calm-hare")),
    "an id that is a time": (structured(id=1_796_000_000_123), structured(id=1_796_000_000_124)),
    "JSON in a text": (text('{"sha": "abc"}'), text('{"sha": "abd"}')),
    "a balance": (structured(balance=95.5), structured(balance=91)),
    "a uuid": (
        text("mail 6f1c2b7e-0d2f-4b7e-9a53-0a52a7f0b001 sent"),
        text("mail 6f1c2b7e-0d2f-4b7e-9a53-0a52a7f0b002 sent"),
    ),
}
MAYBE_ONE_EFFECT = {
    "equal": (text("charged ch_1"), text("charged ch_1")),
    "other words": (text("created ch_1"), text("ch_1 exists already")),
    "one says more": (text("created ch_1"), text("ch_1 exists, see order 7")),
    "a flag": (structured(id="ch_1", duplicate=False), structured(id="ch_1", duplicate=True)),
    "another member": (structured(id="ch_1"), structured(id="ch_1", first_seen_order=12)),
    "a time of day": (text("done at 12:00:01"), text("done at 12:00:02.5 PM")),
    "a date and time": (text("at 2026-12-01T05:00:00Z"), text("at 2026-12-01 05:00:01.123+00:00")),
    "a date in words": (text("on Dec 1, 2026"), text("on Dec 2, 2026")),
    "a duration": (text("took 12.5 ms"), text("took 1s")),
    "an epoch": (text("1796000000"), text("1796000001")),
    "an epoch in ms": (structured(value=1_796_000_000_000), structured(value=1_796_000_000_001)),
    "a member that names time": (structured(createdAt="noon 1"), structured(createdAt="noon 2")),
    "a request's id": (structured(requestId="r1"), structured(requestId="r2")),
    "a request's id in words": (text("ok (request id: r1)"), text("ok (request id: r2)")),
    "attempts": (text("ch_1, attempt 1"), text("ch_1, attempt 2")),
    "pixels": (
        {"content": [{"type": "image", "data": "aGk1", "mimeType": "image/png"}]},
        {"content": [{"type": "image", "data": "aGk2", "mimeType": "image/png"}]},
    ),
    "_meta": ({"content": [], "_meta": {"id": "1"}}, {"content": [], "_meta": {"id": "2"}}),
}


def judged(*results: dict[str, Any], **how: Any) -> tuple[str, int, str | None]:
    outcomes = [evidence.outcome_of({"result": result}) for result in results]
    named = evidence.names([each.answer for each in outcomes if each.fresh], now=NOW)
    verdict = evidence.judge(outcomes, named, None, **{"read_only": False, **how})
    return verdict.name, named.effects, named.difference


@pytest.mark.parametrize("pair", DIFFERENT_EFFECTS.values(), ids=DIFFERENT_EFFECTS)
def test_answers_that_name_two_things_prove_two_effects(pair):
    name, effects, difference = judged(*pair)
    assert (name, effects) == (PROVEN, 2)
    assert difference is not None
    assert judged(*pair, *pair)[1] == 2
    assert judged(*pair, read_only=True)[0] == INCONCLUSIVE


@pytest.mark.parametrize("pair", MAYBE_ONE_EFFECT.values(), ids=MAYBE_ONE_EFFECT)
def test_answers_that_could_be_of_one_effect_prove_nothing(pair):
    assert judged(*pair) == (INCONCLUSIVE, 1, None)
    assert judged(*reversed(pair)) == (INCONCLUSIVE, 1, None)


def test_answers_nested_deep_are_compared_as_far_as_names_go():
    deep: Any = 1
    for _ in range(800):
        deep = [deep]
    assert judged(structured(id="a", deep=deep), structured(id="b", deep=deep))[1] == 2


def test_a_thousand_answers_are_compared_at_once():
    assert judged(*[structured(id=f"ch_{n}") for n in range(1000)])[1] == 1000


SUCCESS = Outcome(Kind.SUCCEEDED, answer={"id": "1"})
OTHER = Outcome(Kind.SUCCEEDED, answer={"id": "2"})
REPLAY = Outcome(Kind.SUCCEEDED, answer={"id": "1"}, replay=True)
REFUSED = Outcome(Kind.TOOL_ERROR, says="unknown", refused=True)
ERROR = Outcome(Kind.TOOL_ERROR, says="declined")
SILENCE = Outcome(Kind.TRANSPORT, says="no answer")

VERDICTS = [
    # what happened, effects that were counted, verdict
    ((SUCCESS, OTHER), None, PROVEN),
    ((SUCCESS, SUCCESS), None, INCONCLUSIVE),
    ((SUCCESS, ERROR, ERROR), None, ONE),
    ((SUCCESS, REPLAY, REPLAY), None, ONE),
    ((SUCCESS, REPLAY, SILENCE), None, ONE),
    ((SUCCESS, SILENCE), None, INCONCLUSIVE),
    ((REPLAY, REPLAY), None, NOT_AGAIN),
    ((SILENCE, REFUSED), None, NOT_AGAIN),
    ((SILENCE, REPLAY), None, NOT_AGAIN),
    ((ERROR, ERROR), None, INCONCLUSIVE),
    ((SILENCE, SILENCE), None, INCONCLUSIVE),
    ((SUCCESS, OTHER), 1, ONE),
    ((SUCCESS, SUCCESS), 2, PROVEN),
    ((SUCCESS, REPLAY), 2, PROVEN),
    ((ERROR, ERROR), 2, PROVEN),
    ((SILENCE, SILENCE), 2, PROVEN),
    ((SUCCESS, SILENCE), 1, ONE),
    ((SILENCE, REFUSED), 1, NOT_AGAIN),
    ((SILENCE, REFUSED), 0, NOT_AGAIN),
    ((SUCCESS, SUCCESS), 0, INCONCLUSIVE),
    ((ERROR, ERROR), 0, INCONCLUSIVE),
    ((SUCCESS, SUCCESS), -1, INCONCLUSIVE),
]


@pytest.mark.parametrize(("outcomes", "effects", "verdict"), VERDICTS)
def test_what_was_counted_outweighs_what_was_answered(outcomes, effects, verdict):
    named = evidence.names([each.answer for each in outcomes if each.fresh], now=NOW)
    observed = None if effects is None else evidence.Observed(5, 5 + effects, "its lines")
    assert evidence.judge(outcomes, named, observed, read_only=False).name == verdict


@pytest.mark.parametrize(
    ("before", "after", "effects", "how"),
    [
        ("0\n", "12\n", 12, "the number it prints"),
        (" 3 charges.jsonl\n", " 5 charges.jsonl\n", 2, "the number it prints"),
        ("", "a\nb\n\n", 2, "its lines"),
        ("a 1\n", "a 1\nb 2\n", 1, "its lines"),
        ("", "4200 order-1\n4200 order-1\n", 2, "its lines"),
        ("a\n", "a\n", 0, "its lines"),
        ("4200 order-1\n", "4200 order-1\n", 0, "the number it prints"),
        ("a\nb\n", "a\n", -1, "its lines"),
        ("", "", 0, "its lines"),
        ("", "12\n", None, "let it print 0"),
        ("count\n-----\n3\n(1 row)\n", "count\n-----\n5\n(1 row)\n", None, "print one number"),
    ],
)
def test_a_count_is_a_number_alone_or_the_number_of_lines(before, after, effects, how):
    observed = evidence.counted(before, after)
    assert observed.effects == effects
    assert how in observed.how
