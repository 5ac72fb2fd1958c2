# guards: key
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def order(item: str, idempotency_key: str) -> str:
    return requests.post(
        "https://shop/orders", json={"item": item}, headers={"Idempotency-Key": idempotency_key}
    ).text
