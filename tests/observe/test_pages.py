"""The pages on operating and observability say what works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from effectfence.cli import _parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)


def commands() -> list[str]:
    text = "".join(blocks("operating.md", "sh")).replace("\\\n", " ")
    return [line.partition("#")[0].partition("<")[0] for line in text.splitlines() if line]


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_page_is_one(command: str) -> None:
    name, *typed = shlex.split(command)
    assert name == "effectfence"
    options, left = _parser(typed).parse_known_args(typed)
    assert callable(options.verb)
    assert not [word for word in left if word.startswith("-")]


def test_the_page_on_observability_runs(tmp_path: Path) -> None:
    program = "\n".join(blocks("observability.md", "python"))
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[:2] for line in ran.stdout.splitlines()] == [
        ["admitted", "charge:order-1"],
        ["committed", "charge:order-1"],
    ]
