"""Cancellation at every await: the k-th, for all k (FAULTS row 7).

The store suspends before and after each call takes effect, and at its k-th suspension the caller's
task is cancelled. Whatever k is, the one checker must be content, and the intent must be where the
protocol says: released when no ticket was handed out, unknown when the effect was under way, done
when the commit had begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import pytest

from effectfence import (
    EffectFence,
    FenceConfig,
    FenceError,
    Fresh,
    IntentInFlight,
    LedgerUnavailable,
    PreparedEffect,
)
from effectfence.stores.contract import Applied, Change, View
from effectfence.stores.memory import MemoryStore
from tests.checker import History, violations
from tests.conftest import OpenFence, asked, claimed, until


class SlowStore:
    """Each call suspends before it takes effect and before it answers."""

    name = "memory:"
    durable = False

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.epoch = self.inner.epoch
        self.suspensions = 0
        self.cancel_at = 0
        self.victim: asyncio.Task[Any] | None = None

    async def point(self) -> None:
        if asyncio.current_task() is self.victim:
            self.suspensions += 1
            if self.suspensions == self.cancel_at:
                assert self.victim is not None
                self.victim.cancel()
        await asyncio.sleep(0)

    def peek(self, key: str) -> bool:
        return self.inner.peek(key)

    async def load(self, keys: Iterable[str]) -> View:
        await self.point()
        view = await self.inner.load(keys)
        await self.point()
        return view

    async def swap(self, change: Change) -> Applied | View:
        await self.point()
        answer = await self.inner.swap(change)
        await self.point()
        return answer

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        await self.inner.changed(key, tag, seconds)

    async def scan(self, label: str) -> AsyncIterator[View]:
        async for view in self.inner.scan(label):
            yield view

    async def purge(self, limit: int = 1000) -> int:
        return await self.inner.purge(limit)

    async def aclose(self) -> None:
        return None


class World:
    def __init__(self) -> None:
        self.store = SlowStore()
        self.fence = EffectFence(FenceConfig(), store=self.store)
        self.history = History()
        self.stages: list[str] = []

    async def effect(self, ticket: PreparedEffect) -> str:
        self.stages.append("effect")
        self.history.effects.append((ticket.intent, ticket.seq))
        self.history.tokens.append(ticket.token)
        await self.store.point()
        self.stages.append("effect ended")
        return "receipt"

    def acknowledged(self, digest: str) -> None:
        self.history.acknowledged.append(("charge:o1", digest))

    async def by_hand(self) -> None:
        admission = await self.fence.prepare(asked())
        assert isinstance(admission, Fresh)
        try:
            result = await self.effect(admission.prepared)
        except asyncio.CancelledError:
            await self.fence.abort(admission.prepared, "cancelled: outcome unknown")
            raise
        self.acknowledged((await self.fence.commit(admission.prepared, result)).hash)

    async def in_a_block(self) -> None:
        async with self.fence.effect(asked()) as attempt:
            attempt.result = await self.effect(attempt.prepared)
        assert attempt.cert is not None
        self.acknowledged(attempt.cert.hash)

    async def in_one_call(self) -> None:
        async def function() -> str:
            from effectfence import current_effect

            return await self.effect(current_effect())

        self.acknowledged((await self.fence.run(asked(), function)).hash)


VERSIONS: dict[str, Callable[[World], Coroutine[Any, Any, None]]] = {
    "by hand": World.by_hand,
    "effect()": World.in_a_block,
    "run()": World.in_one_call,
}


async def cancelled_at(version: str, k: int) -> tuple[World, bool]:
    """One run, cancelled at its k-th suspension; whether it got that far."""
    world = World()
    task = asyncio.create_task(VERSIONS[version](world))
    world.store.victim, world.store.cancel_at = task, k
    await asyncio.wait([task])
    while world.fence._shared.custody.owned:
        await asyncio.wait(world.fence._shared.custody.owned)
    await world.fence.aclose(drain_seconds=0)
    return world, task.cancelled()


async def found(world: World) -> tuple[str | None, str | None]:
    reader = EffectFence(store=world.store.inner)
    record = await reader.lookup("charge:o1")
    if record is None:
        return None, None
    return record.state, record.cert and record.cert.hash


@pytest.mark.parametrize("version", VERSIONS)
async def test_cancelled_at_any_await_the_outcome_is_recorded_and_never_lost(version: str) -> None:
    seen = []
    for k in range(1, 100):
        world, cancelled = await cancelled_at(version, k)
        state = await found(world)
        assert not violations(world.history, {"charge:o1": state}, policy="fence"), k
        assert not world.fence._shared.custody.held, k
        if not cancelled:
            assert k > world.store.suspensions, "a cancellation was swallowed"
            assert state[0] == "done"
            break
        stage = world.stages[-1] if world.stages else "prepare"
        seen.append((stage, state[0]))
    assert list(dict.fromkeys(seen)) == [
        ("prepare", None),
        ("effect", "unknown"),
        ("effect ended", "done"),
    ]
    assert len(seen) >= 5


@pytest.mark.parametrize("report", ["abort", "release"])
async def test_a_cancelled_report_completes(report: str) -> None:
    for k in range(1, 100):
        world = World()
        ticket = await claimed(world.fence)
        call = getattr(world.fence, report)(ticket, "why")
        task = asyncio.create_task(call)
        world.store.victim, world.store.cancel_at = task, k
        await asyncio.wait([task])
        assert (await found(world))[0] == ("unknown" if report == "abort" else None)
        if not task.cancelled():
            assert k > world.store.suspensions
            break


async def test_a_cancelled_release_of_a_later_attempt_completes_without_contending_with_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for k in range(1, 100):
        world = World()
        await claimed(world.fence)
        await world.fence.clear("charge:o1", reason="test", by="ops", force=True)
        second = await claimed(world.fence)
        task = asyncio.create_task(world.fence.release(second, "why"))
        world.store.victim, world.store.cancel_at = task, k
        await asyncio.wait([task])
        assert (await found(world))[0] == "unknown"
        if not task.cancelled():
            break
    assert not caplog.records


async def test_a_commit_that_is_cancelled_again_and_again_completes() -> None:
    world = World()
    ticket = await claimed(world.fence)
    task = asyncio.create_task(world.fence.commit(ticket, 1))
    await asyncio.sleep(0)  # cancelled before its first step, nothing would have begun
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert (await found(world))[0] == "done"


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    world = World()
    ticket = await claimed(world.fence)
    waiting = asyncio.create_task(world.fence.prepare(asked(), wait_seconds=60))
    await until(lambda: world.store.inner._watchers.keys)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not world.store.inner._watchers.keys
    await world.fence.commit(ticket, 1)


async def test_a_ticket_that_nobody_got_is_released_with_a_word() -> None:
    world = World()
    task = asyncio.create_task(world.fence.prepare(asked()))
    world.store.victim, world.store.cancel_at = task, 2
    await asyncio.wait([task])
    assert task.cancelled()
    await asyncio.gather(*world.fence._shared.custody.owned)
    async for view in world.store.inner.scan("history"):
        (record,) = view.records.values()
        assert record is not None
        assert b"cancelled before its ticket was handed out" in record.body
    assert isinstance(await world.fence.prepare(asked()), Fresh)


async def test_a_claim_that_lost_is_not_undone_under_the_winners_feet() -> None:
    """Cancelled while its swap was refused: what stands there is somebody else's."""
    world = World()
    for k in range(1, 8):
        world.store.victim = None
        intent = f"i{k}"
        loser = asyncio.create_task(world.fence.prepare(asked(intent)))
        winner = EffectFence(store=world.store.inner)
        ticket = await claimed(winner, intent=intent)
        world.store.victim, world.store.suspensions, world.store.cancel_at = loser, 0, k
        await asyncio.wait([loser])
        while world.fence._shared.custody.owned:
            await asyncio.wait(world.fence._shared.custody.owned)
        assert (await winner.commit(ticket, 1)).verify()


async def test_an_effect_cancelled_while_it_waits_runs_nothing() -> None:
    fence = EffectFence()
    await claimed(fence)
    task = asyncio.create_task(fence.run(asked(), lambda: pytest.fail("ran")))
    await until(lambda: fence._shared.store._watchers.keys)  # type: ignore[attr-defined]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(FenceError):
        await fence.prepare(asked())


async def test_a_fence_that_is_closed_by_a_cancelled_task_is_closed_as_ever(
    open_fence: OpenFence,
) -> None:
    """Its waits end by their own time, and not in the cancellation that came before."""
    fence = await open_fence()
    await claimed(fence)

    async def uses_it() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await fence.aclose(drain_seconds=0.01)

    task = asyncio.create_task(uses_it())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(LedgerUnavailable, match="closed"):
        await fence.current("order:o1")
    again = await open_fence()
    record = await again.lookup("charge:o1")
    assert record is not None
    assert record.state == "unknown"


async def test_a_wait_in_a_cancelled_task_ends_by_its_own_time(open_fence: OpenFence) -> None:
    fence = await open_fence()
    await claimed(fence)
    ended: list[BaseException] = []

    async def asks_again() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await fence.prepare(asked(), wait_seconds=0.01)
            except BaseException as error:
                ended.append(error)

    task = asyncio.create_task(asks_again())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(error) for error in ended] == [IntentInFlight]
