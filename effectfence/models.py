"""What callers hand in and get back: pydantic, frozen, validated once at the border.

Invariants:

1. A request's args are encoded canonically when it is built; what is in the fingerprint, the record
   and the certificate are those bytes. The model shows what they decode to, whatever the caller
   does to its objects afterwards; only what `ignore` names stays the caller's own.
2. A certificate or ticket that this library made itself is not validated again (`_trusted`); one
   that comes from outside is.
3. `ticket -> JSON -> ticket` and `cert -> JSON -> cert` give equal objects.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from effectfence.canonical import MAX_DEPTH, check_name, decode, encode
from effectfence.clock import VectorClock

Text = Annotated[str, StringConstraints(strict=True)]
Name = Annotated[
    str, StringConstraints(strict=True, min_length=1, max_length=1024, pattern=r"^[^\x00]*$")
]
Hash = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
OnLeaseExpiry = Literal["fence", "takeover"]
IntentState = Literal["in_flight", "expired", "unknown", "done", "cleared"]

MAX_READ_SET = 64
_UNCHANGING = frozenset({str, int, float, bool, type(None)})
"""A dict of these alone needs no copy but pydantic's."""
UNRECORDED = "$effectfence.unrecorded"
"""The one member of the object that stands in for a result that was not recorded."""

Model = TypeVar("Model", bound=BaseModel)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class ReadSetEntry(_Frozen):
    """One fact that a decision was based on: `domain` stood at `seq` (0: never reserved)."""

    domain: Name
    seq: Annotated[int, Field(ge=0, strict=True)]


class EffectRequest(_Frozen):
    """One logical action that an agent wants to happen once.

    `intent` names the action and `domain` what it contends for; `tool` and `args` say what it does;
    `agent` is a stable role, never a run id. `ignore` lists dotted paths inside `args` that are in
    neither the fingerprint nor anything that is stored. `result_ttl` (seconds) and
    `on_lease_expiry` override the fence's configuration. Raises `pydantic.ValidationError` (a
    `ValueError`) that names the bad field or the path of the bad value.
    """

    intent: Name
    domain: Name
    tool: Name
    args: dict[str, Any] = Field(default_factory=dict)
    agent: Name
    read_set: tuple[ReadSetEntry, ...] = ()
    parent: Hash | None = None
    known_clock: VectorClock = Field(default_factory=lambda: VectorClock.trusted({}))
    ignore: tuple[Text, ...] = ()
    result_ttl: Annotated[float, Field(strict=True, gt=0)] | None = None
    on_lease_expiry: OnLeaseExpiry | None = None

    def model_post_init(self, _context: Any, /) -> None:
        said = self.__dict__  # a model's own attributes take three times as long
        _check_names(said)
        if said["read_set"]:
            _check_read_set(said["read_set"])
        given, ignore = said["args"], said["ignore"]
        args = without(given, ignore) if ignore else given
        said["_args"] = data = encode(args, max_depth=MAX_DEPTH, name="args")
        if not _UNCHANGING.issuperset(map(type, args.values())):
            said["args"] = own = decode(data)
            for path in ignore:
                _put_back(own, given, path.split("."))

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self:
        """A validated copy, so that what was derived from the old fields never stays."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **(update or {})})

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy(update={"args": copy.deepcopy(self.args, memo)})

    def __getstate__(self) -> dict[Any, Any]:
        """What is pickled: not what a fence worked out for itself."""
        state = super().__getstate__()
        kept = {name: value for name, value in state["__dict__"].items() if name != "_claim"}
        return {**state, "__dict__": kept}


class PreparedEffect(_Frozen):
    """The ticket behind `Fresh`: run the effect, then report back with it.

    `attempt > 1` says that an earlier attempt may have fired; `idempotency_key` stays the same over
    attempts: pass it to a provider that takes one.
    """

    request: EffectRequest
    seq: Annotated[int, Field(ge=1, strict=True)]
    vector_clock: VectorClock
    attempt: Annotated[int, Field(ge=1, strict=True)]
    token: Hash
    idempotency_key: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=64)]
    started_ms: Annotated[int, Field(ge=0, strict=True)]
    """Unix milliseconds by the preparer's wall clock, to find the effect in the tool's own log."""

    @property
    def intent(self) -> str:
        return self.request.intent

    @property
    def domain(self) -> str:
        return self.request.domain

    @property
    def tool(self) -> str:
        return self.request.tool

    @property
    def args(self) -> dict[str, Any]:
        return self.request.args

    @property
    def agent(self) -> str:
        return self.request.agent

    def __repr__(self) -> str:
        """Without the token: whoever holds it speaks for the intent."""
        return f"PreparedEffect(intent={self.intent!r}, seq={self.seq}, attempt={self.attempt})"

    __str__ = __repr__


class EffectCert(_Frozen):
    """The content-addressed record of a committed effect.

    `hash` is the lower-case hex SHA-256 over the canonical JSON of the other ten members.
    """

    intent: Text
    parent: Text | None
    domain: Text
    seq: Annotated[int, Field(strict=True)]
    tool: Text
    args: dict[str, Any]
    result: Any
    vector_clock: VectorClock
    read_set: tuple[ReadSetEntry, ...]
    agent: Text
    hash: Text

    def canonical(self) -> bytes:
        """The bytes that the hash is over."""
        return encode(self.model_dump(mode="python", exclude={"hash"}), max_depth=MAX_DEPTH + 1)

    def verify(self) -> bool:
        """Whether the hash is that of the content."""
        try:
            return hashlib.sha256(self.canonical()).hexdigest() == self.hash
        except ValueError:
            return False

    @property
    def result_recorded(self) -> bool:
        """False if a marker stands in place of a result that was not JSON, or too large."""
        return not (isinstance(self.result, dict) and set(self.result) == {UNRECORDED})


@dataclass(frozen=True, slots=True)
class Fresh:
    """Run it, then commit `prepared`."""

    prepared: PreparedEffect


@dataclass(frozen=True, slots=True)
class Replay:
    """It already ran; do not run it. `cert` is its certificate."""

    cert: EffectCert


Admission = Fresh | Replay


@dataclass(frozen=True, slots=True)
class Head:
    """A domain's highest certified number, with that certificate's hash and clock."""

    seq: int
    hash: str
    clock: VectorClock


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent saw, ready for its next request's `read_set` and `known_clock`."""

    read_set: tuple[ReadSetEntry, ...]
    clock: VectorClock
    heads: dict[str, Head | None]


class IntentRecord(_Frozen):
    """What is recorded about an intent, for people. Ages are seconds of the ledger's own clock."""

    intent: str
    domain: str
    state: IntentState
    agent: str
    tool: str
    args: dict[str, Any]
    attempt: int
    seq: int
    started_at: float
    """Unix time by the holder's wall clock: to find it in the tool's own log."""
    age_seconds: float
    lease_seconds_left: float | None
    reason: str | None
    idempotency_key: str
    cert: EffectCert | None
    scope: tuple[str, ...] = ()
    """The names given to `fence.scoped`, outermost first."""


class RecordedWord(_Frozen):
    """What was said of an intent, beside its record: an operator's or a reconciler's `settle` and
    `clear`, a holder's `release`, a `late_commit`."""

    intent: str
    scope: tuple[str, ...]
    seq: int
    """Of the attempt that it is about."""
    word: str
    by: str
    reason: str
    forced: bool
    age_seconds: float
    """By the ledger's own clock."""


class FenceConfig(_Frozen):
    """Seconds throughout; zero, negative and NaN are a `ValueError`.

    `lease_ttl`: how long a holder is presumed alive without a heartbeat. `max_hold`: renewals end
    there. `result_ttl`: how long an outcome is replayed (`None`: for ever). `unknown_ttl`: set on
    purpose only; an unknown outcome then becomes runnable by itself. `retry_horizon`: the longest
    time after which a caller may still retry; must not exceed `result_ttl`.
    """

    lease_ttl: Seconds = 60.0
    max_hold: Seconds | None = None
    result_ttl: Seconds | None = 86400.0
    unknown_ttl: Seconds | None = None
    history_ttl: Seconds = 90 * 86400.0
    retry_horizon: Seconds | None = None
    on_lease_expiry: OnLeaseExpiry = "fence"
    causal: Literal["off", "strict"] = "off"
    max_record_bytes: Annotated[int, Field(strict=True, gt=0)] = 1024 * 1024

    def model_post_init(self, _context: Any, /) -> None:
        self.check_lifetime(math.inf if self.result_ttl is None else self.result_ttl)

    def check_lifetime(self, lives: float) -> None:
        """`ValueError` for a `result_ttl` that a caller's retry could outlast."""
        if self.retry_horizon is not None and self.retry_horizon > lives:
            raise ValueError(
                f"retry_horizon ({self.retry_horizon:g} s) is longer than result_ttl "
                f"({lives:g} s): a retry after that would run a second time"
            )


class FenceStats(_Frozen):
    """How this process's attempts ended; exactly one counter counts each attempt."""

    admitted: int = 0
    replayed: int = 0
    refused_stale: int = 0
    refused_race: int = 0
    refused_inflight: int = 0
    refused_unknown: int = 0
    refused_conflict: int = 0
    refused_causal: int = 0
    commit_refused: int = 0
    late_commits: int = 0

    @property
    def total(self) -> int:
        return self.admitted + self.prevented

    @property
    def prevented(self) -> int:
        """Attempts that did not run a second time."""
        return (
            self.replayed
            + self.refused_stale
            + self.refused_race
            + self.refused_inflight
            + self.refused_unknown
            + self.refused_conflict
            + self.refused_causal
        )

    def log_line(self) -> str:
        """All of it in one line, for a log."""
        return (
            f"effectfence since boot: admitted={self.admitted} replayed={self.replayed} "
            f"refused(stale={self.refused_stale} race={self.refused_race} "
            f"in-flight={self.refused_inflight} unknown={self.refused_unknown} "
            f"conflict={self.refused_conflict} causal={self.refused_causal}) "
            f"total={self.total} prevented={self.prevented}"
        )


def without(args: dict[str, Any], ignore: tuple[str, ...]) -> dict[str, Any]:
    """A copy of `args` lacking what the dotted paths name; paths that lead nowhere are no error."""
    kept = dict(args)
    for path in ignore:
        _drop(kept, path.split("."))
    return kept


def _drop(node: dict[str, Any], steps: list[str]) -> None:
    head, *rest = steps
    if not rest:
        node.pop(head, None)
    elif isinstance(below := node.get(head), dict):
        node[head] = below = dict(below)
        _drop(below, rest)


def _put_back(node: dict[str, Any], original: dict[str, Any], steps: list[str]) -> None:
    """Undo `_drop`: what the steps lead to in `original`, the very same object, into `node`."""
    head, *rest = steps
    if head not in original:
        return
    if not rest:
        node[head] = original[head]
    elif isinstance(below := original[head], dict) and head in node:
        _put_back(node[head], below, rest)


def _trusted(model: type[Model], fields: dict[str, Any]) -> Model:
    """A frozen model from fields this library made itself.

    What `model_construct` does, without its walk over the defaults: 0.5 against 2.1 µs for
    validating (a test holds it equal to a validated one).
    """
    made = model.__new__(model)
    _set_dict(made, fields)
    _set_fields_set(made, _ALL_FIELDS[model])
    _set_extra(made, None)
    _set_private(made, None)
    return made


_set_dict, _set_fields_set, _set_extra, _set_private = (
    BaseModel.__dict__[slot].__set__ for slot in BaseModel.__slots__
)
"""The four slots that make up a model, past its refusal to be changed."""

_ALL_FIELDS: dict[type[BaseModel], set[str]] = {
    model: set(model.model_fields) for model in (ReadSetEntry, PreparedEffect, EffectCert)
}
"""Shared by all instances: nothing changes the set of a frozen model's fields."""


def _check_names(said: dict[str, Any]) -> None:
    """Length in bytes; the rest of what a name must be, its constraints have checked already."""
    if not f"{said['intent']}{said['domain']}{said['tool']}{said['agent']}".isascii():
        for field in ("intent", "domain", "tool", "agent"):
            check_name(said[field], what=field)


def _check_read_set(read_set: tuple[ReadSetEntry, ...]) -> None:
    if len(read_set) > MAX_READ_SET:
        raise ValueError(f"read_set has {len(read_set)} entries, at most {MAX_READ_SET}")
    domains = [entry.domain for entry in read_set]
    for domain in domains:
        check_name(domain, what="read_set: a domain")
    if len(set(domains)) != len(domains):
        twice = next(domain for domain in domains if domains.count(domain) > 1)
        raise ValueError(f"read_set names {twice!r} twice")
