"""A closed loop on one event loop: `concurrency` callers, each with its next effect at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench._measure import RESULT, arguments, request
from effectfence import EffectFence, Fresh, records
from effectfence.stores.file import FileStore
from effectfence.stores.machine import Machine

Effect = Callable[[int], Awaitable[Any]]


class CountingMachine(Machine):
    """Counts the syncs of the ledger's batches."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync_data(self, descriptor: int) -> None:
        self.syncs += 1
        super().sync_data(descriptor)


class CarelessMachine(Machine):
    """Never syncs: what the ledger costs without the disk."""

    def sync_data(self, descriptor: int) -> None:
        pass


@asynccontextmanager
async def file_fence(path: Path, machine: Machine | None = None) -> Any:
    store = await FileStore.open(path, machine=machine, check_body=records.check_body)
    fence = EffectFence(store=store)
    try:
        yield fence
    finally:
        await fence.aclose()


def pair_on(fence: EffectFence) -> Effect:
    """Request, prepare, commit."""

    async def pair(number: int) -> None:
        admission = await fence.prepare(request(number))
        assert type(admission) is Fresh
        await fence.commit(admission.prepared, RESULT)

    return pair


def run_on(once: Any) -> Effect:
    """The same through once-kernel."""

    async def charge() -> dict[str, str]:
        return RESULT

    async def run(number: int) -> None:
        await once.run(f"charge:order-{number}", arguments(number), charge)

    return run


async def rate(
    effect: Effect, concurrency: int, run_seconds: float, numbers: Iterator[int] | None = None
) -> float:
    """Effects a second, counted as they finish, over about `run_seconds`."""
    numbers = numbers or itertools.count()
    begun = time.perf_counter()
    until = begun + run_seconds
    callers = (_caller(effect, numbers, until) for _ in range(concurrency))
    done = sum(await asyncio.gather(*callers))
    return done / (time.perf_counter() - begun)


async def _caller(effect: Effect, numbers: Iterator[int], until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await effect(next(numbers))
        done += 1
    return done


async def each(effect: Effect, concurrency: int, times: int) -> None:
    """`concurrency` callers, each `times` effects."""
    numbers = itertools.count()

    async def caller() -> None:
        for _ in range(times):
            await effect(next(numbers))

    await asyncio.gather(*(caller() for _ in range(concurrency)))
