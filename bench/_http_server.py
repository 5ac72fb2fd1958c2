"""The servers that `bench.http` asks: one handler, bare or behind the fence.

    uvicorn bench._http_server:fastapi            python -m bench._http_server PORT      (aiohttp)

`BENCH_FENCE`: a ledger, or nothing for the bare handler.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from aiohttp import web
from fastapi import FastAPI
from pydantic import BaseModel

from effectfence.web.aiohttp import setup
from effectfence.web.asgi import IdempotencyMiddleware

LEDGER = os.environ.get("BENCH_FENCE")


class Charge(BaseModel):
    order: int
    cents: int
    currency: str


def _fastapi() -> FastAPI:
    app = FastAPI()

    @app.post("/charges", status_code=201)
    async def charges(charge: Charge) -> dict[str, Any]:
        return {"charge_id": f"ch_{charge.order}", "cents": charge.cents, "status": "succeeded"}

    if LEDGER:
        app.add_middleware(IdempotencyMiddleware, ledger=LEDGER)
    return app


def _aiohttp() -> web.Application:
    async def charges(request: web.Request) -> web.Response:
        charge = Charge.model_validate_json(await request.read())
        said = {"charge_id": f"ch_{charge.order}", "cents": charge.cents, "status": "succeeded"}
        return web.json_response(said, status=201)

    app = web.Application()
    app.router.add_post("/charges", charges)
    if LEDGER:
        setup(app, ledger=LEDGER)
    return app


fastapi = _fastapi()

if __name__ == "__main__":
    web.run_app(_aiohttp(), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
