"""Disks that fill up or fail, files that vanish, places that are refused, boots and clocks."""

# ruff: noqa: ASYNC240 - a test may keep its own loop waiting

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effectfence.errors import LedgerCorrupt, LedgerUnavailable
from effectfence.stores.contract import ABSENT, Applied, Change, Put
from effectfence.stores.file import FileStore, verify
from tests.stores.conftest import HandClock, HandMachine
from tests.stores.damage import change


class FailingMachine(HandMachine):
    """Fails the calls that a test names; writes half of what it was given first."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails.get(name):
            raise OSError(self.fails[name], os.strerror(self.fails[name]))

    def write(self, descriptor: int, data: Any) -> int:
        if self.fails.get("write"):
            super().write(descriptor, data[: len(data) // 2])
        self._call("write")
        return super().write(descriptor, data)

    def truncate(self, descriptor: int, size: int) -> None:
        self._call("truncate")
        super().truncate(descriptor, size)

    def sync_data(self, descriptor: int) -> None:
        self._call("sync_data")
        super().sync_data(descriptor)

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.calls.append("sync a folder")
        super().sync(descriptor)

    def rename(self, old: str, new: str) -> None:
        self._call("rename")
        super().rename(old, new)


# Writes that fail


async def test_a_write_that_fails_is_taken_back_and_the_ledger_goes_on(ledger: Path) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    await store.swap(Change({}, (Put("a", tag="t", label="l"), Put("d", expires_in=9.0))))
    before, records = ledger.read_bytes(), (await store.load("abd")).records
    machine.fails["write"] = errno.ENOSPC
    answers = await asyncio.gather(
        store.swap(Change({}, (Put("a", tag="u", label="m"), Put("b"), Put("d", delete=True)))),
        store.swap(Change({}, (Put("b"), Put("a", delete=True, floor=True)))),
        store.load("ab"),
        return_exceptions=True,
    )
    for answer in answers:
        assert isinstance(answer, LedgerUnavailable)
        assert answer.ran is False
        assert "No space left" in str(answer)
    assert ledger.read_bytes() == before
    assert (await store.load("abd")).records == records
    machine.fails.clear()
    assert isinstance(await store.swap(change("b", b=ABSENT)), Applied)
    await store.aclose()
    assert verify(str(ledger)).changes == 2


async def test_a_write_that_cannot_be_taken_back_closes_the_ledger(ledger: Path) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    await store.swap(change("a"))
    machine.fails |= {"write": errno.ENOSPC, "truncate": errno.EIO}
    with pytest.raises(LedgerUnavailable) as caught:
        await store.swap(change("b"))
    assert caught.value.ran is None
    machine.fails.clear()
    with pytest.raises(LedgerUnavailable):
        await store.load(["a"])
    await store.aclose()
    again = await FileStore.open(ledger)
    assert (await again.load("ab")).records["b"] is None
    await again.swap(change("b"))
    await again.aclose()


def test_a_full_disk_refuses_before_any_effect_and_is_got_over(ledger: Path) -> None:
    program = """if True:
        import asyncio, resource, signal, sys
        from effectfence.errors import LedgerUnavailable
        from effectfence.stores.file import FileStore
        from effectfence.stores.contract import *
        async def main():
            store = await FileStore.open(sys.argv[1])
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            done = refused = 0
            for i in range(100):
                change = Change({}, (Put(f"k{i}", tag="t", body=b"x" * 777),))
                try:
                    assert type(await store.swap(change)) is Applied
                    done += 1
                except LedgerUnavailable as error:
                    assert error.ran is False, error
                    refused += 1
            assert refused > 50 and done > 5, (done, refused)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert type(await store.swap(Change({}, (Put("last"),)))) is Applied
            await store.aclose()
            print(done + 1)
        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(ledger)],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert verify(str(ledger)).changes == int(done.stdout)


async def test_a_change_that_no_line_can_hold_fails_alone(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    good, lone, big, impossible = await asyncio.gather(
        store.swap(change("a")),
        store.swap(change("b", "\ud800")),
        store.swap(Change({}, (Put("c", stamp=1 << 70),))),
        store.swap(Change({}, (Put("d", expires_in=float("nan")),))),
        return_exceptions=True,
    )
    assert isinstance(good, Applied)
    assert all(isinstance(answer, ValueError) for answer in (lone, big, impossible))
    assert (await store.load("bcd")).records == {"b": None, "c": None, "d": None}
    await store.aclose()
    assert verify(str(ledger)).changes == 1


# Syncs that fail


async def test_a_failed_sync_closes_the_ledger_everywhere_until_it_is_opened_anew(
    ledger: Path,
) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    other = await FileStore.open(ledger, machine=HandMachine())
    await store.swap(change("a"))
    machine.calls.clear()
    machine.fails["sync_data"] = errno.EIO
    answers = await asyncio.gather(
        store.swap(change("b")), store.swap(change("c")), return_exceptions=True
    )
    for answer in answers:
        assert isinstance(answer, LedgerUnavailable)
        assert answer.ran is None, "it may be on the disk"
    machine.fails.clear()
    with pytest.raises(LedgerUnavailable) as caught:
        await store.load(["a"])
    assert caught.value.ran is False
    assert machine.calls == ["write", "sync_data"], "no second sync, nothing else"
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="sync"):
            await other.load(["a"])
    await store.aclose()
    await other.aclose()
    again = await FileStore.open(ledger, machine=HandMachine())
    assert isinstance(await again.swap(change("d")), Applied)
    third = await FileStore.open(ledger, machine=HandMachine())
    assert (await third.load("ad")).records["d"] is not None, "the mark is cleared"
    await again.aclose()
    await third.aclose()


async def test_a_waiter_is_told_that_the_ledger_was_closed(ledger: Path) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    waiter = asyncio.create_task(store.changed("a", "", 60.0))
    await store.load(["a"])
    machine.fails["sync_data"] = errno.EIO
    with pytest.raises(LedgerUnavailable):
        await store.swap(change("b"))
    with pytest.raises(LedgerUnavailable):
        await asyncio.wait_for(waiter, 10)
    await store.aclose()


async def test_nothing_is_answered_before_the_sync(ledger: Path) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    told: list[str] = []
    sync = machine.sync_data

    def sync_data(descriptor: int) -> None:
        told.append("before" if not task.done() else "TOO EARLY")
        sync(descriptor)
        told.append("after")

    machine.sync_data = sync_data  # type: ignore[method-assign]
    task = asyncio.create_task(store.swap(change("a")))  # type: ignore[arg-type]
    await task
    assert told == ["before", "after"]
    await store.aclose()


async def test_a_new_ledger_has_its_name_on_the_disk_before_the_first_answer(
    ledger: Path,
) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    rename = machine.calls.index("rename")
    assert machine.calls[rename - 1] == "sync", "the file, before it has its name"
    assert "sync a folder" in machine.calls[rename:], "where the name stands, before the answer"
    await store.aclose()


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
async def test_a_ledger_that_cannot_be_made_leaves_none(ledger: Path, call: str) -> None:
    ledger.parent.mkdir(mode=0o700)
    machine = FailingMachine()
    machine.fails[call] = errno.EIO
    with pytest.raises(LedgerUnavailable) as caught:
        await FileStore.open(ledger, machine=machine)
    assert caught.value.ran is False
    assert not ledger.exists()
    await (await FileStore.open(ledger)).aclose()


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
async def test_a_compaction_that_fails_leaves_the_old_ledger(ledger: Path, call: str) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    await store.swap(change("a"))
    before = ledger.read_bytes()
    machine.fails[call] = errno.ENOSPC
    with pytest.raises(LedgerUnavailable) as caught:
        await store.compact()
    assert caught.value.ran is False
    assert ledger.read_bytes() == before
    assert not ledger.with_name("effects.jsonl.new").exists()
    machine.fails.clear()
    await store.compact()
    assert (await store.load(["a"])).records["a"] is not None
    await store.aclose()


# Files that vanish


async def replaced(ledger: Path) -> None:
    copy = ledger.with_name("copy")
    shutil.copy2(ledger, copy)
    copy.replace(ledger)


async def removed(ledger: Path) -> None:
    ledger.unlink()


async def folder_removed(ledger: Path) -> None:
    shutil.rmtree(ledger.parent)


async def lock_removed(ledger: Path) -> None:
    ledger.with_name("effects.jsonl.lock").unlink()


async def alive_removed(ledger: Path) -> None:
    ledger.with_name("effects.jsonl.alive").unlink()


@pytest.mark.parametrize("harm", [replaced, removed, folder_removed, lock_removed, alive_removed])
async def test_a_name_that_leads_elsewhere_closes_the_ledger(
    ledger: Path, harm: Callable[[Path], Any]
) -> None:
    store = await FileStore.open(ledger)
    await store.swap(change("a"))
    await harm(ledger)
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="while in use") as caught:
            await store.swap(change("b"))
        assert caught.value.ran is False
    await store.aclose()


async def test_a_ledger_replaced_during_the_sync_is_not_acknowledged(ledger: Path) -> None:
    machine = FailingMachine()
    store = await FileStore.open(ledger, machine=machine)
    machine.sync_data = lambda descriptor: ledger.unlink()  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailable) as caught:
        await store.swap(change("a"))
    assert caught.value.ran is None
    await store.aclose()


async def test_a_removed_ledger_is_not_begun_anew_in_silence(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    await store.swap(change("a"))
    await store.aclose()
    ledger.unlink()
    with pytest.raises(LedgerUnavailable, match="removed"):
        await FileStore.open(ledger)
    ledger.with_name("effects.jsonl.lock").unlink()
    await (await FileStore.open(ledger)).aclose()


async def test_an_alive_file_replaced_while_in_use_is_refused(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    ledger.with_name("effects.jsonl.alive").unlink()
    with pytest.raises(LedgerUnavailable, match="nobody can tell who lives"):
        await FileStore.open(ledger)
    await store.aclose()


async def test_a_closed_store_says_so(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    await store.aclose()
    for call in (store.load(["a"]), store.swap(change("a")), store.changed("a", "", 5.0)):
        with pytest.raises(LedgerUnavailable, match="closed") as caught:
            await call
        assert caught.value.ran is False


async def test_closing_finishes_what_was_begun(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    tasks = [asyncio.create_task(store.swap(change(f"k{i}"))) for i in range(50)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await store.aclose()
    assert all(isinstance(answer, Applied) for answer in await asyncio.gather(*tasks))


async def test_an_opening_that_is_cancelled_leaves_nothing_open(ledger: Path) -> None:
    for wait in (0.0, 0.001, 0.01):
        task = asyncio.create_task(FileStore.open(ledger))
        await asyncio.sleep(wait)
        task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        if isinstance(done[0], FileStore):
            await done[0].aclose()
    store = await FileStore.open(ledger)
    await store.swap(change("a"))
    await store.aclose()


# Places


@pytest.mark.parametrize("suffix", ["", ".lock", ".turn", ".alive"])
async def test_a_symbolic_link_is_not_followed(ledger: Path, suffix: str) -> None:
    ledger.parent.mkdir(mode=0o700)
    target = ledger.with_name("elsewhere")
    target.write_bytes(b"")
    target.chmod(0o600)
    ledger.with_name(ledger.name + suffix).symlink_to(target)
    with pytest.raises(LedgerUnavailable, match="symbolic link"):
        await FileStore.open(ledger)
    assert target.read_bytes() == b""


@pytest.mark.parametrize("suffix", ["", ".lock", ".turn", ".alive"])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.chmod(0o620), "others may write to"),
        (lambda path: path.chmod(0o602), "others may write to"),
        (lambda path: os.link(path, path.with_name("second")), "hard links"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "not a regular file"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    ],
)
async def test_a_file_that_is_not_ours_alone_is_refused(
    ledger: Path, suffix: str, harm: Callable[[Path], Any], words: str
) -> None:
    await (await FileStore.open(ledger)).aclose()
    harm(ledger.with_name(ledger.name + suffix))
    with pytest.raises(LedgerUnavailable, match=words):
        await asyncio.wait_for(FileStore.open(ledger), 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away takes root")
@pytest.mark.parametrize("suffix", ["", ".lock", ".turn", ".alive"])
async def test_another_users_file_is_refused(ledger: Path, suffix: str) -> None:
    await (await FileStore.open(ledger)).aclose()
    os.chown(ledger.with_name(ledger.name + suffix), 12345, -1)
    with pytest.raises(LedgerUnavailable, match="another user"):
        await FileStore.open(ledger)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
async def test_a_folder_that_others_may_write_in_is_refused(ledger: Path, mode: int) -> None:
    ledger.parent.mkdir()
    ledger.parent.chmod(mode)
    with pytest.raises(LedgerUnavailable, match="others may write in"):
        await FileStore.open(ledger)
    ledger.parent.chmod(mode | 0o1000)  # where nobody can replace another's files
    await (await FileStore.open(ledger)).aclose()


async def test_files_and_folders_are_ours_alone_whatever_the_umask_says(ledger: Path) -> None:
    old = os.umask(0o777)
    try:
        path = ledger.parent / "deeper" / "still" / "effects.jsonl"
        store = await FileStore.open(path)
        await store.swap(change("a"))
        await store.compact()
        await store.aclose()
    finally:
        os.umask(old)
    assert {p.stat().st_mode & 0o777 for p in path.parent.iterdir()} == {0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


async def test_a_network_file_system_is_refused(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effectfence.stores.machine._mount_of", lambda descriptor: ("1", "nfs4"))
    with pytest.raises(LedgerUnavailable, match="network file system"):
        await FileStore.open(ledger)


async def test_a_file_that_is_a_mount_point_is_refused(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "effectfence.stores.machine._mount_of", lambda descriptor: (str(descriptor), "ext4")
    )
    with pytest.raises(LedgerUnavailable, match="mount point"):
        await FileStore.open(ledger)


async def test_opening_an_existing_ledger_does_not_touch_it(ledger: Path) -> None:
    await (await FileStore.open(ledger)).aclose()
    before = ledger.stat()
    for boot in ("boot-1", "boot-2"):
        await (await FileStore.open(ledger, machine=HandMachine(boot=boot))).aclose()
    after = ledger.stat()
    assert (after.st_mtime_ns, after.st_ino, after.st_size) == (
        before.st_mtime_ns, before.st_ino, before.st_size,
    )  # fmt: skip


# Time


async def now_of(ledger: Path, clock: HandClock, boot: str, *, write: bool = False) -> float:
    store = await FileStore.open(ledger, machine=HandMachine(clock, boot))
    answer = await store.swap(change("a")) if write else await store.load(["a"])
    await store.aclose()
    return answer.now


async def test_time_runs_with_the_boot_clock_over_restarts(ledger: Path) -> None:
    clock = HandClock()
    start = await now_of(ledger, clock, "boot-1", write=True)
    clock.advance(30.0)
    assert await now_of(ledger, clock, "boot-1") == pytest.approx(start + 30.0)


async def test_time_stands_still_while_the_machine_is_off_and_never_goes_back(
    ledger: Path,
) -> None:
    clock = HandClock()
    clock.seconds = 5000.0
    before = await now_of(ledger, clock, "boot-1", write=True)
    clock.seconds = 7.0
    for _ in range(2):  # the same without a line written in the new boot
        assert await now_of(ledger, clock, "boot-2") == pytest.approx(before + 7.0)
    later = await now_of(ledger, clock, "boot-2", write=True)
    clock.advance(5.0)
    assert await now_of(ledger, clock, "boot-2") == pytest.approx(later + 5.0)


async def test_another_time_namespace_of_the_same_boot_never_runs_faster(ledger: Path) -> None:
    here, there = HandClock(), HandClock()
    there.seconds = 9e6
    before = await now_of(ledger, here, "boot-1/time:[1]", write=True)
    after = await now_of(ledger, there, "boot-1/time:[2]", write=True)
    assert before <= after <= before + 1.0
    here.advance(10.0)
    assert after <= await now_of(ledger, here, "boot-1/time:[1]") <= after + 10.0


async def test_a_mark_of_another_boot_is_not_believed(ledger: Path) -> None:
    """After a power cut the tail may be gone, and a mark beside it that says otherwise is proof
    of loss; a tail that nobody synced is synced before anybody is told of it."""
    await (await FileStore.open(ledger, machine=HandMachine())).aclose()
    machine = FailingMachine()
    machine.name = "boot-2"
    store = await FileStore.open(ledger, machine=machine)
    assert "sync" in machine.calls
    await store.aclose()
    machine = FailingMachine()
    machine.name = "boot-2"
    await (await FileStore.open(ledger, machine=machine)).aclose()
    assert machine.calls == [], "the mark of this boot is"


async def test_damage_found_while_open_closes_the_ledger(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    await store.swap(change("a"))
    with ledger.open("ab") as file:
        file.write(b"what is this\n")
    before = ledger.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerCorrupt, match="line 4"):
            await store.swap(change("b"))
    assert ledger.read_bytes() == before
    await store.aclose()


async def test_stores_of_one_boot_tell_one_time(ledger: Path) -> None:
    clock = HandClock()

    class Hasty(HandMachine):
        """A clock that moves between any two looks at it."""

        step = 5.0

        def boottime(self) -> float:
            clock.advance(self.step)
            return clock.seconds

    stores = [await FileStore.open(ledger, machine=Hasty(clock)) for _ in range(3)]
    Hasty.step = 0.001
    told = 0.0
    for i in range(60):
        store = stores[i * 7 % 3]
        if i % 10 == 9:
            await store.compact()
        answer = await store.swap(change("a")) if i % 2 else await store.load(["a"])
        assert told < answer.now
        told = answer.now
    for store in stores:
        await store.aclose()
    verify(str(ledger))


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_slower_clock_that_follows_a_compaction_writes_no_earlier_time(
    ledger: Path, crashed: bool
) -> None:
    ahead, behind = HandClock(), HandClock()
    first = await FileStore.open(ledger, machine=HandMachine(ahead, "boot-1/time:[1]"))
    second = await FileStore.open(ledger, machine=HandMachine(behind, "boot-1/time:[2]"))
    ahead.advance(50.0)
    lock = ledger.with_name("effects.jsonl.lock")
    mark = lock.read_bytes()
    await first.compact()
    if crashed:
        lock.write_bytes(mark)
    await second.swap(change("a"))
    await first.aclose()
    await second.aclose()
    verify(str(ledger))
