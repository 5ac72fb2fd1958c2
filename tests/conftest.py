"""What every test may use: a clock of its own, a fence on either store, and CI's rule on skips."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from effectfence import EffectFence, EffectRequest, FenceConfig, Fresh, PreparedEffect, records
from effectfence.stores.contract import Store
from effectfence.stores.file import FileStore
from effectfence.stores.machine import Machine
from effectfence.stores.memory import MemoryStore
from tests.engines import postgres_server, redis_server

__all__ = ["postgres_server", "redis_server"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI (`EFFECTFENCE_CI=1`) nothing is skipped: what could not run has not been shown."""
    report = yield
    if report.skipped and os.environ.get("EFFECTFENCE_CI") == "1":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which is a failure in CI: {report.longrepr}"
    return report


_NOT_THE_CORES = frozenset({"cli", "examples", "mcp", "observe", "remote", "scan", "web"})
"""Folders of tests that run on one core only: the core has no part in what they show."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        is_ours = item.path.is_relative_to(here)  # a test may start pytest on files of its own
        if is_ours and item.path.relative_to(here).parts[0] in _NOT_THE_CORES:
            item.add_marker(pytest.mark.rig)


class Clock:
    """Seconds that move when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class _ClockMachine(Machine):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def boottime(self) -> float:
        return self._clock()


OpenFence = Callable[..., Awaitable[EffectFence]]


@pytest.fixture
def clock() -> Clock:
    """The clock of every ledger that `open_fence` opens."""
    return Clock()


@pytest.fixture(params=["memory", "file"])
def ledger(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def open_fence(ledger: str, tmp_path: Path, clock: Clock) -> AsyncIterator[OpenFence]:
    """`await open_fence(lease_ttl=…)`: a fence on this test's one ledger; each call another one."""
    memory = MemoryStore(clock)
    opened: list[EffectFence] = []

    async def open_(**config: Any) -> EffectFence:
        store: Store = memory
        if ledger == "file":
            store = await FileStore.open(
                tmp_path / "ledger" / "effects.jsonl",
                machine=_ClockMachine(clock),
                check_body=records.check_body,
            )
        opened.append(EffectFence(FenceConfig(**config), store=store))
        return opened[-1]

    yield open_
    for fence in opened:
        await fence.aclose(drain_seconds=0)


@pytest.fixture
async def fence(open_fence: OpenFence) -> EffectFence:
    """A fence as it comes, on a clock that stands still."""
    return await open_fence()


def asked(intent: str = "charge:o1", **fields: Any) -> EffectRequest:
    """A request that differs from others in what the test says."""
    base: dict[str, Any] = {
        "intent": intent,
        "domain": "order:o1",
        "tool": "charge",
        "args": {"amount": 4900},
        "agent": "billing",
    }
    return EffectRequest(**{**base, **fields})


async def claimed(
    fence: EffectFence, request: EffectRequest | None = None, **fields: Any
) -> PreparedEffect:
    """The ticket of a request that is admitted."""
    admission = await fence.prepare(request or asked(**fields))
    assert isinstance(admission, Fresh)
    return admission.prepared


async def until(condition: Callable[[], object]) -> None:
    """Let others run until it holds; the test's timeout is the bound."""
    while not condition():  # noqa: ASYNC110 - nobody could set an event for what a test looks at
        await asyncio.sleep(0)


async def words_of(fence: EffectFence, intent: str) -> list[dict[str, Any]]:
    """The words, releases and late commits that the ledger keeps about an intent."""
    kept = []
    async for view in fence._shared.store.scan(records.HISTORY):
        for record in view.records.values():
            if record is not None:
                body = records.body_of(record)
                if body["intent"] == intent:
                    kept.append(body)
    return kept
