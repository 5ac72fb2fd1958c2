"""Row 48: bytes whose hashes are right and whose content is not (`./run long fuzzer`: an hour of
them, guided by coverage). And damage: what an edit must not get past."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from effectfence import EffectFence, Fresh, records
from effectfence.stores import ledger_format
from effectfence.stores.file import FileStore, verify
from effectfence.stores.ledger_format import Reader
from tests.crash import hostile
from tests.crash.conftest import LONG
from tests.crash.worker import request_of, result_of
from tests.stores.conftest import HandMachine
from tests.stores.damage import chained, damage_of, place, state_of

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Lines]:
    return hostile.ledgers(tmp_path_factory.mktemp("hostile"))


def test_the_ledgers_that_are_mutated_can_be_read(both: list[Lines]) -> None:
    for lines in both:
        assert hostile.read(chained(lines))


def test_nothing_but_corruption_comes_out_of_hostile_content(
    both: list[Lines], scratch: Path
) -> None:
    """And where it can be read, nothing but the fence's own errors."""
    readable = 0
    for seed in range(100_000 if LONG else 6000):
        try:
            using = seed % 20 == 0
            readable += hostile.try_seed(both, seed, scratch / "used", using=using)
        except Exception as error:
            raise AssertionError(f"python -m tests.crash.hostile --seed {seed}") from error
    print(readable, "readable")
    assert readable > 100, "most are refused, not all"


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


@pytest.mark.parametrize("member", ["fingerprint", "idempotency_key", "hash"])
@pytest.mark.parametrize("value", ['a"', "a\n", "a\\", "é", " "])
def test_a_hash_that_would_need_escaping_is_refused(
    both: list[Lines], member: str, value: str
) -> None:
    """It is copied as it is into the records that follow."""
    for lines in both:
        for at, line in enumerate(lines):
            if not any(member in body for body in line.get("bodies", ())):
                continue
            bad: Lines = orjson.loads(orjson.dumps(lines))
            for body in bad[at]["bodies"]:
                if member in body:
                    body[member] = value
            hostile.make_right(bad)
            assert not hostile.read(chained(bad))


# Damage, and the bug that lets it pass ------------------------------------------------------------


def edited(data: bytes) -> list[bytes]:
    """A line lost, two swapped, a version edited: each still whole lines of JSON."""
    lines = data.splitlines(keepends=True)
    return [
        b"".join(lines[:-4] + lines[-2:]),
        b"".join([*lines[:-4], *lines[-2:], *lines[-4:-2]]),
        data.replace(b'"version":2', b'"version":1'),
        data.replace(b'"charged"', b'"chargEd"'),
    ]


@pytest.fixture
def data(scratch: Path) -> bytes:
    path = scratch / "whole" / "effects.jsonl"

    async def make() -> None:
        fence = await EffectFence.open(path)
        for i in range(6):
            admission = await fence.prepare(request_of(f"i{i}"))
            assert isinstance(admission, Fresh)
            await fence.commit(admission.prepared, result_of(f"i{i}"))
        await fence.aclose(drain_seconds=0)

    asyncio.run(make())
    return path.read_bytes()


def passes(data: bytes, folder: Path) -> bool:
    return damage_of(data, folder) is None


def test_an_edit_is_refused(data: bytes, scratch: Path) -> None:
    for bad in edited(data):
        assert bad != data
        assert not passes(bad, scratch / "edited")


def test_a_chain_that_is_not_checked_is_seen(
    data: bytes, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "_first_bad_line", lambda self, data, ends: len(ends))
    assert any(passes(bad, scratch / "edited") for bad in edited(data))


def test_a_ledger_truncated_at_corruption_is_seen(
    data: bytes, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_format, "is_torn", lambda tail, offset, tip: True)
    assert all(passes(bad, scratch / "edited") for bad in edited(data))


def test_case_29_cut_at_every_byte_reopened_appended_to_and_verified(
    data: bytes, scratch: Path
) -> None:
    """The last two records, at every byte (a stride of them in a short run)."""

    async def append(path: Path) -> None:
        store = await FileStore.open(path, machine=HandMachine(), check_body=records.check_body)
        fence = EffectFence(store=store)
        admission = await fence.prepare(request_of("i1000"))
        assert isinstance(admission, Fresh)
        await fence.commit(admission.prepared, result_of("i1000"))
        await fence.aclose(drain_seconds=0)

    lines = data.splitlines(keepends=True)
    start = len(data) - sum(map(len, lines[-4:]))
    for size in range(start, len(data), 1 if LONG else 7):
        path = place(data[:size], scratch / "cut")
        asyncio.run(append(path))
        whole = data[:size].count(b"\n")
        kept = state_of(path.read_bytes(), scratch / "again")
        assert {f"intent/i{i}" for i in range(4)} | {"intent/i1000"} <= kept.keys()
        assert verify(str(path), records.check_body).torn_bytes == 0
        assert path.read_bytes().startswith(b"".join(lines[:whole]))


@pytest.mark.parametrize("head", [False, 0, None, "", [], {}])
def test_a_domains_head_is_whole_or_absent(head: object) -> None:
    """Seed 43100: a head that is no object, yet counts as empty in Python, was let in."""
    records.check_body("domain/d", "domain", b"")
    with pytest.raises(ValueError, match="not the body of a 'domain' record"):
        records.check_body("domain/d", "domain", head)
