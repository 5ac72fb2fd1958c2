"""A request as the rules see it, and what makes an attempt its holder's.

Everything here is worked out before the ledger is asked, once per request: the keys of its records,
the canonical bytes of its certificate but for result and number, and what is expected to stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from effectfence.canonical import encode, encode_text, fingerprint
from effectfence.clock import VectorClock
from effectfence.models import EffectRequest, FenceConfig, PreparedEffect, ReadSetEntry, _trusted
from effectfence.stores.contract import ABSENT, ANY, NEVER, Expect


@dataclass(slots=True)
class Text:
    """The certificate's text but for result and number; worked out once it may come to one."""

    clock: dict[str, int]
    """`known_clock` ticked for the agent."""
    clock_bytes: bytes
    before_result: bytes
    after_seq: bytes
    """The certificate is `before_result`, result, `,"seq":`, seq, `after_seq`."""
    options: bytes
    """What the request says beside its certificate: sealed with the rest of the ticket."""


@dataclass(slots=True)
class Claim:
    """A request as the rules see it: keys and fingerprint, and its text when somebody asks."""

    request: EffectRequest
    intent_key: str
    domain_key: str
    read_set: tuple[tuple[str, str, int], ...]
    """(domain, key, seq) of every entry but the request's own domain."""
    own_seq: int | None
    """The number that the request decided on for its own domain, if it names it."""
    fingerprint: bytes
    expect_fresh: dict[str, Expect]
    takeover: bool
    result_seconds: float
    lease_seconds: float
    _text: Text | None = None

    @property
    def intent(self) -> str:
        return self.request.intent

    @property
    def domain(self) -> str:
        return self.request.domain

    @property
    def text(self) -> Text:
        """A replay does without it, so it is made when it is asked for."""
        text = self._text
        if text is None:
            self._text = text = _text_of(self.request, self.intent_key)
        return text


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


def scope_of(key: str) -> str:
    """The scope that a key is of; empty for none."""
    return key.split("/", 1)[0].partition("@")[2]


def within(scope: str, outer: str) -> bool:
    """Whether a scope is another, or nested in it."""
    return not outer or scope == outer or scope.startswith(outer + "@")


def scope_names(scope: str) -> tuple[str, ...]:
    """The names given to `fence.scoped`, outermost first."""
    return tuple(map(_unquoted, scope.split("@"))) if scope else ()


def quoted(name: str) -> str:
    """A scope's name as it stands in keys: neither `/` nor `@` is left in it."""
    return name.replace("%", "%25").replace("/", "%2F").replace("@", "%40")


def _unquoted(name: str) -> str:
    return name.replace("%40", "@").replace("%2F", "/").replace("%25", "%")


def claim_of(request: EffectRequest, config: FenceConfig, scope: str = "") -> Claim:
    """Work out what the gates ask for; nothing of it depends on the ledger."""
    said = request.__dict__
    intent_key = key("intent", said["intent"], scope)
    domain_key = key("domain", said["domain"], scope)
    read_set: tuple[tuple[str, str, int], ...] = ()
    own_seq, own_expect = None, ANY
    if said["read_set"]:
        read_set, own_seq = _facts_of(request, scope)
        own_expect = Expect(version=own_seq)
    expect = {intent_key: ABSENT, domain_key: own_expect}
    for _, other_key, seq in read_set:
        expect[other_key] = Expect(version=seq)
    ttl = config.result_ttl if said["result_ttl"] is None else said["result_ttl"]
    claim = Claim(
        request,
        intent_key,
        domain_key,
        read_set,
        own_seq,
        fingerprint(
            tool=encode_text(said["tool"]),
            domain=encode_text(said["domain"]),
            args=said["_args"],
        ),
        expect,
        (said["on_lease_expiry"] or config.on_lease_expiry) == "takeover",
        NEVER if ttl is None else ttl,
        min(config.lease_ttl, config.max_hold or config.lease_ttl),
    )
    if said["known_clock"]:
        _ = claim.text  # a clock that cannot tick is refused before anything else
    return claim


_LONGEST_NAMES: Final = 32 << 10
"""Five names of 1,024 bytes, each byte escaped, and the members around them."""


def exceeds(claim: Claim, size: int) -> bool:
    """Whether the request takes more than `size` bytes; weighed only where it may."""
    request = claim.request.__dict__
    flat = not (request["read_set"] or request["known_clock"])
    if flat and len(request["_args"]) + _LONGEST_NAMES <= size:
        return False
    return size_of(claim) > size


def size_of(claim: Claim) -> int:
    """How many bytes the request takes."""
    return len(claim.text.before_result) + len(claim.text.after_seq)


def _text_of(request: EffectRequest, intent_key: str) -> Text:
    said = request.__dict__
    name = said["agent"]
    agent = encode_text(name)
    if said["known_clock"]:
        ticked = said["known_clock"].copy()
        ticked.tick(name)
        clock = dict(ticked.items())
        clock_bytes = encode(clock)
    else:
        clock = {name: 1}
        clock_bytes = b"{%b:1}" % agent
    parent, read_set = said["parent"], said["read_set"]
    return Text(
        clock,
        clock_bytes,
        b'{"agent":%b,"args":%b,"domain":%b,"intent":%b,"parent":%b,"read_set":%b'
        % (
            agent,
            said["_args"],
            encode_text(said["domain"]),
            encode_text(said["intent"]),
            b"null" if parent is None else b'"%b"' % parent.encode(),
            _shown(read_set) if read_set else b"[]",
        ),
        b',"tool":%b,"vector_clock":%b}' % (encode_text(said["tool"]), clock_bytes),
        _options_of(request, intent_key),
    )


def _options_of(request: EffectRequest, intent_key: str) -> bytes:
    if request.result_ttl is None and request.on_lease_expiry is None and not request.ignore:
        return encode_text(intent_key)
    options = [intent_key, repr(request.result_ttl), request.on_lease_expiry, request.ignore]
    return encode(options)


def _facts_of(
    request: EffectRequest, scope: str
) -> tuple[tuple[tuple[str, str, int], ...], int | None]:
    """The facts of other domains, and the number of its own."""
    others = tuple(
        (entry.domain, key("domain", entry.domain, scope), entry.seq)
        for entry in request.read_set
        if entry.domain != request.domain
    )
    own = [entry.seq for entry in request.read_set if entry.domain == request.domain]
    return others, own[0] if own else None


def _shown(read_set: tuple[ReadSetEntry, ...]) -> bytes:
    """The facts as the certificate has them."""
    return encode([{"domain": entry.domain, "seq": entry.seq} for entry in read_set])


def holder_of(
    claim: Claim, *, attempt: int, token: str, idempotency_key: str, started_ms: int
) -> Holder:
    """The seal binds the token to all that the ticket says, but for the number (see `_lost`)."""
    text = claim.text
    said = b"%b%b%b%b%d:%d:%b" % (
        text.before_result,
        text.after_seq,
        text.options,
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
            "vector_clock": VectorClock.trusted(claim.text.clock.copy()),
            "attempt": holder.attempt,
            "token": holder.token,
            "idempotency_key": holder.idempotency_key,
            "started_ms": holder.started_ms,
        },
    )
