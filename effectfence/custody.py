"""What a fence still owes: tickets handed out and not reported, work begun and not ended.

Invariants:

1.  A ticket is held from the moment it is handed out until its holder reported, or until its lease
    lapsed: from then on the ledger itself says what became of it.
2.  Every task that the fence starts is owned here until it ends; its failure is told or logged.
3.  Nothing is lost between asking and holding: a `prepare` that is under way counts as owed.
4.  Draining and seeing work through are bounded. What is not finished by then goes on as an owned
    task, and is the lease's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from effectfence.claims import Claim, Holder
from effectfence.errors import FenceError
from effectfence.models import PreparedEffect
from effectfence.stores.watchers import wake

_log = logging.getLogger("effectfence")

_SEE_THROUGH_SECONDS: Final = 30.0
_LOOK_FOR_LAPSED: Final = 1024


@dataclass(slots=True, eq=False)
class Held:
    prepared: PreparedEffect
    claim: Claim
    holder: Holder
    scope: str
    lapses_at: float
    """By the monotonic clock; moved by every renewal."""


class Custody:
    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        """By token."""
        self.entering = 0
        self.owned: set[asyncio.Task[Any]] = set()
        self._draining: list[asyncio.Future[None]] = []
        self._look_at = _LOOK_FOR_LAPSED

    # --- tickets ----------------------------------------------------------------------------------

    def hold(self, held: Held) -> None:
        self.held[held.holder.token] = held
        if len(self.held) > self._look_at:
            self._forget_lapsed()
            self._look_at = max(_LOOK_FOR_LAPSED, 2 * len(self.held))

    def renewed(self, holder: Holder, seconds: float) -> None:
        if (held := self.held.get(holder.token)) is not None:
            held.lapses_at = time.monotonic() + seconds

    def let_go(self, holder: Holder) -> None:
        """Its outcome is recorded, or is no longer this holder's to report."""
        held = self.held.get(holder.token)
        if held is not None and held.holder.seal == holder.seal:
            del self.held[holder.token]
        if self._draining:
            self._wake()

    def _forget_lapsed(self) -> None:
        now = time.monotonic()
        for token, held in list(self.held.items()):
            if held.lapses_at <= now:
                self.held.pop(token, None)

    # --- tasks ------------------------------------------------------------------------------------

    def own(self, work: Coroutine[Any, Any, Any], *, logged: bool = True) -> asyncio.Task[Any]:
        """Start `work` as a task of the fence's own. `logged=False`: somebody awaits it."""
        task = asyncio.get_running_loop().create_task(work)
        self.owned.add(task)
        task.add_done_callback(self._ended if logged else self._ended_quietly)
        return task

    async def see_through(self, work: Coroutine[Any, Any, Any]) -> None:
        """Finish `work` although this task is being cancelled; within a bound."""
        task = self.own(work)
        deadline = time.monotonic() + _SEE_THROUGH_SECONDS
        while not task.done() and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait((task,), timeout=left)
            except asyncio.CancelledError:
                continue

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.WARNING if isinstance(error, FenceError) else logging.ERROR
            _log.log(level, "%s", error, exc_info=level == logging.ERROR)
        self._ended_quietly(task)

    def _ended_quietly(self, task: asyncio.Task[Any]) -> None:
        self.owned.discard(task)
        if not task.cancelled():
            task.exception()  # it is told elsewhere, or was just logged
        self._wake()

    # --- draining ---------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Wait until nothing is owed, at most `seconds`; also in a task that was cancelled, where
        `asyncio.timeout` would end in that cancellation before Python 3.11.4."""
        deadline = time.monotonic() + seconds
        while True:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._draining.append(future)
            try:
                self._forget_lapsed()
                left = deadline - time.monotonic()
                if left <= 0 or not (self.held or self.owned or self.entering):
                    return
                await asyncio.wait((future,), timeout=min(left, self._until_next_lapse()))
            finally:
                self._draining.remove(future)

    def _until_next_lapse(self) -> float:
        now = time.monotonic()
        return max(0.0, min((h.lapses_at - now for h in list(self.held.values())), default=3600.0))

    def entered(self) -> None:
        """A `prepare` got its answer."""
        self.entering -= 1
        if self._draining:
            self._wake()

    def _wake(self) -> None:
        for future in tuple(self._draining):
            wake(future)
