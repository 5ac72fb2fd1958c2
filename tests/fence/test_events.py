"""Events and log lines: one for each decision, after it is recorded, with nothing secret in it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from effectfence import (
    EffectFence,
    FenceConfig,
    FenceError,
    FenceEvent,
    Happened,
    IntentConflict,
    LeaseLost,
    LedgerUnavailable,
    NotExecuted,
    OutcomeUnknown,
)
from effectfence.events import Listener
from effectfence.stores.contract import Applied, Change, View
from effectfence.stores.memory import MemoryStore
from tests.conftest import Clock, OpenFence, asked, claimed, until
from tests.fence.test_cancellation import SlowStore


def listening(fence: EffectFence) -> list[FenceEvent]:
    heard: list[FenceEvent] = []
    fence.on_event(heard.append)
    return heard


def kinds(heard: list[FenceEvent]) -> list[str]:
    return [event.kind for event in heard]


async def refused(call: Awaitable[Any], kind: type[FenceError]) -> None:
    with pytest.raises(kind):
        await call


@pytest.fixture
async def fence(open_fence: OpenFence) -> EffectFence:
    return await open_fence()


async def test_every_decision_is_told_in_order(fence: EffectFence) -> None:
    heard = listening(fence)
    ticket = await claimed(fence)
    await refused(fence.prepare(asked(args={"n": 2})), IntentConflict)
    await fence.heartbeat(ticket)
    cert = await fence.commit(ticket, {"id": 9})
    await fence.prepare(asked())
    await refused(fence.commit(ticket, {"id": 10}), FenceError)
    assert kinds(heard) == [
        "admitted", "refused", "renewed", "committed", "replayed", "commit_refused",
    ]  # fmt: skip
    admitted, conflict, _, committed, replayed, again = heard
    assert (admitted.intent, admitted.domain, admitted.attempt, admitted.seq) == (
        "charge:o1", "order:o1", 1, 1,
    )  # fmt: skip
    assert (conflict.code, conflict.ran) == ("intent_conflict", False)
    assert committed.certificate == replayed.certificate == cert.hash
    assert again.code == "commit_conflict"
    assert committed.seconds is not None
    assert committed.held_seconds is not None


async def test_reports_and_words_are_told(fence: EffectFence) -> None:
    heard = listening(fence)
    await fence.release(await claimed(fence), "no route")
    await fence.abort(await claimed(fence), "cut off")
    await refused(fence.prepare(asked()), OutcomeUnknown)
    await fence.clear("charge:o1", by="ada", reason="not in the books")
    await fence.clear("nothing", by="ada", reason="not in the books")
    ticket = await claimed(fence)
    await fence.settle("charge:o1", 1, by="bob", reason="seen", force=True)
    await refused(fence.heartbeat(ticket), FenceError)
    await fence.sweep()
    assert kinds(heard) == [
        "admitted", "released", "admitted", "aborted", "refused", "cleared", "admitted", "settled",
        "lease_lost", "swept",
    ]  # fmt: skip
    assert [event.by for event in heard if event.by] == ["ada", "bob"]
    assert heard[4].ran is None
    assert heard[-1].count == 0


async def test_a_replaced_holders_commit_is_told_as_late(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=30, on_lease_expiry="takeover")
    ticket = await claimed(fence)
    clock.advance(31)
    await claimed(fence)
    heard = listening(fence)
    await refused(fence.commit(ticket, 1), LeaseLost)
    assert kinds(heard) == ["late_commit", "commit_refused"]
    assert [event.ran for event in heard] == [True, True]


async def test_an_event_can_be_neither_changed_nor_given_more(fence: EffectFence) -> None:
    heard = listening(fence)
    await fence.run(asked(), lambda: 1)
    with pytest.raises(FrozenInstanceError):
        heard[0].kind = "swept"  # type: ignore[misc]
    assert not hasattr(heard[0], "__dict__")


async def test_a_reconcilers_word_is_told_in_the_scope_of_its_intent(fence: EffectFence) -> None:
    inner = fence.scoped("a").scoped("b")

    @fence.reconciler("charge", name="bank")
    async def ask(effect: object) -> Happened:
        return Happened({"id": 1})

    await inner.abort(await claimed(inner), "cut off")
    heard = listening(fence)
    await fence.reconcile()
    (settled,) = heard
    assert (settled.kind, settled.scope, settled.by) == ("settled", ("a", "b"), "reconciler:bank")
    record = await inner.lookup("charge:o1")
    assert record is not None
    assert record.cert is not None
    assert settled.certificate == record.cert.hash


async def test_what_a_closing_fence_gives_up_is_told_with_its_scope() -> None:
    fence = EffectFence()
    heard = listening(fence)
    await claimed(fence.scoped("a"))
    await fence.aclose(drain_seconds=0)
    assert [(event.kind, event.scope) for event in heard] == [
        ("admitted", ("a",)), ("aborted", ("a",)),
    ]  # fmt: skip
    await refused(fence.prepare(asked()), LedgerUnavailable)
    assert (heard[-1].kind, heard[-1].call, heard[-1].ran) == ("unavailable", "prepare", False)


class Away(MemoryStore):
    """A ledger that answers until it does not."""

    away = False

    async def load(self, keys: Any) -> View:
        self._answer()
        return await super().load(keys)

    async def swap(self, change: Change) -> Applied | View:
        self._answer()
        return await super().swap(change)

    def _answer(self) -> None:
        if self.away:
            raise LedgerUnavailable(ledger="memory:", reason="away", ran=False)


@pytest.mark.parametrize(
    ("call", "ran", "level"),
    [
        ("prepare", False, None),
        ("commit", True, "WARNING"),
        ("abort", None, "WARNING"),
        ("release", False, "WARNING"),
        ("heartbeat", None, None),
    ],
)
async def test_a_ledger_that_does_not_answer_is_told(
    caplog: pytest.LogCaptureFixture, call: str, ran: bool | None, level: str | None
) -> None:
    store = Away()
    fence = EffectFence(store=store)
    ticket = await claimed(fence)
    heard = listening(fence)
    store.away = True
    asking = {
        "prepare": lambda: fence.prepare(asked(intent="o2")),
        "commit": lambda: fence.commit(ticket, 1),
        "abort": lambda: fence.abort(ticket, "cut off"),
        "release": lambda: fence.release(ticket, "no route"),
        "heartbeat": lambda: fence.heartbeat(ticket),
    }
    await refused(asking[call](), LedgerUnavailable)
    assert [(event.kind, event.call, event.ran) for event in heard] == [("unavailable", call, ran)]
    lines = [line for line in caplog.records if hasattr(line, "effectfence_kind")]
    assert [line.levelname for line in lines] == ([level] if level else [])


async def test_the_end_of_a_lease_that_no_ledger_told_of_is_told_once() -> None:
    fence = EffectFence(FenceConfig(lease_ttl=60, max_hold=0.05))
    heard = listening(fence)
    async with fence.effect(asked()) as attempt:
        await attempt.lost.wait()
        attempt.result = 1  # nobody else claimed it: it may still be committed
    await fence.aclose()
    assert [(event.kind, event.call) for event in heard if event.kind != "renewed"] == [
        ("admitted", "prepare"), ("lease_lost", "heartbeat"), ("committed", "commit"),
    ]  # fmt: skip


async def test_effect_and_run_tell_the_same(fence: EffectFence) -> None:
    heard = listening(fence)
    await fence.run(asked(), lambda: 1)
    await fence.run(asked(), lambda: 1)
    for name, error in (("o2", NotExecuted("no")), ("o3", TimeoutError())):
        with pytest.raises(type(error)):
            async with fence.effect(asked(intent=name)):
                raise error
    assert kinds(heard) == [
        "admitted", "committed", "replayed", "admitted", "released", "admitted", "aborted",
    ]  # fmt: skip


async def test_a_thousand_racers_are_told_of_as_they_are_counted(fence: EffectFence) -> None:
    heard = listening(fence)

    async def race() -> None:
        try:
            await fence.run(asked(), lambda: 1, wait_seconds=0)
        except FenceError:
            return

    await asyncio.gather(*(race() for _ in range(1000)))
    stats, told = fence.stats(), Counter(kinds(heard))
    assert told["admitted"] == stats.admitted == 1
    assert told["replayed"] == stats.replayed
    assert told["refused"] == stats.total - stats.admitted - stats.replayed
    assert kinds(heard).index("admitted") < kinds(heard).index("committed")


FOLLOWS = {
    "admitted": {"", "released"},
    "released": {"admitted"},
    "committed": {"admitted"},
    "replayed": {"committed", "replayed"},
}
"""What an intent's event may come right after, of those that change it."""


async def races(fence: EffectFence, seed: int) -> None:
    """Callers who ask for a few intents at once; some effects fail without having run."""
    chance = random.Random(seed)

    async def caller(intent: str) -> None:
        async def body() -> int:
            await asyncio.sleep(0)
            if chance.random() < 0.5:
                raise NotExecuted("no route")
            return 1

        await asyncio.sleep(chance.choice((0, 0, 0.001)))
        try:
            await fence.run(asked(intent=intent), body, wait_seconds=chance.choice((0, 5)))
        except (FenceError, NotExecuted):
            return

    await asyncio.gather(*(caller(f"o{number % 5}") for number in range(100)))


@pytest.mark.parametrize("seed", range(5))
async def test_the_events_of_an_intent_come_in_the_order_of_its_record(
    fence: EffectFence, seed: int
) -> None:
    heard = listening(fence)
    await races(fence, seed)
    told: dict[str, list[str]] = defaultdict(lambda: [""])
    for event in heard:
        assert event.intent is not None
        before = told[event.intent]
        if event.kind == "refused":
            assert event.code == "intent_in_flight"
            assert before[-1] == "admitted"
        else:
            assert before[-1] in FOLLOWS[event.kind], (event.intent, *before, event.kind)
            before.append(event.kind)
    assert all(kinds.count("committed") <= 1 for kinds in told.values())


@pytest.mark.parametrize("point", range(1, 12))
async def test_wherever_it_is_cancelled_what_is_told_is_what_stands(point: int) -> None:
    store = SlowStore()
    fence = EffectFence(store=store)
    heard = listening(fence)

    async def caller() -> None:
        async with fence.effect(asked()) as attempt:
            await store.point()
            attempt.result = 1

    task = store.victim = asyncio.ensure_future(caller())
    store.cancel_at = point
    await asyncio.wait((task,))
    await until(lambda: not fence._shared.custody.owned)
    record = await fence.lookup("charge:o1")
    told = kinds(heard)
    stands = {"done": ["admitted", "committed"], "unknown": ["admitted", "aborted"]}
    assert told == (stands[record.state] if record is not None else [])


async def test_threads_and_loops_of_their_own_are_all_heard() -> None:
    fence = EffectFence()
    heard = listening(fence)

    def thread() -> None:
        async def work() -> None:
            for number in range(50):
                try:
                    await fence.run(asked(intent=f"o{number}"), lambda: 1, wait_seconds=0)
                except FenceError:
                    continue

        asyncio.run(work())

    threads = [threading.Thread(target=thread) for _ in range(6)]
    for each in threads:
        each.start()
    await asyncio.to_thread(lambda: [each.join() for each in threads])
    stats, told = fence.stats(), Counter(kinds(heard))
    assert told["admitted"] == told["committed"] == stats.admitted == 50
    assert told["replayed"] == stats.replayed
    assert told["refused"] == stats.refused_inflight
    await fence.aclose()


async def test_a_committed_event_comes_after_its_record(fence: EffectFence) -> None:
    found: list[asyncio.Task[Any]] = []

    @fence.on_event
    def look(event: FenceEvent) -> None:
        if event.kind == "committed":
            found.append(asyncio.ensure_future(fence.lookup("charge:o1")))

    await fence.run(asked(), lambda: 1)
    assert (await found[0]).state == "done"


async def test_a_scope_is_named_and_one_subscription_hears_all(fence: EffectFence) -> None:
    heard = listening(fence)
    await fence.scoped("a/b").scoped("c").run(asked(), lambda: 1)
    assert {event.scope for event in heard} == {("a/b", "c")}


async def test_a_listener_that_fails_changes_nothing_and_is_said_once(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    @fence.on_event
    def fail(event: FenceEvent) -> None:
        raise RuntimeError("a listener's own")

    heard = listening(fence)
    assert (await fence.run(asked(), lambda: 1)).result == 1
    assert kinds(heard) == ["admitted", "committed"]
    said = [record for record in caplog.records if record.exc_info]
    assert len(said) == 1
    assert "a listener failed" in said[0].message


async def test_a_listener_that_looks_at_a_cancelled_future_cancels_nobody(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()

    @fence.on_event
    def look(event: FenceEvent) -> None:
        future.result()

    assert (await fence.run(asked(), lambda: 1)).result == 1
    assert "a listener failed" in caplog.text


@pytest.mark.parametrize(("kind", "becomes"), [("admitted", "unknown"), ("committed", "done")])
async def test_a_listener_that_cancels_its_caller_finds_the_outcome_recorded(
    fence: EffectFence, kind: str, becomes: str
) -> None:
    @fence.on_event
    def cancel(event: FenceEvent) -> None:
        task = asyncio.current_task()
        if event.kind == kind and task is not None:
            task.cancel()

    async def body() -> int:
        await asyncio.sleep(0)
        return 1

    async def caller() -> None:
        await fence.run(asked(), body)
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(caller())
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert record.state == becomes


async def test_a_listener_added_twice_is_told_once(fence: EffectFence) -> None:
    heard: list[FenceEvent] = []
    fence.on_event(heard.append)
    fence.on_event(heard.append)
    await fence.run(asked(), lambda: 1)
    fence.off_event(heard.append)
    await fence.run(asked(), lambda: 1)
    assert kinds(heard) == ["admitted", "committed"]


async def test_a_listener_may_leave_from_inside_of_itself(fence: EffectFence) -> None:
    heard: list[str] = []

    @fence.on_event
    def once(event: FenceEvent) -> None:
        heard.append(event.kind)
        fence.off_event(once)

    await fence.run(asked(), lambda: 1)
    assert heard == ["admitted"]


def test_what_is_no_listener_is_refused() -> None:
    listener: Any = "not callable"
    with pytest.raises(TypeError, match="a callable is wanted, not str"):
        EffectFence().on_event(listener)


async def test_the_cancelled_are_told_of(fence: EffectFence) -> None:
    heard = listening(fence)
    began = asyncio.Event()

    async def body() -> None:
        began.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(fence.run(asked(), body))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kinds(heard) == ["admitted", "aborted"]


async def test_no_event_and_no_line_holds_what_may_be_secret(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "effectfence")
    heard = listening(fence)
    await fence.run(asked(args={"card": "s3cret-args"}), lambda: "s3cret-result")
    with pytest.raises(TimeoutError):
        async with fence.effect(asked(intent="o2", args={"card": "s3cret-args"})):
            raise TimeoutError("s3cret-reason")
    assert len(heard) == 4
    assert "s3cret" not in repr(heard)
    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr([vars(record) for record in caplog.records])


async def test_one_line_a_decision_and_a_warning_where_nobody_knows(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "effectfence")
    evil = "pay\x1b[2J\n"
    await fence.run(asked(intent=evil), lambda: 1)
    await fence.abort(await claimed(fence), "cut off")
    lines = [record for record in caplog.records if hasattr(record, "effectfence_kind")]
    assert [line.levelname for line in lines] == ["DEBUG", "DEBUG", "DEBUG", "WARNING"]
    assert [vars(line)["effectfence_kind"] for line in lines] == [
        "admitted", "committed", "admitted", "aborted",
    ]  # fmt: skip
    assert lines[3].getMessage() == "aborted 'charge:o1', attempt 1"
    assert all(line.getMessage().isprintable() for line in lines)
    assert vars(lines[0])["effectfence_intent"] == r"pay\x1b[2J\n"
    for line in lines:
        facts = {name: fact for name, fact in vars(line).items() if name.startswith("effectfence")}
        assert json.loads(json.dumps(facts))["effectfence_tool"] == "charge"


async def test_a_refusal_is_a_warning_where_nobody_knows_and_else_a_line(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "effectfence")
    ticket = await claimed(fence)
    await refused(fence.prepare(asked(args={"n": 2})), IntentConflict)
    assert caplog.records == []
    await fence.abort(ticket, "cut off")
    await refused(fence.prepare(asked()), OutcomeUnknown)
    assert [record.getMessage() for record in caplog.records] == [
        "aborted 'charge:o1', attempt 1", "refused 'charge:o1' (outcome_unknown)",
    ]  # fmt: skip


async def test_nothing_is_made_where_nobody_listens(
    fence: EffectFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("an event was made")

    monkeypatch.setattr("effectfence.fence.FenceEvent", made)
    await fence.run(asked(), lambda: 1)
    await fence.run(asked(), lambda: 1)
    await refused(fence.prepare(asked(args={"n": 2})), IntentConflict)
    left: Listener = print
    fence.off_event(left)
