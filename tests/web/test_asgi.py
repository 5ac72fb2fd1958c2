"""Applications of all sorts behind the ASGI middleware, served by uvicorn in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route

from effectfence import EffectFence, NotExecuted
from effectfence.web.asgi import IdempotencyMiddleware
from effectfence.web.idempotency import Policy
from tests.conftest import until

Client = httpx.AsyncClient
KEY = {"Idempotency-Key": "k"}


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[Client]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            once = httpx.Limits(max_keepalive_connections=0)
            async with Client(base_url=url, trust_env=False, timeout=60, limits=once) as client:
                yield client
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def fence() -> AsyncIterator[EffectFence]:
    async with EffectFence.open("memory:") as opened:
        yield opened


def shop(fence: EffectFence, handler: Callable[..., Any], *outer: Middleware, **more: Any) -> Any:
    inner = more.pop("inner", [])
    ours = Middleware(IdempotencyMiddleware, fence=fence, **more)
    return Starlette(
        routes=[Route("/", handler, methods=["POST"])], middleware=[*outer, ours, *inner]
    )


async def twice(client: Client, path: str = "/") -> list[httpx.Response]:
    return [await client.post(path, headers=KEY) for _ in range(2)]


async def pass_on(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    return response


@pytest.mark.parametrize("place", ["outer", "inner"])
async def test_a_middleware_that_turns_answers_into_streams_changes_nothing(
    fence: EffectFence, place: str
) -> None:
    async def charge(_request: Request) -> Response:
        return JSONResponse({"charge": "ch_1"}, 201)

    streams = Middleware(BaseHTTPMiddleware, dispatch=pass_on)
    app = shop(fence, charge, streams) if place == "outer" else shop(fence, charge, inner=[streams])
    async with served(app) as client:
        first, second = await twice(client)
    assert first.content == second.content == b'{"charge":"ch_1"}'
    assert second.headers["idempotent-replayed"] == "true"


async def test_a_middleware_outside_that_cancels_ends_nothing(fence: EffectFence) -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    ran = []

    async def charge(_request: Request) -> Response:
        begun.set()
        await go.wait()
        ran.append(1)
        return JSONResponse({"charge": "ch_1"})

    def impatient(app: Any) -> Any:
        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            running = asyncio.ensure_future(app(scope, receive, send))
            if scope["type"] == "http" and not begun.is_set():
                await begun.wait()
                running.cancel()
            await running

        return asgi

    async with served(impatient(shop(fence, charge))) as client:
        assert (await client.post("/", headers=KEY)).status_code == 500
        go.set()
        answer = await client.post("/", headers=KEY)
    assert answer.headers["idempotent-replayed"] == "true"
    assert ran == [1]


async def test_what_runs_after_the_answer_is_none_of_the_outcome(fence: EffectFence) -> None:
    go, ran = asyncio.Event(), []

    async def mail() -> None:
        await go.wait()
        ran.append("mail")
        raise NotExecuted("of the mail, not of the charge")

    async def charge(_request: Request) -> Response:
        return JSONResponse({"charge": "ch_1"}, background=BackgroundTask(mail))

    async with served(shop(fence, charge)) as client:
        first, second = await twice(client)
        go.set()
        await until(lambda: ran)
        third = await client.post("/", headers=KEY)
    assert {one.content for one in (first, second, third)} == {b'{"charge":"ch_1"}'}
    assert third.headers["idempotent-replayed"] == "true"


async def test_a_file_is_sent_as_a_body_and_replayed(fence: EffectFence, tmp_path: Path) -> None:
    (tmp_path / "receipt").write_bytes(b"\xff" * 5000)

    async def charge(_request: Request) -> Response:
        return FileResponse(tmp_path / "receipt", media_type="application/pdf")

    async with served(shop(fence, charge)) as client:
        first, second = await twice(client)
    assert first.content == second.content == b"\xff" * 5000
    assert second.headers["idempotent-replayed"] == "true"
    assert second.headers["etag"] == first.headers["etag"]


async def test_compression_outside_of_the_fence_is_each_clients_own(fence: EffectFence) -> None:
    async def charge(_request: Request) -> Response:
        return PlainTextResponse("x" * 5000)

    async with served(shop(fence, charge, Middleware(GZipMiddleware))) as client:
        first = await client.post("/", headers=KEY)
        second = await client.post("/", headers={**KEY, "Accept-Encoding": "identity"})
    assert first.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in second.headers
    assert first.text == second.text == "x" * 5000


async def test_a_stream_that_breaks_off_is_unknown(fence: EffectFence) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"charged"
        raise RuntimeError("the printer is out of paper")

    async def charge(_request: Request) -> Response:
        return StreamingResponse(pieces())

    async with served(shop(fence, charge)) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/", headers=KEY)
        answer = await client.post("/", headers=KEY)
    assert answer.status_code == 409
    record = await fence.lookup("http:k")
    assert record is not None
    assert record.reason == "HandlerFailed: RuntimeError: the printer is out of paper"


@pytest.mark.parametrize("sent", [0, 1])
async def test_an_application_that_ends_without_an_answer_is_unknown(
    fence: EffectFence, sent: int
) -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http" and sent:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async with served(IdempotencyMiddleware(app, fence=fence)) as client:
        first = await client.post("/", headers=KEY)
        second = await client.post("/", headers=KEY)
    assert (first.status_code, second.status_code) == (500, 409)
    record = await fence.lookup("http:k")
    assert record is not None
    assert record.reason == "HandlerFailed: it ended without an answer"


async def test_an_error_page_of_the_application_itself_does_not_hide_not_executed(
    fence: EffectFence,
) -> None:
    async def charge(_request: Request) -> Response:
        raise NotExecuted("the shop is closed")

    inside = Starlette(routes=[Route("/", charge, methods=["POST"])])  # it answers 500, and raises
    async with served(IdempotencyMiddleware(inside, fence=fence)) as client:
        answers = await twice(client)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert fence.stats().admitted == 2


async def test_a_group_of_not_executed_is_one(fence: EffectFence) -> None:
    async def charge(_request: Request) -> Response:
        raise ExceptionGroup("both", [NotExecuted("a"), ExceptionGroup("", [NotExecuted("b")])])

    async with served(shop(fence, charge)) as client:
        assert (await client.post("/", headers=KEY)).status_code == 503
        assert await fence.lookup("http:k") is None


@pytest.mark.parametrize("kind", [asyncio.CancelledError, RuntimeError])
async def test_a_handler_that_ends_itself_is_unknown_and_its_client_told(
    fence: EffectFence, kind: type[BaseException]
) -> None:
    async def charge(_request: Request) -> Response:
        raise BaseExceptionGroup("of a task group", [kind()])

    async with served(shop(fence, charge)) as client:
        answers = await twice(client)
    assert [answer.status_code for answer in answers] == [500, 409]


async def test_the_handler_never_hears_of_its_clients_leaving(fence: EffectFence) -> None:
    begun, go, heard = asyncio.Event(), asyncio.Event(), []

    async def charge(request: Request) -> Response:
        body = await request.body()
        begun.set()
        await go.wait()
        heard.append(await request.is_disconnected())
        return JSONResponse({"bytes": len(body)})

    async with served(shop(fence, charge)) as client:
        asking = asyncio.create_task(client.post("/", headers=KEY, content=b"12345"))
        await begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        go.set()
        answer = await client.post("/", headers=KEY, content=b"12345")
    assert answer.json() == {"bytes": 5}
    assert heard == [False]


async def test_a_domain_may_be_named_and_is_its_routes_otherwise(fence: EffectFence) -> None:
    async def charge(_request: Request) -> Response:
        return Response()

    async def domain(scope: Any) -> str:
        return f"order:{scope['path'].split('/')[2]}"

    def app(**more: Any) -> Any:
        route = Route("/orders/{id}", charge, methods=["POST"])
        return Starlette(
            routes=[route], middleware=[Middleware(IdempotencyMiddleware, fence=fence, **more)]
        )

    async with served(app(domain=domain)) as client:
        await client.post("/orders/7", headers={"Idempotency-Key": "named"})
    async with served(app(routes={"/orders/{id}": Policy()})) as client:
        await client.post("/orders/7", headers={"Idempotency-Key": "routed"})
    async with served(app()) as client:
        await client.post("/orders/7", headers={"Idempotency-Key": "default"})
    found = {record.intent: record.domain async for record in fence.intents()}
    assert found == {
        "http:named": "order:7",
        "http:routed": "http:/orders/{id}",
        "http:default": "http",
    }


async def test_one_route_alone_may_be_fenced(fence: EffectFence) -> None:
    ran = []

    async def charge(_request: Request) -> Response:
        ran.append(1)
        return Response()

    ours = Middleware(IdempotencyMiddleware, fence=fence, policy=Policy(required=True))
    routes = [
        Mount("/pay", routes=[Route("/", charge, methods=["POST"], middleware=[ours])]),
        Route("/free", charge, methods=["POST"]),
    ]
    async with served(Starlette(routes=routes)) as client:
        assert (await client.post("/pay/")).status_code == 400
        assert [one.status_code for one in await twice(client, "/pay/")] == [200, 200]
        assert [one.status_code for one in await twice(client, "/free")] == [200, 200]
    assert len(ran) == 3


async def test_a_ledger_that_cannot_be_written_any_more_runs_nothing() -> None:
    ran = []

    async def charge(_request: Request) -> Response:
        ran.append(1)
        return Response()

    fence = EffectFence()
    async with served(shop(fence, charge)) as client:
        await fence.aclose()
        answer = await client.post("/", headers=KEY)
    assert (answer.status_code, answer.json()["ran"]) == (503, False)
    assert answer.headers["retry-after"] == "1"
    assert ran == []
