"""A request as the rules see it, and what makes an attempt its holder's.

Everything here is worked out before the ledger is asked, once per request: the keys of its records,
the canonical bytes of its certificate but for result and number, and what is expected to stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from effectfence.canonical import encode, encode_text, fingerprint
from effectfence.clock import VectorClock
from effectfence.models import EffectRequest, FenceConfig, PreparedEffect, _trusted
from effectfence.stores.contract import ABSENT, ANY, NEVER, Expect


@dataclass(slots=True)
class Claim:
    """A request as the rules see it: keys and canonical bytes, worked out once per request."""

    request: EffectRequest
    intent_key: str
    domain_key: str
    read_set: tuple[tuple[str, str, int], ...]
    """(domain, key, seq) of every entry but the request's own domain."""
    own_seq: int | None
    """The number that the request decided on for its own domain, if it names it."""
    fingerprint: bytes
    clock: VectorClock
    """`known_clock` ticked for the agent."""
    clock_bytes: bytes
    before_result: bytes
    after_seq: bytes
    """The certificate is `before_result`, result, `,"seq":`, seq, `after_seq`."""
    options: bytes
    """What the request says beside its certificate: sealed with the rest of the ticket."""
    expect_fresh: dict[str, Expect]
    takeover: bool
    result_seconds: float
    lease_seconds: float

    @property
    def intent(self) -> str:
        return self.request.intent

    @property
    def domain(self) -> str:
        return self.request.domain


@dataclass(slots=True)
class Holder:
    """What makes an attempt its holder's: kept in the ticket; the ledger sees only the seal."""

    attempt: int
    token: str
    idempotency_key: str
    started_ms: int
    seal: str


@dataclass(slots=True)
class Offer:
    """Randomness and wall time, handed in: what a claim is made from if it succeeds."""

    token: str
    idempotency_key: str
    started_ms: int


@dataclass(slots=True)
class Result:
    """What an effect gave: its canonical bytes, and the value that they were encoded from."""

    data: bytes
    value: Any


def key(kind: str, name: str, scope: str) -> str:
    """Unscoped `intent/x`, scoped `intent@a/x`: no name can reach into another scope."""
    return f"{kind}@{scope}/{name}" if scope else f"{kind}/{name}"


def claim_of(request: EffectRequest, config: FenceConfig, scope: str = "") -> Claim:
    """Work out all that does not depend on the ledger."""
    args: bytes = request.__dict__["_args"]
    agent, domain, tool = map(encode_text, (request.agent, request.domain, request.tool))
    domain_key = key("domain", request.domain, scope)
    intent_key = key("intent", request.intent, scope)
    if request.known_clock:
        clock = request.known_clock.copy()
        clock.tick(request.agent)
        clock_bytes = encode(clock)
    else:
        clock = VectorClock.trusted({request.agent: 1})
        clock_bytes = b"{%b:1}" % agent
    read_set: tuple[tuple[str, str, int], ...] = ()
    read_set_bytes, own_seq, own_expect = b"[]", None, ANY
    if request.read_set:
        read_set, own_seq, read_set_bytes = _read_set_of(request, scope)
        own_expect = Expect(version=own_seq)
    expect = {intent_key: ABSENT, domain_key: own_expect}
    for _, other_key, seq in read_set:
        expect[other_key] = Expect(version=seq)
    ttl = config.result_ttl if request.result_ttl is None else request.result_ttl
    return Claim(
        request=request,
        intent_key=intent_key,
        domain_key=domain_key,
        read_set=read_set,
        own_seq=own_seq,
        fingerprint=fingerprint(tool=tool, domain=domain, args=args),
        clock=clock,
        clock_bytes=clock_bytes,
        before_result=b'{"agent":%b,"args":%b,"domain":%b,"intent":%b,"parent":%b,"read_set":%b'
        % (
            agent,
            args,
            domain,
            encode_text(request.intent),
            b"null" if request.parent is None else b'"%b"' % request.parent.encode(),
            read_set_bytes,
        ),
        after_seq=b',"tool":%b,"vector_clock":%b}' % (tool, clock_bytes),
        options=_options_of(request, intent_key),
        expect_fresh=expect,
        takeover=(request.on_lease_expiry or config.on_lease_expiry) == "takeover",
        result_seconds=NEVER if ttl is None else ttl,
        lease_seconds=min(config.lease_ttl, config.max_hold or config.lease_ttl),
    )


def _options_of(request: EffectRequest, intent_key: str) -> bytes:
    if request.result_ttl is None and request.on_lease_expiry is None and not request.ignore:
        return encode_text(intent_key)
    options = [intent_key, repr(request.result_ttl), request.on_lease_expiry, request.ignore]
    return encode(options)


def _read_set_of(
    request: EffectRequest, scope: str
) -> tuple[tuple[tuple[str, str, int], ...], int | None, bytes]:
    """The facts of other domains, the number of its own, and all of them as the certificate has
    them."""
    others = tuple(
        (entry.domain, key("domain", entry.domain, scope), entry.seq)
        for entry in request.read_set
        if entry.domain != request.domain
    )
    own = [entry.seq for entry in request.read_set if entry.domain == request.domain]
    shown = encode([{"domain": entry.domain, "seq": entry.seq} for entry in request.read_set])
    return others, own[0] if own else None, shown


def holder_of(
    claim: Claim, *, attempt: int, token: str, idempotency_key: str, started_ms: int
) -> Holder:
    """The seal binds the token to all that the ticket says, but for the number (see `_lost`)."""
    said = b"%b%b%b%b%d:%d:%b" % (
        claim.before_result,
        claim.after_seq,
        claim.options,
        token.encode(),
        attempt,
        started_ms,
        idempotency_key.encode(),
    )
    return Holder(attempt, token, idempotency_key, started_ms, sha256(said).hexdigest())


def ticket_of(claim: Claim, holder: Holder, seq: int) -> PreparedEffect:
    return _trusted(
        PreparedEffect,
        {
            "request": claim.request,
            "seq": seq,
            "vector_clock": claim.clock.copy(),
            "attempt": holder.attempt,
            "token": holder.token,
            "idempotency_key": holder.idempotency_key,
            "started_ms": holder.started_ms,
        },
    )
