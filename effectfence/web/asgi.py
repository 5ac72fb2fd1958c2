"""`Idempotency-Key` for any ASGI application: Starlette, FastAPI, Litestar, Quart. No dependency.

    app.add_middleware(IdempotencyMiddleware)          # Starlette, FastAPI
    app = IdempotencyMiddleware(app, ledger="effects.jsonl")

    server ── request ──▶ read, bounded ──▶ fence ── fresh ──▶ the application, in a task of its own
                                              └─ ran before ──▶ the recorded answer

Invariants:

1. The application sees the body whole, as if it came from the server, and never sees its client
   leave before it has answered: neither hanging up nor cancelling ends it.
2. An answer that says how long it is, or comes in one piece, goes out when its outcome is recorded.
   Any other streams through, and its end goes out then.
3. An answer that says that nothing is known goes out when the application has ended: it may still
   say `NotExecuted`.
4. What the application does after its answer (background tasks) is none of the outcome.
5. Opens and closes the fence with the application (lifespan); where the server has none, the first
   request opens it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from effectfence.errors import FenceError
from effectfence.fence import EffectFence
from effectfence.models import FenceConfig
from effectfence.web.desk import (
    Desk,
    Outcome,
    key_in,
    not_executed,
    plain_headers,
    said_of,
    says_not_executed,
    too_large,
    unavailable,
    value_of,
)
from effectfence.web.idempotency import (
    KEY_HEADER,
    OUTCOME_HEADER,
    POLICY_PATH,
    Headers,
    Policy,
    Problem,
    Recorded,
    Route,
    Unauthenticated,
    kept_headers,
    principal_scope,
    request_of,
    unrecorded,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Principal = Callable[[Scope], str | Awaitable[str | None] | None]
Domain = Callable[[Scope], str | Awaitable[str]]

FENCE: Final = "effectfence"
"""In a request's scope, and in its state: the fence."""
_BYPASSES: Final = ("pathsend", "zerocopysend", "trailers")
"""Ways to answer past `http.response.body`: what goes that way could not be recorded."""

_log = logging.getLogger("effectfence")


class IdempotencyMiddleware:
    """Runs requests that carry an `Idempotency-Key` once, and answers their duplicates.

    `fence`: one of yours, which stays yours; else one is opened on `ledger` (a path or `memory:`;
    `EFFECTFENCE_LEDGER`, or a file in the state folder, if left out) with `config`. `policy` holds
    for all routes, `routes` overrides it (`{"POST /charges": policy.but(required=True)}`; `None`
    leaves a route unfenced). `principal(scope)` names whose key it is: equal keys of two principals
    are two. `domain(scope)` names what the request contends for; its route if left out. `docs` is
    where problems point to: a path, which is served, or a URL of yours.
    """

    def __init__(
        self,
        app: Application,
        *,
        fence: EffectFence | None = None,
        ledger: str | os.PathLike[str] | None = None,
        config: FenceConfig | None = None,
        policy: Policy | None = None,
        routes: Mapping[str, Policy | None] | None = None,
        principal: Principal | None = None,
        domain: Domain | None = None,
        docs: str = POLICY_PATH,
        drain_seconds: float = 5.0,
    ) -> None:
        self._app = app
        self._principal = principal
        self._domain = domain
        self._desk = Desk(
            fence=fence,
            ledger=ledger,
            config=config,
            policy=policy,
            routes=routes,
            docs=docs,
            drain_seconds=drain_seconds,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _Lifespan(self._app, self._desk, scope, receive, send).run()
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, desk = scope["method"], self._desk
        if method == "GET" and scope["path"] == f"{scope.get('root_path', '')}{desk.docs}":
            await _answer(send, desk.page())
            return
        fence = await self._reachable(scope)
        route = desk.routes.match(method, scope["path"].removeprefix(scope.get("root_path", "")))
        policy = route.policy
        if policy is None or method not in policy.methods:
            await self._app(scope, receive, send)
            return
        headers = plain_headers(scope["headers"])
        key = key_in([value for name, value in headers if name == KEY_HEADER], policy)
        if key is None:
            await self._app(scope, receive, send)
        elif isinstance(key, Problem):
            await self._refuse(scope, send, key)
        elif fence is None:
            await self._refuse(scope, send, unavailable(policy))
        else:
            await self._fenced(scope, receive, send, fence, headers, key, route, policy)

    async def _reachable(self, scope: Scope) -> EffectFence | None:
        """The fence, put where handlers find it. Without its ledger, what is unfenced goes on."""
        try:
            fence = await self._desk.open()
        except FenceError as error:
            _log.warning("%s", error)
            return None
        scope[FENCE] = fence
        scope.setdefault("state", {})[FENCE] = fence
        return fence

    async def _fenced(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        fence: EffectFence,
        headers: Headers,
        key: str,
        route: Route,
        policy: Policy,
    ) -> None:
        if self._principal is not None:
            try:
                owner = principal_scope(await value_of(self._principal(scope)))
            except Unauthenticated as error:
                await self._unauthenticated(scope, send, error)
                return
            fence = fence if owner is None else fence.scoped(owner)
        body = await _read(receive, headers, policy.max_request_bytes)
        if body is None:
            return
        if isinstance(body, _TooLarge):
            await self._refuse(scope, send, too_large(policy))
            return
        domain = route.name if self._domain is None else await value_of(self._domain(scope))
        request = request_of(
            key=key,
            method=scope["method"],
            path=_path_as_sent(scope),
            query=scope.get("query_string", b""),
            headers=headers,
            body=body,
            domain=domain,
            policy=policy,
        )
        exchange = _Exchange(
            self._app, scope, body, send, policy, self._desk.lifetime(policy), self._docs(scope)
        )

        async def pass_the_fence() -> None:
            try:
                cert = await self._desk.once(fence, request, policy, exchange.run)
                if cert is None:
                    await exchange.finish()
                else:
                    await _answer(send, self._desk.replay(cert, policy))
            except FenceError as error:
                if exchange.began:
                    raise
                problem = await self._desk.explain(error, fence, request, policy)
                await self._refuse(scope, send, problem)
            finally:
                await exchange.end()

        await self._desk.outlast(pass_the_fence())

    async def _unauthenticated(self, scope: Scope, send: Send, error: Unauthenticated) -> None:
        problem = Problem.named("not-authenticated", "Nobody is known to own this key.")
        answer = problem.answer(self._docs(scope))
        headers = (*answer.headers, ("www-authenticate", error.challenge))
        await _answer(send, Recorded(answer.status, headers, answer.body))

    async def _refuse(self, scope: Scope, send: Send, problem: Problem) -> None:
        await _answer(send, problem.answer(self._docs(scope)))

    def _docs(self, scope: Scope) -> str:
        docs = self._desk.docs
        return f"{scope.get('root_path', '')}{docs}" if docs.startswith("/") else docs


class _TooLarge:
    """In place of a body that has more bytes than are read."""


async def _read(receive: Receive, headers: Headers, most: int) -> bytes | _TooLarge | None:
    """The body, bounded; `None` if the client left before its end: nothing ran."""
    for name, value in headers:
        if name == "content-length" and value.isdigit() and int(value) > most:
            return _TooLarge()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > most:
            return _TooLarge()
        if not message.get("more_body", False):
            return b"".join(chunks)


def _path_as_sent(scope: Scope) -> str:
    raw = scope.get("raw_path")
    return str(scope["path"]) if raw is None else raw.partition(b"?")[0].decode("latin-1")


async def _answer(send: Send, answer: Recorded) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    if answer.status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


class _Exchange:
    """One run of the application: what it is given, and what becomes of its answer."""

    def __init__(
        self,
        app: Application,
        scope: Scope,
        body: bytes,
        send: Send,
        policy: Policy,
        lifetime: tuple[str, str],
        docs: str,
    ) -> None:
        self._app = app
        self._scope = scope
        self._body: bytes | None = body
        self._send = send
        self._policy = policy
        self._lifetime = lifetime
        self._docs = docs
        self._task: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()
        self._answered = asyncio.Event()
        self._start: Message | None = None
        self._headers: Headers = ()
        self._word: str | None = None
        self._declared = False
        self._held: list[Message] = []
        self._streams = False
        self._complete = False
        self._kept: list[bytes] | None = []
        self._kept_bytes = 0
        self._instead: Problem | None = None

    @property
    def began(self) -> bool:
        return self._task is not None

    async def run(self) -> Outcome:
        """Start the application; its outcome, as soon as its answer says it, or it ended."""
        self._without_bypasses()
        running = self._app(self._scope, self._receive, self._take)
        self._task = asyncio.ensure_future(running)
        self._task.add_done_callback(lambda _: self._decided.set())
        await self._decided.wait()
        return self._outcome()

    async def finish(self) -> None:
        """The outcome is recorded: let the answer out, and see the application to its end."""
        assert self._task is not None
        if self._instead is not None:
            await _answer(self._forward, self._instead.answer(self._docs))
        elif self._complete:
            await self._let_out()
        self._answered.set()
        try:
            await self._task
        except BaseException as error:
            if self._instead is None or not says_not_executed(error):
                raise

    async def end(self) -> None:
        """Nothing is left running, whatever happened."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- what the application sees ----------------------------------------------------------------

    def _without_bypasses(self) -> None:
        extensions = self._scope.get("extensions")
        if extensions:
            bypasses = {f"http.response.{name}" for name in _BYPASSES}
            kept = {name: value for name, value in extensions.items() if name not in bypasses}
            self._scope["extensions"] = kept

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._answered.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        """What the application sends."""
        if self._complete:
            await self._forward(message)
        elif message["type"] == "http.response.start":
            self._take_start(message)
        elif message["type"] == "http.response.body":
            await self._take_body(message)
        else:
            await self._forward(message)

    def _take_start(self, message: Message) -> None:
        headers = plain_headers(message.get("headers", ()))
        for name, value in headers:
            if name == OUTCOME_HEADER:
                self._word = value
            elif name == "content-length" and value.isdigit():
                self._declared = int(value) <= self._policy.max_response_bytes
        name, value = self._lifetime
        sent = [
            pair
            for pair in message.get("headers", ())
            if pair[0].lower() != OUTCOME_HEADER.encode()
        ]
        sent.append((name.encode(), value.encode()))
        self._headers = headers
        self._start = {**message, "headers": sent}
        self._held = [self._start]

    async def _take_body(self, message: Message) -> None:
        chunk = message.get("body", b"")
        self._keep(chunk)
        self._held.append(message)
        if not message.get("more_body", False):
            self._complete = True
            if self._verdict() != "unknown":
                self._decided.set()
        elif self._streams or not self._declared:
            self._streams = True
            await self._let_out()

    def _keep(self, chunk: bytes) -> None:
        if self._kept is None:
            return
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        if self._kept_bytes > self._policy.max_response_bytes:
            self._kept = None

    async def _let_out(self) -> None:
        held, self._held = self._held, []
        for message in held:
            await self._forward(message)

    async def _forward(self, message: Message) -> None:
        """To the server. That its client has left is none of the application's business."""
        try:
            await self._send(message)
        except OSError as error:
            _log.debug("an answer found its client gone: %s", error)

    # --- what becomes of it -----------------------------------------------------------------------

    def _verdict(self) -> str:
        assert self._start is not None
        body = None if self._kept is None else b"".join(self._kept)
        return self._policy.judge(self._start["status"], self._word, body)

    def _outcome(self) -> Outcome:
        error = _ended_with(self._task)
        if says_not_executed(error) and not (self._complete and self._verdict() != "unknown"):
            self._instead = None if self._streams else not_executed(self._policy)
            return Outcome("release", reason=said_of(error))
        if not self._complete or self._start is None:
            return Outcome("unknown", reason=said_of(error))
        status, verdict = self._start["status"], self._verdict()
        if verdict == "record":
            return Outcome("record", self._result(status))
        reason = f"answered {status}" if error is None else said_of(error)
        return Outcome("release" if verdict == "release" else "unknown", reason=reason)

    def _result(self, status: int) -> dict[str, Any]:
        if self._kept is None:
            most = self._policy.max_response_bytes
            return unrecorded(status, f"has more than {most} bytes")
        body = b"".join(self._kept)
        return Recorded(status, kept_headers(self._headers, self._policy), body).as_result()


def _ended_with(task: asyncio.Task[None] | None) -> BaseException | None:
    """What the application raised, if it has ended so."""
    if task is None or not task.done() or task.cancelled():
        return None
    return task.exception()


class _Lifespan:
    """Opens the fence before the application starts, and closes it when the application stopped.

    For an application that has no lifespan of its own, it is the lifespan.
    """

    def __init__(
        self, app: Application, desk: Desk, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._app = app
        self._desk = desk
        self._scope = scope
        self._from_server = receive
        self._to_server = send
        self._asked = False
        self._over = False

    async def run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            if self._asked and not self._over:
                raise
        finally:
            if self._asked:
                await self._desk.close()
        if not self._asked:
            await self._by_itself()

    async def _by_itself(self) -> None:
        try:
            await self._receive()
        except Exception:
            return  # said already
        await self._send({"type": "lifespan.startup.complete"})
        await self._receive()
        await self._send({"type": "lifespan.shutdown.complete"})

    async def _receive(self) -> Message:
        message = await self._from_server()
        self._asked = True
        if message["type"] == "lifespan.startup":
            await self._open()
        return message

    async def _open(self) -> None:
        try:
            fence = await self._desk.open()
        except Exception as error:
            await self._send(
                {"type": "lifespan.startup.failed", "message": f"effectfence: {error}"}
            )
            self._over = True
            raise
        if "state" in self._scope:
            self._scope["state"][FENCE] = fence

    async def _send(self, message: Message) -> None:
        """To the server; the fence is closed before it hears of the end."""
        if self._over:
            return
        if message["type"].startswith("lifespan.shutdown."):
            await self._desk.close()
        await self._to_server(message)
