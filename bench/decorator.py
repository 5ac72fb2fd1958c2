"""What `@fence.fenced` adds to awaiting the bare function, in memory.

    python -m bench.decorator

A first call is a whole effect: request, claim, ticket, lease, certificate; a repeated one is a
replay.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from bench._measure import RESULT, Row, interleaved, main, micro, seconds
from effectfence import EffectFence

CALLS = 2000
MOST = 15e-6


async def charge(order: int, cents: int) -> dict[str, Any]:
    return RESULT


def measure(full: bool) -> list[Row]:
    fence = EffectFence()
    fenced = fence.fenced(intent="charge:{order}", domain="order:{order}")(charge)
    numbers = itertools.count()

    def bare() -> float:
        return _each(lambda number: charge(number, 4900), CALLS)

    def fresh() -> float:
        first = next(numbers) * CALLS
        return _each(lambda number: fenced(first + number, 4900), CALLS)

    def replayed() -> float:
        return _each(lambda number: fenced(0, 4900), CALLS)

    base, first, again = interleaved(15 if full else 7, bare, fresh, replayed)
    return [
        _row("@fence.fenced, a first call, over a bare await, in memory", first - base),
        _row("@fence.fenced, a repeated call, over a bare await, in memory", again - base),
    ]


def _each(call: Any, count: int) -> float:
    """Seconds a call."""

    async def all_of_them() -> None:
        for number in range(count):
            await call(number)

    return seconds(lambda: asyncio.run(all_of_them())) / count


def _row(claim: str, added: float) -> Row:
    return Row(claim, f"at most {micro(MOST)}", micro(added), added <= MOST)


if __name__ == "__main__":
    main(measure, "What the decorator adds to awaiting the bare function.")
