# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


def keyed(order: str, cents: int) -> str:
    return requests.post(
        "https://bank/p", json={"cents": cents}, headers={"Idempotency-Key": order}
    ).text


@mcp.tool()
def pay(cents: int) -> str:
    return requests.post("https://bank/payments", json={"cents": cents}).text
