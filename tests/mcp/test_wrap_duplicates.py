"""`effectfence wrap` and calls that are made again: CASES 11 to 15, FAULTS 46 and 47, what counts
as the same action, what an error answer means, and who may wait for whom."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import signal
import subprocess
from typing import Any

import pytest

from tests.mcp.conftest import EFFECTFENCE, Odd
from tests.mcp.peer import Answer, Peer, until

pytestmark = pytest.mark.rig

AT_ONCE = ("--wait-seconds", "0")


def same(answers: list[Answer]) -> bool:
    """Whether all of them say the same, but for who ran it."""
    contents = [answer.result["content"] for answer in answers]
    return all(content == contents[0] for content in contents)


def fresh(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.replay is None and answer.refused is None]


# --- CASES 11 to 15 -------------------------------------------------------------------------------


async def test_a_client_that_gives_up_and_asks_again_gets_one_effect(odd: Odd) -> None:
    """Case 11: given up while it runs, asked again while it runs, when it has run, and from a new
    proxy: one execution."""
    peer = await odd.wrapped(*AT_ONCE)
    peer.call("slow", {"gate": "go"}, id="first")
    await odd.running()
    peer.notify("notifications/cancelled", {"requestId": "first", "reason": "timed out"})
    told = await peer.call("slow", {"gate": "go"}, id="second")
    assert told.code == "intent_in_flight"
    assert told.refused["ran"] is False
    assert "still running" in told.text
    assert "not executed again" in told.text
    odd.open_gate("go")
    answers = [await settled(peer, "slow", {"gate": "go"})]
    await peer.close()
    peer = await odd.wrapped()
    answers.append(await peer.call("slow", {"gate": "go"}))
    assert all(answer.replay for answer in answers)
    assert same(answers)
    assert answers[0].text == "receipt 1"
    assert len(odd.effects()) == 1


async def test_the_second_of_two_waits_for_the_first_and_gets_its_result(odd: Odd) -> None:
    """Case 11, with patience."""
    peer = await odd.wrapped()
    first = peer.call("slow", {"gate": "go"})
    await odd.running()
    second = peer.call("slow", {"gate": "go"})
    await peer.ask("ping")
    assert not second.done()
    odd.open_gate("go")
    assert same([await first, await second])
    assert (await first).replay is None
    assert (await second).replay
    assert len(odd.effects()) == 1


async def test_a_cancelled_call_runs_on_and_its_retry_gets_the_result(odd: Odd) -> None:
    """Case 12: the server is not told of the cancellation, the client gets no answer to the call
    that it cancelled."""
    peer = await odd.wrapped()
    peer.call("slow", {"gate": "go"}, id="given-up")
    await odd.running()
    peer.notify("notifications/cancelled", {"requestId": "given-up"})
    await peer.ask("ping")
    odd.open_gate("go")
    retry = await peer.call("slow", {"gate": "go"})
    assert retry.text == "receipt 1"
    assert retry.replay
    assert not [each for each in peer.messages() if each.get("id") == "given-up"]
    assert not [line for line in odd.heard() if b"cancelled" in line]
    assert len(odd.effects()) == 1


@pytest.mark.parametrize("how", ["ends its input", "is killed"])
async def test_a_client_that_vanishes_leaves_an_outcome_behind(odd: Odd, how: str) -> None:
    """Case 12: whoever asks next, through a process of its own, gets the recorded result."""
    peer = await odd.wrapped()
    peer.call("slow", {"gate": "go"})
    await odd.running()
    peer.end_input()
    if how == "is killed":
        peer.end_output()
    odd.open_gate("go")
    assert await peer.ended() == 0
    again = await odd.wrapped()
    retry = await again.call("slow", {"gate": "go"})
    assert retry.text == "receipt 1"
    assert retry.replay
    assert len(odd.effects()) == 1


async def test_every_call_sent_twice_has_one_effect_and_two_equal_answers(odd: Odd) -> None:
    """Case 13: as a client does that dispatches each call twice, some milliseconds apart."""
    peer = await odd.wrapped()
    randomness = random.Random(13)
    for n in range(100):
        first = peer.call("charge", {"n": n})
        for _ in range(randomness.randrange(4)):
            await asyncio.sleep(0)
        answers = [await peer.call("charge", {"n": n}), await first]
        assert same(answers)
        assert len(fresh(answers)) == 1
    assert len(odd.effects()) == 100


@pytest.mark.parametrize("how", ["a batch", "nine lines in one write"])
async def test_nine_identical_calls_in_one_message(odd: Odd, how: str) -> None:
    """Case 14: one execution, nine equal results."""
    peer = await odd.wrapped()
    params = {"name": "charge", "arguments": {"order": 1}}
    calls = [
        {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params} for id in range(9)
    ]
    expected = [peer.expect(id) for id in range(9)]
    if how == "a batch":
        peer.send(calls)
    else:
        peer.line(b"\n".join(json.dumps(call).encode() for call in calls))
    answers = await asyncio.gather(*expected)
    assert same(answers)
    assert not any(answer.is_error for answer in answers)
    assert len(fresh(answers)) == 1
    assert len(odd.effects()) == 1


async def test_a_run_that_is_retried_as_a_whole_charges_once(odd: Odd) -> None:
    """Case 15: charge, then a model's error; twice more from the start, each in a new process."""
    answers = []
    for _ in range(3):
        peer = await odd.wrapped()
        answers.append(await peer.call("charge", {"order": "o1", "cents": 4900}))
        await peer.close()
    assert [answer.replay is not None for answer in answers] == [False, True, True]
    assert answers[1].replay == answers[2].replay
    assert same(answers)
    assert len(odd.effects()) == 1


# --- FAULTS 46 and 47 -----------------------------------------------------------------------------


async def test_a_thousand_retries_under_other_ids_run_nothing(odd: Odd) -> None:
    """Row 46: whatever the id, cancelled or not, before the answer or after it."""
    count = 1000
    peer = await odd.wrapped()
    randomness = random.Random(46)
    first = []
    for n in range(count):
        first.append(peer.call("charge", {"n": n}, id=n))
        if randomness.random() < 0.5:
            peer.notify("notifications/cancelled", {"requestId": n})
        if randomness.random() < 0.3:
            await asyncio.sleep(0)
    again = [peer.call("charge", {"n": n}, id=f"again-{n}") for n in range(count)]
    answers = await asyncio.gather(*again)
    for n, answer in enumerate(answers):
        # What was cancelled before it was sent did not run; its retry may.
        assert answer.code is None, answer.line
        assert answer.result["content"], n
    ran = [effect["n"] for effect in odd.effects()]
    assert sorted(ran) == list(range(count)), "each of them once"


async def test_the_same_intent_for_another_action_is_refused(odd: Odd) -> None:
    """Row 47: other arguments or another tool, while it runs and when it has run; 100 of 100."""
    peer = await odd.wrapped(*AT_ONCE)
    named = {"effectfence/intent": "charge:order-1"}
    first = await peer.call("charge", {"cents": 10}, _meta=named)
    assert not first.is_error
    others = [await peer.call("charge", {"cents": 10 + n}, _meta=named) for n in range(1, 100)] + [
        await peer.call("progress", {"cents": 10}, _meta=named)
    ]
    assert {answer.code for answer in others} == {"intent_conflict"}
    assert {answer.refused["ran"] for answer in others} == {False}
    running = {"effectfence/intent": "slow:order-1"}
    slow = peer.call("slow", {"gate": "go", "n": 1}, _meta=running)
    await odd.running(2)
    other = await peer.call("slow", {"gate": "go", "n": 2}, _meta=running)
    assert other.code == "intent_conflict"
    odd.open_gate("go")
    assert not (await slow).is_error
    assert (await peer.call("charge", {"cents": 10}, _meta=named)).replay
    assert len(odd.effects()) == 2


# --- what is the same action ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":{"x":1,"y":2}}', '{ "b" : {"y":2,"x":1}, "a":1 }'),
        ('{"n":1}', '{"n":1.0}'),
        ('{"n":100}', '{"n":1e2}'),
        ('{"s":"é"}', '{"s":"\\u00e9"}'),
    ],
)
async def test_two_ways_to_write_one_action(odd: Odd, one: str, other: str) -> None:
    peer = await odd.wrapped()
    for arguments, id in ((one, 1), (other, 2)):
        answer = await peer.ask_line(charge_line(arguments, id))
    assert answer.replay
    assert len(odd.effects()) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"id":9007199254740993}', '{"id":9007199254740992}'),
        ('{"n":1}', '{"n":"1"}'),
        ('{"n":[1,2]}', '{"n":[2,1]}'),
        ("{}", '{"x":null}'),
        ('{"s":"\\u00e9"}', '{"s":"e\\u0301"}'),
        ('{"n":0}', '{"n":false}'),
        ('{"a":1}', '{"b":1}'),
    ],
)
async def test_two_actions_that_look_alike(odd: Odd, one: str, other: str) -> None:
    peer = await odd.wrapped()
    for arguments, id in ((one, 1), (other, 2)):
        answer = await peer.ask_line(charge_line(arguments, id))
        assert answer.replay is None
    assert len(odd.effects()) == 2


def charge_line(arguments: str, id: int) -> bytes:
    return (
        f'{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":'
        f'{{"name":"charge","arguments":{arguments},"_meta":{{"progressToken":{id}}}}}}}'
    ).encode()


async def test_left_out_arguments_are_no_arguments(odd: Odd) -> None:
    peer = await odd.wrapped()
    await peer.ask("tools/call", {"name": "charge"})
    assert (await peer.ask("tools/call", {"name": "charge", "arguments": {}})).replay
    assert len(odd.effects()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":1,"a":2}',
        '{"n":NaN}',
        '{"s":"\\ud800"}',
        '{"deep":' + "[" * 500 + "]" * 500 + "}",
        '{"n":1e999}',
    ],
)
async def test_arguments_without_one_meaning_are_refused_before_the_effect(
    odd: Odd, arguments: str
) -> None:
    peer = await odd.wrapped()
    answer = await peer.ask_line(charge_line(arguments, 1))
    assert answer.refused["ran"] is False
    assert odd.effects() == []
    assert (await peer.call("charge", {"n": 1})).text == "receipt 1"


async def test_a_deliberate_repeat_takes_an_intent_of_its_own(odd: Odd) -> None:
    peer = await odd.wrapped()
    for attempt in range(3):
        meta = {"effectfence/intent": f"charge:order-1:{attempt}"}
        answer = await peer.call("charge", {"order": 1}, _meta=meta)
        assert answer.replay is None
        again = await peer.call("charge", {"order": 1}, _meta=meta)
        assert again.replay["intent"] == f"charge:order-1:{attempt}"
    assert len(odd.effects()) == 3


@pytest.mark.parametrize("name", [7, "", "\0", "x" * 1025, None, ["a"]])
async def test_an_intent_that_is_no_name_is_refused(odd: Odd, name: Any) -> None:
    peer = await odd.wrapped()
    answer = await peer.call("charge", {"n": 1}, _meta={"effectfence/intent": name})
    if name is None:
        assert not answer.is_error
    else:
        assert answer.refused["ran"] is False
        assert odd.effects() == []


# --- waiting, and error answers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "told"), [("declined", "late: timeout"), ("broken", "late"), ("done", "receipt 1")]
)
async def test_twelve_that_wait_get_the_one_answer(odd: Odd, then: str, told: str) -> None:
    """They must not become twelve calls, one after the other, when the first is declined."""
    peer = await odd.wrapped()
    first = peer.call("slow", {"gate": "go", "then": then})
    await odd.running()
    waiting = [peer.call("slow", {"gate": "go", "then": then}) for _ in range(11)]
    await peer.ask("ping")
    odd.open_gate("go")
    answers = await asyncio.gather(first, *waiting)
    if then == "broken":
        assert {answer.error["message"] for answer in answers} == {told}
    else:
        assert {answer.text for answer in answers} == {told}
    assert len({json.dumps(answer.value["id"]) for answer in answers}) == 12
    assert len(odd.effects()) == 1


@pytest.mark.parametrize("tool", ["declined", "broken", "invalid", "missing"])
async def test_a_declined_call_may_be_tried_again(odd: Odd, tool: str) -> None:
    raw, peer = await odd.raw(), await odd.wrapped()
    for n in range(3):
        assert (await raw.call(tool, id=n)).line == (await peer.call(tool, id=n)).line
    assert len(odd.effects()) == 6


async def test_a_retry_after_a_decline_can_succeed(odd: Odd) -> None:
    peer = await odd.wrapped()
    assert (await peer.call("fickle")).is_error
    assert (await peer.call("fickle")).text == "receipt"
    assert (await peer.call("fickle")).replay
    assert len(odd.effects()) == 2


async def test_two_clients_have_one_fence(odd: Odd) -> None:
    """Twelve equal calls over three processes at once, again and again: one effect each time."""
    peers = [await odd.wrapped() for _ in range(3)]
    for round_ in range(20):
        answers = await asyncio.gather(
            *(peer.call("charge", {"round": round_}) for peer in peers for _ in range(4))
        )
        assert same(list(answers))
        assert len(fresh(list(answers))) == 1
        assert len(odd.effects()) == round_ + 1


async def test_a_duplicate_waits_for_another_process(odd: Odd) -> None:
    one, other = await odd.wrapped(), await odd.wrapped()
    first = one.call("slow", {"gate": "go"})
    await odd.running()
    second = other.call("slow", {"gate": "go"})
    await other.ask("ping")
    odd.open_gate("go")
    assert (await second).replay
    assert same([await first, await second])
    assert len(odd.effects()) == 1


async def test_waiting_ends_and_says_that_it_still_runs(odd: Odd) -> None:
    one = await odd.wrapped("--wait-seconds", "0.2")
    other = await odd.wrapped("--wait-seconds", "0.2")
    first = one.call("slow", {"gate": "go"})
    await odd.running()
    for peer in (one, other):
        told = await peer.call("slow", {"gate": "go"})
        assert told.code == "intent_in_flight"
        assert "still running" in told.text
        assert "not executed again" in told.text
    odd.open_gate("go")
    assert not (await first).is_error
    assert len(odd.effects()) == 1


@pytest.mark.parametrize("then", ["declined", "broken"])
async def test_those_of_another_process_are_told_that_it_was_released(odd: Odd, then: str) -> None:
    """They did not run, and each of them may be asked again."""
    one, other = await odd.wrapped(), await odd.wrapped()
    first = one.call("slow", {"gate": "go", "then": then})
    await odd.running()
    waiting = [other.call("slow", {"gate": "go", "then": then}) for _ in range(12)]
    await other.ask("ping")
    # Until the other process waits: its own ledger handle has seen the claim.
    probe = await odd.wrapped(*AT_ONCE)
    assert (await probe.call("slow", {"gate": "go", "then": then})).code == "intent_in_flight"
    odd.open_gate("go")
    await first
    answers = await asyncio.gather(*waiting)
    codes = {answer.code for answer in answers}
    assert len(odd.effects()) == 1, codes
    assert codes == {"released"}
    assert {answer.refused["ran"] for answer in answers} == {False}
    await other.call("slow", {"gate": "go", "then": then})
    assert len(odd.effects()) == 2


async def test_a_tool_slower_than_its_lease_keeps_its_claim(odd: Odd) -> None:
    """Renewed at least three times, and still in flight to everybody else."""
    lease = {"EFFECTFENCE_LEASE_SECS": "0.6"}
    one = await odd.wrapped(**lease)
    other = await odd.wrapped(*AT_ONCE, **lease)
    first = one.call("slow", {"gate": "go"})
    await odd.running()
    began = odd.ledger.read_bytes().count(b"\n")
    await until(lambda: odd.ledger.read_bytes().count(b"\n") >= began + 6)
    told = await other.call("slow", {"gate": "go"})
    assert told.code == "intent_in_flight"
    odd.open_gate("go")
    assert not (await first).is_error
    assert (await other.call("slow", {"gate": "go"})).replay
    assert len(odd.effects()) == 1


async def test_a_lapsed_lease_is_fenced_not_taken(odd: Odd) -> None:
    """The first proxy stands still past its lease; then it goes on, and its outcome counts."""
    lease = {"EFFECTFENCE_LEASE_SECS": "0.3"}
    one = await odd.wrapped(**lease)
    other = await odd.wrapped(*AT_ONCE, **lease)
    first = one.call("slow", {"gate": "go"})
    await odd.running()
    one.signal(signal.SIGSTOP)
    told = await settled(other, "slow", {"gate": "go"})
    assert told.code == "outcome_unknown"
    assert told.refused["ran"] is None
    odd.open_gate("go")
    assert (await other.call("slow", {"gate": "go"})).code == "outcome_unknown"
    one.signal(signal.SIGCONT)
    assert (await first).text == "receipt 1"
    assert (await other.call("slow", {"gate": "go"})).replay
    assert len(odd.effects()) == 1


async def settled(peer: Peer, tool: str, arguments: Any) -> Answer:
    """The answer once it is no longer "in flight"."""
    while (answer := await peer.call(tool, arguments)).code == "intent_in_flight":
        pass
    return answer


# --- strict, and the policy's word on errors ------------------------------------------------------


@pytest.mark.parametrize("tool", ["declined", "broken"])
@pytest.mark.parametrize("by", ["option", "policy"])
async def test_strictly_an_error_answer_may_have_come_after_the_effect(
    odd: Odd, tool: str, by: str
) -> None:
    options = ["--strict"]
    if by == "policy":
        options = policy(odd, f'[tools.{tool}]\non_error = "unknown"\n')
    peer = await odd.wrapped(*options)
    first = await peer.call(tool)
    assert f"{tool} 1" in first.line.decode()
    assert first.refused is None if "result" in first.value else True
    second = await peer.call(tool)
    assert second.code == "outcome_unknown"
    assert second.refused["ran"] is None
    assert len(odd.effects()) == 1
    if by == "policy":  # the others are as they were
        await peer.call("fickle")
        assert not (await peer.call("fickle")).is_error


@pytest.mark.parametrize("tool", ["invalid", "missing"])
async def test_even_strictly_a_call_that_was_never_understood_is_free(odd: Odd, tool: str) -> None:
    peer = await odd.wrapped("--strict")
    for n in (1, 2):
        assert (await peer.call(tool)).error["message"] == f"{tool} {n}"


async def test_strictly_those_that_wait_get_the_answer_and_later_ones_unknown(odd: Odd) -> None:
    one, other = await odd.wrapped("--strict"), await odd.wrapped("--strict")
    arguments = {"gate": "go", "then": "declined"}
    first = one.call("slow", arguments)
    await odd.running()
    mine = one.call("slow", arguments)
    theirs = other.call("slow", arguments)
    await asyncio.gather(one.ask("ping"), other.ask("ping"))
    odd.open_gate("go")
    assert (await first).text == "late: timeout"
    assert (await mine).text == "late: timeout"
    assert (await theirs).code == "outcome_unknown"
    assert (await one.call("slow", arguments)).code == "outcome_unknown"
    assert len(odd.effects()) == 1


async def test_what_the_refusal_says_to_run_settles_it(odd: Odd) -> None:
    peer = await odd.wrapped("--strict")
    await peer.call("declined", {"o'clock": "x y"})
    told = await peer.call("declined", {"o'clock": "x y"})
    settle, clear = (shlex.split(part) for part in told.text.split("`")[1::2])
    assert (settle[:3], clear[:3]) == (
        ["effectfence", "ledger", "settle"],
        ["effectfence", "ledger", "clear"],
    )
    words = {"JSON": '{"charged":true}', "YOU": "ada", "HOW_YOU_KNOW": "seen"}
    ran = [*EFFECTFENCE, *(words.get(word, word) for word in settle[1:])]
    done = await asyncio.to_thread(
        subprocess.run, ran, env=odd.env, cwd=odd.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    replay = await peer.call("declined", {"o'clock": "x y"})
    assert replay.replay
    assert "charged" in replay.text
    assert not replay.is_error
    assert len(odd.effects()) == 1


async def test_what_was_cleared_runs_again(odd: Odd) -> None:
    peer = await odd.wrapped("--strict")
    await peer.call("declined")
    told = await peer.call("declined")
    clear = shlex.split(told.text.split("`")[3])
    words = {"YOU": "ada", "HOW_YOU_KNOW": "looked"}
    ran = [*EFFECTFENCE, *(words.get(word, word) for word in clear[1:])]
    done = await asyncio.to_thread(
        subprocess.run, ran, env=odd.env, cwd=odd.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (await peer.call("declined")).text == "declined 2"


# --- more rounds, and what goes on elsewhere ------------------------------------------------------


async def test_a_call_that_needs_more_input_is_not_done(odd: Odd) -> None:
    peer = await odd.wrapped()
    for _ in range(2):  # asked again, it asks again
        answer = await peer.call("ask", {"n": 1})
        assert answer.result["resultType"] == "input_required"
        assert answer.replay is None
    reply = {"requestState": "state-1", "inputResponses": {"sure": {"action": "accept"}}}
    assert (await peer.call("ask", {"n": 1}, **reply)).text == "receipt 1"
    again = await peer.call("ask", {"n": 1}, **reply)
    assert again.text == "receipt 1"
    assert again.replay
    assert len(odd.effects()) == 1


async def test_the_same_call_with_other_input_is_another_action(odd: Odd) -> None:
    """What a person chose in the first run is not the answer to what they chose in the second."""
    peer = await odd.wrapped()
    receipts = []
    for seat in ("12A", "14F"):
        reply = {"requestState": "state-1", "inputResponses": {"seat": {"content": seat}}}
        receipts.append(await peer.call("ask", {"n": 1}, **reply))
    assert [answer.text for answer in receipts] == ["receipt 1", "receipt 2"]
    assert [answer.replay for answer in receipts] == [None, None]


async def test_two_rounds_of_one_call_at_once_are_not_taken_for_each_other(odd: Odd) -> None:
    """The first round of a second run, while the last round of the first one is under way."""
    peer = await odd.wrapped(*AT_ONCE)
    reply = {"requestState": "state-1", "inputResponses": {"sure": {"action": "accept"}}}
    last = peer.call("ask", {"gate": "go"}, **reply)
    first = peer.call("ask", {"gate": "go"})
    await peer.ask("ping")
    odd.open_gate("go")
    assert (await last).text == "receipt 1"
    assert (await first).result.get("resultType") == "input_required"


async def test_a_call_that_goes_on_elsewhere_is_neither_done_nor_free(odd: Odd) -> None:
    peer = await odd.wrapped()
    assert (await peer.call("task")).result["resultType"] == "task"
    assert (await peer.call("task")).code == "outcome_unknown"
    assert len(odd.effects()) == 1


# --- tools that only read -------------------------------------------------------------------------


async def test_tools_that_only_read_are_never_answered_from_the_ledger(odd: Odd) -> None:
    peer = await odd.wrapped()
    assert [(await peer.call("look")).text for _ in range(3)] == ["look 1", "look 2", "look 3"]
    await peer.close()
    assert "passed=3" in peer.complaint()


async def test_on_demand_tools_that_only_read_are_fenced_too(odd: Odd) -> None:
    peer = await odd.wrapped("--fence-all")
    assert [(await peer.call("look")).text for _ in range(3)] == ["look 1"] * 3


@pytest.mark.parametrize("flags", [(), ("pages",)], ids=["one page", "two pages"])
async def test_the_server_is_asked_when_the_client_never_looked(
    odd: Odd, flags: tuple[str, ...]
) -> None:
    peer = await odd.wrapped(flags=flags, greet=False)
    await peer.hello(listing=False)
    answers = await asyncio.gather(*(peer.call("look") for _ in range(5)))
    assert len({answer.text for answer in answers}) == 5
    charged = await asyncio.gather(*(peer.call("charge") for _ in range(5)))
    assert len(fresh(list(charged))) == 1
    asked = [line for line in odd.heard() if b"tools/list" in line]
    assert len(asked) == 1 + len(flags)
    ids = {json.dumps(json.loads(line)["id"]) for line in asked}
    assert not [each for each in peer.messages() if json.dumps(each.get("id")) in ids]


async def test_a_first_page_alone_is_not_taken_for_the_whole_listing(odd: Odd) -> None:
    peer = await odd.wrapped(flags=["pages"], greet=False)
    await peer.hello(listing=True)
    assert [(await peer.call("look")).text for _ in range(2)] == ["look 1", "look 2"]


async def test_a_tool_that_no_longer_only_reads_is_fenced(odd: Odd) -> None:
    peer = await odd.wrapped()
    assert [(await peer.call("peek")).text for _ in range(2)] == ["look 1", "look 2"]
    await peer.call("grow")
    assert [(await peer.call("peek")).text for _ in range(2)] == ["look 3", "look 3"]


# --- the policy -----------------------------------------------------------------------------------


def policy(odd: Odd, text: str) -> list[str]:
    path = odd.folder / "policy.toml"
    path.write_text(text)
    return ["--policy", str(path)]


async def test_a_policy_says_pass_and_fence(odd: Odd) -> None:
    text = "[tools.charge]\nfence = false\n[tools.look]\nfence = true\n"
    peer = await odd.wrapped(*policy(odd, text))
    assert [(await peer.call("charge")).text for _ in range(2)] == ["receipt 1", "receipt 2"]
    assert [(await peer.call("look")).text for _ in range(2)] == ["look 1", "look 1"]


async def test_a_policy_from_the_environment(odd: Odd) -> None:
    _, path = policy(odd, "[defaults]\nfence = false\n")
    peer = await odd.wrapped(EFFECTFENCE_POLICY=path)
    assert [(await peer.call("charge")).text for _ in range(2)] == ["receipt 1", "receipt 2"]


async def test_arguments_that_are_ignored_make_no_other_action(odd: Odd) -> None:
    """Case 2: a changed token is the same action, a changed amount is another one."""
    peer = await odd.wrapped(*policy(odd, '[tools.charge]\nignore = ["token", "card.nonce"]\n'))
    first = {"cents": 10, "token": "t1", "card": {"nonce": 1, "last4": 4242}}
    retry = {"cents": 10, "token": "t2", "card": {"nonce": 2, "last4": 4242}}
    other = {"cents": 11, "token": "t2", "card": {"nonce": 2, "last4": 4242}}
    assert (await peer.call("charge", first)).replay is None
    assert (await peer.call("charge", retry)).replay
    assert (await peer.call("charge", other)).replay is None
    assert odd.effects() == [first, other]


async def test_a_secret_is_passed_on_and_written_nowhere(odd: Odd) -> None:
    secret = "hunter2-" + "s" * 20
    peer = await odd.wrapped(
        *policy(odd, '[tools.charge]\nsecret = ["card.token"]\n'), "--env", f"PIN={secret}"
    )
    for n in (1, 2):
        arguments = {"cents": 10, "card": {"token": f"{secret}-{n}"}}
        answer = await peer.call("charge", arguments)
    assert answer.replay
    assert odd.effects() == [{"cents": 10, "card": {"token": f"{secret}-1"}}]
    await peer.close()
    assert secret not in peer.complaint()
    for path in odd.ledger.parent.iterdir():
        assert secret.encode() not in path.read_bytes(), path
        assert secret not in path.name


async def test_the_arguments_that_identify_an_action(odd: Odd) -> None:
    """Same order: the same action. With another amount it is a conflict, never the old receipt."""
    peer = await odd.wrapped(*policy(odd, '[tools.charge]\nidentity = ["order.id"]\n'))
    assert not (await peer.call("charge", {"order": {"id": 1}, "cents": 10})).is_error
    assert (await peer.call("charge", {"order": {"id": 1}, "cents": 10})).replay
    assert (await peer.call("charge", {"order": {"id": 1}, "cents": 99})).code == "intent_conflict"
    assert not (await peer.call("charge", {"order": {"id": 2}, "cents": 10})).is_error
    assert len(odd.effects()) == 2


async def test_calls_without_the_identifying_argument_stay_apart(odd: Odd) -> None:
    peer = await odd.wrapped(*policy(odd, '[tools.charge]\nidentity = ["order"]\n'))
    for cents in (10, 20):
        assert (await peer.call("charge", {"cents": cents})).code is None
    assert len(odd.effects()) == 2


async def test_a_domain_of_the_policys_own(odd: Odd) -> None:
    peer = await odd.wrapped(*policy(odd, '[tools.charge]\ndomain = "order:{order_id}"\n'))
    await peer.call("charge", {"order_id": "o1"})
    lacking = await peer.call("charge", {"cents": 1})
    assert lacking.refused["ran"] is False
    assert "order_id" in lacking.text
    assert b"order:o1" in odd.ledger.read_bytes()
    assert len(odd.effects()) == 1


async def test_a_result_is_kept_as_long_as_the_policy_says(odd: Odd) -> None:
    peer = await odd.wrapped(*policy(odd, "[tools.charge]\nresult_ttl = 0.2\n"))
    assert (await peer.call("charge")).text == "receipt 1"
    while (answer := await peer.call("charge")).replay:
        assert answer.text == "receipt 1"
    assert answer.text == "receipt 2"
    assert (await peer.call("progress")).replay is None
    assert (await peer.call("progress")).replay


async def test_a_lifetime_for_ever(odd: Odd) -> None:
    text = '[tools.charge]\nresult_ttl = "forever"\n'
    peer = await odd.wrapped(*policy(odd, text), EFFECTFENCE_RESULT_TTL_SECS="0.01")
    await peer.call("charge")
    await peer.call("progress")
    while (await peer.call("progress")).replay:
        pass
    assert (await peer.call("charge")).replay


async def test_a_wait_of_the_policys_own(odd: Odd) -> None:
    peer = await odd.wrapped(*policy(odd, "[tools.slow]\nwait_seconds = 0\n"))
    first = peer.call("slow", {"gate": "go"})
    await odd.running()
    assert (await peer.call("slow", {"gate": "go"})).code == "intent_in_flight"
    odd.open_gate("go")
    await first


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fence = ", "TOML"),
        ("[tool.charge]\nfence = true\n", "tool"),
        ("[tools.charge]\nfense = true\n", "fense"),
        ('[tools.charge]\nfence = "yes"\n', "tools.charge.fence"),
        ('[tools.charge]\nignore = "token"\n', "ignore"),
        ("[tools.charge]\nresult_ttl = 0\n", "result_ttl"),
        ("[tools.charge]\nresult_ttl = nan\n", "result_ttl"),
        ("[tools.charge]\nwait_seconds = -1\n", "wait_seconds"),
        ('[tools.charge]\non_error = "retry"\n', "on_error"),
        ('[tools.charge]\ndomain = "order:{"\n', "domain"),
        ("tools = 3\n", "tools"),
    ],
)
async def test_a_policy_with_a_mistake_is_named_and_nothing_starts(
    odd: Odd, text: str, named: str
) -> None:
    peer = await odd.wrapped(*policy(odd, text), greet=False)
    assert await peer.ended() == 2
    (sentence,) = peer.complaint().splitlines()
    assert named in sentence
    assert odd.heard() == []


async def test_a_policy_that_is_not_there_is_wrong_use(odd: Odd) -> None:
    peer = await odd.wrapped("--policy", str(odd.folder / "none.toml"), greet=False)
    assert await peer.ended() == 2
    assert "none.toml" in peer.complaint()


# --- observing ------------------------------------------------------------------------------------


async def test_observing_stops_nothing_and_says_what_it_would_have_stopped(odd: Odd) -> None:
    peer = await odd.wrapped("--observe")
    answers = [await peer.call("charge", {"order": 1}) for _ in range(3)]
    assert [answer.text for answer in answers] == ["receipt 1", "receipt 2", "receipt 3"]
    assert [answer.replay for answer in answers] == [None] * 3
    both = [peer.call("slow", {"gate": "go"}) for _ in range(2)]
    await odd.running(5)
    odd.open_gate("go")
    await asyncio.gather(*both)
    await peer.close()
    assert "would have stopped 3 (charge 2, slow 1)" in peer.complaint()
    assert not odd.ledger.exists()
    (ledger,) = (odd.folder / "state" / "effectfence").glob("*.jsonl")
    assert ledger.name.startswith("observe-")


async def test_what_was_observed_is_no_reason_to_stop_anything_later(odd: Odd) -> None:
    watching = await odd.wrapped("--observe", ledger="")
    await watching.call("charge", {"order": 1})
    await watching.close()
    enforcing = await odd.wrapped(ledger="")
    assert (await enforcing.call("charge", {"order": 1})).replay is None
    assert (await enforcing.call("charge", {"order": 1})).replay


async def test_observing_shows_calls_that_differ_in_one_place(odd: Odd) -> None:
    peer = await odd.wrapped("--observe")
    await peer.call("charge", {"order": 1, "memo": "first try"})
    await peer.call("charge", {"order": 1, "memo": "second try"})
    await peer.says("near-duplicate")
    await peer.call("charge", {"order": 2, "memo": "other"})
    await peer.close()
    (line,) = [each for each in peer.complaint().splitlines() if "near-duplicate" in each]
    assert "/memo" in line
    assert "first try" not in line
    assert "would have stopped 0" in peer.complaint()
    assert len(odd.effects()) == 3


async def test_observing_passes_cancellation_on(odd: Odd) -> None:
    peer = await odd.wrapped("--observe")
    peer.call("slow", {"gate": "go"}, id="slow")
    await odd.running()
    peer.notify("notifications/cancelled", {"requestId": "slow"})
    assert json.loads((await peer.call("seen")).text) == ["slow"]
    odd.open_gate("go")


# --- the ledger -----------------------------------------------------------------------------------


async def test_without_a_word_there_is_one_ledger_for_each_command(odd: Odd) -> None:
    """The same command in the same folder shares it; another folder, another argument or another
    environment that was asked for has its own. No name gives anything away."""
    elsewhere = odd.folder / "elsewhere"
    elsewhere.mkdir()
    answers = []
    for options, flags, cwd in [
        ((), ("key=hunter2",), odd.folder),
        ((), ("key=hunter2",), odd.folder),
        ((), ("key=hunter3",), odd.folder),
        (("--env", "TENANT=a"), ("key=hunter2",), odd.folder),
        (("--env", "TENANT=b"), ("key=hunter2",), odd.folder),
        (("--env", "TENANT=b"), ("key=hunter2",), odd.folder),
        ((), ("key=hunter2",), elsewhere),
    ]:
        command = [*EFFECTFENCE, "wrap", *options, "--", *odd.command(*flags)]
        peer = await Peer.start(command, env=odd.env, cwd=cwd)
        odd.peers.append(peer)
        await peer.hello()
        answers.append(await peer.call("charge", {"n": 1}))
        await peer.close()
    replayed = [answer.replay is not None for answer in answers]
    assert replayed == [False, True, False, False, False, True, False]
    names = [path.name for path in (odd.folder / "state" / "effectfence").iterdir()]
    assert len([name for name in names if name.endswith(".jsonl")]) == 5
    assert not [name for name in names if "hunter" in name or "TENANT" in name]


async def test_two_servers_on_one_named_ledger_stay_apart(odd: Odd) -> None:
    one, other = await odd.wrapped(), await odd.wrapped(flags=["another"])
    assert [(await peer.call("charge")).replay for peer in (one, other)] == [None, None]
    assert len(odd.effects()) == 2


async def test_two_commands_that_name_one_scope_share_their_intents(odd: Odd) -> None:
    one = await odd.wrapped("--scope", "bank")
    other = await odd.wrapped("--scope", "bank", flags=["another"])
    await one.call("charge")
    assert (await other.call("charge")).replay
    assert len(odd.effects()) == 1


async def test_a_ledger_in_memory_lasts_as_long_as_the_process(odd: Odd) -> None:
    for expected in (1, 2):
        peer = await odd.wrapped(ledger="", EFFECTFENCE_LEDGER="memory:")
        await peer.call("charge")
        assert (await peer.call("charge")).replay
        await peer.close()
        assert len(odd.effects()) == expected
    assert not (odd.folder / "state").exists()


async def test_a_named_value_of_the_environment_reaches_the_server(odd: Odd) -> None:
    odd.env["TENANT"] = "from outside"
    show = ["sh", "-c", 'echo "$TENANT" "$OTHER" >&2; cat >/dev/null']
    peer = await odd.wrapped("--env", "TENANT", "--env", "OTHER=x=y", command=show, greet=False)
    await peer.says("from outside x=y")
    await peer.close()


@pytest.mark.parametrize("damage", ["a folder", "not a ledger", "read-only folder"])
async def test_when_the_ledger_cannot_be_used_nothing_fenced_runs(odd: Odd, damage: str) -> None:
    """Fail closed; what is not fenced passes, and once mended the next call runs."""
    odd.ledger.parent.mkdir(mode=0o700)
    if damage == "a folder":
        odd.ledger.mkdir()
    elif damage == "not a ledger":
        odd.ledger.write_text("hello\n")
        odd.ledger.chmod(0o600)
    else:
        odd.ledger.symlink_to("/proc/version")
    peer = await odd.wrapped()
    told = await peer.call("charge")
    assert told.refused["ran"] is False
    assert odd.effects() == []
    assert (await peer.call("look")).text == "look 1"
    if damage == "a folder":
        odd.ledger.rmdir()
    else:
        odd.ledger.unlink()
    assert (await peer.call("charge")).text == "receipt 1"


async def test_statistics_while_it_runs_and_at_its_end(odd: Odd) -> None:
    peer = await odd.wrapped()
    for _ in range(3):
        await peer.call("charge")
    await peer.call("look")
    peer.signal(signal.SIGUSR1)
    line = "admitted=1 replayed=2 refused(stale=0 race=0 in-flight=0 unknown=0 conflict=0 causal=0)"
    await peer.says(f"{line} total=3 prevented=2 passed=1")
    (stats,) = odd.ledger_said("stats")
    assert stats
    await peer.call("charge")
    await peer.close()
    assert "admitted=1 replayed=3" in peer.complaint().splitlines()[-1]


async def test_a_client_that_sends_its_calls_and_leaves_gets_every_answer(odd: Odd) -> None:
    """As a shell pipeline does: all in one write, and then the end of input."""
    peer = await odd.wrapped(greet=False)
    greeted = peer.ask("initialize", {"protocolVersion": "2025-11-25"})
    answers = [peer.call("charge", {"n": n % 5}) for n in range(20)]
    peer.end_input()
    assert len(fresh(list(await asyncio.gather(*answers)))) == 5
    await greeted
    assert await peer.ended() == 0
    assert len(odd.effects()) == 5
