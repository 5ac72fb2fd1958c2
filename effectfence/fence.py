"""EffectFence: asks the rules what to do, and the store to do it, until both agree.

`surface -> prepare -> store.swap -> (rules, only if something stood there) -> the effect -> commit
-> store.swap -> EffectCert`. Invariants:

1. No decision is kept over an `await`: what the store refused is decided anew on the view it gave.
2. Every loop is bounded; contention beyond the bound is an error that says so.
3. Once `prepare` handed out a ticket, its outcome is recorded by somebody: the caller's report, an
   owned task of this fence, or `aclose`. Whoever dies before that leaves it to the lease.
4. Owned tasks are drained by `aclose`; nothing is left running.
5. A fence may be used from any thread and event loop of the process that opened it, and from no
   other process: after `fork` every call is refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, get_args

from effectfence import claims, errors, records, rules
from effectfence.canonical import MAX_DEPTH, MAX_NAME_BYTES, Unencodable, check_name, encode
from effectfence.clock import VectorClock
from effectfence.custody import Custody, Held
from effectfence.effects import Effect, Fencing, run_effect
from effectfence.events import Events, FenceEvent, Kind, Leave, Listener, Verb, warned_of
from effectfence.leases import Keeper, Kept, Lost
from effectfence.models import (
    Admission,
    EffectCert,
    EffectRequest,
    FenceConfig,
    FenceStats,
    Fresh,
    Head,
    IntentRecord,
    IntentState,
    Observation,
    PreparedEffect,
    ReadSetEntry,
    RecordedWord,
    Replay,
)
from effectfence.reconcile import Function, Reconciled, Reconciler, Reconcilers, Reconciling
from effectfence.stores.contract import Applied, Change, Record, Store, View
from effectfence.stores.follow import follow
from effectfence.stores.memory import MemoryStore
from effectfence.stores.opening import open_store

if TYPE_CHECKING:
    from effectfence.threads import BlockingFence

_log = logging.getLogger("effectfence")

_TRIES: Final = 100
_COMMIT_RETRY_SECONDS: Final = (0.05, 0.2, 0.8)
_CLOSE_SECONDS: Final = 5.0

_COUNTER_OF: Final[dict[type[errors.FenceError], str]] = {
    errors.IntentConflict: "refused_conflict",
    errors.OutcomeUnknown: "refused_unknown",
    errors.IntentInFlight: "refused_inflight",
    errors.ReadSetStale: "refused_stale",
    errors.CausalConflict: "refused_causal",
    errors.DomainRace: "refused_race",
}

_INTENT_LABELS: Final = (records.OPEN, records.CLEARED, records.DONE)

_forks = 0


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True, eq=False)
class _Shared:
    """What a fence and its scoped views have in common."""

    store: Store
    config: FenceConfig
    keeper: Keeper | None = None
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    custody: Custody = field(default_factory=Custody)
    events: Events = field(default_factory=Events)
    reconcilers: Reconcilers = field(default_factory=Reconcilers)
    forks: int = field(default_factory=lambda: _forks)
    closing: bool = False
    closed: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        self.strict = self.config.causal == "strict"

    def count(self, counter: str) -> None:
        with self.lock:
            self.counts[counter] = self.counts.get(counter, 0) + 1


class EffectFence:
    """The fence in front of the side effect: one intent runs once.

    `EffectFence()` lives in this process's memory; `EffectFence.open(ledger)` shares a ledger.
    """

    def __init__(self, config: FenceConfig | None = None, *, store: Store | None = None) -> None:
        self._shared = _Shared(MemoryStore() if store is None else store, _checked_config(config))
        self._shared.keeper = Keeper()
        self._scope = ""

    @staticmethod
    def open(
        ledger: str | os.PathLike[str] = "memory:",
        config: FenceConfig | None = None,
        *,
        accept_rollback: bool = False,
        require_durable: bool = False,
    ) -> Opening:
        """A fence over `ledger`: `memory:`, a path, or a database's address (`postgresql://…`,
        `redis://…`). Await it, or use it with `async with`.

        Raises `LedgerCorrupt` or `LedgerUnavailable`; nothing is changed then. A file that was cut
        back behind what it acknowledged (a restored backup) is refused, since what it forgot could
        run again; `accept_rollback` takes it as it is. `require_durable` refuses a ledger whose own
        settings let it forget what it acknowledged.
        """
        return Opening(ledger, config, accept_rollback, require_durable)

    def scoped(self, scope: str) -> EffectFence:
        """The same fence with intents and domains of its own; scopes nest."""
        quoted = claims.quoted(check_name(scope, what="scope"))
        within = f"{self._scope}@{quoted}" if self._scope else quoted
        if len(within.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"scope is longer than {MAX_NAME_BYTES} bytes of UTF-8")
        return self._view(within)

    def _view(self, scope: str) -> EffectFence:
        """The same fence in another scope, as that stands in keys."""
        view = object.__new__(type(self))
        view._shared, view._scope = self._shared, scope
        return view

    @property
    def config(self) -> FenceConfig:
        return self._shared.config

    @property
    def blocking(self) -> BlockingFence:
        """The same calls for synchronous code: for threads that run no event loop."""
        from effectfence.threads import BlockingFence, Opened

        return BlockingFence(Opened(self))

    # --- the protocol -----------------------------------------------------------------------------

    async def prepare(self, request: EffectRequest, *, wait_seconds: float = 0.0) -> Admission:
        """May this run? `Fresh(prepared)`: yes, once. `Replay(cert)`: it already did.

        With `wait_seconds > 0` a duplicate of something in flight waits that long for its outcome.
        Raises a `Refused`; nothing ran then (`OutcomeUnknown`: nobody knows). Cancelled, a ticket
        that was not handed out is released by the fence itself.
        """
        patience = _seconds(wait_seconds) if wait_seconds else 0.0
        began = time.monotonic()
        try:
            claim = self._claim(request)
            answer, applied = await self._admit(claim)
            if patience and type(answer) is rules.Refuse:
                answer, applied = await self._wait(claim, answer, patience)
        except (errors.LedgerUnavailable, errors.LedgerCorrupt) as error:
            self._tell("unavailable", "prepare", request, began=began, error=error)
            raise
        return self._admission(claim, answer, applied, began)

    async def commit(self, prepared: PreparedEffect, result: Any) -> EffectCert:
        """It ran, with this result. May be repeated: the same result gets the same certificate.

        A result that is not JSON, or too large, is recorded as a marker. Raises `CommitStale`,
        `LeaseLost`, `CommitConflict`, `InvalidTicket`, or `LedgerUnavailable` with `.prepared`;
        each carries `.result`. Cancelled, the commit completes before the cancellation goes on.
        """
        began = time.monotonic()
        try:
            claim, holder = self._spoken_for(prepared)
            content = self._result(claim, result)
            return await self._commit(claim, holder, prepared, content, began)
        except asyncio.CancelledError:
            again = self._commit(claim, holder, prepared, content, began)
            await self._see_through("commit", again, prepared, began)
            raise
        except errors.FenceError as error:
            self._failed("commit", error, prepared, began)
            raise error.with_result(result) from None

    async def abort(self, prepared: PreparedEffect, reason: str) -> None:
        """Nobody knows whether it ran: fenced until somebody says. Cancelled, it completes.

        Raises `LeaseLost`, `OutcomeUnknown` (it is already), `InvalidTicket`.
        """
        await self._report("aborted", "abort", prepared, self._abort_rule(reason))

    async def release(self, prepared: PreparedEffect, reason: str) -> None:
        """It certainly did not run: free again (unknown if an earlier attempt may have run).

        Raises `LeaseLost`, `OutcomeUnknown`, `InvalidTicket`. Cancelled, it completes.
        """
        await self._report("released", "release", prepared, self._release_rule(reason))

    async def heartbeat(self, prepared: PreparedEffect) -> float:
        """Renew the lease from now. Gives its new end as Unix time of this process's wall clock,
        for people: expiry itself is judged by the ledger's own clock.

        Raises `LeaseLost` (stop), `OutcomeUnknown`, `InvalidTicket`.
        """

        return time.time() + await self._renew(prepared)

    # --- the same in one call ---------------------------------------------------------------------

    def effect(self, request: EffectRequest, *, wait_seconds: float = 30.0) -> Effect:
        """`async with fence.effect(request) as attempt`: prepares, renews, and reports.

        If `attempt.fresh`, run the effect and set `attempt.result`; leaving commits it,
        `NotExecuted` releases, any other exception or cancellation is recorded as unknown.
        """
        return Effect(self, request, wait_seconds)

    async def run(
        self,
        request: EffectRequest,
        function: Callable[..., Any],
        /,
        *args: Any,
        wait_seconds: float = 30.0,
        not_executed: tuple[type[BaseException], ...] | type[BaseException] = (),
        **kwargs: Any,
    ) -> EffectCert:
        """Run `function(*args, **kwargs)` unless it ran already; its certificate either way.

        A plain function runs in a thread; cancelled, it goes on there and its result is committed
        when it ends. An `async def` is cancelled, and its outcome recorded as unknown. Exceptions
        of the types in `not_executed`, and `NotExecuted`, release the intent.
        """
        return await run_effect(self, request, function, args, kwargs, wait_seconds, not_executed)

    def fenced(
        self,
        intent: str,
        domain: str | None = None,
        *,
        tool: str | None = None,
        agent: str | None = None,
        ignore: tuple[str, ...] = (),
        not_executed: tuple[type[BaseException], ...] | type[BaseException] = (),
        result_ttl: float | None = None,
        wait_seconds: float = 30.0,
    ) -> Fencing:
        """Decorator: the function runs once per intent, its duplicates get the recorded result.

        `intent` and `domain` (default: the intent) are templates over the function's parameters,
        such as `"charge:{order_id}"`. The decorated function is `async` and keeps its signature.
        """
        if result_ttl is not None:
            self.config.check_lifetime(result_ttl)
        return Fencing(
            self, intent, domain, tool, agent, ignore, not_executed, result_ttl, wait_seconds
        )

    # --- asking the provider ----------------------------------------------------------------------

    def reconciler(
        self,
        *tools: str,
        name: str | None = None,
        grace_seconds: float = 900.0,
        timeout_seconds: float = 30.0,
        max_concurrent: int = 4,
        max_per_round: int = 100,
        retry_seconds: float = 60.0,
        max_retry_seconds: float = 3600.0,
    ) -> Callable[[Function], Function]:
        """Decorator: an async function that finds out whether an effect of one of `tools` ran.

        It gets an `UnknownEffect` and answers `Happened(result)`, `DidNotHappen(reason)` or
        `StillUnknown(reason)`; whatever else it does leaves the outcome unknown. `*` in a tool
        stands for anything. `DidNotHappen` counts once nobody has known for `grace_seconds`: set it
        longer than a request of yours can be on its way. Of this scope and those nested in it.
        """

        def register(function: Function) -> Function:
            called = name or str(getattr(function, "__name__", type(function).__name__))
            self._shared.reconcilers.add(
                Reconciler(
                    function,
                    called,
                    self._scope,
                    tools,
                    grace_seconds=grace_seconds,
                    timeout_seconds=timeout_seconds,
                    max_concurrent=max_concurrent,
                    max_per_round=max_per_round,
                    retry_seconds=retry_seconds,
                    max_retry_seconds=max_retry_seconds,
                )
            )
            return function

        return register

    async def reconcile(self) -> Reconciled:
        """Ask the reconcilers, once, about every unknown outcome whose turn it is.

        Raises `LedgerUnavailable`. Cancelled, or the fence closed, questions are let go and a word
        that was begun is finished. May be called at any time, by any number of processes.
        """
        return await self._shared.reconcilers.round(self)

    def reconciling(self, *, every: float = 60.0) -> Reconciling:
        """`async with fence.reconciling():` asks at once, then `every` so many seconds."""
        return Reconciling(self, every)

    # --- domains ----------------------------------------------------------------------------------

    async def current(self, domain: str) -> int:
        """The domain's sequence number; 0 if it was never reserved."""
        key = self._domain_key(domain)
        return _version((await self._load([key])).records[key])

    async def reserve(self, domain: str, expected: int) -> int:
        """Take the next number if the domain stands at `expected`; else `DomainRace`."""
        if type(expected) is not int or expected < 0:
            raise ValueError(f"expected is {expected!r}; a sequence number, 0 or more, is wanted")
        key = self._domain_key(domain)
        answer = await self._swap(rules.reserve(key, expected))
        actual = _version(answer.records[key])
        if isinstance(answer, View):
            raise errors.DomainRace(domain=domain, expected=expected, actual=actual)
        return actual

    async def evict_domain(self, domain: str) -> bool:
        """Forget a domain that nobody uses; whether it existed. Its numbers are never reissued.

        Raises `HolderAlive` while an open intent names it or it moved within `result_ttl`.
        """
        key = self._domain_key(domain)
        view = await self._load([key])
        for _ in range(_TRIES):
            record = view.records[key]
            refused = rules.evict(view, domain, key, await self._opens(facts=True), self.config)
            if record is None:
                return False
            if refused is not None:
                raise refused
            # Moved on first: whoever read the old number from now on is refused as stale, and
            # whoever read it before is among the open intents that are looked at once more.
            answer = await self._swap(rules.move_on(key, record))
            moved = answer.records[key]
            if isinstance(answer, Applied) and moved is not None:
                opens = await self._opens(facts=True)
                if (held := rules.held_domain(domain, key, opens)) is not None:
                    raise held
                answer = await self._swap(rules.forget(key, moved))
                if isinstance(answer, Applied):
                    return True
            view = await self._load([key])
        raise self._contention()

    async def observe(self, *domains: str) -> Observation:
        """What an agent puts into its next request: numbers, and the clocks of the heads."""
        keys = {domain: self._domain_key(domain) for domain in domains}
        view = await self._load(list(keys.values()))
        clock = VectorClock()
        heads: dict[str, Head | None] = {}
        for domain, key in keys.items():
            record = view.records[key]
            head = records.head_of(record)
            if record is None or head is None:
                heads[domain] = None
                continue
            heads[domain] = Head(record.stamp, head["hash"], VectorClock(head["clock"]))
            clock.merge(heads[domain].clock)  # type: ignore[union-attr]  # just assigned
        read_set = tuple(
            ReadSetEntry(domain=domain, seq=_version(view.records[key]))
            for domain, key in keys.items()
        )
        return Observation(read_set, clock, heads)

    # --- for people -------------------------------------------------------------------------------

    async def lookup(self, intent: str) -> IntentRecord | None:
        """What is recorded for an intent, or `None`."""
        key = self._intent_key(intent)
        view = await self._load([key])
        record = view.records[key]
        return None if record is None else rules.describe(key, view)

    async def intents(
        self, state: str | None = None, *, nested: bool = False
    ) -> AsyncIterator[IntentRecord]:
        """Every recorded intent of this scope, or those in one state (`in_flight`, `expired`,
        `unknown`, `done`, `cleared`); with `nested`, of the scopes in it too."""
        if state is not None and state not in get_args(IntentState):
            raise ValueError(f"no such state: {state!r}")
        labels = {"done": (records.DONE,), "cleared": (records.CLEARED,)}.get(
            state or "", (records.OPEN,) if state else _INTENT_LABELS
        )
        self._check_open()
        for label in labels:
            async for view in self._shared.store.scan(label):
                for key in view.records:
                    if self._shows(key, nested):
                        described = rules.describe(key, view)
                        if state is None or described.state == state:
                            yield described

    async def history(
        self, intent: str | None = None, *, nested: bool = False
    ) -> AsyncIterator[RecordedWord]:
        """What was said of this scope's intents, or of one: by operators and reconcilers (`settle`,
        `clear`), and by holders (`release`, `late commit`). Kept for `history_ttl`."""
        self._check_open()
        async for view in self._shared.store.scan(records.HISTORY):
            for key in view.records:
                if self._shows(key, nested):
                    word = rules.describe_word(key, view)
                    if intent is None or word.intent == intent:
                        yield word

    async def follow(self, *, nested: bool = False) -> AsyncIterator[IntentRecord | RecordedWord]:
        """Each decision that anybody records from now on, once it is durable: an intent whose
        holder or state changed, a word that was said. Of several changes of one intent in quick
        succession the last may be all that is shown. Never ends by itself.
        """
        self._check_open()
        async for view in follow(self._shared.store, (*_INTENT_LABELS, records.HISTORY)):
            for key, record in view.records.items():
                if record is not None and self._shows(key, nested):
                    is_word = record.label == records.HISTORY
                    yield rules.describe_word(key, view) if is_word else rules.describe(key, view)

    def _shows(self, key: str, nested: bool) -> bool:
        scope = claims.scope_of(key)
        return claims.within(scope, self._scope) if nested else scope == self._scope

    async def settle(
        self,
        intent: str,
        result: Any,
        *,
        reason: str,
        by: str,
        force: bool = False,
        attempt: int | None = None,
    ) -> EffectCert:
        """An operator's word that it did run, with this result; mints the certificate.

        `attempt`: the one that was looked at (`lookup` says which stands); it is refused if another
        has begun since. Raises `HolderAlive` (unless forced), `NoSuchIntent`, `CommitConflict` (it
        is done, with another result). `result` must be JSON. Kept in the ledger with `by` and
        `reason`.
        """
        key = self._intent_key(intent)
        content = encode(result, max_depth=MAX_DEPTH, name="result")
        if len(content) > self.config.max_record_bytes:
            raise ValueError(f"result has more than {self.config.max_record_bytes} bytes")
        word, began = self._word(by, reason, force, attempt), time.monotonic()

        def settle(view: View) -> rules.Decision:
            return rules.settle(view, intent, key, self._scope, content, word, self.config)

        answer, _ = await self._decide([key], settle)
        if type(answer) is not rules.Certify:
            _raise(answer)
        self._tell("settled", "settle", answer.cert, began=began, cert=answer.cert, by=by)
        return answer.cert

    async def clear(
        self,
        intent: str,
        *,
        reason: str,
        by: str,
        force: bool = False,
        attempt: int | None = None,
    ) -> bool:
        """An operator's word that it did not run; whether there was something to clear.

        `attempt`: the one that was looked at; it is refused if another has begun since. Raises
        `HolderAlive` unless forced; forced, it is the one call that can cause a second effect. Kept
        in the ledger with `by` and `reason`.
        """
        key = self._intent_key(intent)
        word, began = self._word(by, reason, force, attempt), time.monotonic()

        def clear(view: View) -> rules.Decision:
            return rules.clear(view, intent, key, word, self.config)

        cleared = bool(_said(await self._decide([key], clear)))
        if cleared:
            self._tell("cleared", "clear", intent, began=began, by=by)
        return cleared

    async def sweep(self) -> int:
        """Forget what has expired; how many records went."""
        self._check_usable()
        swept, began = 0, time.monotonic()
        while went := await self._shared.store.purge():
            swept += went
        self._tell("swept", "sweep", began=began, count=swept)
        return swept

    def on_event(self, listener: Listener) -> Listener:
        """Tell `listener` of every decision of this fence and all its scopes, until `off_event`;
        gives it back, so that it may be a decorator. It is called in the thread that took the
        decision (in several at once), after that is recorded: be quick, and do not block. What it
        raises is logged, once, and changes nothing. See `FenceEvent`.
        """
        self._shared.events.add(listener)
        return listener

    def off_event(self, listener: Listener) -> None:
        """Tell it no more; also from inside of it."""
        self._shared.events.remove(listener)

    def stats(self) -> FenceStats:
        """How the attempts of this process ended, since it opened the fence."""
        with self._shared.lock:
            return FenceStats(**self._shared.counts)

    async def intent_count(self) -> int:
        """How many intents are recorded, in all scopes."""
        return await self._count(records.OPEN, records.DONE, records.CLEARED)

    async def domain_count(self) -> int:
        """How many domains are known, in all scopes."""
        return await self._count(records.DOMAIN)

    # --- life -------------------------------------------------------------------------------------

    async def aclose(self, drain_seconds: float = 5.0) -> None:
        """Refuse new work, wait up to `drain_seconds` for what is held, record the rest as unknown.

        Idempotent. Closes the ledger, within a bound: what a stuck disk or a stopped process leaves
        unrecorded is then the lease's. A scoped view closes nothing; its parent does.
        """
        drain_seconds = _seconds(drain_seconds, "drain_seconds")
        shared = self._shared
        if self._scope or shared.closed or shared.forks != _forks:
            return
        shared.closing = True
        shared.reconcilers.stop()
        await shared.custody.drain(drain_seconds)
        left = [self._give_up(held) for held in list(shared.custody.held.values())]
        if left:
            await asyncio.wait([shared.custody.own(work) for work in left], timeout=_CLOSE_SECONDS)
        shared.closed = True
        await self._close_ledger()

    async def _give_up(self, held: Held) -> None:
        rule = self._abort_rule("the fence was closed while it was held")
        await self._view(held.scope)._report("aborted", "abort", held.prepared, rule)

    async def _close_ledger(self) -> None:
        shared = self._shared
        closing = shared.custody.own(shared.store.aclose())
        if shared.keeper is not None:
            await shared.keeper.aclose()
        done, _ = await asyncio.wait((closing,), timeout=_CLOSE_SECONDS)
        if not done:
            _log.warning("%s did not close within %g s", shared.store.name, _CLOSE_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # --- admission --------------------------------------------------------------------------------

    async def _admit(self, claim: claims.Claim) -> tuple[rules.Answer, Applied | None]:
        """Swap the hopeful change, or decide on what stands there, until store and rules agree."""
        shared = self._shared
        store, keys, custody = shared.store, claim.expect_fresh, shared.custody
        custody.entering += 1
        try:
            if shared.strict or store.peek(claim.intent_key):
                decision = await self._gates(await store.load(keys), claim)
            else:
                decision = rules.claim(claim, self._offer())
            for _ in range(_TRIES):
                if decision.change is None:
                    return decision.answer, None
                try:
                    answer = await store.swap(decision.change)
                except (asyncio.CancelledError, errors.LedgerUnavailable) as error:
                    self._doubt(claim, decision.answer, error)
                    raise
                if type(answer) is Applied:
                    return decision.answer, answer
                assert type(answer) is View
                decision = await self._gates(await self._whole(answer, tuple(keys)), claim)
            raise self._contention()
        finally:
            custody.entered()

    async def _gates(self, view: View, claim: claims.Claim) -> rules.Decision:
        opens = await self._opens(but=claim.intent_key) if self._shared.strict else ()
        return rules.prepare(view, claim, self._offer, self._shared.config, opens)

    def _doubt(self, claim: claims.Claim, answer: rules.Answer, error: BaseException) -> None:
        """A swap that was cut off may have been applied: a claim that nobody holds is undone."""
        in_doubt = getattr(error, "ran", None) is None
        if in_doubt and type(answer) is rules.Admit:
            self._shared.custody.own(self._undo(claim, answer.holder))
        if isinstance(error, errors.LedgerUnavailable):
            error.ran = False  # no ticket was handed out

    async def _opens(self, but: str = "", *, facts: bool = False) -> list[tuple[str, int]]:
        """(domain key, number) of every open intent, and of its facts. Read after the domain's
        version, which is then pinned: whatever opens later moves it."""
        found = []
        async for view in self._shared.store.scan(records.OPEN):
            for key, record in view.records.items():
                if record is not None and key != but:
                    found.append(records.open_number(record, key))
                    found.extend(records.open_facts(record, key) if facts else ())
        return found

    async def _wait(
        self, claim: claims.Claim, answer: rules.Answer, seconds: float
    ) -> tuple[rules.Answer, Applied | None]:
        """Wait for the outcome of what is in flight; whoever finds it free then, claims it."""
        deadline = time.monotonic() + seconds
        applied: Applied | None = None
        while type(answer) is rules.Refuse and type(answer.error) is errors.IntentInFlight:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            lapses = max(answer.error.seconds_left, 0.0) + 0.001
            await self._shared.store.changed(claim.intent_key, answer.tag, min(left, lapses))
            self._check_usable()
            answer, applied = await self._admit(claim)
        return answer, applied

    def _admission(
        self,
        claim: claims.Claim,
        answer: rules.Answer,
        applied: Applied | None,
        began: float,
    ) -> Admission:
        shared = self._shared
        told = shared.events.wanted
        if type(answer) is rules.Admit:
            assert applied is not None
            record = applied.records[claim.intent_key]
            assert record is not None
            holder = answer.holder
            prepared = claims.ticket_of(claim, holder, record.stamp)
            lapses_at = time.monotonic() + claim.lease_seconds
            shared.custody.hold(Held(prepared, claim, holder, self._scope, lapses_at))
            shared.count("admitted")
            if told:
                self._tell("admitted", "prepare", claim.request, began=began, ticket=prepared)
            return Fresh(prepared)
        if type(answer) is rules.Replayed:
            shared.count("replayed")
            if told:
                self._tell("replayed", "prepare", claim.request, began=began, cert=answer.cert)
            return Replay(answer.cert)
        assert type(answer) is rules.Refuse
        shared.count(_COUNTER_OF[type(answer.error)])
        self._tell("refused", "prepare", claim.request, began=began, error=answer.error)
        raise answer.error

    async def _undo(self, claim: claims.Claim, holder: claims.Holder) -> None:
        """Release a claim whose ticket nobody got."""

        def undo(view: View) -> rules.Decision:
            record = view.records[claim.intent_key]
            seq = 0 if record is None else record.stamp
            reason = "cancelled before its ticket was handed out"
            word = claims.key("history", holder.seal, self._scope)
            return rules.release(view, claim, holder, seq, reason, self.config, word)

        await self._decide(tuple(claim.expect_fresh), undo)

    # --- reports ----------------------------------------------------------------------------------

    async def _commit(
        self,
        claim: claims.Claim,
        holder: claims.Holder,
        prepared: PreparedEffect,
        content: claims.Result,
        began: float,
    ) -> EffectCert:
        for delay in (*_COMMIT_RETRY_SECONDS, None):
            try:
                answer = await self._try_commit(claim, holder, prepared.seq, content)
            except errors.LedgerUnavailable as error:
                if delay is None or error.ran is None or error.closed:
                    raise
                await asyncio.sleep(delay)
            else:
                break
        self._shared.custody.let_go(holder)
        if type(answer) is rules.Certify:
            cert = answer.cert
            if self._shared.events.wanted:
                self._tell("committed", "commit", cert, began=began, ticket=prepared, cert=cert)
            return cert
        if type(answer) is rules.Late:
            self._shared.count("late_commits")
            self._tell("late_commit", "commit", claim.request, error=answer.error, ticket=prepared)
        _raise(answer)

    async def _try_commit(
        self, claim: claims.Claim, holder: claims.Holder, seq: int, content: claims.Result
    ) -> rules.Answer:
        hopeful = rules.seal(claim, holder, seq, content)
        assert hopeful.change is not None
        view = await self._shared.store.swap(hopeful.change)
        if type(view) is Applied:
            return hopeful.answer
        assert type(view) is View
        return await self._recommit(claim, holder, seq, content, view)

    async def _recommit(
        self,
        claim: claims.Claim,
        holder: claims.Holder,
        seq: int,
        content: claims.Result,
        view: View,
    ) -> rules.Answer:
        """Upon what stood there instead."""

        def certify(view: View) -> rules.Decision:
            return rules.commit(view, claim, holder, seq, content, self.config)

        answer, _ = await self._decide(tuple(claim.expect_fresh), certify, view)
        return answer

    def _abort_rule(self, reason: str) -> Reporting:
        def rule(
            view: View, claim: claims.Claim, holder: claims.Holder, seq: int
        ) -> rules.Decision:
            return rules.abort(view, claim, holder, seq, records.clip(reason), self.config)

        return rule

    def _release_rule(self, reason: str) -> Reporting:
        word = claims.key("history", os.urandom(16).hex(), self._scope)

        def rule(
            view: View, claim: claims.Claim, holder: claims.Holder, seq: int
        ) -> rules.Decision:
            return rules.release(view, claim, holder, seq, records.clip(reason), self.config, word)

        return rule

    async def _report(
        self, kind: Kind, call: Verb, prepared: PreparedEffect, rule: Reporting
    ) -> None:
        async def record() -> None:
            def decide(view: View) -> rules.Decision:
                return rule(view, claim, holder, prepared.seq)

            answer, _ = await self._decide(tuple(claim.expect_fresh), decide)
            self._shared.custody.let_go(holder)
            if type(answer) is not rules.Said:
                _raise(answer)
            self._tell(kind, call, prepared.request, began=began, ticket=prepared)

        began = time.monotonic()
        try:
            claim, holder = self._spoken_for(prepared)
            await record()
        except asyncio.CancelledError:
            await self._see_through(call, record(), prepared, began)
            self._shared.custody.let_go(holder)
            raise
        except errors.FenceError as error:
            self._failed(call, error, prepared, began)
            raise

    async def _see_through(
        self,
        call: Verb,
        work: Coroutine[Any, Any, object],
        prepared: PreparedEffect,
        began: float,
    ) -> None:
        """For a caller that is being cancelled, to whom no failure can be raised."""

        async def told() -> None:
            try:
                await work
            except errors.FenceError as error:
                self._failed(call, error, prepared, began)
                raise

        await self._shared.custody.see_through(told())

    def _failed(
        self, call: Verb, error: errors.FenceError, prepared: PreparedEffect, began: float
    ) -> None:
        """A holder's call was refused, or could not be written: tell it, and what that leaves."""
        kind: Kind = "lease_lost" if isinstance(error, errors.LeaseLost) else "refused"
        if call == "commit":
            error.ran = True
            kind = "commit_refused"
        if isinstance(error, errors.LedgerUnavailable | errors.LedgerCorrupt):
            kind = "unavailable"
            if call == "commit":
                error.prepared = prepared
            elif call != "release":  # unwritten, it leaves open whether the effect ran
                error.ran = None
        elif call == "commit":
            self._shared.count("commit_refused")
        self._tell(kind, call, prepared.request, began=began, error=error, ticket=prepared)

    def _spoken_for(self, prepared: PreparedEffect) -> tuple[claims.Claim, claims.Holder]:
        """What a returning ticket says; what it claims is compared inside the swap."""
        if type(prepared) is not PreparedEffect and not isinstance(prepared, PreparedEffect):
            raise TypeError(f"a PreparedEffect is wanted, not {type(prepared).__name__}")
        self._check_open()
        held = self._shared.custody.held.get(prepared.token)
        if held is not None and held.prepared is prepared and held.scope == self._scope:
            return held.claim, held.holder  # the very object that was handed out, and frozen
        if not prepared.token.startswith(self._shared.store.epoch):
            raise errors.InvalidTicket(intent=prepared.intent, reason="it is of another ledger")
        claim = self._claim(prepared.request, closing=True)
        if prepared.vector_clock != VectorClock.trusted(claim.text.clock):
            raise errors.InvalidTicket(intent=prepared.intent, reason="its clock was altered")
        holder = claims.holder_of(
            claim,
            attempt=prepared.attempt,
            token=prepared.token,
            idempotency_key=prepared.idempotency_key,
            started_ms=prepared.started_ms,
        )
        return claim, holder

    def _result(self, claim: claims.Claim, result: Any) -> claims.Result:
        limit = self.config.max_record_bytes
        try:
            content = encode(result, max_depth=MAX_DEPTH, name="result")
        except Unencodable as error:
            _log.warning("result of %r is not recorded: %s", claim.intent, error)
            return records.unrecorded(str(error))
        if len(content) > limit:
            _log.warning("result of %r is not recorded: %d bytes", claim.intent, len(content))
            return records.unrecorded(f"result has {len(content)} bytes, at most {limit}")
        return claims.Result(content, result)

    # --- the loop ---------------------------------------------------------------------------------

    async def _decide(
        self,
        keys: list[str] | tuple[str, ...],
        decide: Callable[[View], rules.Decision],
        view: View | None = None,
    ) -> tuple[rules.Answer, Applied | View]:
        """Decide upon a view, swap the change, and again upon what stood there instead."""
        self._check_open()
        if view is None:
            view = await self._shared.store.load(keys)
        for _ in range(_TRIES):
            decision = decide(view)
            if decision.change is None:
                return decision.answer, view
            answer = await self._shared.store.swap(decision.change)
            if type(answer) is Applied:
                return decision.answer, answer
            assert type(answer) is View
            view = answer
            view = await self._whole(view, keys)
        raise self._contention()

    async def _whole(self, view: View, keys: list[str] | tuple[str, ...]) -> View:
        """A refused swap shows the keys of its change; a decision needs these as well."""
        if all(key in view.records for key in keys):
            return view
        return await self._shared.store.load(tuple(dict.fromkeys((*keys, *view.records))))

    async def _load(self, keys: list[str]) -> View:
        self._check_open()
        return await self._shared.store.load(keys)

    async def _swap(self, change: Change) -> Applied | View:
        self._check_usable()
        return await self._shared.store.swap(change)

    async def _count(self, *labels: str) -> int:
        self._check_open()
        counted = 0
        for label in labels:
            async for view in self._shared.store.scan(label):
                counted += sum(record is not None for record in view.records.values())
        return counted

    def _contention(self) -> errors.LedgerUnavailable:
        return errors.LedgerUnavailable(
            ledger=self._shared.store.name,
            reason=f"{_TRIES} others in a row came between look and write",
        )

    # --- renewals ---------------------------------------------------------------------------------

    def _keep(self, prepared: PreparedEffect, lost: Lost) -> Kept:
        assert self._shared.keeper is not None
        lease = min(self.config.lease_ttl, self.config.max_hold or math.inf)
        return self._shared.keeper.keep(prepared, self._renew, lease, lost, self._lapsed)

    def _drop(self, kept: Kept) -> None:
        assert self._shared.keeper is not None
        self._shared.keeper.drop(kept)

    async def _renew(self, prepared: PreparedEffect) -> float:
        """Renew the lease; for how many seconds from now."""

        def renew(view: View) -> rules.Decision:
            return rules.heartbeat(view, claim, holder, prepared.seq, self.config)

        began = time.monotonic()
        try:
            claim, holder = self._spoken_for(prepared)
            answer, _ = await self._decide(tuple(claim.expect_fresh), renew)
            if type(answer) is not rules.Said:
                self._shared.custody.let_go(holder)
                _raise(answer)
        except errors.FenceError as error:
            self._failed("heartbeat", error, prepared, began)
            raise
        seconds = float(answer.value)
        self._shared.custody.renewed(holder, seconds)
        self._tell("renewed", "heartbeat", prepared.request, began=began, ticket=prepared)
        return seconds

    def _lapsed(self, prepared: PreparedEffect) -> None:
        """Its lease ended, and no ledger said so."""
        self._tell("lease_lost", "heartbeat", prepared.request, ticket=prepared)

    # --- telling ----------------------------------------------------------------------------------

    def _entered(self, prepared: PreparedEffect) -> list[Leave]:
        """The body of an effect is about to run here."""
        events = self._shared.events
        if not events.surrounded:
            return []
        return events.enter(prepared, claims.scope_names(self._scope))

    def _tell(
        self,
        kind: Kind,
        call: Verb,
        about: EffectRequest | EffectCert | str | None = None,
        *,
        began: float | None = None,
        error: errors.FenceError | None = None,
        ticket: PreparedEffect | None = None,
        cert: EffectCert | None = None,
        **more: Any,
    ) -> None:
        """The one place that makes events."""
        events, code = self._shared.events, None if error is None else error.code
        if not (events.wanted or warned_of(kind, call, code)):
            return
        event = FenceEvent(
            kind,
            call,
            intent=about if isinstance(about, str) else getattr(about, "intent", None),
            domain=getattr(about, "domain", None),
            tool=getattr(about, "tool", None),
            agent=getattr(about, "agent", None),
            scope=claims.scope_names(self._scope),
            attempt=getattr(ticket, "attempt", None),
            seq=getattr(ticket or cert, "seq", None),
            code=code,
            ran=None if error is None else error.ran,
            certificate=None if cert is None else cert.hash,
            parent=getattr(about, "parent", None),
            seconds=None if began is None else time.monotonic() - began,
            held_seconds=_held_seconds(ticket),
            **more,
        )
        events.tell(event)

    # --- small pieces -----------------------------------------------------------------------------

    def _claim(self, request: EffectRequest, *, closing: bool = False) -> claims.Claim:
        """The request as the rules see it, worked out once per request and fence."""
        shared = self._shared
        if shared.closing or shared.forks != _forks:
            self._check_open() if closing else self._check_usable()
        if type(request) is not EffectRequest and not isinstance(request, EffectRequest):
            raise TypeError(f"an EffectRequest is wanted, not {type(request).__name__}")
        cached = request.__dict__.get("_claim")
        if cached is not None and cached[0] is shared and cached[1] == self._scope:
            claim: claims.Claim = cached[2]
            return claim
        if request.result_ttl is not None and not closing:
            shared.config.check_lifetime(request.result_ttl)
        claim = claims.claim_of(request, shared.config, self._scope)
        if not closing and claims.exceeds(claim, shared.config.max_record_bytes):
            raise ValueError(
                f"the request has {claims.size_of(claim)} bytes, at most "
                f"{shared.config.max_record_bytes} "
                "(max_record_bytes); nothing ran"
            )
        if not closing:  # else it is not held to what a new request is held to
            request.__dict__["_claim"] = (shared, self._scope, claim)
        return claim

    def _offer(self) -> claims.Offer:
        noise = os.urandom(32).hex()
        return claims.Offer(
            self._shared.store.epoch + noise[:32], noise[32:], time.time_ns() // 1_000_000
        )

    def _check_usable(self) -> None:
        self._check_open()
        if self._shared.closing:
            raise errors.LedgerUnavailable(ledger=self._shared.store.name, reason="it is closing")

    def _forked(self) -> bool:
        """Whether this process is a child of the one that opened it."""
        return self._shared.forks != _forks

    def _check_open(self) -> None:
        shared = self._shared
        if shared.forks != _forks:
            raise errors.LedgerUnavailable(
                ledger=shared.store.name,
                reason="this fence was opened before a fork; open it again in the child",
            )
        if shared.closed:
            raise errors.LedgerUnavailable(ledger=shared.store.name, reason="it is closed")

    def _word(self, by: str, reason: str, force: bool, attempt: int | None) -> records.Word:
        if attempt is not None and (type(attempt) is not int or attempt < 1):
            raise ValueError(f"attempt is {attempt!r}; a number, 1 or more, is wanted")
        key = claims.key("history", os.urandom(16).hex(), self._scope)
        by, reason = check_name(by, what="by"), check_name(reason, what="reason")
        return records.Word(key, by, reason, force, attempt)

    def _intent_key(self, intent: str) -> str:
        return claims.key("intent", check_name(intent, what="intent"), self._scope)

    def _domain_key(self, domain: str) -> str:
        return claims.key("domain", check_name(domain, what="domain"), self._scope)


Reporting = Callable[[View, claims.Claim, claims.Holder, int], rules.Decision]


class Opening:
    """`await EffectFence.open(…)`, or `async with EffectFence.open(…) as fence`."""

    def __init__(
        self,
        ledger: str | os.PathLike[str],
        config: FenceConfig | None,
        accept_rollback: bool,
        require_durable: bool = False,
    ) -> None:
        self._ledger = os.fsdecode(ledger)
        if not self._ledger:
            raise ValueError("the ledger's name is empty; a path or 'memory:' is wanted")
        self._require_durable = require_durable
        self._config = _checked_config(config)
        self._accept_rollback = accept_rollback
        self._fence: EffectFence | None = None

    def __await__(self) -> Generator[Any, None, EffectFence]:
        return self._open().__await__()

    async def __aenter__(self) -> EffectFence:
        self._fence = await self._open()
        return self._fence

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        assert self._fence is not None
        await self._fence.aclose()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this fence is not open yet, so it has no {name!r}: `await EffectFence.open(…)`, or "
            "`async with EffectFence.open(…) as fence`"
        )

    async def _open(self) -> EffectFence:
        return EffectFence(self._config, store=await self._store())

    async def _store(self) -> Store:
        return await open_store(
            self._ledger,
            check_body=records.check_body,
            accept_rollback=self._accept_rollback,
            require_durable=self._require_durable,
        )


def _checked_config(config: FenceConfig | None) -> FenceConfig:
    if config is None:
        return FenceConfig()
    if not isinstance(config, FenceConfig):
        raise TypeError(f"a FenceConfig is wanted, not {type(config).__name__}")
    return config


def _version(record: Record | None) -> int:
    return 0 if record is None else record.version


def _held_seconds(ticket: PreparedEffect | None) -> float | None:
    return None if ticket is None else max(0.0, time.time() - ticket.started_ms / 1000)


def _raise(answer: rules.Answer) -> NoReturn:
    raise _error_of(answer)


def _error_of(answer: rules.Answer) -> errors.FenceError:
    assert isinstance(answer, rules.Refuse | rules.Late)
    return answer.error


def _said(decided: tuple[rules.Answer, Applied | View]) -> Any:
    answer, _ = decided
    if type(answer) is not rules.Said:
        _raise(answer)
    return answer.value


def _seconds(seconds: float, name: str = "wait_seconds") -> float:
    if type(seconds) not in (int, float) or not seconds >= 0:
        raise ValueError(f"{name} is {seconds!r}; zero or more seconds are wanted")
    return seconds
