"""The store on one file, shared by any number of processes of one machine: threads and batches.

What the bytes mean is in `ledger_format`, what the file, its locks and its time mean in
`ledger_file`; here is how many callers become few batches.

1.  One thread per store owns the file, the table and the watchers; nobody else touches them. Calls
    of any thread and event loop only hand over an operation and wait for its future.
2.  What one iteration of an event loop asks for goes over at once: the first call of the iteration
    schedules the hand-over behind everything that is ready to run. The answers of a batch come back
    with one wake-up for each loop.
3.  A batch is decided in the order in which it was asked. Reads, and swaps that are plainly refused
    by what is durable, need no lock and no sync, unless they name a key of an operation before
    them that does. All others share one lock, one write and one sync.
4.  Nobody is answered before everything that the answer rests on is durable. If the write fails the
    table is put back as it was; if the sync fails this store is closed for good.
5.  After a fork the child's copy refuses every call; it has no thread, and its descriptors were
    closed before anything of the child ran.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from effectfence.errors import LedgerCorrupt, LedgerUnavailable
from effectfence.stores.contract import Applied, Change, Record, View
from effectfence.stores.ledger_file import CheckBody, LedgerFile, Lost, NotWritten, Summary, verify
from effectfence.stores.ledger_format import encode_change
from effectfence.stores.machine import Machine
from effectfence.stores.memory import tag_of

__all__ = ["FileStore", "Machine", "Summary", "verify"]

_PAGE: Final = 256
_LONGEST_BATCH: Final = 4096
_GLANCE_SECONDS: Final = 0.02
"""How often the thread looks for other processes' changes while somebody waits for one."""


@dataclass(slots=True, eq=False)
class _Operation:
    """One call, from its hand-over to its answer; its type says what `asked` is."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    asked: Any
    answer: Any = None
    error: BaseException | None = None

    def keys(self) -> Iterable[str]:
        """Every key that the answer depends on or that is written."""
        return ()


class _Swap(_Operation):
    """asked: the `Change`"""

    __slots__ = ()

    def keys(self) -> Iterable[str]:
        return _named(self.asked)


class _Load(_Operation):
    """asked: a tuple of keys"""

    __slots__ = ()

    def keys(self) -> Iterable[str]:
        keys: tuple[str, ...] = self.asked
        return keys


class _Watch(_Operation):
    """asked: the key, and the tag that it bears so far"""

    __slots__ = ()

    def keys(self) -> Iterable[str]:
        key: str = self.asked[0]
        return (key,)


class _Follow(_Operation):
    """asked: the follower; answered once it has something to be shown"""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class _Follower:
    """Somebody who wants to see every change: the keys that were not shown to it yet."""

    pending: dict[str, None] = field(default_factory=dict)
    waiting: _Follow | None = None
    left: bool = False


class _List(_Operation):
    """asked: the label"""

    __slots__ = ()


class _Purge(_Operation):
    """asked: how many at most"""

    __slots__ = ()


class _Compact(_Operation):
    __slots__ = ()


class _Close(_Operation):
    """asked: whether to finish what was begun"""

    __slots__ = ()


_Undo = list[tuple[str, Record | None]]
"""What stood under the keys of a batch before it."""


def _named(change: Change) -> dict[str, None]:
    """Every key of a change, expected or put."""
    keys = dict.fromkeys(change.expect)
    for put in change.puts:
        keys[put.key] = None
    return keys


class FileStore:
    """A `Store` on a file. Made by `open`; see `contract` for what its methods promise.

    The folder is created if it is missing. Several stores, here and in other processes of this
    machine, may have the same file open.
    """

    durable = True

    def __init__(self, path: str | os.PathLike[str], machine: Machine) -> None:
        self.name = os.path.abspath(path)
        self.epoch = ""
        self._process = os.getpid()
        self._machine = machine
        self._queue: queue.SimpleQueue[list[_Operation]] = queue.SimpleQueue()
        self._outboxes: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
        self._ended = False
        self._why_ended: Lost | None = None
        self._file: LedgerFile
        self._watched: dict[str, list[_Watch]] = {}
        self._followers: list[_Follower] = []

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        machine: Machine | None = None,
        check_body: CheckBody | None = None,
        accept_rollback: bool = False,
    ) -> Self:
        """The store on the ledger at `path`, created if there is none.

        `check_body(key, label, body)` is called for every record read; a `ValueError` from it means
        that the ledger is corrupt. `accept_rollback` goes on with a ledger that lacks acknowledged
        records. Raises `LedgerUnavailable` or `LedgerCorrupt`, and has then changed nothing.
        """
        store = cls(path, machine or Machine())
        opened = asyncio.get_running_loop().create_future()
        thread = threading.Thread(
            target=store._run,
            args=(opened, check_body, accept_rollback),
            name=f"effectfence {store.name}",
            daemon=True,
        )
        thread.start()
        try:
            await asyncio.shield(opened)
        except asyncio.CancelledError:
            opened.add_done_callback(store._close_unwanted)
            raise
        return store

    # Asking (any thread, any loop) ----------------------------------------------------------------

    def peek(self, key: str) -> bool:
        """Whether something probably stands under `key`: a hint from memory alone, maybe stale."""
        return key in self._file.table.records

    async def load(self, keys: Iterable[str]) -> View:
        """The records under `keys`."""
        view: View = await self._ask(_Load, tuple(keys))
        return view

    async def swap(self, change: Change) -> Applied | View:
        """Write `change.puts` if every expectation holds, else give what is there instead.

        `ValueError` for a change that no ledger line can hold. Cancelled, it may still apply.
        """
        answer: Applied | View = await self._ask(_Swap, change)
        return answer

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        """Return as soon as `key` no longer bears `tag`, its writer died, or `seconds` passed."""
        watching = asyncio.ensure_future(self._ask(_Watch, (key, tag)))
        try:
            await asyncio.wait((watching,), timeout=seconds)
            if watching.done():
                watching.result()
        finally:
            watching.cancel()

    async def scan(self, label: str) -> AsyncIterator[View]:
        """All records that bear `label`, in pages, each page of one instant."""
        keys: list[str] = await self._ask(_List, label)
        for start in range(0, len(keys), _PAGE):
            view = await self.load(keys[start : start + _PAGE])
            records = {k: r for k, r in view.records.items() if r is not None and r.label == label}
            yield View(view.now, dict(records), view.gone.intersection(records))

    async def follow(self) -> AsyncIterator[View]:
        """Records whose tag changed, of anybody's writing, as soon as they are durable."""
        follower = _Follower()
        try:
            while True:
                yield await self._ask(_Follow, follower)
        finally:
            follower.left = True

    async def purge(self, limit: int = 1000) -> int:
        """Forget up to `limit` expired records; how many went. The file shrinks by `compact`."""
        count: int = await self._ask(_Purge, limit)
        return count

    async def compact(self) -> None:
        """Write the live records to a new file that takes the ledger's name."""
        await self._ask(_Compact, None)

    async def aclose(self) -> None:
        """Finish what was begun, then let go of the files and the thread; idempotent."""
        if self._process != os.getpid() or self._ended:
            return
        await self._ask(_Close, True)

    async def abandon(self) -> None:
        """For tests: what the death of this process would leave behind."""
        await self._ask(_Close, False)

    def _ask(self, kind: type[_Operation], asked: Any) -> asyncio.Future[Any]:
        if self._process != os.getpid():
            raise self._unavailable(
                "it was opened before a fork; open it again in the child process"
            )
        loop = asyncio.get_running_loop()
        operation = kind(loop, loop.create_future(), asked)
        outbox = self._outboxes.get(loop)
        if outbox is None:
            self._outboxes[loop] = outbox = []
            loop.call_soon(self._hand_over, loop)
        outbox.append(operation)
        return operation.future

    def _close_unwanted(self, opened: asyncio.Future[None]) -> None:
        """Whoever opened this was cancelled meanwhile."""
        if opened.exception() is None:
            loop = opened.get_loop()
            self._queue.put([_Close(loop, loop.create_future(), False)])

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue.put(self._outboxes.pop(loop))
        if self._ended:
            self._turn_away()

    def _turn_away(self) -> None:
        """Answer what came after the end; both the thread and late callers look."""
        while True:
            try:
                late = self._queue.get_nowait()
            except queue.Empty:
                return
            for operation in late:
                if type(operation) is not _Close:
                    operation.error = self._refusal(False)
            _deliver(late)

    def _unavailable(self, reason: str, ran: bool | None = False) -> LedgerUnavailable:
        return LedgerUnavailable(ledger=self.name, reason=reason, ran=ran)

    def _refusal(self, ran: bool | None) -> LedgerUnavailable | LedgerCorrupt:
        if self._why_ended is None:
            error: LedgerUnavailable | LedgerCorrupt = self._unavailable("it is closed", ran)
        else:
            error = self._why_ended.make(ran)
        if isinstance(error, LedgerUnavailable):
            error.closed = True
        return error

    # Serving (the store's own thread) -------------------------------------------------------------

    def _run(
        self, opened: asyncio.Future[None], check_body: CheckBody | None, accept_rollback: bool
    ) -> None:
        try:
            self._file = LedgerFile(self.name, self._machine, check_body, accept_rollback)
            self.epoch = self._file.epoch
        except BaseException as error:  # handed to the one who opens
            self._ended = True
            _call(opened.get_loop(), _settle_opened, opened, error)
            return
        _call(opened.get_loop(), _settle_opened, opened, None)
        closing: list[_Operation] = []
        try:
            closing = self._serve_until_closed()
        except Lost as lost:
            self._why_ended = lost
        finally:
            self._ended = True
            self._file.close()
            waiting: list[_Operation] = [w for ws in self._watched.values() for w in ws]
            waiting += [f.waiting for f in self._followers if f.waiting is not None]
            self._watched.clear()
            self._followers.clear()
            for operation in waiting:
                operation.error = self._refusal(False)
            _deliver(waiting + closing)
            self._turn_away()

    def _serve_until_closed(self) -> list[_Operation]:
        """The last batch's `_Close`, and with it what it cut off."""
        glanced = 0.0
        while True:
            operations = self._next()
            closing = [operation for operation in operations if type(operation) is _Close]
            rest = [operation for operation in operations if type(operation) is not _Close]
            rest = self._following(rest)
            if closing and not closing[0].asked:
                for operation in rest:
                    operation.error = self._unavailable("it was abandoned", None)
                return operations
            if rest:
                self._serve(rest)
            if closing:
                return list(closing)
            if self._is_looked_for() and time.monotonic() - glanced >= _GLANCE_SECONDS:
                self._glance()
                glanced = time.monotonic()

    def _is_looked_for(self) -> bool:
        """Whether somebody waits for what other processes may do."""
        return bool(self._watched or self._followers)

    def _next(self) -> list[_Operation]:
        """What was asked meanwhile; waits for it, but only briefly while there are watchers."""
        try:
            operations = self._queue.get(timeout=_GLANCE_SECONDS if self._is_looked_for() else None)
        except queue.Empty:
            return []
        try:
            while len(operations) < _LONGEST_BATCH:
                operations += self._queue.get_nowait()
        except queue.Empty:
            pass
        return operations

    def _serve(self, operations: list[_Operation]) -> None:
        left = operations
        try:
            answered, left = self._answer_from_durable(operations)
            _deliver(answered)
            if left:
                answered = self._answer_under_lock(left)
                left = [operation for operation in left if type(operation) is _Compact]
                _deliver(answered)
                if left or self._file.wants_compaction():
                    self._compact(left)
                    _deliver(left)
        except BaseException as error:
            lost = error if isinstance(error, Lost) else self._broken(error)
            for operation in left:
                operation.error = lost.make(lost.ran)
            _deliver(left)
            raise lost from error

    def _broken(self, error: BaseException) -> Lost:
        """A fault of this library: nothing after it can be relied on."""
        reason = f"an internal error, {type(error).__name__}: {error}"
        return Lost(lambda ran: self._unavailable(reason, ran), None)

    # Without the lock -----------------------------------------------------------------------------

    def _answer_from_durable(
        self, operations: list[_Operation]
    ) -> tuple[list[_Operation], list[_Operation]]:
        """Who could be answered without lock and sync, and who is left."""
        file = self._file
        table, now = file.table, file.clock.now()
        for operation in operations:
            if type(operation) is not _Swap or not table.holds(operation.asked, now):
                break
        else:
            return [], operations
        if not file.refresh():
            return [], operations
        table, now = file.table, file.clock.now()
        answered: list[_Operation] = []
        left: list[_Operation] = []
        held_up: set[str] = set()
        for operation in operations:
            # A listing names no key: it waits for everything that was asked before it.
            free = not left if type(operation) is _List else held_up.isdisjoint(operation.keys())
            if free and self._is_answered(operation, now):
                answered.append(operation)
            elif not (type(operation) is _Watch and self._is_watched(operation, held_up)):
                held_up.update(operation.keys())
                left.append(operation)
        return answered, left

    def _is_answered(self, operation: _Operation, now: float) -> bool:
        match operation:
            case _Swap(asked=change):
                if self._file.table.holds(change, now):
                    return False
                operation.answer = self._view(_named(change), now)
            case _Load(asked=keys):
                operation.answer = self._view(keys, now)
            case _Watch(asked=(key, tag)):
                return self._has_moved(key, tag, now)
            case _List(asked=label):
                operation.answer = self._file.table.keys_labelled(label)
            case _:
                return False
        return True

    def _is_watched(self, watch: _Watch, held_up: set[str]) -> bool:
        """Leave it waiting, unless something before it is going to be written."""
        if not held_up.isdisjoint(watch.keys()):
            return False
        self._watch(watch)
        return True

    def _view(self, keys: Iterable[str], now: float) -> View:
        records = self._file.table.view(keys, now)
        own, is_gone = self._file.holder.id, self._file.is_gone
        gone = [
            key
            for key, record in records.items()
            if record is not None and record.writer != own and is_gone(record.writer)
        ]
        return View(now, records, frozenset(gone)) if gone else View(now, records)

    # Under the lock -------------------------------------------------------------------------------

    def _answer_under_lock(self, operations: list[_Operation]) -> list[_Operation]:
        """Decide, write, sync; who has an answer now (not who goes on waiting)."""
        file = self._file
        with file.held():
            now = file.clock.now()
            floor = file.table.floor
            answered, contents, undo = self._decide(operations, now)
            if contents:
                try:
                    file.append(contents, len(undo), now)
                except NotWritten as error:
                    self._take_back(undo, floor)
                    for operation in answered:
                        operation.error = self._unavailable(str(error))
                    return answered
        if self._followers:
            self._note(dict(reversed(undo)))
        if self._watched and undo:
            self._wake({key for key, _ in undo})
        return answered

    def _decide(
        self, operations: list[_Operation], now: float
    ) -> tuple[list[_Operation], list[bytes], _Undo]:
        """Carry out the batch in the table: who is answered, its lines, what stood before."""
        table, own = self._file.table, self._file.holder.id
        records, n = table.records, self._file.tip.n
        answered: list[_Operation] = []
        contents: list[bytes] = []
        undo: _Undo = []
        for operation in operations:
            if type(operation) is not _Swap:
                if self._is_answered_now(operation, now):
                    answered.append(operation)
                continue
            answered.append(operation)
            change = operation.asked
            if not table.holds(change, now):
                operation.answer = self._view(_named(change), now)
                continue
            floor, done = table.floor, len(undo)
            for put in change.puts:
                undo.append((put.key, records.get(put.key)))
            try:
                written = table.write(change, now, own)
                if written:
                    moved = None if table.floor == floor else table.floor
                    contents.append(encode_change(n + len(contents) + 1, written, moved))
            except Exception as error:  # an impossible change is its caller's fault alone
                self._take_back(undo[done:], floor)
                del undo[done:]
                operation.error = error
                continue
            operation.answer = Applied(now, written)
        return answered, contents, undo

    def _is_answered_now(self, operation: _Operation, now: float) -> bool:
        if type(operation) is _Purge:
            operation.answer = self._file.table.drop_expired(now, operation.asked)
            return True
        if self._is_answered(operation, now):
            return True
        if type(operation) is _Watch:
            self._watch(operation)
        return False

    def _take_back(self, before: _Undo, floor: int) -> None:
        table = self._file.table
        told, table.on_put = table.on_put, None
        for key, record in reversed(before):
            table.put(key, record)
        table.floor, table.on_put = floor, told

    def _compact(self, asked: Iterable[_Operation]) -> None:
        try:
            with self._file.held():
                self._file.compact()
        except NotWritten as error:
            for operation in asked:
                operation.error = self._unavailable(str(error))

    # Following ------------------------------------------------------------------------------------

    def _following(self, operations: list[_Operation]) -> list[_Operation]:
        """Take those in who follow; the others are left."""
        rest = []
        for operation in operations:
            if type(operation) is not _Follow:
                rest.append(operation)
                continue
            follower: _Follower = operation.asked
            follower.waiting = operation
            if follower not in self._followers:
                if not self._file.refresh():  # from now on, not from when it last looked
                    self._look()
                self._followers.append(follower)
                self._file.table.on_put = self._note_one
        self._show()
        return rest

    def _note(self, before: dict[str, Record | None]) -> None:
        """These keys were written; `before`: what stood under them."""
        for key, record in before.items():
            if tag_of(self._file.table.records.get(key)) != tag_of(record):
                self._note_one(key)
        self._show()

    def _note_one(self, key: str) -> None:
        for follower in self._followers:
            follower.pending[key] = None

    def _show(self) -> None:
        """Tell everybody who waits and for whom there is something."""
        shown: list[_Operation] = []
        for follower in tuple(self._followers):
            if follower.left:
                self._followers.remove(follower)
            elif follower.waiting is not None and follower.pending:
                keys = list(itertools.islice(follower.pending, _PAGE))
                for key in keys:
                    del follower.pending[key]
                follower.waiting.answer = self._view(keys, self._file.clock.now())
                shown.append(follower.waiting)
                follower.waiting = None
        if not self._followers:
            self._file.table.on_put = None
        _deliver(shown)

    # Watching -------------------------------------------------------------------------------------

    def _watch(self, watch: _Watch) -> None:
        self._watched.setdefault(watch.asked[0], []).append(watch)

    def _has_moved(self, key: str, tag: str, now: float) -> bool:
        record = self._file.table.get(key, now)
        return tag_of(record) != tag or (
            record is not None
            and record.writer != self._file.holder.id
            and self._file.is_gone(record.writer)
        )

    def _glance(self) -> None:
        """Look whether other processes wrote, time ended something, or a writer died."""
        if not self._file.refresh():
            self._look()
        self._show()
        self._wake(list(self._watched))

    def _look(self) -> None:
        with self._file.held():
            pass

    def _wake(self, keys: Iterable[str]) -> None:
        now = self._file.clock.now()
        moved: list[_Operation] = []
        for key in keys:
            watches = self._watched.pop(key, None)
            if watches is None:
                continue
            waiting = []
            for watch in watches:
                if self._has_moved(key, watch.asked[1], now):
                    moved.append(watch)
                elif not watch.future.done():
                    waiting.append(watch)
            if waiting:
                self._watched[key] = waiting
        _deliver(moved)


def _deliver(operations: Sequence[_Operation]) -> None:
    """Give every loop its answers, each loop at once."""
    if not operations:
        return
    first = operations[0].loop
    if all(operation.loop is first for operation in operations):
        _call(first, _settle, operations)
        return
    loops: dict[asyncio.AbstractEventLoop, list[_Operation]] = {}
    for operation in operations:
        loops.setdefault(operation.loop, []).append(operation)
    for loop, its in loops.items():
        _call(loop, _settle, its)


def _call(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # the loop is closed: nobody is left to tell
        return


def _settle(operations: Sequence[_Operation]) -> None:
    for operation in operations:
        future = operation.future
        if future.done():
            continue
        if operation.error is not None:
            future.set_exception(operation.error)
        else:
            future.set_result(operation.answer)


def _settle_opened(opened: asyncio.Future[None], error: BaseException | None) -> None:
    if opened.done():
        return
    if error is not None:
        opened.set_exception(error)
    else:
        opened.set_result(None)
