"""A disk that fails or is full: what cannot be made durable is never acknowledged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from effectfence.stores.file import verify
from tests.crash.conftest import LONG
from tests.crash.forks import Forks, complaint
from tests.crash.judge import Notes, judged, said
from tests.crash.power import TRACED, Cut, Disk, cuts
from tests.crash.syscalls import Call, calls, counted, instants, need_strace, traced
from tests.crash.test_power_cuts import judge_all

SYNCS = ("fdatasync", "fsync")
_PROOF = {"done": "cert", "fresh": "key"}
"""What of a word stands in the ledger, if that what it says does."""

WRITES = (*SYNCS, "write", "rename", "ftruncate")


def after_failure(made: list[Call], ledger: Path) -> list[str]:
    """What a process did after a sync of its ledger, or of the ledger's folder, had failed."""
    failed = next(call for call in made if call.name in SYNCS and "EIO" in call.result)
    if failed.path() not in (ledger, ledger.parent):
        return []  # of a file that has no name yet: it is thrown away
    later = [call for call in made if call.began > failed.ended]
    durable = synced_before(made, ledger, failed)
    found = []
    for call in later:
        if call.name in WRITES and ledger.parent in (call.path(), call.path().parent):
            found.append(f"{call.name} of {call.path().name} after a failed sync")
        if call.name == "writev" and call.path().name == "words":
            for word in said(call.data()):
                proof = word.get(_PROOF.get(word["word"], ""), "nothing").encode()
                if word["word"] not in ("failed", "releases") and proof not in durable:
                    found.append(f"told after a failed sync: {word}")
    return found


def synced_before(made: list[Call], ledger: Path, failed: Call) -> bytes:
    """What was durable already: a caller may be told of it late, when its loop comes to it."""
    synced = [
        call.began
        for call in made
        if call.name in SYNCS and call.path() == ledger and call.ended < failed.began
    ]
    return b"".join(
        call.data()
        for call in made
        if call.name == "write" and call.path() == ledger and call.ended < max(synced, default=0)
    )


async def failed_sync(forks: Forks, folder: Path, name: str, k: int, **spec: Any) -> list[str]:
    """Everything wrong with a run whose `k`-th such sync fails."""
    ledger = folder / "ledger" / "effects.jsonl"
    status = traced(
        forks, "small", trace=TRACED, inject=(f"{name}:error=EIO:when={k}",),
        out=folder.with_suffix(".trace"), ledger=ledger, notes=folder, **spec,
    )  # fmt: skip
    assert status == 0, complaint(folder)
    made = calls(folder.with_suffix(".trace"))
    found = after_failure(made, ledger)
    disk, told = Disk(), Notes()
    list(cuts(made, ledger.parent, disk, told))
    end = iter([Cut("the end", disk, told)])
    _, broken = await judge_all(end, folder.with_suffix(".cut"), stride=0, stop=True)
    return found + broken


async def test_a_failed_sync_is_never_acknowledged_nor_tried_again(
    forks: Forks, scratch: Path
) -> None:
    """Row 22: each sync fails once; what it should have written is gone, whatever comes after."""
    need_strace()
    at = {"ledger": scratch / "whole" / "ledger" / "effects.jsonl", "notes": scratch / "whole"}
    at["notes"].mkdir()
    counts = counted(forks, "small", SYNCS, scratch / "trace", **at)
    tried = 0
    for name, k in instants(counts, SYNCS):
        folder = scratch / f"{name}-{k}"
        folder.mkdir()
        assert await failed_sync(forks, folder, name, k) == [], f"{name} number {k}"
        again = {"ledger": folder / "ledger" / "effects.jsonl", "notes": folder}
        forks.run("small", intents=(6, 8), **again)
        notes = Notes.read(folder)
        assert {word["intent"] for word in notes.told("done")} >= {"i6", "i7"}, "reopened: it works"
        assert await judged(again["ledger"], notes, again=True) == []
        shutil.rmtree(folder)
        tried += 1
    assert tried >= 12


@pytest.mark.parametrize("k", [2, 3, 6])
async def test_a_sync_that_is_tried_again_is_seen(forks: Forks, scratch: Path, k: int) -> None:
    need_strace()
    folder = scratch / "retried"
    folder.mkdir()
    mutant = {"mutant": "retry_after_failed_fsync", "compact": False}
    found = await failed_sync(forks, folder, "fdatasync", k, **mutant)
    assert any("after a failed sync" in clause for clause in found)
    assert any("after a failed sync" not in clause for clause in found), "the cut shows it too"


@pytest.mark.parametrize("error", ["ENOSPC", *(["EDQUOT", "EFBIG"] if LONG else [])])
@pytest.mark.parametrize("lasts", ["", "+"])
async def test_a_write_that_fails_refuses_the_claim_or_keeps_the_ticket(
    forks: Forks, scratch: Path, error: str, lasts: str
) -> None:
    """Row 24: each write fails, once or from then on."""
    need_strace()
    writes = ("write", "pwrite64")
    at = {"ledger": scratch / "whole" / "ledger" / "effects.jsonl", "notes": scratch / "whole"}
    at["notes"].mkdir()
    counts = counted(forks, "small", writes, scratch / "trace", **at)
    for name, k in instants(counts, writes):
        folder = scratch / f"{name}-{k}"
        folder.mkdir()
        at = {"ledger": folder / "ledger" / "effects.jsonl", "notes": folder}
        fault = f"{name}:error={error}:when={k}{lasts}"
        assert traced(forks, "small", trace=(name,), inject=(fault,), **at) == 0, complaint(folder)
        notes = Notes.read(folder)
        where = f"{name} number {k}{lasts}"
        for word in notes.told("failed"):
            if word["at"] == "prepare":
                assert word["ran"] is False, where
            elif word["at"].startswith("commit"):
                assert word["ran"] is True, where
                assert word["kept"], where
        forks.run("small", intents=(6, 8), **at)
        assert await judged(at["ledger"], Notes.read(folder), again=True) == [], where
        shutil.rmtree(folder)


@pytest.mark.parametrize("percent", [0, 10, 35, 50, 75, 95])
async def test_a_file_that_may_not_grow_stops_claims_and_delays_commits(
    forks: Forks, scratch: Path, percent: int
) -> None:
    """Row 24, with the system's own limit, which lets a part of the last write through."""
    at = {"ledger": scratch / "ledger" / "effects.jsonl", "notes": scratch}
    forks.run("fill", intents=(0, 4), percent=percent, **at)
    notes = Notes.read(scratch)
    filled = next(notes.told("filled"))
    assert filled["owed"] == 1
    assert filled["refused"]
    assert await judged(at["ledger"], notes, again=True) == []
    refused = {word["intent"] for word in notes.told("failed")}
    assert refused.isdisjoint(effect["intent"] for effect in notes.effects)
    assert verify(str(at["ledger"])).torn_bytes == 0
