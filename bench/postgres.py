"""The fence on PostgreSQL, beside two bare statements of the same driver and beside once-kernel.

    python -m bench.postgres

A server of its own on a disk, with the settings that it comes with. The bare pair is what anybody
would write by hand: `INSERT … ON CONFLICT DO NOTHING`, the effect, `UPDATE`; without domains, read
sets, fence tokens or certificates.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import asyncpg

from bench._durable import pair_on, rate, run_on
from bench._measure import RESULT, Row, arguments, main, micro, request, say
from bench._once import AsyncOnce, Once
from effectfence import EffectFence, EffectRequest, Fresh, Replay
from tests.servers import NotInstalled, PostgresServer

_WAITERS: Final = 1_000
_numbers = itertools.count()

BARE_TABLE: Final = """
CREATE TABLE bare (key text PRIMARY KEY, state text NOT NULL, request bytea NOT NULL, result bytea,
                   at timestamptz NOT NULL DEFAULT clock_timestamp())
"""
_INSERT: Final = (
    "INSERT INTO bare (key, state, request) VALUES ($1, 'open', $2) ON CONFLICT DO NOTHING"
)
_UPDATE: Final = "UPDATE bare SET state = 'done', result = $2 WHERE key = $1 AND state = 'open'"
_READ: Final = "SELECT state, result FROM bare WHERE key = $1"


def measure(full: bool) -> list[Row]:
    return asyncio.run(_measure(full))


async def _measure(full: bool) -> list[Row]:
    rounds, seconds = (9, 4.0) if full else (5, 1.5)
    with server() as postgres:
        async with subjects(postgres) as (fence, bare, once):
            fenced, by_once = pair_on(fence), run_on(once)
            figures: dict[tuple[str, int], list[float]] = {}
            for number in range(rounds + 1):
                for callers in (1, 10, 100):
                    for name, effect in (("fence", fenced), ("bare", bare), ("once", by_once)):
                        got = await rate(effect, callers, seconds, _numbers)
                        if number:
                            figures.setdefault((name, callers), []).append(got)
            median = {what: statistics.median(got) for what, got in figures.items()}
            rows = [*_against_bare(median), *_against_once(median)]
            rows += await _hot(fence, postgres, rounds, seconds)
            rows += await _replay(fence, postgres, rounds)
            rows += await _waiters(postgres, rounds)
    return rows


@contextmanager
def server() -> Iterator[PostgresServer]:
    """On a disk, as the package configures it."""
    try:
        postgres = PostgresServer.create(
            on_disk=True, shared_buffers="128MB", max_wal_size="1GB", autovacuum_naptime="1min"
        )
    except NotInstalled as missing:
        raise SystemExit(str(missing)) from None
    try:
        yield postgres
    finally:
        postgres.remove()


@asynccontextmanager
async def subjects(postgres: PostgresServer) -> Any:
    """The fence, the bare pair and once-kernel, each with its own connections to one server."""
    from once.pg import PostgresStore as OnceStore

    async with AsyncExitStack() as stack:
        fence = await stack.enter_async_context(EffectFence.open(postgres.schema_url()))
        pool = await stack.enter_async_context(connections(postgres))
        async with taken(pool) as connection:
            await connection.execute(BARE_TABLE)
        store = OnceStore(postgres.url, max_size=10)
        stack.callback(store.close)
        yield fence, bare_on(pool), AsyncOnce(Once(store))


Pool = asyncio.Queue[Any]


@asynccontextmanager
async def connections(postgres: PostgresServer) -> AsyncIterator[Pool]:
    """Ten, as asyncpg's own pool has; that one would have the server reset each at every return."""
    pool: Pool = asyncio.LifoQueue()
    opened = [await asyncpg.connect(postgres.url) for _ in range(10)]
    for connection in opened:
        pool.put_nowait(connection)
    yield pool
    for connection in opened:
        await connection.close()


@asynccontextmanager
async def taken(pool: Pool) -> AsyncIterator[Any]:
    connection = await pool.get()
    try:
        yield connection
    finally:
        pool.put_nowait(connection)


def bare_on(pool: Pool) -> Callable[[int], Awaitable[None]]:
    async def pair(number: int) -> None:
        key, asked = f"charge:order-{number}", json.dumps(arguments(number)).encode()
        async with taken(pool) as connection:
            assert await connection.execute(_INSERT, key, asked) == "INSERT 0 1"
        async with taken(pool) as connection:
            result = json.dumps(RESULT).encode()
            assert await connection.execute(_UPDATE, key, result) == "UPDATE 1"

    return pair


def _against_bare(median: dict[tuple[str, int], float]) -> Iterator[Row]:
    ours, bare = 1 / median["fence", 1], 1 / median["bare", 1]
    yield Row(
        "PostgreSQL: prepare + commit, against two bare statements, 1 caller",
        "at most 1.4 x the time",
        f"{ours / bare:.2f} x ({micro(ours)} against {micro(bare)})",
        ours / bare <= 1.4,
    )
    ours, bare = median["fence", 100], median["bare", 100]
    yield Row(
        "PostgreSQL: the same, 100 callers, distinct intents and domains",
        "at least 0.7 x the rate",
        f"{ours / bare:.2f} x ({ours:,.0f}/s against {bare:,.0f}/s)",
        ours / bare >= 0.7,
    )


def _against_once(median: dict[tuple[str, int], float]) -> Iterator[Row]:
    for callers, target in ((1, 1.5), (10, 1.8), (100, 1.5)):
        ours, theirs = median["fence", callers], median["once", callers]
        yield Row(
            f"PostgreSQL: against once-kernel's PostgresStore, {callers} caller(s)",
            f"at least {target} x the rate",
            f"{ours / theirs:.2f} x ({ours:,.0f}/s against {theirs:,.0f}/s)",
            ours / theirs >= target,
        )


async def _hot(
    fence: EffectFence, postgres: PostgresServer, rounds: int, seconds: float
) -> list[Row]:
    """One domain that every effect moves, against one row that every statement updates."""

    async def fenced(number: int) -> None:
        asked = EffectRequest(**{**request(number).model_dump(), "domain": "hot"})
        admission = await fence.prepare(asked)
        assert type(admission) is Fresh
        await fence.commit(admission.prepared, RESULT)

    postgres.sql("CREATE TABLE hot (number bigint); INSERT INTO hot VALUES (0)")
    async with connections(postgres) as pool:

        async def row(_: int) -> None:
            for _ in range(2):
                async with taken(pool) as connection:
                    await connection.execute("UPDATE hot SET number = number + 1")

        got = [
            (await rate(fenced, 100, seconds, _numbers), await rate(row, 100, seconds, _numbers))
            for _ in range(rounds)
        ]
    ours, bare = (statistics.median(column) for column in zip(*got, strict=True))
    return [
        Row(
            "PostgreSQL: 100 callers, one hot domain, against one hot row updated twice",
            "reported",
            f"{ours / bare:.2f} x ({ours:,.0f}/s against {bare:,.0f}/s)",
        )
    ]


async def _replay(fence: EffectFence, postgres: PostgresServer, rounds: int) -> list[Row]:
    asked = request(next(_numbers))
    admission = await fence.prepare(asked)
    assert isinstance(admission, Fresh)
    cert = await fence.commit(admission.prepared, RESULT)
    connection = await asyncpg.connect(postgres.url)
    body = cert.model_dump_json().encode()
    await connection.execute(
        "INSERT INTO bare (key, state, request, result) VALUES ('replay', 'done', '', $1)", body
    )

    async def replay() -> None:
        assert type(await fence.prepare(asked)) is Replay

    async def read() -> None:
        assert (await connection.fetchrow(_READ, "replay"))["result"] == body

    figures = []
    for _ in range(rounds):
        figures.append((await _each_takes(replay), await _each_takes(read)))
    await connection.close()
    ours, bare = (statistics.median(column) for column in zip(*figures, strict=True))
    return [
        Row(
            "PostgreSQL: replay, against one bare read of as many bytes",
            "at most 1.2 x the time",
            f"{ours / bare:.2f} x ({micro(ours)} against {micro(bare)})",
            ours / bare <= 1.2,
        )
    ]


async def _each_takes(work: Callable[[], Awaitable[None]], times: int = 1_000) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        await work()
    return (time.perf_counter() - begun) / times


async def _waiters(postgres: PostgresServer, rounds: int) -> list[Row]:
    figures = [await _last_woken(postgres) for _ in range(rounds)]
    took = statistics.median(figures)
    return [
        Row(
            f"PostgreSQL: {_WAITERS:,} waiters on one intent, commit to the last one woken, "
            "the poll disabled",
            "at most 150 ms",
            f"{took * 1e3:.0f} ms",
            took <= 0.150,
        )
    ]


async def _last_woken(postgres: PostgresServer) -> float:
    """The holder and the waiters are two fences, as on two machines."""
    url = postgres.schema_url()
    async with EffectFence.open(url) as holder, EffectFence.open(url) as others:
        store: Any = others._shared.store
        store._session().watch._poll = 3600.0
        asked = request(1)
        admission = await holder.prepare(asked)
        assert isinstance(admission, Fresh)
        waiting = [
            asyncio.create_task(others.prepare(asked, wait_seconds=60)) for _ in range(_WAITERS)
        ]
        watch = store._session().watch
        while not watch._locked or watch._unseen:  # noqa: ASYNC110 - nobody else asks for it
            await asyncio.sleep(0.001)
        await others.lookup("nothing")  # behind everything that was asked before it
        begun = time.perf_counter()
        await holder.commit(admission.prepared, RESULT)
        answers = await asyncio.gather(*waiting)
        took = time.perf_counter() - begun
    assert all(isinstance(answer, Replay) for answer in answers)
    return took


if __name__ == "__main__":
    say("each round runs nine loads; about a minute and a half")
    main(measure, "The fence on PostgreSQL.")
