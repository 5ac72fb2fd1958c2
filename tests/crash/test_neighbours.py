"""Other processes on the same ledger: they open it together, read while others write, stop in the
midst of it and come back from the dead."""

# ruff: noqa: ASYNC110, ASYNC240 - other processes have no events to wait for

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from effectfence import (
    EffectFence,
    FenceConfig,
    Fresh,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    records,
)
from effectfence.stores.contract import Applied
from effectfence.stores.file import FileStore, verify
from effectfence.stores.machine import Machine
from tests.crash.conftest import LONG
from tests.crash.forks import Forks, complaint
from tests.crash.judge import Notes, judged, said
from tests.crash.worker import World, request_of, result_of
from tests.stores.damage import change

ROUNDS = 10_000 if LONG else 1000


def places(folder: Path) -> dict[str, Path]:
    return {"ledger": folder / "ledger" / "effects.jsonl", "notes": folder}


async def test_two_processes_that_open_one_ledger_together(forks: Forks, scratch: Path) -> None:
    """Row 3: a new ledger each round, and both want the same intent."""
    barrier = scratch / "barrier"
    barrier.write_bytes(bytes(32))
    pair = [
        forks.start("race", mine=mine, count=ROUNDS, barrier=str(barrier), **places(scratch))
        for mine in (0, 8)
    ]
    for process in pair:
        assert await asyncio.to_thread(forks.wait, process) == 0, complaint(scratch)
    notes = Notes.read(scratch)
    assert sorted(effect["intent"] for effect in notes.effects) == sorted(
        f"i{6 * round_}" for round_ in range(1, ROUNDS + 1)
    )
    assert len(list(notes.told("fresh"))) == ROUNDS
    assert len(notes.words) == 3 * ROUNDS, "one claims and is done; the other is told something"
    for round_ in range(1, ROUNDS + 1):
        ledger = scratch / "ledger" / f"{round_}" / "effects.jsonl"
        assert verify(str(ledger), records.check_body).changes == 2


# Reading beside writers ---------------------------------------------------------------------------


RECORDS = 10_000_000 if LONG else 1_000_000
"""Shown to readers in all, each as often as it is shown, since each time it could be torn: what the
lines that `tail` sees write or keep, what `verify` finds, the intents that are listed."""


@dataclass
class Tail:
    """Who reads the bytes beside the writers, and knows nothing of locks and marks."""

    ledger: Path
    seen: dict[int, bytes] = field(default_factory=dict)
    """By inode: a compaction makes a new file."""
    states: int = 0

    def look(self) -> int:
        """How many records there are, up to the last newline: whole JSON every line, and what was
        there before is there still, in the same place."""
        with self.ledger.open("rb") as file:
            inode, data = os.fstat(file.fileno()).st_ino, file.read()
        data = data[: data.rfind(b"\n") + 1]
        assert data.startswith(self.seen.get(inode, b"")), "what was shown is not there any more"
        self.states += data != self.seen.get(inode)
        self.seen[inode] = data
        lines = [orjson.loads(line) for line in data.split(b"\n")[:-1]]
        return sum(len(line.get("puts", line.get("kept", ()))) for line in lines)


async def test_a_reader_sees_a_prefix_of_the_truth(forks: Forks, scratch: Path) -> None:
    """Row 27: all that had been acknowledged when it looked, nothing torn, nothing taken back."""
    at = places(scratch)
    endless = {"first": 0, "callers": 3, "compact_within": 4.0, **at}
    writers = [forks.start("endless", seed=i, **endless) for i in range(2)]
    while not at["ledger"].exists() or not (scratch / "words").exists():
        await asyncio.sleep(0.01)
    tail, shown = Tail(at["ledger"]), Counter[str]()
    changes = 0
    told: set[tuple[str, str]] = set()
    done: dict[str, str] = {}
    async with EffectFence.open(at["ledger"]) as fence:
        heard = 0
        while shown.total() < RECORDS:
            words = (scratch / "words").read_bytes()
            news, heard = said(words[heard:]), len(words)
            told |= {(word["intent"], word["cert"]) for word in news if word["word"] == "done"}
            summary = verify(str(at["ledger"]), records.check_body)
            assert summary.changes >= changes
            changes = summary.changes
            shown["verified"] += summary.records
            listed = [record async for record in fence.intents()]
            shown["listed"] += len(listed)
            certified = {r.intent: r.cert.hash for r in listed if r.cert}
            assert done.items() <= certified.items(), "nothing is taken back"
            done = certified
            assert told <= done.items()
            for _ in range(40):
                shown["tailed"] += tail.look()
    for process in writers:
        assert forks.kill(process) == -signal.SIGKILL, complaint(scratch)
    tail.look()
    assert await judged(at["ledger"], Notes.read(scratch), again=True) == []
    async with EffectFence.open(at["ledger"]) as fence:
        certified = {r.intent: r.cert.hash async for r in fence.intents("done") if r.cert}
    assert done.items() <= certified.items()
    assert tail.states > 50, "the writers went on meanwhile"
    print(dict(shown), f"in {tail.states} states of {len(tail.seen)} files, {changes} changes")


# Stopped, and back --------------------------------------------------------------------------------


async def stopped(process: int) -> None:
    """Wait until it is."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        await asyncio.sleep(0.005)


async def lapsed(fence: EffectFence, intents: int) -> None:
    """Wait until that many leases are over, by the ledger's own clock."""
    while len([record async for record in fence.intents(state="expired")]) < intents:
        await asyncio.sleep(0.005)


ZOMBIES = 20_000 if LONG else 5_000
"""A policy: tickets whose holder is stopped until their leases are over, and then reports on them
all at once."""


async def test_a_holder_that_sleeps_past_its_lease_may_still_say_what_it_did(
    forks: Forks, scratch: Path
) -> None:
    """Row 28, "fence": meanwhile everybody is told that nobody knows."""
    at = places(scratch)
    brief = {"lease_ttl": 0.2}
    process = forks.start("hold", intents=(0, ZOMBIES), config=brief, **at)
    await stopped(process)
    intents = [f"i{i}" for i in range(ZOMBIES)]
    async with EffectFence.open(at["ledger"], FenceConfig(**brief)) as fence:
        await lapsed(fence, ZOMBIES)
        asked = await asyncio.gather(
            *(fence.prepare(request_of(intent)) for intent in intents), return_exceptions=True
        )
        assert all(isinstance(told, OutcomeUnknown) and told.ran is None for told in asked)
        os.kill(process, signal.SIGCONT)
        assert await asyncio.to_thread(forks.wait, process) == 0, complaint(scratch)
        states = [record.state async for record in fence.intents()]
    assert states == ["done"] * ZOMBIES
    notes = Notes.read(scratch)
    assert sorted(word["intent"] for word in notes.told("done")) == sorted(intents)
    assert await judged(at["ledger"], notes) == []


async def test_a_holder_that_was_replaced_while_it_slept_is_refused(
    forks: Forks, scratch: Path
) -> None:
    """Row 28, "takeover": its commits come after, or before, those of who took over."""
    at = places(scratch)
    brief = {"lease_ttl": 0.2, "on_lease_expiry": "takeover"}
    process = forks.start("hold", intents=(0, ZOMBIES), config=brief, **at)
    await stopped(process)
    config = FenceConfig(lease_ttl=600.0, on_lease_expiry="takeover")
    world = World(scratch)
    async with EffectFence.open(at["ledger"], config) as fence:
        await lapsed(fence, ZOMBIES)
        tickets = []
        for admission in await asyncio.gather(
            *(fence.prepare(request_of(f"i{i}")) for i in range(ZOMBIES))
        ):
            assert isinstance(admission, Fresh)
            assert admission.prepared.attempt == 2
            tickets.append(admission.prepared)
            world.fire(admission.prepared)

        async def commit(some: list[PreparedEffect]) -> None:
            for ticket in some:
                cert = await fence.commit(ticket, result_of(ticket.intent))
                world.tell("done", cert.intent, cert=cert.hash)

        await commit(tickets[: ZOMBIES // 3])
        os.kill(process, signal.SIGCONT)
        waiting = asyncio.to_thread(forks.wait, process)
        status, _ = await asyncio.gather(waiting, commit(tickets[ZOMBIES // 3 : ZOMBIES // 3 * 2]))
        assert status == 0, complaint(scratch)
        await commit(tickets[ZOMBIES // 3 * 2 :])
    notes = Notes.read(scratch)
    refused = [word["code"] for word in notes.told("refused")]
    assert refused == ["lease_lost"] * ZOMBIES
    assert len(list(notes.told("done"))) == ZOMBIES
    assert next(notes.told("late"))["count"] == ZOMBIES
    assert len(notes.effects) == 2 * ZOMBIES, "that is what takeover costs"
    assert await judged(at["ledger"], notes, policy="takeover") == []


async def test_processes_that_stop_at_random_only_delay_the_others(
    forks: Forks, scratch: Path
) -> None:
    """Row 28: stopped in the midst of a batch too, while they hold the order lock."""
    at = places(scratch)
    chance = random.Random(7)
    writers = [forks.start("endless", seed=i, first=0, callers=3, **at) for i in range(3)]
    await asyncio.sleep(0.1)
    counts = []
    for _ in range(60):
        process = chance.choice(writers)
        os.kill(process, signal.SIGSTOP)
        await asyncio.sleep(chance.random() * 0.05)
        os.kill(process, signal.SIGCONT)
        await asyncio.sleep(chance.random() * 0.01)
        counts.append((scratch / "words").stat().st_size)
    for process in writers:
        assert forks.kill(process) == -signal.SIGKILL, complaint(scratch)
    assert len(set(counts)) > 20, "it went on"
    assert await judged(at["ledger"], Notes.read(scratch), again=True) == []


# The ground gives way -----------------------------------------------------------------------------


def replaced(ledger: Path) -> None:
    shutil.copy2(ledger, ledger.with_name("copy"))
    ledger.with_name("copy").replace(ledger)


def removed(ledger: Path) -> None:
    ledger.unlink()


def folder_removed(ledger: Path) -> None:
    shutil.rmtree(ledger.parent)


@pytest.mark.parametrize("harm", [replaced, removed, folder_removed])
async def test_a_ledger_that_goes_away_during_the_effect(
    scratch: Path, harm: Callable[[Path], None]
) -> None:
    """Row 26: the commit is not acknowledged, its ticket and result are not lost, and nobody is
    let through."""
    ledger = places(scratch)["ledger"]
    fence = await EffectFence.open(ledger)
    admission = await fence.prepare(request_of("i0"))
    assert isinstance(admission, Fresh)
    harm(ledger)
    with pytest.raises(LedgerUnavailable, match="while in use") as caught:
        await fence.commit(admission.prepared, result_of("i0"))
    assert caught.value.ran is True
    assert caught.value.prepared is admission.prepared
    assert caught.value.result == result_of("i0")
    with pytest.raises(LedgerUnavailable) as caught:
        await fence.prepare(request_of("i6"))
    assert caught.value.ran is False
    await fence.aclose(drain_seconds=0)


async def test_two_compactions_of_which_the_second_one_died_before_its_mark(scratch: Path) -> None:
    """Whoever slept through both follows: the mark vouches for the first, it for the second."""
    ledger = places(scratch)["ledger"]
    busy, idle = await FileStore.open(ledger), await FileStore.open(ledger)
    await busy.swap(change("a"))
    await busy.compact()
    await busy.swap(change("b"))
    mark = ledger.with_name("effects.jsonl.lock").read_bytes()
    await busy.compact()
    await busy.abandon()
    ledger.with_name("effects.jsonl.lock").write_bytes(mark)
    assert isinstance(await idle.swap(change("c")), Applied)
    assert all((await idle.load("abc")).records.values())
    await idle.aclose()
    assert verify(str(ledger)).records == 3


async def test_another_ledger_in_its_place_is_still_refused(scratch: Path) -> None:
    ledger = places(scratch)["ledger"]
    first, other = await FileStore.open(ledger), places(scratch / "other")["ledger"]
    await first.swap(change("a"))
    stranger = await FileStore.open(other)
    await stranger.swap(change("a"))
    await stranger.compact()
    await stranger.aclose()
    other.replace(ledger)
    with pytest.raises(LedgerUnavailable, match="replaced while in use"):
        await first.swap(change("b"))
    await first.aclose()


class FolderFails(Machine):
    """Its folder can't be synced."""

    def sync(self, descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        super().sync(descriptor)


async def test_a_compaction_whose_name_may_be_lost_closes_the_ledger_everywhere(
    scratch: Path,
) -> None:
    """Row 22: nobody tries that sync again, not even who follows the compaction."""
    ledger = places(scratch)["ledger"]
    first = await FileStore.open(ledger)
    await first.swap(change("a"))
    second = await FileStore.open(ledger, machine=FolderFails())
    with pytest.raises(LedgerUnavailable, match="sync"):
        await second.compact()
    for store in (first, second):
        with pytest.raises(LedgerUnavailable, match="sync"):
            await store.swap(change("b"))
        await store.aclose()
    again = await FileStore.open(ledger)
    assert isinstance(await again.swap(change("b")), Applied)
    await again.aclose()
