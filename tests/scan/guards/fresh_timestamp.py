# guards: fresh
from mcp.server.fastmcp import FastMCP
import time
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int) -> str:
    key = f"pay-{int(time.time())}"
    return requests.post(
        "https://bank/payments", json={"cents": cents, "client_request_id": key}
    ).text
