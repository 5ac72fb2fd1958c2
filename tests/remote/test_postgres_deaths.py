"""PostgreSQL killed, and replaced by its standby, under load (FAULTS 33, 37, 40, 41; CASES 27)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from effectfence import EffectFence, LedgerUnavailable
from tests.conftest import asked, claimed, until
from tests.engines import PostgresServer, skipping
from tests.remote.linear import Op, linearizable
from tests.remote.load import Load
from tests.remote.opened import opened
from tests.remote.proxy import Proxy, proxied

pytestmark = pytest.mark.rig

LONG = os.environ.get("EFFECTFENCE_LONG") == "1"
KILLS = 2_000 if LONG else 4


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """One that a test may kill."""
    with skipping():
        server = PostgresServer.create()
    yield server
    server.remove()


@pytest.mark.timeout(24 * 3600 if LONG else 120)
async def test_killed_in_the_middle_of_the_load_it_forgets_nothing_that_was_acknowledged(
    server: PostgresServer,
) -> None:
    url = server.schema_url()
    async with opened(url) as one, opened(url) as two:
        load = Load([one, two], seed=1)
        running = asyncio.create_task(load.run(16))
        for _ in range(KILLS):
            await more_acknowledged(load, 100, running)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        load.stop = True
        await running
        assert await load.judged(one) == []
    async with opened(url) as afterwards:
        assert await load.judged(afterwards) == []
        assert len(load.history.effects) > 12
        assert [op for ops in load.ops.values() for op in ops if not op.told] or not LONG


async def test_a_sweep_goes_on_after_a_restart_and_drops_nothing_else(
    server: PostgresServer,
) -> None:
    async with opened(server.schema_url(), result_ttl=0.001) as fence:
        for number in range(40):
            await fence.run(asked(f"done:{number}"), str)
        await fence.abort(await claimed(fence, intent="unknown"), "the line went dead")
        await claimed(fence, intent="held")
        sweeping = asyncio.create_task(fence.sweep())
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await sweeping
        await fence.sweep()
        left = {record.intent: record.state async for record in fence.intents()}
        assert left == {"unknown": "unknown", "held": "in_flight"}
        assert await fence.intent_count() == 2


async def more_acknowledged(load: Load, count: int, running: asyncio.Task[None]) -> None:
    wanted = len(load.history.acknowledged) + count
    await until(lambda: len(load.history.acknowledged) > wanted or running.done())


async def test_histories_of_several_processes_without_faults_have_an_order(
    postgres_server: PostgresServer,
) -> None:
    url = postgres_server.schema_url()
    async with opened(url) as one, opened(url) as two, opened(url) as three:
        load = Load([one, two, three], seed=2, intents=3)
        running = asyncio.create_task(load.run(24))
        wanted = 200_000 if LONG else 2_000
        await until(lambda: sum(map(len, load.ops.values())) > wanted or running.done())
        load.stop = True
        await running
        assert await load.judged(one) == []


def test_the_order_is_really_looked_for() -> None:
    fresh, committed = Op(0, 1, "fresh", "t"), Op(2, 3, "committed", "t h")
    assert linearizable([fresh, committed, Op(4, 5, "replay", "h")])
    assert linearizable([fresh, committed, Op(2, 5, "in_flight"), Op(2, 4, "replay", "h")])
    assert not linearizable([fresh, committed, Op(4, 5, "in_flight")])
    assert not linearizable([fresh, committed, Op(4, 5, "replay", "other")])
    assert not linearizable([fresh, Op(2, 3, "fresh", "u")])
    assert not linearizable([Op(0, 1, "in_flight")])
    assert linearizable([Op(0, 9, ""), Op(1, 2, "in_flight"), Op(3, 4, "fresh", "t")])


# Failover


class Pair:
    """A primary and its standby; what the standby is sent goes through a proxy."""

    def __init__(self, primary: PostgresServer, standby: PostgresServer, line: Proxy) -> None:
        self.primary, self.standby, self.line = primary, standby, line
        _, _, self.database = primary.url.rpartition("/")

    @property
    def url(self) -> str:
        """Of both: whichever is the primary."""
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"postgresql://{self.primary.user}@{hosts}/{self.database}?schema=shared&timeout=8"

    async def wait_for_each_other(self) -> None:
        """From here on a commit waits for the standby."""
        await asyncio.to_thread(
            self.primary.sql, "ALTER SYSTEM SET synchronous_standby_names = '*'"
        )
        await asyncio.to_thread(self.primary.sql, "SELECT pg_reload_conf()")
        state = "SELECT sync_state FROM pg_stat_replication"
        await asyncio.to_thread(self.primary.until, lambda: self.primary.sql(state) == "sync")

    async def fail_over(self) -> None:
        await asyncio.to_thread(self.primary.kill)
        await self.line.stop()
        await asyncio.to_thread(self.standby.promote)


@pytest.fixture
async def pair(server: PostgresServer) -> AsyncIterator[Pair]:
    async with proxied(server.port) as line:
        standby = await asyncio.to_thread(server.standby, line.port)
        yield Pair(server, standby, line)
        await asyncio.to_thread(standby.remove)


async def test_without_synchronous_standbys_a_failover_loses_what_was_acknowledged(
    pair: Pair,
) -> None:
    """The control: else the next test would show nothing. The guarantees' page says so too."""
    async with opened(pair.url) as fence:
        await fence.commit(await claimed(fence, intent="early"), "paid")
        await caught_up(pair)
        pair.line.silent = True
        await fence.commit(await claimed(fence, intent="late"), "paid")
        await pair.fail_over()
        assert await fence.lookup("early") is not None
        assert await fence.lookup("late") is None


async def caught_up(pair: Pair) -> None:
    at = await asyncio.to_thread(pair.primary.sql, "SELECT pg_current_wal_flush_lsn()")
    reached = f"SELECT pg_last_wal_replay_lsn() >= '{at}'"
    await asyncio.to_thread(pair.standby.until, lambda: pair.standby.sql(reached) == "t")


async def test_with_a_synchronous_standby_a_failover_under_load_loses_nothing(pair: Pair) -> None:
    async with opened(pair.url) as one, opened(pair.url) as two:
        await pair.wait_for_each_other()
        load = Load([one, two], seed=3)
        running = asyncio.create_task(load.run(12))
        await more_acknowledged(load, 60, running)
        pair.line.silent = True  # what is committed from here on is in nobody's answer
        await waited_for(pair)
        await pair.fail_over()
        await more_acknowledged(load, 60, running)
        load.stop = True
        await running
        assert await load.judged(two) == []
        assert len(set(load.history.tokens)) == len(load.history.tokens)


async def test_a_cancelled_wait_for_the_standby_is_an_answer_to_nobody(pair: Pair) -> None:
    """Neither to the one who claimed, nor to those who then see the row."""
    url = pair.url.replace("timeout=8", "timeout=3")
    async with opened(url) as fence, opened(url) as reader:
        await pair.wait_for_each_other()
        await fence.commit(await claimed(fence, intent="early"), "paid")
        pair.line.silent = True
        claiming = asyncio.create_task(fence.prepare(asked("late")))
        await cancelled(pair, 1)
        reading = asyncio.create_task(reader.lookup("late"))
        others = asyncio.create_task(reader.prepare(asked("late")))
        await cancelled(pair, 2)
        for call in (claiming, reading, others):
            with pytest.raises(LedgerUnavailable) as caught:
                await call
            assert caught.value.ran is False
        await pair.fail_over()
        assert (await reader.lookup("late")) is None, "the rig is blind: it was not lost"
        record = await reader.lookup("early")
        assert record is not None
        assert record.state == "done"


async def cancelled(pair: Pair, times: int) -> None:
    """Have somebody end the waits for the standby, as an impatient operator does."""
    for _ in range(times):
        await waited_for(pair)
        await asyncio.to_thread(pair.primary.sql, f"SELECT pg_cancel_backend(pid) {_WAITS}")


_WAITS = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


async def waited_for(pair: Pair) -> None:
    """Until some commit waits for the standby."""
    count = f"SELECT count(*) {_WAITS}"
    await asyncio.to_thread(pair.primary.until, lambda: pair.primary.sql(count) != "0")


async def test_a_standby_is_refused_at_the_start(pair: Pair) -> None:
    with pytest.raises(LedgerUnavailable, match="it is a standby") as caught:
        await EffectFence.open(pair.standby.url)
    assert caught.value.ran is False
