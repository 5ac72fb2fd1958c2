"""Opening a ledger of many finished intents, and the memory that each of them takes.

    python -m bench.opening            100,000 intents, the time scaled up to 1,000,000
    python -m bench.opening --full     1,000,000 intents

Each opening is in a process of its own. Memory is the resident set with the ledger open, without
that of a process that opened an empty one and without the file's size, per intent.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

from bench._durable import CarelessMachine, each, file_fence, pair_on
from bench._measure import Row, main, say, scratch
from effectfence import records
from effectfence.stores import ledger_file
from effectfence.stores.file import FileStore

_MILLION = 1_000_000


def measure(full: bool) -> list[Row]:
    count = _MILLION if full else 100_000
    with scratch() as folder:
        grown, compacted, empty = (folder / name for name in ("grown", "compacted", "empty"))
        say(f"  making a ledger of {count:,} finished intents")
        asyncio.run(_grow(grown, count))
        asyncio.run(_grow(empty, 0))
        shutil.copy(grown, compacted)
        asyncio.run(_compact(compacted))
        nothing, one, other = (_opened(path) for path in (empty, compacted, grown))
        size, grown_size = compacted.stat().st_size, grown.stat().st_size
    scale = _MILLION / count
    scaled = "" if full else f", scaled from {count:,}"
    per_intent = (one["rss"] - nothing["rss"] - size) / count
    whole = (one["rss"] - nothing["rss"]) / count
    return [
        Row(
            f"opening a compacted ledger of 1,000,000 finished intents{scaled}",
            "at most 15 s",
            f"{one['seconds'] * scale:.1f} s ({size / count:,.0f} bytes of file an intent)",
            one["seconds"] * scale <= 15,
        ),
        Row(
            f"the same uncompacted{scaled}",
            "no promise",
            f"{other['seconds'] * scale:.1f} s ({grown_size / count:,.0f} bytes of file an intent)",
        ),
        Row(
            "memory per finished intent, (RSS - RSS empty - file bytes) / n",
            "at most 1,536 bytes",
            f"{per_intent:,.0f} bytes ({whole:,.0f} with the file's bytes)",
            per_intent <= 1536,
        ),
    ]


async def _grow(path: Path, count: int) -> None:
    """Through the fence, without syncs and without compactions on the way."""
    with patch.object(ledger_file, "_COMPACT_ABOVE", 1 << 60):
        async with file_fence(path, CarelessMachine()) as fence:
            await each(pair_on(fence), 1000, count // 1000)


async def _compact(path: Path) -> None:
    store = await FileStore.open(path, check_body=records.check_body)
    await store.compact()
    await store.aclose()


def _opened(path: Path) -> dict[str, float]:
    """What the opening of a ledger takes in a new process."""
    command = [sys.executable, "-m", "bench.opening", "--open", str(path)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(ran.stdout))


async def _open(path: str) -> dict[str, float]:
    begun = time.perf_counter()
    store = await FileStore.open(path, check_body=records.check_body)
    taken = time.perf_counter() - begun
    rss = _resident_bytes()
    await store.aclose()
    return {"seconds": taken, "rss": rss}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--open"]:
        print(json.dumps(asyncio.run(_open(sys.argv[2]))))
    else:
        main(measure, "Opening a large ledger; memory per finished intent.")
