# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def create_order(item: str, priority: str) -> str:
    if not item:
        raise ValueError("item is required")
    if priority not in ("low", "high"):
        return "bad priority"
    return requests.post("https://shop/orders", json={"item": item, "priority": priority}).text
