# guards: optional
from mcp.server.fastmcp import FastMCP
import requests
from typing import Optional

mcp = FastMCP("shop")


@mcp.tool()
def order(symbol: str, client_order_id: Optional[str] = None) -> str:
    return requests.post(
        "https://broker/orders", json={"symbol": symbol, "client_order_id": client_order_id}
    ).text
