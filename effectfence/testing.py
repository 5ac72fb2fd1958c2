"""For tests of your own money paths: what a network, a clock and a crash may do, on demand.

In a `conftest.py`: `pytest_plugins = ["effectfence.testing"]`. Then

    async def test_a_lost_answer_is_not_paid_twice(fence, effects):
        charge = effects.counted(provider.charge)
        ...
        with pytest.raises(TimeoutError), effects.lose_the_answer():
            await pay("order-1")
        with pytest.raises(OutcomeUnknown):
            await pay("order-1")
        assert effects.count("charge:order-1") == 1

Fixtures: `fence`, `file_fence`, `clock`, `effects`, and `fence_config` to be overridden. All are
plain fixtures, for synchronous tests (`fence.blocking`), pytest-asyncio and anyio alike. Without
pytest: `new_fence`. Invariants:

1.  The fence is the product's own, and its ledger behaves as one; faults are put between the two.
2.  A ledger outlives the processes that die on it: in memory too, where it plays a durable one.
3.  A fault happens once. A block that was to bring it about and did not fails: it tested nothing.
4.  Time moves when the test says so, for the ledger alone; whoever waits for it looks again soon.
    No lease is renewed meanwhile, as if the process had stood still.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from effectfence import records
from effectfence.effects import current_effect
from effectfence.errors import LedgerUnavailable
from effectfence.fence import EffectFence
from effectfence.models import FenceConfig
from effectfence.stores.contract import Applied, Change, Store, View
from effectfence.stores.file import FileStore
from effectfence.stores.machine import Machine
from effectfence.stores.memory import MemoryStore
from effectfence.threads import BlockingFence, ask

__all__ = [
    "Clock",
    "Effects",
    "Happened",
    "ProcessDied",
    "another",
    "at_once",
    "at_once_in_threads",
    "die_before_the_commit",
    "lose_the_answer",
    "new_fence",
]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_LOOK_AGAIN_SECONDS: Final = 0.02


class ProcessDied(BaseException):
    """What `die_before_the_commit` raises. Not an `Exception`: no process handles its own death."""


class Clock:
    """The ledger's seconds, which stand still until the test moves them."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        if not seconds >= 0:
            raise ValueError(f"time can't pass by {seconds!r} seconds; zero or more are wanted")
        self.now += seconds


# --- what really happened -------------------------------------------------------------------------


class Happened(NamedTuple):
    """One effect, as its provider would remember it."""

    intent: str | None
    """`None`: it happened outside of any fence."""
    idempotency_key: str | None
    attempt: int | None


class Effects:
    """The independent log: counts effects where they happen, and knows nothing of the ledger."""

    def __init__(self) -> None:
        self.happened: list[Happened] = []
        self._lost: BaseException | None = None
        self._lock = threading.Lock()

    def count(self, intent: str | None = None) -> int:
        """How many effects happened: of one intent, or of all."""
        with self._lock:
            return sum(intent in (None, happened.intent) for happened in self.happened)

    def counted(self, function: F) -> F:
        """`function`, plain or async, each of whose calls is an effect. Also as a decorator."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                self._note()
                return self._answer(await function(*args, **kwargs))

            return call_async  # type: ignore[return-value]  # it takes and gives the same

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note()
            return self._answer(function(*args, **kwargs))

        return call  # type: ignore[return-value]  # it takes and gives the same

    @contextmanager
    def lose_the_answer(self, error: BaseException | None = None) -> Iterator[None]:
        """In this block the next effect happens, and its caller sees `error` (a `TimeoutError`)."""
        self._lost = error or TimeoutError("the answer was lost; the effect happened")
        try:
            yield
            if self._lost is not None:
                raise AssertionError("no effect happened in this block, so no answer was lost")
        finally:
            self._lost = None

    def _note(self) -> None:
        try:
            ticket = current_effect()
        except LookupError:
            happened = Happened(None, None, None)
        else:
            happened = Happened(ticket.intent, ticket.idempotency_key, ticket.attempt)
        with self._lock:
            self.happened.append(happened)

    def _answer(self, answer: T) -> T:
        with self._lock:
            lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        return answer


# --- what goes wrong ------------------------------------------------------------------------------


@contextmanager
def lose_the_answer(fence: EffectFence | BlockingFence) -> Iterator[None]:
    """In this block the next commit is recorded, and its caller sees `LedgerUnavailable`.

    `error.ran` is true: the effect happened. Asking again replays it.
    """

    async def lose(seat: _Seat, change: Change) -> Applied | View:
        answer = await seat.swap(change)
        if isinstance(answer, View):
            return answer  # a refusal, upon which it is tried again
        stage.fault = None
        raise LedgerUnavailable(ledger=stage.name, reason="the answer was lost", ran=None)

    stage = _stage_of(fence)
    with stage.staged(lose):
        yield


@contextmanager
def die_before_the_commit(fence: EffectFence | BlockingFence) -> Iterator[None]:
    """In this block the process dies before the next commit: `ProcessDied` is raised in its place.

    Nothing is recorded, and the ledger knows at once that the holder is gone. From then on `fence`
    stands for the restarted process: what was open is unknown.
    """

    async def die(seat: _Seat, change: Change) -> Applied | View:
        stage.fault = None
        await stage.die(seat)
        _fence_of(fence)._shared.custody.held.clear()  # in that process's memory
        raise ProcessDied("the process died after the effect and before its commit")

    stage = _stage_of(fence)
    with stage.staged(die):
        yield


async def at_once(
    times: int, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> list[T | BaseException]:
    """The same call `times` times at the same instant; what each gave, or raised."""
    calls = (function(*args, **kwargs) for _ in range(times))
    return await asyncio.gather(*calls, return_exceptions=True)


def at_once_in_threads(
    times: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> list[T | BaseException]:
    """The same for a plain function: in a thread each, let go together."""
    ready = threading.Barrier(times)
    outcomes: list[T | BaseException] = []

    def call() -> None:
        ready.wait()
        try:
            outcomes.append(function(*args, **kwargs))
        except BaseException as error:
            outcomes.append(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(call,)) for _ in range(times)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


# --- fences ---------------------------------------------------------------------------------------


@contextmanager
def new_fence(
    config: FenceConfig | None = None,
    *,
    clock: Clock | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Iterator[EffectFence]:
    """A fence of its own, in memory or (with `path`) on a file, closed when the block ends."""
    clock = clock or Clock()
    ledger = _MemoryLedger(clock) if path is None else _FileLedger(clock, path)
    opened: list[EffectFence] = []
    fence = _open(ledger, config, opened)
    try:
        yield fence
    finally:
        for each in opened:
            ask(functools.partial(each.aclose, 0.0))


def another(fence: EffectFence | BlockingFence) -> EffectFence:
    """A second fence on the same ledger, as another process has it; closed with the first."""
    stage = _stage_of(fence)
    return _open(stage.ledger, _fence_of(fence).config, stage.opened)


def _open(ledger: _Ledger, config: FenceConfig | None, opened: list[EffectFence]) -> EffectFence:
    stage = _Stage(ledger, opened)
    fence = EffectFence(config, store=stage)
    opened.append(fence)
    return fence


def _fence_of(fence: EffectFence | BlockingFence) -> EffectFence:
    return fence._source.fence() if isinstance(fence, BlockingFence) else fence


def _stage_of(fence: EffectFence | BlockingFence) -> _Stage:
    stage = _fence_of(fence)._shared.store
    if not isinstance(stage, _Stage):
        raise TypeError("a fence of effectfence.testing is wanted: this one's ledger is real")
    return stage


# --- ledgers that processes may die on ------------------------------------------------------------


class _Seat(Store, Protocol):
    """A store as one process has it."""

    async def die(self) -> None:
        """What the death of its process would leave behind."""
        ...


class _Ledger(Protocol):
    clock: Clock

    async def seat(self) -> _Seat: ...


_Fault = Callable[[_Seat, Change], Awaitable[Applied | View]]


class _Stage:
    """The store of a fence: this process's seat at the ledger, and what goes wrong next."""

    durable = True

    def __init__(self, ledger: _Ledger, opened: list[EffectFence]) -> None:
        self.ledger = ledger
        self.opened = opened
        self.fault: _Fault | None = None
        self._seat: _Seat = ask(ledger.seat, undo=lambda seat: seat.aclose())
        self.name, self.epoch = self._seat.name, self._seat.epoch

    @contextmanager
    def staged(self, fault: _Fault) -> Iterator[None]:
        if self.fault is not None:
            raise RuntimeError("one thing goes wrong at a time")
        self.fault = fault
        try:
            yield
            if self.fault is not None:
                raise AssertionError("nothing was committed in this block, so nothing went wrong")
        finally:
            self.fault = None

    async def die(self, seat: _Seat) -> None:
        """And be restarted."""
        await seat.die()
        self._seat = await self.ledger.seat()

    def peek(self, key: str) -> bool:
        return self._seat.peek(key)

    async def load(self, keys: Iterable[str]) -> View:
        return await self._seat.load(keys)

    async def swap(self, change: Change) -> Applied | View:
        seat = self._seat
        if self.fault is not None and any(put.label == records.DONE for put in change.puts):
            return await self.fault(seat, change)
        return await seat.swap(change)

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        """Returns early, too: it may have been the clock that moved."""
        await self._seat.changed(key, tag, min(seconds, _LOOK_AGAIN_SECONDS))

    async def scan(self, label: str) -> AsyncIterator[View]:
        async for view in self._seat.scan(label):
            yield view

    async def purge(self, limit: int = 1000) -> int:
        return await self._seat.purge(limit)

    async def aclose(self) -> None:
        await self._seat.aclose()


class _MemoryLedger:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = MemoryStore(clock)
        self.seats = 0
        self.dead: set[str] = set()

    async def seat(self) -> _Seat:
        self.seats += 1
        return _MemorySeat(self, str(self.seats))


class _MemorySeat(MemoryStore):
    def __init__(self, ledger: _MemoryLedger, writer: str) -> None:
        self.__dict__.update(ledger.store.__dict__)  # the same table, lock and watchers
        self.writer, self._dead = writer, ledger.dead

    async def load(self, keys: Iterable[str]) -> View:
        return self._seen(await super().load(keys))

    async def swap(self, change: Change) -> Applied | View:
        answer = await super().swap(change)
        return self._seen(answer) if isinstance(answer, View) else answer

    async def scan(self, label: str) -> AsyncIterator[View]:
        async for view in super().scan(label):
            yield self._seen(view)

    async def die(self) -> None:
        self._dead.add(self.writer)

    def _seen(self, view: View) -> View:
        gone = {
            key for key, record in view.records.items() if record and record.writer in self._dead
        }
        return View(view.now, view.records, frozenset(gone))


class _FileLedger:
    def __init__(self, clock: Clock, path: str | os.PathLike[str]) -> None:
        self.clock = clock
        self.path = path

    async def seat(self) -> _Seat:
        machine = _ClockMachine(self.clock)
        return await _FileSeat.open(self.path, machine=machine, check_body=records.check_body)


class _FileSeat(FileStore):
    async def die(self) -> None:
        await self.abandon()


class _ClockMachine(Machine):
    """The operating system, but for its time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def boottime(self) -> float:
        return self._clock()


# --- fixtures -------------------------------------------------------------------------------------

try:
    import pytest
except ModuleNotFoundError:  # then there is `new_fence`
    pass
else:

    @pytest.fixture
    def fence_config() -> FenceConfig:
        """The configuration of `fence` and `file_fence`: override it with your own."""
        return FenceConfig()

    @pytest.fixture
    def effects() -> Effects:
        """The independent log of what really happened."""
        return Effects()

    @pytest.fixture
    def _effectfence_clock() -> Clock:
        return Clock()

    @pytest.fixture
    def clock(_effectfence_clock: Clock) -> Clock:
        """The clock of `fence` and `file_fence`: `clock.advance(61)`."""
        return _effectfence_clock

    @pytest.fixture
    def fence(fence_config: FenceConfig, _effectfence_clock: Clock) -> Iterator[EffectFence]:
        """A fresh fence in memory; `fence.blocking` for synchronous code."""
        with new_fence(fence_config, clock=_effectfence_clock) as opened:
            yield opened

    @pytest.fixture
    def file_fence(
        fence_config: FenceConfig, _effectfence_clock: Clock, tmp_path: Path
    ) -> Iterator[EffectFence]:
        """A fresh fence on a ledger in a file, `tmp_path / "effects.jsonl"`."""
        path = tmp_path / "effects.jsonl"
        with new_fence(fence_config, clock=_effectfence_clock, path=path) as opened:
            yield opened
