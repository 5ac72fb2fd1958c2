"""Figures of the hot paths (pytest-benchmark; no time is asserted), and the benches' own pieces.

The claims themselves are measured by `python -m bench`.
"""

import asyncio
import itertools

import pytest

from bench._durable import CarelessMachine, CountingMachine, each, file_fence, pair_on
from bench._measure import RESULT, Row, interleaved, request, table
from bench.pair import PlainRequest, yardstick
from effectfence import EffectFence, EffectRequest, Replay


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=["memory", "file"])
def fence(request, runner, tmp_path):
    ledger = "memory:" if request.param == "memory" else tmp_path / "effects.jsonl"

    async def opened():
        return await EffectFence.open(ledger)

    fence = runner.run(opened())
    yield fence
    runner.run(fence.aclose())


def test_prepare_and_commit(benchmark, runner, fence):
    numbers = itertools.count()
    pair = pair_on(fence)
    benchmark(lambda: runner.run(pair(next(numbers))))
    assert fence.stats().admitted == next(numbers)


def test_replay(benchmark, runner, fence):
    runner.run(pair_on(fence)(1))
    asked = request(1)
    admission = benchmark(lambda: runner.run(fence.prepare(asked)))
    assert isinstance(admission, Replay)
    assert admission.cert.result == RESULT


# --- the benches' own pieces ----------------------------------------------------------------------


async def test_one_sync_carries_what_everybody_asked_for_meanwhile(tmp_path):
    machine = CountingMachine()
    async with file_fence(tmp_path / "effects.jsonl", machine) as fence:
        machine.syncs = 0
        await each(pair_on(fence), 10, 5)
        assert 2 * 10 * 5 / machine.syncs >= 9


async def test_a_bench_that_does_not_sync_still_writes(tmp_path):
    async with file_fence(tmp_path / "effects.jsonl", CarelessMachine()) as fence:
        await each(pair_on(fence), 3, 2)
    async with EffectFence.open(tmp_path / "effects.jsonl") as fence:
        assert await fence.intent_count() == 6


def test_the_yardstick_validates_what_a_request_validates():
    ours, plain = EffectRequest.model_fields, PlainRequest.model_fields
    assert set(ours) == set(plain)
    assert {name for name in ours if ours[name].is_required()} == {
        name for name in plain if plain[name].is_required()
    }
    assert yardstick(1, facts=False) != yardstick(2, facts=False)


def test_medians_come_from_interleaved_rounds():
    order = []

    def subject(name, figures):
        def run():
            order.append(name)
            return next(figures)

        return run

    first, second = subject("a", iter([9, 1, 5, 2])), subject("b", iter([9, 7, 8, 6]))
    assert interleaved(3, first, second) == [2, 7]
    assert order == ["a", "b"] * 4


def test_the_table_says_what_held():
    shown = table([Row("fast", "at most 1 s", "2 s", False), Row("odd", "", "3")])
    assert [line.split() for line in shown.splitlines()[2:]] == [
        ["fast", "at", "most", "1", "s", "2", "s", "NO"],
        ["odd", "3", "-"],
    ]
