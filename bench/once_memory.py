"""In memory, against once-kernel's `Once.run`: effects one after another, and their replays.

    python -m bench.once_memory

Both fingerprint the same facts (tool, domain, args). A replay is of a request, or payload, that was
built before.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bench._measure import RESULT, Row, arguments, interleaved, main, request, seconds
from bench._once import Once
from bench.pair import pairs, replays_seconds
from effectfence import EffectFence


def payload(number: int) -> dict[str, Any]:
    return {"tool": "charge_card", "domain": f"order:{number}", "args": arguments(number)}


def once_runs(count: int) -> Any:
    once = Once()
    for number in range(count):
        once.run(f"charge:order-{number}", payload(number), lambda: RESULT)
    return once


def once_replays_seconds(count: int) -> float:
    once = once_runs(count)
    again = [(f"charge:order-{number}", payload(number)) for number in range(count)]

    def replay() -> None:
        for key, its in again:
            assert once.run(key, its, lambda: None) is RESULT

    return seconds(replay)


async def fence_runs(count: int) -> None:
    fence = EffectFence()

    async def charge() -> dict[str, str]:
        return RESULT

    for number in range(count):
        await fence.run(request(number), charge)
    await fence.aclose()


def measure(full: bool) -> list[Row]:
    count, rounds = (5000, 31) if full else (1500, 15)
    with asyncio.Runner() as runner:
        once, pair, run, once_replay, replay = interleaved(
            rounds,
            lambda: seconds(lambda: once_runs(count)) / count,
            lambda: seconds(lambda: runner.run(pairs(count, request))) / count,
            lambda: seconds(lambda: runner.run(fence_runs(count))) / count,
            lambda: once_replays_seconds(count) / count,
            lambda: runner.run(replays_seconds(count)) / count,
        )
    against = "in memory, against once-kernel's Once.run"
    return [
        _row(f"replays a second of requests built before, {against}", replay, once_replay, 4),
        _row(f"prepare + commit a second, {against}", pair, once, 4),
        _row(f"fence.run (it renews leases too) a second, {against}", run, once, None),
    ]


def _row(claim: str, ours: float, once: float, least: float | None) -> Row:
    ratio = once / ours
    measured = f"{ratio:.2f} x ({1 / ours:,.0f}/s against {1 / once:,.0f}/s)"
    if least is None:
        return Row(claim, "no promise", measured)
    return Row(claim, f"at least {least:g} x", measured, ratio >= least)


if __name__ == "__main__":
    main(measure, "Effects and replays a second in memory, against once-kernel.")
