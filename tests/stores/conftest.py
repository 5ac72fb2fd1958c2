"""Every store, opened the same way: a store to come adds one entry to `KINDS`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from effectfence.stores.contract import Store
from effectfence.stores.file import FileStore, Machine
from effectfence.stores.memory import MemoryStore
from tests.engines import PostgresServer

LONG = bool(os.environ.get("EFFECTFENCE_LONG"))


class HandClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.told: list[Callable[[float], None]] = []
        """Clocks elsewhere (in a server) that go with this one."""

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        for tell in self.told:
            tell(self.seconds)


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


async def _memory(clock: HandClock, request: pytest.FixtureRequest) -> Store:
    return MemoryStore(clock)


async def _file(clock: HandClock, request: pytest.FixtureRequest) -> Store:
    folder: Path = request.getfixturevalue("tmp_path")
    return await FileStore.open(folder / "ledger" / "effects.jsonl", machine=HandMachine(clock))


async def _postgres(clock: HandClock, request: pytest.FixtureRequest) -> Store:
    from effectfence.stores.postgres import PostgresStore

    server: PostgresServer = request.getfixturevalue("postgres_server")
    url, tell = server.schema_with_clock()
    tell(clock())
    clock.told.append(tell)
    return await PostgresStore.open(url, monotonic=clock)


Kind = Callable[[HandClock, pytest.FixtureRequest], Awaitable[Store]]
KINDS: dict[str, Kind] = {"memory": _memory, "file": _file, "postgres": _postgres}
"""An engine's server comes from a fixture of `tests.engines`, asked for by name when it is needed.
Its store runs on the hand clock: what the engine reads as time is told to `clock.told`."""


DATABASES = sorted(set(KINDS) - {"memory", "file"})


@pytest.fixture
def same(clock: HandClock) -> MemoryStore:
    """What a store is compared with, on the same clock."""
    return MemoryStore(clock)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=sorted(KINDS))
async def store(request: pytest.FixtureRequest, clock: HandClock) -> AsyncIterator[Store]:
    store = await KINDS[request.param](clock, request)
    yield store
    await store.aclose()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Where a test's ledger goes."""
    return tmp_path / "ledger" / "effects.jsonl"
