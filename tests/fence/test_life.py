"""A fence's life: renewals, closing, threads, event loops, forks."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from effectfence import (
    EffectFence,
    FenceConfig,
    LeaseLost,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    Replay,
    current_effect,
)
from effectfence.leases import Keeper
from effectfence.stores.memory import MemoryStore
from tests.conftest import OpenFence, asked, claimed, until

# --- renewals (real time: what they are for is a loop that does not turn) ------------------------


async def test_case_24_a_body_that_blocks_its_loop_keeps_its_lease() -> None:
    """`time.sleep` inside the effect is the fault itself; other processes ask meanwhile."""
    store = MemoryStore()
    config = FenceConfig(lease_ttl=0.3)
    fence, other = EffectFence(config, store=store), EffectFence(config, store=store)
    answers: list[str] = []
    stop = threading.Event()

    async def asking() -> None:
        while not stop.is_set():
            try:
                await other.prepare(asked())
                answers.append("admitted")
            except Exception as error:
                answers.append(type(error).__name__)
            await asyncio.sleep(0.01)

    elsewhere = threading.Thread(target=lambda: asyncio.run(asking()))

    async def effect() -> int:
        elsewhere.start()
        time.sleep(1.0)  # noqa: ASYNC251 - that it blocks is the point
        stop.set()
        elsewhere.join()
        return 1

    cert = await fence.run(asked(), effect)
    assert cert.verify()
    assert set(answers) == {"IntentInFlight"}
    assert await other.prepare(asked()) == Replay(cert)
    await fence.aclose()


async def test_a_scoped_effect_is_renewed_in_its_scope() -> None:
    fence = EffectFence(FenceConfig(lease_ttl=0.15))
    view = fence.scoped("tenant")
    renewed = asyncio.Event()
    loop = asyncio.get_running_loop()
    renew = EffectFence._renew

    async def counted(self: EffectFence, prepared: PreparedEffect) -> float:
        granted = await renew(self, prepared)
        loop.call_soon_threadsafe(renewed.set)
        return granted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EffectFence, "_renew", counted)
        async with view.effect(asked()) as attempt:
            await renewed.wait()
            assert not attempt.lost.is_set()
    await fence.aclose()


async def test_a_lost_lease_tells_the_body_and_is_renewed_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fence = EffectFence(FenceConfig(lease_ttl=0.15))
    with pytest.raises(LeaseLost):  # noqa: PT012 - the body is the point
        async with fence.effect(asked()) as attempt:
            await fence.clear("charge:o1", reason="test", by="ops", force=True)
            await attempt.lost.wait()
            assert fence._shared.keeper is not None
            assert not fence._shared.keeper._kept
    assert "lease of 'charge:o1' is lost" in caplog.text
    await fence.aclose()


async def test_max_hold_loses_the_lease_of_an_effect_that_hangs() -> None:
    fence = EffectFence(FenceConfig(lease_ttl=0.15, max_hold=0.2))
    async with fence.effect(asked()) as attempt:
        await attempt.lost.wait()
        while True:
            try:
                await fence.prepare(asked(), wait_seconds=5)
            except OutcomeUnknown:
                break
        attempt.result = "it came back after all"
    assert attempt.cert is not None, "nobody replaced it"
    await fence.aclose()


async def test_many_effects_are_renewed_by_one_thread() -> None:
    before = threading.active_count()
    fence = EffectFence()
    async with asyncio.TaskGroup() as group:
        release = asyncio.Event()

        async def effect() -> None:
            await release.wait()

        for n in range(50):
            group.create_task(fence.run(asked(f"i{n}"), effect))
        await until(lambda: fence.stats().admitted == 50)
        assert threading.active_count() == before + 1
        release.set()
    await fence.aclose()
    assert threading.active_count() == before


async def test_a_fault_of_one_renewal_leaves_the_others_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = Keeper()
    renewed = asyncio.Event()
    loop = asyncio.get_running_loop()
    ticket = await claimed(EffectFence())

    async def breaks(_ticket: PreparedEffect) -> float:
        raise ZeroDivisionError

    async def works(_ticket: PreparedEffect) -> float:
        loop.call_soon_threadsafe(renewed.set)
        return 0.03

    lost = asyncio.Event()
    keeper.keep(ticket, breaks, 0.03, lost)
    await lost.wait()
    keeper.keep(ticket, works, 0.03, asyncio.Event())
    await renewed.wait()
    await keeper.aclose()
    assert "ZeroDivisionError" in caplog.text


async def test_a_ledger_that_is_away_for_a_moment_costs_no_lease() -> None:
    keeper = Keeper()
    calls = 0
    renewed = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def flaky(_ticket: PreparedEffect) -> float:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise LedgerUnavailable(ledger="memory:", reason="away")
        loop.call_soon_threadsafe(renewed.set)
        return 0.9

    lost = asyncio.Event()
    keeper.keep(await claimed(EffectFence()), flaky, 0.9, lost)
    await renewed.wait()
    assert not lost.is_set()
    await keeper.aclose()


async def test_a_ledger_that_stays_away_loses_the_lease() -> None:
    keeper = Keeper()

    async def away(_ticket: PreparedEffect) -> float:
        raise LedgerUnavailable(ledger="memory:", reason="away")

    lost = asyncio.Event()
    keeper.keep(await claimed(EffectFence()), away, 0.05, lost)
    await lost.wait()
    assert not keeper._kept
    await keeper.aclose()


# --- closing --------------------------------------------------------------------------------------


async def test_open_gives_a_fence_with_and_without_a_block(tmp_path: Path) -> None:
    async with EffectFence.open("memory:") as fence:
        await fence.commit(await claimed(fence), 1)
    with pytest.raises(LedgerUnavailable, match="closed"):
        await fence.prepare(asked())
    fence = await EffectFence.open(tmp_path / "ledger.jsonl", FenceConfig(lease_ttl=5))
    assert fence.config.lease_ttl == 5
    await fence.commit(await claimed(fence), 1)
    await fence.aclose()
    async with EffectFence.open(str(tmp_path / "ledger.jsonl")) as again:
        assert isinstance(await again.prepare(asked()), Replay)


async def test_an_engine_that_is_not_there_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="carrier-pigeon"):
        await EffectFence.open("carrier-pigeon://loft")


async def test_closing_records_what_is_still_held_as_unknown(open_fence: OpenFence) -> None:
    fence, reader = await open_fence(), await open_fence()
    await claimed(fence, intent="a")
    await claimed(fence.scoped("t"), intent="b")
    await fence.commit(await claimed(fence, intent="c"), 1)
    await fence.aclose(drain_seconds=0)
    a, b = await reader.lookup("a"), await reader.scoped("t").lookup("b")
    assert a is not None
    assert b is not None
    assert (a.state, b.state) == ("unknown", "unknown")
    assert "closed" in (a.reason or "")


async def test_closing_waits_for_what_is_held_and_refuses_what_is_new(
    open_fence: OpenFence,
) -> None:
    fence, reader = await open_fence(), await open_fence()
    ticket = await claimed(fence)
    closing = asyncio.create_task(fence.aclose(drain_seconds=60))
    await until(lambda: fence._shared.closing)
    with pytest.raises(LedgerUnavailable, match="closing") as caught:
        await fence.prepare(asked("new"))
    assert caught.value.ran is False
    await fence.heartbeat(ticket)
    cert = await fence.commit(ticket, "in time")
    await closing
    assert await reader.prepare(asked()) == Replay(cert)


async def test_closing_twice_is_closing_once(fence: EffectFence) -> None:
    await asyncio.gather(fence.aclose(), fence.aclose())
    await fence.aclose()


async def test_every_call_on_a_closed_fence_says_so(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    view = fence.scoped("t")
    await fence.aclose(drain_seconds=0)
    word = {"by": "ops", "reason": "x"}
    calls: list[Any] = [
        fence.prepare(asked()),
        view.prepare(asked()),
        fence.commit(ticket, 1),
        fence.abort(ticket, "x"),
        fence.release(ticket, "x"),
        fence.heartbeat(ticket),
        fence.current("d"),
        fence.reserve("d", 0),
        fence.evict_domain("d"),
        fence.observe("d"),
        fence.lookup("x"),
        fence.settle("x", 1, **word),
        fence.clear("x", **word),
        fence.sweep(),
        fence.intent_count(),
        fence.domain_count(),
        anext(fence.intents()),
    ]
    for call in calls:
        with pytest.raises(LedgerUnavailable, match=r"closed|closing"):
            await call
    assert fence.stats().admitted == 1


async def test_what_goes_on_in_a_thread_is_drained(open_fence: OpenFence) -> None:
    fence, reader = await open_fence(), await open_fence()
    loop = asyncio.get_running_loop()
    entered, go_on = asyncio.Event(), threading.Event()

    def effect() -> str:
        loop.call_soon_threadsafe(entered.set)
        go_on.wait()
        return current_effect().intent

    task = asyncio.create_task(fence.run(asked(), effect))
    await entered.wait()
    task.cancel()
    closing = asyncio.create_task(fence.aclose(drain_seconds=60))
    await until(lambda: fence._shared.closing)
    go_on.set()
    await closing
    replay = await reader.prepare(asked())
    assert isinstance(replay, Replay)
    assert replay.cert.result == "charge:o1"


# --- threads, loops, processes --------------------------------------------------------------------


async def test_threads_with_loops_of_their_own_share_one_fence(open_fence: OpenFence) -> None:
    fence = await open_fence()
    intents = [f"i{n}" for n in range(20)]
    ran: list[str] = []

    async def racer() -> list[str]:
        certs = []
        for intent in intents:
            cert = await fence.run(asked(intent), ran.append, intent)
            certs.append(cert.hash)
        return certs

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: asyncio.run(racer()), range(4)))
    assert sorted(ran) == sorted(intents)
    assert found == [found[0]] * 4
    stats = fence.stats()
    assert (stats.admitted, stats.total) == (20, 80)


async def test_a_waiter_is_woken_by_another_loops_commit(open_fence: OpenFence) -> None:
    fence = await open_fence()
    ticket = await claimed(fence)
    waiting = asyncio.create_task(fence.prepare(asked(), wait_seconds=60))
    await asyncio.sleep(0)
    cert = await asyncio.to_thread(lambda: asyncio.run(fence.commit(ticket, 1)))
    assert await waiting == Replay(cert)


def in_a_child(fence: EffectFence, ticket: PreparedEffect, out: Any) -> None:
    async def tries() -> list[str]:
        calls: list[Any] = [
            fence.prepare(asked("new")),
            fence.commit(ticket, 1),
            fence.lookup("x"),
            fence.intent_count(),
            anext(fence.intents()),
        ]
        answers = []
        for call in calls:
            try:
                answers.append(repr(await call))
            except LedgerUnavailable as error:
                answers.append(error.reason)
        await fence.aclose()
        return answers

    out.put(asyncio.run(tries()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(
    open_fence: OpenFence,
) -> None:
    fence = await open_fence()
    ticket = await claimed(fence)
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    child = context.Process(target=in_a_child, args=(fence, ticket, out))
    child.start()
    answers = await asyncio.to_thread(out.get)
    await asyncio.to_thread(child.join)
    assert child.exitcode == 0
    assert len(answers) == 5
    assert all("fork" in answer for answer in answers), answers
    assert (await fence.commit(ticket, 1)).verify()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_may_open_a_fence_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    async with EffectFence.open(path) as fence:
        cert = await fence.commit(await claimed(fence), 1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer = threading.Thread(target=lambda: os.write(write, _replays(path)))
                answer.start()
                answer.join()
            finally:
                os._exit(0)
        os.close(write)
        assert await asyncio.to_thread(os.read, read, 100) == cert.hash.encode()
        os.close(read)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert (await fence.commit(await claimed(fence, intent="other"), 2)).verify()


def _replays(path: Path) -> bytes:
    async def replay() -> bytes:
        async with EffectFence.open(path) as fence:
            admission = await fence.prepare(asked())
            assert isinstance(admission, Replay)
            return admission.cert.hash.encode()

    return asyncio.run(replay())


async def test_nothing_is_logged_about_a_quiet_life(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="effectfence"):
        await fence.run(asked(), lambda: 1)
        await fence.run(asked(), lambda: 1)
        await fence.aclose()
    assert not caplog.records
