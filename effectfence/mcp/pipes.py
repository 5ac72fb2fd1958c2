"""Lines over file descriptors: of any length, in both directions, without blocking the loop.

Invariants:

1. A line is handed on whole, without its newline; what stands after the last newline when the
   input ends is a line too.
2. Who reads faster than the other side takes is held back: `Reader.hold` stops reading, and
   `Writer` says when (`on_full`) and when no more (`on_drained`).
3. A regular file, or a device that the system cannot poll, is read by a thread and written at once;
   so is a socket that is input and output in one.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_CHUNK: Final = 1 << 18
_FULL: Final = 1 << 22
"""Bytes that wait for a slow reader before the other side is held back."""


async def first(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until one of them is set, or so long. Also in a task that was cancelled, where
    `asyncio.timeout` would end in that cancellation before Python 3.11.4."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


class Reader(asyncio.Protocol):
    """Calls `on_line` for every line of `fd`, then `on_end` once."""

    def __init__(
        self, fd: int, on_line: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._fd = fd
        self._on_line = on_line
        self._on_end = on_end
        self._begun: list[bytes] = []
        self._ended = False
        self._transport: asyncio.ReadTransport | None = None
        self._may_read = threading.Event()
        self._may_read.set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        if _pollable(self._fd):
            file = os.fdopen(self._fd, "rb", 0, closefd=False)
            self._transport, _ = await loop.connect_read_pipe(lambda: self, file)
        else:
            threading.Thread(
                target=self._read_all, args=(loop,), name="effectfence-input", daemon=True
            ).start()

    def hold(self, held: bool) -> None:
        """Stop reading, or go on."""
        if self._transport is None:
            (self._may_read.clear if held else self._may_read.set)()
        elif not self._ended:
            (self._transport.pause_reading if held else self._transport.resume_reading)()

    def data_received(self, data: bytes) -> None:
        head, newline, rest = data.partition(b"\n")
        self._begun.append(head)
        while newline:
            line = self._begun[0] if len(self._begun) == 1 else b"".join(self._begun)
            self._begun.clear()
            self._on_line(line)
            head, newline, rest = rest.partition(b"\n")
            self._begun.append(head)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        if last := b"".join(self._begun):
            self._on_line(last)
        self._on_end()

    def eof_received(self) -> bool:
        return False

    def _read_all(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            while data := self._next():
                loop.call_soon_threadsafe(self.data_received, data)
            loop.call_soon_threadsafe(self.connection_lost, None)

    def _next(self) -> bytes:
        self._may_read.wait()
        try:
            return os.read(self._fd, _CHUNK)
        except OSError:
            return b""


class Writer(asyncio.BaseProtocol):
    """Writes lines to `fd`, which it closes if `owned`. After `close`, or when its reader is gone,
    it writes nothing more."""

    def __init__(
        self,
        fd: int,
        *,
        owned: bool = False,
        on_full: Callable[[bool], None] = lambda full: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._fd = fd
        self._owned = owned
        self._on_full = on_full
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._was_blocking = os.get_blocking(fd)
        self._closed = asyncio.Event()
        self._left = False

    async def start(self) -> None:
        if not _pollable(self._fd) or _is_input_too(self._fd):
            return
        file = os.fdopen(self._fd, "wb", 0, closefd=False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_write_pipe(lambda: self, file)
        self._transport.set_write_buffer_limits(_FULL)

    @property
    def closed(self) -> bool:
        """Whether nothing is written any more."""
        return self._closed.is_set()

    def line(self, line: bytes) -> None:
        if self._closed.is_set():
            return
        if self._transport is not None:
            self._transport.write(line + b"\n")
            return
        try:
            _write_all(self._fd, line + b"\n")
        except OSError:
            self.connection_lost(None)

    async def close(self, seconds: float) -> None:
        """Write what waits, for at most `seconds`, and let go of the descriptor."""
        if self._left:
            return
        self._left = True
        if self._transport is not None and not self._closed.is_set():
            self._transport.close()
            await first(self._closed, seconds=seconds)
            if not self._closed.is_set():
                self._transport.abort()
        self._closed.set()
        with suppress(OSError):
            os.set_blocking(self._fd, self._was_blocking)  # others may hold the same pipe
            if self._owned:
                os.close(self._fd)

    def pause_writing(self) -> None:
        self._on_full(True)

    def resume_writing(self) -> None:
        self._on_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._on_full(False)
            self._on_lost()


def _pollable(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _is_input_too(fd: int) -> bool:
    """One socket for both ways: the loop would take what is to be read for its reader's end."""
    return stat.S_ISSOCK(os.fstat(fd).st_mode) and os.path.sameopenfile(0, fd)


def _write_all(fd: int, data: bytes) -> None:
    """Waits for a reader that is slow, also where the descriptor does not."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select((), (fd,), ())
