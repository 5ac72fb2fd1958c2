"""Pages that are drawn from the code say what the code says."""

from __future__ import annotations

from pathlib import Path

from effectfence.rules import TABLE, Does
from tests import states_page

PAGE = Path(__file__).parents[1] / "docs" / "states.md"


def test_the_states_page_is_drawn_from_the_table() -> None:
    assert PAGE.read_text("utf-8") == states_page.page(), (
        "docs/states.md differs from the code: python -m tests.states_page > docs/states.md"
    )


def test_the_states_page_explains_every_answer_of_the_table() -> None:
    entries = [entry for row in TABLE.values() for entry in row.values()]
    used = {does for entry in entries for does in (entry if isinstance(entry, tuple) else (entry,))}
    assert used == set(states_page.MEANINGS) == set(Does)
