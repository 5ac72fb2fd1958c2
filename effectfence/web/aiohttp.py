"""`Idempotency-Key` for aiohttp's server (extra `aiohttp`): a middleware, and a decorator.

    setup(app)                                   # every POST and PATCH that carries a key

    @idempotent(required=True)                   # one route, with a policy of its own
    async def charge(request): …

Invariants:

1. The handler sees the body whole, by `read`, `json`, `post`, `multipart` and `content` alike.
2. The handler runs in a task of its own: neither a client that hangs up nor the server's
   `handler_cancellation` ends it, and what it writes to a client that left goes nowhere, in peace.
3. What it returns is recorded before the client sees the end of it: a `Response` whole, a
   `StreamResponse` as far as it was kept while it went out.
4. Opens and closes the fence with the application.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, cast

from aiohttp import web
from aiohttp.streams import StreamReader

from effectfence.errors import FenceError
from effectfence.fence import EffectFence
from effectfence.models import EffectRequest, FenceConfig
from effectfence.web.desk import (
    Desk,
    Outcome,
    key_in,
    not_executed,
    said_of,
    says_not_executed,
    too_large,
    value_of,
)
from effectfence.web.idempotency import (
    KEY_HEADER,
    LOOKED_AT,
    OUTCOME_HEADER,
    POLICY_PATH,
    Headers,
    Policy,
    Problem,
    Recorded,
    Unauthenticated,
    kept_headers,
    principal_scope,
    request_of,
    unrecorded,
)

Principal = Callable[[web.Request], str | Awaitable[str | None] | None]
Domain = Callable[[web.Request], str | Awaitable[str]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Decorated = TypeVar("Decorated", bound=Callable[..., Awaitable[web.StreamResponse]])

FENCE: Final = web.AppKey("effectfence", EffectFence)
"""`app[FENCE]`; in a request, `request["effectfence"]`."""
_MARK: Final = "__effectfence_policy__"


def setup(
    app: web.Application,
    *,
    fence: EffectFence | None = None,
    ledger: str | os.PathLike[str] | None = None,
    config: FenceConfig | None = None,
    policy: Policy | None = None,
    routes: Mapping[str, Policy | None] | None = None,
    principal: Principal | None = None,
    domain: Domain | None = None,
    everywhere: bool = True,
    docs: str = POLICY_PATH,
    drain_seconds: float = 5.0,
) -> None:
    """Run requests that carry an `Idempotency-Key` once, and answer their duplicates.

    As `effectfence.web.asgi.IdempotencyMiddleware` has it; callables get the `web.Request`. With
    `everywhere=False` only handlers decorated with `idempotent` are fenced.
    """
    desk = Desk(
        fence=fence,
        ledger=ledger,
        config=config,
        policy=policy,
        routes=routes,
        docs=docs,
        drain_seconds=drain_seconds,
    )
    station = _Station(desk, policy or Policy(), principal, domain, everywhere)
    app[_STATION] = station
    app.middlewares.append(station.middleware)
    app.cleanup_ctx.append(station.life)
    if docs.startswith("/"):
        app.router.add_get(docs, station.page)


def idempotent(policy: Policy | None = None, **changes: Any) -> Callable[[Decorated], Decorated]:
    """Decorator: fences this handler, with `policy` (that of `setup` if left out) and `changes`.

    For functions, methods, and the methods of a `web.View`.
    """
    (policy or Policy()).but(**changes)  # wrong words are said here

    def decorate(handler: Decorated) -> Decorated:
        @functools.wraps(handler)
        async def fenced(*subjects: Any) -> web.StreamResponse:
            subject = subjects[-1]
            request = subject.request if isinstance(subject, web.View) else subject
            station = request.config_dict.get(_STATION)
            if station is None:
                raise RuntimeError("this handler is fenced, but nobody called `setup(app, …)`")

            def run(_: web.Request) -> Awaitable[web.StreamResponse]:
                return handler(*subjects)

            return cast(
                "web.StreamResponse", await station.handle(request, run, chosen(station.policy))
            )

        def chosen(default: Policy) -> Policy:
            return (policy or default).but(**changes)

        setattr(fenced, _MARK, chosen)
        return cast("Decorated", fenced)

    return decorate


class _Station:
    """One application's desk, and how its requests get there."""

    def __init__(
        self,
        desk: Desk,
        policy: Policy,
        principal: Principal | None,
        domain: Domain | None,
        everywhere: bool,
    ) -> None:
        self.policy = policy
        self._desk = desk
        self._principal = principal
        self._domain = domain
        self._everywhere = everywhere

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        """Of the fence: that of the application."""
        marks = (_mark_of(route.handler, route.method) for route in app.router.routes())
        self._desk.check_policies(mark(self.policy) for mark in marks if mark is not None)
        app[FENCE] = await self._desk.open()
        yield
        await self._desk.close()

    async def page(self, _request: web.Request) -> web.Response:
        return _response(self._desk.page())

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # As `request["effectfence"] = …`, which in newer versions warns of keys that are text.
        request._state["effectfence"] = self._desk.fence or await self._desk.open()
        if not self._everywhere or _mark_of(request.match_info.handler, request.method) is not None:
            return await handler(request)
        route = self._desk.routes.match(request.method, request.path)
        if route.policy is None or request.match_info.http_exception is not None:
            return await handler(request)
        return await self.handle(request, handler, route.policy)

    async def handle(
        self, request: web.Request, handler: Handler, policy: Policy
    ) -> web.StreamResponse:
        """The handler's answer, or the fence's."""
        if request.method not in policy.methods:
            return await handler(request)
        key = key_in(request.headers.getall(KEY_HEADER, []), policy)
        if key is None:
            return await handler(request)
        if isinstance(key, Problem):
            return self._refusal(key)
        return await self._fenced(request, handler, key, policy)

    async def _fenced(
        self, request: web.Request, handler: Handler, key: str, policy: Policy
    ) -> web.StreamResponse:
        fence = self._desk.fence or await self._desk.open()
        if self._principal is not None:
            try:
                owner = principal_scope(await value_of(self._principal(request)))
            except Unauthenticated as error:
                return self._unauthenticated(error)
            fence = fence if owner is None else fence.scoped(owner)
        body = await _read_again(request, policy.max_request_bytes)
        if body is None:
            return self._refusal(too_large(policy))
        action = request_of(
            key=key,
            method=request.method,
            path=request.rel_url.raw_path,
            query=request.rel_url.raw_query_string.encode(),
            headers=_looked_at(request, policy),
            body=body,
            domain=await self._domain_of(request),
            policy=policy,
        )
        return cast(
            "web.StreamResponse",
            await self._desk.outlast(self._pass(request, handler, fence, action, policy)),
        )

    async def _pass(
        self,
        request: web.Request,
        handler: Handler,
        fence: EffectFence,
        action: EffectRequest,
        policy: Policy,
    ) -> web.StreamResponse:
        """Through the fence, in a task that no client's leaving ends."""
        desk = self._desk
        try:
            attempt = await desk.begin(fence, action, policy)
            if attempt.earlier is not None:
                return _response(desk.replay(attempt.earlier, policy))
        except FenceError as error:
            return self._refusal(await desk.explain(error, fence, action, policy))
        exchange = _Exchange(request, handler, policy, desk.lifetime(policy))
        try:
            outcome = await exchange.run()
        except BaseException as error:
            await attempt.abandon(error)
            raise
        await attempt.settle(outcome)
        return await exchange.answer(self._refusal)

    async def _domain_of(self, request: web.Request) -> str:
        if self._domain is not None:
            return str(await value_of(self._domain(request)))
        route = self._desk.routes.match(request.method, request.path)
        resource = request.match_info.route.resource
        if route.name != "http" or resource is None:
            return route.name
        return f"http:{request.method} {resource.canonical}"

    def _refusal(self, problem: Problem) -> web.Response:
        return _response(problem.answer(self._desk.docs))

    def _unauthenticated(self, error: Unauthenticated) -> web.Response:
        response = self._refusal(
            Problem.named("not-authenticated", "Nobody is known to own this key.")
        )
        response.headers["WWW-Authenticate"] = error.challenge
        return response


_STATION: Final = web.AppKey("effectfence.station", _Station)


def _mark_of(handler: Any, method: str) -> Callable[[Policy], Policy] | None:
    """How a decorated handler, or a view's decorated method, chooses its policy."""
    found = getattr(handler, _MARK, None) or getattr(
        getattr(handler, method.lower(), None), _MARK, None
    )
    return cast("Callable[[Policy], Policy] | None", found)


def _response(answer: Recorded) -> web.Response:
    response = web.Response(status=answer.status, body=answer.body)
    response.headers.popall("Content-Type", None)
    for name, value in answer.headers:
        response.headers.add(name.title(), value)
    return response


def _looked_at(request: web.Request, policy: Policy) -> Headers:
    """The headers that the rules read."""
    names = {*LOOKED_AT, *policy.request_headers}
    return [(name, value) for name in sorted(names) for value in request.headers.getall(name, ())]


async def _read_again(request: web.Request, most: int) -> bytes | None:
    """The body, `None` if it is longer; it can be read once more in every way."""
    if (request.content_length or 0) > most:
        return None
    if not request.body_exists:
        return b""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > most:
            return None
    # aiohttp has no public way to give a body back. The limit is above what is fed at once, else
    # the stream would stop its connection from reading until somebody reads it.
    again = StreamReader(request.protocol, len(body) + 1, loop=asyncio.get_running_loop())
    again.feed_data(bytes(body))
    again.feed_eof()
    request._payload = again
    request._cache.pop("content", None)
    return bytes(body)


class _Exchange:
    """One run of the handler, and what becomes of its answer."""

    def __init__(
        self, request: web.Request, handler: Handler, policy: Policy, lifetime: tuple[str, str]
    ) -> None:
        self._request = request
        self._handler = handler
        self._policy = policy
        self._lifetime = lifetime
        self._tee: _Tee | None = None
        self._response: web.StreamResponse | None = None
        self._error: BaseException | None = None
        self._not_executed = False

    async def run(self) -> Outcome:
        """The handler, to its end; its outcome."""
        plain = self._request._payload_writer
        self._tee = tee = _Tee(plain, self._policy.max_response_bytes, self._lifetime)
        self._request._payload_writer = cast("Any", tee)
        try:
            self._response = await self._handler(self._request)
        except web.HTTPException as answer:
            self._response, self._error = answer, answer
        except Exception as error:
            self._error = error
        finally:
            self._request._payload_writer = plain
        return self._outcome()

    async def answer(self, refusal: Callable[[Problem], web.Response]) -> web.StreamResponse:
        """The outcome is recorded: what goes to the client."""
        if self._tee is not None:
            await self._tee.finish()
        if self._not_executed and not (self._tee and self._tee.wrote):
            return refusal(not_executed(self._policy))
        if self._error is not None:
            raise self._error
        assert self._response is not None
        return self._response

    def _outcome(self) -> Outcome:
        error, response = self._error, self._response
        if says_not_executed(error):
            self._not_executed = True
            return Outcome("release", reason=said_of(error))
        if response is None:
            return Outcome("unknown", reason=said_of(error))
        assert self._tee is not None
        word = self._tee.word
        if not response.prepared:
            word = response.headers.pop(OUTCOME_HEADER, None)
            response.headers[self._lifetime[0].title()] = self._lifetime[1]
        body = self._body(response)
        verdict = self._policy.judge(response.status, word, body)
        if verdict == "record":
            return Outcome("record", self._result(response, body))
        return Outcome(verdict, reason=f"answered {response.status}")

    def _body(self, response: web.StreamResponse) -> bytes | None:
        """What the client gets, if it can be known here and is short enough."""
        assert self._tee is not None
        if response.prepared:
            return self._tee.kept
        if not isinstance(response, web.Response):
            return None
        body = response.body
        if body is None:
            return b""
        if isinstance(body, bytes | bytearray):
            return bytes(body) if len(body) <= self._policy.max_response_bytes else None
        return None

    def _result(self, response: web.StreamResponse, body: bytes | None) -> dict[str, Any]:
        if body is None:
            most = self._policy.max_response_bytes
            return unrecorded(
                response.status, f"has more than {most} bytes, or is a file or a stream"
            )
        headers = kept_headers(self._headers(response), self._policy)
        return Recorded(response.status, headers, body).as_result()

    def _headers(self, response: web.StreamResponse) -> Headers:
        """As the handler set them; what was kept of a body is kept uncompressed."""
        assert self._tee is not None
        pairs = ((name.lower(), value) for name, value in response.headers.items())
        compressed = self._tee.compressed
        return [pair for pair in pairs if not (compressed and pair[0] == "content-encoding")]


class _Tee:
    """The connection's writer, keeping what goes through it; its end waits for `finish`.

    A client that is gone is none of the handler's business: what is written to it is kept alone.
    """

    compressed: bool
    wrote: bool
    word: str | None

    def __init__(self, writer: Any, most: int, lifetime: tuple[str, str]) -> None:
        self.__dict__.update(
            writer=writer,
            most=most,
            lifetime=lifetime,
            chunks=[],
            size=0,
            end=None,
            over=False,
            wrote=False,
            compressed=False,
            word=None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.writer, name, value)

    @property
    def kept(self) -> bytes | None:
        """What went through, unless it was too long."""
        return b"".join(self.chunks) if self.size <= self.most else None

    async def write_headers(self, status_line: str, headers: Any) -> None:
        self.wrote = True
        self.word = headers.pop(OUTCOME_HEADER, None)
        headers[self.lifetime[0].title()] = self.lifetime[1]
        await _in_peace(self.writer.write_headers(status_line, headers))

    async def write(self, chunk: Any, *given: Any, **more: Any) -> None:
        self._keep(chunk)
        await _in_peace(self.writer.write(chunk, *given, **more))

    async def write_eof(self, chunk: bytes = b"") -> None:
        self._keep(chunk)
        if self.over:
            await _in_peace(self.writer.write_eof(chunk))
        else:
            self.end = chunk

    async def drain(self) -> None:
        await _in_peace(self.writer.drain())

    def enable_compression(self, *given: Any) -> None:
        self.compressed = True
        self.writer.enable_compression(*given)

    async def finish(self) -> None:
        """Let the end out, if the handler wrote one; from now on nothing waits."""
        self.over = True
        if self.end is not None:
            await _in_peace(self.writer.write_eof(self.end))

    def _keep(self, chunk: Any) -> None:
        data = bytes(chunk)
        self.size += len(data)
        if self.size <= self.most:
            self.chunks.append(data)
        else:
            self.chunks.clear()


async def _in_peace(writing: Awaitable[None]) -> None:
    try:
        await writing
    except OSError:
        return
