"""What a fence decided, told to whoever wants to know: listeners, and the log.

Invariants:

1. An event is told after what it says is recorded, in the thread that decided it, before the call
   that asked goes on. In memory and on a file, an intent's events of one event loop come in the
   order of its record. A database's answers, other loops and other processes may overtake.
2. No event holds arguments, a result, or a reason: these may be secret. They stand in the ledger.
3. A listener that raises is logged, once, and changes nothing; it is told of the next event too.
4. Where nobody listens and debug lines are off, a decision costs one look at both.
5. A line of the log shows control characters; it never holds them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from effectfence.errors import OutcomeUnknown
from effectfence.models import PreparedEffect

_log = logging.getLogger("effectfence")

Kind = Literal[
    "admitted",
    "replayed",
    "refused",
    "committed",
    "commit_refused",
    "late_commit",
    "aborted",
    "released",
    "renewed",
    "lease_lost",
    "settled",
    "cleared",
    "swept",
    "unavailable",
]

Verb = Literal[
    "prepare", "commit", "abort", "release", "heartbeat", "settle", "clear", "sweep"
]  # fmt: skip

_WARNED: Final = frozenset({"aborted", "commit_refused", "late_commit", "lease_lost"})
"""After these nobody may know whether an effect ran, or it may have run twice."""
_REPORTS: Final = frozenset({"commit", "abort", "release"})


@dataclass(frozen=True, slots=True)
class FenceEvent:
    """One decision. What is not known, or makes no sense for its kind, is `None`.

    `call`: which of the fence's calls was decided (`heartbeat`: the fence's own renewals, too).
    `code`: of the error that was raised; `ran`: what it says. `seconds`: how long this call took,
    waiting included. `held_seconds`: since the ticket was handed out, by this process's wall clock.
    `certificate`: the hash of the certificate that was minted or replayed; `parent`: of its cause.
    """

    kind: Kind
    call: Verb
    intent: str | None = None
    domain: str | None = None
    tool: str | None = None
    agent: str | None = None
    scope: tuple[str, ...] = ()
    attempt: int | None = None
    seq: int | None = None
    code: str | None = None
    ran: bool | None = None
    certificate: str | None = None
    parent: str | None = None
    seconds: float | None = None
    held_seconds: float | None = None
    by: str | None = None
    """Who said it: an operator's or a reconciler's name."""
    count: int | None = None
    """How many records were swept."""


_FACTS: Final = tuple(field.name for field in fields(FenceEvent))

Listener = Callable[[FenceEvent], object]
Leave = Callable[[], None]
Enter = Callable[[PreparedEffect, tuple[str, ...]], Leave]
"""Called in the task, or thread, whose body is about to run; what it gives, when that has ended."""


class Events:
    """Those who listen to one fence and its scopes."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._surrounding: tuple[Enter, ...] = ()
        self._complained_of: list[object] = []
        self._lock = threading.Lock()

    @property
    def wanted(self) -> bool:
        """Whether anybody would learn of any event."""
        return bool(self._listeners) or _log.isEnabledFor(logging.DEBUG)

    def add(self, listener: Listener) -> None:
        if not callable(listener):
            raise TypeError(f"a callable is wanted, not {type(listener).__name__}")
        with self._lock:
            if listener not in self._listeners:
                self._listeners += (listener,)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)
            self._complained_of = [each for each in self._complained_of if each != listener]

    def tell(self, event: FenceEvent) -> None:
        _write(event)
        for listener in self._listeners:
            try:
                listener(event)
            except (Exception, asyncio.CancelledError):  # the latter of a future it looked at
                self._complain(listener)

    def _complain(self, called: object) -> None:
        with self._lock:
            known = called in self._complained_of
            if not known:
                self._complained_of.append(called)
        if not known:
            _log.exception("a listener failed: %r (this is said once of it)", called)

    # --- around a body ----------------------------------------------------------------------------

    def surround(self, enter: Enter) -> None:
        """Have `enter` called before, and what it gives after, each body that the fence runs."""
        with self._lock:
            self._surrounding += (enter,)

    def surround_no_more(self, enter: Enter) -> None:
        with self._lock:
            self._surrounding = tuple(each for each in self._surrounding if each != enter)

    def enter(self, prepared: PreparedEffect, scope: tuple[str, ...]) -> list[Leave]:
        entered = []
        for enter in self._surrounding:
            try:
                entered.append(enter(prepared, scope))
            except Exception:
                self._complain(enter)
        return entered

    @property
    def surrounded(self) -> bool:
        return bool(self._surrounding)


def left(entered: list[Leave]) -> None:
    """In the context that was entered, the last first."""
    for leave in reversed(entered):
        with suppress(Exception):
            leave()


# --- the log --------------------------------------------------------------------------------------


def warned_of(kind: Kind, call: Verb, code: str | None) -> bool:
    """Whether people should know, whoever listens."""
    return (
        kind in _WARNED
        or (kind == "unavailable" and call in _REPORTS)
        or code == OutcomeUnknown.code
    )


def _write(event: FenceEvent) -> None:
    """One line a decision; its facts go along for formatters that write them as JSON."""
    warned = warned_of(event.kind, event.call, event.code)
    level = logging.WARNING if warned else logging.DEBUG
    if not _log.isEnabledFor(level) or not _log.hasHandlers():
        return  # a program that set up no logging wants no lines on its standard error
    facts = {
        f"effectfence_{name}": _shown(value)
        for name in _FACTS
        if (value := getattr(event, name)) not in (None, ())
    }
    about = "" if event.intent is None else f" {event.intent!r}"
    code = "" if event.code is None else f" ({event.code})"
    attempt = "" if event.attempt is None else f", attempt {event.attempt}"
    _log.log(level, "%s%s%s%s", event.kind, about, code, attempt, extra=facts)


def _shown(value: Any) -> Any:
    """A name as it may stand in a line."""
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
