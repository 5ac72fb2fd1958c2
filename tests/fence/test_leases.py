"""The keeper of leases: it goes by what was granted, and never makes a caller wait for nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from effectfence import (
    EffectFence,
    FenceConfig,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    lease_lost,
)
from effectfence.leases import Keeper, Kept, Lost, Renew
from tests.conftest import Clock, asked, claimed


async def kept_by(keeper: Keeper, clock: Clock, renew: Renew, lease_seconds: float) -> Kept:
    """One ticket as `keep` makes it, without the thread: the test attends to it."""
    loop = asyncio.get_running_loop()
    kept = Kept(await claimed(EffectFence()), renew, lease_seconds, Lost(), loop)
    kept.granted(clock(), lease_seconds)
    keeper._kept.add(kept)
    return kept


def granting(clock: Clock, *seconds: float, takes: float = 0.0) -> Renew:
    """Renewals that grant these seconds in turn; each takes a while."""
    grants = iter(seconds)

    async def renew(_ticket: PreparedEffect) -> float:
        clock.advance(takes)
        return next(grants)

    return renew


async def attended(keeper: Keeper, clock: Clock, kept: Kept) -> None:
    clock.advance(kept.due - clock())
    await keeper._attend(kept)


# --- what was granted -----------------------------------------------------------------------------


async def test_a_lease_counts_from_before_it_was_asked_for(clock: Clock) -> None:
    keeper = Keeper(clock)
    start = clock()
    kept = await kept_by(keeper, clock, granting(clock, 9.0, takes=2.0), 9.0)
    await attended(keeper, clock, kept)
    assert clock() == start + 5
    assert (kept.due, kept.loses_at) == (start + 6, start + 12)


async def test_the_holder_is_told_at_the_end_that_max_hold_set(clock: Clock) -> None:
    """As the ledger has it: 9 s a time, but no more than 14 s in all."""
    keeper = Keeper(clock)
    start = clock()
    kept = await kept_by(keeper, clock, granting(clock, 9.0, 8.0), 9.0)
    for _ in range(2):
        await attended(keeper, clock, kept)
        assert not kept.lost.known
    await attended(keeper, clock, kept)
    assert (kept.lost.known, clock()) == (True, start + 14)
    assert not keeper._kept


async def test_the_first_lease_ends_with_max_hold() -> None:
    fence = EffectFence(FenceConfig(lease_ttl=60, max_hold=3))
    async with fence.effect(asked()) as attempt:
        assert attempt._kept is not None
        assert attempt._kept.lease_seconds == 3
    await fence.aclose()


async def test_the_first_lease_counts_from_before_the_claim_within_bounds(clock: Clock) -> None:
    keeper = Keeper(clock)
    ticket = await claimed(EffectFence())
    ages = {"a second old": 1000, "by a clock that jumped ahead": -(10**9), "back": 10**9}
    dues = {}
    for age, milliseconds in ages.items():
        aged = ticket.model_copy(update={"started_ms": ticket.started_ms - milliseconds})
        kept = keeper.keep(aged, granting(clock), 9e6, Lost())
        dues[age] = kept.due - clock()
        keeper.drop(kept)
    await keeper.aclose()
    assert dues["a second old"] == pytest.approx(3e6 - 1, abs=60)
    assert dues["by a clock that jumped ahead"] == 3e6
    assert dues["back"] == pytest.approx(3e6 - 1e6, abs=60)


async def test_a_ledger_that_does_not_answer_loses_the_lease_in_time(clock: Clock) -> None:
    keeper = Keeper(clock)

    async def hangs(_ticket: PreparedEffect) -> float:
        await asyncio.Event().wait()
        return 0.0

    kept = await kept_by(keeper, clock, hangs, 0.05)
    await attended(keeper, clock, kept)
    assert kept.lost.known
    assert not keeper._kept


async def test_a_ledger_that_is_away_is_asked_again_until_the_end(clock: Clock) -> None:
    keeper = Keeper(clock)

    async def away(_ticket: PreparedEffect) -> float:
        raise LedgerUnavailable(ledger="memory:", reason="away")

    kept = await kept_by(keeper, clock, away, 9.0)
    start, asked_at = clock(), []
    while not kept.lost.known:
        await attended(keeper, clock, kept)
        asked_at.append(clock() - start)
    assert asked_at[0] == 3
    assert asked_at[-1] == 9
    assert len(asked_at) == 8


async def test_the_lease_of_a_holder_whose_loop_is_closed_runs_out(clock: Clock) -> None:
    keeper = Keeper(clock)
    kept = await kept_by(keeper, clock, granting(clock), 9.0)
    kept.loop = asyncio.new_event_loop()
    kept.loop.close()
    await attended(keeper, clock, kept)
    assert not keeper._kept
    kept.tell()
    assert kept.lost.known, "for a thread that goes on"


# --- starting and ending --------------------------------------------------------------------------


def no_loop() -> asyncio.AbstractEventLoop:
    raise OSError(24, "Too many open files")


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def without_loops(_patch: pytest.MonkeyPatch) -> Keeper:
    return Keeper(new_loop=no_loop)


def without_threads(patch: pytest.MonkeyPatch) -> Keeper:
    patch.setattr(threading.Thread, "start", no_thread)
    return Keeper()


@pytest.mark.parametrize("without", [without_loops, without_threads])
async def test_a_lease_that_cannot_be_kept_releases_the_intent_and_the_caller_is_told(
    without: Callable[[pytest.MonkeyPatch], Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = EffectFence()
    fence._shared.keeper = without(monkeypatch)
    expected = (OSError, RuntimeError)
    with pytest.raises(expected, match=r"Too many open files|new thread") as caught:
        async with fence.effect(asked()):
            pytest.fail("the body ran")
    assert "nothing ran" in caught.value.__notes__[0]
    assert await fence.lookup("charge:o1") is None
    assert not fence._shared.custody.held
    assert not fence._shared.keeper._kept
    monkeypatch.undo()
    fence._shared.keeper._new_loop = asyncio.new_event_loop
    async with fence.effect(asked()) as attempt:
        attempt.result = "once there is room again"
    assert attempt.cert is not None
    await fence.aclose()


async def test_a_keeper_whose_thread_died_starts_another(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(clock)
    ticket = await claimed(EffectFence())
    keeper.keep(ticket, granting(clock), 9.0, Lost())
    first = keeper._thread
    assert first is not None
    keeper._clock = lambda: 1 // 0
    with keeper._lock:
        keeper._rouse()
    await asyncio.to_thread(first.join)
    assert "ZeroDivisionError" in caplog.text
    keeper._clock = clock
    keeper.keep(ticket, granting(clock), 9.0, Lost())
    assert keeper._thread is not first
    await keeper.aclose()


# --- telling the body -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["async", "plain"])
async def test_a_body_can_see_that_its_lease_is_lost(how: str) -> None:
    """Also one that blocks its event loop, which then can't set the event."""
    fence = EffectFence(FenceConfig(lease_ttl=0.05, max_hold=0.06))
    seen: list[bool] = []

    def effect() -> str:
        seen.append(lease_lost())
        while not lease_lost():
            pass
        seen.append(lease_lost())
        return "stopped"

    async def async_effect() -> str:
        return effect()

    function: Any = effect if how == "plain" else async_effect
    assert (await fence.run(asked(), function)).result == "stopped"
    assert seen == [False, True]
    await fence.aclose()


async def test_outside_of_an_effect_there_is_no_lease_to_lose() -> None:
    with pytest.raises(LookupError, match="lease_lost"):
        lease_lost()


async def test_a_lost_lease_wakes_who_waits_for_it() -> None:
    fence = EffectFence(FenceConfig(lease_ttl=0.05, max_hold=0.06))
    with pytest.raises(TimeoutError):  # noqa: PT012 - the body is the point
        async with fence.effect(asked()) as attempt:
            await attempt.lost.wait()
            assert lease_lost()
            raise TimeoutError
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked())
    await fence.aclose()
