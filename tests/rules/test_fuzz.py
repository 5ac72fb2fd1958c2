"""Seeded schedules, judged by the independent checker; see `tests.rules.fuzz`.

20,000 seeds a policy (`EFFECTFENCE_LONG=1`: 100,000), spread over the processors. On the stand-in
core a tenth: what it replaces takes no part in a schedule. Row 28's zombies are counted: in 20,000
seeds a policy more than 5,000 tickets are committed after their lease.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from effectfence.models import OnLeaseExpiry
from tests.rules import fuzz

ROOT = Path(__file__).parents[2]
WORKERS = 2


def seeds() -> int:
    budget = 100_000 if os.environ.get("EFFECTFENCE_LONG") == "1" else 20_000
    return budget // 10 if os.environ.get("EFFECTFENCE_CORE") == "python" else budget


def searched(policy: str) -> dict[str, Any]:
    """The reports of all workers together; each takes its own stretch of seeds."""
    share = seeds() // WORKERS
    command = [sys.executable, "-m", "tests.rules.fuzz", "--json", "--policy", policy, "--seeds"]
    workers = [
        subprocess.Popen(
            [*command, str(n * share), str((n + 1) * share)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(WORKERS)
    ]
    total: Counter[str] = Counter()
    bad: dict[str, list[str]] = {}
    for worker in workers:
        out, _ = worker.communicate()
        assert worker.returncode in (0, 1), "a worker died"
        report = json.loads(out)
        bad |= report.pop("violations")
        total.update(report)
    assert total["seeds"] == share * WORKERS
    return {**total, "bad": bad}


def shown(bad: dict[str, list[str]], policy: str) -> str:
    lines = [f"seed {seed}: {'; '.join(found)}" for seed, found in list(bad.items())[:5]]
    rerun = f"python -m tests.rules.fuzz --policy {policy} --seed {next(iter(bad), 0)}"
    return "\n".join(
        [f"{len(bad)} seeds found something", *lines, "again, with its history:", rerun]
    )


@pytest.mark.timeout(1800)
def test_under_fence_no_schedule_makes_a_double_effect_or_a_double_commit() -> None:
    report = searched("fence")
    assert not report["bad"], shown(report["bad"], "fence")
    assert report["effects"] > report["seeds"], "the schedules hardly do anything"
    assert report["double_effects"] == 0
    assert report["replaced"] == 0
    assert report["expired"] > report["seeds"] // 4, "row 28: too few zombies"


@pytest.mark.timeout(1800)
def test_under_takeover_double_effects_are_found_and_no_double_commit() -> None:
    """That they are found shows that the fuzz is not blind."""
    report = searched("takeover")
    assert not report["bad"], shown(report["bad"], "takeover")
    assert report["double_effects"] > report["seeds"] // 100
    assert report["replaced"] > report["seeds"] // 16, "row 28: too few zombies were replaced"
    assert report["replaced"] + report["expired"] > report["seeds"] // 4, "row 28: too few zombies"


@pytest.mark.parametrize("mutant", fuzz.MUTANTS)
def test_the_fuzz_finds_a_planted_bug(mutant: str) -> None:
    policy, plant = fuzz.MUTANTS[mutant]
    with plant():
        report = fuzz.search(policy, range(2_000), stop=True)
    assert report["violations"], f"{mutant!r} survived {report['seeds']} seeds"


@pytest.mark.parametrize("policy", ["fence", "takeover"])
def test_a_seed_is_the_same_run_every_time(policy: OnLeaseExpiry) -> None:
    with fuzz.simulated() as clock:
        for seed in range(20):
            one, _ = fuzz.scenario(seed, policy, clock)
            two, _ = fuzz.scenario(seed, policy, clock)
            assert one.lines == two.lines
            assert one.history == two.history


def test_a_seed_is_the_same_run_in_another_process() -> None:
    """Nothing hangs on addresses or on the order of hashes."""
    command = [sys.executable, "-m", "tests.rules.fuzz", "--policy", "takeover", "--seed", "12"]
    runs = {
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(n)},
            capture_output=True,
            check=True,
        ).stdout
        for n in range(3)
    }
    assert len(runs) == 1
    assert b"effect" in runs.pop()
