"""FastMCP: a server's tools that charge once, whatever its clients do.

    pip install fastmcp
    python -m examples.fastmcp_charge

One line, `fence_tools(server, fence)`, fences all tools that do not say they only read. The clients
are real ones, in memory; the last one asks a new process that has the same ledger.
"""

from __future__ import annotations

import asyncio
import os

os.environ["FASTMCP_CHECK_FOR_UPDATES"] = "off"

from fastmcp import Client, FastMCP

from effectfence import EffectFence
from effectfence.mcp import fence_tools
from examples.agent_story import Shop, asked_to_resume, in_a_new_process, shop


def server(shop: Shop, fence: EffectFence) -> FastMCP:
    server = FastMCP("shop")

    @server.tool
    async def charge(order: str, cents: int) -> dict[str, str]:
        """Charge an order."""
        return shop.charge(order, cents)

    @server.tool(annotations={"readOnlyHint": True})
    async def count(order: str) -> int:
        """How often an order was charged."""
        return shop.times_charged(order)

    fence_tools(server, fence, strict=True)
    return server


async def charged(client: Client, order: str) -> str:
    result = await client.call_tool("charge", {"order": order, "cents": 4900})
    return str(result.structured_content)


async def story(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        serving = server(shop, fence)
        async with Client(serving) as client:
            receipts = [await charged(client, "replanned") for _ in range(2)]
            assert len(set(receipts)) == 1
            shop.say("replanned", 2)

            receipts = await asyncio.gather(*(charged(client, "nine at once") for _ in range(9)))
            assert len(set(receipts)) == 1
            shop.say("nine at once", 9)

            count = await client.call_tool("count", {"order": "run again"})
            assert count.data == 0

        for _ in range(3):  # each run of an agent has a client of its own
            async with Client(serving) as client:
                await charged(client, "run again")
                count = await client.call_tool("count", {"order": "run again"})
                assert count.data == 1
        shop.say("run again", 3)

        async with Client(serving) as client:
            shop.saved.write_text(await charged(client, "interrupted"))

    in_a_new_process("examples.fastmcp_charge", shop)
    shop.say("interrupted", 2)


async def resume(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence, Client(server(shop, fence)) as client:
        assert await charged(client, "interrupted") == shop.saved.read_text()
        print("  asked in a new process: the same receipt")


if __name__ == "__main__":
    found = asked_to_resume()
    if found is not None:
        asyncio.run(resume(found))
    else:
        with shop() as new:
            asyncio.run(story(new))
