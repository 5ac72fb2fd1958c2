"""In memory: one effect, from building its request to its certificate; and one replay.

    python -m bench.pair

The yardstick is what nobody can do without: pydantic's validation of the same fields under the same
constraints (a plain model of this file, not ours), and `json.dumps(sort_keys=True)` and SHA-256 of
the same certificate.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from bench._measure import RESULT, Row, arguments, interleaved, main, micro, request, seconds
from effectfence import EffectFence, EffectRequest, Fresh, ReadSetEntry, Replay, VectorClock

Name = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00]*$")]


class PlainEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    domain: Name
    seq: Annotated[int, Field(ge=0, strict=True)]


class PlainRequest(BaseModel):
    """The fields and constraints of a request, and nothing of this library."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    intent: Name
    domain: Name
    tool: Name
    args: dict[str, Any] = Field(default_factory=dict)
    agent: Name
    read_set: Annotated[tuple[PlainEntry, ...], Field(max_length=64)] = ()
    parent: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    known_clock: dict[Name, Annotated[int, Field(ge=0, strict=True)]] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    result_ttl: Annotated[float, Field(gt=0)] | None = None
    on_lease_expiry: Literal["fence", "takeover"] | None = None


def yardstick(number: int, facts: bool) -> str:
    more: dict[str, Any] = (
        {
            "read_set": ({"domain": "metrics:eu", "seq": 0},),
            "known_clock": {"autoscaler": 3, "billing": 12},
        }
        if facts
        else {}
    )
    plain = PlainRequest(
        intent=f"charge:order-{number}",
        domain=f"order:{number}",
        tool="charge_card",
        args=arguments(number),
        agent="billing",
        **more,
    )
    cert = {
        "intent": plain.intent,
        "parent": plain.parent,
        "domain": plain.domain,
        "seq": 1,
        "tool": plain.tool,
        "args": plain.args,
        "result": RESULT,
        "vector_clock": {**plain.known_clock, "billing": 13},
        "read_set": [{"domain": entry.domain, "seq": entry.seq} for entry in plain.read_set],
        "agent": plain.agent,
    }
    return hashlib.sha256(json.dumps(cert, sort_keys=True).encode()).hexdigest()


def request_with_facts(number: int) -> EffectRequest:
    return EffectRequest(
        intent=f"charge:order-{number}",
        domain=f"order:{number}",
        tool="charge_card",
        args=arguments(number),
        agent="billing",
        read_set=(ReadSetEntry(domain="metrics:eu", seq=0),),
        known_clock=VectorClock({"autoscaler": 3, "billing": 12}),
    )


async def pairs(count: int, make: Callable[[int], EffectRequest]) -> None:
    fence = EffectFence()
    for number in range(count):
        admission = await fence.prepare(make(number))
        assert type(admission) is Fresh
        cert = await fence.commit(admission.prepared, RESULT)
        assert len(cert.hash) == 64


async def replays_seconds(count: int, *, same: bool = False) -> float:
    """Of `count` replays; of the `same` request objects that ran, or of others built before."""
    fence = EffectFence()
    first = [request(number) for number in range(count)]
    for one in first:
        admission = await fence.prepare(one)
        assert type(admission) is Fresh
        await fence.commit(admission.prepared, RESULT)
    again = first if same else [request(number) for number in range(count)]
    return await _timed(_replay(fence, again))


async def _timed(work: Any) -> float:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await work
    return loop.time() - begun


async def _replay(fence: EffectFence, requests: list[EffectRequest]) -> None:
    for one in requests:
        admission = await fence.prepare(one)
        assert type(admission) is Replay
        assert len(admission.cert.hash) == 64


def measure(full: bool) -> list[Row]:
    count, rounds = (5000, 31) if full else (1500, 15)
    with asyncio.Runner() as runner:

        def per(work: Callable[[], Any]) -> Callable[[], float]:
            return lambda: seconds(work) / count

        def of_yardstick(facts: bool) -> Callable[[], float]:
            return per(lambda: [yardstick(number, facts) for number in range(count)])

        def of_pairs(make: Callable[[int], EffectRequest]) -> Callable[[], float]:
            return per(lambda: runner.run(pairs(count, make)))

        figures = interleaved(
            rounds,
            of_yardstick(False),
            of_pairs(request),
            lambda: runner.run(replays_seconds(count)) / count,
            lambda: runner.run(replays_seconds(count, same=True)) / count,
            of_yardstick(True),
            of_pairs(request_with_facts),
        )
    plain, pair, replay, same, plain_facts, pair_facts = figures
    claim = "request + prepare + commit + certificate, in memory"
    return [
        _row(claim, pair, plain, 2.5),
        _row(f"{claim}, with read set and clock", pair_facts, plain_facts, 2.5),
        _row("replay of a request built before, in memory", replay, plain, 0.5),
        _row("replay of the very request object that ran, in memory", same, plain, 0.5),
    ]


def _row(claim: str, ours: float, yard: float, most: float) -> Row:
    ratio = ours / yard
    measured = f"{ratio:.2f} x ({micro(ours)} against {micro(yard)})"
    return Row(claim, f"at most {most} x yardstick", measured, ratio <= most)


if __name__ == "__main__":
    main(measure, "One effect in memory, against pydantic + json + sha256 of the same.")
