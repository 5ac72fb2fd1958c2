"""Who is alive, seen from another process."""

import shutil
import subprocess
import sys
from pathlib import Path

from effectfence import EffectFence, EffectRequest, Fresh, Replay

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


async def test_a_copy_of_the_folder_is_a_ledger_of_its_own(tmp_path: Path) -> None:
    """What was in flight there is nobody's here: unknown, not run again."""
    ledger = tmp_path / "ledger" / "l.jsonl"
    request = EffectRequest(intent="i", domain="d", tool="t", agent="a")
    done = request.model_copy(update={"intent": "j"})
    async with EffectFence.open(ledger) as fence:
        admission = await fence.prepare(done)
        assert isinstance(admission, Fresh)
        cert = await fence.commit(admission.prepared, 1)
        held = await fence.prepare(request)
        assert isinstance(held, Fresh)
        shutil.copytree(ledger.parent, tmp_path / "copy")
        async with EffectFence.open(tmp_path / "copy" / "l.jsonl") as other:
            found = await other.lookup("i")
            assert found is not None
            assert found.state == "unknown"
            replay = await other.prepare(done)
            assert isinstance(replay, Replay)
            assert replay.cert.hash == cert.hash
        await fence.commit(held.prepared, 1)
