"""Events and log lines: one for each decision, after it is recorded, with nothing secret in it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from effectfence import (
    EffectFence,
    FenceError,
    FenceEvent,
    IntentConflict,
    LeaseLost,
    NotExecuted,
    OutcomeUnknown,
)
from effectfence.events import Listener
from tests.conftest import Clock, OpenFence, asked, claimed


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
