# guards: optional
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(to: str, cents: int, idempotency_key: str | None = None) -> str:
    headers = {}
    if idempotency_key:
        headers["Idempotency-Key"] = idempotency_key
    return requests.post(
        "https://bank/payments", json={"to": to, "cents": cents}, headers=headers
    ).text
