"""`BlockingFence`: the fence for synchronous code and threads.

Every call is the same call of `EffectFence`, run on the background loop while this thread waits;
the body of an effect runs here, in the caller's own thread, with its locals, connections and
context variables. Invariants:

1.  What interrupts a waiting thread (Ctrl-C, a soft time limit, `within`) leaves nothing open. A
    ticket that was not handed out is released, since nothing ran; a report that was begun is seen
    through before the interruption goes on; a body that was interrupted is unknown.
2.  A thread that runs an event loop is refused, except to report how a body ended.
3.  Whatever the body raises goes on as it is. Errors of the fence's own show the caller's frames.
4.  An attempt that its thread let go of (never left, or interrupted on the threshold) is recorded
    as unknown, when nobody has it any more.
5.  After a fork a fence that was opened before is refused, and nothing of it is touched.
6.  What a body returned is encoded in its own thread: objects may belong to it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, Self, TypeVar

from effectfence import errors
from effectfence.background import Background, Call, Ended, background
from effectfence.canonical import MAX_DEPTH, check_name, detached, encode
from effectfence.effects import (
    Effect,
    ExceptionTypes,
    Fencing,
    Inside,
    _is_async,
    _refuse_generators,
    _Returns,
    _seconds,
    _showing,
    _signature_of,
)
from effectfence.events import Listener
from effectfence.leases import Lost
from effectfence.models import (
    Admission,
    EffectCert,
    EffectRequest,
    FenceConfig,
    FenceStats,
    Fresh,
    IntentRecord,
    Observation,
    PreparedEffect,
    RecordedWord,
)

if TYPE_CHECKING:
    from effectfence.fence import EffectFence

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SEE_THROUGH_SECONDS: Final = 30.0
_PAGE: Final = 256


class Source(Protocol):
    """Where a `BlockingFence` gets its fence."""

    config: FenceConfig

    def fence(self) -> EffectFence:
        """The open fence; opened now, if it is one for each process."""
        ...

    async def aclose(self, drain_seconds: float) -> None: ...


class Opened:
    """A fence that is open already."""

    def __init__(self, fence: EffectFence) -> None:
        self._fence = fence
        self.config = fence.config

    def fence(self) -> EffectFence:
        return self._fence

    async def aclose(self, drain_seconds: float) -> None:
        await self._fence.aclose(drain_seconds)


class _Scoped:
    """A fence's view with names of its own; it closes nothing."""

    def __init__(self, source: Source, scope: str) -> None:
        self._source, self._scope = source, check_name(scope, what="scope")
        self.config = source.config

    def fence(self) -> EffectFence:
        return self._source.fence().scoped(self._scope)

    async def aclose(self, drain_seconds: float) -> None:
        return None


class BlockingFence:
    """The fence for synchronous code: the same calls, and each returns when it is done.

    From `fence.blocking`, or `effectfence.blocking.open(ledger)` where there is no asyncio at all.
    For any number of threads. Every call raises `RuntimeError` in a thread that runs an event loop.
    """

    def __init__(self, source: Source, *, _limit: float | None = None) -> None:
        self._source = source
        self._limit = _limit

    @property
    def config(self) -> FenceConfig:
        return self._source.config

    def scoped(self, scope: str) -> BlockingFence:
        """The same fence with intents and domains of its own; scopes nest."""
        return BlockingFence(_Scoped(self._source, scope), _limit=self._limit)

    def within(self, seconds: float) -> BlockingFence:
        """The same fence, whose calls wait for the ledger at most so long (beyond `wait_seconds`).

        Then `LedgerUnavailable`, as `ran` says: nothing ran, or (of a commit) the effect ran and
        its outcome is still being recorded. Bodies are not limited.
        """
        if not _seconds(seconds):
            raise ValueError("within 0 seconds nothing is done; more are wanted")
        return BlockingFence(self._source, _limit=seconds)

    # --- the protocol -----------------------------------------------------------------------------

    def prepare(self, request: EffectRequest, *, wait_seconds: float = 0.0) -> Admission:
        """May this run? `Fresh(prepared)`: yes, once. `Replay(cert)`: it already did.

        Raises a `Refused`; nothing ran then. Interrupted, a ticket is released again.
        """
        fence, patience = self._here(), _seconds(wait_seconds)

        async def undo(admission: Admission) -> None:
            if isinstance(admission, Fresh):
                await fence.release(admission.prepared, "interrupted before it was handed out")

        def prepare() -> Coroutine[Any, Any, Admission]:
            return fence.prepare(request, wait_seconds=patience)

        return self._ask(prepare, patience=patience, undo=undo)

    def commit(self, prepared: PreparedEffect, result: Any) -> EffectCert:
        """It ran, with this result. May be repeated: the same result gets the same certificate.

        Raises what `EffectFence.commit` raises, with `.result`. Interrupted, it completes first.
        """
        fence, plain = self._here(), _plain(result)
        try:
            return self._see_through(lambda: fence.commit(prepared, plain), ran=True)
        except errors.FenceError as error:
            if isinstance(error, errors.LedgerUnavailable):
                error.prepared = prepared
            error.with_result(result)
            raise

    def abort(self, prepared: PreparedEffect, reason: str) -> None:
        """Nobody knows whether it ran: fenced until somebody says. Interrupted, it completes."""
        fence = self._here()
        self._see_through(lambda: fence.abort(prepared, reason))

    def release(self, prepared: PreparedEffect, reason: str) -> None:
        """It certainly did not run: free again. Interrupted, it completes."""
        fence = self._here()
        self._see_through(lambda: fence.release(prepared, reason))

    def heartbeat(self, prepared: PreparedEffect) -> float:
        """Renew the lease from now; its new end as Unix time. Raises `LeaseLost`: stop."""
        fence = self._here()
        return self._ask(lambda: fence.heartbeat(prepared), ran=None)

    # --- the same in one call ---------------------------------------------------------------------

    def effect(self, request: EffectRequest, *, wait_seconds: float = 30.0) -> BlockingEffect:
        """`with fence.effect(request) as attempt`: prepares, renews, and reports.

        If `attempt.fresh`, run the effect here and set `attempt.result`; leaving commits it,
        `NotExecuted` releases, any other exception is recorded as unknown.
        """
        return self._attempt(request, wait_seconds, ())

    def run(
        self,
        request: EffectRequest,
        function: Callable[..., Any],
        /,
        *args: Any,
        wait_seconds: float = 30.0,
        not_executed: ExceptionTypes = (),
        **kwargs: Any,
    ) -> EffectCert:
        """Run `function(*args, **kwargs)` here unless it ran already; its certificate either way.

        Exceptions of the types in `not_executed`, and `NotExecuted`, release the intent; any other,
        Ctrl-C and time limits included, is recorded as unknown and goes on.
        """
        _refuse_async(function)
        with self._attempt(request, wait_seconds, not_executed) as attempt:
            if attempt.fresh:
                attempt.result = _not_awaitable(function(*args, **kwargs))
        assert attempt.cert is not None
        return attempt.cert

    def fenced(
        self,
        intent: str,
        domain: str | None = None,
        *,
        tool: str | None = None,
        agent: str | None = None,
        ignore: tuple[str, ...] = (),
        not_executed: ExceptionTypes = (),
        result_ttl: float | None = None,
        wait_seconds: float = 30.0,
    ) -> BlockingFencing:
        """Decorator: the plain function runs once per intent, its duplicates get its result.

        `intent` and `domain` (default: the intent) are templates over the function's parameters,
        such as `"charge:{order_id}"`. The decorated function stays plain and keeps its signature.
        """
        if result_ttl is not None:
            self.config.check_lifetime(result_ttl)
        options = (tool, agent, ignore, not_executed, result_ttl, wait_seconds)
        return BlockingFencing(self, intent, domain, *options)

    # --- domains ----------------------------------------------------------------------------------

    def current(self, domain: str) -> int:
        """The domain's sequence number; 0 if it was never reserved."""
        fence = self._here()
        return self._ask(lambda: fence.current(domain))

    def reserve(self, domain: str, expected: int) -> int:
        """Take the next number if the domain stands at `expected`; else `DomainRace`."""
        fence = self._here()
        return self._ask(lambda: fence.reserve(domain, expected), ran=None)

    def evict_domain(self, domain: str) -> bool:
        """Forget a domain that nobody uses; whether it existed."""
        fence = self._here()
        return self._ask(lambda: fence.evict_domain(domain), ran=None)

    def observe(self, *domains: str) -> Observation:
        """What an agent puts into its next request: numbers, and the clocks of the heads."""
        fence = self._here()
        return self._ask(lambda: fence.observe(*domains))

    # --- for people -------------------------------------------------------------------------------

    def lookup(self, intent: str) -> IntentRecord | None:
        """What is recorded for an intent, or `None`."""
        fence = self._here()
        return self._ask(lambda: fence.lookup(intent))

    def intents(self, state: str | None = None, *, nested: bool = False) -> Iterator[IntentRecord]:
        """Every recorded intent of this scope, or those in one state (`in_flight`, `expired`,
        `unknown`, `done`, `cleared`). `nested`: of the scopes within it too."""
        return self._iterate(lambda fence: fence.intents(state, nested=nested), _PAGE)

    def history(self, intent: str | None = None, *, nested: bool = False) -> Iterator[RecordedWord]:
        """What was said of this scope's intents, or of one, by operators, reconcilers, holders."""
        return self._iterate(lambda fence: fence.history(intent, nested=nested), _PAGE)

    def follow(self, *, nested: bool = False) -> Iterator[IntentRecord | RecordedWord]:
        """Each decision that anybody records from now on, once it is durable. Never ends."""
        return self._iterate(lambda fence: fence.follow(nested=nested), 1)

    def on_event(self, listener: Listener) -> Listener:
        """Tell `listener` of every decision; as a decorator too. It is called on the background
        loop's thread or the caller's, wherever the decision was taken."""
        return self._here().on_event(listener)

    def off_event(self, listener: Listener) -> None:
        """Tell it no more."""
        self._here().off_event(listener)

    def _iterate(
        self, listing: Callable[[EffectFence], AsyncIterator[T]], at_a_time: int
    ) -> Iterator[T]:
        records = listing(self._here())
        try:
            while page := self._ask(lambda: _page(records, at_a_time)):
                yield from page
        finally:
            with suppress(Ended):  # without waiting: whoever drops a generator may be anybody
                background().start(Call(records.aclose))  # type: ignore[attr-defined]  # a generator

    def settle(
        self,
        intent: str,
        result: Any,
        *,
        reason: str,
        by: str,
        force: bool = False,
        attempt: int | None = None,
    ) -> EffectCert:
        """An operator's word that it did run, with this result; mints the certificate."""
        settle = functools.partial(
            self._here().settle,
            intent, result, reason=reason, by=by, force=force, attempt=attempt,
        )  # fmt: skip
        return self._see_through(settle)

    def clear(
        self,
        intent: str,
        *,
        reason: str,
        by: str,
        force: bool = False,
        attempt: int | None = None,
    ) -> bool:
        """An operator's word that it did not run; whether there was something to clear."""
        clear = functools.partial(
            self._here().clear, intent, reason=reason, by=by, force=force, attempt=attempt
        )
        return self._see_through(clear)

    def sweep(self) -> int:
        """Forget what has expired; how many records went."""
        fence = self._here()
        return self._ask(fence.sweep, ran=None)

    def stats(self) -> FenceStats:
        """How the attempts of this process ended, since it opened the fence."""
        return self._source.fence().stats()

    def intent_count(self) -> int:
        """How many intents are recorded, in all scopes."""
        fence = self._here()
        return self._ask(fence.intent_count)

    def domain_count(self) -> int:
        """How many domains are known, in all scopes."""
        fence = self._here()
        return self._ask(fence.domain_count)

    # --- life -------------------------------------------------------------------------------------

    def close(self, drain_seconds: float = 5.0) -> None:
        """Refuse new work, wait up to `drain_seconds` for what is held, record the rest as unknown.

        Idempotent. Closes the ledger; a scoped view closes nothing. A fence from
        `effectfence.blocking` that is still open when the interpreter ends is closed then.
        """
        refuse_event_loop()
        call = Call(lambda: self._source.aclose(drain_seconds))
        with suppress(Ended):  # then it was closed at exit
            if (interruption := _wait_through(call, None)) is not None:
                raise interruption
            call.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- waiting ----------------------------------------------------------------------------------

    def _here(self) -> EffectFence:
        """The fence, for a thread that may wait."""
        refuse_event_loop()
        fence = self._source.fence()
        fence._check_open()
        return fence

    def _attempt(
        self, request: EffectRequest, wait_seconds: float, not_executed: ExceptionTypes
    ) -> BlockingEffect:
        return BlockingEffect(self, request, _seconds(wait_seconds), not_executed)

    def _ask(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        *,
        patience: float = 0.0,
        undo: Callable[[T], Awaitable[object]] | None = None,
        ran: bool | None = False,
    ) -> T:
        """What it comes to. Interrupted, it is taken back before the interruption goes on."""
        call = Call(make)
        try:
            return self._wait_for(call, patience, ran)
        except BaseException as error:
            if error is not call.error:
                take_back(call, undo, error)
            raise

    def _wait_for(self, call: Call[T], patience: float, ran: bool | None) -> T:
        try:
            background().start(call)
            if call.wait(None if self._limit is None else self._limit + patience):
                return call.result()
        except Ended as ended:
            raise self._unavailable(str(ended), ran) from None
        raise self._late(ran)

    def _see_through(
        self, make: Callable[[], Coroutine[Any, Any, T]], *, ran: bool | None = None
    ) -> T:
        """What it comes to. Interrupted once, it is waited for all the same; twice, it goes on
        without its waiter."""
        call = Call(make)
        try:
            if (interruption := _wait_through(call, self._limit)) is not None:
                raise interruption
            if call.over:
                return call.result()
        except Ended as ended:
            raise self._unavailable(str(ended), ran) from None
        raise self._late(ran)

    def _late(self, ran: bool | None) -> errors.LedgerUnavailable:
        return self._unavailable(f"it did not answer within {self._limit:g} s", ran)

    def _unavailable(self, reason: str, ran: bool | None) -> errors.LedgerUnavailable:
        name = self._source.fence()._shared.store.name
        return errors.LedgerUnavailable(ledger=name, reason=reason, ran=ran)


class BlockingEffect:
    """What `fence.effect(request)` gives: one attempt, as a context manager for one use.

    `fresh`: run the effect. `prepared`: its ticket (raises `RuntimeError` on a replay). `cert`: the
    certificate, on a replay at once, else after leaving. `lost`: set when the lease is lost.
    """

    def __init__(
        self,
        fence: BlockingFence,
        request: EffectRequest,
        wait_seconds: float,
        not_executed: ExceptionTypes,
    ) -> None:
        self._fence = fence
        self._open = fence._here()
        self._patience = wait_seconds
        self._effect = Effect(self._open, request, wait_seconds, not_executed)
        self._effect.lost = _LostInThread()
        self._home: Background | None = None
        self._inside: Inside | None = None

    @property
    def fresh(self) -> bool:
        return self._effect.fresh

    @property
    def prepared(self) -> PreparedEffect:
        return self._effect.prepared

    @property
    def cert(self) -> EffectCert | None:
        return self._effect.cert

    @property
    def lost(self) -> threading.Event:
        """Set when the lease is lost; to be looked at, or waited for."""
        assert isinstance(self._effect.lost, _LostInThread)
        return self._effect.lost.event

    @property
    def result(self) -> Any:
        return self._effect.result

    @result.setter
    def result(self, result: Any) -> None:
        self._effect.result = result

    def __enter__(self) -> Self:
        refuse_event_loop()
        effect = self._effect
        if effect._entered:  # looked at here: what an interruption would undo is the first one's
            raise RuntimeError(
                f"this effect of {effect._request.intent!r} was entered before: ask "
                "`fence.effect(…)` for another; this time nothing ran"
            )
        call = Call(effect.__aenter__)
        try:
            self._fence._wait_for(call, self._patience, False)
            if effect.fresh:
                self._home = background()
                self._inside = Inside(effect)
            return self
        except BaseException as error:
            self._home = None
            self._leave_context()
            if error is not call.error:
                take_back(call, functools.partial(_never_began, effect), error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        effect, home = self._effect, self._home
        if home is None:
            return  # a replay
        self._leave_context()
        if self._open._forked():
            self._home = None
            if error is None:
                self._open._check_open()  # raises, and says why
            return
        returned, interruption = effect.result, None
        try:
            effect.result = _plain(returned)
        except BaseException as error_here:
            interruption = error_here
        call = Call(functools.partial(effect.__aexit__, kind, error, trace))
        try:
            interruption = _wait_through(call, self._fence._limit, home, interruption)
        except Ended as ended:
            if error is None:
                raise self._unreported(str(ended), returned) from None
            return
        except BaseException:  # a second interruption: it goes on without its waiter
            home.start(call)
            self._home = None
            raise
        finally:
            effect.result = returned
        self._home = None
        if interruption is not None:
            raise interruption
        if error is None:
            self._raise_what_became(call)

    def _raise_what_became(self, call: Call[None]) -> None:
        """What a commit raises."""
        if not call.over:
            reason = f"it did not answer within {self._fence._limit:g} s"
            raise self._unreported(reason, self.result)
        try:
            call.result()
        except Ended as ended:
            raise self._unreported(str(ended), self.result) from None
        except errors.FenceError as failed:
            failed.with_result(self.result)
            raise

    def _unreported(self, reason: str, result: Any) -> errors.FenceError:
        failed = self._fence._unavailable(reason, True)
        failed.prepared = self.prepared
        return failed.with_result(result)

    def _leave_context(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.leave()

    def __del__(self) -> None:
        """Nobody can report this attempt any more."""
        home = getattr(self, "_home", None)
        if home is None or self._open._forked():
            return
        error = RuntimeError("its thread let go of it without a report")
        with suppress(Ended):
            home.start(Call(functools.partial(self._effect.__aexit__, RuntimeError, error, None)))


class _LostInThread(Lost):
    """The same for a thread to wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def set(self) -> None:
        super().set()
        self.event.set()


class BlockingFencing(Fencing):
    """The decorator behind `BlockingFence.fenced(…)`."""

    def __init__(self, fence: BlockingFence, *options: Any) -> None:
        super().__init__(None, *options)  # type: ignore[arg-type]  # what it asks for is run here
        self._blocking = fence

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        _refuse_async(function)
        signature = _signature_of(function)
        self._check_names(signature)
        returns = _Returns(function, signature.return_annotation)

        @functools.wraps(function)
        def fenced(*args: P.args, **kwargs: P.kwargs) -> R:
            returns.resolve()
            request = self._request(function, signature, args, kwargs)
            attempt = self._blocking._attempt(request, self._wait_seconds, self._not_executed)
            with attempt:
                if attempt.fresh:
                    value = function(*args, **kwargs)
                    attempt.result = _not_awaitable(value)
            if attempt.fresh:
                return value
            assert attempt.cert is not None
            replayed: R = returns.rebuilt(attempt.cert)
            return replayed

        return _showing(fenced, signature)


# --- waiting --------------------------------------------------------------------------------------


def ask(
    make: Callable[[], Coroutine[Any, Any, T]],
    *,
    undo: Callable[[T], Awaitable[object]] | None = None,
) -> T:
    """What it comes to. Interrupted, `undo` is called with what it came to nonetheless."""
    call = Call(make)
    try:
        background().start(call)
        call.wait()
        return call.result()
    except BaseException as error:
        if error is not call.error:
            take_back(call, undo, error)
        raise


# --- interruptions --------------------------------------------------------------------------------


def _wait_through(
    call: Call[Any],
    limit: float | None,
    home: Background | None = None,
    interruption: BaseException | None = None,
) -> BaseException | None:
    """Wait until it is over, or for `limit`; what interrupted that. A second time, that goes on."""
    while True:
        try:
            (home or background()).start(call)  # once, however often it is asked for
            call.wait(limit if interruption is None else _SEE_THROUGH_SECONDS)
            return interruption
        except BaseException as error:
            if interruption is not None or isinstance(error, Ended):
                raise
            interruption = error


def take_back(
    call: Call[T], undo: Callable[[T], Awaitable[object]] | None, error: BaseException
) -> None:
    """Have it undone: at once, unless it is the ledger that does not answer."""
    with suppress(Ended):
        back = Call(functools.partial(call.take_back, undo))
        background().start(back)
        if not isinstance(error, errors.LedgerUnavailable):
            back.wait(_SEE_THROUGH_SECONDS)


async def _never_began(effect: Effect, _: object) -> None:
    """Undo an `__aenter__` whose body never began."""
    if effect.fresh:
        effect._never_began = True
        error = errors.NotExecuted("interrupted before its body began")
        await effect.__aexit__(type(error), error, None)


# --- small pieces ---------------------------------------------------------------------------------


def refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "this thread runs an event loop, which a blocking call would stop; it did nothing: await "
        "the fence itself (`await fence.prepare(…)`), or go to a thread (`asyncio.to_thread`)"
    )


def _refuse_async(function: Callable[..., Any]) -> None:
    _refuse_generators(function)
    if _is_async(function):
        raise TypeError(
            "an async function can't be run by a blocking fence, which awaits nothing; nothing "
            "ran: give it to the fence itself (`await fence.run(…)`, `@fence.fenced(…)`)"
        )


def _not_awaitable(value: T) -> T:
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError(
            "the function returned an awaitable, which a blocking fence does not await: its "
            "outcome is unknown"
        )
    return value


def _plain(result: Any) -> Any:
    """The same as plain JSON; what can't be is left for the fence to say so."""
    try:
        return detached(result, encode(result, max_depth=MAX_DEPTH, name="result"))
    except Exception:  # of the caller's own classes, too
        return result


async def _page(records: AsyncIterator[T], size: int) -> list[T]:
    page: list[T] = []
    async for record in records:
        page.append(record)
        if len(page) == size:
            break
    return page
