"""Every state in which a power cut can leave the disk, rebuilt from a trace of system calls.

The model is the weakest that ext4 and its like promise:

1.  What was written to a file since its last sync is there up to any byte, or in full length with
    sectors of it still NUL, or not at all. A cut (ftruncate) since then may have happened or not.
2.  Names that were made, changed or removed since the folder's last sync are there up to any point
    of their order.
3.  After a sync that failed, what it should have written is never made durable by a later sync,
    even one that succeeds: the kernel has marked it clean.
4.  A sync is in force when it has returned; a word to a caller is out when its write begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.judge import Notes, said
from tests.crash.syscalls import Call

TRACED = ("openat", "write", "pwrite64", "fdatasync", "fsync", "rename", "ftruncate", "unlink",
          "mkdir", "writev")  # fmt: skip
SECTOR = 512


@dataclass
class Inode:
    """A file: what is surely on the disk, and what was done to it since."""

    durable: bytes = b""
    cached: bytes = b""
    pending: list[bytes] = field(default_factory=list)
    """Its whole content after each call since the last sync, the oldest first."""
    doomed: bool = False

    def change(self, content: bytes) -> None:
        self.cached = content
        self.pending.append(content)

    def sync(self) -> None:
        if not self.doomed:
            self.durable = self.cached
            self.pending.clear()


@dataclass
class Disk:
    """One folder, as it is cached and as it surely is."""

    names: dict[str, Inode] = field(default_factory=dict)
    durable: dict[str, Inode] = field(default_factory=dict)
    pending: list[dict[str, Inode]] = field(default_factory=list)

    def name(self, name: str, inode: Inode | None) -> None:
        if inode is None:
            self.names.pop(name, None)
        else:
            self.names[name] = inode
        self.pending.append(dict(self.names))

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()


State = dict[str, bytes]


@dataclass
class Cut:
    """One moment: what may be on the disk, and what had been said and done by then."""

    after: str
    disk: Disk
    notes: Notes

    def states(self, stride: int) -> Iterator[State]:
        """Each one folder's content. `stride`: how many bytes apart a pending write is torn."""
        layouts = [self.disk.durable, *self.disk.pending]
        for number, names in enumerate(layouts):
            last = number == len(layouts) - 1
            for lock in self._locks(names, all_=last):
                for torn in self._torn(names, stride if last and lock == 0 else 0):
                    yield {**self._plain(names, lock), **torn}

    def _locks(self, names: dict[str, Inode], *, all_: bool) -> range:
        """How many contents of the lock file are worth a look: it is never synced."""
        lock = next((inode for name, inode in names.items() if name.endswith(".lock")), None)
        return range(4 if lock is not None and all_ else 1)

    def _plain(self, names: dict[str, Inode], lock: int) -> State:
        state: State = {}
        for name, inode in names.items():
            state[name] = inode.durable
            if name.endswith(".lock"):
                newest = inode.cached
                state[name] = (newest, inode.durable, bytes(len(newest)), newest[:77])[lock]
        return state

    def _torn(self, names: dict[str, Inode], stride: int) -> Iterator[State]:
        yield {}
        for name, inode in names.items():
            if name.endswith((".lock", ".alive", ".turn")):
                continue
            for content in inode.pending:
                yield {name: content}
            if inode.pending and stride:
                before = [inode.durable, *inode.pending][-2]
                for content in tears(before, inode.cached, stride):
                    yield {name: content}


def tears(before: bytes, cached: bytes, stride: int) -> Iterator[bytes]:
    """The last write cut at every `stride`-th byte, and around each line's end; sectors lost."""
    start, end = len(before), len(cached)
    if cached[:start] != before:  # a cut, not a growth: done or not
        return
    for at in range(start + 1, end):
        if (at - start) % stride == 0 or b"\n" in cached[at - 2 : at + 2]:
            yield cached[:at]
    first, last = start // SECTOR, (end - 1) // SECTOR
    for sector in range(first, last + 1):
        low, high = max(start, sector * SECTOR), min(end, (sector + 1) * SECTOR)
        yield cached[:low] + bytes(high - low) + cached[high:]  # this one lost
        yield cached[:low] + bytes(end - low)  # and all behind it
        yield cached[:start] + bytes(high - start) + cached[high:]  # and all before it


def cuts(made: list[Call], folder: Path, disk: Disk, told: Notes) -> Iterator[Cut]:
    """After each call that changed something, and each word: the moment at which the power may go.

    `disk` and `told`, what was before, go on to what is at the end.
    """
    events = [(call.began if call.name == "writev" else call.ended, call) for call in made]
    for _, call in sorted(events, key=lambda event: event[0]):
        name = _hear(told, call) if call.name == "writev" else _apply(disk, call, folder)
        if name is not None:
            yield Cut(f"{call.name} {name}", disk, Notes([*told.words], [*told.effects]))


def _hear(told: Notes, call: Call) -> str:
    name = call.path().name
    (told.words if name == "words" else told.effects).extend(said(call.data()))
    return name


def _apply(disk: Disk, call: Call, folder: Path) -> str | None:
    """Do to the model what the call did; the name concerned, if it is of this folder."""
    done = not call.result.startswith(("-1", "?"))
    path = call.path()
    if path == folder and done and call.name in ("mkdir", "fsync"):
        if call.name == "fsync":
            disk.sync()
        return "the folder"
    if path.parent != folder:
        return None
    name, inode = path.name, disk.names.get(path.name)
    match call.name:
        case "openat" if done and inode is None and "O_CREAT" in call.arguments:
            disk.name(name, Inode())
        case "rename" if done and inode is not None:
            del disk.names[name]
            disk.name(call.other().name, inode)
        case "unlink" if done:
            disk.name(name, None)
        case "write" | "pwrite64" if done and inode is not None:
            data = call.data()[: int(call.result.split()[0])]
            offset = len(inode.cached) if call.name == "write" else call.last_number()
            inode.change(inode.cached[:offset] + data + inode.cached[offset + len(data) :])
        case "ftruncate" if done and inode is not None:
            inode.change(inode.cached[: call.last_number()])
        case "fsync" | "fdatasync" if inode is not None:
            inode.doomed |= "EIO" in call.result
            if not done:
                return None
            inode.sync()
        case _:
            return None
    return name
