# guards: optional
from mcp.server.fastmcp import FastMCP
import uuid
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int, request_key: str = "", idempotency_key: str = "") -> str:
    key = idempotency_key or str(uuid.uuid4())
    return requests.post(
        "https://bank/payments", json={"cents": cents}, headers={"Idempotency-Key": key}
    ).text
