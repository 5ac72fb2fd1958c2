# guards: dedupe
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


from ledger import store


@mcp.tool()
def pay(order_id: str) -> str:
    if not store.try_claim(order_id):
        return "somebody has it"
    return requests.post("https://bank/payments", json={"order": order_id}).text
