"""The lock that puts the processes on one ledger in order, and what stands in its file.

`<ledger>.lock` is never renamed or unlinked. It does two things:

1.  `flock` on it is the order between processes: whoever holds it may append. `<ledger>.turn` is a
    turnstile before it: a process takes the turnstile, then the lock, then leaves the turnstile. So
    whoever lets go of the lock and comes back at once stands behind the one that was waiting.
2.  Its content is one `Mark`: how far the ledger is durable, and for which file. It is written
    after the sync that it speaks of, so whatever mark is read, the bytes below it had been synced.
    It is itself never synced: after a power cut it may be old, or gone. So a mark of another boot
    is no reason to believe that the ledger's tail is on the disk, yet still proof of what was.
3.  A mark is read without the lock: its checksum tells a half-written one, which is read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from effectfence.stores.machine import check_file, close_file, open_file

_MAGIC: Final = b"efmark1\n"
_FIELDS: Final = struct.Struct("<8sQQQQQQ16s16s64s")
_CHECK: Final = struct.Struct("<I")
_SIZE: Final = _FIELDS.size + _CHECK.size
_SUSPECT: Final = 1


@dataclass(slots=True)
class Mark:
    """How far which ledger file is durable, as the last one who synced it wrote down."""

    inode: int
    alive_inode: int
    durable: int
    n: int
    seam_end: int
    boot: bytes
    epoch: bytes
    hash: bytes
    """Of the last durable line."""
    suspect: bool = False

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC, _SUSPECT if self.suspect else 0, self.inode, self.alive_inode, self.durable,
            self.n, self.seam_end, self.boot, self.epoch, self.hash,
        )  # fmt: skip
        return fields + _CHECK.pack(zlib.crc32(fields))


def unpack(data: bytes) -> Mark | None:
    """The mark in these bytes, if it is whole."""
    if len(data) != _SIZE or _CHECK.unpack(data[-4:])[0] != zlib.crc32(data[:-4]):
        return None
    magic, flags, inode, alive, durable, n, seam_end, boot, epoch, digest = _FIELDS.unpack(
        data[:-4]
    )
    if magic != _MAGIC:
        return None
    return Mark(inode, alive, durable, n, seam_end, boot, epoch, digest, bool(flags & _SUSPECT))


def boot_digest(boot: str) -> bytes:
    """A boot's name in the 16 bytes that a mark has for it."""
    return hashlib.sha256(boot.encode()).digest()[:16]


class OrderLock:
    def __init__(self, ledger: str) -> None:
        self.path = ledger + ".lock"
        self._lock = _opened(self.path)
        try:
            self._turn = _opened(ledger + ".turn")
        except BaseException:
            close_file(self._lock)
            raise
        self.inode = os.fstat(self._lock).st_ino

    @contextlib.contextmanager
    def held(self, next_in_turn: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Nobody else appends meanwhile; waits its turn.

        `next_in_turn` is called when only the present holder is still before us: a time to read
        what is durable so far, beside that one's write and sync instead of after them.
        """
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        try:
            next_in_turn()
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def read(self) -> bytes:
        """The mark's bytes, as they are right now."""
        return os.pread(self._lock, _SIZE, 0)

    def mark(self) -> Mark | None:
        """The mark; `None` if there is none that can be trusted."""
        for _ in range(100):
            mark = unpack(self.read())
            if mark is not None:
                return mark
        return None

    def write(self, mark: Mark) -> None:
        """Only while the lock is held."""
        os.pwrite(self._lock, mark.pack(), 0)

    def close(self) -> None:
        close_file(self._lock)
        close_file(self._turn)


def _opened(path: str) -> int:
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        check_file(path, descriptor)
    except BaseException:
        close_file(descriptor)
        raise
    return descriptor


def read_mark(ledger: str) -> Mark | None:
    """The mark beside a ledger, for one who only looks."""
    try:
        descriptor = open_file(ledger + ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        for _ in range(100):
            mark = unpack(os.pread(descriptor, _SIZE, 0))
            if mark is not None:
                return mark
        return None
    finally:
        close_file(descriptor)
