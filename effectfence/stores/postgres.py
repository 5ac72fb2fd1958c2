"""The store in a PostgreSQL database, shared by any number of processes on any number of machines.

What a change means is in `swap.sql`, what is asked of the server in `postgres_server`, who waits in
`postgres_watch`; here is how many callers become few statements.

1.  A connection belongs to one event loop. Each loop that calls the store has a `_Session` of its
    own: a queue and a few connections. It ends with its loop, or with the store.
2.  While all connections are busy, calls wait and become one statement, one transaction and one
    sync: `swap` takes a batch of changes, each all or nothing. A lone call goes at once.
3.  In order. A call waits while one before it, that has no answer yet, writes a key that it names,
    or names one that it writes. Within a batch they take effect in order.
4.  Every call has an answer within the address's `timeout`, or `LedgerUnavailable`. What failed
    for certain (a deadlock, a lost race for a connection) is asked again; what may have been
    written is asked again as it was, and the server knows the writers' numbers. `ran` says which.
5.  A call whose caller was cancelled is dropped if it was not sent yet; else it goes on.
6.  Time is the server's. It never goes back: what has passed, by this process's monotonic clock,
    since the server last told it, is a lower bound for what it may say next (a hundredth slower,
    so that no process's quick clock drives the others).
7.  After a fork the child's copy refuses every call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Self

import asyncpg

from effectfence.errors import LedgerUnavailable
from effectfence.stores.contract import (
    ANY,
    NEVER,
    Applied,
    Change,
    Record,
    VersionOf,
    View,
)
from effectfence.stores.postgres_server import (
    DRIVER_ERRORS,
    VERSION,
    Address,
    Link,
    Server,
    connect,
    is_certain,
    look,
    make,
    parse,
    why,
)
from effectfence.stores.postgres_watch import Watch

_log = logging.getLogger("effectfence")

_PAGE: Final = 256
_BATCH_KEYS: Final = 128
"""Each is a lock, or two, in the server's table."""
_BATCH_CALLS: Final = 4096
_FAIR_SHARE: Final = 2
"""Calls that are not worth a second statement."""
_BATCH_BYTES: Final = 4 << 20
_LONGEST_KEY: Final = 2600
"""Bytes; an index entry has to fit into a third of a page."""
_SWEEP_SECONDS: Final = 60.0
_SWEPT_AT_ONCE: Final = 500
_REMEMBERED: Final = 10_000
_RATE: Final = 0.99

_AGAIN: Final = ("40001", "40P01", "53200", "53300", "57014")
"""Serialization failure, deadlock, out of memory (for locks too) or of connections, and a query
that others cancelled: asked again."""
_ANOTHER: Final = ("25006", "0A000", "26000")
"""A primary that became a standby, and a prepared statement that the server no longer has as it
was: asked again on another connection."""
_HELD: Final = "55P03"
"""Somebody else held a lock for longer than we wait."""

_COLUMNS: Final = "r.key, r.version, r.tag, r.stamp, r.at, r.label, r.body, r.expires_at"
_STATE: Final = (
    "{schema}.clock(), pg_is_in_recovery(), current_setting('synchronous_standby_names') <> ''"
)
_LOAD: Final = (
    f"SELECT {_COLUMNS}, s.* FROM (SELECT {_STATE}) AS s "
    "LEFT JOIN {schema}.records r ON r.key = ANY ($1::text[])"
)
_LIST: Final = (
    f"SELECT {_COLUMNS}, s.* FROM (SELECT {_STATE}) AS s LEFT JOIN LATERAL "
    "(SELECT * FROM {schema}.records WHERE label = $1 AND key > $2 "
    f"ORDER BY key LIMIT {_PAGE}) AS r ON true"
)
_WAIT: Final = (
    "WITH w AS MATERIALIZED (SELECT pg_logical_emit_message(true, 'effectfence', '')) "
    "SELECT l.* FROM w, LATERAL ({}) AS l"
)
"""Around a statement that only reads: its answer waits for the synchronous standbys."""
_SWAP: Final = (
    "SELECT * FROM {schema}.swap($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, "
    "$16, $17, $18, $19, $20)"
)


@dataclass(slots=True, eq=False)
class _Call:
    """One call, from its queue to its answer."""

    future: asyncio.Future[Any]
    keys: tuple[str, ...]
    """Every key that is named."""
    until: float
    """When its time is over, by its loop's clock."""
    writes: frozenset[str] = frozenset()
    change: Change | None = None
    writer: int = 0
    size: int = 0

    def collides(self, reading: dict[str, int], writing: dict[str, int]) -> bool:
        """Whether it must wait for those who read and write these keys."""
        if writing and not writing.keys().isdisjoint(self.keys):
            return True
        return bool(reading) and not reading.keys().isdisjoint(self.writes)


class PostgresStore:
    """A `Store` in a schema of a database. Made by `open`; see `contract` for what it promises."""

    durable = True

    def __init__(self, address: Address, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.name = address.name
        self.epoch = ""
        self.address = address
        self._process = os.getpid()
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}
        self._closed = False
        self._told = (-NEVER, 0.0)
        """The latest time that the server told, and when, by our own clock, we heard it."""
        self._young: set[str] = set()
        self._old: set[str] = set()
        self._swept = time.monotonic() - random.uniform(0, _SWEEP_SECONDS)  # short lives sweep too
        self.waits = False
        """Whether an answer that only reads has to wait for synchronous standbys."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        require_durable: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Self:
        """The store in the schema that `url` names (`?schema=`), made if there is none.

        Raises `LedgerUnavailable` for a server that can't be reached or relied on, and then has
        changed nothing; `ValueError` for an address that means nothing.
        """
        store = cls(parse(url), monotonic)
        session = store._session()
        try:
            await session.first_connection(require_durable)
        except BaseException:
            await store.aclose()
            raise
        return store

    # Asking (any thread, any loop) ----------------------------------------------------------------

    def peek(self, key: str) -> bool:
        """Whether something probably stands under `key`: a hint from memory alone, maybe stale."""
        return key in self._young or key in self._old

    async def load(self, keys: Iterable[str]) -> View:
        """The records under `keys`."""
        session, named = self._session(), tuple(dict.fromkeys(keys))
        if (link := session.free(named)) is not None:
            view = await session.load_at_once(link, named)
            if view is not None:
                return view
        asked: View = await session.ask(named)
        return asked

    async def swap(self, change: Change) -> Applied | View:
        """Write `change.puts` if every expectation holds, else give what is there instead.

        `ValueError` for a change that no table can hold. Cancelled, it may still apply.
        """
        answer: Applied | View = await self._session().ask_change(change)
        return answer

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        """Return as soon as `key` no longer bears `tag`, or `seconds` passed."""
        await self._session().watch.changed(key, tag, seconds)

    async def scan(self, label: str) -> AsyncIterator[View]:
        """All records that bear `label`, in pages, each page of one instant."""
        session = self._session()
        await session.settled()
        after = ""
        while True:
            view, last = await session.page(label, after)
            if view.records:
                yield view
            if last is None:
                return
            after = last

    async def purge(self, limit: int = 1000) -> int:
        """Forget up to `limit` expired records; how many went."""
        session = self._session()
        await session.settled()
        return await session.purge(limit)

    async def aclose(self) -> None:
        """Finish what was begun, then let go of the connections; idempotent."""
        if self._process != os.getpid():
            return
        self._closed = True
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            await session.end_from(asyncio.get_running_loop())

    def _session(self) -> _Session:
        if self._process != os.getpid():
            raise self.address.unavailable(
                "it was opened before a fork; open it again in the child process"
            )
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is not None and not self._closed:
            return session
        if self._closed:
            error = self.address.unavailable("it is closed")
            error.closed = True
            raise error
        with self._lock:
            session = self._sessions[loop] = _Session(self, loop)
        return session

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._sessions.pop(loop, None)

    # What all sessions share ----------------------------------------------------------------------

    def earliest(self) -> float:
        """No time before this one can be now."""
        told, heard = self._told
        return told + _RATE * max(self._monotonic() - heard, 0.0)

    def heard(self, now: float) -> float:
        """The server told its time; from here on it is not earlier."""
        with self._lock:
            now = max(now, self.earliest())
            self._told = (now, self._monotonic())
        return now

    def remember(self, records: dict[str, Record | None]) -> None:
        """For `peek`: what stood under these keys."""
        for key, record in records.items():
            if record is not None:
                self._young.add(key)
            else:
                self._young.discard(key)
                self._old.discard(key)
        if len(self._young) > _REMEMBERED:
            self._young, self._old = set(), self._young

    def is_sweep_due(self) -> bool:
        """True for one caller a minute or so."""
        now = time.monotonic()
        with self._lock:
            if now - self._swept < _SWEEP_SECONDS:
                return False
            self._swept = now + random.uniform(0, _SWEEP_SECONDS)
        return True

    def sweep_again(self) -> None:
        self._swept = -NEVER


class _Session:
    """The store's part on one event loop: its calls, its connections, its waiters."""

    def __init__(self, store: PostgresStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._address = store.address
        self._queue: deque[_Call] = deque()
        self._reading: dict[str, int] = {}
        self._writing: dict[str, int] = {}
        """How many calls under way name a key, and write it."""
        self._idle: list[Link] = []
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._busy = 0
        self._scheduled = False
        self._ending: asyncio.Task[None] | None = None
        self._calls_under_way: set[_Call] = set()
        self.watch = Watch(self._address, self.ask)
        self._schema = self._address.schema
        load = _LOAD.format(schema=self._schema)
        self._load_text = (load, _WAIT.format(load))
        """Of a read that need not wait for standbys, and of one that must."""
        self._swap_text = _SWAP.format(schema=self._schema)
        # A loop that ends closes its generators first; no other sign of its end reaches us.
        self._life = self._live()
        with suppress(StopIteration):
            self._life.__anext__().send(None)

    async def _live(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._end()

    async def _end(self) -> None:
        """Whoever comes second waits for whoever came first."""
        if self._ending is None:
            self._ending = self._loop.create_task(self._let_go())
        await asyncio.wait((self._ending,))

    async def _let_go(self) -> None:
        self._store._forget(self._loop)
        await self.watch.aclose()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._address.timeout)
        for task in self._tasks:
            task.cancel()
        for link in self._links:
            link.hang_up()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    async def end_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """End it, called on any loop. One that is not running any more can't be waited for."""
        if loop is self._loop:
            await self._end()
            await self._life.aclose()
            return
        ending = self._end()
        try:
            ended = asyncio.run_coroutine_threadsafe(ending, self._loop)
        except RuntimeError:  # that loop is closed, and closed this first
            ending.close()
            return
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.wrap_future(ended), 1.0)

    # Calls ----------------------------------------------------------------------------------------

    def ask(self, keys: tuple[str, ...]) -> asyncio.Future[Any]:
        """A `View` of these keys."""
        return self._add(_Call(self._loop.create_future(), keys, self._until()))

    def ask_change(self, change: Change) -> asyncio.Future[Any]:
        """What became of a change: `Applied`, or a `View`."""
        _check(change)
        writes = frozenset([put.key for put in change.puts])
        keys = tuple(dict.fromkeys((*change.expect, *(put.key for put in change.puts))))
        size = sum(len(put.body) for put in change.puts if put.body)
        future = self._loop.create_future()
        writer = secrets.randbits(63)
        return self._add(_Call(future, keys, self._until(), writes, change, writer, size))

    def _until(self) -> float:
        return self._loop.time() + self._address.timeout

    def free(self, keys: tuple[str, ...]) -> Link | None:
        """A connection for a lone read that waits for nobody, if there is one."""
        if self._queue or self._busy >= self._address.pool or not keys:
            return None
        if self._writing and not self._writing.keys().isdisjoint(keys):
            return None
        while self._idle:
            link = self._idle.pop()
            if not link.is_closed:
                return link
            self._links.discard(link)
        return None

    async def load_at_once(self, link: Link, keys: tuple[str, ...]) -> View | None:
        """What stands under `keys`, without a task of its own; `None` if it is to be asked again.

        Cancelled, it hangs up: a read leaves nothing behind.
        """
        self._busy += 1
        _count(self._reading, keys)
        earliest, waits = self._store.earliest(), self._store.waits
        try:
            rows = await link.fetch(self._address.timeout / 2, self._load_text[waits], keys)
        except DRIVER_ERRORS:
            link.hang_up()
            return None
        finally:
            self._busy -= 1
            _take_away(self._reading, keys)
            if link.is_closed:
                self._links.discard(link)
            else:
                self._idle.append(link)
            if self._queue:
                self._dispatch()
        first = rows[0]
        if link.doubtful or first[9] or (first[10] and not waits):
            return None
        found = {row[0]: _record(row) for row in rows if row[0] is not None}
        return self._view(max(first[8], earliest), {key: found.get(key) for key in keys})

    def _add(self, call: _Call) -> asyncio.Future[Any]:
        if self._busy == 0 and self._idle and not self._queue:  # nobody to wait for, or to go with
            self._busy = 1
            self._begin([call])
            return call.future
        self._queue.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)
        return call.future

    def _dispatch(self) -> None:
        """Give what waits to connections that are free."""
        self._scheduled = False
        while self._queue and self._busy < self._address.pool:
            batch = self._gather(self._address.pool - self._busy)
            if not batch:
                return
            self._busy += 1
            self._begin(batch)

    def _enter(self, batch: list[_Call]) -> None:
        for call in batch:
            _count(self._reading, call.keys)
            _count(self._writing, call.writes)
        self._calls_under_way.update(batch)

    def _begin(self, batch: list[_Call]) -> None:
        self._enter(batch)
        task = self._loop.create_task(self._serve(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gather(self, free: int) -> list[_Call]:
        """The next calls that may go together: all of them reads, or all of them changes.

        What waits is shared among the connections that are `free`, and the server's processors
        with it.
        """
        batch: list[_Call] = []
        left: list[_Call] = []
        reading: dict[str, int] = {}
        writing: dict[str, int] = {}
        ours: tuple[dict[str, int], dict[str, int]] = {}, {}
        size = 0
        now = self._loop.time()
        queue = self._queue
        share = max(-(-len(queue) // free), _FAIR_SHARE)
        while queue and len(ours[0]) < _BATCH_KEYS and len(batch) < _BATCH_CALLS:
            call = queue.popleft()
            if call.future.done():  # cancelled before it was sent
                continue
            if call.until < now:
                reason = "it has too much to do, or does not answer: this was never sent"
                call.future.set_exception(self._address.unavailable(reason))
                continue
            kind_differs = bool(batch) and (batch[0].change is None) != (call.change is None)
            if (
                kind_differs
                or (size and size + call.size > _BATCH_BYTES)
                or call.collides(self._reading, self._writing)
                or (left and call.collides(reading, writing))
                or (len(batch) >= share and not call.collides(*ours))  # that one can go elsewhere
            ):
                left.append(call)
                _count(reading, call.keys)
                _count(writing, call.writes)
                continue
            batch.append(call)
            _count(ours[0], call.keys)
            _count(ours[1], call.writes)
            size += call.size
        queue.extendleft(reversed(left))
        return batch

    async def _serve(self, batch: list[_Call]) -> None:
        """One connection's work, as long as there is any."""
        try:
            while batch:
                await self._answer(batch)
                batch = self._gather(self._address.pool - self._busy + 1)
                self._enter(batch)
                if not batch and self._store.is_sweep_due():
                    with suppress(LedgerUnavailable):
                        if await self.purge(_SWEPT_AT_ONCE) == _SWEPT_AT_ONCE:
                            self._store.sweep_again()
        finally:
            self._busy -= 1
        self._dispatch()

    async def _answer(self, batch: list[_Call]) -> None:
        try:
            ask = self._load if batch[0].change is None else self._swap
            answers: Sequence[Any] = await ask(batch)
            for call, answer in zip(batch, answers, strict=True):
                if not call.future.done():
                    call.future.set_result(answer)
        except LedgerUnavailable as error:
            for call in batch:
                if not call.future.done():
                    call.future.set_exception(self._address.unavailable(error.reason, error.ran))
        except BaseException as error:
            for call in batch:
                if not call.future.done():
                    fault = f"an internal error, {type(error).__name__}: {error}"
                    call.future.set_exception(self._address.unavailable(fault, None))
            if not isinstance(error, Exception):  # the loop ends
                raise
            _log.exception("%s: an internal error", self._store.name)
        finally:
            for call in batch:
                _take_away(self._reading, call.keys)
                _take_away(self._writing, call.writes)
            self._calls_under_way.difference_update(batch)

    async def settled(self) -> None:
        """Wait for everything that was asked before."""
        under_way = [call.future for call in (*self._calls_under_way, *self._queue)]
        if under_way:
            await asyncio.wait(under_way)

    # Reading --------------------------------------------------------------------------------------

    async def _load(self, batch: list[_Call]) -> list[View]:
        keys = list(dict.fromkeys(key for call in batch for key in call.keys))
        earliest = self._store.earliest()
        rows = await self._read(_LOAD, keys, until=min(call.until for call in batch))
        found = {row[0]: _record(row) for row in rows if row[0] is not None}
        views = []
        told = max((row[8] for row in rows), default=earliest)
        for call in batch:
            standing = {key: found.get(key) for key in call.keys}
            views.append(self._view(max(told, earliest), standing))
        return views

    def _view(self, now: float, standing: dict[str, Record | None]) -> View:
        """What is there at `now`, which is not before anything that it shows was written."""
        for record in standing.values():
            if record is not None and record.at > now:
                now = record.at
        now = self._store.heard(now)
        for key, record in standing.items():
            if record is not None and record.expires_at <= now:
                standing[key] = None
        self._store.remember(standing)
        return View(now, standing)

    async def page(self, label: str, after: str) -> tuple[View, str | None]:
        """The records with `label` above the key `after`, and where the next page begins."""
        earliest = self._store.earliest()
        rows = await self._read(_LIST, label, after)
        found = {row[0]: _record(row) for row in rows if row[0] is not None}
        last = rows[-1][0] if len(found) == _PAGE else None
        view = self._view(max(rows[0][8], earliest), dict(found))
        return View(view.now, {key: r for key, r in view.records.items() if r is not None}), last

    async def _read(self, statement: str, *values: Any, until: float | None = None) -> list[Any]:
        text = statement.format(schema=self._schema)
        while True:
            waits = self._store.waits
            asked = _WAIT.format(text) if waits else text
            rows = await self._ask_server(asked, *values, until=until)
            if rows[0][9]:
                raise self._address.unavailable(
                    "it is a standby, which only follows; name the primary"
                )
            if not rows[0][10] or waits:
                return rows
            self._store.waits = True

    async def purge(self, limit: int) -> int:
        text = f"SELECT {self._schema}.purge($1, $2)"
        rows = await self._ask_server(text, self._store.earliest(), limit)
        went: int = rows[0][0]
        return went

    # Writing --------------------------------------------------------------------------------------

    async def _swap(self, batch: list[_Call]) -> list[Applied | View]:
        changes = [call.change for call in batch if call.change is not None]
        values = _encoded(batch, changes)
        until = min(call.until for call in batch)
        rows = await self._ask_server(self._swap_text, *values, writes=True, until=until)
        answers: list[Applied | View] = []
        place = 0
        for number, call in enumerate(batch, 1):
            header = rows[place]
            assert header[0] == number
            end = place + 1
            while end < len(rows) and rows[end][0] == number:
                end += 1
            answers.append(self._decoded(call, header, rows[place + 1 : end]))
            place = end
        return answers

    def _decoded(self, call: _Call, header: Any, rows: list[Any]) -> Applied | View:
        assert call.change is not None
        now: float = header[2]
        if not header[1]:
            standing: dict[str, Record | None] = dict.fromkeys(call.keys)
            for row in rows:
                standing[row[3]] = Record(row[4], row[5], row[6], row[7], row[8], row[9], row[10])
            return self._view(now, standing)
        puts = {put.key: put for put in call.change.puts}
        written: dict[str, Record | None] = {}
        for row in rows:
            put, version = puts[row[3]], row[4]
            written[row[3]] = None if version is None else Record(
                version,
                (put.tag or "") if row[5] is None else row[5],
                row[6],
                row[7],
                (put.label or "") if row[8] is None else row[8],
                (put.body or b"") if row[9] is None else row[9],
                row[10],
            )  # fmt: skip
        self._store.heard(now)
        self._store.remember(written)
        return Applied(now, written)

    # The server -----------------------------------------------------------------------------------

    async def _ask_server(
        self, statement: str, *values: Any, writes: bool = False, until: float | None = None
    ) -> list[Any]:
        """Its rows, within the address's `timeout`. `LedgerUnavailable` says what is certain."""
        deadline = self._until() if until is None else until
        attempt, doubt = 0, False
        while True:
            sent, link = False, None
            seconds = max(min(deadline - self._loop.time(), self._address.timeout / 2), 0.05)
            try:
                link = await self._link(seconds)
                seconds = max(min(deadline - self._loop.time(), self._address.timeout / 2), 0.05)
                sent = True
                if writes:
                    patience = int(seconds * 500)  # well before we hang up, so that it is certain
                    earliest = self._store.earliest()
                    rows = await link.fetch(seconds, statement, earliest, patience, doubt, *values)
                else:
                    rows = await link.fetch(seconds, statement, *values)
                if not link.doubtful:
                    self._idle.append(link)
                    return rows
                problem = "a commit's wait for its synchronous standbys was cancelled"
                certain = False
                self._idle.append(link)
            except DRIVER_ERRORS as error:
                certain = not sent or is_certain(error)
                problem = self._after(error, link, certain, doubt=doubt)
            except LedgerUnavailable as error:  # a server that was looked at, and is none of ours
                error.ran = None if doubt else False
                raise
            doubt = doubt or (writes and not certain)
            pause = min(0.02 * 2**attempt, 1.0) * random.uniform(0.5, 1.0) if attempt else 0.0
            attempt += 1
            if self._loop.time() + pause >= deadline:
                raise self._address.unavailable(problem, None if doubt else False)
            await asyncio.sleep(pause)

    def _after(self, error: BaseException, link: Link | None, certain: bool, *, doubt: bool) -> str:
        """What went wrong, if asking again may help; the connection, if it lives, is kept."""
        state = getattr(error, "sqlstate", None)
        if link is None:
            if isinstance(error, asyncpg.PostgresError) and not _passes(state):
                raise self._address.unavailable(why(error), None if doubt else False) from None
            return f"it can't be reached: {why(error)}"
        if not certain:
            link.hang_up()
            self._links.discard(link)
            return f"the connection was lost: {why(error)}"
        if state in _ANOTHER:
            link.hang_up()
            self._links.discard(link)
            return why(error)
        self._idle.append(link)
        if state == _HELD:
            return "others held the same records for too long"
        if state in _AGAIN:
            return why(error)
        raise self._address.unavailable(why(error), None if doubt else False) from None

    async def _link(self, seconds: float) -> Link:
        """A connection that was looked at."""
        while self._idle:
            link = self._idle.pop()
            if not link.is_closed:
                return link
            self._links.discard(link)
        return await self._connected(seconds, self._store.epoch)

    async def _connected(self, seconds: float, epoch: str) -> Link:
        """A new connection, to a server that can be relied on."""
        link = await connect(self._address, seconds)
        try:
            server = await look(link, self._address, seconds, known=True)
            if server.standby:  # maybe only until it is promoted
                raise ConnectionRefusedError("it is a standby, which only follows")
            self._judge(server)
            if server.epoch != epoch:
                raise self._address.unavailable("another ledger stands there now: open it anew")
            await self._prepare(link)
        except BaseException:
            link.hang_up()
            raise
        self._links.add(link)
        return link

    async def first_connection(self, require_durable: bool) -> None:
        """Look at the server, make the schema if it is missing, and learn whose ledger it is."""
        address, seconds = self._address, self._address.timeout
        link: Link | None = None
        try:
            link = await connect(address, seconds)
            server = await look(link, address, seconds)
            self._judge(server)
            for weakness in server.weak():
                if require_durable:
                    raise address.unavailable(f"{weakness}; require_durable was asked for")
                _log.warning("%s: %s", address.name, weakness)
            try:
                if server.schema_version != VERSION:
                    await make(link, address, seconds)
            except asyncpg.ReadOnlySQLTransactionError as error:
                raise address.unavailable(f"it may only be read ({why(error)})") from None
            self._store.epoch = (await look(link, address, seconds, known=True)).epoch
            await self._prepare(link)
        except DRIVER_ERRORS as error:
            if link is not None:
                link.hang_up()
            raise address.unavailable(f"it can't be opened: {why(error)}") from None
        except BaseException:
            if link is not None:
                link.hang_up()
            raise
        self._links.add(link)
        self._idle.append(link)

    def _judge(self, server: Server) -> None:
        for reason in server.refused(pooled=self._address.pooled):
            raise self._address.unavailable(reason)
        self._store.waits = server.waits_for_standbys

    async def _prepare(self, link: Link) -> None:
        if not self._address.pooled:
            await link.prepare(self._swap_text, self._load_text[self._store.waits])


def _passes(state: str | None) -> bool:
    """Whether a refused connection may be had later: starting, stopping, too many, a lost line."""
    return state is not None and (state[:2] in ("08", "53") or state[:3] == "57P")


def _count(counted: dict[str, int], keys: Iterable[str]) -> None:
    for key in keys:
        counted[key] = counted.get(key, 0) + 1


def _take_away(counted: dict[str, int], keys: Iterable[str]) -> None:
    for key in keys:
        if counted[key] == 1:
            del counted[key]
        else:
            counted[key] -= 1


def _record(row: Any) -> Record:
    return Record(row[1], row[2], row[3], row[4], row[5], row[6], row[7])


def _check(change: Change) -> None:
    """Refuse what no table can hold, before anything is sent; others go in the same statement."""
    for key, expect in change.expect.items():
        _check_text(key, _LONGEST_KEY)
        if expect is not ANY and expect.tag is not None:
            _check_text(expect.tag)
    seen = set()
    for put in change.puts:
        _check_text(put.key, _LONGEST_KEY)
        _check_text(put.tag or "")
        _check_text(put.label or "", _LONGEST_KEY)
        if put.key in seen:
            raise ValueError(f"{put.key!r} is put twice in one change")
        seen.add(put.key)


def _check_text(text: str, longest: int = 1 << 20) -> None:
    if "\0" in text or len(text) > longest or len(text.encode()) > longest:
        raise ValueError(f"{text[:80]!r} has a NUL, or more than {longest} bytes")


def _encoded(batch: list[_Call], changes: list[Change]) -> tuple[list[Any] | None, ...]:
    """A batch as the arrays that `swap` takes, from `writers` on."""
    expects = [
        (key, change.expect.get(key, ANY))
        for call, change in zip(batch, changes, strict=True)
        for key in call.keys
    ]
    locks = sorted({key for key, _ in expects}, key=str.encode)
    written = {key for call in batch for key in call.writes}
    puts = [put for change in changes for put in change.puts]
    stamps = [put.stamp for put in puts]
    return (
        [call.writer for call in batch],
        locks,
        [key in written for key in locks],
        list(accumulate((len(call.keys) for call in batch), initial=1)),
        [key for key, _ in expects],
        _given([expect.version for _, expect in expects]),
        _given([expect.tag for _, expect in expects]),
        _given([expect.stamp for _, expect in expects]),
        list(accumulate((len(change.puts) for change in changes), initial=1)),
        [put.key for put in puts],
        _given([put.tag for put in puts]),
        _given([None if isinstance(stamp, VersionOf) else stamp for stamp in stamps]),
        _given([stamp.key if isinstance(stamp, VersionOf) else None for stamp in stamps]),
        _given([put.label for put in puts]),
        _given([put.body for put in puts]),
        _given([put.expires_in for put in puts]),
        [put.bump + 2 * put.newer + 4 * put.delete + 8 * put.floor for put in puts],
    )


def _given(values: list[Any]) -> list[Any] | None:
    """A column that nobody fills costs nothing to send."""
    return None if values.count(None) == len(values) else values
