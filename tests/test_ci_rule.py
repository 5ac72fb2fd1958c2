"""In CI a skipped test is a failed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = """
import pytest

def test_never_here():
    pytest.skip("no compiler")

@pytest.mark.xfail(strict=True)
def test_known():
    assert False
"""


@pytest.mark.parametrize(("setting", "outcome"), [("1", 1), ("", 0)])
def test_a_skip_fails_in_ci_and_nowhere_else(tmp_path: Path, setting: str, outcome: int) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(tmp_path)],
        cwd=tmp_path,
        env={
            **os.environ,
            "EFFECTFENCE_CI": setting,
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == outcome, run.stdout
    assert ("no compiler" in run.stdout) is (outcome == 1)
