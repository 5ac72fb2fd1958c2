# guards: key
from mcp.server.fastmcp import FastMCP
import hashlib
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(to: str, cents: int) -> str:
    """Pay somebody."""
    key = hashlib.sha256(f"{to}:{cents}".encode()).hexdigest()
    return requests.post(
        "https://bank/payments", json={"to": to}, headers={"Idempotency-Key": key}
    ).text
