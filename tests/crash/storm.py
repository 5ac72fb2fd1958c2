"""SIGKILL at random: ledger after ledger, on each of them processes that are killed one by one.

    python -m tests.crash.storm --kills 5000
    python -m tests.crash.storm --kills 500 --mutant dead_holder_is_free

1.  This process has imported everything, has no thread, and forks those who are to be killed: what
    a kill costs is a fork, the opening of the ledger, a little work and a reaping.
2.  Opening reads the whole ledger, so ledgers stay short: `KILLS_A_LEDGER` kills, then the next.
3.  Who is to be killed is told nothing. Its last instant is drawn when it is forked: in its first
    steps, while it opens (and takes up what the dead have left), asks, writes, syncs or compacts.
    When one dies the next is forked, while its neighbours go on.
4.  Each ledger is judged whole, as in every rig (`judge.judged`): a few at a time by a fork of this
    process, while the storm goes on over the next ones.

Prints one JSON object: how many were killed, how many of them had opened the ledger, which words
their callers had been told, and what was found, by ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash import mutants, worker
from tests.crash.forks import BROKEN, complaint, redirect
from tests.crash.judge import Notes, judged

KILLS_A_LEDGER = 16
LONGEST_LIFE_SECONDS = 0.025
LEDGERS_A_JUDGE = 6


class Storm:
    def __init__(self, folder: Path, seed: int, mutant: str | None = None) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.mutant = mutant
        self.seen: Counter[str] = Counter()
        self.found: dict[str, list[str]] = {}
        self._judge: tuple[int, list[Path]] | None = None

    def blow(self, kills: int) -> dict[str, Any]:
        places: list[Path] = []
        while self.seen["kills"] < kills:
            places.append(self.folder / f"{self.seen['ledgers']}")
            self._round(places[-1], min(KILLS_A_LEDGER, kills - self.seen["kills"]))
            if len(places) == LEDGERS_A_JUDGE:
                self._send_to_judge(places)
                places = []
        self._send_to_judge(places)
        self._take_verdicts()
        return {**self.seen, "found": self.found}

    def _round(self, place: Path, kills: int) -> None:
        """One new ledger, and one to four processes on it at a time."""
        chance = self.chance
        place.mkdir()
        self.seen["ledgers"] += 1
        at_once, callers = chance.randint(1, 4), chance.randint(1, 6)
        alive: list[tuple[float, int]] = []
        for born in range(kills):
            if len(alive) == at_once:
                self._kill(place, *alive.pop(0))
            spec = {
                "job": "endless",
                "ledger": str(place / "ledger" / "effects.jsonl"),
                "notes": str(place),
                "seed": chance.random(),
                "first": born,
                "callers": callers,
                "compact_within": LONGEST_LIFE_SECONDS / 2,
                "mutant": self.mutant,
            }
            process = _forked(place, lambda spec=spec: play(spec))
            ends = time.monotonic() + chance.random() * LONGEST_LIFE_SECONDS
            alive.append((ends, process))
            alive.sort()
        for last in alive:
            self._kill(place, *last)

    def _kill(self, place: Path, ends: float, process: int) -> None:
        time.sleep(max(0.0, ends - time.monotonic()))
        os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status == -signal.SIGKILL, (status, complaint(place))
        self.seen["kills"] += 1

    def _send_to_judge(self, places: list[Path]) -> None:
        """Never more than one judge at a time: the last one's verdicts are taken first."""
        self._take_verdicts()
        if places:
            self._judge = _forked(places[0], lambda: judge(places)), places

    def _take_verdicts(self) -> None:
        if self._judge is None:
            return
        process, places = self._judge
        self._judge = None
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status == 0, complaint(places[0])
        for place in places:
            verdict = json.loads((place / "verdict").read_text())
            self.seen.update(verdict["seen"])
            if verdict["found"]:
                self.found[place.name] = verdict["found"]
            shutil.rmtree(place)


def _forked(place: Path, do: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        redirect(place)
        do()
        os._exit(0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(BROKEN)


def play(spec: dict[str, Any]) -> None:
    if spec["mutant"]:
        mutants.MUTANTS[spec["mutant"]]()
    worker.do(spec)


def judge(places: list[Path]) -> None:
    for place in places:
        notes = Notes.read(place)
        found = asyncio.run(judged(place / "ledger" / "effects.jsonl", notes, again=True))
        seen = Counter(word["word"] for word in notes.words)
        (place / "verdict").write_text(json.dumps({"seen": seen, "found": found}))


def warm_up(place: Path) -> None:
    """A whole ledger's life and its verdict, here, so that no child loads or sets up anything."""
    place.mkdir()
    ledger = place / "ledger" / "effects.jsonl"
    worker.do({"job": "small", "ledger": str(ledger), "notes": str(place)})
    judge([place])
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.storm")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--mutant", choices=tuple(mutants.MUTANTS))
    given = parser.parse_args()
    logging.getLogger("effectfence").setLevel(logging.ERROR)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        warm_up(Path(name) / "warm-up")
        storm = Storm(Path(name), given.seed, given.mutant)
        report = storm.blow(given.kills)
    print(json.dumps({"seed": given.seed, **report}))
    return bool(report["found"])


if __name__ == "__main__":
    sys.exit(main())
