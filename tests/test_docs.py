"""Pages that are drawn from the code say what the code says, and programs on pages run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from effectfence.rules import TABLE, Does
from tests import states_page

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "states.md"


def test_the_states_page_is_drawn_from_the_table() -> None:
    assert PAGE.read_text("utf-8") == states_page.page(), (
        "docs/states.md differs from the code: python -m tests.states_page > docs/states.md"
    )


def test_the_states_page_explains_every_answer_of_the_table() -> None:
    entries = [entry for row in TABLE.values() for entry in row.values()]
    used = {does for entry in entries for does in (entry if isinstance(entry, tuple) else (entry,))}
    assert used == set(states_page.MEANINGS) == set(Does)


@pytest.mark.parametrize("name", ["frameworks", "mcp"])
def test_the_programs_of_a_page_run_and_run_again_on_their_ledger(
    name: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-W", "error", "program.py"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "effects.jsonl").read_text().count('"charge_card"') >= 1
