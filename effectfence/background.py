"""The background loop: where the fence's coroutines run for threads that have no event loop.

One daemon thread with an event loop, shared by everything in the process, started by the first call
that needs it. A call hands a coroutine over and waits. What may go wrong between those two is the
subject of this file: signals (Ctrl-C, Celery's soft time limit, a server's worker timeout) raise an
exception in the waiting thread at any bytecode.

1.  A `Call` exists before it is handed over, so that whoever is interrupted can always name it; to
    hand it over twice is to hand it over once.
2.  A call that was taken back either never begins, or is cancelled, and what it came to nonetheless
    is undone (`take_back`). A call that is to be seen through goes on without its waiter.
3.  No coroutine ends the loop, whatever it raises, `SystemExit` included.
4.  A waiter sees its own context variables in the coroutine, and never sees `CancelledError`.
5.  At exit, before the loop ends, what was left to it is closed (`at_exit`): what is held is waited
    for, within a bound, and then recorded. From then on calls are refused.
6.  A forked child begins anew, with a loop of its own at its first call. The parent's is kept in
    memory, untouched: to close it would unhook the parent's, since the two share one epoll.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from effectfence.errors import FenceError

_log = logging.getLogger("effectfence")

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]

DRAIN_SECONDS = 5.0
"""At exit: how long what is held is waited for."""
_LOOK_UP_SECONDS: Final = 0.5
"""A signal that arrives on the threshold of a wait does not end it: its handler runs afterwards."""
_END_SECONDS: Final = 15.0
"""At exit: how long all of it may take."""


class Ended(RuntimeError):
    """The interpreter is ending, and the background loop did."""


class Call(Generic[T]):
    """One coroutine, made and run on the background loop, and the one thread that waits for it."""

    def __init__(self, make: Make[T]) -> None:
        self._make = make
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None
        self._taken_back = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._value: T
        self.over = False
        self.error: BaseException | None = None

    # --- the waiting thread -----------------------------------------------------------------------

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is over, waiting at most so long. Interrupted, it may be called again."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self.over:
            left = _LOOK_UP_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                break
            self._gate.acquire(timeout=min(left, _LOOK_UP_SECONDS))
        return self.over

    def result(self) -> T:
        """What it came to, once it is over."""
        assert self.over
        if self.error is None:
            return self._value
        if isinstance(self.error, asyncio.CancelledError):
            raise Ended("the interpreter is ending") from None
        if isinstance(self.error, FenceError):
            self.error.__traceback__ = None  # it says all there is; the frames are the loop's
        raise self.error

    # --- the loop ---------------------------------------------------------------------------------

    def begin(self, running: set[asyncio.Task[None]]) -> None:
        if self._task is None and not self._taken_back:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), context=self._context)
            running.add(self._task)
            self._task.add_done_callback(running.discard)
            self._task.add_done_callback(self._end)  # also if it was cancelled before it began

    async def _run(self) -> None:
        try:
            self._value = await self._make()
        except BaseException as error:  # a waiter's, all of them: see invariant 3
            self.error = error

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.error = asyncio.CancelledError()
        self.over = True
        self._gate.release()

    async def take_back(self, undo: Callable[[T], Awaitable[object]] | None) -> None:
        """Its waiter was interrupted: it is not to happen, or `undo` is called with its result."""
        self._taken_back = True
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait((self._task,))
        if self.error is None and undo is not None:
            await undo(self._value)


class Background:
    """The loop and its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._closers: set[Callable[[float], Coroutine[Any, Any, None]]] = set()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._serve, name="effectfence-blocking", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def start(self, call: Call[Any]) -> None:
        """Hand a call over, from any thread."""
        try:
            self._loop.call_soon_threadsafe(call.begin, self._running)
        except RuntimeError:  # it is closed
            raise Ended("the interpreter is ending") from None

    def at_exit(self, close: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        """Have `close(drain_seconds)` awaited before the interpreter ends."""
        self._closers.add(close)

    def no_more(self, close: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        """It is closed already."""
        self._closers.discard(close)

    def finish(self) -> None:
        """Close what was left open, see through what runs, within bounds."""
        call = Call(self._finish)
        self.start(call)
        if not call.wait(_END_SECONDS):
            _log.warning("effectfence: not all could be recorded before the interpreter ended")

    def end(self) -> None:
        """End the loop and its thread."""
        self._stopping = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)

    async def _finish(self) -> None:
        closings = [asyncio.ensure_future(close(DRAIN_SECONDS)) for close in list(self._closers)]
        for failed in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(failed, BaseException):
                _log.warning("effectfence: %s", failed)
        if others := self._running - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=DRAIN_SECONDS)

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stopping:
            try:
                self._loop.run_forever()
            except BaseException:
                _log.exception("effectfence: the background loop goes on after a fault")
        try:
            self._cancel_all()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))


_lock = threading.Lock()
_background: Background | None = None
_inherited: list[Background] = []
_registered = False
_ended = False


def background() -> Background:
    """The background loop of this process; started if it does not run yet."""
    found = _background  # without the lock: a signal's handler may have interrupted its holder
    if found is None or _ended:
        return _started()
    return found


def _started() -> Background:
    global _background, _registered
    with _lock:
        if _ended:
            raise Ended("the interpreter is ending")
        if _background is None:
            _background = Background()
            if not _registered:
                atexit.register(_end)
                _registered = True
        return _background


def _end() -> None:
    global _ended
    if _background is not None:
        _background.finish()
        _ended = True
        _background.end()


def _after_fork() -> None:
    global _lock, _background, _ended
    _lock = threading.Lock()
    if _background is not None:
        _inherited.append(_background)
    _background, _ended = None, False


os.register_at_fork(after_in_child=_after_fork)
