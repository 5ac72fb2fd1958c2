"""What the records of the fence hold: their labels, and bodies as bytes, read, written and checked.

A body is canonical JSON (floats as Python prints them). Members by label:

    open      attempt, fingerprint, idempotency_key, lease, request, result_seconds, started_ms,
              state ("in_flight" or "unknown"); also: reason, stale (a commit that was refused),
              since (of the claim, once it was renewed under `max_hold`)
    done      attempt, cert (ten members), fingerprint, hash, idempotency_key, started_ms
    cleared   attempt, fingerprint, idempotency_key, request, started_ms
    domain    nothing until something is certified, then hash and clock of the head
    history   word (release, late commit, settle, clear), intent, seq, by, reason, forced

`request` is the certificate without result and number: what a late settlement needs to mint it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from effectfence.canonical import MAX_NAME_BYTES, decode, encode
from effectfence.claims import Claim, Holder, Result, key
from effectfence.clock import MAX_COUNT, VectorClock
from effectfence.models import UNRECORDED, EffectCert, FenceConfig, ReadSetEntry, _trusted
from effectfence.stores.contract import NEVER, Put, Record

INNER_DEPTH: Final = 80
"""What was accepted at depth 64, inside the records that are made around it."""

OPEN, DONE, CLEARED, DOMAIN, HISTORY = "open", "done", "cleared", "domain", "history"


@dataclass(slots=True)
class Word:
    """Who says what and why; `key` is where it is kept."""

    key: str
    by: str
    reason: str
    forced: bool = False
    attempt: int | None = None
    """The only attempt that it is about; `None`: whichever stands."""


def open_body(claim: Claim, holder: Holder) -> bytes:
    text = claim.text
    return (
        b'{"attempt":%d,"fingerprint":"%b","idempotency_key":"%b","lease":%b,"request":%b%b,'
        b'"result_seconds":%b,"started_ms":%d,"state":"in_flight"}'
        % (
            holder.attempt,
            claim.fingerprint,
            holder.idempotency_key.encode(),
            repr(claim.lease_seconds).encode(),
            text.before_result,
            text.after_seq,
            b"null" if claim.result_seconds == NEVER else repr(claim.result_seconds).encode(),
            holder.started_ms,
        )
    )


def done_body(
    cert: bytes, cert_hash: str, *, attempt: int, fingerprint: bytes, idempotency_key: str, ms: int
) -> bytes:
    return (
        b'{"attempt":%d,"cert":%b,"fingerprint":"%b","hash":"%b","idempotency_key":"%b",'
        b'"started_ms":%d}'
        % (
            attempt,
            cert,
            fingerprint,
            cert_hash.encode(),
            idempotency_key.encode(),
            ms,
        )
    )


def word_put(kind: str, intent: str, seq: int, word: Word, config: FenceConfig) -> Put:
    """The record that keeps a word, a release or a late commit."""
    body = encode(
        {
            "by": word.by,
            "forced": word.forced,
            "intent": intent,
            "reason": word.reason,
            "seq": seq,
            "word": kind,
        }
    )
    return Put(word.key, label=HISTORY, body=body, expires_in=config.history_ttl)


def unrecorded(reason: str) -> Result:
    """What stands in a certificate for a result that could not be recorded."""
    marker = {UNRECORDED: reason}
    return Result(encode(marker), marker)


def clip(reason: str) -> str:
    """A reason as it can be kept: refusing to record an outcome over its text would be worse."""
    kept = str(reason).encode("utf-8", "replace")[:MAX_NAME_BYTES].decode("utf-8", "ignore")
    return kept or "no reason given"


def body_of(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {}
    value = decode(record.body)
    assert isinstance(value, dict)
    return value


def cert_of(body: Mapping[str, Any]) -> EffectCert:
    """The certificate inside a done record."""
    fields = dict(body["cert"])
    facts = fields["read_set"]
    fields["read_set"] = tuple([_trusted(ReadSetEntry, fact) for fact in facts]) if facts else ()
    fields["vector_clock"] = VectorClock.trusted(fields["vector_clock"])
    fields["hash"] = body["hash"]
    return _trusted(EffectCert, fields)


def head_of(record: Record | None) -> dict[str, Any] | None:
    """`hash` and `clock` of a domain's highest certificate."""
    if record is None or not record.stamp or not record.body:
        return None
    return body_of(record)


def open_number(record: Record, scope_of_key: str) -> tuple[str, int]:
    """(domain key, number) of an open intent's record that stands under `scope_of_key`."""
    scope = scope_of_key.split("/", 1)[0].partition("@")[2]
    return key("domain", body_of(record)["request"]["domain"], scope), record.stamp


def open_facts(record: Record, scope_of_key: str) -> list[tuple[str, int]]:
    """(domain key, number) of every fact that an open intent's commit will check again."""
    scope = scope_of_key.split("/", 1)[0].partition("@")[2]
    read_set = body_of(record)["request"]["read_set"]
    return [(key("domain", entry["domain"], scope), entry["seq"]) for entry in read_set]


# --- checking what was read -----------------------------------------------------------------------


def check_body(key: str, label: str, value: Any) -> None:
    """Raise `ValueError` if this is no body that the fence writes under `key` and `label`.

    A million of them pass through here when a ledger is opened: one comparison of types a body.
    """
    try:
        check = _CHECKS[label]
    except KeyError:
        raise ValueError(f"unknown kind of record {label!r}") from None
    if not key.startswith(_KEYS[label]):
        raise ValueError(f"a {label!r} record has no business under {key!r}")
    try:
        check(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the body of a {label!r} record: {error}") from None


def _check_open(body: dict[str, Any]) -> None:
    _check_types(body, _OPEN)
    _check_attempt(body)
    _check_request(body["request"])
    if type(body["lease"]) not in _NUMBER or type(body["result_seconds"]) not in _NUMBER_OR_NONE:
        raise ValueError("a lifetime is no number")
    if body["state"] == "unknown":
        if type(body["reason"]) is not str:
            raise ValueError("an unknown outcome lacks its reason")
    elif body["state"] != "in_flight":
        raise ValueError(f"open record in unknown state {body['state']!r}")


def _check_done(body: dict[str, Any]) -> None:
    _check_types(body, _DONE)
    _check_attempt(body)
    _check_plain(body["hash"])
    cert = body["cert"]
    _check_request(cert)
    if type(cert["seq"]) is not int or "result" not in cert:
        raise ValueError("a certificate lacks its result or number")


def _check_cleared(body: dict[str, Any]) -> None:
    _check_types(body, _CLEARED)
    _check_attempt(body)
    _check_request(body["request"])


def _check_domain(body: Any) -> None:
    if body != b"":  # nothing is certified in it yet
        _check_types(body, _HEAD)
        _check_plain(body["hash"])
        _check_clock(body["clock"])


def _check_history(body: dict[str, Any]) -> None:
    _check_types(body, _HISTORY)


def _check_attempt(body: dict[str, Any]) -> None:
    _check_plain(body["fingerprint"] + body["idempotency_key"])
    if not 0 < body["attempt"] <= MAX_COUNT:
        raise ValueError("an attempt's number is out of range")


def _check_plain(digits: str) -> None:
    """Such a text goes into other records as it is: nothing in it may need escaping."""
    if not digits.strip("-") or digits.encode("ascii", "replace").translate(None, _PLAIN):
        raise ValueError("a hash or a key is none")


def _check_request(request: dict[str, Any]) -> None:
    _check_types(request, _REQUEST)
    _check_clock(request["vector_clock"])
    if request["parent"] is not None and type(request["parent"]) is not str:
        raise ValueError("a parent is no hash")
    for entry in request["read_set"]:
        if len(entry) != 2 or type(entry["domain"]) is not str or type(entry["seq"]) is not int:
            raise ValueError("a read set entry is malformed")


def _check_clock(clock: dict[str, Any]) -> None:
    for agent, count in clock.items():
        if type(count) is not int or not 0 < count <= MAX_COUNT or not agent:
            raise ValueError("a clock holds what is no count")


def _check_types(body: dict[str, Any], shape: Shape) -> None:
    names, types = shape
    found = tuple(map(type, names(body)))
    if found != types:
        raise ValueError("a member is of a wrong type")


Shape = tuple[Callable[[Mapping[str, Any]], tuple[Any, ...]], tuple[type, ...]]


def _shape(**members: type) -> Shape:
    return itemgetter(*members), tuple(members.values())


_PLAIN: Final = string.ascii_letters.encode() + string.digits.encode() + b"-"
_NUMBER: Final = frozenset({int, float})
_NUMBER_OR_NONE: Final = frozenset({int, float, type(None)})
_OPEN: Final = _shape(
    attempt=int, fingerprint=str, idempotency_key=str, request=dict, started_ms=int, state=str
)
_DONE: Final = _shape(
    attempt=int, cert=dict, fingerprint=str, hash=str, idempotency_key=str, started_ms=int
)
_CLEARED: Final = _shape(
    attempt=int, fingerprint=str, idempotency_key=str, request=dict, started_ms=int
)
_HEAD: Final = _shape(clock=dict, hash=str)
_HISTORY: Final = _shape(by=str, forced=bool, intent=str, reason=str, seq=int, word=str)
_REQUEST: Final = _shape(
    agent=str, args=dict, domain=str, intent=str, read_set=list, tool=str, vector_clock=dict
)
_CHECKS: Final[dict[str, Callable[[Any], None]]] = {
    OPEN: _check_open,
    DONE: _check_done,
    CLEARED: _check_cleared,
    DOMAIN: _check_domain,
    HISTORY: _check_history,
}
_KEYS: Final = {
    OPEN: ("intent/", "intent@"),
    DONE: ("intent/", "intent@"),
    CLEARED: ("intent/", "intent@"),
    DOMAIN: ("domain/", "domain@"),
    HISTORY: ("history/", "history@"),
}
