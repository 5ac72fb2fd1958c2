"""An event loop with virtual time and a seeded schedule: a run is a function of its seed.

1. Among the callbacks that are ready, the seed chooses which runs next.
2. When none is ready, time jumps to the next timer. When there is no timer either, and the main
   task has not ended, everybody waits for ever: `Deadlock`.
3. No thread, selector or clock of the machine takes part.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready, and no timer will make it so."""


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.errors: list[dict[str, Any]] = []
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()

    def run_until_complete(self, main: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                self._step()
            return task.result()
        finally:
            events._set_running_loop(before)

    def _step(self) -> None:
        ready = self._ready
        while not ready:
            if not self._timers:
                raise Deadlock(f"at {self.now:.3f} s everybody waits for ever")
            when, _, timer = heapq.heappop(self._timers)
            if not timer._cancelled:  # type: ignore[attr-defined]
                self.now = max(self.now, when)
                ready.append(timer)
        chosen = int(self.random.random() * len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        handle = ready.pop()
        if not handle._cancelled:  # type: ignore[attr-defined]
            handle._run()

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context or copy_context())
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""
