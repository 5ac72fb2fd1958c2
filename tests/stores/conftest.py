"""Every store, opened the same way: a store to come adds one entry to `KINDS`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from effectfence.stores.contract import Store
from effectfence.stores.file import FileStore, Machine
from effectfence.stores.memory import MemoryStore

LONG = bool(os.environ.get("EFFECTFENCE_LONG"))


class HandClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class HandMachine(Machine):
    """The operating system, with a clock and a boot of the test's own."""

    def __init__(self, clock: HandClock | None = None, boot: str = "boot-1") -> None:
        self.clock = clock or HandClock()
        self.name = boot

    def boot(self) -> str:
        return self.name

    def boottime(self) -> float:
        return self.clock.seconds


Open = Callable[[], Awaitable[Store]]


async def _memory(clock: HandClock, folder: Path) -> Store:
    return MemoryStore(clock)


async def _file(clock: HandClock, folder: Path) -> Store:
    return await FileStore.open(folder / "ledger" / "effects.jsonl", machine=HandMachine(clock))


KINDS: dict[str, Callable[[HandClock, Path], Awaitable[Store]]] = {"memory": _memory, "file": _file}


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=sorted(KINDS))
async def store(
    request: pytest.FixtureRequest, clock: HandClock, tmp_path: Path
) -> AsyncIterator[Store]:
    store = await KINDS[request.param](clock, tmp_path)
    yield store
    await store.aclose()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Where a test's ledger goes."""
    return tmp_path / "ledger" / "effects.jsonl"
