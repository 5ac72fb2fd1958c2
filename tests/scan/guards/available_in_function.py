# guards: available
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


def post(path, body, idempotency_key=None):
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    return requests.post("https://api" + path, json=body, headers=headers)


@mcp.tool()
def create_invoice(cents: int) -> str:
    return post("/invoices", {"cents": cents}).text
