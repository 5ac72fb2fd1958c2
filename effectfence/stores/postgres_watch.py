"""Who waits for which record of a PostgreSQL store: one connection listens for all of them.

1.  A watched key is known to the server by a lock that this connection holds for its session, so
    that it is forgotten when the connection is, and a change tells nobody where nobody watches.
2.  Level, not edge. The lock is taken after whoever is writing the key; only then is the record
    looked at. What was written before is seen by that look, what comes later is told.
3.  What is told is a hint: a waiter is woken when its record was seen to bear another tag. After
    the connection was lost, and now and then, every watched record is looked at.
4.  One task per event loop serves all its waiters, and ends when there are none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from effectfence.errors import LedgerUnavailable
from effectfence.stores.contract import View
from effectfence.stores.postgres_server import DRIVER_ERRORS, Address, Link, connect

_POLL_SECONDS: Final = 5.0
"""How often all watched records are looked at anyway."""
_POOLED_POLL_SECONDS: Final = 0.25
"""The same where nobody can listen: behind a pooler that hands out transactions."""
_AGAIN_SECONDS: Final = 0.5
"""After which a connection that could not be had is asked for again."""
_MOST_LOCKS: Final = 1000
"""Of this connection, in the server's table of locks. What is watched beyond that is polled."""
_PAGE: Final = 100

Look = Callable[[tuple[str, ...]], Awaitable[View]]


class Watch:
    """The waiters of one event loop. `look` reads records in the order of the store's calls."""

    def __init__(self, address: Address, look: Look, poll_seconds: float | None = None) -> None:
        self._address = address
        self._look = look
        self._poll = poll_seconds or (_POOLED_POLL_SECONDS if address.pooled else _POLL_SECONDS)
        self._waiters: dict[str, dict[asyncio.Future[None], str]] = {}
        self._locked: dict[str, int] = {}
        """The keys that the server knows of, and the number that it tells them by."""
        self._keys_of: dict[int, set[str]] = {}
        self._unseen: dict[str, None] = {}
        """Keys to be looked at."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, {})[future] = tag
        self._unseen[key] = None
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), name="effectfence watch")
        try:
            await asyncio.wait((future,), timeout=seconds)
            if future.done():
                future.result()
        finally:
            waiters = self._waiters.get(key)
            if waiters is not None:
                waiters.pop(future, None)
                if not waiters:
                    del self._waiters[key]
                    self._wake.set()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._hang_up()
        for waiters in self._waiters.values():
            for future in waiters:
                if not future.done():
                    error = self._address.unavailable("it is closed")
                    error.closed = True
                    future.set_exception(error)

    # The task -------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at_all = loop.time()
        while self._waiters or self._locked:
            self._wake.clear()
            known = await self._register()
            if loop.time() - looked_at_all >= self._poll:
                self._unseen.update(dict.fromkeys(self._waiters))
                looked_at_all = loop.time()
            await self._look_at_unseen()
            if self._waiters:
                with suppress(TimeoutError):
                    pause = self._poll if known else min(self._poll, _AGAIN_SECONDS)
                    async with asyncio.timeout(pause * random.uniform(0.8, 1.0)):
                        await self._wake.wait()

    async def _look_at_unseen(self) -> None:
        while self._unseen:
            page = list(islice(self._unseen, _PAGE))
            for key in page:
                del self._unseen[key]
            page = [key for key in page if key in self._waiters]
            if not page:
                continue
            try:
                view = await self._look(tuple(page))
            except LedgerUnavailable:
                return  # looked at again at the next poll; a waiter has its own end
            for key in page:
                record = view.records[key]
                self._tell(key, "" if record is None else record.tag)

    def _tell(self, key: str, standing: str) -> None:
        for future, tag in self._waiters.get(key, {}).items():
            if tag != standing and not future.done():
                future.set_result(None)

    def _heard(self, _connection: Any, _process: int, _channel: str, number: str) -> None:
        keys = self._keys_of.get(int(number), ())
        self._unseen.update(dict.fromkeys(keys))
        self._wake.set()

    # Being known to the server --------------------------------------------------------------------

    async def _register(self) -> bool:
        """Have the server know what is watched, and no more; whether it does."""
        if self._address.pooled:
            return True
        if self._link is not None and self._link.is_closed:
            self._hang_up()
            self._unseen.update(dict.fromkeys(self._waiters))
        new = [key for key in self._waiters if key not in self._locked]
        old = [key for key in self._locked if key not in self._waiters]
        if not new and not old:
            return True
        try:
            if self._link is None:
                self._link = await self._listening()
            link = self._link
            assert link is not None
            for page in _pages(old):
                await self._unlock(link, page)
            room = _MOST_LOCKS - len(self._locked)
            for page in _pages(new[: max(room, 0)]):
                await self._lock(link, page)
        except DRIVER_ERRORS:
            self._hang_up()
            return False
        return True

    async def _listening(self) -> Link:
        link = await connect(
            self._address, self._address.timeout / 2, application="effectfence waiting"
        )
        await link.listen(self._address.channel, self._heard, self._wake.set)
        return link

    async def _lock(self, link: Link, keys: list[str]) -> None:
        schema = self._address.schema
        rows = await link.fetch(
            self._address.timeout / 2,
            f"SELECT k.key, k.number, pg_advisory_lock_shared(k.number) FROM (SELECT key, "
            f"{schema}.watch_of(key) AS number FROM unnest($1::text[]) AS key ORDER BY 2) AS k",
            keys,
        )
        for key, number, _ in rows:
            self._locked[key] = number
            self._keys_of.setdefault(number, set()).add(key)
            self._unseen[key] = None

    async def _unlock(self, link: Link, keys: list[str]) -> None:
        await link.fetch(
            self._address.timeout / 2,
            "SELECT pg_advisory_unlock_shared(number) FROM unnest($1::bigint[]) AS number",
            [self._locked[key] for key in keys],
        )
        for key in keys:
            number = self._locked.pop(key)
            self._keys_of[number].discard(key)
            if not self._keys_of[number]:
                del self._keys_of[number]

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.hang_up()
            self._link = None
        self._locked.clear()
        self._keys_of.clear()


def _pages(keys: Iterable[str]) -> Iterable[list[str]]:
    listed = list(keys)
    return (listed[start : start + _PAGE] for start in range(0, len(listed), _PAGE))
