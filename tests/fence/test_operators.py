"""The operator's words, what is shown to people, lifetimes and domains."""

from __future__ import annotations

import pytest

from effectfence import (
    CommitConflict,
    CommitStale,
    DomainRace,
    EffectFence,
    Fresh,
    HolderAlive,
    LeaseLost,
    NoSuchIntent,
    OutcomeUnknown,
    ReadSetEntry,
    Replay,
)
from tests.conftest import Clock, OpenFence, asked, claimed, words_of

WORD = {"reason": "found in the provider's log", "by": "ops@example.org"}


async def unknown(fence: EffectFence, intent: str = "charge:o1") -> None:
    await fence.abort(await claimed(fence, intent=intent), "socket closed")


# --- settle ---------------------------------------------------------------------------------------


async def test_settle_mints_the_certificate_that_duplicates_replay(fence: EffectFence) -> None:
    await unknown(fence)
    cert = await fence.settle("charge:o1", {"receipt": 1}, **WORD)
    assert cert.verify()
    assert (cert.result, cert.seq, cert.vector_clock) == ({"receipt": 1}, 1, {"billing": 1})
    assert await fence.prepare(asked()) == Replay(cert)
    head = (await fence.observe("order:o1")).heads["order:o1"]
    assert head is not None
    assert head.hash == cert.hash


async def test_a_settled_certificate_equals_the_one_the_holder_would_have_got() -> None:
    """Attempts differ in nothing that a certificate says."""
    facts = (ReadSetEntry(domain="stock", seq=0),)
    request = asked(read_set=facts, known_clock={"z": 2}, parent="a" * 64, args={"n": 2**70})
    one, two = EffectFence(), EffectFence()
    committed = await one.commit(await claimed(one, request), [1, 2])
    await two.abort(await claimed(two, request.model_copy()), "socket closed")
    assert await two.settle("charge:o1", [1, 2], **WORD) == committed


async def test_settle_and_clear_are_refused_while_the_holder_may_live(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=30)
    await claimed(fence)
    for call in (fence.settle("charge:o1", 1, **WORD), fence.clear("charge:o1", **WORD)):
        with pytest.raises(HolderAlive, match="force"):
            await call
    clock.advance(30)
    assert (await fence.settle("charge:o1", 1, **WORD)).verify()


async def test_forced_the_words_are_taken(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    assert (await fence.settle("charge:o1", 1, force=True, **WORD)).verify()
    assert (await fence.commit(ticket, 1)).verify(), "the holder says the same"
    other = await claimed(fence, intent="other")
    assert await fence.clear("other", force=True, **WORD)
    with pytest.raises(LeaseLost, match="cleared"):
        await fence.commit(other, 1)
    assert fence.stats().late_commits == 1


async def test_settling_what_is_done_is_a_repeated_commit(fence: EffectFence) -> None:
    cert = await fence.commit(await claimed(fence), 1)
    for force in (False, True):
        assert await fence.settle("charge:o1", 1, force=force, **WORD) == cert
        with pytest.raises(CommitConflict) as caught:
            await fence.settle("charge:o1", 2, force=force, **WORD)
        assert caught.value.cert == cert


async def test_a_word_about_one_attempt_is_not_taken_for_another(fence: EffectFence) -> None:
    """What an operator looked at was cleared by somebody else meanwhile, and run anew."""
    await unknown(fence)
    looked_at = await fence.lookup("charge:o1")
    assert looked_at is not None
    assert await fence.clear("charge:o1", **WORD, attempt=looked_at.attempt)
    await unknown(fence)
    for force in (False, True):
        for call in (fence.settle("charge:o1", 1, **WORD, attempt=1, force=force),
                     fence.clear("charge:o1", **WORD, attempt=1, force=force)):  # fmt: skip
            with pytest.raises(HolderAlive, match="in attempt 2 by now: the word is about att"):
                await call
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked())
    assert (await fence.settle("charge:o1", 1, **WORD, attempt=2)).result == 1
    with pytest.raises(HolderAlive, match="attempt 2 by now"):
        await fence.settle("charge:o1", 1, **WORD, attempt=1)


@pytest.mark.parametrize("attempt", [0, -1, 1.0, True, "1"])
async def test_an_attempt_is_a_number(fence: EffectFence, attempt: object) -> None:
    await unknown(fence)
    with pytest.raises(ValueError, match=r"attempt is .*1 or more"):
        await fence.clear("charge:o1", **WORD, attempt=attempt)  # type: ignore[arg-type]


async def test_settle_wants_json_and_a_record(fence: EffectFence) -> None:
    with pytest.raises(NoSuchIntent):
        await fence.settle("charge:o1", 1, **WORD)
    await unknown(fence)
    with pytest.raises(ValueError, match="result"):
        await fence.settle("charge:o1", object(), **WORD)
    small = EffectFence(fence.config.model_copy(update={"max_record_bytes": 10}))
    with pytest.raises(ValueError, match="10 bytes"):
        await small.settle("charge:o1", "x" * 20, **WORD)


async def test_a_stale_commit_can_be_settled_though_its_facts_moved(fence: EffectFence) -> None:
    ticket = await claimed(fence, read_set=(ReadSetEntry(domain="stock", seq=0),))
    await fence.reserve("stock", 0)
    with pytest.raises(CommitStale):
        await fence.commit(ticket, "ran")
    cert = await fence.settle("charge:o1", "ran", **WORD)
    assert await fence.commit(ticket, "ran") == cert


# --- clear ----------------------------------------------------------------------------------------


async def test_clear_makes_it_runnable_and_attempts_count_on(fence: EffectFence) -> None:
    first = await claimed(fence)
    await fence.abort(first, "socket closed")
    assert await fence.clear("charge:o1", **WORD) is True
    assert await fence.clear("charge:o1", **WORD) is False
    second = await claimed(fence)
    assert (second.attempt, second.idempotency_key) == (2, first.idempotency_key)
    with pytest.raises(LeaseLost):
        await fence.commit(first, 1)
    assert (await fence.commit(second, 2)).verify()


async def test_a_cleared_intent_may_become_another_action(fence: EffectFence) -> None:
    await unknown(fence)
    await fence.clear("charge:o1", **WORD)
    assert (await claimed(fence, args={"amount": 1}, domain="elsewhere")).attempt == 2


async def test_clearing_what_is_done_wants_force(fence: EffectFence) -> None:
    await fence.commit(await claimed(fence), 1)
    with pytest.raises(HolderAlive, match="it ran"):
        await fence.clear("charge:o1", **WORD)
    assert await fence.clear("charge:o1", force=True, **WORD)
    assert (await claimed(fence)).attempt == 2


async def test_clearing_nothing_is_no_error(fence: EffectFence) -> None:
    assert await fence.clear("never", **WORD) is False


@pytest.mark.parametrize("call", ["settle", "clear"])
@pytest.mark.parametrize(("by", "reason"), [("", "why"), ("ops", ""), ("o\0", "why")])
async def test_a_word_names_who_and_why(
    fence: EffectFence, call: str, by: str, reason: str
) -> None:
    await unknown(fence)
    word = {"by": by, "reason": reason}
    said = (
        fence.settle("charge:o1", 1, **word)
        if call == "settle"
        else fence.clear("charge:o1", **word)
    )
    with pytest.raises(ValueError, match=r"by|reason"):
        await said
    assert await words_of(fence, "charge:o1") == []


async def test_words_are_kept_with_who_why_and_whether_forced(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(history_ttl=1000)
    await unknown(fence)
    await fence.clear("charge:o1", **WORD)
    await claimed(fence)
    await fence.settle("charge:o1", 1, force=True, **WORD)
    kept = sorted(await words_of(fence, "charge:o1"), key=lambda word: word["seq"])
    assert [(word["word"], word["by"], word["reason"], word["forced"]) for word in kept] == [
        ("clear", WORD["by"], WORD["reason"], False),
        ("settle", WORD["by"], WORD["reason"], True),
    ]
    clock.advance(1000)
    assert await words_of(fence, "charge:o1") == []


# --- for people -----------------------------------------------------------------------------------


async def test_lookup_shows_every_state(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=30)
    assert await fence.lookup("charge:o1") is None
    ticket = await claimed(fence)
    clock.advance(10)
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert (record.state, record.agent, record.tool, record.attempt, record.seq) == (
        "in_flight",
        "billing",
        "charge",
        1,
        1,
    )
    assert (record.age_seconds, record.lease_seconds_left) == (10, 20)
    assert record.idempotency_key == ticket.idempotency_key
    assert record.started_at == ticket.started_ms / 1000
    clock.advance(20)
    shown = [await fence.lookup("charge:o1")]
    await fence.abort(ticket, "socket closed")
    shown.append(await fence.lookup("charge:o1"))
    await fence.clear("charge:o1", **WORD)
    shown.append(await fence.lookup("charge:o1"))
    cert = await fence.commit(await claimed(fence), 1)
    shown.append(await fence.lookup("charge:o1"))
    assert [record and record.state for record in shown] == [
        "expired",
        "unknown",
        "cleared",
        "done",
    ]
    assert [record and record.reason for record in shown] == [None, "socket closed", None, None]
    assert shown[-1] is not None
    assert shown[-1].cert == cert


async def test_intents_lists_all_or_those_in_one_state(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=30)
    await claimed(fence, intent="expired")
    clock.advance(30)
    await claimed(fence, intent="in_flight")
    await unknown(fence, "unknown")
    await fence.commit(await claimed(fence, intent="done"), 1)
    await unknown(fence, "cleared")
    await fence.clear("cleared", **WORD)
    everything = {record.intent: record.state async for record in fence.intents()}
    assert everything == {name: name for name in everything}
    assert len(everything) == 5
    for state in everything:
        assert [record.intent async for record in fence.intents(state)] == [state]
    with pytest.raises(ValueError, match="no such state"):
        _ = [record async for record in fence.intents("lost")]
    assert (await fence.intent_count(), await fence.domain_count()) == (5, 1)


async def test_listing_many_goes_through_pages(fence: EffectFence) -> None:
    for n in range(600):
        await claimed(fence, intent=f"i{n}")
    assert len({record.intent async for record in fence.intents()}) == 600


# --- lifetimes ------------------------------------------------------------------------------------


async def test_an_outcome_is_free_again_when_its_life_ends(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(result_ttl=100)
    first = await claimed(fence)
    await fence.commit(first, 1)
    clock.advance(99)
    assert isinstance(await fence.prepare(asked()), Replay)
    clock.advance(1)
    assert await fence.lookup("charge:o1") is None
    second = await claimed(fence)
    assert (second.attempt, second.seq) == (1, 2)
    assert second.idempotency_key != first.idempotency_key


async def test_a_life_is_fixed_when_the_outcome_is_recorded(
    open_fence: OpenFence, clock: Clock
) -> None:
    short, long = await open_fence(result_ttl=100), await open_fence(result_ttl=1000)
    await short.commit(await claimed(short), 1)
    await short.commit(await claimed(short, intent="own", result_ttl=500), 1)
    clock.advance(100)
    assert await long.lookup("charge:o1") is None
    assert await short.lookup("own") is not None


async def test_for_ever_is_for_ever(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(result_ttl=None)
    await fence.commit(await claimed(fence), 1)
    clock.advance(10**9)
    assert isinstance(await fence.prepare(asked()), Replay)


async def test_open_intents_never_expire(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=1, result_ttl=10, history_ttl=10)
    await claimed(fence, intent="held")
    await unknown(fence, "unknown")
    clock.advance(10**9)
    assert await fence.sweep() == 0
    for intent in ("held", "unknown"):
        with pytest.raises(OutcomeUnknown):
            await fence.prepare(asked(intent))


async def test_unknown_ttl_set_on_purpose_makes_it_runnable(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(unknown_ttl=50)
    await unknown(fence)
    clock.advance(50)
    assert isinstance(await fence.prepare(asked()), Fresh)


async def test_sweep_forgets_what_expired_and_says_how_many(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(result_ttl=100)
    for n in range(30):
        await fence.commit(await claimed(fence, intent=f"i{n}"), n)
    assert await fence.sweep() == 0
    clock.advance(100)
    assert await fence.sweep() == 30
    assert (await fence.intent_count(), await fence.domain_count()) == (0, 1)


# --- domains --------------------------------------------------------------------------------------


async def test_reserve_takes_the_next_number_or_loses(fence: EffectFence) -> None:
    assert await fence.current("d") == 0
    assert await fence.reserve("d", 0) == 1
    with pytest.raises(DomainRace) as caught:
        await fence.reserve("d", 0)
    assert (caught.value.expected, caught.value.actual, caught.value.ran) == (0, 1, False)
    assert await fence.reserve("d", 1) == 2
    assert await fence.current("d") == 2


async def test_an_evicted_domains_numbers_go_on_above_a_floor(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(result_ttl=100)
    assert await fence.evict_domain("never") is False
    await fence.commit(await claimed(fence), 1)
    with pytest.raises(HolderAlive, match="moved within result_ttl"):
        await fence.evict_domain("order:o1")
    clock.advance(100)
    assert await fence.evict_domain("order:o1") is True
    assert await fence.current("order:o1") == 0
    assert (await fence.observe("order:o1")).heads == {"order:o1": None}
    assert (await claimed(fence)).seq == 3, "one number went with the eviction itself"
    assert await fence.current("another") == 0
    assert await fence.reserve("another", 0) > 2, "the floor is everybody's"


@pytest.mark.parametrize("named", ["as its own", "in its read set"])
@pytest.mark.parametrize("state", ["in_flight", "unknown"])
async def test_a_domain_that_an_open_intent_names_is_not_evicted(
    open_fence: OpenFence, clock: Clock, named: str, state: str
) -> None:
    fence = await open_fence(result_ttl=100)
    await fence.reserve("stock", 0)
    if named == "as its own":
        ticket = await claimed(fence, domain="stock")
    else:
        ticket = await claimed(fence, read_set=(ReadSetEntry(domain="stock", seq=1),))
    if state == "unknown":
        await fence.abort(ticket, "socket closed")
    clock.advance(100)
    with pytest.raises(HolderAlive, match="open intent"):
        await fence.evict_domain("stock")
    assert (await fence.commit(ticket, 1)).verify()


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 1025])
async def test_a_domain_is_a_name(fence: EffectFence, name: str) -> None:
    for call in (fence.current(name), fence.reserve(name, 0), fence.evict_domain(name)):
        with pytest.raises(ValueError, match="domain"):
            await call
    with pytest.raises(ValueError, match="domain"):
        await fence.observe(name)
