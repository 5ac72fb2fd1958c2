"""What both middlewares share: the fence's life, and one request's way through it.

    begin ─▶ an Attempt: the certificate of an earlier run, or one to be settled
    settle ─▶ recorded, freed or unknown, and only then the end of the answer

Invariants:

1. A fence that was given stays its owner's; one that was opened here is closed here.
2. What runs a handler is a task of this desk's, never the client's: a client that hangs up cancels
   nothing. `close` waits for these tasks, within a bound; what runs longer is recorded as unknown.
3. A ledger in memory is not shared by processes: known to serve with several, it is refused.
4. An answer that is the outcome is recorded before its client has seen the end of it. If it cannot
   be, the client gets it all the same: the effect ran.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import warnings
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from effectfence.effects import Effect
from effectfence.errors import (
    FenceError,
    IntentConflict,
    LedgerUnavailable,
    NotExecuted,
    ResultNotRecorded,
)
from effectfence.fence import EffectFence
from effectfence.models import UNRECORDED, EffectCert, EffectRequest, FenceConfig
from effectfence.web.idempotency import (
    LIFETIME_HEADER,
    POLICY_PATH,
    REPLAYED_HEADER,
    BadKey,
    Policy,
    Problem,
    Recorded,
    Routes,
    Verdict,
    differences,
    lifetime_of,
    parse_key,
    policy_page,
    problem_of,
)
from effectfence.web.workers import Workers, workers_here

_log = logging.getLogger("effectfence")

MEMORY: Final = "memory:"


class Unshared(RuntimeError):
    """A ledger in memory behind several processes: each would run the same request once."""


class UnsharedWarning(UserWarning):
    """A ledger in memory, and there may be other processes that serve the same application."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a handler ended: `result` is what is recorded, `reason` why nothing is."""

    verdict: Verdict
    result: dict[str, Any] | None = None
    reason: str = ""


class HandlerFailed(Exception):
    """It ended in a way that does not say whether it ran."""


class Attempt:
    """One request in the fence: what ran before, or what runs now and is settled here once."""

    def __init__(self, effect: Effect) -> None:
        self._effect = effect
        self.settled = False

    @property
    def earlier(self) -> EffectCert | None:
        """The certificate of an earlier run; then nothing is to be run."""
        return None if self._effect.fresh else self._effect.cert

    async def settle(self, outcome: Outcome) -> None:
        """Record how it ended. What goes wrong with that is logged: the effect ran all the same."""
        if self.settled:
            return
        self._effect.result = outcome.result
        error = _error_of(outcome)
        if error is not None:
            _log.info("%s: %s", self._effect.prepared.intent, error)
        await self._leave(error)

    async def abandon(self, error: BaseException) -> None:
        """It was cancelled: unknown, unless it is settled already."""
        if not self.settled:
            await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        self.settled = True
        kind = None if error is None else type(error)
        try:
            await self._effect.__aexit__(kind, error, None)
        except FenceError as failed:
            _log.warning("%s The client gets the answer.", failed)
        except Exception:
            _log.exception("an outcome could not be recorded; the client gets the answer")


def _error_of(outcome: Outcome) -> Exception | None:
    """As the effect is told of it."""
    match outcome.verdict:
        case "record":
            return None
        case "release":
            return NotExecuted(outcome.reason)
        case "unknown":
            return HandlerFailed(outcome.reason)


class Desk:
    """One application's fence, policy and running requests."""

    def __init__(
        self,
        *,
        fence: EffectFence | None = None,
        ledger: str | os.PathLike[str] | None = None,
        config: FenceConfig | None = None,
        policy: Policy | None = None,
        routes: Mapping[str, Policy | None] | None = None,
        docs: str = POLICY_PATH,
        drain_seconds: float = 5.0,
    ) -> None:
        if fence is not None and (ledger is not None or config is not None):
            raise ValueError("a fence has its own ledger and configuration: give it, or those two")
        self.routes = Routes(policy or Policy(), routes or {})
        self.docs = docs
        self._given = fence
        self._ledger = ledger
        self._config = config or FenceConfig()
        self._drain_seconds = drain_seconds
        self._fence: EffectFence | None = None
        self._process = 0
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._page: bytes | None = None
        self.check_policies(self.routes.policies())

    @property
    def config(self) -> FenceConfig:
        return self._config if self._given is None else self._given.config

    def check_policies(self, policies: Iterable[Policy]) -> None:
        """`ValueError` for a key that a caller's retry could outlive."""
        for policy in policies:
            if policy.result_ttl is not None:
                self.config.check_lifetime(policy.result_ttl)

    # --- the fence's life -------------------------------------------------------------------------

    @property
    def fence(self) -> EffectFence | None:
        """The fence, if this process has opened it."""
        return self._fence if self._process == os.getpid() else None

    async def open(self) -> EffectFence:
        """The fence; opened by the first who asks, in each process anew."""
        async with self._opening:
            if (fence := self.fence) is None:
                fence = self._fence = await self._opened()
                self._process = os.getpid()
            return fence

    async def _opened(self) -> EffectFence:
        if self._given is not None:
            check_shared(ledger_of(self._given), workers_here())
            return self._given
        ledger = str(self._ledger or os.environ.get("EFFECTFENCE_LEDGER") or own_ledger())
        check_shared(ledger, workers_here())
        return await EffectFence.open(ledger, self._config)

    async def close(self) -> None:
        """See what runs to its end, within the bound; then close the fence, if it is ours."""
        fence, self._fence = self._fence, None
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._drain_seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=self._drain_seconds)
        if fence is not None and self._given is None and self._process == os.getpid():
            await fence.aclose(self._drain_seconds)

    async def outlast(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What it gives; cancelled, its caller leaves, and it goes on.

        As `shield` does, with half as many turns of the loop: the caller waits for a future of its
        own, which is all that its cancellation cancels.
        """
        told = asyncio.get_running_loop().create_future()
        self._own(self._tell(work, told))
        return await told

    async def _tell(self, work: Coroutine[Any, Any, Any], told: asyncio.Future[Any]) -> None:
        try:
            value = await work
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                told.cancel()
            elif not told.done():
                told.set_exception(error)
            else:
                _log.warning("a handler whose client had left failed: %s", said_of(error))
            if not isinstance(error, Exception | BaseExceptionGroup):
                raise
        else:
            if not told.done():
                told.set_result(value)

    def _own(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run it as a task that nobody's leaving cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- one request ------------------------------------------------------------------------------

    async def begin(self, fence: EffectFence, request: EffectRequest, policy: Policy) -> Attempt:
        """May it run? Raises the fence's refusals."""
        effect = fence.effect(request, wait_seconds=policy.wait_seconds)
        await effect.__aenter__()
        return Attempt(effect)

    async def explain(
        self, error: FenceError, fence: EffectFence, request: EffectRequest, policy: Policy
    ) -> Problem:
        """A refusal as its client is told of it; of a reused key, also what differs."""
        if isinstance(error, LedgerUnavailable) and error.closed:
            self._reopen_later()
        problem = problem_of(error, policy)
        if not isinstance(error, IntentConflict):
            return problem
        try:
            recorded = await fence.lookup(request.intent)
        except FenceError:
            recorded = None
        if recorded is None:
            return problem
        found = differences(request.args, recorded.args)
        detail = f"This key stands for another request: it differs in {found}."
        return Problem(problem.kind, detail, {**problem.facts, "differs": found.split(", ")})

    def _reopen_later(self) -> None:
        """The ledger closed itself (a failed sync, a fork): the next request opens it anew."""
        if self._given is None and (fence := self._fence) is not None:
            self._fence = None
            self._own(fence.aclose(0))

    def replay(self, cert: EffectCert, policy: Policy) -> Recorded:
        """The answer of an earlier run. Raises `ResultNotRecorded`."""
        if not cert.result_recorded:
            raise ResultNotRecorded(cert=cert, reason=str(cert.result[UNRECORDED]))
        recorded = Recorded.of(cert.result)
        marks = ((REPLAYED_HEADER, "true"), self.lifetime(policy))
        return Recorded(recorded.status, (*recorded.headers, *marks), recorded.body)

    def lifetime(self, policy: Policy) -> tuple[str, str]:
        return LIFETIME_HEADER, lifetime_of(policy, self.config.result_ttl)

    def page(self) -> Recorded:
        """What is published of all this."""
        if self._page is None:
            self._page = policy_page(self.routes, self.config.result_ttl)
        return Recorded(200, (("content-type", "text/html; charset=utf-8"),), self._page)


def key_in(fields: list[str], policy: Policy) -> str | Problem | None:
    """The key, what is wrong with it, or `None`: there is none, and none is required."""
    if not fields:
        if policy.required:
            return Problem.named("key-missing", "This operation requires an Idempotency-Key.")
        return None
    try:
        return parse_key(fields)
    except BadKey as bad:
        return Problem.named("key-invalid", f"This is not a key: {bad}.")


def too_large(policy: Policy) -> Problem:
    most = policy.max_request_bytes
    return Problem.named("body-too-large", f"A body of at most {most} bytes can be fenced.")


def unavailable(policy: Policy) -> Problem:
    said = "The record of what ran can't be opened; nothing ran."
    return Problem.named("ledger-unavailable", said, policy.retry_after_seconds)


def not_executed(policy: Policy) -> Problem:
    said = "The service could not begin; nothing ran, and the key is free."
    return Problem.named("not-executed", said, policy.retry_after_seconds)


def says_not_executed(error: BaseException | None) -> bool:
    """Whether it is `NotExecuted`, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(says_not_executed, error.exceptions))
    return isinstance(error, NotExecuted)


def said_of(error: BaseException | None) -> str:
    """What an exception says of itself; its own `__str__` may fail."""
    if error is None:
        return "it ended without an answer"
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def value_of(given: Any) -> Any:
    """What a callable gave, awaited where it has to be."""
    return await given if inspect.isawaitable(given) else given


# --- ledgers --------------------------------------------------------------------------------------


def own_ledger() -> Path:
    """Where the ledger is if nobody says: one file for all services of this user that do not."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "effectfence" / "http.jsonl"


def ledger_of(fence: EffectFence) -> str:
    """What a fence stands on; `memory:` if that is nothing but this process."""
    return fence._shared.store.name


def check_shared(ledger: str, workers: Workers) -> None:
    """Refuse, or warn of, a ledger that the other workers don't see."""
    if ledger != MEMORY or workers.count == 1:
        return
    mend = (
        "Name a ledger file that all of them share: EFFECTFENCE_LEDGER=effects.jsonl, or "
        "`ledger=`; or leave both out for the default file."
    )
    if workers.count is None:
        text = (
            f"the fence is in memory, and there may be several workers ({workers.told_by}): each "
            f"would run the same request once. {mend}"
        )
        _log.warning("%s", text)
        warnings.warn(text, UnsharedWarning, stacklevel=2)
        return
    raise Unshared(
        f"the fence is in memory, and {workers.count} workers serve this application "
        f"({workers.told_by}): each would run the same request once. {mend}"
    )
