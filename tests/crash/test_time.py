"""Clocks that are set, and clocks that begin anew."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from effectfence import EffectFence, FenceConfig, OutcomeUnknown, records
from effectfence.stores.file import FileStore
from effectfence.stores.machine import Machine
from tests.crash.forks import Forks, complaint
from tests.crash.judge import Notes, judged
from tests.crash.worker import request_of

LIBRARIES = [
    *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib").glob("faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib64").glob("faketime/libfaketimeMT.so.1"),
]


@pytest.fixture
def jumping(scratch: Path) -> Iterator[Forks]:
    """Processes whose wall clock stands where `scratch/offset` says."""
    if not LIBRARIES:
        pytest.skip("libfaketime is missing: apt-get install faketime")
    offset = scratch / "offset"
    offset.write_text("+0")
    server = Forks(
        LD_PRELOAD=str(LIBRARIES[0]),
        FAKETIME_TIMESTAMP_FILE=str(offset),
        FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )
    yield server
    server.close()


async def test_a_wall_clock_that_jumps_ends_no_lease_and_forgets_nothing(
    jumping: Forks, scratch: Path
) -> None:
    """Row 31: a thousand jumps, by an hour, a day, two hours, either way."""
    at = {"ledger": scratch / "ledger" / "effects.jsonl", "notes": scratch}
    process = jumping.start("jump", count=1000, offset=str(scratch / "offset"), **at)
    assert await asyncio.to_thread(jumping.wait, process) == 0, complaint(scratch)
    notes = Notes.read(scratch)
    jumped = next(notes.told("jumped"))
    assert jumped["in_flight"] == jumped["replayed"] == 1000
    assert jumped["widest"] > 2 * 86400, "the wall clock did jump"
    assert await judged(at["ledger"], notes) == []


class Booted(Machine):
    """Another boot, whose clock that nobody can set shows something else."""

    def __init__(self, boottime: float) -> None:
        self._boottime = boottime

    def boot(self) -> str:
        return "another boot"

    def boottime(self) -> float:
        return self._boottime


@pytest.mark.parametrize("boottime", [0.5, 1e3, 1e9])
@pytest.mark.parametrize("policy", ["fence", "takeover"])
async def test_after_a_restart_everything_in_flight_is_unknown(
    forks: Forks, scratch: Path, boottime: float, policy: str
) -> None:
    """Row 32: whatever lease it had, and however the clocks compare."""
    at = {"ledger": scratch / "ledger" / "effects.jsonl", "notes": scratch}
    leases = {"lease_ttl": 1e9, "on_lease_expiry": policy}
    process = forks.start("die_at", point="after the effect", intents=(0, 50), config=leases, **at)
    assert forks.wait(process) == -signal.SIGKILL, complaint(scratch)
    machine = Booted(boottime)
    store = await FileStore.open(at["ledger"], machine=machine, check_body=records.check_body)
    async with EffectFence(FenceConfig(**leases), store=store) as fence:
        assert {record.state async for record in fence.intents()} == {"unknown"}
        for i in range(50):
            with pytest.raises(OutcomeUnknown) as caught:
                await fence.prepare(request_of(f"i{i}"))
            assert caught.value.ran is None
    assert len(Notes.read(scratch).effects) == 50
