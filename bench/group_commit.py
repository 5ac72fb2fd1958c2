"""How many records one fdatasync carries, and what the syncs cost.

python -m bench.group_commit
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from bench._durable import CarelessMachine, CountingMachine, each, file_fence, pair_on, rate
from bench._measure import Row, interleaved, main, scratch
from effectfence.stores.machine import Machine

_TIMES = {1: 100, 10: 50, 100: 30, 1000: 10}


def measure(full: bool) -> list[Row]:
    with scratch() as folder:
        return [
            *(asyncio.run(_records_per_sync(folder, c, times)) for c, times in _TIMES.items()),
            _cost_of_syncs(folder, *((15, 2.0) if full else (5, 1.0))),
        ]


async def _records_per_sync(folder: Path, concurrency: int, times: int) -> Row:
    machine = CountingMachine()
    async with file_fence(folder / f"{concurrency}.jsonl", machine) as fence:
        machine.syncs = 0
        await each(pair_on(fence), concurrency, times)
        records = 2 * concurrency * times  # a claim and a certificate each
        per_sync = records / machine.syncs
    least = 0.9 * concurrency
    return Row(
        f"records per fdatasync at concurrency {concurrency:,}",
        f"at least {least:,g}",
        f"{per_sync:,.1f} ({records:,} records, {machine.syncs:,} syncs)",
        per_sync >= least,
    )


def _cost_of_syncs(folder: Path, rounds: int, run_seconds: float) -> Row:
    numbers = itertools.count()

    async def at_1000(machine: Machine) -> float:
        async with file_fence(folder / f"cost-{next(numbers)}.jsonl", machine) as fence:
            return await rate(pair_on(fence), 1000, run_seconds)

    durable, careless = interleaved(
        rounds,
        lambda: asyncio.run(at_1000(Machine())),
        lambda: asyncio.run(at_1000(CarelessMachine())),
    )
    ratio = durable / careless
    return Row(
        "durable at concurrency 1,000, against fdatasync stubbed out",
        "at least 0.7 x",
        f"{ratio:.2f} x ({durable:,.0f}/s against {careless:,.0f}/s)",
        ratio >= 0.7,
    )


if __name__ == "__main__":
    main(measure, "Group commit: records per sync, and the cost of the syncs.")
