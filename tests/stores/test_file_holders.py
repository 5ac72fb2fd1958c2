"""Who is alive, seen from another process."""

import shutil
import subprocess
import sys
from pathlib import Path

from effectfence import EffectFence, EffectRequest, Fresh

LOOKUP = """
import asyncio, sys
from effectfence import EffectFence

async def main():
    async with EffectFence.open(sys.argv[1]) as fence:
        print((await fence.lookup("i")).state)

asyncio.run(main())
"""


def seen_by_another_process(ledger: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOOKUP, str(ledger)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


async def test_a_backup_inside_the_process_does_not_make_it_dead_for_long(tmp_path: Path) -> None:
    """Closing any descriptor of the `.alive` file drops the process's locks on it; the next batch
    takes them again."""
    ledger = tmp_path / "ledger" / "l.jsonl"
    request = EffectRequest(intent="i", domain="d", tool="t", agent="a")
    async with EffectFence.open(ledger) as fence:
        admission = await fence.prepare(request)
        assert isinstance(admission, Fresh)
        shutil.copytree(ledger.parent, tmp_path / "backup")
        await fence.heartbeat(admission.prepared)
        assert seen_by_another_process(ledger) == "in_flight"
        await fence.commit(admission.prepared, 1)
