"""Who waits on PostgreSQL is woken by it, through one connection, and nobody else is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from effectfence import EffectFence, LedgerUnavailable, Replay
from effectfence.stores.contract import ABSENT, NEVER, Applied, Change, Expect, Put, VersionOf, View
from effectfence.stores.postgres import PostgresStore
from tests.conftest import asked, claimed, until
from tests.engines import PostgresServer
from tests.remote.opened import opened
from tests.stores.conftest import HandClock

pytestmark = pytest.mark.rig


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.schema_url()


async def a_store(url: str) -> PostgresStore:
    """One whose waiters are woken by the server alone: its poll is an hour away."""
    store = await PostgresStore.open(url)
    store._session().watch._poll = 3600.0
    return store


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = await a_store(url)
    yield store
    await store.aclose()


@pytest.fixture
async def elsewhere(url: str) -> AsyncIterator[PostgresStore]:
    store = await a_store(url)
    yield store
    await store.aclose()


async def watching(store: PostgresStore, *keys: str) -> None:
    """Until the server knows that these are watched, and each was looked at since."""
    watch = store._session().watch
    await until(lambda: set(keys) <= set(watch._locked) and not watch._unseen)
    await store.load(["behind them"])


def put(key: str, tag: str) -> Change:
    return Change({}, (Put(key, tag=tag),))


async def test_a_thousand_waiters_need_one_connection_and_are_woken_by_the_server(
    postgres_server: PostgresServer, store: PostgresStore, elsewhere: PostgresStore
) -> None:
    waiters = [asyncio.create_task(store.changed(f"k{n % 10}", "", 3600.0)) for n in range(1_000)]
    await watching(store, *(f"k{n}" for n in range(10)))
    listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = "
    assert postgres_server.sql(f"{listening}'effectfence waiting'") == "1"
    for n in range(10):
        await elsewhere.swap(put(f"k{n}", "moved"))
    await asyncio.gather(*waiters)


async def test_a_notification_is_sent_only_for_what_somebody_watches(
    postgres_server: PostgresServer, store: PostgresStore, elsewhere: PostgresStore
) -> None:
    heard: list[str] = []
    connection = await asyncpg.connect(postgres_server.url)
    await connection.add_listener(store.address.channel, lambda *what: heard.append(what[3]))
    for n in range(20):
        await elsewhere.swap(put(f"k{n}", "t"))
    waiter = asyncio.create_task(store.changed("k3", "t", 3600.0))
    await watching(store, "k3")
    for n in range(20):
        await elsewhere.swap(put(f"k{n}", "u"))
    await waiter
    await until(lambda: not store._session().watch._locked)  # and the server is told so
    await elsewhere.swap(put("k3", "v"))
    await connection.execute("SELECT 1")
    assert len(heard) == 1
    await connection.close()


async def test_waiters_outlive_the_connection_that_listens_for_them(
    postgres_server: PostgresServer, store: PostgresStore, elsewhere: PostgresStore
) -> None:
    for n in range(3):
        waiter = asyncio.create_task(store.changed("k", str(n) if n else "", 3600.0))
        await watching(store, "k")
        postgres_server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'effectfence waiting'"
        )
        await elsewhere.swap(put("k", str(n + 1)))
        await waiter


async def test_a_write_that_meets_the_registration_is_not_missed(
    store: PostgresStore, elsewhere: PostgresStore
) -> None:
    for n in range(60):
        writing = asyncio.create_task(elsewhere.swap(put("k", str(n + 1))))
        waiter = asyncio.create_task(store.changed("k", str(n) if n else "", 3600.0))
        await asyncio.gather(writing, waiter)


async def test_a_renewal_wakes_nobody(store: PostgresStore, elsewhere: PostgresStore) -> None:
    await elsewhere.swap(put("k", "t"))
    waiter = asyncio.create_task(store.changed("k", "t", 3600.0))
    await watching(store, "k")
    for _ in range(5):
        await elsewhere.swap(Change({"k": Expect(tag="t")}, (Put("k", body=b"renewed"),)))
    other = asyncio.create_task(store.changed("other", "", 3600.0))
    await watching(store, "other")
    await elsewhere.swap(put("other", "t"))
    await other
    assert not waiter.done()
    await elsewhere.swap(put("k", "u"))
    await waiter


async def test_closing_lets_nobody_wait_for_ever(store: PostgresStore) -> None:
    waiter = asyncio.create_task(store.changed("k", "", 3600.0))
    await watching(store, "k")
    await store.aclose()
    with pytest.raises(LedgerUnavailable, match="it is closed"):
        await waiter


async def test_a_read_that_is_cancelled_on_its_way_costs_a_connection_and_no_more(
    store: PostgresStore,
) -> None:
    await store.swap(put("k", "t"))
    for turns in range(12):
        reading = asyncio.create_task(store.load(["k"]))  # type: ignore[arg-type]
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert (await store.load(["k"])).records["k"] is not None
    session = store._session()
    assert session._busy == 0
    assert not session._reading
    assert len(session._links) <= 4


async def test_duplicates_elsewhere_wait_for_the_outcome(url: str) -> None:
    async with opened(url) as holder, opened(url) as others:
        prepared = await claimed(holder)
        waiting = [asyncio.create_task(others.prepare(asked(), wait_seconds=60)) for _ in range(50)]
        await watching(store_of(others), "intent/charge:o1")
        cert = await holder.commit(prepared, "paid")
        for answer in await asyncio.gather(*waiting):
            assert isinstance(answer, Replay)
            assert answer.cert == cert


def store_of(fence: EffectFence) -> Any:
    return fence._shared.store


# Contention


async def test_a_hot_domain_refuses_nobody_and_leaves_no_gap(url: str) -> None:
    """Two processes' worth of callers, each with an intent of its own, in one domain."""
    async with opened(url) as one, opened(url) as two:
        tickets = await asyncio.gather(
            *(
                claimed(fence, intent=f"{name}:{n}", domain="hot")
                for name, fence in (("one", one), ("two", two))
                for n in range(100)
            )
        )
        assert sorted(ticket.seq for ticket in tickets) == list(range(1, 201))
        for fence in (one, two):
            stats = fence.stats()
            assert (stats.admitted, stats.refused_race, stats.refused_stale) == (100, 0, 0)


async def test_contention_beyond_the_bound_is_an_error_that_says_so(
    postgres_server: PostgresServer, url: str
) -> None:
    store = await PostgresStore.open(f"{url}&timeout=2")
    schema = store.address.schema
    holder = await asyncpg.connect(postgres_server.url)
    await holder.execute(f"SELECT pg_advisory_lock({schema}.lock_of('held'))")
    with pytest.raises(LedgerUnavailable, match="others held the same records") as caught:
        await store.swap(Change({"held": ABSENT}, (Put("free"),)))
    assert caught.value.ran is False
    assert (await store.load(["free"])).records["free"] is None
    assert isinstance(await store.swap(put("other", "t")), Applied)
    await holder.close()
    assert isinstance(await store.swap(put("held", "t")), Applied)
    await store.aclose()


async def test_keys_are_locked_in_one_order_whatever_order_they_are_named_in(
    store: PostgresStore, elsewhere: PostgresStore
) -> None:
    """No deadlock is even met: the server would count it."""
    names = [f"k{n}" for n in range(8)]
    changes = [
        Change(dict.fromkeys(order, Expect()), tuple(Put(key) for key in order))
        for order in (names, names[::-1]) * 30
    ]
    answers = await asyncio.gather(
        *((store, elsewhere)[n % 2].swap(change) for n, change in enumerate(changes))
    )
    assert all(isinstance(answer, Applied) for answer in answers)
    view = await store.load(names)
    assert [record and record.version for record in view.records.values()] == [60] * 8
    rows = await store._session()._ask_server(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert rows[0][0] == 0


async def test_what_is_compared_can_not_change_meanwhile(
    store: PostgresStore, elsewhere: PostgresStore
) -> None:
    """Each of two writes only where the other has not: never both."""
    for n in range(80):
        x, y = f"x{n}", f"y{n}"
        answers = await asyncio.gather(
            store.swap(Change({x: ABSENT, y: ABSENT}, (Put(x, tag="t"),))),
            elsewhere.swap(Change({x: ABSENT, y: ABSENT}, (Put(y, tag="t"),))),
        )
        assert sum(isinstance(answer, Applied) for answer in answers) == 1


async def test_no_call_overtakes_one_before_it_that_names_its_key(
    postgres_server: PostgresServer, store: PostgresStore
) -> None:
    """The first is held up on the server before it has locked what the others name."""
    holder = await asyncpg.connect(postgres_server.url)
    await holder.execute(f"SELECT pg_advisory_lock({store.address.schema}.lock_of('0'))")
    first = asyncio.create_task(store.swap(Change({}, (Put("0"), Put("a", tag="t")))))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    second = asyncio.create_task(
        store.swap(Change({"a": Expect(tag="t")}, (Put("a", tag="u"),)))  # type: ignore[arg-type]
    )
    seen = asyncio.create_task(store.load(["a"]))  # type: ignore[arg-type]
    assert isinstance(await store.swap(put("b", "t")), Applied), "others go their way"
    assert not any(call.done() for call in (first, second, seen))
    await holder.close()
    assert isinstance(await first, Applied)
    assert isinstance(await second, Applied)
    assert (await seen).records["a"].tag == "u"
    await store.load(["a"])


async def test_a_fact_that_many_compare_is_no_queue(
    postgres_server: PostgresServer, store: PostgresStore
) -> None:
    """What is only compared is locked together with others who only compare it."""
    schema = store.address.schema
    holder = await asyncpg.connect(postgres_server.url)
    await holder.execute(f"SELECT pg_advisory_lock_shared({schema}.lock_of('fact'))")
    change = Change({"fact": ABSENT, "k": ABSENT}, (Put("k", tag="t"),))
    assert isinstance(await store.swap(change), Applied)
    await holder.close()


async def test_a_refused_change_writes_nothing_at_all(
    postgres_server: PostgresServer, store: PostgresStore
) -> None:
    await store.swap(put("a", "t"))
    at = postgres_server.sql("SELECT pg_current_wal_insert_lsn()")
    for _ in range(20):
        answer = await store.swap(Change({"a": ABSENT, "b": ABSENT}, (Put("a"), Put("c"))))
        assert isinstance(answer, View)
    written = postgres_server.sql(f"SELECT pg_current_wal_insert_lsn() - '{at}'::pg_lsn")
    count = f"SELECT count(*) FROM {store.address.schema}.records"
    assert postgres_server.sql(count) == "1"
    assert int(written) < 4096, "twenty refusals are in the log"


# Time


async def test_a_server_whose_clock_is_set_back_neither_frees_nor_keeps_for_ever(
    postgres_server: PostgresServer,
) -> None:
    clock = HandClock()
    url, tell = postgres_server.schema_with_clock()
    tell(10_000.0)
    store = await PostgresStore.open(url, monotonic=clock)
    await store.swap(Change({}, (Put("lease", expires_in=30.0), Put("over", expires_in=0.0))))
    tell(10_000.0 - 3600.0)
    fresh = await PostgresStore.open(url, monotonic=clock)
    answer = await fresh.swap(Change({"over": ABSENT}, (Put("over"),)))
    assert isinstance(answer, Applied), "what is over is over"
    assert answer.now >= 10_000.0
    for one in (store, fresh):
        assert (await one.load(["lease"])).now >= 10_000.0, "no record is younger than now"
    clock.advance(29.0)
    for one in (store, fresh):
        assert (await one.load(["lease"])).records["lease"] is not None
    clock.advance(2.0)
    for one in (store, fresh):
        view = await one.load(["lease"])
        assert view.records["lease"] is None, "an hour's step would keep a dead holder's lease"
        assert isinstance(await one.swap(Change({"lease": ABSENT}, (Put("other"),))), Applied)
        await one.aclose()


# Forgetting


async def test_what_ended_is_swept_on_the_way_and_what_stays_is_not(
    store: PostgresStore,
) -> None:
    ending = tuple(Put(f"e{n}", expires_in=0.0, label="done") for n in range(700))
    staying = tuple(Put(f"s{n}", expires_in=NEVER, label="open") for n in range(5))
    await store.swap(Change({}, ending[:350] + staying))
    await store.swap(Change({}, ending[350:]))
    store.sweep_again()
    for n in range(50):
        await store.swap(put("busy", str(n)))
        count = f"SELECT count(*) FROM {store.address.schema}.records"
        if (left := (await store._session()._ask_server(count))[0][0]) == 6:
            break
    assert left == 6
    assert await store.purge() == 0


async def test_a_sweep_passes_over_what_is_in_use(
    postgres_server: PostgresServer, store: PostgresStore
) -> None:
    await store.swap(Change({}, (Put("used", expires_in=0.0), Put("free", expires_in=0.0))))
    holder = await asyncpg.connect(postgres_server.url)
    await holder.execute(f"SELECT pg_advisory_lock({store.address.schema}.lock_of('used'))")
    assert await store.purge() == 1
    await holder.close()
    assert await store.purge() == 1


async def test_a_large_change_is_one_change(store: PostgresStore) -> None:
    puts = tuple(Put(f"k{n:04}", stamp=VersionOf("k0000") if n else None) for n in range(600))
    assert isinstance(await store.swap(Change({}, puts)), Applied)
    answers = await asyncio.gather(*(store.swap(Change({}, puts)) for _ in range(4)))
    stamps = [{r.stamp for k, r in a.records.items() if r and k != "k0000"} for a in answers]
    assert stamps == [{2}, {3}, {4}, {5}]
