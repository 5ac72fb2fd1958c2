"""Four processes on one ledger, against one process alone, at the same total concurrency.

    python -m bench.processes

Distinct intents, 100 callers in all, each process with its own event loop and its own store.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench._durable import file_fence, pair_on, rate
from bench._measure import Row, main, scratch

_CALLERS = 100
_PROCESSES = 4


def measure(full: bool) -> list[Row]:
    rounds, run_seconds = (9, 4.0) if full else (3, 2.0)
    alone: list[float] = []
    shared: list[list[float]] = []
    with scratch() as folder:
        for number in range(rounds):
            alone += _run(folder / f"alone-{number}.jsonl", 1, run_seconds)
            shared.append(_run(folder / f"shared-{number}.jsonl", _PROCESSES, run_seconds))
    one, four = statistics.median(alone), statistics.median(map(sum, shared))
    slowest = statistics.median(min(rates) / (sum(rates) / _PROCESSES) for rates in shared)
    return [
        Row(
            f"{_PROCESSES} processes sharing a ledger, against one, {_CALLERS} callers in all",
            "at least 0.5 x",
            f"{four / one:.2f} x ({four:,.0f}/s against {one:,.0f}/s)",
            four / one >= 0.5,
        ),
        Row(
            f"the slowest of the {_PROCESSES} processes",
            "at least 0.1 of a fair share",
            f"{slowest:.2f}",
            slowest >= 0.1,
        ),
    ]


def _run(ledger: Path, processes: int, run_seconds: float) -> list[float]:
    """Effects a second of each process. Raises `EOFError` if one died."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    started = []
    try:
        for number in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_process,
                args=(ledger, number, _CALLERS // processes, run_seconds, barrier, sender),
            )
            process.start()
            sender.close()
            started.append((process, receiver))
        return [receiver.recv() for _, receiver in started]
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def _process(
    ledger: Path, number: int, callers: int, run_seconds: float, barrier: Any, sender: Connection
) -> None:
    sender.send(asyncio.run(_rate(ledger, number, callers, run_seconds, barrier)))


async def _rate(ledger: Path, number: int, callers: int, run_seconds: float, barrier: Any) -> float:
    async with file_fence(ledger) as fence:
        await asyncio.to_thread(barrier.wait, 60)
        figure = await rate(pair_on(fence), callers, run_seconds, itertools.count(number * 10**9))
        await asyncio.to_thread(barrier.wait, 60)  # nobody closes while others are measured
        return figure


if __name__ == "__main__":
    main(measure, "Four processes on one ledger, against one.")
