"""Reconcilers: what is asked, when, whose word is taken, and what is never done."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from effectfence import (
    CommitConflict,
    CommitStale,
    DidNotHappen,
    EffectFence,
    FenceConfig,
    Fresh,
    Happened,
    LeaseLost,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    ReadSetEntry,
    Reconciled,
    Replay,
    StillUnknown,
    UnknownEffect,
    reconcile,
)
from effectfence.reconcile import Reconcilers
from effectfence.stores.contract import Applied, Change, View
from effectfence.stores.memory import MemoryStore
from tests.conftest import Clock, OpenFence, asked, claimed, until, words_of

WORD = {"reason": "found in the provider's log", "by": "ops@example.org"}
RECEIPT = {"id": "ch_1", "amount": 4900}


@pytest.fixture
async def fence(fence: EffectFence, clock: Clock) -> EffectFence:
    """On a clock that stands still, pauses too, and without jitter."""
    return steady(fence, clock)


def steady(fence: EffectFence, clock: Clock) -> EffectFence:
    fence._shared.reconcilers = Reconcilers(clock, lambda: 1.0)
    return fence


class Provider:
    """A reconciler that answers what the test says, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[UnknownEffect] = []

    async def __call__(self, effect: UnknownEffect) -> Any:
        self.asked.append(effect)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(effect) if callable(answer) else answer


class Slow(Provider):
    """One that answers when the test says so."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(*answers)
        self.may_answer = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, effect: UnknownEffect) -> Any:
        self.asked.append(effect)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def asks(fence: EffectFence, provider: Any, tool: str = "charge", **limits: Any) -> Any:
    return fence.reconciler(tool, **{"name": "bank", "grace_seconds": 60.0, **limits})(provider)


async def unknown(fence: EffectFence, intent: str = "charge:o1", **fields: Any) -> PreparedEffect:
    ticket = await claimed(fence, intent=intent, **fields)
    await fence.abort(ticket, "socket closed")
    return ticket


async def state(fence: EffectFence, intent: str = "charge:o1") -> str | None:
    record = await fence.lookup(intent)
    return None if record is None else record.state


async def spoken(fence: EffectFence, intent: str = "charge:o1") -> list[tuple[str, str]]:
    return [(word["word"], word["by"]) for word in await words_of(fence, intent)]


# --- the three answers ----------------------------------------------------------------------------


async def test_what_happened_is_settled_and_its_duplicates_replay(fence: EffectFence) -> None:
    ticket = await unknown(fence)
    bank = asks(fence, Provider(Happened(RECEIPT, "charge ch_1")))
    assert await fence.reconcile() == Reconciled(settled=1)
    admission = await fence.prepare(asked())
    assert isinstance(admission, Replay)
    assert admission.cert.verify()
    assert admission.cert.result == RECEIPT
    (word,) = await words_of(fence, "charge:o1")
    assert (word["word"], word["by"], word["reason"], word["forced"]) == (
        "settle",
        "reconciler:bank",
        "charge ch_1",
        False,
    )
    (effect,) = bank.asked
    assert effect.idempotency_key == ticket.idempotency_key
    assert effect.started_at == ticket.started_ms / 1000
    assert (effect.intent, effect.domain, effect.tool, effect.agent, effect.args) == (
        "charge:o1",
        "order:o1",
        "charge",
        "billing",
        {"amount": 4900},
    )
    assert (effect.attempt, effect.reason, effect.state) == (1, "socket closed", "unknown")
    assert (effect.scope, effect.unknown_seconds) == ((), 0.0)


async def test_what_did_not_happen_is_cleared_after_the_grace_and_runs_once(
    fence: EffectFence, clock: Clock
) -> None:
    first = await unknown(fence)
    asks(fence, Provider(DidNotHappen("no such charge")))
    clock.advance(60)
    assert await fence.reconcile() == Reconciled(cleared=1)
    second = await claimed(fence)
    assert (second.attempt, second.idempotency_key) == (2, first.idempotency_key)
    (word,) = await words_of(fence, "charge:o1")
    assert (word["word"], word["by"], word["reason"], word["forced"]) == (
        "clear",
        "reconciler:bank",
        "no such charge",
        False,
    )


async def test_still_unknown_changes_nothing(fence: EffectFence, clock: Clock) -> None:
    await unknown(fence)
    asks(fence, Provider(StillUnknown("they are down")))
    clock.advance(3600)
    report = await fence.reconcile()
    assert (report, report.left) == (Reconciled(still_unknown=1), 1)
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked())
    assert await spoken(fence) == []


async def test_a_second_round_finds_nothing_to_ask(fence: EffectFence) -> None:
    await unknown(fence)
    bank = asks(fence, Provider(Happened(RECEIPT)))
    await fence.reconcile()
    assert await fence.reconcile() == Reconciled()
    assert len(bank.asked) == 1
    assert len(await words_of(fence, "charge:o1")) == 1


async def test_a_report_is_one_line(fence: EffectFence) -> None:
    assert Reconciled(settled=2, failed=1).log_line() == (
        "effectfence reconciled: settled=2 cleared=0 too-early=0 still-unknown=0 failed=1 "
        "overtaken=0 waiting=0 no-reconciler=0 left=1"
    )


# --- the grace ------------------------------------------------------------------------------------


async def test_did_not_happen_is_too_early_within_the_grace(
    fence: EffectFence, clock: Clock
) -> None:
    """The request may still be on its way: the provider then finds it after all."""
    await unknown(fence)
    bank = asks(fence, Provider(DidNotHappen("not yet"), Happened(RECEIPT)))
    clock.advance(59)
    assert await fence.reconcile() == Reconciled(too_early=1)
    assert await state(fence) == "unknown"
    assert await fence.reconcile() == Reconciled(waiting=1), "it is not asked all the time"
    clock.advance(1)
    assert await fence.reconcile() == Reconciled(settled=1)
    assert [effect.unknown_seconds for effect in bank.asked] == [59, 60]


async def test_the_grace_is_judged_by_when_it_was_asked(fence: EffectFence, clock: Clock) -> None:
    """An answer that took long is about the time when it was asked for."""
    await unknown(fence)

    async def slowly(_: UnknownEffect) -> DidNotHappen:
        clock.advance(3600)
        return DidNotHappen()

    asks(fence, Provider(slowly))
    assert await fence.reconcile() == Reconciled(too_early=1)
    assert await state(fence) == "unknown"


async def test_the_grace_of_a_lease_that_ran_out_begins_at_its_end(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = steady(await open_fence(lease_ttl=30), clock)
    await claimed(fence)
    bank = asks(fence, Provider(DidNotHappen()))
    clock.advance(30 + 59)
    assert await fence.reconcile() == Reconciled(too_early=1)
    clock.advance(1)
    assert await fence.reconcile() == Reconciled(cleared=1)
    assert [(effect.state, effect.unknown_seconds) for effect in bank.asked] == [
        ("expired", 59),
        ("expired", 60),
    ]


async def test_the_grace_of_a_dead_process_begins_when_it_is_found_dead(tmp_path: Path) -> None:
    """When it died is not known; it may have sent its request just before."""
    ledger = tmp_path / "effects.jsonl"
    child = (
        "import asyncio, os, sys\n"
        "from effectfence import EffectFence, EffectRequest\n"
        "async def main():\n"
        "    fence = await EffectFence.open(sys.argv[1])\n"
        "    await fence.prepare(EffectRequest(\n"
        "        intent='i', domain='d', tool='charge', agent='a'))\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", child, ledger])
    assert ended.returncode == -9
    clock = Clock()
    async with EffectFence.open(ledger) as fence:
        bank = asks(steady(fence, clock), Provider(DidNotHappen()), grace_seconds=1e-6)
        assert await fence.reconcile() == Reconciled(too_early=1)
        clock.advance(1)
        assert await fence.reconcile() == Reconciled(cleared=1)
        assert (bank.asked[0].unknown_seconds, bank.asked[0].reason) == (0.0, "its process died")
        assert bank.asked[1].unknown_seconds > 0


async def test_who_reported_that_it_ran_is_not_contradicted(
    fence: EffectFence, clock: Clock
) -> None:
    ticket = await claimed(fence, read_set=(ReadSetEntry(domain="stock", seq=0),))
    await fence.reserve("stock", 0)
    with pytest.raises(CommitStale):
        await fence.commit(ticket, RECEIPT)
    asks(fence, Provider(DidNotHappen(), Happened(RECEIPT)))
    clock.advance(3600)
    assert await fence.reconcile() == Reconciled(still_unknown=1)
    assert await state(fence) == "unknown"
    clock.advance(60)
    assert await fence.reconcile() == Reconciled(settled=1)


# --- no answer is no word -------------------------------------------------------------------------


async def _raises(_: UnknownEffect) -> Any:
    raise ConnectionError("the provider is down")


async def _is_cancelled(_: UnknownEffect) -> Any:
    raise asyncio.CancelledError


async def _hangs(_: UnknownEffect) -> Any:
    await asyncio.Event().wait()


async def _answers_too_late(_: UnknownEffect) -> Any:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return DidNotHappen("it was about to say")


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def _raises_what_has_no_text(_: UnknownEffect) -> Any:
    raise _Unspeakable


async def _gives_no_reason(_: UnknownEffect) -> Any:
    return DidNotHappen(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_raises, "ConnectionError: the provider is down"),
        (_raises_what_has_no_text, "_Unspeakable"),
        (_is_cancelled, "it was cancelled"),
        (_hangs, "no answer within 0.01 s"),
        (_answers_too_late, "no answer within 0.01 s"),
        (_gives_no_reason, "a reason is a string"),
        (None, "it answered with NoneType"),
        (False, "it answered with bool"),
        ("DidNotHappen", "it answered with str"),
        ({"id": "ch_1"}, "it answered with dict"),
        (LeaseLost(intent="x", reason="y"), "it answered with LeaseLost"),
        (Happened({1, 2}), "its result cannot be recorded"),
        (Happened(object()), "its result cannot be recorded"),
        (Happened(float("nan")), "its result cannot be recorded"),
        (Happened("x" * 2000), "result has more than 1000 bytes"),
    ],
)
async def test_no_answer_leaves_it_unknown_is_logged_and_backed_off(
    open_fence: OpenFence,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    answer: Any,
    said: str,
) -> None:
    fence = steady(await open_fence(max_record_bytes=1000), clock)
    await unknown(fence)
    clock.advance(3600)
    bank = asks(fence, Provider(answer), timeout_seconds=0.01)
    assert await fence.reconcile() == Reconciled(failed=1)
    assert await state(fence) == "unknown"
    assert await spoken(fence) == []
    (line,) = [
        r for r in caplog.records if r.levelno == logging.WARNING and r.module == "reconcile"
    ]
    assert "reconciler:bank: 'charge:o1' is still unknown" in line.getMessage()
    assert said in line.getMessage()
    assert await fence.reconcile() == Reconciled(waiting=1)
    clock.advance(60)
    assert await fence.reconcile() == Reconciled(failed=1)
    assert len(bank.asked) == 2


class _Odd(str):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_answer_that_breaks_what_reads_it_is_not_the_others_trouble(
    fence: EffectFence, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await unknown(fence, "odd")
    clock.advance(3600)
    await unknown(fence, "even")
    asks(fence, Provider(DidNotHappen(_Odd("x")), Happened(RECEIPT)), max_concurrent=1)
    assert await fence.reconcile() == Reconciled(failed=1, settled=1)
    assert await state(fence, "odd") == "unknown"
    assert "is still unknown" in caplog.text


async def test_a_function_that_gives_nothing_to_wait_for_fails_like_any_other(
    fence: EffectFence,
) -> None:
    await unknown(fence)

    class Odd:
        async def __call__(self, effect: UnknownEffect) -> Any:
            raise AssertionError("replaced")

    odd = asks(fence, Odd())
    type(odd).__call__ = lambda self, effect: Happened(1)
    assert await fence.reconcile() == Reconciled(failed=1)
    assert await state(fence) == "unknown"


# --- whose word is taken --------------------------------------------------------------------------


async def test_one_whose_holder_may_be_alive_is_never_asked_about(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = steady(await open_fence(lease_ttl=30), clock)
    ticket = await claimed(fence)
    await fence.commit(await claimed(fence, intent="done"), 1)
    await unknown(fence, "cleared")
    await fence.clear("cleared", **WORD)
    bank = asks(fence, Provider(Happened(RECEIPT)))
    clock.advance(29)
    assert await fence.reconcile() == Reconciled()
    await fence.heartbeat(ticket)
    clock.advance(29)
    assert await fence.reconcile() == Reconciled()
    assert bank.asked == []
    clock.advance(1)
    assert await fence.reconcile() == Reconciled(settled=1)


async def overtaken(
    fence: EffectFence, clock: Clock, answer: Any, meanwhile: Callable[[], Awaitable[object]]
) -> None:
    """Ask, let something happen, then let the answer come."""
    bank = asks(fence, Slow(answer))
    clock.advance(3600)
    asking = asyncio.create_task(fence.reconcile())
    await until(lambda: bank.asked)
    await meanwhile()
    bank.may_answer.set()
    assert await asking == Reconciled(overtaken=1)
    assert not [by for _, by in await spoken(fence) if by.startswith("reconciler")]


ANSWERS = pytest.mark.parametrize("answer", [Happened(RECEIPT), DidNotHappen()], ids=type)


@ANSWERS
async def test_the_true_holder_who_commits_meanwhile_is_right(
    fence: EffectFence, clock: Clock, answer: Any
) -> None:
    ticket = await unknown(fence)
    await overtaken(fence, clock, answer, lambda: fence.commit(ticket, "mine"))
    admission = await fence.prepare(asked())
    assert isinstance(admission, Replay)
    assert admission.cert.result == "mine"


@ANSWERS
async def test_the_true_holder_who_releases_meanwhile_is_right(
    fence: EffectFence, clock: Clock, answer: Any
) -> None:
    ticket = await unknown(fence)
    await overtaken(fence, clock, answer, lambda: fence.release(ticket, "refused"))
    assert (await claimed(fence)).attempt == 1


@ANSWERS
async def test_a_holder_who_comes_back_to_life_meanwhile_is_left_alone(
    open_fence: OpenFence, clock: Clock, answer: Any
) -> None:
    fence = steady(await open_fence(lease_ttl=30), clock)
    ticket = await claimed(fence)
    await overtaken(fence, clock, answer, lambda: fence.heartbeat(ticket))
    assert await state(fence) == "in_flight"


@ANSWERS
async def test_a_holder_who_lived_meanwhile_may_have_sent_it_since(
    open_fence: OpenFence, clock: Clock, answer: Any
) -> None:
    """Renewed, and past its lease again: the answer is older than the end of the lease."""
    fence = steady(await open_fence(lease_ttl=30), clock)
    ticket = await claimed(fence)

    async def lives_and_dies() -> None:
        await fence.heartbeat(ticket)
        clock.advance(30)

    await overtaken(fence, clock, answer, lives_and_dies)
    assert await state(fence) == "expired"


@ANSWERS
async def test_an_operator_who_speaks_meanwhile_is_right(
    fence: EffectFence, clock: Clock, answer: Any
) -> None:
    await unknown(fence)
    await overtaken(fence, clock, answer, lambda: fence.clear("charge:o1", **WORD))
    assert await spoken(fence) == [("clear", "ops@example.org")]
    assert await state(fence) == "cleared"


@ANSWERS
async def test_an_answer_about_one_attempt_says_nothing_about_the_next(
    fence: EffectFence, clock: Clock, answer: Any
) -> None:
    """Cleared, run anew and unknown again, with the very same words: another attempt, though."""
    await unknown(fence)

    async def again() -> None:
        await fence.clear("charge:o1", **WORD)
        await unknown(fence)
        clock.advance(3600)

    await overtaken(fence, clock, answer, again)
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert (record.state, record.attempt) == ("unknown", 2)


async def test_another_action_under_a_cleared_intent_is_asked_about_as_what_it_is(
    fence: EffectFence, clock: Clock
) -> None:
    first = await unknown(fence)
    bank = asks(fence, Provider(StillUnknown()))
    await fence.reconcile()
    await fence.clear("charge:o1", **WORD)
    second = await unknown(fence, args={"amount": 1})
    await fence.reconcile()
    assert [(effect.args, effect.idempotency_key) for effect in bank.asked] == [
        ({"amount": 4900}, first.idempotency_key),
        ({"amount": 1}, second.idempotency_key),
    ], "a new attempt does not inherit the pause of the old one"


async def test_a_holder_who_comes_after_the_word_is_answered_and_never_lost(
    fence: EffectFence, clock: Clock
) -> None:
    settled, contradicted = await unknown(fence), await unknown(fence, "two")
    cleared = await unknown(fence, "three", tool="refund")
    asks(fence, Provider(Happened(RECEIPT)))
    asks(fence, Provider(DidNotHappen()), "refund")
    clock.advance(60)
    assert await fence.reconcile() == Reconciled(settled=2, cleared=1)
    assert (await fence.commit(settled, RECEIPT)).result == RECEIPT
    with pytest.raises(CommitConflict):
        await fence.commit(contradicted, "another")
    with pytest.raises(LeaseLost, match="cleared"):
        await fence.commit(cleared, "it ran after all")
    assert fence.stats().late_commits == 1
    assert ("late commit", "billing") in await spoken(fence, "three")


@pytest.mark.parametrize(
    "words", [(Happened(RECEIPT), Happened(RECEIPT)), (Happened(RECEIPT), DidNotHappen())]
)
async def test_two_who_reconcile_at_once_say_one_word(
    open_fence: OpenFence, clock: Clock, words: tuple[Any, Any]
) -> None:
    fences = [steady(await open_fence(), clock) for _ in words]
    await unknown(fences[0])
    clock.advance(3600)
    banks = [asks(fence, Slow(word)) for fence, word in zip(fences, words, strict=True)]
    asking = [asyncio.create_task(fence.reconcile()) for fence in fences]
    await until(lambda: all(bank.asked for bank in banks))
    for bank in banks:
        bank.may_answer.set()
    reports = await asyncio.gather(*asking)
    assert sum(report.settled + report.cleared for report in reports) == 1
    assert sum(report.overtaken for report in reports) == 1
    assert len(await spoken(fences[0])) == 1


async def test_two_rounds_at_once_in_one_process_ask_once(fence: EffectFence) -> None:
    await unknown(fence)
    bank = asks(fence, Slow(Happened(RECEIPT)))
    first = asyncio.create_task(fence.reconcile())
    await until(lambda: bank.asked)
    assert await fence.reconcile() == Reconciled(waiting=1)
    bank.may_answer.set()
    assert await first == Reconciled(settled=1)
    assert len(bank.asked) == 1


# --- what is asked --------------------------------------------------------------------------------


async def test_what_the_request_ignored_is_not_in_the_question(fence: EffectFence) -> None:
    await unknown(fence, args={"amount": 1, "card": {"token": "t1"}}, ignore=("card.token",))
    bank = asks(fence, Provider(StillUnknown()))
    await fence.reconcile()
    (effect,) = bank.asked
    assert effect.args == {"amount": 1, "card": {}}
    with pytest.raises(ValueError, match="frozen"):
        effect.intent = "other"


async def test_a_reconciler_may_not_change_what_is_settled(fence: EffectFence) -> None:
    await unknown(fence)

    async def meddles(effect: UnknownEffect) -> Happened:
        effect.args["amount"] = 0
        return Happened(RECEIPT)

    asks(fence, meddles)
    await fence.reconcile()
    admission = await fence.prepare(asked())
    assert isinstance(admission, Replay)
    assert admission.cert.args == {"amount": 4900}


async def test_a_tool_without_a_reconciler_is_left_alone_and_said_once(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    await unknown(fence, "one", tool="refund")
    await unknown(fence, "two", tool="refund")
    asks(fence, Provider(Happened(1)))
    for _ in range(3):
        assert await fence.reconcile() == Reconciled(no_reconciler=2)
    assert await state(fence, "one") == "unknown"
    (line,) = [r.getMessage() for r in caplog.records if "no reconciler" in r.getMessage()]
    assert "'refund'" in line


async def test_the_nearest_reconciler_is_asked(fence: EffectFence) -> None:
    tenant = fence.scoped("a/b")
    everything = asks(fence, Provider(StillUnknown()), "*", name="everything")
    exact = asks(fence, Provider(StillUnknown()), "POST /refunds", name="exact")
    posts = asks(fence, Provider(StillUnknown()), "POST /*", name="posts")
    theirs = asks(tenant, Provider(StillUnknown()), "POST /*", name="theirs")
    await unknown(fence, "1", tool="POST /charges.json")
    await unknown(fence, "2", tool="POST /refunds")
    await unknown(tenant, "3", tool="POST /refunds")
    await unknown(tenant.scoped("x"), "4", tool="POST /refunds")
    await unknown(fence.scoped("a"), "5", tool="POST-/refunds")
    assert (await fence.reconcile()).still_unknown == 5
    assert [effect.intent for effect in everything.asked] == ["5"]
    assert [effect.intent for effect in exact.asked] == ["2"]
    assert [effect.intent for effect in posts.asked] == ["1"]
    assert sorted((effect.intent, effect.scope) for effect in theirs.asked) == [
        ("3", ("a/b",)),
        ("4", ("a/b", "x")),
    ]


async def test_a_scope_reconciles_its_own_and_what_is_nested_in_it(fence: EffectFence) -> None:
    asks(fence, Provider(Happened(RECEIPT)))
    scopes = [fence, fence.scoped("a"), fence.scoped("a").scoped("b"), fence.scoped("ab")]
    for scope in scopes:
        await unknown(scope)
    assert await scopes[1].reconcile() == Reconciled(settled=2)
    assert [await state(scope) for scope in scopes] == ["unknown", "done", "done", "unknown"]
    assert await fence.reconcile() == Reconciled(settled=2)
    for scope in scopes:
        admission = await scope.prepare(asked())
        assert isinstance(admission, Replay)
        assert (await scope.observe("order:o1")).heads["order:o1"] is not None


# --- limits ---------------------------------------------------------------------------------------


async def test_no_more_questions_at_once_and_in_a_round_than_allowed(
    fence: EffectFence, clock: Clock
) -> None:
    for number in range(9):
        await unknown(fence, f"charge:{number}")
        clock.advance(1)
    now, most = 0, 0

    async def counted(_: UnknownEffect) -> StillUnknown:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now -= 1
        return StillUnknown()

    bank = asks(fence, Provider(counted), max_concurrent=2, max_per_round=4)
    assert await fence.reconcile() == Reconciled(still_unknown=4, waiting=5)
    assert most == 2
    assert {effect.intent for effect in bank.asked} == {f"charge:{n}" for n in range(4)}
    assert await fence.reconcile() == Reconciled(still_unknown=4, waiting=5)
    assert await fence.reconcile() == Reconciled(still_unknown=1, waiting=8)
    assert {effect.intent for effect in bank.asked} == {f"charge:{n}" for n in range(9)}


async def test_ten_thousand_unknown_outcomes_starve_nobody(clock: Clock) -> None:
    fence = steady(EffectFence(store=MemoryStore(clock)), clock)
    for number in range(10_000):
        await unknown(fence, f"charge:{number}")
        clock.advance(0.001)
    await unknown(fence, "refund:1", tool="refund")
    charges = asks(fence, Provider(StillUnknown()), max_per_round=50)
    refunds = asks(fence, Provider(Happened(1)), "refund")
    first = await fence.reconcile()
    assert first == Reconciled(settled=1, still_unknown=50, waiting=9950)
    assert len(refunds.asked) == 1
    clock.advance(3600)  # those of the first round are due again, and behind all others
    for _ in range(3):
        await fence.reconcile()
    reconcilers = fence._shared.reconcilers
    assert [effect.intent for effect in charges.asked] == [f"charge:{n}" for n in range(200)]
    assert len(reconcilers._retries) == 200, "what is kept grows with what was asked"
    for number in range(200):
        await fence.clear(f"charge:{number}", **WORD)
    await fence.reconcile()
    assert len(reconcilers._retries) == 50, "and goes with what is known"
    await fence.aclose()


class Graveyard(MemoryStore):
    """A ledger that knows some holders' processes to be dead, as a file does."""

    dead: frozenset[str] = frozenset()

    async def load(self, keys: Iterable[str]) -> View:
        view = await super().load(keys)
        return View(view.now, view.records, self.dead & set(view.records))

    async def scan(self, label: str) -> AsyncIterator[View]:
        async for view in super().scan(label):
            yield View(view.now, view.records, self.dead & set(view.records))


async def test_a_dead_holders_effect_waits_its_turn_and_no_longer(clock: Clock) -> None:
    """Since when it is unknown is not known; how long nothing moved is."""
    store = Graveyard(clock)
    fence = steady(EffectFence(store=store), clock)
    await claimed(fence, intent="dead")
    store.dead = frozenset({"intent/dead"})
    clock.advance(1)
    for number in range(3):
        await unknown(fence, f"charge:{number}")
    clock.advance(1)
    bank = asks(fence, Provider(StillUnknown()), max_per_round=1)
    assert await fence.reconcile() == Reconciled(still_unknown=1, waiting=3)
    assert [(effect.intent, effect.unknown_seconds) for effect in bank.asked] == [("dead", 0.0)]
    await fence.aclose()


async def test_pauses_double_up_to_a_limit_and_are_jittered() -> None:
    def pauses(chance: float) -> list[float]:
        fence = EffectFence()
        asks(fence, Provider(StillUnknown()), retry_seconds=10.0, max_retry_seconds=60.0)
        (reconciler,) = fence._shared.reconcilers._registered
        return [reconciler.pause(tries, chance) for tries in (1, 2, 3, 4, 5000)]

    assert pauses(1.0) == [10, 20, 40, 60, 60]
    assert pauses(0.0) == [5, 10, 20, 30, 30]


async def test_each_pause_is_longer_and_a_new_attempt_begins_anew(
    fence: EffectFence, clock: Clock
) -> None:
    await unknown(fence)
    bank = asks(fence, Provider(StillUnknown()), retry_seconds=10.0)
    for pause in (10, 20, 40):
        assert (await fence.reconcile()).still_unknown == 1
        clock.advance(pause - 1)
        assert await fence.reconcile() == Reconciled(waiting=1)
        clock.advance(1)
    assert len(bank.asked) == 3


async def test_one_that_cannot_be_cancelled_keeps_its_place(
    fence: EffectFence, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_LET_GO_SECONDS", 0.01)
    end = asyncio.Event()

    async def stubborn(_: UnknownEffect) -> Any:
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue
        return DidNotHappen()

    for intent in ("1", "2"):
        await unknown(fence, intent)
    clock.advance(3600)
    bank = asks(fence, Provider(stubborn), max_concurrent=1, timeout_seconds=0.01)
    assert await fence.reconcile() == Reconciled(failed=1, waiting=1)
    clock.advance(3600)
    assert await fence.reconcile() == Reconciled(waiting=2)
    assert len(bank.asked) == 1
    end.set()
    (reconciler,) = fence._shared.reconcilers._registered
    await until(lambda: reconciler.asking == 0)
    assert (await fence.reconcile()).cleared == 2


# --- the ledger, cancellation, closing ------------------------------------------------------------


class Gated(MemoryStore):
    """A ledger whose writes wait, or fail, when the test says so."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.open = asyncio.Event()
        self.open.set()
        self.writing = 0
        self.fails = False

    async def swap(self, change: Change) -> Applied | View:
        if self.fails:
            raise LedgerUnavailable(ledger=self.name, reason="no space left")
        self.writing += 1
        await self.open.wait()
        return await super().swap(change)


@pytest.fixture
def store(clock: Clock) -> Gated:
    return Gated(clock)


@pytest.fixture
async def gated(store: Gated, clock: Clock) -> EffectFence:
    return steady(EffectFence(FenceConfig(), store=store), clock)


async def test_a_ledger_that_fails_in_the_middle_ends_the_round_and_loses_nothing(
    gated: EffectFence, store: Gated
) -> None:
    for number in range(5):
        await unknown(gated, f"charge:{number}")
    hangs, bank = Slow(Happened(2)), Provider(Happened(RECEIPT))
    await unknown(gated, "refund", tool="refund")
    asks(gated, bank)
    asks(gated, hangs, "refund")
    store.fails = True
    with pytest.raises(LedgerUnavailable, match="no space left"):
        await gated.reconcile()
    store.fails = False
    hangs.may_answer.set()
    assert hangs.cancelled == len(hangs.asked), "a question that was put was let go"
    assert [record async for record in gated.intents("done")] == []
    assert await gated.reconcile() == Reconciled(settled=6)
    await gated.aclose()


async def test_cancelled_a_question_is_let_go(fence: EffectFence) -> None:
    await unknown(fence)
    bank = asks(fence, Slow(Happened(RECEIPT)))
    asking = asyncio.create_task(fence.reconcile())
    await until(lambda: bank.asked)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: bank.cancelled)
    assert await state(fence) == "unknown"
    bank.may_answer.set()
    assert await fence.reconcile() == Reconciled(settled=1), "and asked again"


async def test_cancelled_a_word_is_finished(gated: EffectFence, store: Gated) -> None:
    await unknown(gated)
    asks(gated, Provider(Happened(RECEIPT)))
    store.open.clear()
    before = store.writing
    asking = asyncio.create_task(gated.reconcile())
    await until(lambda: store.writing > before)
    asking.cancel()
    await until(lambda: store.writing > before + 1)
    store.open.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await state(gated) == "done"
    assert await spoken(gated) == [("settle", "reconciler:bank")]
    await gated.aclose()


async def test_a_closing_fence_lets_go_of_questions_at_once(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = steady(await open_fence(), clock)
    await unknown(fence)
    bank = asks(fence, Slow(Happened(RECEIPT)))
    asking = asyncio.create_task(fence.reconcile())
    await until(lambda: bank.asked)
    await fence.aclose(drain_seconds=100)
    assert await asking == Reconciled(waiting=1)
    assert bank.cancelled == 1
    with pytest.raises(LedgerUnavailable, match="clos"):
        await fence.reconcile()


async def test_a_closing_fence_finishes_a_word(gated: EffectFence, store: Gated) -> None:
    await unknown(gated)
    asks(gated, Provider(Happened(RECEIPT)))
    store.open.clear()
    before = store.writing
    asking = asyncio.create_task(gated.reconcile())
    await until(lambda: store.writing > before)
    closing = asyncio.create_task(gated.aclose(drain_seconds=100))
    await until(lambda: gated._shared.closing)
    store.open.set()
    assert await asking == Reconciled(settled=1)
    await closing


async def test_closing_waits_no_longer_than_it_may_for_one_that_cannot_be_cancelled(
    gated: EffectFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_LET_GO_SECONDS", 0.01)
    await unknown(gated)
    end = asyncio.Event()

    async def stubborn(_: UnknownEffect) -> Any:
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue
        return Happened(RECEIPT)

    bank = asks(gated, Provider(stubborn))
    asking = asyncio.create_task(gated.reconcile())
    await until(lambda: bank.asked)
    await gated.aclose(drain_seconds=0.05)
    assert await asking == Reconciled(waiting=1)
    end.set()
    await until(lambda: not gated._shared.custody.owned)


# --- on a schedule --------------------------------------------------------------------------------


async def test_reconciling_asks_at_once_and_again_until_the_block_ends(fence: EffectFence) -> None:
    bank = asks(fence, Provider(Happened(RECEIPT)))
    await unknown(fence, "before")
    async with fence.reconciling(every=0.001):
        await until(lambda: len(bank.asked) == 1)
        await unknown(fence, "meanwhile")
        await until(lambda: len(bank.asked) == 2)
    assert not fence._shared.custody.owned
    await unknown(fence, "after")
    assert len(bank.asked) == 2


async def test_reconciling_ends_with_the_fence(
    open_fence: OpenFence, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fence = steady(await open_fence(), clock)
    async with fence.reconciling(every=3600):
        await fence.aclose(drain_seconds=100)
        assert not fence._shared.custody.owned
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_reconciling_outlives_a_round_that_fails(
    gated: EffectFence, store: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    await unknown(gated)
    asks(gated, Provider(Happened(RECEIPT)))
    caplog.set_level(logging.INFO, "effectfence")
    store.fails = True
    async with gated.reconciling(every=0.001):
        await until(lambda: any("no space left" in r.getMessage() for r in caplog.records))
        store.fails = False
        await until(lambda: "reconciler:bank settled 'charge:o1'" in caplog.text)
    assert await state(gated) == "done"
    await gated.aclose()


async def test_reconciling_is_for_one_use_and_a_fence_that_is_open(fence: EffectFence) -> None:
    once = fence.reconciling()
    async with once:
        pass
    with pytest.raises(RuntimeError, match="entered before"):
        await once.__aenter__()
    await fence.aclose()
    with pytest.raises(LedgerUnavailable):
        await fence.reconciling().__aenter__()


async def test_processes_that_start_together_do_not_ask_together() -> None:
    assert [Reconcilers(chance=lambda c=c: c).pause(60) for c in (0.0, 1.0)] == [54, 66]  # type: ignore[misc]


# --- registering ----------------------------------------------------------------------------------


async def test_what_is_registered_stays_what_it_was() -> None:
    fence = EffectFence()

    @fence.reconciler("charge", "refund")
    async def ask_the_bank(effect: UnknownEffect) -> StillUnknown:
        return StillUnknown()

    assert ask_the_bank.__name__ == "ask_the_bank"
    (registered,) = fence._shared.reconcilers._registered
    assert registered.by == "reconciler:ask_the_bank"
    fence.reconciler("mail")(functools.partial(ask_the_bank))
    fence.scoped("a").reconciler("charge")(ask_the_bank)


@pytest.mark.parametrize(
    ("tools", "limits", "says"),
    [
        ((), {}, "at least one tool"),
        (("",), {}, "tool of a reconciler is empty"),
        ((7,), {}, "tool of a reconciler"),
        (("taken",), {}, "'taken' has a reconciler already, 'bank'"),
        (("t",), {"grace_seconds": 0}, "grace_seconds is 0"),
        (("t",), {"grace_seconds": float("nan")}, "grace_seconds is nan"),
        (("t",), {"timeout_seconds": -1}, "timeout_seconds is -1"),
        (("t",), {"retry_seconds": float("inf")}, "retry_seconds is inf"),
        (("t",), {"max_retry_seconds": None}, "max_retry_seconds is None"),
        (("t",), {"max_concurrent": 0}, "max_concurrent is 0"),
        (("t",), {"max_per_round": 1.5}, "max_per_round is 1.5"),
        (("t",), {"name": "x" * 2000}, "name of a reconciler"),
    ],
)
async def test_wrong_use_is_refused_when_it_is_registered(
    tools: Any, limits: Any, says: str
) -> None:
    fence = EffectFence()
    asks(fence, Provider(StillUnknown()), "taken")
    with pytest.raises((TypeError, ValueError), match=says):
        fence.reconciler(*tools, **limits)(Provider(StillUnknown()))
    with pytest.raises(ValueError, match="every is 0"):
        fence.reconciling(every=0)


async def test_a_plain_function_is_refused() -> None:
    with pytest.raises(TypeError, match="an async function"):
        EffectFence().reconciler("charge")(lambda effect: StillUnknown())  # type: ignore[arg-type,return-value]


async def test_a_fresh_ledger_has_nothing_to_ask(fence: EffectFence) -> None:
    bank = asks(fence, Provider(Happened(1)))
    assert await fence.reconcile() == Reconciled()
    assert isinstance(await fence.prepare(asked()), Fresh)
    assert bank.asked == []


# --- its page -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "reconciling.md"


async def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


async def test_the_page_states_the_limits_of_the_code() -> None:
    fence = EffectFence()
    fence.reconciler("charge")(Provider(StillUnknown()))
    (it,) = fence._shared.reconcilers._registered
    page = PAGE.read_text("utf-8")
    pauses = f"{it.retry_seconds:g}, {it.max_retry_seconds:g}"
    for row in (
        f"| `max_concurrent` | {it.max_concurrent} |",
        f"| `max_per_round` | {it.max_per_round} |",
        f"| `timeout_seconds` | {it.timeout_seconds:g} |",
        f"| `retry_seconds`, `max_retry_seconds` | {pauses} |",
        f"`grace_seconds` ({it.grace_seconds:g})",
    ):
        assert row in page
