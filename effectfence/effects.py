"""An effect with its bookkeeping: `effect()`, `run()` and `fenced`.

All three prepare, keep the lease renewed while the body runs, and report exactly one outcome:

    returned              commit
    `NotExecuted` (or a type the caller named)   release: it certainly did not run
    never begun (no thread to be had)            release
    anything else, cancellation too              abort: unknown, fenced

Invariants:

1. Whatever ends the body, its outcome is recorded before the exception goes on, also while the
   task is being cancelled. The exception goes on, whatever becomes of the recording.
2. A plain function runs in a thread that cannot be stopped: cancelled, the caller leaves and the
   effect goes on under an owned task, which commits what it returns. It either began, or never will
   (`_Begin`).
3. What a caller got wrong (types, names, annotations) is refused before anything is prepared.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import math
import sys
import typing
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pydantic import PydanticUserError, TypeAdapter

from effectfence import errors
from effectfence.canonical import encode
from effectfence.events import left
from effectfence.leases import Kept, Lost
from effectfence.models import EffectCert, EffectRequest, Fresh, PreparedEffect
from effectfence.templates import Template

if TYPE_CHECKING:
    from effectfence.fence import EffectFence

_log = logging.getLogger("effectfence")
_current: contextvars.ContextVar[Effect] = contextvars.ContextVar("effectfence_current")

P = ParamSpec("P")
R = TypeVar("R")
ExceptionTypes = tuple[type[BaseException], ...] | type[BaseException]


def current_effect() -> PreparedEffect:
    """The ticket of the effect that runs here. Raises `LookupError` outside of one."""
    return _running_here("current_effect").prepared


def lease_lost() -> bool:
    """Whether the lease of the effect that runs here is lost: then stop, for another may run it.

    For the body of an effect, in its thread too. Raises `LookupError` outside of one.
    """
    lost = _running_here("lease_lost").lost
    return lost.known or lost.is_set()


def _running_here(asker: str) -> Effect:
    try:
        return _current.get()
    except LookupError:
        raise LookupError(f"no effect is running here: {asker}() is for inside of one") from None


class Effect:
    """What `fence.effect(request)` gives: one attempt, as an async context manager for one use.

    `fresh`: run the effect. `prepared`: its ticket (raises `RuntimeError` on a replay). `cert`: the
    certificate, on a replay at once, else after leaving. `lost`: set when the lease is lost.
    """

    def __init__(
        self,
        fence: EffectFence,
        request: EffectRequest,
        wait_seconds: float,
        not_executed: ExceptionTypes = (),
    ) -> None:
        self._fence = fence
        self._request = request
        self._wait_seconds = wait_seconds
        named = _exception_types(not_executed)
        self._not_executed: tuple[type[BaseException], ...] = (errors.NotExecuted, *named)
        self._entered = False
        self._running = False
        self._never_began = False
        self._outer: Effect | None = None
        self._prepared: PreparedEffect | None = None
        self._kept: Kept | None = None
        self._inside: Inside | None = None
        self.lost = Lost()
        self.result: Any = None
        self.cert: EffectCert | None = None

    @property
    def fresh(self) -> bool:
        return self._prepared is not None

    @property
    def prepared(self) -> PreparedEffect:
        if self._prepared is None:
            raise RuntimeError(
                "a replay has no ticket: look at `fresh` first; nothing is to be run"
            )
        return self._prepared

    async def __aenter__(self) -> Effect:
        if self._entered:
            raise RuntimeError(
                f"this effect of {self._request.intent!r} was entered before: ask "
                "`fence.effect(…)` for another; this time nothing ran"
            )
        self._entered = True
        self._outer = _current.get(None)
        wait_seconds = 0.0 if self._is_inside_itself() else self._wait_seconds
        admission = await self._fence.prepare(self._request, wait_seconds=wait_seconds)
        if isinstance(admission, Fresh):
            await self._begin(admission.prepared)
        else:
            self.cert = admission.cert
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._prepared is None:
            return
        self._running, self._outer = False, None
        self._leave_context()
        try:
            await self._report(self._prepared, error)
        finally:
            if self._kept is not None:
                self._fence._drop(self._kept)

    def _is_inside_itself(self) -> bool:
        """Whether one of the effects around this one holds its intent: it would wait for itself."""
        outer = self._outer
        while outer is not None and not (outer._running and self._same_intent(outer)):
            outer = outer._outer
        return outer is not None

    def _same_intent(self, other: Effect) -> bool:
        return (
            other._request.intent == self._request.intent
            and other._fence._shared is self._fence._shared
            and other._fence._scope == self._fence._scope
        )

    async def _begin(self, prepared: PreparedEffect) -> None:
        try:
            self._kept = self._fence._keep(prepared, self.lost)
        except BaseException as error:
            error.add_note("effectfence: the lease could not be kept; nothing ran")
            self._never_began = True
            await self._report(prepared, error)
            raise
        self._prepared, self._running = prepared, True
        self._inside = Inside(self)

    def _leave_context(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.leave()

    async def _report(self, prepared: PreparedEffect, error: BaseException | None) -> None:
        """Record how the body ended. Raises what `commit` raises, and nothing after an error."""
        if error is not None:
            await self._tell(error, self._name_outcome, prepared)
            return
        try:
            self.cert = await self._fence.commit(prepared, self.result)
        except errors.FenceError:
            raise
        except Exception as fault:  # of ours
            await self._tell(fault, self._give_up, prepared)
            raise

    async def _tell(self, error: BaseException, report: Report, prepared: PreparedEffect) -> None:
        """`error` goes on whatever happens here; what could not be told is noted on it."""
        try:
            await report(prepared, error)
        except errors.FenceError as failed:
            _log.warning("%s", failed)
            _note(error, failed)
        except Exception as fault:
            _log.exception("the outcome of %r could not be told", prepared.intent)
            _note(error, fault)
            if report != self._give_up:
                await self._tell(error, self._give_up, prepared)

    async def _name_outcome(self, prepared: PreparedEffect, error: BaseException) -> None:
        if self._never_began or _only(error, self._not_executed):
            await self._fence.release(prepared, _said(error))
        elif isinstance(error, asyncio.CancelledError):
            await self._fence.abort(prepared, "cancelled: outcome unknown")
        else:
            await self._give_up(prepared, error)

    async def _give_up(self, prepared: PreparedEffect, error: BaseException) -> None:
        await self._fence.abort(prepared, _said(error))


class Inside:
    """Here, and in what is called from here, an effect runs: `current_effect()`, and whoever
    surrounds bodies."""

    __slots__ = ("_leaves", "_token")

    def __init__(self, effect: Effect) -> None:
        self._leaves = effect._fence._entered(effect.prepared)
        self._token = _current.set(effect)

    def leave(self) -> None:
        with suppress(ValueError):  # entered in another context, as async generators may be
            _current.reset(self._token)
            if self._leaves:
                left(self._leaves)


Report = Callable[[PreparedEffect, BaseException], Awaitable[None]]


async def run_effect(
    fence: EffectFence,
    request: EffectRequest,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wait_seconds: float,
    not_executed: ExceptionTypes,
) -> EffectCert:
    """`EffectFence.run`; see there."""
    _refuse_generators(function)
    attempt = Effect(fence, request, wait_seconds, not_executed)
    if _is_async(function):
        return await _run(attempt, function, args, kwargs)
    await attempt.__aenter__()
    if not attempt.fresh:
        assert attempt.cert is not None
        return attempt.cert
    task = fence._shared.custody.own(_run_entered(attempt, function, args, kwargs), logged=False)
    attempt._leave_context()  # the task has a copy
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


async def _run(
    attempt: Effect, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EffectCert:
    async with attempt:
        if attempt.fresh:
            attempt.result = await function(*args, **kwargs)
    assert attempt.cert is not None
    return attempt.cert


async def _run_entered(
    attempt: Effect, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EffectCert:
    """The body of a plain function's effect, whose `__aenter__` is done: in a thread."""
    begin = _Begin()
    with _leaving() as leave:
        value = await asyncio.to_thread(_called, begin, function, args, kwargs)
        attempt.result = await value if inspect.isawaitable(value) else value
    attempt._never_began = begin.take()
    await attempt.__aexit__(*leave)
    if leave[1] is not None:
        raise leave[1]
    assert attempt.cert is not None
    return attempt.cert


class _Begin:
    """Taken by the thread that begins, or else by whoever gives up waiting for one: by one of them
    only, so that what was released never begins."""

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        try:
            return self._left.pop()  # atomic
        except IndexError:
            return False


def _called(
    begin: _Begin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not begin.take():
        return None  # given up meanwhile
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # which no future can carry: its waiter would wait for ever
        raise RuntimeError("the function raised StopIteration") from error


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Of an effect that went on without its caller."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("an effect whose caller had left failed: %s", _said(error))


Leave = list[Any]


@contextmanager
def _leaving() -> Iterator[Leave]:
    """Catch what ended the body, to be handed to `__aexit__`."""
    leave: Leave = [None, None, None]
    try:
        yield leave
    except BaseException as error:
        leave[:] = [type(error), error, error.__traceback__]


class Fencing:
    """The decorator behind `fence.fenced(…)`."""

    def __init__(
        self,
        fence: EffectFence,
        intent: str,
        domain: str | None,
        tool: str | None,
        agent: str | None,
        ignore: tuple[str, ...],
        not_executed: ExceptionTypes,
        result_ttl: float | None,
        wait_seconds: float,
    ) -> None:
        self._fence = fence
        self._intent = Template(intent)
        self._domain = Template(intent if domain is None else domain)
        self._tool = tool
        self._agent = agent
        self._ignore = _names(ignore)
        self._not_executed = _exception_types(not_executed)
        self._result_ttl = result_ttl
        self._wait_seconds = _seconds(wait_seconds)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_generators(function)
        signature = _signature_of(function)
        self._check_names(signature)
        returns = _Returns(function, signature.return_annotation)

        @functools.wraps(function)
        async def fenced(*args: Any, **kwargs: Any) -> Any:
            returns.resolve()
            request = self._request(function, signature, args, kwargs)
            called: list[Any] = []
            call = _calling(function, args, kwargs, called)
            cert = await self._fence.run(
                request, call, wait_seconds=self._wait_seconds, not_executed=self._not_executed
            )
            if called:
                return called[0]
            return returns.rebuilt(cert)

        return _showing(fenced, signature)

    def _request(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> EffectRequest:
        bound = signature.bind(*args, **kwargs)
        sent = _flat(signature, bound.arguments)
        bound.apply_defaults()
        values = _flat(signature, bound.arguments, keep_self=True)
        tool = self._tool or function.__name__
        return EffectRequest(
            intent=self._intent.fill(values),
            domain=self._domain.fill(values),
            tool=tool,
            args=sent,
            agent=self._agent or tool,
            ignore=self._ignore,
            result_ttl=self._result_ttl,
        )

    def _check_names(self, signature: inspect.Signature) -> None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for template in (self._intent, self._domain):
            unknown = template.names - set(signature.parameters)
            if unknown and not takes_any:
                raise ValueError(
                    f"{template.text!r} names {', '.join(sorted(unknown))}, which the function "
                    f"does not take ({', '.join(signature.parameters)})"
                )


class _Returns:
    """Rebuilds a recorded result through the function's return annotation.

    Resolved when the function is decorated; an annotation that names what is defined later, at the
    first call instead, before anything runs.
    """

    def __init__(self, function: Callable[..., Any], annotation: Any) -> None:
        self._function = function
        self._annotation = annotation
        self._adapter: TypeAdapter[Any] | None = None
        self._resolved = annotation in (None, Any, inspect.Signature.empty)
        with suppress(NameError, AttributeError):
            self.resolve()

    def resolve(self) -> None:
        """Raises `TypeError` for a type that no record can be turned back into."""
        if self._resolved:
            return
        annotation = _evaluated(self._annotation, self._function)
        if annotation not in (Any, type(None)):
            try:
                self._adapter = TypeAdapter(annotation)
            except PydanticUserError:
                raise TypeError(
                    f"{_name_of(self._function)} returns {inspect.formatannotation(annotation)}, "
                    "which can't be rebuilt from a record: return what pydantic can build, or "
                    "annotate it as Any to give duplicates plain JSON; nothing ran"
                ) from None
        self._resolved = True

    def rebuilt(self, cert: EffectCert) -> Any:
        """The result as the function would have returned it; `ResultNotRecorded` if it can't be."""
        if not cert.result_recorded:
            raise errors.ResultNotRecorded(cert=cert, reason=next(iter(cert.result.values())))
        if self._adapter is None:
            return cert.result
        try:
            return self._adapter.validate_json(encode(cert.result))
        except Exception as error:  # validators may be the caller's own code
            raise errors.ResultNotRecorded(
                cert=cert,
                reason=f"`.cert.result` does not fit what {_name_of(self._function)} returns",
            ) from error


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    """One annotation alone: those of the parameters may name what only type checkers import."""
    home = inspect.unwrap(function)
    while isinstance(home, functools.partial):
        home = inspect.unwrap(home.func)
    home = home if hasattr(home, "__globals__") else type(home).__call__
    alone = SimpleNamespace(__annotations__={"return": annotation})
    known = getattr(home, "__globals__", {})
    generic = {kind.__name__: kind for kind in getattr(home, "__type_params__", ())}
    return typing.get_type_hints(alone, known, generic, include_extras=True)["return"]


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # where looking at annotations evaluates them
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def _showing(fenced: Callable[P, R], signature: inspect.Signature) -> Callable[P, R]:
    """Shows its signature to those who don't follow `__wrapped__`, such as `getfullargspec`.

    Unless strings are in it: nobody could have them evaluated any more (`eval_str=True`).
    """
    parameters = (parameter.annotation for parameter in signature.parameters.values())
    if not any(isinstance(each, str) for each in (*parameters, signature.return_annotation)):
        fenced.__signature__ = signature  # type: ignore[attr-defined]  # functions take attributes
    return fenced


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _calling(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], called: list[Any]
) -> Callable[[], Any]:
    """The call, keeping the function's own value beside what is recorded of it."""
    if _is_async(function):

        async def call() -> Any:
            called.append(await function(*args, **kwargs))
            return called[0]

        return call

    async def awaited(value: Awaitable[Any]) -> Any:
        called.append(await value)
        return called[0]

    def call_plain() -> Any:
        value = function(*args, **kwargs)
        if inspect.isawaitable(value):
            return awaited(value)
        called.append(value)
        return value

    return call_plain


def _flat(
    signature: inspect.Signature, arguments: dict[str, Any], *, keep_self: bool = False
) -> dict[str, Any]:
    """Arguments by name: `**kwargs` spread out, `*args` as a list, a method's `self` left out."""
    flat: dict[str, Any] = {}
    for position, (name, value) in enumerate(arguments.items()):
        kind = signature.parameters[name].kind
        if position == 0 and name in ("self", "cls") and not keep_self:
            continue
        if kind is inspect.Parameter.VAR_KEYWORD:
            if hidden := flat.keys() & value.keys():
                raise ValueError(f"two arguments are named {min(hidden)!r}; nothing ran")
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            flat[name] = list(value)
        else:
            flat[name] = value
    return flat


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _refuse_generators(function: Callable[..., Any]) -> None:
    if not callable(function):
        raise TypeError(f"a function is wanted, not {type(function).__name__}; nothing ran")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("a generator can't be fenced: its effects happen while it is read")


def _only(error: BaseException, types: tuple[type[BaseException], ...]) -> bool:
    """Whether it is of these types, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup) and not isinstance(error, types):
        return all(_only(inner, types) for inner in error.exceptions)
    return isinstance(error, types)


def _said(error: BaseException) -> str:
    """What an exception says of itself; its own `__str__` may fail."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _note(error: BaseException, failed: Exception) -> None:
    with suppress(Exception):  # an exception's class may do as it likes
        error.add_note(f"effectfence: {_said(failed)}")


# --- what callers hand in -------------------------------------------------------------------------


def _exception_types(given: Any) -> tuple[type[BaseException], ...]:
    types = given if isinstance(given, tuple) else (given,)
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(
                f"not_executed is {given!r}; an exception type or a tuple of them is wanted"
            )
    return types


def _names(ignore: Any) -> tuple[str, ...]:
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
        raise TypeError(f"ignore is {ignore!r}; a tuple of names is wanted, such as ('note',)")
    return tuple(ignore)


def _seconds(wait_seconds: float) -> float:
    if type(wait_seconds) not in (int, float):
        raise TypeError(f"wait_seconds is {wait_seconds!r}; a number of seconds is wanted")
    if math.isnan(wait_seconds) or wait_seconds < 0:
        raise ValueError(f"wait_seconds is {wait_seconds}; zero or more seconds are wanted")
    return wait_seconds
