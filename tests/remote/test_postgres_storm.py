"""The storm and two `wrap`s on one PostgreSQL, as on several machines (FAULTS 2; CASES 7, 25)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from effectfence import Fresh, IntentInFlight
from tests.conftest import asked, claimed
from tests.engines import PostgresServer
from tests.mcp.peer import Peer
from tests.remote.opened import opened

pytestmark = pytest.mark.rig

ROOT = Path(__file__).parents[2]
WAVES = "2000" if os.environ.get("EFFECTFENCE_LONG") == "1" else "40"


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.schema_url()


def storm(*arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.storm", "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def test_eight_processes_and_one_execution(url: str) -> None:
    told = storm("--ledger", url, "--processes", "8", "--waves", WAVES, "--racers", "32")
    assert told["executions"] == 1
    assert told["certificates"] == 1
    assert told["ledger"].startswith("postgresql://127.0.0.1:"), "credentials are shown"


def test_distinct_actions_on_a_hot_domain_all_run_and_leave_no_gap(url: str) -> None:
    told = storm("--ledger", url, "--processes", "8", "--mode", "distinct", "--racers", "24",
                 "--waves", "12")  # fmt: skip
    assert told["executions"] == told["certificates"] == told["attempts"]
    assert (told["stood_down"], told["served"], told["gaps"]) == (0, 0, 0)


async def test_tenants_of_one_database_do_not_share_a_key(url: str) -> None:
    async with opened(url) as fence:
        first = await claimed(fence.scoped("a"))
        assert isinstance(await fence.scoped("b").prepare(asked()), Fresh)
        await fence.scoped("a").commit(first, "a's")
        with pytest.raises(IntentInFlight):
            await fence.scoped("b").prepare(asked())


async def test_a_replica_whose_own_clock_is_wrong_takes_no_live_lease(
    url: str,
) -> None:
    """A minute ahead, and the lease is half a minute: the store's clock alone counts."""
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("no faketime: apt-get install faketime")
    async with opened(url, lease_ttl=30.0) as fence:
        prepared = await claimed(fence)
        program = (
            "import asyncio, sys\n"
            "from effectfence import EffectFence, FenceConfig\n"
            "from tests.conftest import asked\n"
            "async def main():\n"
            "    async with EffectFence.open(sys.argv[1], FenceConfig(lease_ttl=30)) as fence:\n"
            "        await fence.prepare(asked())\n"
            "asyncio.run(main())\n"
        )
        for step in ("+60s", "-1h", "+1d"):
            ran = await asyncio.to_thread(
                subprocess.run,
                [faketime, "-f", step, sys.executable, "-c", program, url],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            assert "IntentInFlight" in ran.stderr, ran.stderr
        await fence.commit(prepared, "paid")


async def test_a_lease_is_renewed_while_its_effect_blocks_the_event_loop(url: str) -> None:
    """By the keeper's own connection, on its own event loop (CASES 24)."""
    asking = threading.Event()

    async def ask() -> None:
        async with opened(url, lease_ttl=0.9) as elsewhere:
            asking.set()
            for _ in range(40):
                with pytest.raises(IntentInFlight):
                    await elsewhere.prepare(asked())
                await asyncio.sleep(0.05)

    async with opened(url, lease_ttl=0.9) as fence:
        async with fence.effect(asked()) as attempt:
            thread = threading.Thread(target=lambda: asyncio.run(ask()))
            thread.start()
            thread.join()  # nothing of this loop runs for more than two leases
            attempt.result = "paid"
        assert asking.is_set()
        assert attempt.cert is not None
        assert attempt.cert.result == "paid"


# Two machines


@pytest.fixture
async def wraps(url: str, tmp_path: Path) -> AsyncIterator[list[Peer]]:
    """Two `effectfence wrap`s of one command, each with a server of its own, and one database."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("EFFECTFENCE_")}
    env |= {"EFFECTFENCE_LEDGER": url, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    server = [sys.executable, "-m", "effectfence.mcp.charge_server", str(tmp_path / "charges")]
    command = [sys.executable, "-m", "effectfence", "wrap", "--", *server]
    peers = [await Peer.start(command, env=env, cwd=tmp_path) for _ in range(2)]
    yield peers
    for peer in peers:
        await peer.close()


async def test_two_wraps_with_one_database_charge_each_order_once(
    wraps: list[Peer], tmp_path: Path
) -> None:
    for peer in wraps:
        await peer.hello()
    calls = [
        peer.call("charge_card", {"order_id": f"o{n}", "amount_cents": 4900})
        for n in range(10)
        for peer in wraps
    ]
    answers = await asyncio.gather(*calls)
    charges = (tmp_path / "charges").read_text().splitlines()
    assert len(charges) == 10
    texts = [answer.text for answer in answers]
    assert texts[::2] == texts[1::2], "both were told the same"
    assert sum(answer.replay is not None for answer in answers) == 10
