"""The MCP server over streamable HTTP: several agents, one process, one fence.

Invariants:

1. Nobody reaches a tool without a token, from a page of another origin, or under a host name that
   is not this server's (DNS rebinding). Tokens are compared in constant time, and each belongs to
   one scope: equal intents of two tenants stay apart.
2. A body is bounded in size and time before anything is made of it.
3. A client that hangs up cancels nothing: what it reported is written down. A ticket that it asked
   for and did not get is released.
4. The end is orderly and bounded: no new calls, those in flight are answered, reports are seen
   through, the ledger is closed.

A call is one POST and one JSON answer, without sessions: a restart of the server is invisible to
its clients. There is nothing that the server would send on its own, hence no GET.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from effectfence.fence import EffectFence
from effectfence.mcp.border import Unread, passed
from effectfence.mcp.server import CALLER, Caller, Desk

PATH: Final = "/mcp"
HEALTH: Final = "/health"
MAX_REQUEST_BYTES: Final = 4 << 20

_BODY_SECONDS: Final = 30.0
_THROWN_AWAY: Final = 64 << 20
_GRACE_SECONDS: Final = 5
_LOCAL: Final = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; a bare port is the loopback interface's."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`PORT`, `HOST:PORT` or `[IPV6]:PORT`. Raises `ValueError`."""
        host, _, port = text.rpartition(":")
        if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
            raise ValueError(
                f"an IPv6 address is written in brackets, as in [::1]:7777, not {text!r}"
            )
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"HOST:PORT is wanted, as in 127.0.0.1:7777, not {text!r}")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Keys:
    """Tokens, and the scope that each opens (`None`: the ledger as it is)."""

    def __init__(self, keys: Iterable[tuple[str | None, str]]) -> None:
        self._scopes: dict[bytes, str | None] = {}
        for scope, token in keys:
            _check_token(scope, token)
            if self._scopes.setdefault(_digest(token), scope) != scope:
                raise ValueError(f"two names have one token; give {scope!r} one of its own")

    @classmethod
    def generated(cls) -> tuple[Keys, str]:
        token = secrets.token_urlsafe(32)
        return cls([(None, token)]), token

    @classmethod
    def tenants(cls, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
        """`name=token` each. Raises `ValueError`."""
        for line in lines:
            name, equals, token = (part.strip() for part in line.partition("="))
            if not (name and equals and token):
                raise ValueError("tenants are written as name=token")
            yield name, token

    def scope(self, authorization: str | None) -> tuple[bool, str | None]:
        """Whether the header opens anything, and which scope."""
        kind, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip() if kind.lower() == "bearer" else "")
        opens, scope = False, None
        for known, its_scope in self._scopes.items():
            if hmac.compare_digest(known, given):
                opens, scope = True, its_scope
        return opens, scope


def _check_token(scope: str | None, token: str) -> None:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        whose = "the token" if scope is None else f"the token of {scope!r}"
        raise ValueError(f"{whose} must be printable ASCII without spaces")


def _digest(token: str) -> bytes:
    """Of one length for all, so that comparing tells nothing of a token's own."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Door:
    """The ASGI application: who may come in, and with what."""

    def __init__(
        self,
        fence: EffectFence,
        inside: StreamableHTTPSessionManager,
        keys: Keys,
        security: TransportSecuritySettings,
        max_request_bytes: int,
    ) -> None:
        self._fence = fence
        self._inside = inside
        self._keys = keys
        self._security = TransportSecurityMiddleware(security)
        self._max_request_bytes = max_request_bytes
        self._scoped: dict[str | None, EffectFence] = {None: fence}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        request = Request(scope)
        opens, tenant = self._keys.scope(_authorization(request))
        refused = await self._refusal(request, opens)
        if refused is not None:
            await refused(scope, receive, send)
            return
        try:
            body = await _body(request, receive, self._max_request_bytes)
            data, _ = passed(body)
        except ClientDisconnect:
            return
        except Unread as unread:
            await _json_rpc_error(unread)(scope, receive, send)
        except _TooLarge:
            text = f"the request has more than {self._max_request_bytes} bytes\n"
            await PlainTextResponse(text, 413)(scope, receive, send)
        except TimeoutError:
            await PlainTextResponse("the request took too long\n", 408)(scope, receive, send)
        else:
            await self._pass(scope, receive, send, data, Caller(self._fence_of(tenant)))

    async def _refusal(self, request: Request, opens: bool) -> Response | None:
        """Whoever is refused learns no more than he needs."""
        path, method = request.scope["path"], request.method
        if path == HEALTH:
            if method in ("GET", "HEAD"):
                return PlainTextResponse("ok\n")
            return PlainTextResponse("GET is wanted\n", 405, {"allow": "GET, HEAD"})
        if (refused := await self._security.validate_request(request)) is not None:
            return refused
        if not opens:
            wanted = {"www-authenticate": 'Bearer realm="effectfence"'}
            return PlainTextResponse("a bearer token of this server is wanted\n", 401, wanted)
        if path != PATH:
            return PlainTextResponse(f"the MCP endpoint is {PATH}\n", 404)
        if method != "POST":
            return PlainTextResponse("POST is wanted\n", 405, {"allow": "POST"})
        return None

    async def _pass(
        self, scope: Scope, receive: Receive, send: Send, data: bytes, caller: Caller
    ) -> None:
        """On to the SDK, with a look-out for the client's hanging up."""
        messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await caller.gone.wait()
            return {"type": "http.disconnect"}

        watching = asyncio.create_task(_watch(receive, caller.gone))
        try:
            await self._inside.handle_request(_with(scope, data, caller), replay, send)
        finally:
            watching.cancel()

    def _fence_of(self, tenant: str | None) -> EffectFence:
        if tenant not in self._scoped:
            assert tenant is not None
            self._scoped[tenant] = self._fence.scoped(tenant)
        return self._scoped[tenant]


def _authorization(request: Request) -> str | None:
    """The one such header; of two, none."""
    given = request.headers.getlist("authorization")
    return given[0] if len(given) == 1 else None


def _with(scope: Scope, data: bytes, caller: Caller) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(data)).encode()))
    return {**scope, "headers": headers, CALLER: caller}


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


class _TooLarge(Exception):
    pass


async def _body(request: Request, receive: Receive, most: int) -> bytes:
    """All of it, or `_TooLarge`: then read on for a while and thrown away, since whoever is still
    sending when the connection is closed would not see why."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most + _THROWN_AWAY:
        raise _TooLarge
    body, size = bytearray(), 0
    async with asyncio.timeout(_BODY_SECONDS):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            size += len(part)
            if size <= most:
                body += part
            if not message.get("more_body", False) or size > most + _THROWN_AWAY:
                break
    if size > most:
        raise _TooLarge
    return bytes(body)


def _json_rpc_error(unread: Unread) -> Response:
    error = {"code": unread.code, "message": unread.reason}
    says = json.dumps({"jsonrpc": "2.0", "id": unread.id, "error": error})
    return Response(says, 400, media_type="application/json")


# --- serving --------------------------------------------------------------------------------------


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket, and where it listens (port 0: the system chose one)."""
    family, kind, protocol, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise OSError(f"can't listen on {address}: {error.strerror}") from None
    return listening, Address(address.host, listening.getsockname()[1])


def security(address: Address, hosts: Iterable[str]) -> TransportSecuritySettings:
    """The names that this server goes by, with any port: it may stand behind a forwarded one."""
    own = f"[{address.host}]" if ":" in address.host else address.host
    names = dict.fromkeys((*_LOCAL, own, *hosts))
    if address.host in ("0.0.0.0", "::"):
        names[socket.gethostname()] = None
    origins = [f"{scheme}://{name}" for name in names for scheme in ("http", "https")]
    return TransportSecuritySettings(
        allowed_hosts=[*names, *(f"{name}:*" for name in names)],
        allowed_origins=[*origins, *(f"{origin}:*" for origin in origins)],
    )


async def serve_http(
    fence: EffectFence,
    listening: socket.socket,
    keys: Keys,
    settings: TransportSecuritySettings,
    stop: asyncio.Event,
    max_request_bytes: int = MAX_REQUEST_BYTES,
) -> bool:
    """Serve until `stop` is set; then answer what is in flight, see reports through, and close.
    Whether all that was reported is recorded."""
    desk = Desk(fence)
    inside = StreamableHTTPSessionManager(
        desk.server(),
        json_response=True,
        stateless=True,
        max_request_body_size=2 * max_request_bytes,  # what was refused may be longer in words
    )
    door = Door(fence, inside, keys, settings, max_request_bytes)
    server = _Uvicorn(
        uvicorn.Config(
            door,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
    )
    try:
        async with inside.run(), asyncio.TaskGroup() as group:
            stopping = group.create_task(_stop(server, stop))
            await server.serve(sockets=[listening])
            stopping.cancel()
    finally:
        recorded = await desk.close()
    return recorded


async def _stop(server: uvicorn.Server, stop: asyncio.Event) -> None:
    await stop.wait()
    server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Signals are the command's, not the server's: it would raise them again before the ledger is
    closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[Any]:
        yield
