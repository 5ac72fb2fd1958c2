"""What a fence decided, told to whoever wants to know: listeners, and the log.

Invariants:

1. An event is told after what it says is recorded, in the thread and task that decided it.
2. No event holds arguments, a result, or a reason: these may be secret. They stand in the ledger.
3. A listener that raises is logged, once, and changes nothing; it is told of the next event too.
4. Where nobody listens and debug lines are off, a decision costs one look at both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

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

_WARNED: Final = frozenset({"aborted", "commit_refused", "late_commit", "lease_lost"})
"""After these nobody may know whether an effect ran, or it may have run twice."""


@dataclass(frozen=True, slots=True)
class FenceEvent:
    """One decision. What is not known, or makes no sense for its kind, is `None`.

    `code`: of the error that was raised; `ran`: what it says. `seconds`: how long this call took,
    waiting included. `held_seconds`: since the ticket was handed out, by this process's wall clock.
    `certificate`: the hash of the certificate that was minted or replayed; `parent`: of its cause.
    """

    kind: Kind
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


Listener = Callable[[FenceEvent], object]


class Events:
    """Those who listen to one fence and its scopes."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._complained_of: set[int] = set()
        self._lock = threading.Lock()

    @property
    def wanted(self) -> bool:
        """Whether anybody would learn of an event."""
        return bool(self._listeners) or _log.isEnabledFor(logging.DEBUG)

    def add(self, listener: Listener) -> None:
        if not callable(listener):
            raise TypeError(f"a callable is wanted, not {type(listener).__name__}")
        with self._lock:
            self._listeners += (listener,)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)

    def tell(self, event: FenceEvent) -> None:
        _write(event)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                self._complain(listener)

    def _complain(self, listener: Listener) -> None:
        if id(listener) not in self._complained_of:
            self._complained_of.add(id(listener))
            _log.exception("a listener failed: %r (this is said once of it)", listener)


def _write(event: FenceEvent) -> None:
    """One line a decision; its facts go along for formatters that write them as JSON."""
    level = logging.WARNING if event.kind in _WARNED else logging.DEBUG
    if not _log.isEnabledFor(level) or not _log.hasHandlers():
        return  # a program that set up no logging wants no lines on its standard error
    facts = {
        f"effectfence_{name}": getattr(event, name)
        for name in FenceEvent.__dataclass_fields__
        if getattr(event, name) not in (None, ())
    }
    about = "" if event.intent is None else f" {event.intent!r}"
    code = "" if event.code is None else f" ({event.code})"
    attempt = "" if event.attempt is None else f", attempt {event.attempt}"
    _log.log(level, "%s%s%s%s", event.kind, about, code, attempt, extra=facts)
