"""`effectfence.testing`: what its page shows, run as a user's suite; its faults are real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from effectfence import (
    EffectFence,
    FenceConfig,
    Fresh,
    LedgerUnavailable,
    OutcomeUnknown,
    Replay,
    testing,
)
from effectfence.stores.memory import MemoryStore
from tests.conftest import asked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")

STRICT = """
import pytest
from effectfence import EffectRequest

request = EffectRequest(intent="i", domain="d", tool="t", agent="a")

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.anyio
async def test_anyio(fence, file_fence, effects):
    for each in (fence, file_fence):
        await each.run(request, effects.counted(lambda: 1))
        await each.run(request, effects.counted(lambda: 1))
    assert effects.count("i") == 2

@pytest.mark.asyncio
async def test_asyncio(fence, file_fence, effects):
    for each in (fence, file_fence):
        await each.run(request, effects.counted(lambda: 1))
    assert effects.count("i") == 2
"""
FAILING = """
import pytest
from effectfence.testing import die_before_the_commit, lose_the_answer

@pytest.mark.parametrize("fault", [die_before_the_commit, lose_the_answer])
def test_nothing_is_committed(fence, fault):
    with fault(fence):
        pass

def test_nothing_happens(effects):
    with effects.lose_the_answer():
        pass
"""


def run_suite(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    for name, program in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, re.M | re.S):
        if mode == "auto" or name == "conftest.py":
            (folder / name).write_text(program)
    options = f"-q -W error -p no:cacheprovider -o asyncio_mode={mode}"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(),
         "-o", "asyncio_default_fixture_loop_scope=function"],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.rig
def test_what_the_page_shows_runs(tmp_path: Path) -> None:
    ran = run_suite(tmp_path, "auto")
    assert "7 passed" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0


@pytest.mark.rig
def test_other_plugins_run_and_a_fault_that_did_not_happen_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(FAILING)
    (tmp_path / "test_strict.py").write_text(STRICT)
    ran = run_suite(tmp_path, "strict")
    assert "3 failed, 2 passed" in ran.stdout, ran.stdout + ran.stderr
    assert len(re.findall("^E +AssertionError: no(thing was| effect)", ran.stdout, re.M)) == 3


def test_it_needs_no_pytest() -> None:
    program = (
        "import sys; sys.modules['pytest'] = None\n"
        "from effectfence import testing\n"
        "with testing.new_fence() as fence: assert fence.blocking.intent_count() == 0\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.fixture(params=["memory", "file"])
def staged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EffectFence]:
    path = None if request.param == "memory" else tmp_path / "effects.jsonl"
    with testing.new_fence(path=path) as fence:
        yield fence


async def test_a_death_leaves_what_a_death_leaves(staged: EffectFence) -> None:
    """The dead process's tickets are unknown at once; what it had finished stays."""
    await staged.run(asked("done", domain="done"), lambda: 1)
    open_ticket = await staged.prepare(asked("open", domain="open"))
    assert isinstance(open_ticket, Fresh)
    with pytest.raises(testing.ProcessDied), testing.die_before_the_commit(staged):
        await staged.run(asked(), lambda: 1)
    assert not staged._shared.custody.held  # which closing would wait for, and report
    unknown = [record.intent async for record in staged.intents("unknown")]
    assert sorted(unknown) == ["charge:o1", "open"]
    for fence in (staged, testing.another(staged)):
        assert isinstance(await fence.prepare(asked("done", domain="done")), Replay)
        for intent, domain in (("open", "open"), ("charge:o1", "order:o1")):
            with pytest.raises(OutcomeUnknown):
                await fence.prepare(asked(intent, domain=domain))


async def test_a_death_is_of_one_process_and_of_its_past(staged: EffectFence) -> None:
    other = testing.another(staged)
    ticket = await other.prepare(asked("other", domain="other"))
    assert isinstance(ticket, Fresh)
    with pytest.raises(testing.ProcessDied), testing.die_before_the_commit(staged):
        await staged.run(asked(), lambda: 1)
    restarted = await staged.prepare(asked("new", domain="new"))
    assert isinstance(restarted, Fresh)
    in_flight = [record.intent async for record in staged.intents("in_flight")]
    assert sorted(in_flight) == ["new", "other"]
    assert (await other.commit(ticket.prepared, 7)).result == 7
    assert (await staged.commit(restarted.prepared, 8)).result == 8


async def test_a_lost_commit_is_recorded_once(staged: EffectFence) -> None:
    effects = testing.Effects()
    with pytest.raises(LedgerUnavailable) as lost, testing.lose_the_answer(staged):
        await staged.run(asked(), effects.counted(lambda: 7))
    assert (lost.value.ran, lost.value.result) == (True, 7)
    record = await staged.lookup("charge:o1")
    assert record is not None
    assert record.state == "done"
    cert = await staged.commit(lost.value.prepared, 7)
    assert await staged.prepare(asked()) == Replay(cert)
    assert effects.count("charge:o1") == effects.count() == 1


def test_whoever_waits_for_a_lease_notices_that_time_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, waits = testing.Clock(), threading.Event()
    real = MemoryStore.changed

    async def changed(store: MemoryStore, key: str, tag: str, seconds: float) -> None:
        waits.set()
        await real(store, key, tag, seconds)

    monkeypatch.setattr(MemoryStore, "changed", changed)
    with testing.new_fence(FenceConfig(on_lease_expiry="takeover"), clock=clock) as fence:
        assert isinstance(fence.blocking.prepare(asked()), Fresh)
        got: list[object] = []
        waiting = threading.Thread(
            target=lambda: got.append(fence.blocking.prepare(asked(), wait_seconds=100))
        )
        waiting.start()
        waits.wait()
        clock.advance(61)
        waiting.join()
        assert isinstance(got[0], Fresh)
        assert got[0].prepared.attempt == 2


def test_effects_outside_of_a_fence_are_counted_as_such() -> None:
    effects = testing.Effects()

    @effects.counted
    def send() -> int:
        """Send it."""
        return 1

    assert (send(), send.__doc__) == (1, "Send it.")
    assert effects.happened == [testing.Happened(None, None, None)]
    assert (effects.count(), effects.count("charge:o1")) == (1, 0)


def test_a_real_fence_cannot_be_staged() -> None:
    with (
        pytest.raises(TypeError, match="ledger is real"),
        testing.lose_the_answer(EffectFence()),
    ):
        pass


def test_time_does_not_go_back() -> None:
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="time can't pass"):
            testing.Clock().advance(seconds)
