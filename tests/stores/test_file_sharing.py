"""One file, several stores: in one process, in several, over forks, compactions and deaths."""

# ruff: noqa: ASYNC240 - a test may keep its own loop waiting

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from effectfence.errors import LedgerUnavailable
from effectfence.stores.contract import ABSENT, Applied, Change, Put, VersionOf, View
from effectfence.stores.file import FileStore, verify
from tests.stores.conftest import HandMachine
from tests.stores.damage import change


@pytest.fixture
async def pair(ledger: Path) -> AsyncIterator[tuple[FileStore, FileStore]]:
    first, second = await FileStore.open(ledger), await FileStore.open(ledger)
    yield first, second
    await first.aclose()
    await second.aclose()


@contextlib.contextmanager
def process(ledger: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """Another Python process with a store open as `store`; its `program` may await."""
    code = (
        "import asyncio, sys, os\n"
        "from effectfence.stores.file import FileStore\n"
        "from effectfence.stores.contract import *\n"
        "def say(what): print(what, flush=True)\n"
        "async def main():\n"
        "    store = await FileStore.open(sys.argv[1])\n"
        + textwrap.indent(textwrap.dedent(program), "    ")
        + "\n    await store.aclose()\nasyncio.run(main())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(ledger)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


async def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return (await asyncio.to_thread(child.stdout.readline)).strip()


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


Pair = tuple[FileStore, FileStore]


# Two stores


async def test_two_stores_see_each_others_writes_at_once(pair: Pair) -> None:
    for i in range(50):
        writer, reader = pair[i % 2], pair[1 - i % 2]
        await writer.swap(Change({}, (Put("a", tag=str(i)),)))
        found = (await reader.load(["a"])).records["a"]
        assert found is not None
        assert found.tag == str(i)


async def test_two_stores_never_both_win(pair: Pair) -> None:
    answers = await asyncio.gather(
        *(pair[i % 2].swap(change(f"k{i // 4}", str(i), **{f"k{i // 4}": ABSENT}))
          for i in range(400))
    )  # fmt: skip
    assert sum(isinstance(answer, Applied) for answer in answers) == 100
    views = [await store.load([f"k{i}" for i in range(100)]) for store in pair]
    assert views[0].records == views[1].records


async def test_another_stores_change_wakes_a_waiter_within_50_ms(pair: Pair) -> None:
    await pair[0].swap(change("a"))
    late = []
    for i in range(10):
        waiter = asyncio.create_task(pair[1].changed("a", "t" if i == 0 else str(i - 1), 60.0))
        await pair[1].load(["a"])
        await pair[0].swap(Change({}, (Put("a", tag=str(i)),)))
        started = time.monotonic()
        await asyncio.wait_for(waiter, 10)
        late.append(time.monotonic() - started)
    assert sorted(late)[len(late) // 2] < 0.05


async def test_nobody_watching_means_nobody_looking(ledger: Path) -> None:
    """A store at rest makes no system calls: its thread sleeps until it is asked."""
    machine = HandMachine()
    looked = 0

    def boottime() -> float:
        nonlocal looked
        looked += 1
        return 1000.0

    machine.boottime = boottime  # type: ignore[method-assign]
    store = await FileStore.open(ledger, machine=machine)
    await store.swap(change("a"))
    await store.changed("a", "t", 0.1)
    await store.load(["a"])
    await asyncio.sleep(0.05)  # the last look, at a waiter that gave up
    before = looked
    await asyncio.sleep(0.1)
    assert looked == before
    await store.aclose()


# Life and death


async def test_a_closed_stores_records_are_gone_and_only_those(pair: Pair) -> None:
    await pair[0].swap(change("a"))
    await pair[1].swap(change("b"))
    assert (await pair[1].load("ab")).gone == frozenset()
    waiter = asyncio.create_task(pair[1].changed("a", "t", 60.0))
    await pair[1].load(["a"])
    await pair[0].abandon()
    await asyncio.wait_for(waiter, 10)
    assert (await pair[1].load("abc")).gone == {"a"}
    refused = await pair[1].swap(change("a", a=ABSENT))
    assert isinstance(refused, View)
    assert refused.gone == {"a"}
    assert [view.gone async for view in pair[1].scan("")] == [{"a"}]
    await pair[1].swap(change("a"))
    assert (await pair[1].load("ab")).gone == frozenset()


async def test_a_killed_processes_records_are_gone(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    program = "await store.swap(Change({}, (Put('a', tag='t'),))); say('ok'); sys.stdin.readline()"
    with process(ledger, program) as child:
        assert await heard(child) == "ok"
        assert (await store.load(["a"])).gone == frozenset()
        waiter = asyncio.create_task(store.changed("a", "t", 60.0))
        await store.load(["a"])
        child.send_signal(signal.SIGKILL)
        await asyncio.wait_for(waiter, 10)
        assert (await store.load(["a"])).gone == {"a"}
    await store.aclose()


async def test_closing_another_store_of_this_process_keeps_ours_alive(ledger: Path) -> None:
    """POSIX drops a process's locks when any descriptor of the file is closed."""
    first, second = await FileStore.open(ledger), await FileStore.open(ledger)
    await first.swap(change("a"))
    await second.aclose()
    with process(ledger, "say(sorted((await store.load(['a'])).gone))") as child:
        assert await heard(child) == "[]"
    await first.aclose()
    with process(ledger, "say(sorted((await store.load(['a'])).gone))") as child:
        assert await heard(child) == "['a']"


# Several processes


RACE = """
say('ready')
sys.stdin.readline()
won = []
for i in range(200):
    key = f'k{i}'
    change = Change({key: ABSENT}, (Put(key, tag=sys.argv[0]), Put('d'), Put(f'{key}:seq',
        stamp=VersionOf('d'))))
    if type(await store.swap(change)) is Applied:
        won.append(i)
say(won)
"""


async def test_processes_on_one_file_never_both_win(ledger: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(process(ledger, RACE)) for _ in range(3)]
        for child in children:
            assert await heard(child) == "ready"
        for child in children:
            tell(child)
        wins = [eval(await heard(child)) for child in children]  # noqa: S307 - our own child
    assert sorted(i for won in wins for i in won) == list(range(200))
    store = await FileStore.open(ledger)
    records = (await store.load([f"k{i}:seq" for i in range(200)])).records
    assert sorted(r.stamp for r in records.values() if r) == list(range(1, 201))
    await store.aclose()
    assert verify(str(ledger)).changes == 200


FAIR = """
say('ready')
sys.stdin.readline()
end = asyncio.get_running_loop().time() + 1.0
count = 0
async def work(me):
    nonlocal count
    while asyncio.get_running_loop().time() < end:
        await store.swap(Change({}, (Put(f'k{me}', tag='t'),)))
        count += 1
await asyncio.gather(*map(work, range(40)))
say(count)
"""


async def test_no_process_starves(ledger: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(process(ledger, FAIR)) for _ in range(4)]
        for child in children:
            assert await heard(child) == "ready"
        for child in children:
            tell(child)
        counts = [int(await heard(child)) for child in children]
    assert min(counts) >= sum(counts) / 4 / 10, counts


async def test_processes_that_start_together_make_one_ledger(ledger: Path) -> None:
    for wave in range(3):
        path = ledger.with_name(f"l{wave}.jsonl")
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(process(path, "say(store.epoch)")) for _ in range(4)]
            epochs = {await heard(child) for child in children}
        assert len(epochs) == 1


async def test_a_reader_beside_a_writer_sees_only_what_is_whole(ledger: Path) -> None:
    program = """
    say('ready')
    for i in range(300):
        await asyncio.gather(*(store.swap(Change({}, (Put(f'k{i}-{j}', tag='t'),)))
            for j in range(5)))
    say('done')
    """
    with process(ledger, program) as child:
        assert await heard(child) == "ready"
        done = asyncio.create_task(heard(child))
        seen = 0
        while not done.done():
            changes = (await asyncio.to_thread(verify, str(ledger))).changes
            assert changes >= seen
            seen = changes
    assert verify(str(ledger)).changes == 1500


# What a death leaves between write and sync


async def test_what_a_dead_process_wrote_but_did_not_sync_is_synced_before_it_is_told(
    ledger: Path,
) -> None:
    class Watching(HandMachine):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[str] = []

        def write(self, descriptor: int, data: Any) -> int:
            self.events.append("write")
            return super().write(descriptor, data)

        def sync_data(self, descriptor: int) -> None:
            self.events.append("sync")
            super().sync_data(descriptor)

    machine = Watching()
    first = await FileStore.open(ledger, machine=machine)
    other = await FileStore.open(ledger, machine=HandMachine())
    lock = ledger.with_name("effects.jsonl.lock")
    mark = lock.read_bytes()
    await other.swap(change("a"))
    lock.write_bytes(mark)  # as if it had died between its write and its sync
    assert (await first.load(["a"])).records["a"] is None, "nobody's acknowledgement yet"
    machine.events.clear()
    await first.swap(change("b"))
    assert machine.events == ["sync", "write", "sync"]
    assert (await first.load(["a"])).records["a"] is not None
    await first.aclose()
    await other.aclose()


async def test_a_garbled_mark_is_not_believed(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    await store.swap(change("a"))
    lock = ledger.with_name("effects.jsonl.lock")
    for garbled in (b"", b"\0" * 400, os.urandom(300), lock.read_bytes()[:-1] + b"x"):
        lock.write_bytes(garbled)
        assert (await store.load(["a"])).records["a"] is not None
        other = await FileStore.open(ledger)
        assert (await other.load(["a"])).records["a"] is not None
        await other.aclose()
        lock.write_bytes(garbled)
        assert isinstance(await store.swap(change("a")), Applied)
    await store.aclose()


# Compaction


async def test_a_compaction_keeps_what_lives_and_drops_what_expired(ledger: Path) -> None:
    machine = HandMachine()
    store = await FileStore.open(ledger, machine=machine)
    await store.swap(Change({}, (Put("a", expires_in=5.0, body=b"x" * 999), Put("b", tag="t"))))
    for _ in range(9):
        await store.swap(Change({}, (Put("d"), Put("b", stamp=VersionOf("d")))))
    await store.swap(Change({}, (Put("d", delete=True, floor=True),)))
    machine.clock.advance(5.0)
    before = (await store.load("abd")).records
    size = ledger.stat().st_size
    await store.compact()
    assert ledger.stat().st_size < size / 3
    assert (await store.load("abd")).records == before
    await store.aclose()
    again = await FileStore.open(ledger, machine=machine)
    assert (await again.load("abd")).records == before
    answer = await again.swap(Change({}, (Put("d"),)))
    assert isinstance(answer, Applied)
    assert answer.records["d"] is not None
    assert answer.records["d"].version == 10, "the floor outlives a compaction"
    await again.aclose()
    assert verify(str(ledger)).changes == 12


async def test_an_attached_store_follows_a_compaction(pair: Pair, ledger: Path) -> None:
    table = pair[1]._file.table
    for i in range(20):
        await pair[0].swap(change(f"k{i}"))
        await pair[0].compact()
        if i % 3 == 0:
            view = await pair[1].load([f"k{j}" for j in range(i + 1)])
            assert all(view.records.values())
        if i % 4 == 0:
            await pair[1].swap(change(f"x{i}"))
            assert (await pair[0].load([f"x{i}"])).records[f"x{i}"] is not None
        if i == 0:
            assert pair[1]._file.table is table, "one that has read it all reads nothing again"
    assert verify(str(ledger)).records == 25


async def test_a_crash_between_rename_and_mark_is_followed(pair: Pair, ledger: Path) -> None:
    await pair[0].swap(change("a"))
    lock = ledger.with_name("effects.jsonl.lock")
    mark = lock.read_bytes()
    await pair[0].compact()
    await pair[0].abandon()
    lock.write_bytes(mark)
    assert (await pair[1].load(["a"])).records["a"] is not None
    assert isinstance(await pair[1].swap(change("b")), Applied)
    third = await FileStore.open(ledger)
    assert all((await third.load("ab")).records.values())
    await third.aclose()


async def test_a_compaction_that_did_not_finish_leaves_nothing(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    await store.swap(change("a"))
    await store.aclose()
    ledger.with_name("effects.jsonl.new").write_bytes(b"half")
    ledger.with_name("effects.jsonl.lock").unlink()
    store = await FileStore.open(ledger)
    assert (await store.load(["a"])).records["a"] is not None
    assert not ledger.with_name("effects.jsonl.new").exists()
    await store.aclose()


async def test_a_ledger_that_only_grows_is_not_compacted(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    for i in range(20):
        await store.swap(Change({}, (Put(f"k{i}", body=b'"%s"' % (b"x" * 100_000)),)))
    await store.aclose()
    assert b'"compacted":false' in ledger.read_bytes()[:200]


async def test_a_ledger_of_superseded_records_is_compacted_by_itself(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    for _ in range(40):
        await store.swap(Change({}, (Put("a", body=b'"%s"' % (b"x" * 100_000)),)))
    assert ledger.stat().st_size < 2 << 20
    await store.aclose()
    assert verify(str(ledger)).changes == 40


# Forks


def in_child(function: Callable[[], None]) -> int:
    """Run it in a forked child; the child's exit status."""
    with warnings.catch_warnings():  # newer Pythons say that threads and forks do not mix
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_and_may_open_its_own(ledger: Path) -> None:
    with asyncio.Runner() as runner:
        store = runner.run(FileStore.open(ledger))
        runner.run(store.swap(change("a")))  # type: ignore[arg-type]

        def child() -> None:
            with pytest.raises(LedgerUnavailable, match="fork") as caught:
                asyncio.run(store.load(["a"]))  # type: ignore[arg-type]
            assert caught.value.ran is False
            asyncio.run(store.aclose())

            async def own() -> None:
                mine = await FileStore.open(ledger)
                assert (await mine.load(["a"])).gone == frozenset(), "the parent lives"
                await mine.swap(change("child"))
                await mine.aclose()

            asyncio.run(own())

        assert in_child(child) == 0
        view = runner.run(store.load(["a", "child"]))  # type: ignore[arg-type]
        assert all(view.records.values())
        assert view.gone == {"child"}
        runner.run(store.aclose())


LIVES_ON = """
import asyncio, os, sys, time
from effectfence.stores.file import FileStore, Machine
from effectfence.stores.contract import *

class Slow(Machine):
    slow = False
    def sync_data(self, descriptor):
        if self.slow:
            print("syncing", flush=True)
            time.sleep(60)

async def main():
    machine = Slow()
    store = await FileStore.open(sys.argv[1], machine=machine)
    await store.swap(Change({}, (Put("a", tag="t"),)))
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    machine.slow = True
    await store.swap(Change({}, (Put("b", tag="t"),)))

asyncio.run(main())
"""


def test_a_child_that_lives_on_holds_none_of_the_parents_locks(ledger: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LIVES_ON, str(ledger)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        process_group=0,
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "syncing\n"
        parent.kill()  # while it holds the lock; its child lives on
        parent.wait()

        async def use() -> None:
            store = await FileStore.open(ledger)
            assert isinstance(await store.swap(change("c")), Applied)
            view = await store.load("ab")
            assert view.gone == {"a", "b"}
            await store.aclose()

        asyncio.run(asyncio.wait_for(use(), 20))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()
        parent.wait()


async def test_a_fork_in_the_midst_of_batches_harms_nobody(ledger: Path) -> None:
    store = await FileStore.open(ledger)
    for i in range(20):
        swap = asyncio.create_task(store.swap(change(f"k{i}")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert in_child(lambda: None) == 0
        assert isinstance(await swap, Applied)
    await store.aclose()
    assert verify(str(ledger)).changes == 20


async def test_a_listing_asked_behind_a_write_shows_it(tmp_path: Path) -> None:
    store = await FileStore.open(tmp_path / "l.jsonl")

    async def listed() -> list[str]:
        return [key async for view in store.scan("x") for key in view.records]

    writing = asyncio.ensure_future(store.swap(Change({"k": ABSENT}, (Put("k", label="x"),))))
    listing = asyncio.ensure_future(listed())
    await writing
    assert await listing == ["k"]
    await store.aclose()


async def test_a_folder_in_the_ledgers_place_is_refused_and_nothing_is_left_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(LedgerUnavailable, match="folder"):
        await FileStore.open(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
