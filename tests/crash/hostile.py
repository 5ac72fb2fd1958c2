"""Ledgers whose every hash, count and size is right, and whose content is not: for a fuzzer.

python -m tests.crash.hostile --seeds 0 100000
python -m tests.crash.hostile --seed 4711          shows what one seed makes
python -m tests.crash.hostile --atheris 3600       coverage-guided, where atheris is installed
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import orjson

from effectfence import EffectFence, EffectRequest, FenceError, Fresh, ReadSetEntry, records
from effectfence.stores.file import FileStore
from effectfence.stores.ledger_format import Damage, Reader
from tests.stores.conftest import HandMachine
from tests.stores.damage import chained, place, unchained

INTENTS = [f"i{i}" for i in range(7)]


class Choice(Protocol):
    """What makes the decisions: a seeded generator, or a fuzzer's bytes."""

    def choose(self, count: int) -> int:
        """A number below `count`."""


class Seeded:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, count: int) -> int:
        return self._random.randrange(count)


def _asked(intent: str, **more: Any) -> EffectRequest:
    fields = {"domain": "d", "tool": "t", "args": {"a": [1, {"b": "é"}]}, "agent": "a"}
    return EffectRequest(intent=intent, **{**fields, **more})


async def _ledger(path: Path, *, compacted: bool) -> bytes:
    """One of every kind of record and line."""
    store = await FileStore.open(path, machine=HandMachine(), check_body=records.check_body)
    fence = EffectFence(store=store)
    for intent in INTENTS[:5]:
        facts = (ReadSetEntry(domain="d", seq=await fence.current("d")),)
        admission = await fence.prepare(_asked(intent, domain=f"d{intent}", read_set=facts))
        assert isinstance(admission, Fresh)
        match intent:
            case "i0":
                await fence.commit(admission.prepared, {"ok": 1})
            case "i1":
                await fence.abort(admission.prepared, "who knows")
                await fence.clear(intent, reason="asked", by="me", force=True)
            case "i2":
                await fence.commit(admission.prepared, "x" * 10)
            case "i3":
                await fence.release(admission.prepared, "refused")
    await fence.reserve("d", 0)
    if compacted:
        await store.compact()
    scoped = fence.scoped("s")
    await asyncio.gather(*(scoped.prepare(_asked(intent)) for intent in INTENTS[5:]))
    data = path.read_bytes()  # noqa: ASYNC240 - nobody else is on this loop
    await store.abandon()
    return data


def ledgers(folder: Path) -> list[list[dict[str, Any]]]:
    """The lines of a ledger as it grew, and of a compacted one."""
    return [
        unchained(asyncio.run(_ledger(folder / name / "effects.jsonl", compacted=name == "new")))
        for name in ("old", "new")
    ]


VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: -1, lambda: 2,
    lambda: 1 << 62, lambda: (1 << 64) - 1, lambda: -(1 << 63), lambda: 0.0, lambda: -0.5,
    lambda: 1e300, lambda: -1e300, lambda: 5e-324, lambda: "", lambda: "x", lambda: "\x00",
    lambda: "done", lambda: "open", lambda: "domain", lambda: "history", lambda: "cleared",
    lambda: "unknown", lambda: "in_flight", lambda: "intent/i0", lambda: "domain/d",
    lambda: "0" * 64, lambda: "f:" + "0" * 64, lambda: "\U0010ffff" * 300, lambda: [],
    lambda: {}, lambda: [[]], lambda: [{}], lambda: {"": {}}, lambda: [None] * 40,
    lambda: _deep(70), lambda: _deep(200),
]  # fmt: skip


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def mutated(lines: list[dict[str, Any]], choice: Choice) -> bytes:
    """The same ledger with one to four of its values, members or lines changed, then made to
    count, measure and hash right again (mostly: sometimes the counts are left wrong)."""
    lines = orjson.loads(orjson.dumps(lines))
    for _ in range(1 + choice.choose(4)):
        _mutate(lines, choice)
    if choice.choose(8):
        make_right(lines)
    return chained(lines)


def _mutate(lines: list[Any], choice: Choice) -> None:
    at = choice.choose(len(lines))
    if choice.choose(12) == 0:
        _change_items(lines, at, choice)
        return
    holder, key = _place(lines, at, choice)
    value = holder[key]
    if isinstance(value, dict | list) and value and choice.choose(3) == 0:
        if isinstance(value, list):
            _change_items(value, choice.choose(len(value)), choice)
        else:
            _change_members(value, choice)
    elif choice.choose(4) == 0:
        other, other_key = _place(lines, choice.choose(len(lines)), choice)
        holder[key] = orjson.loads(orjson.dumps(other[other_key]))
    elif type(value) is int and choice.choose(2):
        moved = value + (-1, 1, 1000, -1000)[choice.choose(4)]
        holder[key] = max(-(1 << 63), min(moved, (1 << 64) - 1))  # what this can write down
    elif type(value) is float and choice.choose(2):
        holder[key] = value * (-1.0, 0.5, 1e9, 1e-9)[choice.choose(4)]
    elif type(value) is str and value and choice.choose(2):
        cut = choice.choose(len(value))
        holder[key] = value[:cut] + ("", "x", "\x00", "é")[choice.choose(4)] + value[cut + 1 :]
    else:
        holder[key] = VALUES[choice.choose(len(VALUES))]()


def _place(lines: list[Any], at: int, choice: Choice) -> tuple[Any, Any]:
    """Somewhere in a line: what holds it, and under which key or index."""
    holder, key = lines, at
    while isinstance(holder[key], dict | list) and holder[key]:
        inner = holder[key]
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        holder, key = inner, keys[choice.choose(len(keys))]
        if choice.choose(5) == 0:
            break
    return holder, key


def _change_items(items: list[Any], at: int, choice: Choice) -> None:
    match choice.choose(4):
        case 0:
            del items[at]
        case 1:
            items.insert(at, orjson.loads(orjson.dumps(items[at])))
        case 2:
            other = choice.choose(len(items))
            items[at], items[other] = items[other], items[at]
        case _:
            items[at] = VALUES[choice.choose(len(VALUES))]()


def _change_members(value: dict[str, Any], choice: Choice) -> None:
    names = list(value)
    name = names[choice.choose(len(names))]
    match choice.choose(3):
        case 0:
            del value[name]
        case 1:
            value[("more", "size", "text", "base64", "cut", "floor")[choice.choose(6)]] = value[
                name
            ]
        case _:
            value[name] = value.pop(name)


def make_right(lines: list[Any], *, sizes: bool = True) -> None:
    """Sizes of bodies; then numbers of lines and bytes of batches, and running numbers."""
    opener, n = None, 0
    for number, line in enumerate(lines):
        if not isinstance(line, dict):
            continue
        puts = line.get("puts", line.get("kept"))
        bodies = line.get("bodies")
        if sizes and isinstance(puts, list) and isinstance(bodies, list):
            sized = [put for put in puts if isinstance(put, dict) and "size" in put]
            for put, body in zip(sized, bodies, strict=False):
                put["size"] = len(orjson.dumps(body))
        if "compacted" in line and "line" in line:
            line["line"] = number + 1
        if "batch" in line:
            opener = line
            line["batch"] = line["bytes"] = 0
        elif opener is not None:
            if "n" in line and isinstance(lines[0], dict):
                n += 1
                base = lines[0].get("base", 0)
                line["n"] = n + base if type(base) is int and abs(base) < 1 << 62 else n
            if type(opener["batch"]) is int:
                opener["batch"] += 1
                opener["bytes"] += len(orjson.dumps(line)) + len(',"hash":""') + 64 + 1


def read(data: bytes) -> bool:
    """Whether the strict reader takes it; nothing but `Damage` may come out."""
    reader = Reader(lambda key, record: None, lambda floor: None, records.check_body)
    try:
        reader.feed(data)
    except Damage:
        return False
    return not reader.lacks_its_beginning() and not reader.tip.lines_left


async def use(data: bytes, folder: Path) -> None:
    """All that a fence can be asked about it; nothing but a `FenceError` may come out."""
    path = place(data, folder)
    store = await FileStore.open(path, machine=HandMachine(), check_body=records.check_body)
    fence = EffectFence(store=store)
    try:
        for view in (fence, fence.scoped("s")):
            questions = [view.intent_count, view.domain_count, lambda v=view: v.observe("d", "di0")]
            for intent in INTENTS:
                questions += [
                    lambda v=view, i=intent: v.lookup(i),
                    lambda v=view, i=intent: v.prepare(_asked(i, domain=f"d{i}")),
                    lambda v=view, i=intent: v.settle(i, 1, reason="r", by="me", force=True),
                    lambda v=view, i=intent: v.clear(i, reason="r", by="me", force=True),
                    lambda v=view, i=intent: v.evict_domain(f"d{i}"),
                ]
            for ask in questions:
                try:
                    await ask()
                except FenceError as error:
                    str(error)
            [record async for record in view.intents()]
        await fence.sweep()
        await store.compact()
    finally:
        await fence.aclose(drain_seconds=0)


def try_seed(
    lines: list[list[dict[str, Any]]], seed: int, folder: Path, *, using: bool = True
) -> bool:
    """Whether this seed's ledger is one that can be read; what should not come out, comes out."""
    choice = Seeded(seed)
    data = mutated(lines[choice.choose(len(lines))], choice)
    readable = read(data)
    if readable and using:
        asyncio.run(use(data, folder))
    return readable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--atheris", type=int, metavar="SECONDS")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = ledgers(folder)
        if given.atheris:
            guided(lines, given.atheris)
        if given.seed is not None:
            choice = Seeded(given.seed)
            sys.stdout.buffer.write(mutated(lines[choice.choose(len(lines))], choice))
            try_seed(lines, given.seed, folder / "used")
            return
        began, taken = time.monotonic(), 0
        for seed in range(*given.seeds):
            try:
                taken += try_seed(lines, seed, folder / "used")
            except BaseException:
                print(f"seed {seed}")
                raise
        print(
            f"{len(range(*given.seeds))} seeds, {taken} readable, {time.monotonic() - began:.0f} s"
        )


class _Bytes:
    """A fuzzer's bytes as decisions."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def choose(self, count: int) -> int:
        value = next(self._data, 0)
        return (value << 8 | next(self._data, 0)) % count if count > 256 else value % count


def guided(lines: list[list[dict[str, Any]]], seconds: int) -> None:
    import atheris

    atheris.instrument_all()

    def one(data: bytes) -> None:
        choice = _Bytes(data)
        read(mutated(lines[choice.choose(len(lines))], choice))

    options = ["-len_control=0", "-max_len=128", "-artifact_prefix=.cache/"]
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
