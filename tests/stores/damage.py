"""Helpers of the file ledger's tests: a small ledger, copies of it, and lines that chain."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import orjson

from effectfence.errors import LedgerCorrupt
from effectfence.stores.contract import ABSENT, Change, Expect, Put, Record, VersionOf
from effectfence.stores.file import FileStore
from effectfence.stores.ledger_file import LedgerFile
from tests.stores.conftest import HandMachine

Records = dict[str, Record | None]


def change(key: str, tag: str = "t", **expect: Expect) -> Change:
    return Change(expect, (Put(key, tag=tag, body=b'{"of":"%s"}' % key.encode()),))


async def make_ledger(path: Path) -> None:
    """A ledger of a few batches: one change, several at once, a compaction, and more."""
    store = await FileStore.open(path, machine=HandMachine())
    await store.swap(change("a", a=ABSENT))
    await asyncio.gather(*(store.swap(change(f"b{i}")) for i in range(3)))
    await store.compact()
    puts = (Put("d"), Put("i", tag="é", stamp=VersionOf("d"), label="l", body=b"1.0e5"))
    await store.swap(Change({"a": Expect(tag="t")}, puts))
    await asyncio.gather(*(store.swap(change(f"c{i}")) for i in range(3)))
    await store.aclose()


def state_of(data: bytes, folder: Path) -> Records:
    """What a ledger of these bytes, put where there was none, holds."""
    file = LedgerFile(str(place(data, folder)), HandMachine())
    try:
        return dict(file.table.records)
    finally:
        file.close()


def place(data: bytes, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    path = folder / "effects.jsonl"
    path.write_bytes(data)
    path.chmod(0o600)
    folder.chmod(0o700)
    return path


def damage_of(data: bytes, folder: Path) -> LedgerCorrupt | None:
    """How it is refused, or `None` if it is not; nothing on the disk may have changed."""
    try:
        state_of(data, folder)
    except LedgerCorrupt as error:
        assert (folder / "effects.jsonl").read_bytes() == data
        return error
    assert (folder / "effects.jsonl").read_bytes() == data
    return None


def chained(lines: list[Any]) -> bytes:
    """A ledger whose every hash is right, whatever its lines say; `bytes` go in as they are."""
    out, before = b"", b""
    for line in lines:
        text = line if isinstance(line, bytes) else orjson.dumps(line)
        content = text[:-1] + b',"hash":"'
        digest = hashlib.sha256(before + content).hexdigest().encode()
        out += content + digest + b'"}\n'
        before = digest + b'"}\n'
    return out


def unchained(data: bytes) -> list[dict[str, Any]]:
    """The lines of a ledger, without their hashes."""
    lines = [orjson.loads(line) for line in data.splitlines()]
    for line in lines:
        del line["hash"]
    return lines
