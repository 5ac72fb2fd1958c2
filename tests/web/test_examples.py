"""The examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAY = {
    "fastapi_charge": [
        "asked 20 times, charged 1 time(s), 19 replayed",
        "another amount, same key: 422 This key stands for another request: it differs in body.",
        "no key: 400 Idempotency-Key is missing",
    ],
    "aiohttp_charge": [
        "hung up, asked again: 201 {'charge': 'ch_1'}, replayed: true",
        "charged 1 time(s)",
    ],
}


@pytest.mark.parametrize("name", SAY)
def test_an_example_says_what_it_shows_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"examples.{name}"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == SAY[name]
    assert list(tmp_path.iterdir()) == []
