"""The keeper: renews what this process holds, even while an effect blocks its caller's event loop.

One daemon thread with an event loop of its own, started with the first effect that is kept. It
sleeps until the next renewal is due (a third of the lease); an effect that ends before that costs
two dictionary operations and never wakes it.

Invariants:

1. `_kept` is touched under `_lock` only.
2. A lease that is lost is renewed no more, and its holder is told once, on the holder's own loop.
3. `close` returns when the thread has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from effectfence.errors import FenceError, LedgerUnavailable
from effectfence.models import PreparedEffect

_log = logging.getLogger("effectfence")


Renew = Callable[[PreparedEffect], Awaitable[object]]
"""`heartbeat` of the fence, or scope, that the ticket is of; raises when the lease is lost."""


@dataclass(slots=True, eq=False)
class Kept:
    """One ticket that is renewed; `lost` is set on `loop` when that can't be done any more."""

    prepared: PreparedEffect
    renew: Renew
    lease_seconds: float
    due: float
    loses_at: float
    lost: asyncio.Event
    loop: asyncio.AbstractEventLoop

    def renewed(self, now: float) -> None:
        self.due = now + self.lease_seconds / 3
        self.loses_at = now + self.lease_seconds

    def tell(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.lost.set)
        except RuntimeError:  # its loop is closed: nobody is left to be told
            return


class Keeper:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: set[Kept] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._sleeps_until = 0.0
        self._closed = False

    def keep(
        self, prepared: PreparedEffect, renew: Renew, lease_seconds: float, lost: asyncio.Event
    ) -> Kept:
        """Renew `prepared` from now on, until `drop`."""
        kept = Kept(prepared, renew, lease_seconds, 0, 0, lost, asyncio.get_running_loop())
        kept.renewed(time.monotonic())
        with self._lock:
            self._kept.add(kept)
            if self._thread is None:
                self._start()
            elif kept.due < self._sleeps_until:
                self._rouse()
        return kept

    def drop(self, kept: Kept) -> None:
        """Renew it no more."""
        with self._lock:
            self._kept.discard(kept)

    def close(self) -> None:
        """End the thread; blocks until it did (it only ever waits for a renewal under way)."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._rouse()
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="effectfence-leases", daemon=True
        )
        self._thread.start()
        started.wait()

    def _rouse(self) -> None:
        if self._loop is not None and self._wake is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        while True:
            self._wake.clear()
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                due = [kept for kept in self._kept if kept.due <= now]
                self._sleeps_until = self._next_due(now)
            if due:
                await asyncio.gather(*map(self._attend, due))
                continue
            try:
                async with asyncio.timeout(self._sleeps_until - now):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _next_due(self, now: float) -> float:
        """When to look again. It is left standing when an effect ends early, so that a busy stream
        of short effects rouses the thread once a third of a lease and no more."""
        return min((kept.due for kept in self._kept), default=now + 3600)

    async def _attend(self, kept: Kept) -> None:
        try:
            await kept.renew(kept.prepared)
        except LedgerUnavailable as error:
            now = time.monotonic()
            if now < kept.loses_at and not self._closed:
                _log.warning("renewing %r: %s", kept.prepared.intent, error)
                kept.due = min(now + max(kept.lease_seconds / 10, 0.01), kept.loses_at)
                return
        except FenceError as error:
            _log.warning("lease of %r is lost: %s", kept.prepared.intent, error)
        except Exception:  # a fault of ours must not end the other holders' renewals
            _log.exception("renewing %r failed", kept.prepared.intent)
        else:
            kept.renewed(time.monotonic())
            return
        self.drop(kept)
        kept.tell()
