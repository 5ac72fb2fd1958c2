# guards: key
from mcp.server.fastmcp import FastMCP
import httpx

mcp = FastMCP("shop")


@mcp.tool()
async def charge(order_id: str, cents: int) -> str:
    async with httpx.AsyncClient() as client:
        await client.post(
            "https://pay/charges",
            json={"cents": cents},
            headers={"Idempotency-Key": f"charge-{order_id}"},
        )
    return "ok"
