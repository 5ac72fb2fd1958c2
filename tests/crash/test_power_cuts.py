"""Power cuts, at every call and inside every write: what was acknowledged is there, what ran is
known to have been claimed. Only here a missing sync shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from effectfence.stores.machine import Machine
from tests.crash.conftest import LONG
from tests.crash.forks import Forks, complaint
from tests.crash.judge import Notes, judged
from tests.crash.power import TRACED, Cut, Disk, State, cuts
from tests.crash.syscalls import calls, need_strace, traced

STRIDE = 1 if LONG else 13


class AfterTheCut(Machine):
    """The machine that comes up again: another boot, its clock at its beginning; in the rig's own
    folder nothing is in danger."""

    def boot(self) -> str:
        return "after the cut"

    def boottime(self) -> float:
        return 7.0

    def sync(self, descriptor: int) -> None:
        """Not needed."""

    sync_data = sync


def put(state: State, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name, content in state.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return folder / "effects.jsonl"


async def judge_all(
    moments: Iterator[Cut], folder: Path, *, stride: int, stop: bool
) -> tuple[int, list[str]]:
    """How many states there are, and what is wrong in which."""
    count, found = 0, []
    seen: set[int] = set()
    for moment in moments:
        for state in moment.states(stride):
            known = hash((len(moment.notes.words), len(moment.notes.effects), *state.items()))
            if known in seen:
                continue
            seen.add(known)
            count += 1
            ledger = put(state, folder)
            again = count % 8 == 0
            for clause in await judged(ledger, moment.notes, machine=AfterTheCut(), again=again):
                found.append(f"after {moment.after}: {clause}")
            if found and stop:
                return count, found
    return count, found


class Rig:
    """One ledger, the model of its disk, and all that was said: job after job."""

    def __init__(self, forks: Forks, scratch: Path) -> None:
        need_strace()
        self.forks, self.scratch = forks, scratch
        self.folder = scratch / "ledger"
        self.disk, self.told = Disk(), Notes()

    def moments(self, job: str, kill: str = "", **spec: Any) -> Iterator[Cut]:
        trace = self.scratch / "trace"
        status = traced(
            self.forks, job, trace=TRACED, inject=(kill,) if kill else (), out=trace,
            ledger=self.folder / "effects.jsonl", notes=self.scratch, **spec,
        )  # fmt: skip
        assert status == (-9 if kill else 0), complaint(self.scratch)
        return cuts(calls(trace), self.folder, self.disk, self.told)

    def crash(self, kill: str, **spec: Any) -> None:
        """A job that is killed there; its page cache stays."""
        for _ in self.moments("small", kill, **spec):
            pass

    async def judge(
        self, job: str = "small", *, stride: int = STRIDE, stop: bool = False, **spec: Any
    ) -> list[str]:
        moments = self.moments(job, **spec)
        self.count, found = await judge_all(moments, self.scratch / "cut", stride=stride, stop=stop)
        print(self.count, "states", *found[:3])
        return found


async def test_a_power_cut_at_every_call_and_inside_every_write(
    forks: Forks, scratch: Path
) -> None:
    """Rows 10 and 15: a new ledger, effects one by one and at once, a compaction."""
    rig = Rig(forks, scratch)
    assert await rig.judge() == []
    assert rig.count > 1000


@pytest.mark.parametrize("kill", ["fdatasync-3", "fdatasync-6", "pwrite64-6", "fsync-6"])
async def test_a_power_cut_in_what_follows_a_killed_process(
    forks: Forks, scratch: Path, kill: str
) -> None:
    """Rows 10 and 14: the first left bytes, or names, that nobody synced."""
    rig = Rig(forks, scratch)
    rig.crash(kill.replace("-", ":signal=KILL:when="))
    assert await rig.judge(intents=(0, 8), stride=STRIDE * 7) == []


@pytest.mark.parametrize("mutant", ["no_fsync", "acknowledged_before_fsync", "folder_not_synced"])
async def test_a_missing_or_late_sync_is_seen(forks: Forks, scratch: Path, mutant: str) -> None:
    assert await Rig(forks, scratch).judge(mutant=mutant, stop=True)


async def test_a_replay_of_what_nobody_synced_is_seen(forks: Forks, scratch: Path) -> None:
    rig = Rig(forks, scratch)
    rig.crash("fdatasync:signal=KILL:when=2")
    assert await rig.judge(mutant="replay_not_yet_durable", stop=True)


async def test_the_folder_is_synced_before_the_first_answer(forks: Forks, scratch: Path) -> None:
    """Row 15, read off the trace itself: the new file, its name, and only then a word."""
    rig = Rig(forks, scratch)
    list(rig.moments("small"))
    made = calls(scratch / "trace")
    synced = {"file": -1, "folder": -1, "above": -1}
    for call in made:
        path = call.path()
        if call.name == "fsync" and call.result == "0":
            synced["file"] = call.ended if path.name == "effects.jsonl.new" else synced["file"]
            synced["folder"] = call.ended if path == rig.folder else synced["folder"]
            synced["above"] = call.ended if path == scratch else synced["above"]
        if call.name == "rename" and synced["folder"] < 0:
            renamed = call.began
        if call.name == "writev":
            break
    assert 0 <= synced["above"] < synced["file"] < renamed < synced["folder"] < call.began
