"""The `Idempotency-Key` header: its rules alone, without a framework and without I/O.

IETF draft-ietf-httpapi-idempotency-key-header-07 (15 October 2025); where the draft leaves things
open, Stripe's habits: keys of up to 255 characters, quoted or bare, and `Idempotent-Replayed: true`
on an answer that comes from the record.

    request ─▶ parse_key ─▶ request_of ─▶ the fence ── fresh ──▶ handler ─▶ verdict ─▶ Recorded
                                              └─ ran before ──▶ Recorded.of, with the mark

Invariants:

1. The intent is made of the key alone (`http:<key>`), and the scope of the principal alone. What
   the request says is in the fingerprint: method, path, sorted query, body and chosen headers. The
   same key with anything else is a conflict, never the first one's answer.
2. Nothing of a body, a query or a header is kept of a request but its hash.
3. A key is freed only by an answer that says that nothing ran. What does not say whether it ran is
   unknown.
4. What is replayed never holds what belongs to one exchange or one client alone (`NEVER_REPLAYED`).
5. Every answer that the fence gives by itself is a row of `PROBLEMS`; its `type` leads to that
   row's words, and the documentation's table is held to it by a test.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

from effectfence.canonical import encode, strict_decode
from effectfence.errors import (
    FenceError,
    IntentConflict,
    IntentInFlight,
    LedgerCorrupt,
    LedgerUnavailable,
    OutcomeUnknown,
    Refused,
    ResultNotRecorded,
)
from effectfence.models import UNRECORDED, EffectRequest

KEY_HEADER: Final = "idempotency-key"
REPLAYED_HEADER: Final = "idempotent-replayed"
LIFETIME_HEADER: Final = "idempotency-key-lifetime"
"""On every answer to a fenced request: for how many seconds its key is remembered."""
OUTCOME_HEADER: Final = "effectfence-outcome"
"""A handler's own word on its answer, one of the verdicts; taken off before the client sees it."""

MAX_KEY_LENGTH: Final = 255
POLICY_PATH: Final = "/.well-known/idempotency-key"
"""Where the middlewares publish what this page says; the `type` of problems leads there."""

Headers = Sequence[tuple[str, str]]
"""Names in lower case."""
Verdict = Literal["record", "release", "unknown"]
VERDICTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "record": "it is the outcome: recorded, and replayed to duplicates",
        "release": "nothing ran: the key is free again",
        "unknown": "it may have run: duplicates get 409 until somebody who knows has settled it",
    }
)


# --- the key --------------------------------------------------------------------------------------


class BadKey(ValueError):
    """The header cannot be a key; the message says why."""


def parse_key(fields: Sequence[str]) -> str:
    """The key in the header's fields: a structured-field string (RFC 9651), or the same bare.

    `"abc"` and `abc` are one key. Raises `BadKey`.
    """
    if len(fields) != 1:
        raise BadKey(f"the header was sent {len(fields)} times; once is wanted")
    text = fields[0].strip(" \t")
    if len(text) > 4 * MAX_KEY_LENGTH:
        raise BadKey(f"it has {len(text)} characters; 1 to {MAX_KEY_LENGTH} are wanted")
    key = _quoted(text) if text.startswith('"') else _bare(text)
    if not key:
        raise BadKey("it is empty")
    if len(key) > MAX_KEY_LENGTH:
        raise BadKey(f"it has {len(key)} characters; 1 to {MAX_KEY_LENGTH} are wanted")
    return key


_STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_BARE_ITEM: Final = (
    rf"-?[0-9]{{1,15}}(?:\.[0-9]{{1,3}})?|{_STRING}|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*"
    r"|:[A-Za-z0-9+/=]*:|\?[01]|@-?[0-9]{1,15}"
)
_PARAMETER: Final = rf" *; *[a-z*][a-z0-9_\-.*]*(?:=(?:{_BARE_ITEM}))?"
_ITEM: Final = re.compile(rf"({_STRING})(?:{_PARAMETER})*")
_BARE_KEY: Final = re.compile(r"[!#-+\--\[\]-~]*")
"""Visible ASCII but `"`, `\\` and the comma, by which proxies join what was sent twice."""


def _quoted(text: str) -> str:
    """The string of an sf-string; its parameters, which have no meaning here, are left aside."""
    found = _ITEM.fullmatch(text)
    if found is None:
        raise BadKey(
            "it begins with a quote, but is no string of RFC 9651: printable ASCII between two "
            'quotes, with \\" and \\\\ as its only escapes'
        )
    string = found[1][1:-1]
    return re.sub(r"\\(.)", r"\1", string) if "\\" in string else string


def _bare(text: str) -> str:
    if _BARE_KEY.fullmatch(text) is None:
        raise BadKey(
            "without quotes it must be visible ASCII, without spaces, commas, quotes and "
            'backslashes; write it as a string: "…"'
        )
    return text


# --- the policy -----------------------------------------------------------------------------------

OUTCOMES: Final[Mapping[str, Verdict]] = MappingProxyType(
    {
        "2xx": "record",
        "3xx": "record",
        "4xx": "record",  # a definite refusal of the business
        "401": "release",  # these are said before anything is done
        "405": "release",
        "406": "release",
        "407": "release",
        "411": "release",
        "413": "release",
        "414": "release",
        "415": "release",
        "417": "release",
        "421": "release",
        "425": "release",
        "426": "release",
        "428": "release",
        "429": "release",
        "431": "release",
        "408": "unknown",  # the request was read to its end: something else timed out
        "499": "unknown",
        "5xx": "unknown",
    }
)
"""What an answer's status says of the effect, where neither route nor handler says otherwise."""

VALIDATION: Final = "validation"
"""The name, among outcomes, of a framework's own answer to a request that it could not parse."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests with a key are fenced: data, printable, overridable per route (`but`).

    `required`: no key is a 400. `wait_seconds`: how long a duplicate waits for one in flight, and
    `retry_after_seconds` what it is told then. `result_ttl`: the life of a key in seconds (the
    fence's own if left out). `max_request_bytes`: a longer body is a 413. `max_response_bytes`: of
    a longer one only the fact is recorded. `request_headers`: these are in the fingerprint too.
    `unrecorded_headers`: not replayed, besides those that never are. `outcomes`: a status ("503"),
    a class ("5xx") or "validation" to "record", "release" or "unknown".
    """

    required: bool = False
    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    wait_seconds: float = 10.0
    retry_after_seconds: int = 1
    result_ttl: float | None = None
    max_request_bytes: int = 1 << 20
    max_response_bytes: int = 1 << 18
    request_headers: tuple[str, ...] = ()
    unrecorded_headers: tuple[str, ...] = ()
    outcomes: Mapping[str, Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("request_headers", "unrecorded_headers"):
            object.__setattr__(self, name, _names(getattr(self, name), name, str.lower))
        object.__setattr__(self, "methods", frozenset(_names(self.methods, "methods", str.upper)))
        outcomes = {str(status): verdict for status, verdict in self.outcomes.items()}
        object.__setattr__(self, "outcomes", MappingProxyType(outcomes))
        for status, verdict in self.outcomes.items():
            _check_outcome(status, verdict)
        for name in ("wait_seconds", "max_request_bytes", "max_response_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; zero or more is wanted")
        if self.retry_after_seconds < 1:
            raise ValueError("retry_after_seconds is less than one")
        if self.result_ttl is not None and not 0 < self.result_ttl < math.inf:
            raise ValueError(f"result_ttl is {self.result_ttl}; more than zero seconds are wanted")

    def but(self, **changes: Any) -> Policy:
        """The same policy, with these fields changed; `outcomes` are added to those it has."""
        if "outcomes" in changes:
            changes["outcomes"] = {**self.outcomes, **changes["outcomes"]}
        return replace(self, **changes)

    def verdict(self, status: int) -> Verdict:
        """What a status says: the route's own word on it, then on its class, then the default."""
        exact, kind = str(status), f"{status // 100}xx"
        for table in (self.outcomes, OUTCOMES):
            for name in (exact, kind):
                if name in table:
                    return table[name]
        return "unknown"

    def judge(self, status: int, said: str | None, body: bytes | None) -> Verdict:
        """The verdict on an answer: the handler's own word (`OUTCOME_HEADER`) before its status."""
        if said is not None:
            return _said_verdict(said)
        if status in (400, 422) and body is not None and is_validation_answer(status, body):
            return self.outcomes.get(VALIDATION, "release")
        return self.verdict(status)

    def describe(self) -> str:
        """The table of outcomes, for people: one line for each status that is spoken of."""
        names = [VALIDATION, *sorted({*OUTCOMES, *self.outcomes} - {VALIDATION})]
        known = {**OUTCOMES, VALIDATION: "release", **self.outcomes}
        return "\n".join(f"{name:<10}  {known[name]}" for name in names)

    __str__ = describe


def _names(given: Any, field: str, written: Callable[[str], str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(f"{field} is {given!r}; several names are wanted, such as ({given!r},)")
    return tuple(map(written, given))


def _check_outcome(status: str, verdict: str) -> None:
    if status != VALIDATION and re.fullmatch(r"[1-5](?:[0-9]{2}|xx)", status) is None:
        raise ValueError(
            f"outcomes: {status!r} is no status; '503', '5xx' or 'validation' is wanted"
        )
    if verdict not in VERDICTS:
        raise ValueError(f"outcomes: {verdict!r} is none of {', '.join(VERDICTS)}")


def _said_verdict(said: str) -> Verdict:
    """A word that is none of the verdicts says nothing, so nothing is known."""
    match said:
        case "record" | "release":
            return said
        case _:
            return "unknown"


def is_validation_answer(status: int, body: bytes) -> bool:
    """Whether a framework said this itself, of a request that it handed to nobody.

    By the shape of FastAPI's 422 and of Litestar's 400, which say where in the request it failed.
    """
    if len(body) > 1 << 16 or b'"detail"' not in body:
        return False
    try:
        said = json.loads(body)
    except ValueError:
        return False
    if not isinstance(said, dict):
        return False
    if status == 422:
        found = said.get("detail")
        return set(said) == {"detail"} and _each(found, lambda one: _is_place(one.get("loc")))
    return (
        said.get("status_code") == status
        and str(said.get("detail")).startswith("Validation failed for ")
        and _each(said.get("extra"), lambda one: "message" in one)
    )


def _each(found: Any, holds: Callable[[dict[str, Any]], bool]) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(one, dict) and holds(one) for one in found)
    )


def _is_place(loc: Any) -> bool:
    return (
        isinstance(loc, list)
        and bool(loc)
        and loc[0] in ("body", "query", "path", "header", "cookie")
    )


# --- routes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """What is fenced, and how. `name` is its domain: `http` where no pattern is given."""

    name: str
    policy: Policy | None
    """`None`: requests pass unfenced."""


class Routes:
    """Policies by pattern: `"POST /orders/{id}/refund"`, `"/orders/{rest:path}"`; first match wins.

    `{name}` is one segment, `{name:path}` all that follows. `None` leaves a route unfenced.
    """

    def __init__(self, default: Policy, routes: Mapping[str, Policy | None]) -> None:
        self._default = Route("http", default)
        self._patterns = [
            (*_compiled(pattern), Route(f"http:{pattern}", policy))
            for pattern, policy in routes.items()
        ]

    def policies(self) -> Iterable[Policy]:
        for route in (self._default, *(route for *_, route in self._patterns)):
            if route.policy is not None:
                yield route.policy

    def named(self) -> Iterable[Route]:
        """Every route, the default last."""
        yield from (route for *_, route in self._patterns)
        yield self._default

    def match(self, method: str, path: str) -> Route:
        for wanted, pattern, route in self._patterns:
            if wanted in (None, method) and pattern.fullmatch(path):
                return route
        return self._default


def _compiled(pattern: str) -> tuple[str | None, re.Pattern[str]]:
    method, _, path = pattern.rpartition(" ")
    if not path.startswith("/") or (method and not method.isalpha()):
        raise ValueError(f"{pattern!r} is no route; 'POST /orders/{{id}}' or '/orders' is wanted")
    parts = re.split(r"(\{[^{}]*\})", path)
    regex = "".join(
        (".+" if part.endswith(":path}") else "[^/]+") if part.startswith("{") else re.escape(part)
        for part in parts
    )
    return method.upper() or None, re.compile(regex)


# --- the request ----------------------------------------------------------------------------------

LOOKED_AT: Final = frozenset({KEY_HEADER, "content-type", "content-encoding", "content-length"})
"""The headers of a request that these rules read, besides those that a policy chooses."""
_CLIPPED: Final = 200


def request_of(
    *,
    key: str,
    method: str,
    path: str,
    query: bytes,
    headers: Headers,
    body: bytes,
    domain: str,
    policy: Policy,
) -> EffectRequest:
    """The action that a request with a key asks for.

    `path` and `query` as they were sent. In the arguments stand the method, the path, and hashes.
    """
    shown = path if len(path) <= _CLIPPED else f"{path[:_CLIPPED]}…{_hash(path.encode())}"
    args = {
        "method": method,
        "path": shown,
        "query": _query_digest(query) if query else "",
        "body": _body_digest(headers, body) if body else "",
    }
    if policy.request_headers:
        args["headers"] = _headers_digest(headers, policy.request_headers)
    return EffectRequest(
        intent=f"http:{key}",
        domain=domain,
        tool=f"{method} {shown}",
        args=args,
        agent="http",
        result_ttl=None if policy.result_ttl is None else float(policy.result_ttl),
    )


def _query_digest(query: bytes) -> str:
    """Pairs in the order of their names; what stands under one name keeps its order."""
    pairs = parse_qsl(query, keep_blank_values=True)
    return _digest(sorted(pairs, key=lambda pair: pair[0]))


def _body_digest(headers: Headers, body: bytes) -> str:
    """JSON as what it says (key order and spaces do not matter); all else as its bytes."""
    if _is_json(headers):
        try:
            return f"json:{_hash(encode(strict_decode(body, max_bytes=len(body))))}"
        except ValueError:
            pass  # not JSON, or JSON that says one thing twice
    return f"bytes:{_hash(body)}"


def _is_json(headers: Headers) -> bool:
    kind = ""
    for name, value in headers:
        if name == "content-encoding":
            return False
        if name == "content-type":
            kind = value.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def _headers_digest(headers: Headers, chosen: tuple[str, ...]) -> str:
    wanted = set(chosen)
    pairs = [(name.encode(), value.strip().encode()) for name, value in headers if name in wanted]
    return _digest(sorted(pairs, key=lambda pair: pair[0]))


def _digest(pairs: Iterable[tuple[bytes, bytes]]) -> str:
    """Lengths stand before the parts, so that no two lists are written alike."""
    parts = (b"%d:%b%d:%b" % (len(a), a, len(b), b) for a, b in pairs)
    return _hash(b"".join(parts))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def differences(asked: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """What two requests under one key differ in, for their caller."""
    names = ("method", "path", "query", "body", "headers")
    found = [name for name in names if asked.get(name) != recorded.get(name)]
    return ", ".join(found) or "route"


def principal_scope(principal: object) -> str | None:
    """A principal's own room; one too long to be a name goes by its hash."""
    if principal is None:
        return None
    if not isinstance(principal, str) or not principal:
        raise ValueError("the principal must be a non-empty string, or None")
    size = len(principal.encode("utf-8", "surrogatepass"))
    return principal if size <= _CLIPPED else f"sha256:{_hash(principal.encode())}"


# --- the answer -----------------------------------------------------------------------------------

NEVER_REPLAYED: Final = frozenset(
    {
        # hop by hop, or of the connection
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "alt-svc",
        "via",
        # worked out anew
        "content-length",
        "date",
        "age",
        "server",
        "server-timing",
        LIFETIME_HEADER,
        REPLAYED_HEADER,
        OUTCOME_HEADER,
        # of one client, or one moment
        "set-cookie",
        "set-cookie2",
        "clear-site-data",
        "authentication-info",
        "www-authenticate",
        "retry-after",
        "ratelimit",
        "ratelimit-policy",
        "ratelimit-limit",
        "ratelimit-remaining",
        "ratelimit-reset",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
    }
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer as it is kept and replayed, byte for byte."""

    status: int
    headers: Headers
    body: bytes

    def as_result(self) -> dict[str, Any]:
        """What stands in the ledger: the body as text where it is UTF-8, else in base64."""
        kept = {"http_status": self.status, "http_headers": [list(pair) for pair in self.headers]}
        try:
            return {**kept, "http_body": self.body.decode("utf-8")}
        except UnicodeDecodeError:
            return {**kept, "http_body_base64": base64.b64encode(self.body).decode()}

    @classmethod
    def of(cls, result: Any) -> Recorded:
        """The answer that a result stands for.

        An operator's word may be as short as it likes: `{"http_status": 201, "http_body": {…}}`,
        or any other JSON, which is answered with 200 as it stands.
        """
        if isinstance(result, dict) and _is_answer(result):
            return cls._of_answer(result)
        return cls._of_json(200, (), result)

    @classmethod
    def _of_answer(cls, result: dict[str, Any]) -> Recorded:
        headers = tuple((name.lower(), value) for name, value in result.get("http_headers", ()))
        if "http_body_base64" in result:
            return cls(result["http_status"], headers, base64.b64decode(result["http_body_base64"]))
        body = result.get("http_body", "")
        if isinstance(body, str):
            return cls(result["http_status"], headers, body.encode())
        return cls._of_json(result["http_status"], headers, body)

    @classmethod
    def _of_json(cls, status: int, headers: Headers, value: Any) -> Recorded:
        if not any(name == "content-type" for name, _ in headers):
            headers = (*headers, ("content-type", "application/json"))
        return cls(status, headers, encode(value))


_ANSWER_MEMBERS: Final = {"http_status", "http_headers", "http_body", "http_body_base64"}
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def _is_answer(result: dict[str, Any]) -> bool:
    """Whether it can be sent as an answer: an operator may have written it."""
    status, headers = result.get("http_status"), result.get("http_headers", [])
    if not set(result) <= _ANSWER_MEMBERS or type(status) is not int or not 200 <= status <= 599:
        return False
    try:
        base64.b64decode(result.get("http_body_base64", ""), validate=True)
    except (ValueError, TypeError):
        return False
    return isinstance(headers, list) and all(map(_is_field, headers))


def _is_field(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(part, str) for part in pair)
        and _TOKEN.fullmatch(pair[0]) is not None
        and _FIELD_VALUE.fullmatch(pair[1]) is not None
    )


def kept_headers(headers: Iterable[tuple[str, str]], policy: Policy) -> Headers:
    """The headers that are replayed."""
    also = policy.unrecorded_headers
    return tuple(pair for pair in headers if pair[0] not in NEVER_REPLAYED and pair[0] not in also)


def unrecorded(status: int, why: str) -> dict[str, str]:
    """The marker in place of an answer that was not kept: that it ran is recorded all the same."""
    return {UNRECORDED: f"the answer ({status}) {why}"}


# --- problems (RFC 9457) --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """One answer of the fence's own: what it is called, and what its reader is to do."""

    slug: str
    status: int
    title: str
    ran: bool | None
    advice: str
    again: bool | None = None
    """Whether a client that retries by itself is told to (Stripe's libraries listen)."""


PROBLEMS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        kind.slug: kind
        for kind in (
            Kind(
                "key-missing",
                400,
                "Idempotency-Key is missing",
                False,
                "Nothing ran. Send the request with a key of its own, such as a UUID.",
            ),
            Kind(
                "key-invalid",
                400,
                "Idempotency-Key is not a key",
                False,
                'Nothing ran. A key is 1 to 255 characters of ASCII, "quoted" or bare, sent once.',
            ),
            Kind(
                "not-authenticated",
                401,
                "Not authenticated",
                False,
                "Nothing ran. Authenticate; the key is still free.",
            ),
            Kind(
                "body-too-large",
                413,
                "The body is too large to be fenced",
                False,
                "Nothing ran. Send less, or without a key where the service allows it.",
            ),
            Kind(
                "key-reused",
                422,
                "Idempotency-Key is already used",
                False,
                "Nothing ran. The key stands for another request: other method, path, query, body "
                "or chosen header. One key names one action; give the new one a key of its own.",
            ),
            Kind(
                "in-flight",
                409,
                "A request is outstanding for this Idempotency-Key",
                False,
                "Nothing ran by this request. Send the same one again after Retry-After.",
                True,
            ),
            Kind(
                "outcome-unknown",
                409,
                "Nobody knows whether it ran",
                None,
                "It was not run again, and sending it again does not help. Look at what it did, or "
                "ask the service's operator, who settles it (it ran) or clears it (it did not).",
                False,
            ),
            Kind(
                "result-not-recorded",
                409,
                "It ran, its answer was not recorded",
                True,
                "It ran once and was not run again. Ask the service for what it did; the answer "
                "was too long to keep, or was a stream.",
                False,
            ),
            Kind(
                "refused",
                409,
                "Refused by the fence",
                False,
                "Nothing ran. Look again at what the request was decided on.",
                False,
            ),
            Kind(
                "not-executed",
                503,
                "It did not run",
                False,
                "Nothing ran, and the key is free again: send the same request after Retry-After.",
            ),
            Kind(
                "ledger-unavailable",
                503,
                "The ledger is unavailable",
                False,
                "Nothing ran: without its record it must not. Send the same request again later.",
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer of the fence's own."""

    kind: Kind
    detail: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    retry_after: int | None = None

    @classmethod
    def named(cls, slug: str, detail: str, retry_after: int | None = None, **facts: Any) -> Problem:
        return cls(PROBLEMS[slug], detail, facts, retry_after)

    def answer(self, docs: str) -> Recorded:
        """As problem+json; `docs` is where the table of problems stands."""
        said = {
            "type": f"{docs}#{self.kind.slug}",
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
            "ran": self.kind.ran,
            **self.facts,
        }
        headers = [("content-type", "application/problem+json"), ("cache-control", "no-store")]
        if self.retry_after is not None:
            headers.append(("retry-after", str(self.retry_after)))
        if self.kind.again is not None:
            headers.append(("stripe-should-retry", str(self.kind.again).lower()))
        return Recorded(self.kind.status, headers, json.dumps(said).encode())


class Unauthenticated(Exception):
    """Raised by a `principal` callable: the request is answered with 401, and nothing runs."""

    def __init__(self, challenge: str = "Bearer") -> None:
        super().__init__(challenge)
        self.challenge = challenge


def problem_of(error: FenceError, policy: Policy) -> Problem:
    """What a refusal of the fence is called on the wire. The intent is named as operators know it;
    recorded reasons are theirs alone."""
    wait = policy.retry_after_seconds
    facts = {"intent": error.facts["intent"]} if "intent" in error.facts else {}
    match error:
        case IntentConflict():
            return Problem.named("key-reused", "This key stands for another request.", **facts)
        case IntentInFlight():
            said = "A request with this key is still running; this one ran nothing."
            return Problem.named("in-flight", said, wait, **facts)
        case OutcomeUnknown():
            said = "A request with this key may or may not have run. It was not run again."
            return Problem.named("outcome-unknown", said, **facts)
        case ResultNotRecorded():
            said = f"It ran once and was not run again: {error.reason}."
            return Problem.named("result-not-recorded", said, intent=error.cert.intent)
        case LedgerUnavailable() | LedgerCorrupt():
            said = "The record of what ran can't be read or written; nothing ran."
            return Problem.named("ledger-unavailable", said, wait)
        case Refused():
            return Problem.named("refused", str(error), code=error.code)
    raise error


# --- what is published ----------------------------------------------------------------------------


def lifetime_of(policy: Policy, result_ttl: float | None) -> str:
    """The life of a key, as `LIFETIME_HEADER` says it; `result_ttl` is the fence's."""
    seconds = policy.result_ttl if policy.result_ttl is not None else result_ttl
    return "forever" if seconds is None else str(int(seconds))


def policy_page(routes: Routes, result_ttl: float | None) -> bytes:
    """What clients are to know, as a page whose anchors the problems' `type` leads to."""
    rows = [
        f"<tr><td><code>{html.escape(route.name.removeprefix('http:'))}</code></td>"
        f"<td>{', '.join(sorted(route.policy.methods))}</td>"
        f"<td>{'required' if route.policy.required else 'optional'}</td>"
        f"<td>{_lifetime_words(lifetime_of(route.policy, result_ttl))}</td></tr>"
        for route in routes.named()
        if route.policy is not None
    ]
    problems = [
        f'<h2 id="{kind.slug}">{kind.status} {html.escape(kind.title)}</h2>'
        f"<p>{html.escape(kind.advice)}</p>"
        for kind in PROBLEMS.values()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Idempotency-Key</title>'
        "<h1>Idempotency-Key</h1>"
        "<p>Send a request that must happen once with a key of its own, such as a UUID, in the "
        "header <code>Idempotency-Key</code>, and repeat it with the same key until it is "
        "answered. It runs once; a repetition gets the recorded answer, marked with "
        "<code>Idempotent-Replayed: true</code>.</p>"
        "<table><tr><th>route</th><th>methods</th><th>key</th><th>remembered for</th></tr>"
        f"{''.join(rows).replace('<code>http</code>', 'all others')}</table>"
        f"<p>After that time a key is free, and the same request runs again.</p>{''.join(problems)}"
    ).encode()


def _lifetime_words(lifetime: str) -> str:
    return "ever" if lifetime == "forever" else f"{lifetime} seconds"
