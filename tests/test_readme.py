"""The README's words, held to what they speak of."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from effectfence.errors import ERRORS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
COMMANDS = re.findall(r"^effectfence (.+)$", README, re.M)


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"program-{n}" for n in range(len(PROGRAMS))])
def test_every_program_in_the_readme_runs_twice(program: str, tmp_path: Path) -> None:
    """Where a ledger is left behind, the second run replays it and charges nothing."""
    (tmp_path / "program.py").write_text(program)
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    if "effects.jsonl" in program:
        assert "charged 1 time(s)" in first.stdout
        assert "charged 0 time(s)" in run(tmp_path).stdout


def run(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )


def test_the_table_of_errors_says_what_the_classes_say() -> None:
    between = README.split("<!-- errors: begin")[1].split("<!-- errors: end")[0]
    rows = [line for line in between.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{error.__name__}` | `{error.code}` | `{error.ran}` | {error.http_status} |"
        for error in ERRORS
    ]


def test_every_command_shown_is_one_that_the_program_takes() -> None:
    """Each `effectfence …` line starts with words that `--help` knows."""
    assert COMMANDS
    for command in COMMANDS:
        words = command.split()
        verb = words[:2] if words[0] == "ledger" else words[:1]
        helped = subprocess.run(
            [sys.executable, "-m", "effectfence", *verb, "--help"],
            cwd=ROOT,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert helped.returncode == 0, command


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
