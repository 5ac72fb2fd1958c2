"""An aiohttp service whose charges happen once, and a client that hangs up and asks again.

pip install 'effectfence-asyncio[aiohttp]'
python -m examples.aiohttp_charge
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from pathlib import Path

import aiohttp
from aiohttp import web

from effectfence.web.aiohttp import idempotent, setup

charging = asyncio.Event()
confirmed = asyncio.Event()
charged: list[int] = []


@idempotent(required=True)
async def charge(request: web.Request) -> web.Response:
    asked = await request.json()
    charged.append(asked["cents"])
    charging.set()
    await confirmed.wait()  # the bank takes its time
    return web.json_response({"charge": f"ch_{len(charged)}"}, status=201)


def build(ledger: Path) -> web.Application:
    app = web.Application()
    app.router.add_post("/charges", charge)
    setup(app, ledger=ledger)
    return app


# --- a client that loses patience -----------------------------------------------------------------


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runner = web.AppRunner(build(Path(folder) / "effects.jsonl"))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            await ask_twice(client)
        await runner.cleanup()


async def ask_twice(client: aiohttp.ClientSession) -> None:
    request = {"json": {"cents": 4900}, "headers": {"Idempotency-Key": str(uuid.uuid4())}}
    first = asyncio.create_task(client.post("/charges", **request))
    await charging.wait()
    first.cancel()  # the connection is closed in the middle of the charge
    confirmed.set()
    async with client.post("/charges", **request) as answer:
        replayed = answer.headers.get("Idempotent-Replayed", "false")
        print(f"hung up, asked again: {answer.status} {await answer.json()}, replayed: {replayed}")
    print(f"charged {len(charged)} time(s)")


if __name__ == "__main__":
    asyncio.run(main())
