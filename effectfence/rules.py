"""THE rules: what each word means in each state, and nothing else. Pure; no I/O, clock, randomness.

How to read it
--------------

An intent is one record in a store. Its *state* is judged when it is read, from the record and the
store's own time:

    absent     nothing there, or cleared by an operator (attempts then count on)
    in_flight  somebody holds it and is presumed alive: `at + lease > now`
    expired    somebody holds it, but has not renewed in time
    unknown    it may or may not have fired: said so, or the holder's process is known to be dead
    done       certified

A verb comes with a ticket (`current`: it speaks for the record; `other`: it was replaced, altered
or never was) or with none. `TABLE` says what each verb does in each state; everything below it says
how. A decision is an *answer* and, where something must be written for the answer to hold, a
*change*: the caller swaps the change and gives the answer only if it was applied. If the store
refuses, the view it gives back is decided upon anew. So each function here is total: it never
waits, and is asked again as often as the world moves.

Two changes are *hopeful*, made without a view: `claim` (nothing is there yet) and `seal` (the
ticket still speaks). They are the common case and cost one round trip; any surprise falls back to
`prepare` and `commit`, which decide upon a view.

Why it is safe
--------------

1. Tags. An intent's tag is its state's letter and the *seal*: the hash over the fence token and all
   that the ticket says. A seal is used by one attempt only and a state is entered once by each
   seal, so a tag never comes back: comparing tags is immune to prepare, clear, prepare (ABA).
   A heartbeat keeps the tag and bumps the version, so a decision taken upon a view compares both.
   Done names its certificate too: whoever sends a commit again finds out whether it was its own.
2. Numbers. An intent's `stamp` is the new version of its domain, copied inside the swap: nobody
   ever writes a number that another could have taken.
3. Heads. A domain's head only moves up (`newer`), so certificates may arrive in any order.
4. Nothing becomes runnable by itself: only `release` of attempt 1, `clear`, `unknown_ttl` set on
   purpose and a lifetime that ended lead back to absent; only `takeover` claims from a holder.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, assert_never

from effectfence import errors
from effectfence.canonical import decode, detached, encode
from effectfence.claims import (
    Claim,
    Holder,
    Offer,
    Result,
    holder_of,
    key,
    scope_names,
    scope_of,
)
from effectfence.clock import VectorClock
from effectfence.models import (
    EffectCert,
    FenceConfig,
    IntentRecord,
    IntentState,
    RecordedWord,
    _trusted,
)
from effectfence.records import (
    CLEARED,
    DOMAIN,
    DONE,
    INNER_DEPTH,
    OPEN,
    Word,
    body_of,
    cert_of,
    done_body,
    open_body,
    word_put,
)
from effectfence.stores.contract import (
    ABSENT,
    NEVER,
    Change,
    Expect,
    Put,
    Record,
    VersionOf,
    View,
)


class State(StrEnum):
    __hash__ = str.__hash__  # the enum's own is Python code, and asked several times a call

    ABSENT = "absent"
    IN_FLIGHT = "in_flight"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    DONE = "done"


class Verb(StrEnum):
    __hash__ = str.__hash__

    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"
    RELEASE = "release"
    HEARTBEAT = "heartbeat"
    SETTLE = "settle"
    CLEAR = "clear"


class Does(StrEnum):
    """What comes of a verb. Those that end in an error are named like it."""

    CLAIM = "claim"
    TAKE_OVER = "take over, or unknown"
    REPLAY = "replay"
    MINT = "certificate"
    SAME_CERT = "same certificate"
    FENCE_OFF = "unknown"
    FREE = "free, or unknown"
    RENEW = "renewed"
    CLEAR = "cleared"
    NOTHING = "nothing to do"
    IN_FLIGHT = "IntentInFlight"
    UNKNOWN = "OutcomeUnknown"
    LOST = "LeaseLost"
    ALIVE = "HolderAlive"
    NO_SUCH = "NoSuchIntent"


_S, _V, _D = State, Verb, Does

TABLE: Final[Mapping[Verb, Mapping[State, Does | tuple[Does, Does]]]] = {
    # A pair is (current ticket, other ticket); prepare, settle and clear come without one.
    _V.PREPARE: {
        _S.ABSENT: _D.CLAIM,
        _S.IN_FLIGHT: _D.IN_FLIGHT,
        _S.EXPIRED: _D.TAKE_OVER,
        _S.UNKNOWN: _D.UNKNOWN,
        _S.DONE: _D.REPLAY,
    },
    _V.COMMIT: {
        _S.ABSENT: (_D.LOST, _D.LOST),
        _S.IN_FLIGHT: (_D.MINT, _D.LOST),
        _S.EXPIRED: (_D.MINT, _D.LOST),
        _S.UNKNOWN: (_D.MINT, _D.LOST),
        _S.DONE: (_D.SAME_CERT, _D.LOST),
    },
    _V.ABORT: {
        _S.ABSENT: (_D.LOST, _D.LOST),
        _S.IN_FLIGHT: (_D.FENCE_OFF, _D.LOST),
        _S.EXPIRED: (_D.FENCE_OFF, _D.LOST),
        _S.UNKNOWN: (_D.UNKNOWN, _D.LOST),
        _S.DONE: (_D.LOST, _D.LOST),
    },
    _V.RELEASE: {
        _S.ABSENT: (_D.LOST, _D.LOST),
        _S.IN_FLIGHT: (_D.FREE, _D.LOST),
        _S.EXPIRED: (_D.FREE, _D.LOST),
        _S.UNKNOWN: (_D.FREE, _D.LOST),
        _S.DONE: (_D.LOST, _D.LOST),
    },
    _V.HEARTBEAT: {
        _S.ABSENT: (_D.LOST, _D.LOST),
        _S.IN_FLIGHT: (_D.RENEW, _D.LOST),
        _S.EXPIRED: (_D.RENEW, _D.LOST),
        _S.UNKNOWN: (_D.UNKNOWN, _D.LOST),
        _S.DONE: (_D.LOST, _D.LOST),
    },
    _V.SETTLE: {
        _S.ABSENT: _D.NO_SUCH,
        _S.IN_FLIGHT: _D.ALIVE,
        _S.EXPIRED: _D.MINT,
        _S.UNKNOWN: _D.MINT,
        _S.DONE: _D.SAME_CERT,
    },
    _V.CLEAR: {
        _S.ABSENT: _D.NOTHING,
        _S.IN_FLIGHT: _D.ALIVE,
        _S.EXPIRED: _D.CLEAR,
        _S.UNKNOWN: _D.CLEAR,
        _S.DONE: _D.ALIVE,
    },
}
"""Forced, `HolderAlive` gives way: settle then mints, clear then clears."""


def does(verb: Verb, state: State, *, current: bool = False) -> Does:
    """The table's entry."""
    entry = TABLE[verb][state]
    return entry[0 if current else 1] if isinstance(entry, tuple) else entry


# --- what travels ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Admit:
    holder: Holder


@dataclass(slots=True)
class Replayed:
    cert: EffectCert


@dataclass(slots=True)
class Refuse:
    error: errors.FenceError
    tag: str = ""
    """Of the record that stood in the way: what a waiter waits to see moved."""


@dataclass(slots=True)
class Certify:
    cert: EffectCert


@dataclass(slots=True)
class Late:
    """A commit whose ticket was replaced: refused, but its coming is kept as evidence."""

    error: errors.FenceError


@dataclass(slots=True)
class Said:
    """The word was taken; `value` is what the caller is told (a lease's seconds, or a fact)."""

    value: Any = None


Answer = Admit | Replayed | Refuse | Certify | Late | Said


@dataclass(slots=True)
class Decision:
    answer: Answer
    change: Change | None = None


# --- an intent's state ----------------------------------------------------------------------------


def state_of(record: Record | None, body: Mapping[str, Any], now: float, *, gone: bool) -> State:
    """The state that a record is in at the store's `now`; `gone`: its writer is known dead."""
    if record is None or record.label == CLEARED:
        return State.ABSENT
    if record.label == DONE:
        return State.DONE
    if body["state"] == "unknown" or gone:
        return State.UNKNOWN
    return State.IN_FLIGHT if record.at + body["lease"] > now else State.EXPIRED


# --- prepare --------------------------------------------------------------------------------------


def claim(claim: Claim, offer: Offer) -> Decision:
    """Hopeful: the intent is absent and the facts stand as the request saw them."""
    holder = holder_of(
        claim,
        attempt=1,
        token=offer.token,
        idempotency_key=offer.idempotency_key,
        started_ms=offer.started_ms,
    )
    return Decision(Admit(holder), _claim_change(claim, holder, claim.expect_fresh))


def _claim_change(claim: Claim, holder: Holder, expect: Mapping[str, Expect]) -> Change:
    return Change(
        expect,
        (
            Put(claim.domain_key, label=DOMAIN),
            Put(
                claim.intent_key,
                tag="f:" + holder.seal,
                stamp=VersionOf(claim.domain_key),
                label=OPEN,
                body=open_body(claim, holder),
                expires_in=NEVER,
            ),
        ),
    )


def prepare(
    view: View,
    claim: Claim,
    make_offer: Callable[[], Offer],
    config: FenceConfig,
    opens: Iterable[tuple[str, int]] = (),
) -> Decision:
    """The four gates. `opens`: (domain key, number) of the other open intents, if strict."""
    record = view.records[claim.intent_key]
    body = body_of(record)
    state = state_of(record, body, view.now, gone=claim.intent_key in view.gone)
    refused = _intent_gate(view, claim, config, record, body, state)
    if refused is not None:
        return refused
    for domain, other_key, seq in claim.read_set:
        actual = _version(view.records[other_key])
        if actual != seq:
            return _refuse(errors.ReadSetStale(domain=domain, expected=seq, actual=actual))
    domain_record = view.records[claim.domain_key]
    if config.causal == "strict":
        conflict = _causal_gate(claim, domain_record, opens)
        if conflict is not None:
            return _refuse(conflict)
    actual = _version(domain_record)
    if claim.own_seq is not None and actual != claim.own_seq:
        return _refuse(
            errors.DomainRace(domain=claim.domain, expected=claim.own_seq, actual=actual)
        )
    offer = make_offer()
    # A provider answers one key with one receipt: it stays only while the action is the same one.
    same = bool(body) and body["fingerprint"].encode() == claim.fingerprint
    holder = holder_of(
        claim,
        attempt=body["attempt"] + 1 if body else 1,
        token=offer.token,
        idempotency_key=body["idempotency_key"] if same else offer.idempotency_key,
        started_ms=offer.started_ms,
    )
    expect = dict(claim.expect_fresh)
    expect[claim.intent_key] = _as_seen(record)
    if config.causal == "strict":
        # The head too: a commit moves it and not the number.
        expect[claim.domain_key] = (
            ABSENT if domain_record is None else Expect(version=actual, stamp=domain_record.stamp)
        )
    return Decision(Admit(holder), _claim_change(claim, holder, expect))


def _intent_gate(
    view: View,
    claim: Claim,
    config: FenceConfig,
    record: Record | None,
    body: Mapping[str, Any],
    state: State,
) -> Decision | None:
    if record is None or state is State.ABSENT:
        return None
    if body["fingerprint"].encode() != claim.fingerprint:
        return _refuse(errors.IntentConflict(intent=claim.intent, differs=_differs(claim, body)))
    match does(Verb.PREPARE, state):
        case Does.REPLAY:
            return Decision(Replayed(cert_of(body)))
        case Does.IN_FLIGHT:
            left = record.at + body["lease"] - view.now
            error = errors.IntentInFlight(
                intent=claim.intent,
                agent=body["request"]["agent"],
                attempt=body["attempt"],
                seconds_left=left,
            )
            return Decision(Refuse(error, record.tag))
        case Does.TAKE_OVER if claim.takeover:
            return None
        case _:
            return _found_unknown(claim, config, record, body, state)


def _found_unknown(
    claim: Claim, config: FenceConfig, record: Record, body: Mapping[str, Any], state: State
) -> Decision:
    """Unknown already, or found to be: then the transition is written before it is told."""
    if body["state"] == "unknown":
        reason, change = body["reason"], None
    else:
        reason = (
            "its lease ran out (a tool that deduplicates may set on_lease_expiry='takeover')"
            if state is State.EXPIRED
            else "its process died"
        )
        change = _fence_off(claim.intent_key, record, body, reason, config)
    error = errors.OutcomeUnknown(
        intent=claim.intent,
        reason=reason,
        agent=body["request"]["agent"],
        attempt=body["attempt"],
    )
    return Decision(Refuse(error, record.tag), change)


def _causal_gate(
    claim: Claim, domain: Record | None, opens: Iterable[tuple[str, int]]
) -> errors.FenceError | None:
    head = body_of(domain) if domain is not None and domain.stamp else {}
    if head and not VectorClock(head["clock"]).le(claim.request.known_clock):
        return errors.CausalConflict(
            domain=claim.domain, reason=f"its head, seq {_stamp(domain)}, is not in its past"
        )
    above = [seq for key_, seq in opens if key_ == claim.domain_key and seq > _stamp(domain)]
    if above:
        return errors.CausalConflict(
            domain=claim.domain, reason=f"seq {min(above)} is in flight or unknown"
        )
    return None


def _differs(claim: Claim, body: Mapping[str, Any]) -> tuple[str, ...]:
    stood = body.get("request") or body["cert"]
    differs = [name for name in ("tool", "domain") if stood[name] != getattr(claim.request, name)]
    args = encode(stood["args"], max_depth=INNER_DEPTH)
    if not claim.text.before_result.startswith(
        b'{"agent":%b,"args":%b,' % (encode(claim.request.agent), args)
    ):
        differs.append("args")
    return tuple(differs)


# --- reports by ticket ----------------------------------------------------------------------------


def seal(claim: Claim, holder: Holder, seq: int, result: Result) -> Decision:
    """Hopeful: the ticket still speaks and the read set still stands."""
    expect = {claim.intent_key: Expect(tag="f:" + holder.seal, stamp=seq)}
    for _, other_key, other_seq in claim.read_set:
        expect[other_key] = Expect(version=other_seq)
    return _certify(claim, holder, seq, result, expect)


def commit(
    view: View, claim: Claim, holder: Holder, seq: int, result: Result, config: FenceConfig
) -> Decision:
    record = view.records[claim.intent_key]
    body = body_of(record)
    lost = _lost(view, claim, holder, seq, record, body)
    if lost is not None:
        return _late(view, claim, holder, seq, record, lost, config)
    assert record is not None
    state = state_of(record, body, view.now, gone=claim.intent_key in view.gone)
    if does(Verb.COMMIT, state, current=True) is Does.SAME_CERT:
        return _again(body, result.data)
    stale = body.get("stale") or _first_stale(view, claim)
    if stale:
        error = errors.CommitStale(intent=claim.intent, **stale)
        if "stale" in body:
            return _refuse(error)
        change = _fence_off(
            claim.intent_key, record, body, "it ran, but its facts had moved", config, stale=stale
        )
        return Decision(Refuse(error), change)
    expect = {claim.intent_key: _as_seen(record)}
    for _, other_key, other_seq in claim.read_set:
        expect[other_key] = Expect(version=other_seq)
    return _certify(claim, holder, seq, result, expect)


def abort(
    view: View, claim: Claim, holder: Holder, seq: int, reason: str, config: FenceConfig
) -> Decision:
    """Outcome unknown, fenced."""
    record, body, refused = _held(view, claim, holder, seq, Verb.ABORT)
    if refused is not None:
        return refused
    assert record is not None
    return Decision(Said(), _fence_off(claim.intent_key, record, body, reason, config))


def release(
    view: View,
    claim: Claim,
    holder: Holder,
    seq: int,
    reason: str,
    config: FenceConfig,
    word_key: str,
) -> Decision:
    """It certainly did not run; an earlier attempt still may have."""
    if view.records.get(word_key) is not None:  # this very call's, sent twice
        return Decision(Said())
    record, body, refused = _held(view, claim, holder, seq, Verb.RELEASE)
    if refused is not None:
        return refused
    assert record is not None
    if "stale" in body:  # its own commit said that it did run
        return _refuse(_unknown_error(claim.intent, body))
    word = word_put(
        "release", claim.intent, seq, Word(word_key, claim.request.agent, reason), config
    )
    expect = {claim.intent_key: _as_seen(record), word_key: ABSENT}
    if body["attempt"] == 1:
        return Decision(Said(), Change(expect, (Put(claim.intent_key, delete=True), word)))
    reason = f"attempt {body['attempt']} did not run ({reason}), an earlier one may have"
    fenced = _fence_off(claim.intent_key, record, body, reason, config)
    return Decision(Said(), Change(expect, (*fenced.puts, word)))


def heartbeat(view: View, claim: Claim, holder: Holder, seq: int, config: FenceConfig) -> Decision:
    """Renew from now, at most to `max_hold` after the claim; says for how many seconds."""
    record, body, refused = _held(view, claim, holder, seq, Verb.HEARTBEAT)
    if refused is not None:
        return refused
    assert record is not None
    expect = {claim.intent_key: _as_seen(record)}
    if config.max_hold is None:
        return Decision(Said(body["lease"]), Change(expect, (Put(claim.intent_key),)))
    since = body.get("since", record.at)
    lease = min(config.lease_ttl, since + config.max_hold - view.now)
    if lease <= 0:
        return _refuse(
            errors.LeaseLost(
                intent=claim.intent, reason=f"held for max_hold, {config.max_hold:g} s, already"
            )
        )
    renewed = encode({**body, "lease": lease, "since": since}, max_depth=INNER_DEPTH)
    put = Put(claim.intent_key, body=renewed)
    return Decision(Said(lease), Change(expect, (put,)))


def _held(
    view: View, claim: Claim, holder: Holder, seq: int, verb: Verb
) -> tuple[Record | None, dict[str, Any], Decision | None]:
    """The record that a ticket speaks for, or why the verb may not act on it."""
    record = view.records[claim.intent_key]
    body = body_of(record)
    lost = _lost(view, claim, holder, seq, record, body)
    if lost is not None:
        return record, body, _refuse(lost)
    state = state_of(record, body, view.now, gone=claim.intent_key in view.gone)
    match does(verb, state, current=True):
        case Does.UNKNOWN:
            return record, body, _refuse(_unknown_error(claim.intent, body))
        case Does.LOST:
            error = errors.LeaseLost(
                intent=claim.intent, reason="it is committed already", certified=True
            )
            return record, body, _refuse(error)
        case _:
            return record, body, None


def _lost(
    view: View,
    claim: Claim,
    holder: Holder,
    seq: int,
    record: Record | None,
    body: Mapping[str, Any],
) -> errors.FenceError | None:
    """Why a ticket does not speak for what stands under its intent, or `None` if it does.

    A genuine ticket that was replaced has another number than the record, since every attempt
    takes a number of its own, or is of another domain; same number and other seal, or same seal
    and other number, is therefore no ticket that was ever issued.
    """
    if record is None:
        return errors.LeaseLost(intent=claim.intent, reason="nothing is recorded for it any more")
    same_seal = hmac.compare_digest(_seal_of(record), holder.seal)
    if same_seal and record.stamp == seq and record.label != CLEARED:
        return None
    if record.label == CLEARED and same_seal:
        return errors.LeaseLost(intent=claim.intent, reason="an operator cleared it")
    stood = body.get("request") or body["cert"]
    same_number = record.stamp == seq and (
        stood["domain"] == claim.domain or _version(view.records[claim.domain_key]) < seq
    )
    if same_seal or same_number:
        return errors.InvalidTicket(intent=claim.intent, reason="it was altered or forged")
    return errors.LeaseLost(
        intent=claim.intent, reason=f"attempt {body['attempt']}, seq {record.stamp}, replaced it"
    )


def _late(
    view: View,
    claim: Claim,
    holder: Holder,
    seq: int,
    record: Record | None,
    lost: errors.FenceError,
    config: FenceConfig,
) -> Decision:
    """Keep, once, that a replaced holder came to commit: it may have run a second time."""
    lost.ran = True
    if record is None or not isinstance(lost, errors.LeaseLost):
        return _refuse(lost)
    word_key = key("history", f"late/{holder.seal}", scope_of(claim.intent_key))
    if view.records.get(word_key) is not None:
        return _refuse(lost)
    said = Word(word_key, claim.request.agent, lost.reason)
    word = word_put("late commit", claim.intent, seq, said, config)
    return Decision(Late(lost), Change({word_key: ABSENT}, (word,)))


def _again(body: Mapping[str, Any], result: bytes) -> Decision:
    cert = cert_of(body)
    if encode(cert.result, max_depth=INNER_DEPTH) != result:
        return _refuse(errors.CommitConflict(intent=cert.intent, cert=cert))
    return Decision(Certify(cert))


def _first_stale(view: View, claim: Claim) -> dict[str, Any] | None:
    for domain, other_key, seq in claim.read_set:
        actual = _version(view.records[other_key])
        if actual != seq:
            return {"domain": domain, "expected": seq, "actual": actual}
    return None


def _certify(
    claim: Claim,
    holder: Holder,
    seq: int,
    result: Result,
    expect: Mapping[str, Expect],
) -> Decision:
    text = claim.text
    content = b'%b,"result":%b,"seq":%d%b' % (
        text.before_result,
        result.data,
        seq,
        text.after_seq,
    )
    cert_hash = sha256(content).hexdigest()
    body = done_body(
        content,
        cert_hash,
        attempt=holder.attempt,
        fingerprint=claim.fingerprint,
        idempotency_key=holder.idempotency_key,
        ms=holder.started_ms,
    )
    head = b'{"clock":%b,"hash":"%b"}' % (text.clock_bytes, cert_hash.encode())
    change = _done_change(
        claim.intent_key,
        claim.domain_key,
        f"d:{holder.seal}:{cert_hash[:16]}",
        seq,
        body,
        head,
        claim.result_seconds,
        expect,
    )
    request = claim.request
    fields = {
        "intent": request.intent,
        "parent": request.parent,
        "domain": request.domain,
        "seq": seq,
        "tool": request.tool,
        "args": decode(request.__dict__["_args"]),
        "result": detached(result.value, result.data),
        "vector_clock": VectorClock.trusted(text.clock.copy()),
        "read_set": request.read_set,
        "agent": request.agent,
        "hash": cert_hash,
    }
    return Decision(Certify(_trusted(EffectCert, fields)), change)


def _done_change(
    intent_key: str,
    domain_key: str,
    tag: str,
    seq: int,
    body: bytes,
    head: bytes,
    result_seconds: float,
    expect: Mapping[str, Expect],
) -> Change:
    return Change(
        expect,
        (
            Put(intent_key, tag=tag, label=DONE, body=body, expires_in=result_seconds),
            Put(domain_key, stamp=seq, label=DOMAIN, body=head, bump=False, newer=True),
        ),
    )


# --- an operator's words --------------------------------------------------------------------------


def settle(
    view: View,
    intent: str,
    intent_key: str,
    scope: str,
    result: bytes,
    word: Word,
    config: FenceConfig,
) -> Decision:
    """It did run, with this result: mints the certificate."""
    record = view.records[intent_key]
    body = body_of(record)
    state = state_of(record, body, view.now, gone=intent_key in view.gone)
    match does(Verb.SETTLE, state):
        case Does.NO_SUCH:
            return _refuse(errors.NoSuchIntent(intent=intent))
        case _ if _is_of_another_attempt(body, word):
            return _refuse(_another_attempt(intent, body, word))
        case Does.ALIVE if not word.forced:
            return _refuse(_alive(intent, state, "its holder may still be running it"))
        case Does.SAME_CERT:
            return _again(body, result)
        case _:
            pass
    assert record is not None
    request = body["request"]
    content = encode(
        {**request, "result": decode(result), "seq": record.stamp}, max_depth=INNER_DEPTH
    )
    cert_hash = sha256(content).hexdigest()
    done = done_body(
        content,
        cert_hash,
        attempt=body["attempt"],
        fingerprint=body["fingerprint"].encode(),
        idempotency_key=body["idempotency_key"],
        ms=body["started_ms"],
    )
    head = b'{"clock":%b,"hash":"%b"}' % (encode(request["vector_clock"]), cert_hash.encode())
    seconds = body["result_seconds"]
    change = _done_change(
        intent_key,
        key("domain", request["domain"], scope),
        f"d:{_seal_of(record)}:{cert_hash[:16]}",
        record.stamp,
        done,
        head,
        NEVER if seconds is None else seconds,
        {intent_key: _as_seen(record), word.key: ABSENT},
    )
    said = word_put("settle", intent, record.stamp, word, config)
    cert = cert_of({"cert": decode(content), "hash": cert_hash})
    return Decision(Certify(cert), Change(change.expect, (*change.puts, said)))


def clear(view: View, intent: str, intent_key: str, word: Word, config: FenceConfig) -> Decision:
    """It did not run: runnable again, attempts count on."""
    record = view.records[intent_key]
    body = body_of(record)
    state = state_of(record, body, view.now, gone=intent_key in view.gone)
    match does(Verb.CLEAR, state):
        case Does.NOTHING:
            return Decision(Said(False))
        case _ if _is_of_another_attempt(body, word):
            return _refuse(_another_attempt(intent, body, word))
        case Does.ALIVE if not word.forced:
            why = (
                "it ran, and its outcome would be forgotten"
                if state is State.DONE
                else "its holder may still be running it"
            )
            return _refuse(_alive(intent, state, why))
        case _:
            pass
    assert record is not None
    request = body.get("request") or {
        name: value for name, value in body["cert"].items() if name not in ("result", "seq")
    }
    cleared = encode(
        {
            "attempt": body["attempt"],
            "fingerprint": body["fingerprint"],
            "idempotency_key": body["idempotency_key"],
            "request": request,
            "started_ms": body["started_ms"],
        },
        max_depth=INNER_DEPTH,
    )
    said = word_put("clear", intent, record.stamp, word, config)
    put = Put(
        intent_key,
        tag="c:" + _seal_of(record),
        label=CLEARED,
        body=cleared,
        expires_in=config.history_ttl,
    )
    expect = {intent_key: _as_seen(record), word.key: ABSENT}
    return Decision(Said(True), Change(expect, (put, said)))


def _alive(intent: str, state: State, reason: str) -> errors.FenceError:
    return errors.HolderAlive(intent=intent, state=state.value, reason=reason)


def _is_of_another_attempt(body: Mapping[str, Any], word: Word) -> bool:
    return word.attempt is not None and word.attempt != body["attempt"]


def _another_attempt(intent: str, body: Mapping[str, Any], word: Word) -> errors.FenceError:
    reason = f"the word is about attempt {word.attempt}"
    return errors.HolderAlive(
        intent=intent, state=f"in attempt {body['attempt']} by now", reason=reason
    )


# --- what a reconciler may be asked about ---------------------------------------------------------


def unknown_for(record: Record, body: Mapping[str, Any], now: float, *, gone: bool) -> float | None:
    """For how many seconds nobody has known its outcome, or `None` if somebody does or may."""
    match state_of(record, body, now, gone=gone):
        case State.UNKNOWN:
            # When a process died is not known, only when that was found: now, unless written down.
            return now - record.at if body["state"] == "unknown" else 0.0
        case State.EXPIRED:
            return now - (record.at + float(body["lease"]))
        case _:
            return None


def found_dead(view: View, intent_key: str, config: FenceConfig) -> Decision:
    """Write down that the holder's process died, as `prepare` does where it finds that."""
    record = view.records[intent_key]
    body = body_of(record)
    state = state_of(record, body, view.now, gone=intent_key in view.gone)
    if record is None or state is not State.UNKNOWN or body["state"] == "unknown":
        return Decision(Said())
    return Decision(Said(), _fence_off(intent_key, record, body, "its process died", config))


# --- domains --------------------------------------------------------------------------------------


def reserve(domain_key: str, expected: int) -> Change:
    """Take the next number, if the domain still stands at `expected`."""
    return Change({domain_key: Expect(version=expected)}, (Put(domain_key, label=DOMAIN),))


def evict(
    view: View, domain: str, domain_key: str, opens: Iterable[tuple[str, int]], config: FenceConfig
) -> errors.FenceError | None:
    """Why a domain may not be forgotten yet, if so."""
    held = held_domain(domain, domain_key, opens)
    if held is not None:
        return held
    record = view.records[domain_key]
    quiet = NEVER if config.result_ttl is None else config.result_ttl
    if record is not None and view.now - record.at < quiet:
        return _in_use(domain, f"it moved within result_ttl, {quiet:g} s")
    return None


def held_domain(
    domain: str, domain_key: str, opens: Iterable[tuple[str, int]]
) -> errors.FenceError | None:
    held = [seq for key_, seq in opens if key_ == domain_key]
    return _in_use(domain, f"an open intent holds seq {min(held)}") if held else None


def _in_use(domain: str, reason: str) -> errors.FenceError:
    return errors.HolderAlive(intent=domain, state="in use", reason=reason)


def move_on(domain_key: str, record: Record) -> Change:
    """Take a number that nobody gets."""
    return Change({domain_key: _as_seen(record)}, (Put(domain_key),))


def forget(domain_key: str, record: Record) -> Change:
    """Its numbers go on above a floor."""
    return Change({domain_key: _as_seen(record)}, (Put(domain_key, delete=True, floor=True),))


def _shown(record: Record, state: State) -> IntentState:
    match state:
        case State.ABSENT:
            assert record.label == CLEARED, "absent, yet there is a record"
            return "cleared"
        case State.IN_FLIGHT:
            return "in_flight"
        case State.EXPIRED:
            return "expired"
        case State.UNKNOWN:
            return "unknown"
        case State.DONE:
            return "done"
    assert_never(state)


def describe(intent_key: str, view: View) -> IntentRecord:
    """What stands under an intent's key, for people."""
    record, now = view.records[intent_key], view.now
    assert record is not None
    body = body_of(record)
    request = body.get("request") or body["cert"]
    state = state_of(record, body, now, gone=intent_key in view.gone)
    held = state in (State.IN_FLIGHT, State.EXPIRED)
    reason = body.get("reason")
    if reason is None and state is State.UNKNOWN:
        reason = "its process died"
    return IntentRecord(
        intent=request["intent"],
        domain=request["domain"],
        state=_shown(record, state),
        agent=request["agent"],
        tool=request["tool"],
        args=request["args"],
        attempt=body["attempt"],
        seq=record.stamp,
        started_at=body["started_ms"] / 1000,
        age_seconds=max(0.0, now - record.at),
        lease_seconds_left=record.at + body["lease"] - now if held else None,
        reason=reason,
        idempotency_key=body["idempotency_key"],
        cert=cert_of(body) if state is State.DONE else None,
        scope=scope_names(scope_of(intent_key)),
    )


def describe_word(word_key: str, view: View) -> RecordedWord:
    """A word that was kept, for people."""
    record = view.records[word_key]
    assert record is not None
    age = max(0.0, view.now - record.at)
    return RecordedWord(**body_of(record), scope=scope_names(scope_of(word_key)), age_seconds=age)


# --- small pieces ---------------------------------------------------------------------------------


def _fence_off(
    intent_key: str,
    record: Record,
    body: Mapping[str, Any],
    reason: str,
    config: FenceConfig,
    **more: Any,
) -> Change:
    """The step to unknown: the token stays current, the reason is kept."""
    unknown = encode({**body, "state": "unknown", "reason": reason, **more}, max_depth=INNER_DEPTH)
    put = Put(
        intent_key,
        tag="u:" + _seal_of(record),
        body=unknown,
        expires_in=NEVER if config.unknown_ttl is None else config.unknown_ttl,
    )
    return Change({intent_key: _as_seen(record)}, (put,))


def _unknown_error(intent: str, body: Mapping[str, Any]) -> errors.FenceError:
    return errors.OutcomeUnknown(
        intent=intent,
        reason=body.get("reason", "its process died"),
        agent=body["request"]["agent"],
        attempt=body["attempt"],
    )


def _refuse(error: errors.FenceError) -> Decision:
    return Decision(Refuse(error))


def _as_seen(record: Record | None) -> Expect:
    return ABSENT if record is None else Expect(version=record.version, tag=record.tag)


def _seal_of(record: Record) -> str:
    return record.tag[2:66]


def _version(record: Record | None) -> int:
    return 0 if record is None else record.version


def _stamp(record: Record | None) -> int:
    return 0 if record is None else record.stamp
