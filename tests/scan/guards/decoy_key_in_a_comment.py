# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int) -> str:
    # An Idempotency-Key would be nice here: idempotency_key=order_id
    return requests.post("https://bank/payments", json={"cents": cents}).text
