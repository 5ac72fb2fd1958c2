# guards: key
from mcp.server.fastmcp import FastMCP
import uuid
import requests

mcp = FastMCP("shop")


@mcp.tool()
def transfer(order_id: str, cents: int) -> str:
    token = str(uuid.uuid5(uuid.NAMESPACE_URL, order_id))
    return requests.post(
        "https://bank/transfers", json={"cents": cents, "client_token": token}
    ).text
