"""SIGKILL: before every system call, in recovery and in recovery from that, at named points, and at
random. The page cache outlives the process, so nothing here can see a missing sync: that is for
`test_power_cuts`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from effectfence.stores.order_lock import read_mark
from tests.crash.conftest import LONG
from tests.crash.forks import Forks, complaint
from tests.crash.judge import Notes, judged
from tests.crash.syscalls import (
    CHANGING,
    LOOKING,
    counted,
    instants,
    need_strace,
    traced,
)

SWEPT = (*CHANGING, "flock", "fcntl", *(LOOKING if LONG else ()))
WRITING = ("write", "pwrite64", "fdatasync", "fsync", "rename", "ftruncate", "unlink")
KILLED = -9


def places(folder: Path) -> dict[str, Path]:
    """Where a ledger and the notes about it go."""
    folder.mkdir(exist_ok=True)
    return {"ledger": folder / "ledger" / "effects.jsonl", "notes": folder}


def copied(folder: Path, to: Path) -> dict[str, Path]:
    """The same ledger once more: its mark names the copies as it named the files."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    at, old = places(to), places(folder)["ledger"]
    mark = read_mark(str(old))
    if mark is not None:
        if mark.inode == old.stat().st_ino:
            mark.inode = at["ledger"].stat().st_ino
        mark.alive_inode = at["ledger"].with_name("effects.jsonl.alive").stat().st_ino
        at["ledger"].with_name("effects.jsonl.lock").write_bytes(mark.pack())
    return at


async def verdict(folder: Path, *, again: bool = True) -> list[str]:
    """Of one whose process may have died before there was a ledger."""
    at = places(folder)
    return await judged(at["ledger"], Notes.read(folder), again=again)


async def test_a_kill_before_every_system_call(forks: Forks, scratch: Path) -> None:
    """Row 9: from the making of the ledger to its closing, with a compaction in between."""
    need_strace()
    counts = counted(forks, "small", SWEPT, scratch / "trace", **places(scratch / "whole"))
    assert await verdict(scratch / "whole") == []
    for name, k in instants(counts, SWEPT):
        folder = scratch / f"{name}-{k}"
        kill = f"{name}:signal=KILL:when={k}"
        status = traced(forks, "small", trace=(name,), inject=(kill,), **places(folder))
        assert status in (KILLED, 0), complaint(folder)
        assert await verdict(folder) == [], f"killed before {name} number {k}"
        shutil.rmtree(folder)
    assert counts["fdatasync"] >= 6
    assert counts["rename"] == 2, "the new ledger's, and the compacted one's"


# Inside recovery ----------------------------------------------------------------------------------


def at_call(name: str, k: int) -> tuple[str, int]:
    return name, k


DIRTY = {
    "written, not synced": at_call("fdatasync", 5),
    "synced, not marked": at_call("pwrite64", 6),
    "compacted, not renamed": at_call("rename", 2),
    "renamed, not marked": at_call("pwrite64", 8),
    "half a batch": at_call("fdatasync", 4),
}


def dirty(forks: Forks, what: str, folder: Path) -> Path:
    """A ledger as a crash leaves it."""
    name, k = DIRTY[what]
    kill = f"{name}:signal=KILL:when={k}"
    at = places(folder)
    assert traced(forks, "small", trace=(name,), inject=(kill,), **at) == KILLED
    if what == "half a batch":  # and its lock file went with the power
        with at["ledger"].open("r+b") as file:
            file.truncate(at["ledger"].stat().st_size - 300)
        at["ledger"].with_name("effects.jsonl.lock").unlink()
    return folder


@pytest.mark.parametrize("what", DIRTY)
async def test_a_kill_before_every_system_call_of_a_recovery(
    forks: Forks, scratch: Path, what: str
) -> None:
    """Row 14: and of a recovery from that one."""
    need_strace()
    start = dirty(forks, what, scratch / "start")
    after = {"intents": (6, 8)}
    counts = counted(
        forks, "small", SWEPT, scratch / "trace", **copied(start, scratch / "one"), **after
    )
    assert await verdict(scratch / "one") == []
    nested = 0
    for name, k in instants(counts, WRITING):
        once = copied(start, scratch / "once")
        kill = f"{name}:signal=KILL:when={k}"
        traced(forks, "small", trace=(name,), inject=(kill,), **once, **after)
        for again, j in instants(counts, WRITING if LONG else WRITING[:-2]):
            if not LONG and (j + k + nested) % 8:
                nested += 1
                continue
            nested += 1
            twice = copied(scratch / "once", scratch / "twice")
            kill = f"{again}:signal=KILL:when={j}"
            traced(forks, "small", trace=(again,), inject=(kill,), **twice, **after)
            assert await verdict(scratch / "twice") == [], f"{name} {k}, then {again} {j}"
        assert await verdict(scratch / "once") == [], f"killed before {name} number {k}"
