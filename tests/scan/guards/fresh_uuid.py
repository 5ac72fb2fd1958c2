# guards: fresh
from mcp.server.fastmcp import FastMCP
import uuid
import requests

mcp = FastMCP("shop")


@mcp.tool()
def pay(cents: int) -> str:
    return requests.post(
        "https://bank/payments",
        json={"cents": cents},
        headers={"Idempotency-Key": str(uuid.uuid4())},
    ).text
