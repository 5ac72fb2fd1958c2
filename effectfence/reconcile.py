"""Reconcilers: code that asks the provider what became of an effect, and says so.

`@fence.reconciler("charge_card")` registers an async function. It is asked about effects of which
nobody knows whether they ran, and answers `Happened`, `DidNotHappen` or `StillUnknown`; the first
two are words like an operator's, and settle or clear. Invariants:

1. Asked about is what an operator may speak for: an outcome that is unknown, whose holder's lease
   ran out or whose process is dead. Never one in flight: its holder may be alive.
2. A word is about the very record that was asked about. If anything moved meanwhile (its holder
   reported, an operator or another process spoke, it was run anew), the word is not taken; and none
   is ever forced. So of two words one wins, and the other is no error.
3. Only `Happened` and `DidNotHappen` are words. Whoever raises, takes too long, is cancelled or
   answers anything else has said nothing: logged, asked again later.
4. "It did not happen" is true of the past only: a request may still be on its way to the provider.
   It counts when it was asked for `grace_seconds` after the outcome became unknown, by the ledger's
   own clock; for a process that died, after its death was found and written down. It never counts
   against a holder who reported that it did run (`CommitStale`).
5. Everything is bounded, per reconciler: questions at once, questions a round, seconds an answer
   may take; and there is a growing, jittered pause before the same question. Those that wait
   longest are asked first, so that no crowd starves anybody.
6. A word that was begun is finished, a question is let go: when the caller is cancelled, and when
   the fence closes.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from effectfence import claims, errors, records, rules
from effectfence.canonical import MAX_DEPTH, check_name, encode
from effectfence.models import IntentRecord
from effectfence.stores.contract import Record, View
from effectfence.stores.watchers import wake

if TYPE_CHECKING:
    from effectfence.fence import EffectFence

_log = logging.getLogger("effectfence")

_LET_GO_SECONDS: Final = 1.0
"""For a question that was given up, to end; one that does not end keeps its place."""
_MOST_DOUBLINGS: Final = 30
_MOST_TOLD: Final = 1000


# --- what a reconciler is asked, and what it answers ----------------------------------------------


class UnknownEffect(IntentRecord):
    """An effect of which nobody knows whether it ran, as its record has it.

    `args` lack what the request ignored. `idempotency_key` is what its holder was told to hand to
    the provider.
    """

    unknown_seconds: float
    """Since when nobody knows, by the ledger's own clock."""


@dataclass(frozen=True, slots=True)
class Happened:
    """It ran, with this result (JSON: what its duplicates will get). Settles the intent."""

    result: Any
    reason: str = "the provider has it"

    def __post_init__(self) -> None:
        _check_reason(self.reason)


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """It did not run. Clears the intent, if asked after the grace: it may then be run again."""

    reason: str = "the provider does not have it"

    def __post_init__(self) -> None:
        _check_reason(self.reason)


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """Nobody can say yet. Nothing changes; asked again later."""

    reason: str = "the provider cannot say"

    def __post_init__(self) -> None:
        _check_reason(self.reason)


Answer = Happened | DidNotHappen | StillUnknown
Asks = Callable[[UnknownEffect], Awaitable[Answer]]
Function = TypeVar("Function", bound=Asks)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What came of one round of questions."""

    settled: int = 0
    """It happened."""
    cleared: int = 0
    """It did not happen."""
    too_early: int = 0
    """It did not happen so far; asked again after the grace."""
    still_unknown: int = 0
    failed: int = 0
    """Raised, took too long, was cancelled, or gave no answer that could be taken."""
    overtaken: int = 0
    """Somebody else's word or report came first; it stands."""
    waiting: int = 0
    """Not asked in this round: asked not long ago, being asked, or beyond the limits."""
    no_reconciler: int = 0
    """Of tools that nobody asks about: an operator's."""

    @property
    def left(self) -> int:
        """How many outcomes are as unknown as before."""
        return self.too_early + self.still_unknown + self.failed + self.waiting + self.no_reconciler

    def log_line(self) -> str:
        """All of it in one line, for a log."""
        return (
            f"effectfence reconciled: settled={self.settled} cleared={self.cleared} "
            f"too-early={self.too_early} still-unknown={self.still_unknown} failed={self.failed} "
            f"overtaken={self.overtaken} waiting={self.waiting} "
            f"no-reconciler={self.no_reconciler} left={self.left}"
        )


# --- who is asked, and when -----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Reconciler:
    """A registered function with its limits."""

    ask: Asks
    name: str
    scope: str
    tools: tuple[str, ...]
    grace_seconds: float
    timeout_seconds: float
    max_concurrent: int
    max_per_round: int
    retry_seconds: float
    max_retry_seconds: float
    asking: int = 0
    """Questions that have not ended yet, those too that were given up."""

    def __post_init__(self) -> None:
        if not inspect.iscoroutinefunction(self.ask) and not inspect.iscoroutinefunction(
            getattr(self.ask, "__call__", None)  # noqa: B004 - whether it is async, not callable
        ):
            raise TypeError(f"a reconciler is an async function; {self.ask!r} is none")
        check_name(self.by, what="name of a reconciler")
        for tool in self.tools:
            check_name(tool, what="tool of a reconciler")
        if not self.tools:
            raise TypeError("a reconciler is for at least one tool: @fence.reconciler('charge')")
        for limit in ("grace", "timeout", "retry", "max_retry"):
            check_seconds(getattr(self, f"{limit}_seconds"), f"{limit}_seconds")
        for limit in ("max_concurrent", "max_per_round"):
            count = getattr(self, limit)
            if type(count) is not int or count < 1:
                raise ValueError(f"{limit} is {count!r}; 1 or more is wanted")

    @property
    def by(self) -> str:
        return f"reconciler:{self.name}"

    def rank(self, tool: str, scope: str) -> tuple[int, int] | None:
        """How near it is to a tool in a scope; the nearest is asked. `None`: not for it."""
        fits = [pattern for pattern in self.tools if _matches(pattern, tool)]
        if not fits or not claims.within(scope, self.scope):
            return None
        return len(self.scope), max(map(_nearness, fits))

    def pause(self, tries: int, chance: float) -> float:
        """Seconds before the same question is put again: doubled each time, and jittered."""
        longest = self.retry_seconds * 2.0 ** min(tries - 1, _MOST_DOUBLINGS)
        return min(longest, self.max_retry_seconds) * (0.5 + 0.5 * chance)


@dataclass(slots=True)
class _Retry:
    seq: int
    """Of the attempt that was asked about; another one begins anew."""
    tries: int
    due_at: float


@dataclass(slots=True)
class _Seen:
    """A record as it stood when the question was put."""

    key: str
    version: int
    tag: str
    seq: int
    effect: UnknownEffect
    said_it_ran: bool

    @property
    def name(self) -> str:
        """For the log."""
        scope = "/".join(self.effect.scope)
        return f"{self.effect.intent!r}" + (f" of {scope!r}" if scope else "")

    def stands(self, view: View) -> bool:
        record = view.records[self.key]
        return record is not None and (record.version, record.tag) == (self.version, self.tag)


class Reconcilers:
    """Those of one fence and its scopes. `clock` (seconds) and `chance` (0 to 1) may be a test's.

    Used from any thread: what is shared is touched under the lock, or is one step of a dict.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._registered: tuple[Reconciler, ...] = ()
        self._retries: dict[str, _Retry] = {}
        """By intent key; of what is unknown now and was asked about, no more."""
        self._being_asked: set[str] = set()
        self._told: set[str] = set()
        self._stops: set[asyncio.Future[None]] = set()
        self._lock = threading.Lock()

    def add(self, reconciler: Reconciler) -> None:
        with self._lock:
            for other in self._registered:
                twice = set(other.tools) & set(reconciler.tools)
                if twice and other.scope == reconciler.scope:
                    raise ValueError(
                        f"{min(twice)!r} has a reconciler already, {other.name!r}; one tool is "
                        "asked about by one"
                    )
            self._registered += (reconciler,)

    def find(self, tool: str, scope: str) -> Reconciler | None:
        """The innermost scope's; there the one that says most of the tool's name."""
        ranked = [(rank, r) for r in self._registered if (rank := r.rank(tool, scope)) is not None]
        return max(ranked, key=lambda found: found[0])[1] if ranked else None

    def stop(self) -> None:
        """The fence is closing: let go of questions, begin no more. From any thread."""
        for future in tuple(self._stops):
            wake(future)

    @contextmanager
    def stopping(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when the fence closes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stops.add(future)
        try:
            yield future
        finally:
            self._stops.discard(future)

    # --- a round ----------------------------------------------------------------------------------

    async def round(self, fence: EffectFence) -> Reconciled:
        """Put every question that is due, within the limits."""
        custody = fence._shared.custody
        with self.stopping() as stop:
            fence._check_usable()
            custody.entering += 1
            try:
                return await _Round(self, fence, stop).run()
            finally:
                custody.entered()

    async def due(self, fence: EffectFence, tally: Counter[str]) -> dict[Reconciler, list[str]]:
        """For each reconciler the keys to ask about, the longest waiting first."""
        now = self._clock()
        queues: dict[Reconciler, list[tuple[float, str]]] = {}
        seen: set[str] = set()
        async for view in fence._shared.store.scan(records.OPEN):
            for key, record in view.records.items():
                scope = claims.scope_of(key)
                if record is None or not claims.within(scope, fence._scope):
                    continue
                body = records.body_of(record)
                if rules.unknown_for(record, body, view.now, gone=key in view.gone) is None:
                    continue
                seen.add(key)
                reconciler = self.find(tool := body["request"]["tool"], scope)
                if reconciler is None:
                    tally["no_reconciler"] += 1
                    self._tell_once(tool)
                    continue
                due_at = self._due_at(key, record, now - (view.now - record.at))
                queue = queues.setdefault(reconciler, [])
                if due_at > now or not _queue(queue, reconciler, due_at, key):
                    tally["waiting"] += 1
            await asyncio.sleep(0)  # a ledger in memory never waits, and there may be many pages
        self._forget(fence._scope, seen)
        return {who: _in_order(queue) for who, queue in queues.items()}

    def _due_at(self, key: str, record: Record, moved_at: float) -> float:
        """What was not asked about yet has been due since it last moved."""
        retry = self._retries.get(key)
        return moved_at if retry is None or retry.seq != record.stamp else retry.due_at

    def _forget(self, scope: str, seen: set[str]) -> None:
        for key in tuple(self._retries):
            if key not in seen and claims.within(claims.scope_of(key), scope):
                self._retries.pop(key, None)

    def _tell_once(self, tool: str) -> None:
        if tool not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(tool)
            _log.warning(
                "nobody knows whether an effect of %r ran, and it has no reconciler: an operator "
                "must settle or clear it (this is said once)",
                tool,
            )

    # --- one question -----------------------------------------------------------------------------

    @contextmanager
    def only(self, key: str) -> Iterator[bool]:
        """Whether nobody else in this process asks about it now; then until the end of the block
        nobody does."""
        with self._lock:
            alone = key not in self._being_asked
            self._being_asked.add(key)
        try:
            yield alone
        finally:
            if alone:
                self._being_asked.discard(key)

    def take_place(self, reconciler: Reconciler) -> bool:
        """Whether one more question may be put to it now; then a place is taken."""
        with self._lock:
            free = reconciler.asking < reconciler.max_concurrent
            reconciler.asking += free
        return free

    def leave_place(self, reconciler: Reconciler) -> None:
        with self._lock:
            reconciler.asking -= 1

    def later(self, reconciler: Reconciler, seen: _Seen) -> float:
        """Ask again after a pause, of so many seconds."""
        retry = self._retries.get(seen.key)
        tries = 1 if retry is None or retry.seq != seen.seq else retry.tries + 1
        pause = reconciler.pause(tries, self._chance())
        self._retries[seen.key] = _Retry(seen.seq, tries, self._clock() + pause)
        return pause

    def after_grace(self, reconciler: Reconciler, seen: _Seen) -> float:
        """Ask again when the grace is over, in so many seconds."""
        left = reconciler.grace_seconds - seen.effect.unknown_seconds
        self._retries[seen.key] = _Retry(seen.seq, 0, self._clock() + left)
        return left

    def answered(self, seen: _Seen) -> None:
        self._retries.pop(seen.key, None)

    def pause(self, every: float) -> float:
        """Processes that were started together need not ask together."""
        return every * (0.9 + 0.2 * self._chance())


class _Round:
    """One round: what is due is looked up, then asked about, by a few workers a reconciler."""

    def __init__(
        self, reconcilers: Reconcilers, fence: EffectFence, stop: asyncio.Future[None]
    ) -> None:
        self._reconcilers = reconcilers
        self._fence = fence
        self._stop = stop
        self._tally: Counter[str] = Counter()
        self._fault: errors.FenceError | None = None

    async def run(self) -> Reconciled:
        batches = await self._reconcilers.due(self._fence, self._tally)
        queues = [(who, iter(keys)) for who, keys in batches.items()]
        async with asyncio.TaskGroup() as group:
            for reconciler, keys in queues:
                for _ in range(min(reconciler.max_concurrent, len(batches[reconciler]))):
                    group.create_task(self._work(reconciler, keys))
        self._tally["waiting"] += sum(1 for _, keys in queues for _ in keys)
        if self._fault is not None:
            raise self._fault
        return Reconciled(**self._tally)

    async def _work(self, reconciler: Reconciler, keys: Iterator[str]) -> None:
        try:
            while not self._stop.done() and (key := next(keys, None)) is not None:
                with self._reconcilers.only(key) as alone:
                    came_to = await self._attend(reconciler, key) if alone else "waiting"
                self._tally[came_to] += 1
        except errors.FenceError as fault:  # the ledger's: it would be everybody's
            self._fault = self._fault or fault
            wake(self._stop)

    async def _attend(self, reconciler: Reconciler, key: str) -> str:
        try:
            return await self._resolve(reconciler, key)
        except errors.FenceError:
            raise
        except Exception:  # of ours, or of an odd object's: it is not the others'
            _log.exception("%s: %r is still unknown", reconciler.by, key)
            return "failed"

    async def _resolve(self, reconciler: Reconciler, key: str) -> str:
        """Ask, and say what was answered. Gives the name of what it came to."""
        seen = await self._look(key)
        if seen is None:
            return "overtaken"
        answer = await self._ask(reconciler, seen)
        match answer:
            case Happened():
                return await self._settle(reconciler, seen, answer)
            case DidNotHappen() if seen.said_it_ran:
                why = f"its holder said that it ran, the provider not: {answer.reason}"
                return self._unanswered(reconciler, seen, why, "still_unknown", logging.WARNING)
            case DidNotHappen() if seen.effect.unknown_seconds < reconciler.grace_seconds:
                left = self._reconcilers.after_grace(reconciler, seen)
                self._note(reconciler, seen, f"did not happen so far: {answer.reason}", left)
                return "too_early"
            case DidNotHappen():
                return await self._clear(reconciler, seen, answer)
            case StillUnknown():
                return self._unanswered(reconciler, seen, answer.reason, "still_unknown")
            case came_to:
                return came_to

    async def _look(self, key: str) -> _Seen | None:
        """What stands there now, if it may be asked about. A death that was found is written down
        before: the grace begins with it."""
        fence = self._fence
        _, answer = await fence._decide(
            [key], lambda view: rules.found_dead(view, key, fence.config)
        )
        record = answer.records[key]
        if record is None:
            return None
        body = records.body_of(record)
        since = rules.unknown_for(record, body, answer.now, gone=False)
        if since is None:
            return None
        described = rules.describe(key, View(answer.now, answer.records))
        effect = UnknownEffect(**dict(described), unknown_seconds=since)
        return _Seen(key, record.version, record.tag, record.stamp, effect, "stale" in body)

    # --- the question -----------------------------------------------------------------------------

    async def _ask(self, reconciler: Reconciler, seen: _Seen) -> Answer | str:
        """The answer, or what the lack of one came to."""
        if not self._reconcilers.take_place(reconciler):
            return "waiting"
        task = self._fence._shared.custody.own(_question(reconciler, seen.effect), logged=False)
        task.add_done_callback(lambda _: self._reconcilers.leave_place(reconciler))
        try:
            await asyncio.wait(
                {task, self._stop},
                timeout=reconciler.timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            in_time = task.done()
            if not in_time:
                task.cancel()
        if not in_time:
            return await self._let_go(reconciler, seen, task)
        return self._read(reconciler, seen, task)

    async def _let_go(self, reconciler: Reconciler, seen: _Seen, task: asyncio.Task[Any]) -> str:
        """Whatever it still answers is not taken."""
        if self._stop.done():
            return "waiting"
        await asyncio.wait((task,), timeout=_LET_GO_SECONDS)
        why = f"no answer within {reconciler.timeout_seconds:g} s"
        if not task.done():
            why += ", and it does not end when it is cancelled"
        return self._unanswered(reconciler, seen, why, "failed", logging.WARNING)

    def _read(self, reconciler: Reconciler, seen: _Seen, task: asyncio.Task[Any]) -> Answer | str:
        if task.cancelled():
            why = "it was cancelled"
        elif (error := task.exception()) is not None:
            why = f"it raised {_text_of(error)}"
            _log.debug("%s about %r", reconciler.by, seen.effect.intent, exc_info=error)
        elif isinstance(answer := task.result(), Happened | DidNotHappen | StillUnknown):
            return answer
        else:
            why = (
                f"it answered with {type(answer).__name__}; Happened, DidNotHappen or StillUnknown "
                "is wanted"
            )
        return self._unanswered(reconciler, seen, why, "failed", logging.WARNING)

    # --- the word ---------------------------------------------------------------------------------

    async def _settle(self, reconciler: Reconciler, seen: _Seen, answer: Happened) -> str:
        fence, intent = self._fence, seen.effect.intent
        try:
            content = encode(answer.result, max_depth=MAX_DEPTH, name="result")
            if len(content) > fence.config.max_record_bytes:
                raise ValueError(f"result has more than {fence.config.max_record_bytes} bytes")
        except Exception as error:  # whatever an object of the caller's raises
            why = f"it happened, but its result cannot be recorded: {_text_of(error)}"
            return self._unanswered(reconciler, seen, why, "failed", logging.WARNING)
        word = _word(reconciler, answer, claims.scope_of(seen.key))

        def settle(view: View) -> rules.Decision:
            scope = claims.scope_of(seen.key)
            return rules.settle(view, intent, seen.key, scope, content, word, fence.config)

        return await self._say(reconciler, seen, settle, word, "settled")

    async def _clear(self, reconciler: Reconciler, seen: _Seen, answer: DidNotHappen) -> str:
        word = _word(reconciler, answer, claims.scope_of(seen.key))

        def clear(view: View) -> rules.Decision:
            return rules.clear(view, seen.effect.intent, seen.key, word, self._fence.config)

        return await self._say(reconciler, seen, clear, word, "cleared")

    async def _say(
        self,
        reconciler: Reconciler,
        seen: _Seen,
        rule: Callable[[View], rules.Decision],
        word: records.Word,
        done: str,
    ) -> str:
        """Say it if the record still stands as it was asked about; cancelled, it is said first."""

        def decide(view: View) -> rules.Decision:
            return rule(view) if seen.stands(view) else rules.Decision(_OVERTAKEN)

        async def say() -> rules.Answer:
            answer, _ = await self._fence._decide([seen.key], decide)
            if answer is not _OVERTAKEN and not isinstance(answer, rules.Refuse):
                self._tell(seen, answer, word)
            return answer

        try:
            answer = await say()
        except asyncio.CancelledError:
            await self._fence._shared.custody.see_through(say())
            raise
        self._reconcilers.answered(seen)
        if answer is _OVERTAKEN or isinstance(answer, rules.Refuse):
            _log.info("%s would have %s %s, but somebody came first", word.by, done, seen.name)
            return "overtaken"
        _log.info("%s %s %s: %r", word.by, done, seen.name, word.reason)
        return done

    def _tell(self, seen: _Seen, answer: rules.Answer, word: records.Word) -> None:
        view = self._fence._view(claims.scope_of(seen.key))
        if type(answer) is rules.Certify:
            view._tell("settled", "settle", answer.cert, cert=answer.cert, by=word.by)
        else:
            view._tell("cleared", "clear", seen.effect.intent, by=word.by)

    # --- no word ----------------------------------------------------------------------------------

    def _unanswered(
        self,
        reconciler: Reconciler,
        seen: _Seen,
        why: str,
        came_to: str,
        level: int = logging.INFO,
    ) -> str:
        pause = self._reconcilers.later(reconciler, seen)
        self._note(reconciler, seen, why, pause, level)
        return came_to

    def _note(
        self,
        reconciler: Reconciler,
        seen: _Seen,
        why: str,
        pause: float,
        level: int = logging.INFO,
    ) -> None:
        what = "%s: %s is still unknown: %r (asked again in %.0f s)"
        _log.log(level, what, reconciler.by, seen.name, records.clip(why), pause)


_OVERTAKEN: Final = rules.Said(False)


# --- on a schedule --------------------------------------------------------------------------------


class Reconciling:
    """What `fence.reconciling()` gives: a round at once, then one every so many seconds."""

    def __init__(self, fence: EffectFence, every: float) -> None:
        self._fence = fence
        self._every = check_seconds(every, "every")
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise RuntimeError("this `reconciling()` was entered before: ask the fence for another")
        self._fence._check_usable()
        self._task = self._fence._shared.custody.own(self._keep_on())
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _keep_on(self) -> None:
        fence, reconcilers = self._fence, self._fence._shared.reconcilers
        with reconcilers.stopping() as stop:
            while not stop.done() and not fence._shared.closing:
                await self._round(reconcilers)
                await asyncio.wait((stop,), timeout=reconcilers.pause(self._every))

    async def _round(self, reconcilers: Reconcilers) -> None:
        """Whatever goes wrong in one round, the next is another."""
        try:
            report = await reconcilers.round(self._fence)
            _log.debug("%s", report.log_line())
        except (errors.LedgerUnavailable, errors.LedgerCorrupt) as error:
            if not self._fence._shared.closing:
                _log.warning("reconciling goes on in %g s: %s", self._every, error)
        except Exception:  # of ours
            _log.exception("reconciling goes on in %g s", self._every)


# --- small pieces ---------------------------------------------------------------------------------


def check_seconds(seconds: float, name: str) -> float:
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise ValueError(f"{name} is {seconds!r}; more than zero seconds are wanted")
    return seconds


def _check_reason(reason: str) -> None:
    if not isinstance(reason, str):
        raise TypeError(f"a reason is a string, not {type(reason).__name__}")


def _queue(queue: list[tuple[float, str]], reconciler: Reconciler, due_at: float, key: str) -> bool:
    """Keep the longest waiting; false if that leaves one out (this, or one that was kept)."""
    if len(queue) < reconciler.max_per_round:
        heapq.heappush(queue, (-due_at, key))
        return True
    heapq.heappushpop(queue, (-due_at, key))
    return False


def _in_order(queue: list[tuple[float, str]]) -> list[str]:
    return [key for _, key in sorted(queue, key=lambda item: (-item[0], item[1]))]


def _word(reconciler: Reconciler, answer: Happened | DidNotHappen, scope: str) -> records.Word:
    key = claims.key("history", os.urandom(16).hex(), scope)
    return records.Word(key, reconciler.by, records.clip(answer.reason))


def _matches(pattern: str, tool: str) -> bool:
    """`*` stands for anything, and nothing else is special."""
    if "*" not in pattern:
        return pattern == tool
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), tool, re.DOTALL) is not None


def _nearness(pattern: str) -> int:
    return len(pattern) - pattern.count("*") if "*" in pattern else sys.maxsize


async def _question(reconciler: Reconciler, effect: UnknownEffect) -> Answer:
    return await reconciler.ask(effect)


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # whatever an object of the caller's raises
        return type(error).__name__
