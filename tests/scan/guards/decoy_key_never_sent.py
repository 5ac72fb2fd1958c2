# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int, order: str) -> str:
    idempotency_key = f"pay-{order}"
    print("paying", idempotency_key)
    return requests.post("https://bank/payments", json={"cents": cents}).text
