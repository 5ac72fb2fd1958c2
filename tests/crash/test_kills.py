"""SIGKILL: before every system call, in recovery and in recovery from that, at named points, and at
random. The page cache outlives the process, so nothing here can see a missing sync: that is for
`test_power_cuts`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from effectfence import EffectFence, FenceConfig, Fresh, OutcomeUnknown, Replay, records
from effectfence.stores.file import FileStore
from effectfence.stores.machine import Machine
from effectfence.stores.order_lock import read_mark
from tests.crash.conftest import LONG
from tests.crash.forks import REPOSITORY, Forks, complaint
from tests.crash.judge import Notes, judged
from tests.crash.syscalls import (
    CHANGING,
    LOOKING,
    counted,
    instants,
    need_strace,
    traced,
)
from tests.crash.worker import request_of, result_of

SWEPT = (*CHANGING, "flock", "fcntl", *(LOOKING if LONG else ()))
WRITING = ("write", "pwrite64", "fdatasync", "fsync", "rename", "ftruncate", "unlink")
KILLED = -9
SEED = int(os.environ.get("EFFECTFENCE_SEED", time.time_ns() % 1_000_000))


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
    print(sum(counts.values()), "kills")
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


# At named points ----------------------------------------------------------------------------------

POINTS = ("before the effect", "after the effect", "after the commit's sync")


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_at_a_named_point(forks: Forks, scratch: Path, point: str) -> None:
    """Rows 11, 12, 13: a thousand intents each, fifty at once.

    Before and after the effect nobody can tell: unknown. Once the commit is on the disk, whoever
    asks gets its certificate, always the same one.
    """
    at = places(scratch)
    for i in range(0, 1000, 50):
        process = forks.start("die_at", point=point, intents=(i, i + 50), **at)
        assert forks.wait(process) == KILLED, complaint(scratch)
    notes = Notes.read(scratch)
    assert len(notes.effects) == (0 if point == "before the effect" else 1000)
    notes.words = [{"word": "seen", "intent": f"i{i}"} for i in range(1000)]
    assert await judged(at["ledger"], notes) == []
    seen = [await answers(at["ledger"], 1000) for _ in range(2)]
    assert seen[0] == seen[1]
    if point == "after the commit's sync":
        assert len(set(seen[0])) == 1000
        assert "unknown" not in seen[0]
    else:
        assert set(seen[0]) == {"unknown"}


async def answers(ledger: Path, count: int) -> list[str]:
    """What the next caller of each intent is told."""
    async with EffectFence.open(ledger) as fence:
        found = []
        for i in range(count):
            try:
                admission = await fence.prepare(request_of(f"i{i}"))
            except OutcomeUnknown:
                found.append("unknown")
            else:
                assert isinstance(admission, Replay)
                assert admission.cert.verify()
                assert admission.cert.result == result_of(f"i{i}")
                found.append(admission.cert.hash)
    return found


async def test_an_operator_may_release_what_a_crash_left(forks: Forks, scratch: Path) -> None:
    at = places(scratch)
    forks.wait(forks.start("die_at", point="before the effect", intents=(0, 1), **at))
    async with EffectFence.open(at["ledger"]) as fence:
        assert await fence.clear("i0", reason="the bank says no", by="an operator")
        admission = await fence.prepare(request_of("i0"))
        assert isinstance(admission, Fresh)
        assert admission.prepared.attempt == 2
        await fence.release(admission.prepared, "enough")


class TenMinutes(Machine):
    """The machine, ten minutes later."""

    def boottime(self) -> float:
        return super().boottime() + 600.0


async def test_case_19_a_mail_is_never_sent_again_by_itself(forks: Forks, scratch: Path) -> None:
    """Killed right after the mail server took it; ten minutes pass."""
    at = places(scratch)
    forks.wait(forks.start("die_at", point="after the effect", intents=(0, 1), **at))
    store = await FileStore.open(at["ledger"], machine=TenMinutes(), check_body=records.check_body)
    async with EffectFence(store=store) as fence:
        listed = [record async for record in fence.intents("unknown")]
        assert [(record.intent, record.reason) for record in listed] == [("i0", "its process died")]
        for _ in range(3):
            with pytest.raises(OutcomeUnknown) as caught:
                await fence.run(request_of("i0"), unreachable)
            assert caught.value.ran is None
    assert len(Notes.read(scratch).effects) == 1


async def test_case_20_killed_in_the_midst_of_it_means_unknown_at_once(
    forks: Forks, scratch: Path
) -> None:
    at = places(scratch)
    lasting = {"config": {"lease_ttl": 1e6, "on_lease_expiry": "takeover"}}
    forks.wait(forks.start("die_at", point="after the effect", intents=(0, 1), **lasting, **at))
    config = FenceConfig(lease_ttl=1e6, on_lease_expiry="takeover")
    async with EffectFence.open(at["ledger"], config) as fence:
        with pytest.raises(OutcomeUnknown):
            await fence.prepare(request_of("i0"))


async def unreachable() -> None:
    raise AssertionError("the effect ran again")


# At random ----------------------------------------------------------------------------------------

KILLS = int(os.environ.get("EFFECTFENCE_KILLS", 250_000 if LONG else 10_000))
STORMS = 2


def storms(kills: int, *options: str) -> list[dict[str, Any]]:
    """The reports of storms that blow beside each other, each over ledgers of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash.storm", *options]
    blowing = [
        subprocess.Popen(
            [*command, "--kills", str(kills // STORMS), "--seed", str(SEED + n)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(STORMS)
    ]
    reports = [storm.communicate()[0] for storm in blowing]
    assert all(storm.returncode in (0, 1) for storm in blowing), "a storm broke off; see above"
    return [json.loads(report) for report in reports]


@pytest.mark.timeout(4000)
def test_kills_at_random() -> None:
    """Row 8: several processes at a time, with old intents, new ones and compactions; what is
    counted is processes, each killed once, at an instant that nothing in it knew of."""
    seen: Counter[str] = Counter()
    for report in storms(KILLS):
        found = {ledger: clauses[:3] for ledger, clauses in report.pop("found").items()}
        assert found == {}, f"seed {report['seed']}: {list(found.items())[:5]}"
        seen.update(report)
    print(dict(seen))
    assert seen["kills"] == KILLS
    assert seen["opened"] > KILLS // 10, "most are killed before they have done anything"
    assert seen["done"] > KILLS // 10
    assert seen["unknown"] > KILLS // 10


@pytest.mark.parametrize(
    ("mutant", "clauses"),
    [("dead_holder_is_free", {"S2", "S6"}), ("answered_before_the_write", {"S1", "S3"})],
)
def test_a_broken_promise_is_seen_in_the_storm(mutant: str, clauses: set[str]) -> None:
    """An effect that is run again; an answer that nothing bears out."""
    reports = storms(320, "--mutant", mutant)
    found = [clause for report in reports for these in report["found"].values() for clause in these]
    kills = sum(report["kills"] for report in reports)
    assert clauses <= {clause.split()[0] for clause in found}, f"{kills} kills: {found[:5]}"
