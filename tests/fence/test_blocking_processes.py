"""The blocking fence in processes of its own: that end while it is held, and that fork."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from effectfence import IntentRecord, blocking
from tests.fence.blocking_worker import JOBS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.rig


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def run(job: str, ledger: Path) -> str:
    assert job in JOBS
    ran = subprocess.run(
        # A fork beside threads is what these programs are about; newer Pythons warn of it.
        [sys.executable, "-W", "error", "-W", "ignore:This process", "-m",
         "tests.fence.blocking_worker", job, str(ledger)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.strip()


def recorded(ledger: Path) -> IntentRecord:
    with blocking.open(ledger) as fence:
        record = fence.lookup("charge:o1")
    assert record is not None
    return record


def effects(ledger: Path) -> int:
    log = ledger.with_suffix(".effects")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_the_package_alone_is_enough_to_open_one() -> None:
    program = "import effectfence; effectfence.blocking.open().close()"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("number", range(4))
def test_every_program_of_the_page_runs_twice(number: int, tmp_path: Path) -> None:
    """The second run finds what the first one left behind."""
    page = (ROOT / "docs" / "blocking.md").read_text("utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(programs) == 4
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", programs[number]],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, "")


def test_what_is_held_at_exit_is_recorded_as_unknown(ledger: Path) -> None:
    run("exit_while_a_thread_hangs", ledger)
    record = recorded(ledger)
    assert (record.state, record.reason) == (
        "unknown",
        "the fence was closed while it was held",
    )
    assert effects(ledger) == 1


def test_what_ends_while_the_interpreter_waits_is_recorded(ledger: Path) -> None:
    run("exit_while_a_thread_ends", ledger)
    assert recorded(ledger).state == "done"
    assert effects(ledger) == 1


def test_a_call_after_the_end_is_refused(ledger: Path) -> None:
    assert run("exit_and_then_ask", ledger).splitlines() == [
        "False it is closed",
        "False the interpreter is ending",
    ]
    assert effects(ledger) == 0


def test_eight_forked_workers_race_and_one_effect_happens(ledger: Path) -> None:
    assert run("race_in_forks", ledger) == str([0] * 8)
    assert recorded(ledger).state == "done"
    assert effects(ledger) == 1


def test_a_fence_from_before_a_fork_is_refused_in_the_child(ledger: Path) -> None:
    assert run("fork_after_opening", ledger) == "done"
    assert effects(ledger) == 1
