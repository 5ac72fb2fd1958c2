"""Reporting back: commit, abort, release, heartbeat, and tickets that are not what they were."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from effectfence import (
    CommitConflict,
    CommitStale,
    EffectCert,
    EffectFence,
    Fresh,
    InvalidTicket,
    LeaseLost,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    ReadSetEntry,
    Replay,
)
from effectfence.stores.contract import Change
from tests.conftest import Clock, OpenFence, asked, claimed, words_of

STOCK = (ReadSetEntry(domain="stock", seq=0),)


async def state_of(fence: EffectFence, intent: str = "charge:o1") -> str:
    record = await fence.lookup(intent)
    return "absent" if record is None else record.state


# --- commit ---------------------------------------------------------------------------------------


async def test_a_certificate_says_what_ran(fence: EffectFence) -> None:
    parent = (await fence.commit(await claimed(fence, intent="before"), None)).hash
    seen = await fence.observe("order:o1")
    ticket = await claimed(
        fence, read_set=seen.read_set, known_clock=seen.clock, parent=parent, agent="b"
    )
    cert = await fence.commit(ticket, {"receipt": [1, 2]})
    assert cert.verify()
    assert cert.model_dump(mode="json", exclude={"hash"}) == {
        "intent": "charge:o1",
        "parent": parent,
        "domain": "order:o1",
        "seq": 2,
        "tool": "charge",
        "args": {"amount": 4900},
        "result": {"receipt": [1, 2]},
        "vector_clock": {"billing": 1, "b": 1},
        "read_set": [{"domain": "order:o1", "seq": 1}],
        "agent": "b",
    }


async def test_the_same_commit_gets_the_same_certificate(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    certs = [await fence.commit(ticket, {"a": 1, "b": 2.0}) for _ in range(3)]
    certs.append(await fence.commit(ticket, {"b": 2, "a": 1}))
    assert certs == [certs[0]] * 4


async def test_another_result_is_a_conflict_and_changes_nothing(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    cert = await fence.commit(ticket, 1)
    with pytest.raises(CommitConflict) as caught:
        await fence.commit(ticket, 2)
    assert (caught.value.cert, caught.value.result, caught.value.ran) == (cert, 2, True)
    assert await fence.prepare(asked()) == Replay(cert)


async def test_a_commit_on_moved_facts_is_refused_for_good_and_not_runnable(
    fence: EffectFence,
) -> None:
    ticket = await claimed(fence, read_set=STOCK)
    await fence.reserve("stock", 0)
    for _ in range(2):
        with pytest.raises(CommitStale) as caught:
            await fence.commit(ticket, "ran")
        error = caught.value
        assert (error.domain, error.expected, error.actual) == ("stock", 0, 1)
        assert (error.ran, error.result) == (True, "ran")
    with pytest.raises(OutcomeUnknown, match="it ran"):
        await fence.prepare(asked(read_set=STOCK))
    with pytest.raises(OutcomeUnknown, match="it ran"):
        await fence.release(ticket, "I take it back")
    assert await state_of(fence) == "unknown"


async def test_a_commits_own_domain_may_move_on(fence: EffectFence) -> None:
    own = (ReadSetEntry(domain="order:o1", seq=0),)
    ticket = await claimed(fence, read_set=own)
    await fence.reserve("order:o1", 1)
    assert (await fence.commit(ticket, None)).seq == 1


async def test_a_holder_whose_lease_expired_unreplaced_may_commit(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=1)
    ticket = await claimed(fence)
    clock.advance(1_000)
    cert = await fence.commit(ticket, "late but alone")
    assert await fence.prepare(asked()) == Replay(cert)


@pytest.mark.parametrize("found", ["expired", "aborted"])
async def test_in_unknown_the_true_holder_may_still_commit(
    open_fence: OpenFence, clock: Clock, found: str
) -> None:
    fence = await open_fence(lease_ttl=1)
    ticket = await claimed(fence)
    if found == "aborted":
        await fence.abort(ticket, "socket closed")
    else:
        clock.advance(1)
        with pytest.raises(OutcomeUnknown):
            await fence.prepare(asked())
    cert = await fence.commit(ticket, "it did run")
    assert await fence.prepare(asked()) == Replay(cert)


async def test_a_commit_from_unknown_checks_the_facts_still(fence: EffectFence) -> None:
    ticket = await claimed(fence, read_set=STOCK)
    await fence.abort(ticket, "socket closed")
    await fence.reserve("stock", 0)
    with pytest.raises(CommitStale):
        await fence.commit(ticket, 1)


async def test_in_unknown_the_true_holder_may_release(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    await fence.abort(ticket, "socket closed")
    await fence.release(ticket, "the provider says it never came")
    assert await state_of(fence) == "absent"


async def test_in_unknown_abort_and_heartbeat_change_nothing(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    await fence.abort(ticket, "socket closed")
    before = await fence.lookup("charge:o1")
    for call in (fence.abort(ticket, "again"), fence.heartbeat(ticket)):
        with pytest.raises(OutcomeUnknown, match="socket closed"):
            await call
    assert await fence.lookup("charge:o1") == before


async def test_a_replaced_holders_commit_is_refused_kept_and_counted_once(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=1, on_lease_expiry="takeover")
    first = await claimed(fence)
    clock.advance(1)
    second = await claimed(fence)
    cert = await fence.commit(second, "second")
    for _ in range(3):
        with pytest.raises(LeaseLost, match="replaced") as caught:
            await fence.commit(first, "first")
        assert (caught.value.ran, caught.value.result) == (True, "first")
    assert await fence.prepare(asked()) == Replay(cert)
    assert fence.stats().late_commits == 1
    assert [word["word"] for word in await words_of(fence, "charge:o1")] == ["late commit"]


async def test_a_head_never_moves_down(fence: EffectFence) -> None:
    first, second = await claimed(fence, intent="i1"), await claimed(fence, intent="i2")
    later = await fence.commit(second, None)
    await fence.commit(first, None)
    head = (await fence.observe("order:o1")).heads["order:o1"]
    assert head is not None
    assert (head.seq, head.hash) == (2, later.hash)


class Opaque:
    def __repr__(self) -> str:
        return "never shown"


class Explosive:
    def __iter__(self) -> Any:
        raise RuntimeError("nobody can read me")


@pytest.mark.parametrize(
    "result",
    [
        Opaque(),
        pytest.param(Explosive(), id="explosive"),
        {"rows": {1, 2}},
        b"bytes",
        float("nan"),
        "x" * 300_000,
        "\ud800",
        {"\ud800": 1},
        {"deep": json.loads("[" * 70 + "]" * 70)},
    ],
    ids=repr,
)
async def test_a_result_that_cannot_be_recorded_never_loses_that_it_ran(
    open_fence: OpenFence, result: Any
) -> None:
    fence = await open_fence(max_record_bytes=200_000)
    ticket = await claimed(fence)
    cert = await fence.commit(ticket, result)
    assert not cert.result_recorded
    assert cert.verify()
    assert "never shown" not in str(cert.result)
    assert await fence.commit(ticket, result) == cert
    assert await fence.prepare(asked()) == Replay(cert)


# --- abort and release ----------------------------------------------------------------------------


async def test_abort_says_that_nobody_knows(fence: EffectFence) -> None:
    await fence.abort(await claimed(fence), "socket closed")
    with pytest.raises(OutcomeUnknown, match="socket closed") as caught:
        await fence.prepare(asked())
    assert caught.value.ran is None
    assert "settle" in str(caught.value)
    assert "clear" in str(caught.value)


async def test_release_frees_the_first_attempt_with_a_new_key(fence: EffectFence) -> None:
    first = await claimed(fence)
    await fence.release(first, "connection refused")
    second = await claimed(fence)
    assert second.attempt == 1
    assert second.idempotency_key != first.idempotency_key
    (word,) = await words_of(fence, "charge:o1")
    assert (word["word"], word["by"], word["reason"]) == (
        "release",
        "billing",
        "connection refused",
    )


@pytest.mark.parametrize("through", ["takeover", "clear"])
async def test_release_of_a_later_attempt_is_unknown_since_an_earlier_may_have_fired(
    open_fence: OpenFence, clock: Clock, through: str
) -> None:
    fence = await open_fence(lease_ttl=1, on_lease_expiry="takeover")
    first = await claimed(fence)
    clock.advance(1)
    if through == "clear":
        await fence.clear("charge:o1", reason="looked", by="ops")
    second = await claimed(fence)
    assert (second.attempt, second.idempotency_key) == (2, first.idempotency_key)
    await fence.release(second, "connection refused")
    with pytest.raises(OutcomeUnknown, match="earlier"):
        await fence.prepare(asked())


@pytest.mark.parametrize("reason", ["", "x" * 5000, "\ud800", "é" * 3000, "a\0b"])
async def test_no_reason_is_too_odd_to_record_an_outcome(fence: EffectFence, reason: str) -> None:
    await fence.abort(await claimed(fence), reason)
    assert await state_of(fence) == "unknown"
    await fence.release(await claimed(fence, intent="other"), reason)
    assert await state_of(fence, "other") == "absent"


# --- heartbeat ------------------------------------------------------------------------------------


async def test_a_heartbeat_renews_from_now(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=30)
    ticket = await claimed(fence)
    clock.advance(20)
    end = await fence.heartbeat(ticket)
    assert end == pytest.approx(time.time() + 30, abs=20)
    clock.advance(29)
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert (record.state, record.lease_seconds_left) == ("in_flight", pytest.approx(1))


async def test_max_hold_ends_the_renewals(open_fence: OpenFence, clock: Clock) -> None:
    fence = await open_fence(lease_ttl=30, max_hold=50)
    ticket = await claimed(fence)
    clock.advance(25)
    await fence.heartbeat(ticket)
    clock.advance(24)
    await fence.heartbeat(ticket)
    clock.advance(1)
    with pytest.raises(LeaseLost, match="max_hold"):
        await fence.heartbeat(ticket)
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked())


# --- tickets --------------------------------------------------------------------------------------


def altered(ticket: PreparedEffect, **fields: Any) -> PreparedEffect:
    return PreparedEffect.model_validate({**ticket.model_dump(mode="json"), **fields})


def altered_request(ticket: PreparedEffect, **fields: Any) -> PreparedEffect:
    dumped = ticket.model_dump(mode="json")
    return PreparedEffect.model_validate({**dumped, "request": {**dumped["request"], **fields}})


ALTERATIONS: dict[str, Callable[[PreparedEffect], PreparedEffect]] = {
    "seq": lambda t: altered(t, seq=t.seq + 1),
    "vector_clock": lambda t: altered(t, vector_clock={"billing": 7}),
    "attempt": lambda t: altered(t, attempt=t.attempt + 1),
    "token": lambda t: altered(t, token=t.token[:32] + "0" * 32),
    "the ledger's epoch": lambda t: altered(t, token="0" * 64),
    "idempotency_key": lambda t: altered(t, idempotency_key="mine"),
    "started_ms": lambda t: altered(t, started_ms=t.started_ms + 1),
    "tool": lambda t: altered_request(t, tool="refund"),
    "args": lambda t: altered_request(t, args={"amount": 1}),
    "agent": lambda t: altered_request(t, agent="mallory"),
    "domain": lambda t: altered_request(t, domain="order:o2"),
    "read_set": lambda t: altered_request(t, read_set=[]),
    "parent": lambda t: altered_request(t, parent="0" * 64),
    "known_clock": lambda t: altered_request(t, known_clock={"x": 1}),
}


@pytest.mark.parametrize("field", ALTERATIONS)
async def test_a_ticket_with_an_altered_field_is_invalid_and_changes_nothing(
    fence: EffectFence, field: str
) -> None:
    ticket = await claimed(fence, read_set=STOCK)
    forged = ALTERATIONS[field](ticket)
    before = await fence.lookup("charge:o1")
    for call in (
        fence.commit(forged, 1),
        fence.abort(forged, "why"),
        fence.release(forged, "why"),
        fence.heartbeat(forged),
    ):
        with pytest.raises(InvalidTicket):
            await call
    assert await fence.lookup("charge:o1") == before
    assert fence.stats().late_commits == 0
    assert (await fence.commit(ticket, 1)).verify()


async def test_a_ticket_for_another_intent_has_lost(fence: EffectFence) -> None:
    forged = altered_request(await claimed(fence), intent="charge:o2")
    with pytest.raises(LeaseLost, match="nothing is recorded"):
        await fence.commit(forged, 1)


async def test_a_ticket_of_another_ledger_is_invalid(fence: EffectFence) -> None:
    ticket = await claimed(EffectFence())
    await claimed(fence)
    with pytest.raises(InvalidTicket, match="another ledger"):
        await fence.commit(ticket, 1)


async def test_a_ticket_of_another_scope_has_lost(fence: EffectFence) -> None:
    ticket = await claimed(fence.scoped("a"))
    with pytest.raises(LeaseLost):
        await fence.commit(ticket, 1)
    assert (await fence.scoped("a").commit(ticket, 1)).verify()


async def test_what_is_no_ticket_is_a_type_error(fence: EffectFence) -> None:
    for call in (fence.commit, fence.abort, fence.release):
        with pytest.raises(TypeError, match="PreparedEffect"):
            await call({"token": "x"}, "y")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="EffectRequest"):
        await fence.prepare({"intent": "x"})  # type: ignore[arg-type]


async def test_a_ticket_travels_as_json_and_comes_back(open_fence: OpenFence) -> None:
    """Prepared by one server, committed by another that never saw the request."""
    one, two = await open_fence(), await open_fence()
    ticket = await claimed(
        one,
        args={"n": 2**70, "f": 1e21, "text": "é\u2028", "none": None},
        read_set=STOCK,
        known_clock={"z": 3},
        ignore=("secret",),
    )
    back = PreparedEffect.model_validate(json.loads(json.dumps(ticket.model_dump(mode="json"))))
    assert back == ticket
    assert PreparedEffect.model_validate_json(ticket.model_dump_json()) == ticket
    cert = await two.commit(back, {"big": 2**70})
    again = EffectCert.model_validate(json.loads(json.dumps(cert.model_dump(mode="json"))))
    assert again == cert
    assert again.verify()
    assert not again.model_copy(update={"result": 1}).verify()


async def test_gone_and_replaced_records_are_lease_lost(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    await fence.release(ticket, "connection refused")
    with pytest.raises(LeaseLost, match="nothing is recorded"):
        await fence.heartbeat(ticket)
    await claimed(fence)
    for call in (
        fence.commit(ticket, 1),
        fence.abort(ticket, "x"),
        fence.release(ticket, "x"),
        fence.heartbeat(ticket),
    ):
        with pytest.raises(LeaseLost, match="replaced"):
            await call


async def test_once_committed_only_the_same_commit_speaks(fence: EffectFence) -> None:
    ticket = await claimed(fence)
    await fence.commit(ticket, 1)
    for call in (fence.abort(ticket, "x"), fence.release(ticket, "x"), fence.heartbeat(ticket)):
        with pytest.raises(LeaseLost, match="committed already"):
            await call


# --- a ledger that can't be written ---------------------------------------------------------------


def failing(fence: EffectFence, times: int, *, ran: bool | None = False) -> None:
    """The next swaps of this fence's store can't be written."""
    store = fence._shared.store
    swap, left = store.swap, [times]

    async def fails(change: Change) -> Any:
        if left[0] == 0:
            return await swap(change)
        left[0] -= 1
        raise LedgerUnavailable(ledger=store.name, reason="no space left on device", ran=ran)

    store.swap = fails  # type: ignore[method-assign]


async def test_a_commit_that_cannot_be_written_is_retried(
    fence: EffectFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effectfence.fence._COMMIT_RETRY_SECONDS", (0.0, 0.0, 0.0))
    ticket = await claimed(fence)
    failing(fence, 3)
    assert (await fence.commit(ticket, 1)).verify()


async def test_after_its_bound_the_caller_gets_what_it_needs_to_commit_later(
    fence: EffectFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effectfence.fence._COMMIT_RETRY_SECONDS", (0.0, 0.0, 0.0))
    ticket = await claimed(fence)
    failing(fence, 4)
    with pytest.raises(LedgerUnavailable, match="The effect ran") as caught:
        await fence.commit(ticket, {"receipt": 1})
    error = caught.value
    assert (error.ran, error.prepared, error.result) == (True, ticket, {"receipt": 1})
    assert await state_of(fence) == "in_flight"
    assert (await fence.commit(error.prepared, error.result)).verify()


async def test_a_claim_that_cannot_be_written_is_refused_before_the_effect(
    fence: EffectFence,
) -> None:
    failing(fence, 1)
    with pytest.raises(LedgerUnavailable) as caught:
        await fence.prepare(asked())
    assert caught.value.ran is False
    assert await claimed(fence)


async def test_a_claim_whose_writing_is_in_doubt_is_released_behind_the_caller(
    fence: EffectFence,
) -> None:
    store = fence._shared.store
    swap = store.swap

    async def applied_but_unheard(change: Change) -> Any:
        store.swap = swap  # type: ignore[method-assign]
        await swap(change)
        raise LedgerUnavailable(ledger=store.name, reason="connection lost", ran=None)

    store.swap = applied_but_unheard  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailable) as caught:
        await fence.prepare(asked())
    assert caught.value.ran is False, "no ticket was handed out, so nothing ran"
    await asyncio.gather(*fence._shared.custody.owned)
    assert isinstance(await fence.prepare(asked()), Fresh)


@pytest.mark.parametrize("call", ["prepare", "heartbeat", "abort"])
async def test_contention_beyond_the_bound_says_so(fence: EffectFence, call: str) -> None:
    """Somebody else always comes between look and write: every loop ends."""
    ticket = await claimed(fence)
    store = fence._shared.store
    swaps = 0

    async def refused(change: Change) -> Any:
        nonlocal swaps
        swaps += 1
        return await store.load(change.expect)

    store.swap = refused  # type: ignore[method-assign]
    calls: dict[str, Callable[[], Any]] = {
        "prepare": lambda: fence.prepare(asked("other")),
        "heartbeat": lambda: fence.heartbeat(ticket),
        "abort": lambda: fence.abort(ticket, "socket closed"),
    }
    with pytest.raises(LedgerUnavailable, match="others in a row") as caught:
        await calls[call]()
    assert caught.value.ran is (False if call == "prepare" else None)
    assert 10 < swaps < 1000
    del store.swap


async def test_a_word_that_could_not_be_written_never_says_that_nothing_ran(
    fence: EffectFence,
) -> None:
    ticket = await claimed(fence)
    for call in (fence.abort(ticket, "x"), fence.heartbeat(ticket)):
        failing(fence, 1)
        with pytest.raises(LedgerUnavailable) as caught:
            await call
        assert caught.value.ran is None
        assert "Nothing ran" not in str(caught.value)
    await fence.aclose(drain_seconds=0)
    with pytest.raises(LedgerUnavailable) as caught:
        await fence.commit(ticket, "it ran")
    assert (caught.value.ran, caught.value.result, caught.value.prepared) == (
        True,
        "it ran",
        ticket,
    )
