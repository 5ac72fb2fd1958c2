"""What the benches share: interleaved medians, scratch folders on a disk, rows of one table.

A figure is the median over rounds in which every subject is run once, one after the other, so that
a machine that speeds up or slows down does so for all of them. Ratios are of those medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from effectfence import EffectRequest


@dataclass(frozen=True)
class Row:
    """One line of the table. `held` is `None` where nothing was promised."""

    claim: str
    target: str
    measured: str
    held: bool | None = None


def interleaved(rounds: int, *subjects: Callable[[], float]) -> list[float]:
    """The median of what each subject gives, over `rounds` rounds; a round before warms up."""
    for subject in subjects:
        subject()
    figures: list[list[float]] = [[] for _ in subjects]
    for _ in range(rounds):
        for subject, its in zip(subjects, figures, strict=True):
            gc.collect()  # nobody pays for what the one before left behind
            its.append(subject())
    return [statistics.median(its) for its in figures]


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def request(number: int) -> EffectRequest:
    """The request that all benches make: an action of its own in a domain of its own."""
    return EffectRequest(
        intent=f"charge:order-{number}",
        domain=f"order:{number}",
        tool="charge_card",
        args=arguments(number),
        agent="billing",
    )


def arguments(number: int) -> dict[str, Any]:
    return {"order": number, "amount_cents": 4900, "currency": "EUR", "customer": "cus_1f9a"}


RESULT = {"charge_id": "ch_3Kx9", "status": "succeeded"}


# --- places ---------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes again, on a disk: where a sync is a sync."""
    place = None if file_system(tempfile.gettempdir()) != "tmpfs" else os.getcwd()
    with tempfile.TemporaryDirectory(prefix="effectfence-bench-", dir=place) as folder:
        yield Path(folder)


def file_system(folder: str) -> str:
    """The kind of file system a folder is on; empty where nobody says."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(folder)
    points = [line.split()[1:3] for line in mounts]
    under = [p for p in points if os.path.commonpath([real, p[0]]) == p[0]]
    return max(under, key=lambda point: len(point[0]))[1]


def fdatasync_seconds(folder: Path, rounds: int = 50) -> float:
    """The median of appending 1 KiB and syncing it, as a ledger does."""
    with (folder / "probe").open("ab", buffering=0) as probe:
        return statistics.median(seconds(lambda: _append_and_sync(probe)) for _ in range(rounds))


def _append_and_sync(file: Any) -> None:
    file.write(b"x" * 1024)
    getattr(os, "fdatasync", os.fsync)(file.fileno())


# --- telling --------------------------------------------------------------------------------------


def main(measure: Callable[[bool], list[Row]], about: str) -> None:
    """The command line of one bench: measure, then print its rows."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--full", action="store_true", help="longer runs, full sizes")
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    options = parser.parse_args()
    rows = measure(options.full)
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))


def table(rows: Sequence[Row]) -> str:
    shown = [("claim", "target", "measured", "held"), *map(_cells, rows)]
    widths = [max(len(cells[column]) for cells in shown) for column in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) for cells in shown]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: Row) -> tuple[str, str, str, str]:
    held = {True: "yes", False: "NO", None: "-"}[row.held]
    return row.claim, row.target, row.measured, held


def say(what: str) -> None:
    """Progress, on stderr."""
    print(what, file=sys.stderr, flush=True)


def micro(one: float) -> str:
    return f"{one * 1e6:.1f} µs"
