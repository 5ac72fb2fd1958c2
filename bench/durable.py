"""Durable effects a second, against once-kernel's SQLite store through `AsyncOnce`.

    python -m bench.durable

The equal promise is `synchronous=FULL`; what it comes with (`NORMAL`, which forgets the last
commits in a power cut) stands beside it. One event loop, a closed loop of callers, effects that
take no time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from bench._durable import file_fence, pair_on, rate, run_on
from bench._measure import Row, fdatasync_seconds, interleaved, main, scratch
from bench._once import sqlite_once

PROMISED = {1: 1.3, 10: 5.0, 100: 12.0, 1000: 12.0}


def measure(full: bool) -> list[Row]:
    rounds, run_seconds = (15, 1.5) if full else (5, 0.6)
    with scratch() as folder:
        rows = [
            row
            for concurrency, least in PROMISED.items()
            for row in _at(concurrency, least, folder, rounds, run_seconds)
        ]
        sync = fdatasync_seconds(folder)
    return [*rows, Row("one fdatasync of 1 KiB here", "", f"{sync * 1000:.2f} ms")]


def _at(concurrency: int, least: float, folder: Path, rounds: int, run_seconds: float) -> list[Row]:
    numbers = itertools.count()

    async def ours() -> float:
        path = folder / f"{concurrency}-{next(numbers)}.jsonl"
        async with file_fence(path) as fence:
            return await rate(pair_on(fence), concurrency, run_seconds)

    def once(full: bool) -> Callable[[], float]:
        return lambda: asyncio.run(
            rate(run_on(sqlite_once(folder, full=full)), concurrency, run_seconds)
        )

    fence, equal, default = interleaved(
        rounds, lambda: asyncio.run(ours()), once(True), once(False)
    )
    claim = f"durable effects a second at concurrency {concurrency:,}"
    return [
        _row(f"{claim}, against once-kernel synchronous=FULL", fence, equal, least),
        _row(f"{claim}, against its default, NORMAL", fence, default, None),
    ]


def _row(claim: str, ours: float, theirs: float, least: float | None) -> Row:
    ratio = ours / theirs
    measured = f"{ratio:.1f} x ({ours:,.0f}/s against {theirs:,.0f}/s)"
    if least is None:
        return Row(claim, "no promise: it is a lesser one", measured)
    return Row(claim, f"at least {least:g} x", measured, ratio >= least)


if __name__ == "__main__":
    main(measure, "Durable effects a second, against once-kernel on SQLite.")
