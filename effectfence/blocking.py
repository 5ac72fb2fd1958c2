"""The door for synchronous code: `effectfence.blocking.open(ledger)`, no asyncio in sight.

    with effectfence.blocking.open("effects.jsonl") as fence:
        cert = fence.run(request, charge_card, 4900)

Or `per_process(ledger)` for programs that fork workers (Celery, gunicorn): it can be made, and
functions decorated with it, before they do. Invariants:

1.  What is opened here is closed here: by `close`, or at exit, when what is held is waited for and
    then recorded.
2.  `per_process` opens the ledger at most once in each process, at the first call there, and never
    hands out what another process opened.
"""

from __future__ import annotations

import os
import threading

from effectfence.background import Ended, background
from effectfence.errors import LedgerUnavailable
from effectfence.fence import EffectFence, Opening
from effectfence.models import FenceConfig
from effectfence.stores.address import shown
from effectfence.threads import BlockingEffect, BlockingFence, ask, refuse_event_loop

__all__ = ["BlockingEffect", "BlockingFence", "open", "per_process"]


def open(
    ledger: str | os.PathLike[str] = "memory:",
    config: FenceConfig | None = None,
    *,
    accept_rollback: bool = False,
    require_durable: bool = False,
) -> BlockingFence:
    """A fence over `ledger`, for synchronous code; also a context manager, which closes it.

    Takes and raises what `EffectFence.open` does, and `RuntimeError` in a thread that runs an event
    loop. Not to be carried over a fork: open it in the child, or see `per_process`.
    """
    opening = EffectFence.open(
        ledger, config, accept_rollback=accept_rollback, require_durable=require_durable
    )
    return BlockingFence(_Owned(opening))


def per_process(
    ledger: str | os.PathLike[str],
    config: FenceConfig | None = None,
    *,
    accept_rollback: bool = False,
    require_durable: bool = False,
) -> BlockingFence:
    """The same, opened by the first call in each process: for workers that are forked.

    It may be a module's global, and decorate its functions. Nothing is opened yet, so that what
    `open` raises is raised by that first call. Closed, it is opened again by the next one.
    `ValueError` for `memory:`, which every process would have for itself.
    """
    opening = EffectFence.open(
        ledger, config, accept_rollback=accept_rollback, require_durable=require_durable
    )
    if os.fsdecode(ledger) == "memory:":
        raise ValueError(
            "memory: is another fence in each process, and each would run the effect; name a file, "
            "such as per_process('effects.jsonl')"
        )
    return BlockingFence(_PerProcess(opening))


class _Owned:
    """A fence that was opened here."""

    def __init__(self, opening: Opening) -> None:
        self.config = opening._config
        self._fence = _opened(opening)
        self._home = background()
        self._home.at_exit(self._fence.aclose)

    def fence(self) -> EffectFence:
        return self._fence

    async def aclose(self, drain_seconds: float) -> None:
        await self._fence.aclose(drain_seconds)
        self._home.no_more(self._fence.aclose)


class _PerProcess:
    """One of each process's own, opened when it is first asked for."""

    def __init__(self, opening: Opening) -> None:
        self.config = opening._config
        self._opening = opening
        self._owned: _Owned | None = None

    def fence(self) -> EffectFence:
        found = self._owned
        if found is None or found.fence()._forked():
            found = self._open()
        return found.fence()

    def _open(self) -> _Owned:
        refuse_event_loop()
        with _opening:
            if self._owned is None or self._owned.fence()._forked():
                self._owned = _Owned(self._opening)
            return self._owned

    async def aclose(self, drain_seconds: float) -> None:
        owned, self._owned = self._owned, None
        if owned is not None and not owned.fence()._forked():
            await owned.aclose(drain_seconds)


def _opened(opening: Opening) -> EffectFence:
    async def close(fence: EffectFence) -> None:
        await fence.aclose(0.0)

    refuse_event_loop()
    try:
        return ask(opening._open, undo=close)
    except Ended as ended:
        raise LedgerUnavailable(ledger=shown(opening._ledger), reason=str(ended)) from None


_opening = threading.Lock()


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()  # whoever held it is not in this process


os.register_at_fork(after_in_child=_after_fork)
