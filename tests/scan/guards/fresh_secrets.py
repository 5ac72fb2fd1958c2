# guards: fresh
from mcp.server.fastmcp import FastMCP
import secrets
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int) -> str:
    body = {"cents": cents, "idempotency_key": secrets.token_hex(16)}
    return requests.post("https://bank/payments", json=body).text
