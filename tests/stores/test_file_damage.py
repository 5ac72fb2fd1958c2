"""Cut, flipped, lost, doubled, swapped and invented bytes: kept whole, set aside, or refused."""

# ruff: noqa: ASYNC240 - a test may keep its own loop waiting

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effectfence.errors import LedgerCorrupt, LedgerUnavailable
from effectfence.stores import ledger_format as form
from effectfence.stores.file import FileStore, verify
from effectfence.stores.ledger_format import Damage, Reader
from tests.stores.conftest import LONG, HandMachine
from tests.stores.damage import (
    Records,
    chained,
    change,
    damage_of,
    make_ledger,
    place,
    state_of,
    unchained,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "effects.jsonl"
    asyncio.run(make_ledger(path))
    return path.read_bytes()


def read(data: bytes) -> Records:
    """The pure reader's part of it: what the whole lines say."""
    found: Records = {}
    reader = Reader(found.__setitem__, lambda floor: None)
    reader.feed(data)
    assert reader.tip.offset == data.rfind(b"\n") + 1
    return {key: record for key, record in found.items() if record is not None}


def seam_end(data: bytes) -> int:
    return data.index(b"\n", data.index(b'{"compacted"')) + 1


# Torn


def test_a_ledger_cut_at_any_byte_keeps_its_whole_lines(data: bytes, tmp_path: Path) -> None:
    """Behind the seam; what a compaction wrote was synced before it had a name."""
    for size in range(seam_end(data), len(data)):
        cut = data[:size]
        assert state_of(cut, tmp_path / "cut") == read(cut)


def test_a_cut_in_what_a_compaction_wrote_is_no_torn_tail(data: bytes, tmp_path: Path) -> None:
    for size in range(seam_end(data)):
        assert damage_of(data[:size], tmp_path / "cut") is not None, size


@pytest.mark.parametrize("size", [1, 4 << 10, 64 << 10, 1 << 20])
@pytest.mark.parametrize("cut", [0, 1, 40, 300])
def test_zeros_to_the_end_are_torn(data: bytes, tmp_path: Path, size: int, cut: int) -> None:
    kept = data[: len(data) - cut]
    assert state_of(kept + bytes(size), tmp_path / "zeros") == read(kept)


@pytest.mark.parametrize("size", [4 << 10, 64 << 10, 1 << 20])
def test_garbage_is_torn_without_a_newline_and_corrupt_with_one(
    data: bytes, tmp_path: Path, size: int
) -> None:
    garbage = (b"\x9f\x00garbage" * size)[:size]
    assert state_of(data + garbage, tmp_path / "garbage") == read(data)
    error = damage_of(data + garbage + b"\n", tmp_path / "garbage")
    assert error is not None
    assert error.offset == len(data)
    assert error.line == data.count(b"\n") + 1


async def big_batch(path: Path) -> tuple[int, bytes]:
    """A ledger whose last batch spans several sectors; where that batch begins."""
    store = await FileStore.open(path, machine=HandMachine())
    await store.swap(change("a"))
    begins = path.stat().st_size
    await asyncio.gather(*(store.swap(change(f"k{i}")) for i in range(40)))
    await store.aclose()
    return begins, path.read_bytes()


def test_a_last_batch_with_lost_sectors_is_torn(tmp_path: Path) -> None:
    begins, data = asyncio.run(big_batch(tmp_path / "big" / "effects.jsonl"))
    first = begins // form.SECTOR
    for sector in range(first, len(data) // form.SECTOR + 1):
        start = max(begins, sector * form.SECTOR)
        end = min(len(data), (sector + 1) * form.SECTOR)
        holed = data[:start] + bytes(end - start) + data[end:]
        whole = holed.rfind(b"\n", 0, start) + 1
        assert state_of(holed, tmp_path / "holed") == read(data[:whole]), sector


def test_a_lost_sector_before_the_last_batch_is_corruption(tmp_path: Path) -> None:
    async def more(path: Path) -> bytes:
        await big_batch(path)
        store = await FileStore.open(path, machine=HandMachine())
        await store.swap(change("z"))
        await store.aclose()
        return path.read_bytes()

    data = asyncio.run(more(tmp_path / "big" / "effects.jsonl"))
    for sector in range(len(data) // form.SECTOR - 1):
        start, end = sector * form.SECTOR, (sector + 1) * form.SECTOR
        holed = data[:start] + bytes(end - start) + data[end:]
        assert damage_of(holed, tmp_path / "holed") is not None, sector


async def test_what_is_torn_is_set_aside_before_the_next_append(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = data[:-100]
    torn = cut[cut.rfind(b"\n") + 1 :]
    path = place(cut, tmp_path / "torn")
    with caplog.at_level(logging.WARNING, "effectfence"):
        store = await FileStore.open(path, machine=HandMachine())
        assert path.read_bytes() == cut
        await store.swap(change("new"))
        await store.aclose()
    aside = path.with_name("effects.jsonl.torn-1")
    assert aside.read_bytes() == torn
    assert aside.stat().st_mode & 0o777 == 0o600
    assert str(aside) in caplog.text
    after = path.read_bytes()
    assert after.startswith(cut.removesuffix(torn))
    assert orjson.loads(after[len(cut) - len(torn) :].splitlines()[0])["cut"] is True
    assert set(read(after)) == {*read(cut), "new"}


async def test_a_second_torn_tail_never_overwrites_the_first(data: bytes, tmp_path: Path) -> None:
    path = place(data + b"torn", tmp_path / "torn")
    path.with_name("effects.jsonl.torn-1").write_bytes(b"kept")
    store = await FileStore.open(path, machine=HandMachine())
    await store.swap(change("new"))
    await store.aclose()
    assert path.with_name("effects.jsonl.torn-1").read_bytes() == b"kept"
    assert path.with_name("effects.jsonl.torn-2").read_bytes() == b"torn"


# Corrupt


def test_a_flipped_bit_anywhere_is_refused_and_nothing_is_changed(
    data: bytes, tmp_path: Path
) -> None:
    """A flipped last newline too: a batch of its full length was not cut."""
    bits = range(8) if LONG else None
    for at in range(len(data)):
        for bit in bits or [at % 8]:
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            error = damage_of(bytes(flipped), tmp_path / "flipped")
            assert error is not None, (at, bit)
            assert error.offset <= at, "it is found where it is, or before"


def edits(lines: list[bytes]) -> list[tuple[str, list[bytes]]]:
    found = []
    for i in range(len(lines) - 1):
        found.append((f"line {i + 1} lost", lines[:i] + lines[i + 1 :]))
        found.append((f"line {i + 1} doubled", lines[: i + 1] + lines[i:]))
        found.append(
            (f"line {i + 1} swapped", [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]])
        )
        for j in range(i):
            found.append(
                (f"line {i + 1} replaced by {j + 1}", [*lines[:i], lines[j], *lines[i + 1 :]])
            )
    found.append(("last line doubled", [*lines, lines[-1]]))
    return found


def test_a_line_lost_doubled_swapped_or_replaced_is_refused(data: bytes, tmp_path: Path) -> None:
    for what, lines in edits(data.splitlines(keepends=True)):
        assert damage_of(b"".join(lines), tmp_path / "edited") is not None, what


def test_an_edited_value_is_refused_at_its_line(data: bytes, tmp_path: Path) -> None:
    lines = data.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if b'"version":1' not in line:
            continue
        lines[i] = line.replace(b'"version":1', b'"version":7', 1)
        error = damage_of(b"".join(lines), tmp_path / "edited")
        assert error is not None
        assert (error.line, error.offset) == (i + 1, sum(map(len, lines[:i])))
        lines[i] = line


@pytest.mark.parametrize("found", [b"", b"\n", b"{}\n", b"hello", bytes(600), b'{"a":1}\n' * 50])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, found: bytes) -> None:
    error = damage_of(found, tmp_path / "other")
    assert error is not None
    assert (error.line, error.offset) == (1, 0)


# Hostile: every hash is right


def test_hostile_lines_with_right_hashes_are_refused(data: bytes) -> None:
    good = unchained(data)
    read(chained(list(good)))
    change_at = max(i for i, line in enumerate(good) if "n" in line)
    opener_at = max(i for i, line in enumerate(good) if "batch" in line)
    put: dict[str, Any] = good[change_at]["puts"][0]

    def with_put(**fields: Any) -> dict[str, Any]:
        return {**good[change_at], "puts": [{**put, **fields}]}

    bad: list[tuple[int, Any]] = [
        (0, {**good[0], "version": 2}),
        (0, {**good[0], "epoch": "x" * 32}),
        (0, {**good[0], "base": -1}),
        (0, {**good[0], "floor": 1 << 63}),
        (0, {**good[0], "now": 1}),
        (0, {**good[0], "more": 1}),
        (opener_at, {**good[opener_at], "batch": 2}),
        (opener_at, {**good[opener_at], "bytes": 1}),
        (opener_at, {**good[opener_at], "now": -1.0}),
        (opener_at, {**good[opener_at], "writer": 5}),
        (change_at, {**good[change_at], "n": 1}),
        (change_at, {**good[change_at], "n": True}),
        (change_at, {**good[change_at], "n": 1.0}),
        (change_at, {**good[change_at], "unknown": 1}),
        (change_at, {**good[change_at], "puts": None}),
        (change_at, {**good[change_at], "puts": [["key"]]}),
        (change_at, {**good[change_at], "puts": ["sizekey"]}),
        (change_at, {**good[change_at], "puts": [{}]}),
        (change_at, {**good[change_at], "bodies": {}}),
        (change_at, {**good[change_at], "bodies": []}),
        (change_at, {**good[change_at], "bodies": [1, 2]}),
        (change_at, with_put(version=0)),
        (change_at, with_put(version="1")),
        (change_at, with_put(version=(1 << 64) - 1)),
        (change_at, with_put(key="")),
        (change_at, with_put(key=None)),
        (change_at, with_put(tag=1)),
        (change_at, with_put(size=1)),
        (change_at, with_put(size=-1)),
        (change_at, with_put(size=10**9)),
        (change_at, with_put(text="x")),
        (change_at, with_put(other="x")),
        (change_at, {"kept": [], "bodies": []}),
        (change_at, {"compacted": "0" * 64, "line": 1}),
        (change_at, good[0]),
        (change_at, []),
        (change_at, b"[]"),
        (change_at, b"5 "),
        (change_at, b"{}"),
        (change_at, b'{"n":1,"n":2}'),
        (change_at, b'{"n":NaN}'),
        (change_at, b'{"n":"\xff"}'),
        (change_at, b'{"n":' + b"[" * 2000 + b"]" * 2000 + b"}"),
        (change_at, b'{"n":' + b"[" * 500 + b"]" * 500 + b"}"),
    ]
    for at, line in bad:
        lines: list[Any] = [*good[:at], line, *good[at + 1 :]]
        with pytest.raises(Damage):
            read(chained(lines))


def test_a_line_that_is_not_its_own_echo_is_refused(data: bytes) -> None:
    """Doubled members, white space, odd escapes, numbers beyond 64 bits: in a body too."""
    good: list[Any] = unchained(data)
    at = len(good) - 1
    body, text = b'{"of":"c2"}', orjson.dumps(good[-1])
    put = orjson.dumps(good[-1]["puts"][0])
    bodies = [
        b'{"of":1,"of":1}',
        b'{"of": 1}',
        b'"\\u0041"',
        b"[1e5]",
        b"[-0]",
        b"[" + b"9" * 25 + b"]",
    ]
    lines = [
        text.replace(put, put.replace(b'"size":11', b'"size":%d' % len(odd))).replace(body, odd)
        for odd in bodies
    ]
    lines.append(text.replace(b'"puts":', b'"puts": '))
    lines.append(text.replace(b'{"n":', b'{"n":1,"n":'))
    lines.append(text.replace(b'"key":', b'"key":"x","key":'))
    read(chained([*good[:at], text]))
    for line in lines:
        assert line != text
        opener = dict(good[opener_of(good)])
        opener["bytes"] += len(line) - len(text)
        odd = [*good[:at], line]
        odd[opener_of(good)] = opener
        with pytest.raises(Damage, match="form in which it was written"):
            read(chained(odd))


def opener_of(lines: list[Any]) -> int:
    """The index of the last batch's opener."""
    return max(i for i, line in enumerate(lines) if "batch" in line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = ["n", "puts", "bodies", "batch", "bytes", "key", "version", "size", "text", "base64",
           "cut", "now", "boot", "boottime", "writer", "wall", "kept", "compacted", "line",
           "floor", "tag", "stamp", "label", "at", "expires_at"]  # fmt: skip
LINES = st.one_of(
    st.dictionaries(st.sampled_from(MEMBERS), JSON, min_size=1, max_size=9),
    st.fixed_dictionaries(
        {
            "n": st.just(9) | JSON,
            "puts": st.lists(st.dictionaries(st.sampled_from(MEMBERS), JSON), max_size=3) | JSON,
            "bodies": st.lists(JSON, max_size=3) | JSON,
        }
    ),
)


@settings(max_examples=20_000 if LONG else 400, deadline=None)
@given(line=LINES)
def test_nothing_but_damage_comes_out_of_hostile_lines(data: bytes, line: dict[str, Any]) -> None:
    good = unchained(data)
    try:
        text = orjson.dumps(line)
    except TypeError:
        return
    for at in (1, len(good) - 1):
        with contextlib.suppress(Damage):
            read(chained([*good[:at], text, *good[at + 1 :]]))


@settings(max_examples=20_000 if LONG else 400, deadline=None)
@given(found=st.binary(max_size=400), at=st.integers(0, 10_000), keep=st.booleans())
def test_nothing_but_damage_comes_out_of_hostile_bytes(
    data: bytes, found: bytes, at: int, keep: bool
) -> None:
    at %= len(data)
    mixed = data[:at] + found + (data[at:] if keep else b"")
    with contextlib.suppress(Damage):
        Reader(lambda key, record: None, lambda floor: None).feed(mixed)


async def test_unknown_kinds_are_refused_when_the_fence_says_so(ledger: Path) -> None:
    store = await FileStore.open(ledger, machine=HandMachine())
    await store.swap(change("a"))
    await store.aclose()

    def check(key: str, label: str, value: Any) -> None:
        if value != {"of": "b"}:
            raise ValueError("unknown kind")

    with pytest.raises(LedgerCorrupt, match="unknown kind") as caught:
        await FileStore.open(ledger, machine=HandMachine(), check_body=check)
    assert caught.value.line == 3


# Cut back


async def test_a_ledger_cut_back_below_what_was_acknowledged_is_refused(ledger: Path) -> None:
    """By a restored backup, say: the lock file remembers."""
    await make_ledger(ledger)
    whole = ledger.read_bytes()
    with ledger.open("r+b") as file:
        file.truncate(whole.rfind(b"\n", 0, -1) + 1)
    for boot in ("boot-1", "boot-2"):
        with pytest.raises(LedgerCorrupt, match="changes were acknowledged"):
            await FileStore.open(ledger, machine=HandMachine(boot=boot))
    with pytest.raises(LedgerCorrupt, match="acknowledged"):
        verify(str(ledger))
    store = await FileStore.open(ledger, machine=HandMachine(), accept_rollback=True)
    await store.swap(change("new"))
    await store.aclose()
    await (await FileStore.open(ledger, machine=HandMachine())).aclose()


async def test_an_older_copy_put_in_its_place_is_refused(ledger: Path) -> None:
    store = await FileStore.open(ledger, machine=HandMachine())
    await store.swap(change("a"))
    backup = ledger.read_bytes()
    await store.swap(change("b"))
    await store.aclose()
    ledger.unlink()
    ledger.write_bytes(backup)
    ledger.chmod(0o600)
    with pytest.raises(LedgerCorrupt, match="older copy"):
        await FileStore.open(ledger, machine=HandMachine())


# Looking


async def test_verify_reads_everything_and_touches_nothing(ledger: Path) -> None:
    await make_ledger(ledger)
    for path in ledger.parent.iterdir():
        path.chmod(0o400)
    ledger.parent.chmod(0o500)
    before = {path.name: path.stat().st_mtime_ns for path in ledger.parent.iterdir()}
    summary = verify(str(ledger))
    assert {path.name: path.stat().st_mtime_ns for path in ledger.parent.iterdir()} == before
    data = ledger.read_bytes()
    assert summary.lines == data.count(b"\n")
    assert (summary.changes, summary.records, summary.bytes) == (8, 9, len(data))
    assert summary.torn_bytes == 0
    ledger.parent.chmod(0o700)


async def test_verify_tells_where_a_ledger_is_damaged(ledger: Path) -> None:
    await make_ledger(ledger)
    data = bytearray(ledger.read_bytes())
    data[len(data) // 2] ^= 1
    ledger.write_bytes(data)
    with pytest.raises(LedgerCorrupt) as caught:
        verify(str(ledger))
    assert caught.value.offset <= len(data) // 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.symlink_to(path.with_name("other")),
        lambda path: os.mkfifo(path, 0o600),
        lambda path: path.mkdir(),
        lambda path: None,
    ],
)
def test_verify_reads_regular_files_only(ledger: Path, harm: Callable[[Path], None]) -> None:
    ledger.parent.mkdir(mode=0o700)
    harm(ledger)
    with pytest.raises(LedgerUnavailable) as caught:
        verify(str(ledger))
    assert caught.value.ran is False
