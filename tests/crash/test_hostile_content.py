"""Row 48: bytes whose hashes are right and whose content is not. And damage: what an edit must not
get past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.crash import hostile
from tests.crash.conftest import LONG
from tests.stores.damage import chained

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Lines]:
    return hostile.ledgers(tmp_path_factory.mktemp("hostile"))


def test_the_ledgers_that_are_mutated_can_be_read(both: list[Lines]) -> None:
    for lines in both:
        assert hostile.read(chained(lines))


@pytest.mark.timeout(3600 if LONG else 120)
def test_nothing_but_corruption_comes_out_of_hostile_content(
    both: list[Lines], scratch: Path
) -> None:
    """And where it can be read, nothing but the fence's own errors."""
    readable = 0
    for seed in range(1_000_000 if LONG else 6000):
        try:
            readable += hostile.try_seed(both, seed, scratch / "used")
        except Exception as error:
            raise AssertionError(f"python -m tests.crash.hostile --seed {seed}") from error
    print(readable, "readable")
    assert readable > 100, "most are refused, not all"


@pytest.mark.skipif(not LONG, reason="an hour, and only with EFFECTFENCE_LONG=1")
@pytest.mark.timeout(4000)
def test_a_guided_fuzzer_finds_nothing_either(both: list[Lines]) -> None:
    pytest.importorskip("atheris", reason="atheris is missing: pip install atheris")
    hostile.guided(both, seconds=3600)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_record_that_lacks_its_body_is_refused(both: list[Lines], compacted: bool) -> None:
    lines: Lines = [dict(line) for line in both[compacted]]
    name = "kept" if compacted else "puts"
    for at, line in enumerate(lines):
        wanted = [
            put for put in line.get(name, ()) if put.get("label") != "domain" and "size" in put
        ]
        if wanted:
            bare = {key: value for key, value in wanted[0].items() if key != "size"}
            lines[at] = {**line, name: [bare], "bodies": []}
            hostile.make_right(lines)
            assert not hostile.read(chained(lines))
            lines[at] = line


@pytest.mark.parametrize("compacted", [False, True])
def test_sizes_that_cut_two_bodies_at_another_comma_are_refused(
    both: list[Lines], compacted: bool
) -> None:
    """Each piece is then between commas, and none of them is what was checked."""
    lines: Lines = [dict(line) for line in both[compacted]]
    name = "kept" if compacted else "puts"
    at = next(i for i, line in enumerate(lines) if len(line.get("bodies", ())) > 1)
    line = lines[at]
    sized = [put for put in line[name] if "size" in put]
    text = b",".join(map(orjson.dumps, line["bodies"]))
    first = sized[0]["size"]
    for comma in [i for i, byte in enumerate(text) if byte == ord(",")]:
        moved = comma - first
        sizes = [first + moved, sized[1]["size"] - moved]
        if moved == 0 or min(sizes) < 1:
            continue
        moves = dict(zip((id(sized[0]), id(sized[1])), sizes, strict=True))
        puts = [{**put, "size": moves[id(put)]} if id(put) in moves else put for put in line[name]]
        lines[at] = {**line, name: puts}
        hostile.make_right(lines, sizes=False)
        assert not hostile.read(chained(lines)), comma
