"""The store that lives and dies with this process; any number of threads and event loops.

A lock makes each call one instant; nothing here ever waits while holding it, so no call of `load`
or `swap` suspends. Waiters are woken by the write that they wait for.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable

from effectfence.stores.contract import Applied, Change, Record, View
from effectfence.stores.table import Table
from effectfence.stores.watchers import Watchers

_PAGE = 256


class MemoryStore:
    """`clock` gives seconds that never go back; the monotonic clock unless a test owns it."""

    name = "memory:"
    durable = False
    writer = ""
    """Noted on every record, for a store that plays several processes (`effectfence.testing`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = secrets.token_hex(16)
        self._clock = clock
        self._table = Table()
        self._lock = threading.Lock()
        self._watchers = Watchers()

    def peek(self, key: str) -> bool:
        return key in self._table.records

    async def load(self, keys: Iterable[str]) -> View:
        with self._lock:
            now = self._clock()
            return View(now, self._table.view(keys, now))

    async def swap(self, change: Change) -> Applied | View:
        table = self._table
        with self._lock:
            now = self._clock()
            if not table.holds(change, now):
                keys = dict.fromkeys(change.expect)
                keys.update((put.key, None) for put in change.puts)
                return View(now, table.view(keys, now))
            written = table.write(change, now, self.writer)
            if self._watchers.keys:
                self._watchers.wake(written)
        return Applied(now, written)

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        with self._lock:
            record = self._table.get(key, self._clock())
            if tag_of(record) != tag:
                return
            future = self._watchers.add(key)
        try:
            await asyncio.wait((future,), timeout=seconds)
        finally:
            with self._lock:
                self._watchers.remove(key, future)

    async def scan(self, label: str) -> AsyncIterator[View]:
        with self._lock:
            keys = self._table.keys_labelled(label)
        for start in range(0, len(keys), _PAGE):
            view = await self.load(keys[start : start + _PAGE])
            yield View(view.now, {k: r for k, r in view.records.items() if r and r.label == label})

    async def purge(self, limit: int = 1000) -> int:
        with self._lock:
            return self._table.drop_expired(self._clock(), limit)

    async def aclose(self) -> None:
        return None


def tag_of(record: Record | None) -> str:
    """What `changed` compares: `""` for a record that is absent."""
    return "" if record is None else record.tag
