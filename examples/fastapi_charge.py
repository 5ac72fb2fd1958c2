"""A FastAPI service whose charges happen once, and a client that asks far too often.

    pip install effectfence-asyncio fastapi uvicorn httpx
    python -m examples.fastapi_charge

Serve it for real with `uvicorn examples.fastapi_charge:app --workers 4`: the ledger is a file, so
all workers stand behind one fence.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from effectfence import current_effect
from effectfence.web.asgi import IdempotencyMiddleware
from effectfence.web.idempotency import Policy

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, routes={"POST /charges": Policy(required=True)})

charged: list[str] = []


class Charge(BaseModel):
    order: str
    cents: int


@app.post("/charges", status_code=201)
async def charge(asked: Charge) -> dict[str, Any]:
    await asyncio.sleep(0.1)  # the bank takes its time
    charged.append(current_effect().idempotency_key)  # a provider that takes a key gets this one
    return {"charge": f"ch_{len(charged)}", "order": asked.order, "cents": asked.cents}


# --- a client that asks too often -----------------------------------------------------------------


async def main() -> None:
    order, key = {"order": "123", "cents": 4900}, {"Idempotency-Key": str(uuid.uuid4())}
    async with serving() as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        many = await asyncio.gather(
            *(client.post("/charges", json=order, headers=key) for _ in range(20))
        )
        replayed = sum("idempotent-replayed" in answer.headers for answer in many)
        print(f"asked {len(many)} times, charged {len(charged)} time(s), {replayed} replayed")
        other = await client.post("/charges", json={**order, "cents": 1}, headers=key)
        print(f"another amount, same key: {other.status_code} {other.json()['detail']}")
        bare = await client.post("/charges", json=order)
        print(f"no key: {bare.status_code} {bare.json()['title']}")


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """This service on a free port, with a ledger that goes again."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as port:
        os.environ["EFFECTFENCE_LEDGER"] = f"{folder}/effects.jsonl"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        task = asyncio.create_task(server.serve(sockets=[port]))
        yield f"http://127.0.0.1:{port.getsockname()[1]}"
        server.should_exit = True
        await task


if __name__ == "__main__":
    asyncio.run(main())
