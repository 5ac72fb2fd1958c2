# guards: dedupe
from mcp.server.fastmcp import FastMCP
import redis
import requests

mcp = FastMCP("shop")


r = redis.Redis()


@mcp.tool()
def pay(order_id: str) -> str:
    if not r.setnx(f"pay:{order_id}", 1):
        return "done"
    return requests.post("https://bank/payments", json={"order": order_id}).text
