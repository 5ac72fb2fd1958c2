"""Admission: the gates in their order, waiting, counting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from effectfence import (
    CausalConflict,
    DomainRace,
    EffectFence,
    FenceConfig,
    Fresh,
    IntentConflict,
    IntentInFlight,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    ReadSetEntry,
    ReadSetStale,
    Refused,
    Replay,
)
from effectfence.stores.contract import Applied, Change, View
from effectfence.stores.memory import MemoryStore
from tests.conftest import Clock, OpenFence, asked, claimed


async def test_the_first_is_fresh_and_its_duplicate_replays_the_certificate(
    fence: EffectFence,
) -> None:
    ticket = await claimed(fence)
    cert = await fence.commit(ticket, {"receipt": "r-1"})
    assert cert.verify()
    assert await fence.prepare(asked()) == Replay(cert)


async def test_a_duplicate_replays_even_when_its_read_set_is_stale_by_now(
    fence: EffectFence,
) -> None:
    facts = (ReadSetEntry(domain="stock", seq=0), ReadSetEntry(domain="order:o1", seq=0))
    ticket = await claimed(fence, read_set=facts)
    cert = await fence.commit(ticket, None)
    await fence.reserve("stock", 0)
    assert await fence.prepare(asked(read_set=facts)) == Replay(cert)


@pytest.mark.parametrize("state", ["in_flight", "unknown", "done"])
@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({"args": {"amount": 1}}, ("args",)),
        ({"tool": "refund"}, ("tool",)),
        ({"domain": "order:o2"}, ("domain",)),
    ],
)
async def test_the_same_intent_for_another_action_is_a_conflict(
    fence: EffectFence, state: str, fields: dict[str, Any], differs: tuple[str, ...]
) -> None:
    ticket = await claimed(fence)
    if state == "unknown":
        await fence.abort(ticket, "socket closed")
    elif state == "done":
        await fence.commit(ticket, None)
    with pytest.raises(IntentConflict) as caught:
        await fence.prepare(asked(**fields))
    assert caught.value.differs == differs
    assert caught.value.ran is False


async def test_another_agent_with_the_same_action_is_a_duplicate(fence: EffectFence) -> None:
    cert = await fence.commit(await claimed(fence), 1)
    assert await fence.prepare(asked(agent="retrier")) == Replay(cert)


async def test_in_flight_says_who_holds_it_and_until_when(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=30)
    await claimed(fence)
    clock.advance(10)
    with pytest.raises(IntentInFlight) as caught:
        await fence.prepare(asked(agent="other"))
    assert caught.value.agent == "billing"
    assert caught.value.seconds_left == pytest.approx(20)


async def test_an_expired_lease_is_fenced_and_stays_so(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=30)
    await claimed(fence)
    clock.advance(30)
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match=r"lease ran out.*takeover") as caught:
            await fence.prepare(asked())
        assert caught.value.ran is None
        clock.advance(10_000_000)


@pytest.mark.parametrize("set_for", ["the fence", "one request"])
async def test_under_takeover_an_expired_lease_is_claimed_as_the_next_attempt(
    open_fence: OpenFence, clock: Clock, set_for: str
) -> None:
    config = {"on_lease_expiry": "takeover"} if set_for == "the fence" else {}
    fence = await open_fence(lease_ttl=30, **config)
    first = await claimed(fence)
    clock.advance(30)
    request = asked(on_lease_expiry="takeover") if set_for == "one request" else asked()
    second = await claimed(fence, request)
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.idempotency_key == first.idempotency_key
    assert second.token != first.token
    assert second.seq > first.seq


async def test_a_request_can_ask_for_the_fence_where_takeover_is_the_default(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=30, on_lease_expiry="takeover")
    await claimed(fence)
    clock.advance(30)
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked(on_lease_expiry="fence"))


async def test_a_moved_fact_refuses(fence: EffectFence) -> None:
    await fence.reserve("stock", 0)
    with pytest.raises(ReadSetStale) as caught:
        await fence.prepare(asked(read_set=(ReadSetEntry(domain="stock", seq=0),)))
    assert (caught.value.domain, caught.value.expected, caught.value.actual) == ("stock", 0, 1)


async def test_a_request_that_names_its_own_domain_loses_the_race_for_it(
    fence: EffectFence,
) -> None:
    own = (ReadSetEntry(domain="order:o1", seq=0),)
    await claimed(fence, intent="first", read_set=own)
    with pytest.raises(DomainRace) as caught:
        await fence.prepare(asked("second", read_set=own))
    assert (caught.value.domain, caught.value.expected, caught.value.actual) == ("order:o1", 0, 1)


async def test_siblings_that_name_no_number_never_refuse_each_other(fence: EffectFence) -> None:
    tickets = await asyncio.gather(*(claimed(fence, intent=f"i{n}") for n in range(50)))
    assert sorted(ticket.seq for ticket in tickets) == list(range(1, 51))


async def test_the_gates_stand_in_their_order(open_fence: OpenFence) -> None:
    """Intent, then read set, then causality, then domain: the first that refuses answers."""
    fence = await open_fence(causal="strict")
    await fence.commit(await claimed(fence, intent="before"), None)
    await fence.reserve("stock", 0)
    await claimed(fence, intent="taken", known_clock={"billing": 1})
    stale = ReadSetEntry(domain="stock", seq=0)
    fresh = ReadSetEntry(domain="stock", seq=1)
    own = ReadSetEntry(domain="order:o1", seq=0)
    cases: list[tuple[type[Refused], dict[str, Any]]] = [
        (IntentConflict, {"intent": "taken", "args": {}, "read_set": (stale, own)}),
        (IntentInFlight, {"intent": "taken", "read_set": (stale, own)}),
        (ReadSetStale, {"intent": "new", "read_set": (stale, own)}),
        (CausalConflict, {"intent": "new", "read_set": (fresh, own)}),
    ]
    for kind, fields in cases:
        with pytest.raises(kind):
            await fence.prepare(asked(**fields))
    relaxed = await open_fence()
    with pytest.raises(DomainRace):
        await relaxed.prepare(asked("new", read_set=(fresh, own)))


async def test_a_refused_attempt_leaves_nothing_behind(fence: EffectFence) -> None:
    await fence.reserve("stock", 0)
    before = (await fence.intent_count(), await fence.domain_count())
    for facts in (
        (ReadSetEntry(domain="stock", seq=0),),
        (ReadSetEntry(domain="order:o1", seq=5),),
        (ReadSetEntry(domain="nowhere", seq=5),),
    ):
        with pytest.raises(Refused):
            await fence.prepare(asked(read_set=facts))
    assert (await fence.intent_count(), await fence.domain_count()) == before
    assert await fence.current("order:o1") == 0
    assert await fence.lookup("charge:o1") is None


async def test_exactly_one_counter_counts_each_attempt(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=30, causal="strict")
    ticket = await claimed(fence)
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("refused_inflight", {}),
        ("refused_conflict", {"args": {}}),
        ("refused_stale", {"intent": "x", "read_set": (ReadSetEntry(domain="s", seq=3),)}),
        ("refused_causal", {"intent": "x"}),
    ]
    total = 1
    for counter, fields in attempts:
        with pytest.raises(Refused):
            await fence.prepare(asked(**fields))
        total += 1
        stats = fence.stats()
        assert (getattr(stats, counter), stats.total) == (1, total), counter
    await fence.commit(ticket, 1)
    await fence.prepare(asked())
    await claimed(fence, intent="y", domain="elsewhere")
    clock.advance(30)
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked("y", domain="elsewhere"))
    with pytest.raises(DomainRace):
        await fence.prepare(
            asked("z", domain="quiet", read_set=(ReadSetEntry(domain="quiet", seq=9),))
        )
    stats = fence.stats()
    assert (stats.admitted, stats.replayed, stats.refused_unknown, stats.refused_race) == (
        2,
        1,
        1,
        1,
    )
    assert stats.total == 9
    assert stats.prevented == stats.total - stats.admitted
    assert stats.log_line() == (
        "effectfence since boot: admitted=2 replayed=1 refused(stale=1 race=1 in-flight=1 "
        "unknown=1 conflict=1 causal=1) total=9 prevented=7"
    )


async def test_refusals_at_commit_count_outside_the_total(fence: EffectFence) -> None:
    facts = (ReadSetEntry(domain="stock", seq=0),)
    ticket = await claimed(fence, read_set=facts)
    await fence.reserve("stock", 0)
    with pytest.raises(Exception, match="moved"):
        await fence.commit(ticket, 1)
    stats = fence.stats()
    assert (stats.commit_refused, stats.total) == (1, 1)


# --- strict causality and observe -----------------------------------------------------------------


async def test_strict_causality_wants_the_head_in_the_past(open_fence: OpenFence) -> None:
    fence = await open_fence(causal="strict")
    await fence.commit(await claimed(fence, intent="scale-up", agent="autoscaler"), None)
    with pytest.raises(CausalConflict):
        await fence.prepare(asked("scale-down", agent="optimizer"))
    seen = await fence.observe("order:o1")
    assert await claimed(fence, intent="scale-down", agent="optimizer", known_clock=seen.clock)


@pytest.mark.parametrize("state", ["in_flight", "unknown"])
async def test_strict_causality_waits_for_what_is_open_above_the_head(
    open_fence: OpenFence, state: str
) -> None:
    fence = await open_fence(causal="strict")
    ticket = await claimed(fence, intent="first")
    if state == "unknown":
        await fence.abort(ticket, "socket closed")
    with pytest.raises(CausalConflict, match=f"seq {ticket.seq} is in flight or unknown"):
        await fence.prepare(asked("second"))
    await fence.commit(ticket, None)
    seen = await fence.observe("order:o1")
    assert await claimed(fence, intent="second", known_clock=seen.clock)


async def test_observe_gives_what_the_next_request_wants(fence: EffectFence) -> None:
    cert = await fence.commit(await claimed(fence, agent="a"), None)
    other = await fence.commit(await claimed(fence, intent="i2", domain="stock", agent="b"), None)
    await fence.reserve("nobody", 0)
    seen = await fence.observe("order:o1", "stock", "nobody", "never")
    assert [(entry.domain, entry.seq) for entry in seen.read_set] == [
        ("order:o1", 1),
        ("stock", 1),
        ("nobody", 1),
        ("never", 0),
    ]
    assert seen.clock == {"a": 1, "b": 1}
    assert {domain: head and head.hash for domain, head in seen.heads.items()} == {
        "order:o1": cert.hash,
        "stock": other.hash,
        "nobody": None,
        "never": None,
    }
    head = seen.heads["order:o1"]
    assert head is not None
    assert (head.seq, head.clock) == (1, {"a": 1})
    ticket = await claimed(fence, intent="i3", read_set=seen.read_set, known_clock=seen.clock)
    assert ticket.vector_clock == {"a": 1, "b": 1, "billing": 1}


async def test_of_two_that_decided_on_the_same_observation_one_is_refused(
    fence: EffectFence,
) -> None:
    seen = await fence.observe("order:o1")
    up = asked("up", read_set=seen.read_set, known_clock=seen.clock, agent="autoscaler")
    down = asked("down", read_set=seen.read_set, known_clock=seen.clock, agent="optimizer")
    await fence.commit(await claimed(fence, up), "scaled")
    with pytest.raises(DomainRace):
        await fence.prepare(down)


# --- waiting --------------------------------------------------------------------------------------


async def waits_for(fence: EffectFence, waiters: int) -> None:
    """Until so many callers wait for an outcome."""
    while True:
        store: Any = fence._shared.store
        watched = (
            sum(map(len, store._watchers.keys.values()))
            if hasattr(store, "_watchers")
            else sum(map(len, store._watched.values()))
        )
        if watched >= waiters:
            return
        await asyncio.sleep(0)


async def test_a_duplicate_that_waits_gets_the_certificate(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    waiting = [asyncio.create_task(fence.prepare(asked(), wait_seconds=60)) for _ in range(5)]
    await waits_for(fence, 5)
    cert = await fence.commit(ticket, "once")
    assert await asyncio.gather(*waiting) == [Replay(cert)] * 5
    stats = fence.stats()
    assert (stats.admitted, stats.replayed, stats.total) == (1, 5, 6)


async def test_a_waiter_looks_again_only_when_something_moved(fence: EffectFence) -> None:
    """Woken, not polling: while nothing happens, the store is not asked."""
    ticket = await claimed(fence)
    waiting = asyncio.create_task(fence.prepare(asked(), wait_seconds=60))
    await waits_for(fence, 1)
    loads = 0
    load = fence._shared.store.load

    async def counted(keys: Any) -> Any:
        nonlocal loads
        loads += 1
        return await load(keys)

    fence._shared.store.load = counted  # type: ignore[method-assign]
    for _ in range(200):
        await asyncio.sleep(0)
    assert loads == 0
    del fence._shared.store.load
    await fence.commit(ticket, 1)
    assert isinstance(await waiting, Replay)


async def test_a_release_lets_exactly_one_waiter_through(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    waiting = [asyncio.create_task(fence.prepare(asked(), wait_seconds=60)) for _ in range(4)]
    await waits_for(fence, 4)
    await fence.release(ticket, "connection refused")
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (admission,) = [task.result() for task in done]
    assert isinstance(admission, Fresh)
    cert = await fence.commit(admission.prepared, "second try")
    assert await asyncio.gather(*pending) == [Replay(cert)] * 3


async def test_a_waiter_is_told_that_the_outcome_is_unknown(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    waiting = asyncio.create_task(fence.prepare(asked(), wait_seconds=60))
    await waits_for(fence, 1)
    await fence.abort(ticket, "socket closed")
    with pytest.raises(OutcomeUnknown, match="socket closed"):
        await waiting


@pytest.mark.parametrize("policy", ["fence", "takeover"])
async def test_a_lease_that_ends_while_somebody_waits_is_noticed(policy: str) -> None:
    async with EffectFence.open("memory:") as plain:
        store = plain._shared.store
        fence = EffectFence(FenceConfig(lease_ttl=0.05, on_lease_expiry=policy), store=store)
        await claimed(fence)
        if policy == "takeover":
            admission = await fence.prepare(asked(), wait_seconds=60)
            assert isinstance(admission, Fresh)
            assert admission.prepared.attempt == 2
        else:
            with pytest.raises(OutcomeUnknown):
                await fence.prepare(asked(), wait_seconds=60)


async def test_a_renewed_lease_keeps_the_waiter_waiting(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=0.01)
    ticket = await claimed(fence)
    waiting = asyncio.create_task(fence.prepare(asked(), wait_seconds=60))
    for _ in range(5):
        await waits_for(fence, 1)
        clock.advance(0.009)
        await fence.heartbeat(ticket)
    assert not waiting.done()
    cert = await fence.commit(ticket, 1)
    assert await waiting == Replay(cert)


async def test_patience_ends_with_what_is_known_then(fence: EffectFence) -> None:
    await claimed(fence)
    with pytest.raises(IntentInFlight):
        await fence.prepare(asked(), wait_seconds=0.001)
    assert fence.stats().total == 2


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_a_patience_that_is_no_duration_is_refused_at_once(
    fence: EffectFence, seconds: float
) -> None:
    with pytest.raises(ValueError, match="wait_seconds"):
        await fence.prepare(asked(), wait_seconds=seconds)
    assert await fence.lookup("charge:o1") is None


async def test_waiting_ends_when_the_fence_is_closed(open_fence: OpenFence) -> None:
    holder, other = await open_fence(), await open_fence()
    ticket = await claimed(holder)
    waiting = asyncio.create_task(other.prepare(asked(), wait_seconds=60))
    await waits_for(other, 1)
    await other.aclose(drain_seconds=0)
    await holder.release(ticket, "connection refused")
    with pytest.raises(LedgerUnavailable) as caught:
        await waiting
    assert caught.value.ran is False
    assert await holder.lookup("charge:o1") is None


class ReleasedInBetween(MemoryStore):
    """When an expired lease is about to be written off, its holder's release comes first."""

    async def swap(self, change: Change) -> Applied | View:
        if any((put.tag or "").startswith("u:") for put in change.puts):
            ticket, self.ticket = self.ticket, None
            if ticket is not None:
                await EffectFence(store=self).release(ticket, "connection refused")
        return await super().swap(change)

    ticket: PreparedEffect | None = None


async def test_a_release_that_comes_between_look_and_write_frees_the_intent(clock: Clock) -> None:
    store = ReleasedInBetween(clock)
    fence = EffectFence(FenceConfig(lease_ttl=30), store=store)
    facts = (ReadSetEntry(domain="stock", seq=0),)
    store.ticket = await claimed(fence, read_set=facts)
    clock.advance(30)
    admission = await fence.prepare(asked(read_set=facts))
    assert isinstance(admission, Fresh)
    assert admission.prepared.attempt == 1


# --- scopes ---------------------------------------------------------------------------------------


async def test_scopes_have_intents_and_domains_of_their_own(fence: EffectFence) -> None:
    views = [fence, fence.scoped("a"), fence.scoped("b"), fence.scoped("a").scoped("b")]
    certs = [await view.commit(await claimed(view), n) for n, view in enumerate(views)]
    assert [cert.seq for cert in certs] == [1, 1, 1, 1]
    for view, cert in zip(views, certs, strict=True):
        assert await view.prepare(asked()) == Replay(cert)
        assert await view.current("order:o1") == 1
        assert [record.cert async for record in view.intents()] == [cert]


@pytest.mark.parametrize(
    ("left", "right"),
    [(("a/b",), ("a", "b")), (("a@b",), ("a", "b")), (("a%2Fb",), ("a/b",)), (("a",), ("a ",))],
)
async def test_no_scope_reaches_into_another(
    fence: EffectFence, left: tuple[str, ...], right: tuple[str, ...]
) -> None:
    one = two = fence
    for name in left:
        one = one.scoped(name)
    for name in right:
        two = two.scoped(name)
    await claimed(one)
    assert await two.lookup("charge:o1") is None


async def test_an_unscoped_name_cannot_reach_into_a_scope(fence: EffectFence) -> None:
    await claimed(fence.scoped("a"), intent="x")
    for name in ("@a/x", "a/x", "/x"):
        assert await fence.lookup(name) is None


@pytest.mark.parametrize("scope", ["", "a\0b", "\ud800", "x" * 1025])
def test_a_scope_is_a_name(scope: str) -> None:
    with pytest.raises(ValueError, match="scope"):
        EffectFence().scoped(scope)
