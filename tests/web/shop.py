"""The shop that the tests charge: one set of routes, as a FastAPI and as an aiohttp application.

Every execution appends a line to `SHOP/effects`: the key, the route and the process. A route that
is given a `gate` waits until the file `SHOP/gates/<gate>` is there.

    uvicorn tests.web.shop:app          python -m tests.web.shop PORT      (aiohttp)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from effectfence import FenceConfig, NotExecuted, current_effect
from effectfence.web import aiohttp as fenced_aiohttp
from effectfence.web.asgi import IdempotencyMiddleware
from effectfence.web.idempotency import Policy, Unauthenticated

SHOP = Path(os.environ.get("SHOP", "."))
POLICY = Policy(wait_seconds=float(os.environ.get("SHOP_WAIT", "30")), max_response_bytes=1 << 16)
ROUTES = {
    "POST /required": POLICY.but(required=True),
    "POST /maybe/{code}": POLICY.but(outcomes={"503": "release"}),
    "POST /versioned": POLICY.but(request_headers=("X-Version",)),
    "POST /unfenced": None,
    "POST /brief": POLICY.but(result_ttl=0.2),
    "POST /hasty": POLICY.but(wait_seconds=0.0, retry_after_seconds=7),
}
DRAIN = float(os.environ.get("SHOP_DRAIN", "5"))
CONFIG = FenceConfig(max_record_bytes=1 << 20)


def executed(key: str | None, route: str) -> int:
    """Append one line, and say how many there are."""
    line = f"{key} {route} {os.getpid()}\n".encode()
    descriptor = os.open(SHOP / "effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
    return len((SHOP / "effects").read_bytes().splitlines())


async def passed(gate: str | None) -> None:
    while gate and not (SHOP / "gates" / gate).exists():  # noqa: ASYNC110 - another process opens
        await asyncio.sleep(0.005)


class Charge(BaseModel):
    cents: int
    gate: str | None = None


async def charge(key: str | None, ask: Charge) -> dict[str, Any]:
    number = executed(key, "charges")
    await passed(ask.gate)
    return {"charge": f"ch_{number}", "cents": ask.cents}


HEADERS = {"X-Shop": "open", "Set-Cookie": "session=secret", "Location": "/charges/1"}


def owner(authorization: str | None) -> str | None:
    """Whose key it is: the part of the token that names the account."""
    if authorization == "Bearer nobody":
        raise Unauthenticated('Bearer realm="shop"')
    return authorization.removeprefix("Bearer ").split("-")[0] if authorization else None


async def pieces(key: str | None, ask: dict[str, Any]) -> AsyncIterator[bytes]:
    executed(key, "stream")
    for number in range(ask["pieces"]):
        yield b"%07d\n" % number
        if number == 0:
            await passed(ask.get("gate"))


# --- FastAPI --------------------------------------------------------------------------------------


def build() -> FastAPI:
    app = FastAPI()

    def key_of(request: Request) -> str | None:
        return request.headers.get("idempotency-key")

    @app.post("/charges", status_code=201)
    async def _charges(ask: Charge, request: Request, response: Response) -> dict[str, Any]:
        response.headers.update(HEADERS)
        return await charge(key_of(request), ask)

    for path in ("/required", "/versioned", "/unfenced", "/brief", "/hasty"):

        @app.post(path)
        async def _plain(request: Request) -> dict[str, Any]:
            body = await request.body()
            ask = Charge.model_validate_json(body) if body else Charge(cents=1)
            return await charge(key_of(request), ask)

    @app.post("/maybe/{code}")
    @app.post("/status/{code}")
    async def _status(code: int, request: Request, say: str | None = None) -> Response:
        executed(key_of(request), "status")
        headers = {"Effectfence-Outcome": say} if say else {}
        return Response(b"", status_code=code, headers=headers)

    @app.post("/busy")
    async def _busy(request: Request) -> dict[str, Any]:
        if not (SHOP / "gates" / "ready").exists():
            raise NotExecuted("the shop is closed")
        return await charge(key_of(request), Charge(cents=1))

    @app.post("/broken")
    async def _broken(request: Request) -> None:
        executed(key_of(request), "broken")
        raise RuntimeError("the card machine caught fire")

    @app.post("/echo")
    async def _echo(request: Request) -> Response:
        executed(key_of(request), "echo")
        kind = request.headers.get("x-answer-type", "application/octet-stream")
        return Response(await request.body(), headers={"Content-Type": kind})

    @app.post("/form")
    async def _form(request: Request) -> dict[str, Any]:
        executed(key_of(request), "form")
        async with request.form() as form:
            read = {name: await _text(value) for name, value in form.items()}
        return read

    @app.post("/v1/charges")
    async def _as_stripe(request: Request) -> dict[str, Any]:
        number = executed(key_of(request), "stripe")
        async with request.form() as form:
            asked = dict(form)
        await passed(str(asked.get("metadata[gate]", "")))
        if asked["description"] == "lost":
            raise RuntimeError("the bank did not answer")
        return {"id": f"ch_{number}", "object": "charge", "amount": int(str(asked["amount"]))}

    @app.post("/stream")
    async def _stream(request: Request) -> StreamingResponse:
        return StreamingResponse(
            pieces(key_of(request), await request.json()), media_type="text/plain"
        )

    @app.post("/ticket")
    async def _ticket(request: Request) -> dict[str, Any]:
        executed(key_of(request), "ticket")
        fence = request.scope["effectfence"]
        assert request.state.effectfence is fence
        return {"key": current_effect().idempotency_key, "stats": fence.stats().admitted}

    @app.get("/who")
    async def _who() -> JSONResponse:
        return JSONResponse({"pid": os.getpid()})

    app.add_middleware(
        IdempotencyMiddleware,
        config=CONFIG,
        policy=POLICY,
        routes=ROUTES,
        drain_seconds=DRAIN,
        principal=lambda scope: owner(
            next((v.decode() for n, v in scope["headers"] if n == b"authorization"), None)
        ),
    )
    return app


async def _text(value: Any) -> str:
    return value if isinstance(value, str) else (await value.read()).decode()


app = build()


# --- aiohttp --------------------------------------------------------------------------------------


def build_aiohttp() -> web.Application:
    app = web.Application()
    routes = web.RouteTableDef()

    def key_of(request: web.Request) -> str | None:
        return request.headers.get("idempotency-key")

    @routes.post("/charges")
    async def _charges(request: web.Request) -> web.Response:
        try:
            ask = Charge.model_validate_json(await request.read())
        except ValueError as bad:
            raise web.HTTPBadRequest(
                text=str(bad), headers={"Effectfence-Outcome": "release"}
            ) from bad
        done = await charge(key_of(request), ask)
        return web.json_response(done, status=201, headers=HEADERS)

    async def _plain(request: web.Request) -> web.Response:
        body = await request.read()
        ask = Charge.model_validate_json(body) if body else Charge(cents=1)
        return web.json_response(await charge(key_of(request), ask))

    for path in ("/versioned", "/unfenced", "/brief", "/hasty"):
        app.router.add_post(path, _plain)

    @routes.post("/required")
    @fenced_aiohttp.idempotent(required=True)
    async def _required(request: web.Request) -> web.StreamResponse:
        return await _plain(request)

    @routes.post("/maybe/{code}")
    @routes.post("/status/{code}")
    async def _status(request: web.Request) -> web.Response:
        executed(key_of(request), "status")
        say = request.query.get("say")
        headers = {"Effectfence-Outcome": say} if say else {}
        return web.Response(status=int(request.match_info["code"]), headers=headers)

    @routes.post("/busy")
    async def _busy(request: web.Request) -> web.Response:
        if not (SHOP / "gates" / "ready").exists():
            raise NotExecuted("the shop is closed")
        return web.json_response(await charge(key_of(request), Charge(cents=1)))

    @routes.post("/broken")
    async def _broken(request: web.Request) -> web.Response:
        executed(key_of(request), "broken")
        raise RuntimeError("the card machine caught fire")

    @routes.post("/echo")
    async def _echo(request: web.Request) -> web.Response:
        executed(key_of(request), "echo")
        kind = request.headers.get("x-answer-type", "application/octet-stream")
        return web.Response(body=await request.content.read(), headers={"Content-Type": kind})

    @routes.view("/form")
    class _Form(web.View):
        @fenced_aiohttp.idempotent()
        async def post(self) -> web.StreamResponse:
            executed(key_of(self.request), "form")
            read = {}
            if self.request.content_type.startswith("multipart/"):
                async for part in await self.request.multipart():
                    read[part.name] = await part.text()
            else:
                read = dict(await self.request.post())
            return web.json_response(read)

    @routes.post("/stream")
    async def _stream(request: web.Request) -> web.StreamResponse:
        ask = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        async for piece in pieces(key_of(request), ask):
            await response.write(piece)
        await response.write_eof()
        return response

    @routes.post("/ticket")
    async def _ticket(request: web.Request) -> web.Response:
        executed(key_of(request), "ticket")
        fence = request["effectfence"]
        assert request.app[fenced_aiohttp.FENCE] is fence
        return web.json_response(
            {"key": current_effect().idempotency_key, "stats": fence.stats().admitted}
        )

    @routes.get("/who")
    async def _who(_request: web.Request) -> web.Response:
        return web.json_response({"pid": os.getpid()})

    app.add_routes(routes)
    fenced_aiohttp.setup(
        app,
        config=CONFIG,
        policy=POLICY,
        routes=ROUTES,
        drain_seconds=DRAIN,
        principal=lambda request: owner(request.headers.get("authorization")),
    )
    return app


if __name__ == "__main__":
    web.run_app(
        build_aiohttp(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        shutdown_timeout=1,
        handler_cancellation="--cancels" in sys.argv,
        print=lambda line: print(json.dumps(line), file=sys.stderr),
    )
