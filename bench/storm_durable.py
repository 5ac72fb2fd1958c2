"""The storm on a durable ledger, against the storm in memory.

python -m bench.storm_durable
"""

from __future__ import annotations

import itertools

from bench._measure import Row, fdatasync_seconds, interleaved, main, scratch
from bench.storm import Plan, run_storm


def measure(full: bool) -> list[Row]:
    numbers = itertools.count()
    with scratch() as folder:

        def storm(ledger: str) -> float:
            result = run_storm(Plan(ledger=ledger))
            assert result.held, result
            return result.elapsed_seconds

        memory, durable = interleaved(
            31 if full else 11,
            lambda: storm("memory:"),
            lambda: storm(str(folder / f"storm-{next(numbers)}.jsonl")),
        )
        sync = fdatasync_seconds(folder)
    most = 2 * memory + 3 * sync
    return [
        Row(
            "storm of 1,000 on a durable ledger, against memory",
            f"at most 2 x + 3 fdatasync = {most * 1000:.0f} ms",
            f"{durable * 1000:.0f} ms ({durable / memory:.2f} x {memory * 1000:.0f} ms)",
            durable <= most,
        )
    ]


if __name__ == "__main__":
    main(measure, "The storm on a durable ledger, against the storm in memory.")
