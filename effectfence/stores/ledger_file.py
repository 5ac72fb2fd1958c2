"""One ledger file and the records read from it, as one process sees them; synchronous.

Owned by one thread. Next to the ledger stand `.lock` (see `order_lock`), `.turn`, `.alive` (see
`holders`), for the length of a step `.new`, and `.torn-<n>` for what a crash left half written.

Invariants

1.  The table never shows anything that is not durable, except while the order lock is held, and
    then nothing of it is told to anybody before the sync.
2.  Only the holder of the order lock appends, and only after it has read everything before it.
3.  The durable offset in the lock file moves after the sync that it speaks of, never before.
4.  Bytes beyond that offset are nobody's acknowledgement: the next holder of the lock syncs what is
    whole, sets aside what is torn, and only then decides. What is below it and does not check is
    corruption, whatever it looks like.
5.  A write that failed is taken back. A sync that failed is never tried again: nobody knows what is
    on the disk, so the ledger is marked suspect, this object is closed for good, and so is every
    other one that sees the mark. Opening anew reads the disk itself and clears the mark.
6.  A name that no longer leads to the file that is open here (ledger, lock, alive) closes it too;
    looked at before each decision and again before each acknowledgement. The one exception is a
    compaction, which proves itself by the last hash of the file that it replaced.

Time: `now` is the ledger's own. Within one boot it runs with a clock that nobody can set; each
batch writes down both. In a new boot it goes on from the last time that was written, as if the
machine had been off until this boot began: never back, never faster than real time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from effectfence.errors import LedgerCorrupt, LedgerUnavailable
from effectfence.stores import ledger_format as form
from effectfence.stores.contract import Record
from effectfence.stores.holders import Holder
from effectfence.stores.machine import (
    Machine,
    Unsuitable,
    check_file,
    check_folder,
    check_name,
    check_regular,
    close_file,
    explain,
    make_folder,
    open_file,
    sync_folder,
)
from effectfence.stores.order_lock import Mark, OrderLock, boot_digest, read_mark
from effectfence.stores.table import Table

_log = logging.getLogger("effectfence")
_CHUNK: Final = 1 << 19
_MUCH: Final = 16 << 20
_COMPACT_ABOVE: Final = 1 << 20
_SUPERSEDED: Final = 4
_SUSPECT: Final = "a sync of it failed; close it everywhere, then open it again"
_SEAM_LONGEST: Final = 256
_HEADER_LONGEST: Final = 1024

CheckBody = Callable[[str, str, Any], None]
"""Given a record's label and its body (the JSON value, or the bytes of one that is not plain JSON):
raises `ValueError` for what no version of this library can have written."""


class Lost(Exception):
    """This object is closed for good; `make` builds the error for one caller.

    `ran` is what to tell those whose batch was under way.
    """

    def __init__(
        self, make: Callable[[bool | None], LedgerUnavailable | LedgerCorrupt], ran: bool | None
    ) -> None:
        super().__init__()
        self.make = make
        self.ran = ran


class NotWritten(Exception):
    """Nothing of the batch is in the ledger, and the ledger can still be used."""


class LedgerClock:
    """The ledger's time, carried from boot to boot."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.boot = machine.boot()
        self._time = 0.0
        self._boottime = machine.boottime()
        self._last = 0.0

    def now(self) -> float:
        passed = self._machine.boottime() - self._boottime
        now = math.floor((self._time + max(passed, 0.0)) * 1e6) / 1e6
        self._last = max(self._last, now)
        return self._last

    def anchor(self, now: float) -> form.Anchor:
        """What to write down with `now`: what the clock showed at exactly that time."""
        boottime = self._boottime + (now - self._time)
        return form.Anchor(now, self.boot, boottime, self._machine.wall())

    def heed(self, anchor: form.Anchor) -> None:
        """Somebody wrote this down: never be behind it."""
        boottime = self._machine.boottime()
        if anchor.boot == self.boot and boottime >= anchor.boottime:
            since = anchor.boottime
        elif anchor.boot.partition("/")[0] == self.boot.partition("/")[0]:
            since = boottime  # another clock of the same boot: begin here
        else:
            since = 0.0  # another boot: this one began after it
        if anchor.now + (boottime - since) > self._time + (boottime - self._boottime):
            self._time, self._boottime = anchor.now, since
        self._last = max(self._last, anchor.now)


class LedgerFile:
    """`path` is absolute. Raises `LedgerUnavailable` or `LedgerCorrupt` if it cannot be used."""

    def __init__(
        self,
        path: str,
        machine: Machine,
        check_body: CheckBody | None = None,
        accept_rollback: bool = False,
    ) -> None:
        self.path = path
        self.machine = machine
        self.clock = LedgerClock(machine)
        self.table = Table()
        self._folder = os.path.dirname(path)
        self._boot = boot_digest(self.clock.boot)
        self._check_body = check_body
        self._accept_rollback = accept_rollback
        self._reader = self._new_reader()
        self._seen = b""
        self._file = self._inode = -1
        self._compact_at = 0
        with self._translated():
            make_folder(self._folder, machine)
            check_folder(self._folder)
            check_name(path)
            self._lock = OrderLock(path)
            try:
                self.holder = Holder(path + ".alive")
                try:
                    self._attach()
                except BaseException:
                    self.holder.release()
                    raise
            except BaseException:
                close_file(self._file)
                self._lock.close()
                raise

    @property
    def epoch(self) -> str:
        assert self._reader.header is not None
        return self._reader.header.epoch

    @property
    def tip(self) -> form.Tip:
        return self._reader.tip

    def close(self) -> None:
        self.holder.release()
        self._lock.close()
        close_file(self._file)

    def unavailable(self, reason: str, ran: bool | None = False) -> LedgerUnavailable:
        return LedgerUnavailable(ledger=self.path, reason=reason, ran=ran)

    # Opening --------------------------------------------------------------------------------------

    def _attach(self) -> None:
        mark = self._lock.mark()
        if mark is not None and self._is_trusted(mark) and self._opened_as(mark):
            self._read_to(mark.durable)
            self._check_anchor(mark)
        else:
            close_file(self._file)
            with self._lock.held():
                self._attach_alone()
        self.clock.heed(self.tip.anchor)
        self._plan_compaction()

    def _is_trusted(self, mark: Mark) -> bool:
        return (
            mark.boot == self._boot
            and not mark.suspect
            and mark.alive_inode == self.holder.inode[1]
        )

    def _opened_as(self, mark: Mark) -> bool:
        try:
            self._open_ledger()
        except FileNotFoundError:
            return False
        found = os.fstat(self._file)
        return found.st_ino == mark.inode and found.st_size >= mark.durable

    def _open_ledger(self) -> None:
        self._file = open_file(self.path, os.O_RDWR | os.O_APPEND)
        check_file(self.path, self._file)
        self._inode = os.fstat(self._file).st_ino

    def _attach_alone(self) -> None:
        """With the lock held: trust nothing but what is read, and make it durable."""
        mark = self._lock.mark()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path + ".new")  # a step that somebody did not finish
        try:
            self._open_ledger()
        except FileNotFoundError:
            if mark is not None and mark.n and not self._accept_rollback:
                raise self.unavailable(
                    f"it was removed, and {mark.n} changes recorded in it are forgotten; put it "
                    f"back, or remove {self._lock.path} too to begin anew"
                ) from None
            self._create()
        if mark is not None and mark.boot == self._boot and mark.inode == self._inode:
            self._check_alive_file(mark)  # a copy of the folder is a ledger of its own
        if mark is not None and mark.suspect:
            self._forget_cached()
        self._read_all()
        self._check_anchor(mark)
        self._sync_found()
        self._write_mark()

    def _check_alive_file(self, mark: Mark) -> None:
        if mark.alive_inode != self.holder.inode[1]:
            raise self.unavailable(
                f"{self.path}.alive was replaced while the ledger was in use, so nobody can tell "
                f"who lives; stop all processes that use it, then remove {self._lock.path}"
            )

    def _create(self) -> None:
        """A ledger with nothing in it appears under its name, whole and durable, or not at all."""
        header = form.Header(secrets.token_hex(16), False, 0, 0, self.clock.anchor(0.0))
        line, _ = form.encode_header(header)
        temporary = self.path + ".new"
        descriptor = open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            self._write_whole(descriptor, line)
            self.machine.sync(descriptor)
        finally:
            close_file(descriptor)
        self.machine.rename(temporary, self.path)  # `_attach_alone` syncs the folder
        self._open_ledger()

    def _forget_cached(self) -> None:
        """After a failed sync the page cache may show what is not on the disk: drop it."""
        self.machine.sync(self._file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read_all(self) -> None:
        """Everything to the end of the file; what is only torn there stays unread."""
        size = os.fstat(self._file).st_size
        damage = read_to(self._reader, self._file, size)
        if damage is not None:
            self._check_torn(size, damage)

    def _check_anchor(self, mark: Mark | None) -> None:
        """Is everything there that was acknowledged, as far as the lock file remembers?"""
        if mark is None or mark.epoch != bytes.fromhex(self.epoch):
            return
        tip = self.tip
        missing = tip.n < mark.n or (self._inode == mark.inode and tip.offset < mark.durable)
        other = tip.offset == mark.durable and self._inode == mark.inode and tip.hash != mark.hash
        if not missing and not other:
            return
        reason = (
            f"{mark.n} changes were acknowledged, {tip.n} are here: it was cut back, or an older "
            "copy was put in its place. Effects that ran may be forgotten; to go on all the same, "
            "open it with accept_rollback=True"
        )
        if not self._accept_rollback:
            raise LedgerCorrupt(path=self.path, line=tip.line + 1, offset=tip.offset, reason=reason)
        _log.warning("%s: %s", self.path, reason)

    def _sync_found(self) -> None:
        try:
            self.machine.sync(self._file)
            sync_folder(self._folder, self.machine)
        except OSError as error:
            self._mark_suspect()
            raise self.unavailable(f"it cannot be made durable: {error}") from error

    # Reading --------------------------------------------------------------------------------------

    def _new_reader(self) -> form.Reader:
        return form.Reader(self.table.put, self._raise_floor, self._check_body)

    def _raise_floor(self, floor: int) -> None:
        self.table.floor = max(self.table.floor, floor)

    def _read_to(self, durable: int) -> None:
        """Everything up to `durable` was acknowledged: it must be there and check."""
        damage = read_to(self._reader, self._file, durable)
        if damage is not None:
            raise self._corrupt(damage)

    def _check_torn(self, size: int, damage: form.Damage) -> None:
        """The tip is where reading stopped; is what follows only torn?"""
        tip = self.tip
        tail = os.pread(self._file, size - tip.offset, tip.offset)
        if self._reader.lacks_its_beginning() or not form.is_torn(tail, tip.offset, tip):
            raise self._corrupt(damage)

    def _corrupt(self, damage: form.Damage) -> LedgerCorrupt:
        return LedgerCorrupt(
            path=self.path, line=damage.line, offset=damage.offset, reason=damage.reason
        )

    # Serving --------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Without the lock: show everything that is durable by now; false if that takes the lock.

        The instant is the one at which the mark is read.
        """
        seen = self._lock.read()
        try:
            if os.lstat(self.path).st_ino != self._inode:
                return False
        except OSError:
            return False
        if seen == self._seen:
            return True
        mark = self._lock.mark()
        if mark is None or mark.suspect or mark.inode != self._inode:
            return False
        with self._fatal():
            self._read_to(mark.durable)
        self.clock.heed(self.tip.anchor)
        self._seen = mark.pack()
        return True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """With the order lock, and everything that others appended read and durable."""
        with self._lock.held(self.refresh):
            with self._fatal():
                self.holder.hold_on()
                self._catch_up()
            yield

    def append(self, contents: Sequence[bytes], records: int, now: float) -> None:
        """Write these changes, of so many records, as one batch; then they are durable."""
        assert now >= self.tip.anchor.now, "time went back"
        anchor = self.clock.anchor(now)
        data, tip = form.encode_batch(self.tip, contents, anchor, self.holder.id)
        self._write_or_take_back(data)
        with self._fatal(ran=None):
            try:
                self.machine.sync_data(self._file)
            except OSError as error:
                self._mark_suspect()
                raise self.unavailable(_sync_failed(error)) from error
            self._check_names()
        self._reader.tip = tip
        self._reader.records_read += records
        self._write_mark()

    def wants_compaction(self) -> bool:
        """Whether it would be worth the while: most of a file of some size is superseded.

        A ledger that only grows is never rewritten; one that does not grow stays within about
        four times what lives in it.
        """
        return self.tip.offset > self._compact_at and self._reader.records_read > _SUPERSEDED * len(
            self.table.records
        )

    def is_gone(self, writer: str) -> bool:
        return self.holder.is_gone(writer)

    def _catch_up(self) -> None:
        if not self._has_names():
            self._follow_compaction()
            self.clock.heed(self.tip.anchor)
        seen = self._lock.read()
        mark = self._lock.mark() if seen != self._seen else None
        if mark is not None and mark.suspect:
            raise self.unavailable(_SUSPECT)
        size = os.fstat(self._file).st_size
        if seen == self._seen and size == self.tip.offset:
            return
        known = mark is not None and mark.inode == self._inode
        self._read_new(mark.durable if mark is not None and known else 0, size)
        self.clock.heed(self.tip.anchor)

    def _read_new(self, durable: int, size: int) -> None:
        if size < self.tip.offset:
            lost = f"acknowledged records are missing: {self.tip.offset} bytes were durable"
            raise self._corrupt(form.Damage(self.tip.line + 1, size, lost))
        self._read_to(max(durable, self.tip.offset))
        acknowledged = self.tip.offset
        torn = read_to(self._reader, self._file, size)
        if torn is not None:
            self._check_torn(size, torn)
        if self.tip.offset > acknowledged:
            self._sync_or_die()
        self._write_mark()
        if torn is not None:
            self._set_aside(size)

    def _sync_or_die(self) -> None:
        try:
            self.machine.sync_data(self._file)
        except OSError as error:
            self._mark_suspect()
            raise self.unavailable(_sync_failed(error)) from error

    def _set_aside(self, size: int) -> None:
        """What a crash left half written goes into a file of its own, then the ledger is cut."""
        tip = self.tip
        tail = os.pread(self._file, size - tip.offset, tip.offset)
        number = 1
        while True:
            aside = f"{self.path}.torn-{number}"
            try:
                descriptor = open_file(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:
                number += 1
        try:
            self._write_whole(descriptor, tail)
            self.machine.sync(descriptor)
        finally:
            close_file(descriptor)
        self.machine.truncate(self._file, tip.offset)
        _log.warning(
            "%s: a crash left %d bytes half written at byte %d; they were never acknowledged and "
            "are now in %s",
            self.path,
            len(tail),
            tip.offset,
            aside,
        )

    # Names ----------------------------------------------------------------------------------------

    def _has_names(self) -> bool:
        """Whether the ledger's name still leads here; the others' names must."""
        if _inode_at(self._lock.path) != self._lock.inode:
            raise self.unavailable(f"{self._lock.path} was removed or replaced while in use")
        if _inode_at(self.path + ".alive") != self.holder.inode[1]:
            raise self.unavailable(f"{self.path}.alive was removed or replaced while in use")
        found = _inode_at(self.path)
        if found < 0:
            raise self.unavailable("it was removed while in use")
        return found == self._inode

    def _check_names(self) -> None:
        if not self._has_names():
            raise self.unavailable("it was replaced while in use")

    def _follow_compaction(self) -> None:
        """With the lock held: the name leads to another file. Rightly so?"""
        # the old file's end, which the new one continues
        read_to(self._reader, self._file, os.fstat(self._file).st_size)
        epoch, last, n = self.epoch, self.tip.hash, self.tip.n
        close_file(self._file)
        self._open_ledger()
        self._seen = b""
        mark = self._lock.mark()
        if mark is not None and mark.suspect:
            raise self.unavailable(_SUSPECT)
        vouched = mark is not None and mark.inode == self._inode
        if mark is not None and vouched and self._take_up_at(mark, last, n):
            return
        before, self.table = self.table, Table()
        self._reader = self._new_reader()
        self._read_all()
        self.table.take_listener(before)
        known = (last, mark.hash) if mark is not None else (last,)
        if self.epoch != epoch or self.tip.n < n or not (vouched or self._reader.replaced in known):
            raise self.unavailable("it was replaced while in use")
        if not vouched:  # the one who compacted died before it could say so
            self._sync_found()
            self._write_mark()
        self._plan_compaction()

    def _take_up_at(self, mark: Mark, last: bytes, n: int) -> bool:
        """Go on behind the seam, if what was compacted is exactly what stands in the table."""
        start = max(0, mark.seam_end - _SEAM_LONGEST)
        text = os.pread(self._file, mark.seam_end - start, start)
        replaced, number, digest = form.decode_seam(text[text.rfind(b"\n", 0, -1) + 1 :])
        first = os.pread(self._file, _HEADER_LONGEST, 0)
        header = form.Reader(lambda key, record: None, lambda floor: None)
        header.feed(first[: first.find(b"\n") + 1])
        if replaced != last or header.header is None:
            return False
        self._reader.header = header.header
        self._reader.tip = form.Tip(mark.seam_end, number, digest, n, 0, 0, header.tip.anchor)
        self._reader.seam_end = mark.seam_end
        self._reader.records_read = len(self.table.records)
        self._plan_compaction()
        return True

    # Writing --------------------------------------------------------------------------------------

    def _write_whole(self, descriptor: int, data: bytes) -> None:
        written = self.machine.write(descriptor, data)
        while written < len(data):  # a full disk: the next call says so
            written += self.machine.write(descriptor, memoryview(data)[written:])

    def _write_or_take_back(self, data: bytes) -> None:
        try:
            self._write_whole(self._file, data)
        except OSError as error:
            with self._fatal(ran=None):
                try:
                    self.machine.truncate(self._file, self.tip.offset)
                except OSError as second:
                    self._mark_suspect()
                    raise self.unavailable(
                        f"a write failed ({error}) and could not be taken back ({second}); "
                        "open it again"
                    ) from second
            raise NotWritten(f"it cannot be written: {error.strerror or error}") from error

    def _mark(self, suspect: bool = False) -> Mark:
        tip = self.tip
        return Mark(
            self._inode, self.holder.inode[1], tip.offset, tip.n, self._reader.seam_end,
            self._boot, bytes.fromhex(self.epoch), tip.hash, suspect,
        )  # fmt: skip

    def _write_mark(self) -> None:
        mark = self._mark()
        self._lock.write(mark)
        self._seen = mark.pack()

    def _mark_suspect(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.write(self._mark(suspect=True))

    # Compaction -----------------------------------------------------------------------------------

    def _plan_compaction(self) -> None:
        base = self._reader.seam_end
        self._compact_at = max(_COMPACT_ABOVE, 2 * base)

    def compact(self) -> None:
        """With the lock held: the live records in a new file, which then takes the name.

        `NotWritten` if it could not be made; the old one stands.
        """
        self._compact_at = 2 * self.tip.offset  # if it fails, not again at once
        temporary = self.path + ".new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            descriptor = open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except OSError as error:
            raise NotWritten(f"it cannot be compacted: {error}") from error
        try:
            tip = self._write_compacted(descriptor)
            self.machine.sync(descriptor)
            self.machine.rename(temporary, self.path)
        except OSError as error:
            close_file(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise NotWritten(f"it cannot be compacted: {error}") from error
        with self._fatal(ran=None):
            self._take_over(descriptor, tip)

    def _write_compacted(self, descriptor: int) -> form.Tip:
        now = self.clock.now()
        old = self.tip
        header = form.Header(self.epoch, True, old.n, self.table.floor, self.clock.anchor(now))
        line, digest = form.encode_header(header)
        live = ((k, r) for k, r in self.table.records.items() if r.expires_at > now)
        size, count, waiting = len(line), 1, [line]
        for line in form.encode_kept(live, digest):
            digest = line[-67:-3]
            size += len(line)
            count += 1
            waiting.append(line)
            if len(waiting) == 64:
                self._write_whole(descriptor, b"".join(waiting))
                waiting.clear()
        line, digest = form.encode_seam(old.hash, count + 1, digest)
        self._write_whole(descriptor, b"".join([*waiting, line]))
        return form.Tip(size + len(line), count + 1, digest, old.n, 0, 0, header.anchor)

    def _take_over(self, descriptor: int, tip: form.Tip) -> None:
        try:
            sync_folder(self._folder, self.machine)
        except OSError as error:
            self._mark_suspect()
            raise self.unavailable(_sync_failed(error)) from error
        close_file(self._file)
        self._file = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self._reader.tip = tip
        self._reader.seam_end = tip.offset
        self._reader.records_read = len(self.table.records)
        self._write_mark()
        self._plan_compaction()

    # Failing --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What the operating system says, in the words of this library."""
        try:
            yield
        except Unsuitable as error:
            raise self.unavailable(str(error)) from None
        except OSError as error:
            raise self.unavailable(explain(self.path, error)) from error

    @contextlib.contextmanager
    def _fatal(self, ran: bool | None = False) -> Iterator[None]:
        """Whatever is raised in here closes this object for good."""
        try:
            with self._translated():
                yield
        except form.Damage as damage:
            facts = {"line": damage.line, "offset": damage.offset, "reason": damage.reason}
            raise Lost(lambda _: LedgerCorrupt(path=self.path, **facts), ran) from damage
        except LedgerCorrupt as error:
            found = dict(error.facts)
            raise Lost(lambda _: LedgerCorrupt(**found), ran) from error
        except LedgerUnavailable as error:
            reason = error.reason
            raise Lost(lambda ran: self.unavailable(reason, ran), ran) from error


def _sync_failed(error: OSError) -> str:
    return (
        f"a sync failed ({error.strerror or error}), so nobody knows what is on the disk; close "
        "it everywhere, then open it again"
    )


def _inode_at(path: str) -> int:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return -1


def read_to(reader: form.Reader, descriptor: int, end: int) -> form.Damage | None:
    """Hand the reader what stands between its tip and `end`; why it did not get there, if so."""
    with _without_collections(end - reader.tip.offset):
        return _read_chunks(reader, descriptor, end)


@contextlib.contextmanager
def _without_collections(size: int) -> Iterator[None]:
    """Much reading makes millions of objects and no garbage: looking for cycles among them took a
    third of the time that a ledger of a million intents needs to open."""
    if size < _MUCH or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_chunks(reader: form.Reader, descriptor: int, end: int) -> form.Damage | None:
    position, pending = reader.tip.offset, b""
    try:
        while position < end:
            # A line longer than a chunk is taken up in ever larger ones, each as long as it so far.
            wanted = max(_CHUNK, len(pending))
            chunk = os.pread(descriptor, min(wanted, end - position), position)
            if not chunk:
                break
            start = position - len(pending)
            position += len(chunk)
            pending = pending + chunk if pending else chunk
            reader.feed(pending)
            pending = pending[reader.tip.offset - start :]
            if len(pending) > 2 * form.MAX_LINE:
                return form.Damage(reader.tip.line + 1, reader.tip.offset, "it has no end")
    except form.Damage as damage:
        return damage
    tip = reader.tip
    if tip.offset < end:
        return form.Damage(tip.line + 1, tip.offset, "it is cut off")
    if reader.lacks_its_beginning():
        return form.Damage(tip.line + 1, tip.offset, "what was written first is not all here")
    return None


# Looking without touching -------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Summary:
    """What a strict reading of a whole ledger found."""

    path: str
    epoch: str
    lines: int
    changes: int
    """Of the ledger's whole life, compacted ones included."""
    records: int
    bytes: int
    torn_bytes: int
    """Half written at the end by a crash, or being written right now; never acknowledged."""


def verify(path: str, check_body: CheckBody | None = None) -> Summary:
    """Read all that is durable, strictly, without opening anything for writing.

    Raises `LedgerCorrupt`, or `LedgerUnavailable` if there is nothing to read. Others may go on
    writing meanwhile.
    """
    path = os.path.abspath(path)
    alive: dict[str, None] = {}

    def put(key: str, record: Record | None) -> None:
        if record is None:
            alive.pop(key, None)
        else:
            alive[key] = None

    mark, descriptor = _open_to_look(path)
    try:
        check_regular(path, descriptor)
        reader = form.Reader(put, lambda floor: None, check_body)
        torn = _verify(path, descriptor, reader, mark)
    except Unsuitable as error:
        raise LedgerUnavailable(ledger=path, reason=str(error), ran=False) from None
    finally:
        close_file(descriptor)
    tip, header = reader.tip, reader.header
    assert header is not None
    return Summary(path, header.epoch, tip.line, tip.n, len(alive), tip.offset, torn)


def _open_to_look(path: str) -> tuple[Mark | None, int]:
    """The mark and the file that it speaks of, unless a compaction keeps coming between."""
    for _ in range(3):
        mark = read_mark(path)
        try:
            descriptor = open_file(path, os.O_RDONLY)
        except OSError as error:
            raise LedgerUnavailable(ledger=path, reason=explain(path, error), ran=False) from error
        if mark is None or mark.inode == os.fstat(descriptor).st_ino:
            break
        close_file(descriptor)
    else:
        descriptor = open_file(path, os.O_RDONLY)
    return mark, descriptor


def _verify(path: str, descriptor: int, reader: form.Reader, mark: Mark | None) -> int:
    """How many bytes at the end are nobody's acknowledgement."""
    found = os.fstat(descriptor)
    size = end = found.st_size
    ours = mark is not None and mark.inode == found.st_ino
    if mark is not None and ours and mark.boot == boot_digest(Machine().boot()):
        end = min(size, mark.durable)  # behind it others may be writing right now
    damage = read_to(reader, descriptor, end)
    tip, header = reader.tip, reader.header
    lost = mark is not None and (
        (ours and tip.offset < mark.durable)
        or (header is not None and bytes.fromhex(header.epoch) == mark.epoch and tip.n < mark.n)
    )
    if lost and damage is None:
        damage = form.Damage(tip.line + 1, tip.offset, "acknowledged records are missing")
    tail = os.pread(descriptor, end - tip.offset, tip.offset)
    torn = not lost and not reader.lacks_its_beginning() and form.is_torn(tail, tip.offset, tip)
    if damage is not None and not torn:
        raise LedgerCorrupt(path=path, line=damage.line, offset=damage.offset, reason=damage.reason)
    return size - tip.offset
