"""A database's store as the shared truth of the SimLoop's tests: called from outside of any loop.

The store lives on a thread with an event loop of its own. Whoever asks waits for the answer, so
that for the SimLoop each call is one step and takes no time; the server's clock is told the
SimLoop's before each.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from effectfence.stores.contract import Applied, Change, Store, View
from effectfence.stores.memory import tag_of
from tests.checker import History
from tests.rules.faulty import Ledger
from tests.rules.simloop import SimLoop

T = TypeVar("T")
_EPOCH = 1_000.0
"""Where the SimLoop's zero lies on the server's clock."""


class Thread:
    """An event loop on a thread of its own, for others to wait on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self.call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class EngineLedger(Ledger):
    """`open_store(clock)` makes the store; `tell` sets the time that its server reads."""

    def __init__(
        self,
        loop: SimLoop,
        history: History,
        thread: Thread,
        open_store: Callable[[Callable[[], float]], Coroutine[Any, Any, Store]],
        tell: Callable[[float], None],
    ) -> None:
        super().__init__(loop, history)
        self._thread = thread
        self._tell = tell
        self._told = -1.0
        self._sim = loop
        self._versions: dict[str, int] = {}
        self._at_the_time()
        self._store = thread.call(open_store(lambda: loop.now + _EPOCH))
        self.epoch = self._store.epoch

    def close(self) -> None:
        self._thread.call(self._store.aclose())

    def _at_the_time(self) -> None:
        if self._sim.now != self._told:
            self._told = self._sim.now
            self._tell(self._told + _EPOCH)

    def read(self, keys: Iterable[str]) -> View:
        self._at_the_time()
        view = self._thread.call(self._store.load(tuple(keys)))
        return View(view.now - _EPOCH, {k: _since(r) for k, r in view.records.items()})

    def write(self, change: Change, *, checked: bool = True) -> Applied | View:
        assert checked, "the engine checks"
        self._at_the_time()
        answer = self._thread.call(self._store.swap(change))
        records = {key: _since(record) for key, record in answer.records.items()}
        if isinstance(answer, View):
            return View(answer.now - _EPOCH, records)
        facts = dict(self._versions)
        for key, record in records.items():
            if record is None:
                self._versions.pop(key, None)
            else:
                self._versions[key] = record.version
        self._watchers.wake(records)
        self._note(records, facts)
        return Applied(answer.now - _EPOCH, records)

    async def load(self, keys: Iterable[str]) -> View:
        return self.read(keys)

    async def swap(self, change: Change) -> Applied | View:
        return self.write(change)

    def peek(self, key: str) -> bool:
        return self._store.peek(key)

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        if tag_of(self.read([key]).records[key]) != tag:
            return
        future = self._watchers.add(key)
        try:
            await asyncio.wait((future,), timeout=seconds)
        finally:
            self._watchers.remove(key, future)

    async def scan(self, label: str) -> AsyncIterator[View]:
        self._at_the_time()

        async def pages() -> list[View]:
            return [view async for view in self._store.scan(label)]

        for view in self._thread.call(pages()):
            yield View(view.now - _EPOCH, {k: _since(r) for k, r in view.records.items()})

    async def purge(self, limit: int = 1000) -> int:
        self._at_the_time()
        return self._thread.call(self._store.purge(limit))


def _since(record: Any) -> Any:
    """Its times as the SimLoop counts them."""
    if record is not None:
        record.at -= _EPOCH
        record.expires_at -= _EPOCH
    return record
