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
from effectfence.models import EffectRequest, FenceConfig
from effectfence.web.desk import (
    Attempt,
    Desk,
    Outcome,
    key_in,
    not_executed,
    said_of,
    says_not_executed,
    too_large,
    unavailable,
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
_BYPASSES: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)
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
        fence = desk.fence or await self._open()
        if fence is not None:
            scope[FENCE] = fence
            scope.setdefault("state", {})[FENCE] = fence
        route = desk.routes.match(method, scope["path"].removeprefix(scope.get("root_path", "")))
        policy = route.policy
        if policy is None or method not in policy.methods:
            await self._app(scope, receive, send)
            return
        headers = _looked_at(scope["headers"], policy)
        key = key_in([value for name, value in headers if name == KEY_HEADER], policy)
        if key is None:
            await self._app(scope, receive, send)
        elif isinstance(key, Problem):
            await self._refuse(scope, send, key)
        elif fence is None:
            await self._refuse(scope, send, unavailable(policy))
        else:
            await self._fenced(scope, receive, send, fence, headers, key, route, policy)

    async def _open(self) -> EffectFence | None:
        """Without its ledger, what is unfenced goes on."""
        try:
            return await self._desk.open()
        except FenceError as error:
            _log.warning("%s", error)
            return None

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
        await self._desk.outlast(self._pass(scope, body, send, fence, request, policy))

    async def _pass(
        self,
        scope: Scope,
        body: bytes,
        send: Send,
        fence: EffectFence,
        request: EffectRequest,
        policy: Policy,
    ) -> None:
        """Through the fence, in a task that no client's leaving ends."""
        desk = self._desk
        try:
            attempt = await desk.begin(fence, request, policy)
            replayed = None if attempt.earlier is None else desk.replay(attempt.earlier, policy)
        except FenceError as error:
            await self._refuse(scope, send, await desk.explain(error, fence, request, policy))
            return
        if replayed is not None:
            await _answer(send, replayed)
            return
        exchange = _Exchange(attempt, body, send, policy, desk.lifetime(policy))
        _close_bypasses(scope)
        try:
            await self._app(scope, exchange.receive, exchange.take)
        except Exception as error:
            if not await exchange.ended(error):
                raise
            await self._refuse(scope, send, not_executed(policy))
        except BaseException as error:
            await attempt.abandon(error)
            raise
        else:
            await exchange.ended(None)

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


def _looked_at(pairs: Any, policy: Policy) -> Headers:
    """The headers that the rules read; ASGI's are in lower case."""
    chosen = policy.request_headers
    headers = ((name.decode("latin-1"), value) for name, value in pairs)
    return [
        (name, value.decode("latin-1"))
        for name, value in headers
        if name in LOOKED_AT or name in chosen
    ]


def _close_bypasses(scope: Scope) -> None:
    extensions = scope.get("extensions")
    if extensions:
        kept = {name: value for name, value in extensions.items() if name not in _BYPASSES}
        scope["extensions"] = kept


class _Exchange:
    """One run of the application: what it is given, and what becomes of its answer."""

    def __init__(
        self,
        attempt: Attempt,
        body: bytes,
        send: Send,
        policy: Policy,
        lifetime: tuple[str, str],
    ) -> None:
        self._attempt = attempt
        self._body: bytes | None = body
        self._send = send
        self._policy = policy
        self._lifetime = lifetime
        self._answered: asyncio.Event | None = None
        self._status = 0
        self._headers: Headers = ()
        self._word: str | None = None
        self._is_short = False
        self._held: list[Message] = []
        self._streams = False
        self._complete = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    # --- what the application sees ----------------------------------------------------------------

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._attempt.settled:
            self._answered = self._answered or asyncio.Event()
            await self._answered.wait()
        return {"type": "http.disconnect"}

    async def take(self, message: Message) -> None:
        """What the application sends."""
        if message["type"] == "http.response.start" and not self._held:
            self._take_start(message)
        elif message["type"] == "http.response.body" and not self._complete:
            await self._take_body(message)
        else:
            await self._forward(message)

    def _take_start(self, message: Message) -> None:
        name, value = self._lifetime
        sent = [(name.encode(), value.encode())]
        headers = []
        for pair in message.get("headers", ()):
            name, value = pair[0].decode("latin-1").lower(), pair[1].decode("latin-1")
            if name == OUTCOME_HEADER:
                self._word = value
                continue
            if name == "content-length" and value.isdigit():
                self._is_short = int(value) <= self._policy.max_response_bytes
            headers.append((name, value))
            sent.append(pair)
        self._status, self._headers = message["status"], headers
        self._held.append({**message, "headers": sent})

    async def _take_body(self, message: Message) -> None:
        self._keep(message.get("body", b""))
        self._held.append(message)
        if not message.get("more_body", False):
            self._complete = True
            outcome = self._outcome()
            if outcome.verdict != "unknown":
                await self._settle(outcome)
        elif self._streams or not self._is_short:
            self._streams = True
            await self._let_out()

    def _keep(self, chunk: bytes) -> None:
        self._kept_bytes += len(chunk)
        if self._kept_bytes <= self._policy.max_response_bytes:
            self._kept.append(chunk)
        else:
            self._kept.clear()

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

    async def ended(self, error: Exception | None) -> bool:
        """The application has. Whether it said `NotExecuted` and nothing is answered yet."""
        if self._attempt.settled:
            return False
        if says_not_executed(error):
            await self._settle(Outcome("release", reason=said_of(error)), answer=False)
            return not self._streams
        reason = self._outcome().reason if self._complete and error is None else said_of(error)
        await self._settle(Outcome("unknown", reason=reason), answer=self._complete)
        return False

    async def _settle(self, outcome: Outcome, *, answer: bool = True) -> None:
        """Recorded first; then the end of the answer goes out."""
        await self._attempt.settle(outcome)
        if answer:
            await self._let_out()
        if self._answered is not None:
            self._answered.set()

    def _outcome(self) -> Outcome:
        """What a whole answer says."""
        status, fits = self._status, self._kept_bytes <= self._policy.max_response_bytes
        body = b"".join(self._kept) if fits else None
        verdict = self._policy.judge(status, self._word, body)
        if verdict != "record":
            return Outcome(verdict, reason=f"answered {status}")
        if body is None:
            most = self._policy.max_response_bytes
            return Outcome("record", unrecorded(status, f"has more than {most} bytes"))
        headers = kept_headers(self._headers, self._policy)
        return Outcome("record", Recorded(status, headers, body).as_result())


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
