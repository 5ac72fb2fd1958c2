"""Whose process still lives: one locked byte of `<ledger>.alive` for each store that is open.

1.  A store's writer id is a random number of 62 bits, and the offset of the byte it holds. Ids are
    never issued twice.
2.  The lock is a POSIX record lock: the operating system drops it when the process ends, however
    it ends; a fork does not inherit it, and a reused process number or another container's process
    table cannot be mistaken for it.
3.  POSIX drops all of a process's locks on a file when *any* descriptor of that file is closed. So
    each process keeps one descriptor per file, in `_files`, for as long as a byte is held. What it
    can't prevent is other code of the process opening and closing the file (a backup of the folder,
    say): `hold_on` takes the bytes again, before each batch. A holder that was taken for dead
    meanwhile is unknown, never run again, and its own commit still counts.
4.  The kernel does not tell a process about its own locks. What this process holds is known from
    `_files`, never asked.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import sys
import threading
from dataclasses import dataclass, field

from effectfence.stores.machine import call_in_child, check_file, close_file, open_file

_BITS = 62
_lock = threading.Lock()


@dataclass(slots=True)
class _AliveFile:
    descriptor: int
    held: set[int] = field(default_factory=set)


_files: dict[tuple[int, int], _AliveFile] = {}


class Holder:
    """This process's claim to be alive under one id; `release` is what its death would do."""

    def __init__(self, path: str) -> None:
        with _lock:
            self.inode, self._file = _opened(path)
            offset = secrets.randbits(_BITS)
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            self._file.held.add(offset)
        self._offset = offset
        self.id = f"{offset:016x}"

    def hold_on(self) -> None:
        """Take the byte again, in case other code of this process lost it; costs 1 µs."""
        with _lock:
            if self._offset in self._file.held:
                fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._offset)

    def release(self) -> None:
        with _lock:
            file = self._file
            if self._offset not in file.held:
                return
            file.held.discard(self._offset)
            if file.held:
                fcntl.lockf(file.descriptor, fcntl.LOCK_UN, 1, self._offset)
            else:
                _files.pop(self.inode, None)
                close_file(file.descriptor)

    def is_gone(self, writer: str) -> bool:
        """Whether the process behind this id is known to be dead."""
        if writer == self.id:
            return False
        try:
            offset = int(writer, 16)
        except ValueError:
            return False
        with _lock:
            return (
                0 <= offset < 1 << _BITS
                and offset not in self._file.held
                and not _is_locked(self._file.descriptor, offset)
            )


def _opened(path: str) -> tuple[tuple[int, int], _AliveFile]:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        inode = found.st_dev, found.st_ino
        if inode in _files:
            return inode, _files[inode]
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        check_file(path, descriptor)
    except BaseException:
        close_file(descriptor)
        raise
    found = os.fstat(descriptor)
    inode = found.st_dev, found.st_ino
    return inode, _files.setdefault(inode, _AliveFile(descriptor))


def _is_locked(descriptor: int, offset: int) -> bool:
    """Whether another process holds this byte."""
    if sys.platform == "darwin":
        asked = struct.pack("qqihh", offset, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
        return bool(struct.unpack("qqihh", answer)[3] != fcntl.F_UNLCK)
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _files.clear()


call_in_child(_forget)
