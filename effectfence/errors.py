"""Every way a call can be answered with "no", and whether the effect ran.

Each error owns its message, its facts (attributes), a stable `code` and `ran`:

    ran False   nothing ran; asking again later is safe
    ran True    the effect did run
    ran None    nobody here knows: reconcile, do not retry

Test `ran`, never the class. An error raised after the effect's function returned carries its value
as `.result`. The order of the classes in this file is their precedence where several could apply;
`ERRORS` lists them in that order, and every surface (HTTP status, exit code, the README's table)
is derived from it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from effectfence.models import EffectCert, PreparedEffect


class FenceError(Exception):
    """The base of all of them. Facts are keyword arguments and attributes; survives pickle."""

    code: ClassVar[str] = "fence_error"
    http_status: ClassVar[int] = 500
    ran: bool | None = None
    result: Any
    """What the effect's function returned; present only if it had returned."""

    def __init__(self, **facts: Any) -> None:
        self.facts: Mapping[str, Any] = facts
        for name, value in facts.items():
            setattr(self, name, value)
        super().__init__(self.message())

    def message(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.facts.items())

    def __str__(self) -> str:
        """What is known by now: `ran` can change on the error's way to the caller."""
        return self.message()

    def with_result(self, result: Any) -> FenceError:
        """The same error, now carrying what the effect's function returned."""
        self.result = result
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A result that can't be pickled goes as its `repr`: the error must arrive."""
        state = dict(self.__dict__)
        if "result" in state:
            try:
                pickle.dumps(state["result"])
            except Exception:  # whatever an object of the caller's raises
                state["result"] = repr(state["result"])
        return _rebuild, (type(self), dict(self.facts)), state


def _rebuild(kind: type[FenceError], facts: dict[str, Any]) -> FenceError:
    return kind(**facts)


class Refused(FenceError):
    """Nothing was run by this request."""

    code = "refused"
    http_status = 409
    ran: bool | None = False


class IntentConflict(Refused):
    """The intent stands for another action: other tool, domain or args."""

    code = "intent_conflict"
    http_status = 422
    intent: str
    differs: tuple[str, ...]

    def message(self) -> str:
        return (
            f"intent {self.intent!r} already stands for another action "
            f"(other {', '.join(self.differs)}); nothing ran. One intent names one action: "
            "give the new action an intent of its own."
        )


class OutcomeUnknown(Refused):
    """The effect may or may not have fired; fenced until somebody who knows says so."""

    code = "outcome_unknown"
    ran = None
    intent: str
    reason: str
    agent: str
    attempt: int

    def message(self) -> str:
        return (
            f"nobody knows whether {self.intent!r} ran (attempt {self.attempt} by {self.agent}: "
            f"{self.reason}). It was not run again. Look at the tool's own records, then say "
            "`settle` (it ran) or `clear` (it did not)."
        )


IntentFailed = OutcomeUnknown
"""The original's name for it."""


class IntentInFlight(Refused):
    """Another holder is running it right now."""

    code = "intent_in_flight"
    intent: str
    agent: str
    attempt: int
    seconds_left: float

    def message(self) -> str:
        return (
            f"{self.intent!r} is being run by {self.agent} (attempt {self.attempt}, its lease ends "
            f"in {self.seconds_left:.1f} s unless renewed); nothing was run by this request. "
            "Wait for its outcome, or ask again later."
        )


class ReadSetStale(Refused):
    """The decision was based on facts that have moved on."""

    code = "read_set_stale"
    domain: str
    expected: int
    actual: int

    def message(self) -> str:
        return (
            f"decided on {self.domain!r} at seq {self.expected}, the world is at seq "
            f"{self.actual}; nothing ran. Observe again, then decide anew."
        )


class CausalConflict(Refused):
    """Something in the domain is not in the request's past."""

    code = "causal_conflict"
    domain: str
    reason: str

    def message(self) -> str:
        return (
            f"the request does not know what happened in {self.domain!r} ({self.reason}); "
            "nothing ran. Observe the domain, then decide anew."
        )


class DomainRace(Refused):
    """Another action took the number that this one had decided on."""

    code = "domain_race"
    domain: str
    expected: int
    actual: int

    def message(self) -> str:
        return (
            f"lost the race for {self.domain!r}: expected seq {self.expected}, it is at "
            f"{self.actual}; nothing ran. Observe again, then decide anew."
        )


class CommitStale(FenceError):
    """The effect ran on facts that moved meanwhile: not certified, and fenced as unknown."""

    code = "commit_stale"
    http_status = 409
    ran = True
    intent: str
    domain: str
    expected: int
    actual: int

    def message(self) -> str:
        return (
            f"{self.intent!r} ran, but {self.domain!r} moved from seq {self.expected} to "
            f"{self.actual} meanwhile: not certified and not runnable again. An operator must look "
            "at what it did, then `settle` it."
        )


class LeaseLost(FenceError):
    """This ticket no longer speaks for its intent."""

    code = "lease_lost"
    http_status = 409
    intent: str
    reason: str
    certified: bool = False
    """Whether it is lost because its own outcome is certified already."""

    def message(self) -> str:
        speaks = f"this ticket no longer speaks for {self.intent!r} ({self.reason})."
        if self.certified:
            return f"{speaks} Nothing changed; its certificate stands."
        return f"{speaks} Stop the effect if it still runs; what it did is not certified."


class CommitConflict(FenceError):
    """Already committed, with another result; nothing changed."""

    code = "commit_conflict"
    http_status = 409
    ran = True
    intent: str
    cert: EffectCert

    def message(self) -> str:
        return (
            f"{self.intent!r} is already committed with another result; nothing changed. "
            "The recorded one is in `.cert`."
        )


class ResultNotRecorded(FenceError):
    """It ran once and is not run again, but its result was not kept."""

    code = "result_not_recorded"
    http_status = 409
    ran = True
    cert: EffectCert
    reason: str

    def message(self) -> str:
        return (
            f"{self.cert.intent!r} ran once and was not run again, but its result was not recorded "
            f"({self.reason}). Ask the tool itself for it."
        )


class InvalidTicket(FenceError):
    """Forged, altered, or from another ledger."""

    code = "invalid_ticket"
    http_status = 400
    intent: str
    reason: str

    def message(self) -> str:
        return f"not a ticket of this ledger for {self.intent!r}: {self.reason}. Nothing changed."


class HolderAlive(FenceError):
    """An operator's word that could cause a second effect, refused unless forced."""

    code = "holder_alive"
    http_status = 409
    intent: str
    state: str
    reason: str

    def message(self) -> str:
        if self.state == "in use":
            return f"the domain {self.intent!r} is in use: {self.reason}. Nothing changed."
        if self.state.startswith("in attempt"):
            return f"{self.intent!r} is {self.state}: {self.reason}. Nothing changed; look again."
        return (
            f"{self.intent!r} is {self.state}: {self.reason}. Nothing changed. With force the word "
            "is taken, and a second effect is then on whoever forced it."
        )


class NoSuchIntent(FenceError):
    """Nothing is recorded under this name."""

    code = "no_such_intent"
    http_status = 404
    ran = False
    intent: str

    def message(self) -> str:
        return f"nothing is recorded for {self.intent!r}; nothing changed."


class LedgerUnavailable(FenceError):
    """The ledger cannot be read or written: fail closed."""

    code = "ledger_unavailable"
    http_status = 503
    ran: bool | None = False
    ledger: str
    reason: str
    closed: bool = False
    """Whether it stays so until it is opened anew: asking this fence again is in vain."""
    prepared: PreparedEffect
    """On a commit that could not be written: commit it again with this and `.result`."""

    def message(self) -> str:
        tail = {
            False: "Nothing ran.",
            True: "The effect ran, its outcome is not recorded yet: commit it again.",
            None: "What was asked may or may not have been recorded.",
        }[self.ran]
        return f"the ledger {self.ledger} is unavailable: {self.reason}. {tail}"


class LedgerCorrupt(FenceError):
    """The ledger holds what this library cannot have written; nothing was changed."""

    code = "ledger_corrupt"
    http_status = 503
    ran: bool | None = False
    prepared: PreparedEffect
    """On a commit: what to commit with once the ledger is mended."""
    path: str
    line: int
    """Counted from 1."""
    offset: int
    """Of the line's first byte, from 0."""
    reason: str

    def message(self) -> str:
        return (
            f"{self.path} is damaged at line {self.line} (byte {self.offset}): {self.reason}. "
            f"{_RAN[self.ran]} and nothing was changed. "
            f"Look: `tail -c +{self.offset + 1} {self.path} | head -c 400`."
        )


_RAN = {
    False: "Nothing was run",
    True: "The effect ran, its outcome is not recorded,",
    None: "Whether the effect ran is not recorded,",
}

ERRORS: tuple[type[FenceError], ...] = (
    IntentConflict,
    OutcomeUnknown,
    IntentInFlight,
    ReadSetStale,
    CausalConflict,
    DomainRace,
    CommitStale,
    LeaseLost,
    CommitConflict,
    ResultNotRecorded,
    InvalidTicket,
    HolderAlive,
    NoSuchIntent,
    LedgerUnavailable,
    LedgerCorrupt,
)
"""All concrete errors, in precedence."""


class NotExecuted(Exception):
    """Raise it inside an effect to say: it certainly did not run; the intent is free again."""
