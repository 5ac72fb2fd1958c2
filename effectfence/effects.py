"""An effect with its bookkeeping: `effect()`, `run()` and `fenced`.

All three prepare, keep the lease renewed while the body runs, and report exactly one outcome:

    returned              commit
    `NotExecuted` (or a type the caller named)   release: it certainly did not run
    anything else, cancellation too              abort: unknown, fenced

Invariants:

1. Whatever ends the body, its outcome is recorded before the exception goes on, also while the
   task is being cancelled.
2. A plain function runs in a thread that cannot be stopped: cancelled, the caller leaves and the
   effect goes on under an owned task, which commits what it returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import typing
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from effectfence import errors
from effectfence.canonical import encode
from effectfence.leases import Kept
from effectfence.models import EffectCert, EffectRequest, Fresh, PreparedEffect
from effectfence.templates import Template

if TYPE_CHECKING:
    from effectfence.fence import EffectFence

_log = logging.getLogger("effectfence")
_current: contextvars.ContextVar[PreparedEffect] = contextvars.ContextVar("effectfence_current")

ExceptionTypes = tuple[type[BaseException], ...] | type[BaseException]


def current_effect() -> PreparedEffect:
    """The ticket of the effect that runs here. Raises `LookupError` outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "no effect is running here: current_effect() is for inside of one"
        ) from None


class Effect:
    """What `fence.effect(request)` gives: one attempt, as an async context manager.

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
        given = not_executed if isinstance(not_executed, tuple) else (not_executed,)
        self._not_executed: tuple[type[BaseException], ...] = (errors.NotExecuted, *given)
        self._prepared: PreparedEffect | None = None
        self._kept: Kept | None = None
        self._token: contextvars.Token[PreparedEffect] | None = None
        self.lost = asyncio.Event()
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
        admission = await self._fence.prepare(self._request, wait_seconds=self._wait_seconds)
        if isinstance(admission, Fresh):
            self._prepared = admission.prepared
            self._kept = self._fence._keep(admission.prepared, self.lost)
            self._token = _current.set(admission.prepared)
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
        self._leave_context()
        try:
            await self._report(self._prepared, error)
        finally:
            if self._kept is not None:
                self._fence._drop(self._kept)

    def _leave_context(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            with suppress(ValueError):  # entered in another context, as async generators may be
                _current.reset(token)

    async def _report(self, prepared: PreparedEffect, error: BaseException | None) -> None:
        if error is None:
            self.cert = await self._fence.commit(prepared, self.result)
            return
        try:
            if _only(error, self._not_executed):
                await self._fence.release(prepared, _said(error))
            elif isinstance(error, asyncio.CancelledError):
                await self._fence.abort(prepared, "cancelled: outcome unknown")
            else:
                await self._fence.abort(prepared, _said(error))
        except errors.FenceError as failed:
            _log.warning("%s", failed)
            error.add_note(f"effectfence: {failed}")


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
    task = fence._own(_run_entered(attempt, function, args, kwargs), logged=False)
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
    with _leaving(attempt) as leave:
        value = await asyncio.to_thread(_called, function, args, kwargs)
        attempt.result = await value if inspect.isawaitable(value) else value
    await attempt.__aexit__(*leave)
    if leave[1] is not None:
        raise leave[1]
    assert attempt.cert is not None
    return attempt.cert


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
def _leaving(_attempt: Effect) -> Iterator[Leave]:
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
        self._ignore = ignore
        self._not_executed = not_executed
        self._result_ttl = result_ttl
        self._wait_seconds = wait_seconds

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_generators(function)
        signature = inspect.signature(function)
        self._check_names(signature)
        returns = _Returns(function)

        @functools.wraps(function)
        async def fenced(*args: Any, **kwargs: Any) -> Any:
            rebuild = returns.rebuild()
            request = self._request(function, signature, args, kwargs)
            called: list[Any] = []
            call = _calling(function, args, kwargs, called)
            cert = await self._fence.run(
                request, call, wait_seconds=self._wait_seconds, not_executed=self._not_executed
            )
            if called:
                return called[0]
            if not cert.result_recorded:
                raise errors.ResultNotRecorded(cert=cert, reason=next(iter(cert.result.values())))
            return rebuild(cert.result)

        fenced.__signature__ = signature  # type: ignore[attr-defined]  # functions take attributes
        return fenced

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
    """Rebuilds a recorded result through the function's return annotation, built when first
    needed (annotations may name what is defined later) and before anything runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._adapter: TypeAdapter[Any] | None = None
        self._built = False

    def rebuild(self) -> Callable[[Any], Any]:
        if not self._built:
            annotation = typing.get_type_hints(self._function, include_extras=True).get(
                "return", Any
            )
            if annotation not in (Any, None, type(None)):
                self._adapter = TypeAdapter(annotation)
            self._built = True
        adapter = self._adapter
        if adapter is None:
            return lambda result: result
        return lambda result: adapter.validate_json(encode(result))


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
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
