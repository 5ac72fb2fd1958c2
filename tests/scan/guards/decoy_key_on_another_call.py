# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int, order: str) -> str:
    requests.get("https://bank/health", headers={"Idempotency-Key": order})
    return requests.post("https://bank/payments", json={"cents": cents}).text
