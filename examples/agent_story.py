"""What the examples for agents share: a shop that charges, and the count of what it charged.

The story that each of them tells with its framework, `python -m examples.anyio_agent` and so on:

    replanned      the model sends the same call again, under a new call id
    nine at once   one message of the model holds nine identical calls
    run again      the model fails after the charge, and the runner starts the run over, twice
    interrupted    a human is asked in the middle; the run is resumed in a new process
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from effectfence import EffectFence, current_effect


class ModelDown(Exception):
    """The model's provider, at the worst moment."""


class Shop:
    """A folder: what was charged, what is remembered of it, and a framework's own saved runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "effects.jsonl"
        self.saved = folder / "saved.json"
        self._charges = folder / "charges.jsonl"

    def charge(self, order: str, cents: int) -> dict[str, str]:
        """What must happen once: the provider's API, which here is a line in a file."""
        key = current_effect().idempotency_key  # for a provider that takes one
        with self._charges.open("a") as log:
            log.write(json.dumps({"order": order, "cents": cents, "key": key}) + "\n")
        return {"charge": f"ch_{key[:8]}"}

    def times_charged(self, order: str) -> int:
        lines = self._charges.read_text().splitlines()
        return sum(json.loads(line)["order"] == order for line in lines)

    async def certificate(self, order: str) -> str:
        """Of its one charge, from the ledger."""
        async with EffectFence.open(self.ledger) as fence:
            record = await fence.lookup(f"charge:{order}")
        assert record is not None
        assert record.cert is not None
        assert record.cert.verify()
        return record.cert.hash

    def say(self, order: str, asked: int) -> None:
        times = self.times_charged(order)
        print(f"{order}: asked {asked} times, charged {times} time(s)")
        assert times == 1


@contextmanager
def shop() -> Iterator[Shop]:
    folder = Path(tempfile.mkdtemp(prefix="agent-story-"))
    try:
        yield Shop(folder)
    finally:
        shutil.rmtree(folder)


def in_a_new_process(module: str, shop: Shop) -> None:
    """Start the program again, to resume what is saved in this folder."""
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", module, str(shop.folder)], check=True)


def asked_to_resume() -> Shop | None:
    """In that new process: the folder to go on with."""
    return Shop(Path(sys.argv[1])) if len(sys.argv) > 1 else None
