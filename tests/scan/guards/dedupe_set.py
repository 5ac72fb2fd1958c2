# guards: dedupe
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


processed = set()


@mcp.tool()
def pay(order_id: str) -> str:
    if order_id in processed:
        return "done"
    processed.add(order_id)
    return requests.post("https://bank/payments", json={"order": order_id}).text
