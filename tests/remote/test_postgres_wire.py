"""What goes over the wire, and what becomes of what gets lost on it (FAULTS 34, 35, 36, 43)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from effectfence import (
    EffectFence,
    Fresh,
    IntentConflict,
    IntentInFlight,
    LedgerUnavailable,
    PreparedEffect,
    Replay,
)
from effectfence.stores.contract import ABSENT, Change, Put
from effectfence.stores.postgres import PostgresStore
from tests.conftest import asked, claimed
from tests.engines import PostgresServer
from tests.remote.opened import opened
from tests.remote.proxy import Proxy, proxied, through

pytestmark = pytest.mark.rig

LONG = os.environ.get("EFFECTFENCE_LONG") == "1"
DROPS = 10_000 if LONG else 40
CALLS = 10_000 if LONG else 200


@pytest.fixture
async def proxy(postgres_server: PostgresServer) -> AsyncIterator[Proxy]:
    async with proxied(postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.schema_url()


async def test_each_call_is_one_round_trip(proxy: Proxy, url: str) -> None:
    async with (
        opened(through(proxy, url)) as fence,
        opened(url) as elsewhere,
    ):
        was = proxy.asked

        def count() -> int:
            nonlocal was
            spent, was = proxy.asked - was, proxy.asked
            return spent

        prepared = await claimed(fence)
        assert count() == 1, "a fresh admission"
        with pytest.raises(IntentInFlight):
            await fence.prepare(asked())
        assert count() == 1, "a refusal"
        with pytest.raises(IntentConflict):
            await fence.prepare(asked(args={"amount": 1}))
        assert count() == 1, "a conflict"
        await fence.heartbeat(prepared)
        assert count() == 2, "a renewal looks first, since it keeps the state that it finds"
        await fence.commit(prepared, "paid")
        assert count() == 1, "a commit"
        assert isinstance(await fence.prepare(asked()), Replay)
        assert count() == 1, "a replay"
        other = await claimed(elsewhere, intent="charge:o2")
        await elsewhere.commit(other, "paid")
        assert isinstance(await fence.prepare(asked(intent="charge:o2")), Replay)
        assert count() == 1, "a replay of what another process did"


async def test_an_answer_that_is_lost_after_the_commit_is_found_again(
    proxy: Proxy, url: str
) -> None:
    """Each claim's and each commit's first answer gets lost, with its connection."""
    async with (
        opened(through(proxy, url)) as fence,
        opened(url) as elsewhere,
    ):
        armed = False

        def loses() -> bool:
            nonlocal armed
            was, armed = armed, False
            return was

        proxy.lose = loses
        for number in range(DROPS):
            intent = f"charge:{number}"
            armed = True
            admission = await fence.prepare(asked(intent=intent))
            assert isinstance(admission, Fresh), "its own claim was not recognised"
            armed = True
            cert = await fence.commit(admission.prepared, number)
            again = await elsewhere.prepare(asked(intent=intent))
            assert isinstance(again, Replay)
            assert again.cert == cert
        assert proxy.lost == 2 * DROPS
        assert await elsewhere.current("order:o1") == DROPS, "a number was taken twice"
        assert fence.stats().admitted == DROPS


async def test_every_verb_survives_the_loss_of_its_answer(proxy: Proxy, url: str) -> None:
    armed = False

    def loses() -> bool:
        nonlocal armed
        was, armed = armed, False
        return was

    async with opened(through(proxy, url)) as fence:
        proxy.lose = loses
        for number, verb in enumerate(("abort", "release", "heartbeat", "commit") * 3):
            prepared = await claimed(fence, intent=f"charge:{number}")
            armed = True
            await report(fence, prepared, verb)
            record = await fence.lookup(prepared.intent)
            state = record.state if record else None
            expected = {"abort": "unknown", "release": None, "heartbeat": "in_flight"}
            assert state == expected.get(verb, "done")
        armed = True
        assert await fence.reserve("free", 0) == 1, "its own reservation was not recognised"
        armed = True
        await fence.settle("charge:0", "paid", by="ops", reason="the log says so")
        assert proxy.lost == 14


async def report(fence: EffectFence, prepared: PreparedEffect, verb: str) -> Any:
    if verb in ("abort", "release"):
        return await getattr(fence, verb)(prepared, "the line went dead")
    return await (fence.commit(prepared, 1) if verb == "commit" else fence.heartbeat(prepared))


async def test_whether_it_was_written_is_said_where_it_is_known(proxy: Proxy, url: str) -> None:
    store = await PostgresStore.open(through(proxy, url, timeout=0.5))
    proxy.silent = True  # it goes out, and nobody knows whether it arrives
    with pytest.raises(LedgerUnavailable) as caught:
        await store.swap(Change({}, (Put("a", tag="t"),)))
    assert caught.value.ran is None
    with pytest.raises(LedgerUnavailable) as caught:  # by now there is no line to send it on
        await store.swap(Change({}, (Put("a", tag="t"),)))
    assert caught.value.ran is False
    proxy.silent = False
    await store.aclose()


async def test_what_waits_for_a_connection_does_not_wait_for_each_to_fail(
    proxy: Proxy, url: str
) -> None:
    """Its own time is over with that of those before it: a queue has one end, not many."""
    store = await PostgresStore.open(through(proxy, url, timeout=1) + "&pool=1")
    proxy.silent = True
    changes = [Change({f"a{n}": ABSENT, f"b{n}": ABSENT}, (Put(f"a{n}"),)) for n in range(900)]
    answers = await asyncio.gather(*map(store.swap, changes), return_exceptions=True)
    assert all(isinstance(answer, LedgerUnavailable) for answer in answers)
    assert proxy.connections < 8, "each batch tried for itself"
    proxy.silent = False
    await store.aclose()


async def test_a_doubt_stays_a_doubt_whatever_is_found_afterwards(
    postgres_server: PostgresServer, proxy: Proxy, url: str
) -> None:
    """The answer got lost; and when it is asked again, another ledger stands there."""
    store = await PostgresStore.open(through(proxy, url))
    schema = store.address.schema

    def lose_and_replace() -> bool:
        proxy.lose = lambda: False
        postgres_server.sql(f"UPDATE {schema}.meta SET epoch = md5(epoch)")
        return True

    proxy.lose = lose_and_replace
    with pytest.raises(LedgerUnavailable, match="another ledger") as caught:
        await store.swap(Change({}, (Put("a", tag="t"),)))
    assert caught.value.ran is None
    await store.aclose()


async def test_a_line_that_falls_silent_is_given_up_and_never_used_again(
    proxy: Proxy, url: str
) -> None:
    async with opened(through(proxy, url, timeout=1)) as fence:
        prepared = await claimed(fence)
        proxy.silent = True
        spoken = dict(proxy.spoken)
        with pytest.raises(LedgerUnavailable) as caught:
            await fence.prepare(asked(intent="charge:o2"))
        assert caught.value.ran is False
        with pytest.raises(LedgerUnavailable) as committing:
            await fence.commit(prepared, "paid")
        assert committing.value.ran is True
        assert committing.value.prepared == prepared
        assert committing.value.result == "paid"
        proxy.silent = False
        before = dict(proxy.spoken)
        assert (await fence.commit(prepared, "paid")).result == "paid"
        assert all(before[number] == proxy.spoken[number] for number in spoken)


async def test_an_unreachable_ledger_lets_nothing_run(proxy: Proxy, url: str) -> None:
    effects = []
    async with opened(through(proxy, url, timeout=2)) as fence:
        prepared = await claimed(fence, intent="charge:before")
        await proxy.stop()
        runs = (fence.run(asked(intent=f"i{n}"), effects.append, n) for n in range(CALLS))
        for error in await asyncio.gather(*runs, return_exceptions=True):
            assert isinstance(error, LedgerUnavailable)
            assert error.ran is False
            assert "Nothing ran" in str(error)
        assert effects == []
        with pytest.raises(LedgerUnavailable):
            await EffectFence.open(through(proxy, url))
        await proxy.start()
        assert (await fence.commit(prepared, "paid")).result == "paid"


async def test_a_claim_whose_caller_is_cancelled_is_released(proxy: Proxy, url: str) -> None:
    """At every instant of its way: before it is sent, on its way, and on its way back."""
    async with opened(through(proxy, url)) as fence:
        for number in range(24):
            task = asyncio.create_task(fence.prepare(asked(intent=f"charge:{number}")))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                await fence.release(task.result().prepared, "was not needed")
        await fence._shared.custody.drain(30)
        assert [record async for record in fence.intents()] == []
        assert isinstance(await fence.prepare(asked()), Fresh)
