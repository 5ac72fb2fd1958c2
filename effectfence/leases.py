"""The keeper: renews what this process holds, even while an effect blocks its caller's event loop.

One daemon thread with an event loop of its own, started with the first effect that is kept. It
sleeps until the next renewal is due (a third of the lease); an effect that ends before that costs
two dictionary operations and never wakes it.

Invariants:

1. `_kept` is touched under `_lock` only.
2. A lease that is lost is renewed no more, and its holder is told once: any thread can see it at
   once, and the holder's own loop is woken.
3. A lease is taken to end no later than the ledger ends it: what was granted counts from before it
   was asked for. Where `max_hold` cuts it short, its holder is told at that end; where the ledger
   does not answer, at most a tenth of a lease after it.
4. A holder whose loop is closed can report no more: its lease runs out.
5. `keep` returns when the thread runs, or raises why it does not and keeps nothing; it never waits
   for a thread that failed. `aclose` returns when the thread has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from effectfence.errors import FenceError, LedgerUnavailable
from effectfence.models import PreparedEffect
from effectfence.stores.watchers import wake

_log = logging.getLogger("effectfence")


Renew = Callable[[PreparedEffect], Awaitable[float]]
"""Of the fence, or scope, that the ticket is of: gives the seconds that were granted from now on,
and raises when the lease is lost."""

Lapsed = Callable[[PreparedEffect], None]
"""Called once if its lease ends and no ledger says so."""


def _nobody(prepared: PreparedEffect) -> None:
    return None


class Lost(asyncio.Event):
    """Set on the holder's loop when its lease is lost."""

    known = False
    """The same for any thread, and while that loop is blocked."""


@dataclass(slots=True, eq=False)
class Kept:
    """One ticket that is renewed; `lost` is set on `loop` when that can't be done any more."""

    prepared: PreparedEffect
    renew: Renew
    lease_seconds: float
    """What is granted where `max_hold` does not cut it short."""
    lost: Lost
    loop: asyncio.AbstractEventLoop
    due: float = 0.0
    loses_at: float = 0.0
    final: bool = False
    """Nothing is granted beyond `loses_at`."""
    lapsed: Lapsed = _nobody

    def granted(self, asked_at: float, seconds: float) -> None:
        self.loses_at = asked_at + seconds
        self.final = seconds < self.lease_seconds
        self.due = self.loses_at if self.final else asked_at + seconds / 3

    def tell(self) -> None:
        self.lost.known = True
        with suppress(RuntimeError):  # its loop is closed: nobody is left to be woken
            self.loop.call_soon_threadsafe(self.lost.set)


class Keeper:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self._clock = clock
        self._new_loop = new_loop
        self._lock = threading.Lock()
        self._kept: set[Kept] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._sleeps_until = 0.0
        self._closed = False
        self._ended = False
        self._ending: list[asyncio.Future[None]] = []

    def keep(
        self,
        prepared: PreparedEffect,
        renew: Renew,
        lease_seconds: float,
        lost: Lost,
        lapsed: Lapsed = _nobody,
    ) -> Kept:
        """Renew `prepared`, whose lease has just begun, from now on until `drop`."""
        kept = Kept(prepared, renew, lease_seconds, lost, asyncio.get_running_loop(), lapsed=lapsed)
        kept.granted(self._clock() - min(_age(prepared), lease_seconds / 3), lease_seconds)
        with self._lock:
            if self._thread is None:
                self._start()
            elif kept.due < self._sleeps_until:
                self._rouse()
            self._kept.add(kept)
        return kept

    def drop(self, kept: Kept) -> None:
        """Renew it no more."""
        with self._lock:
            self._kept.discard(kept)

    async def aclose(self) -> None:
        """End the thread, and wait until it did (it only ever waits for a renewal under way).

        Needs no other thread: when the interpreter ends, none can be started any more.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
            self._rouse()
            if thread is None or self._ended:
                return
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ending.append(future)
        await future
        thread.join()  # it has nothing left to do

    def _start(self) -> None:
        started, failed = threading.Event(), list[BaseException]()
        thread = threading.Thread(
            target=self._run, args=(started, failed), name="effectfence-leases", daemon=True
        )
        thread.start()
        started.wait()
        if failed:
            raise failed[0]
        self._thread = thread

    def _rouse(self) -> None:
        if self._loop is not None and self._wake is not None:
            with suppress(RuntimeError):  # it is closed: the thread has ended
                self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self, started: threading.Event, failed: list[BaseException]) -> None:
        try:
            with asyncio.Runner(loop_factory=self._new_loop) as runner:
                runner.run(self._serve(started))
        except BaseException as error:  # also what ends a thread quietly: the starter waits
            failed.append(error)
            if started.is_set():
                _log.exception("leases are renewed no more, until the next effect begins")
        finally:
            started.set()
        with self._lock:
            if failed and self._thread is threading.current_thread():
                self._thread = None  # the next `keep` starts another
            self._ended = self._closed
            ending, self._ending = self._ending, []
        for future in ending:
            wake(future)

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        while True:
            self._wake.clear()
            with self._lock:
                if self._closed:
                    return
                now = self._clock()
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
        if kept.loop.is_closed():
            self.drop(kept)
        elif not await self._renewed(kept):
            self.drop(kept)
            kept.tell()

    async def _renewed(self, kept: Kept) -> bool:
        """Whether it is still to be kept."""
        asked_at = self._clock()
        intent, left = kept.prepared.intent, kept.loses_at - asked_at
        if kept.final and left <= 0:
            _log.warning("lease of %r is lost: it was held for max_hold", intent)
            kept.lapsed(kept.prepared)
            return False
        try:
            async with asyncio.timeout(max(left, kept.lease_seconds / 10)):
                granted = await kept.renew(kept.prepared)
            kept.granted(asked_at, granted)
            return True
        except LedgerUnavailable as error:
            _log.warning("renewing %r: %s", intent, error)
            now = self._clock()
            kept.due = min(now + max(kept.lease_seconds / 10, 0.01), kept.loses_at)
            if self._closed or now < kept.loses_at:
                return not self._closed
            kept.lapsed(kept.prepared)
        except TimeoutError:
            _log.warning("lease of %r is lost: the ledger did not answer in time", intent)
            kept.lapsed(kept.prepared)
        except FenceError as error:
            _log.warning("lease of %r is lost: %s", intent, error)
        except Exception:  # a fault of ours must not end the other holders' renewals
            _log.exception("renewing %r failed", intent)
        return False


def _age(prepared: PreparedEffect) -> float:
    """Seconds since shortly before its lease was asked for. By the wall clock, which may jump: what
    it says is used within bounds only."""
    return max(time.time() - prepared.started_ms / 1000, 0.0)
