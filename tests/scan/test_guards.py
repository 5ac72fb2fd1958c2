"""Guards are told by kind: measured on files written for it, decoys among them.

The first line of each file names the kinds of guard that stand before its one write.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scan.reading import python, read

FILES = sorted(Path(__file__).with_name("guards").glob("*.[pj][ys]"))


def expected(file: Path) -> set[str]:
    kinds = file.read_text("utf-8").splitlines()[0].split("guards:")[1]
    return {kind.strip() for kind in kinds.split(",")} - {"none"}


def seen(file: Path, folder: Path) -> set[str]:
    report = read(folder, {file.name: file.read_text("utf-8")})
    assert [len(tool.writes) for tool in report.tools] == [1], "one tool with one write a file"
    return {guard.kind for guard in report.tools[0].writes[0].guards}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_guard_is_told_by_its_kind(file: Path, tmp_path: Path) -> None:
    assert seen(file, tmp_path) == expected(file)


def test_the_set_holds_every_kind_and_decoys() -> None:
    assert len(FILES) >= 60
    kinds = [kind for file in FILES for kind in expected(file)]
    for kind in ("key", "optional", "fresh", "available", "check", "dedupe", "unique"):
        assert kinds.count(kind) >= 5, kind
    assert len([file for file in FILES if not expected(file)]) >= 12


UNIQUE = [
    "idempotency_key: must be unique for every request.",
    "Generate a new idempotency key for each call.",
    "A fresh UUID is required on every attempt as the request id.",
    "Never reuse an idempotency key.",
]
STABLE = [
    "Reuse the same idempotency key when retrying.",
    "idempotency_key: one per order; a retry passes the same key again.",
    "Creates a new order with a unique name.",
    "Returns the key of the record.",
]


@pytest.mark.parametrize("words", UNIQUE)
def test_a_description_that_asks_for_a_new_key_at_each_call_is_told(
    words: str, tmp_path: Path
) -> None:
    """Case 17: a retry is then a new key."""
    tools = python(tmp_path, f'@mcp.tool()\ndef pay(idempotency_key: str):\n    """{words}"""\n')
    assert tools["pay"].asks_for_new_keys is not None


@pytest.mark.parametrize("words", STABLE)
def test_a_description_that_asks_for_a_lasting_key_is_not(words: str, tmp_path: Path) -> None:
    tools = python(tmp_path, f'@mcp.tool()\ndef pay(idempotency_key: str):\n    """{words}"""\n')
    assert tools["pay"].asks_for_new_keys is None
