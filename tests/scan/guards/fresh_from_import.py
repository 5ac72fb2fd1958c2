# guards: fresh
from mcp.server.fastmcp import FastMCP
from uuid import uuid4
from squareup import Payments

mcp = FastMCP("shop")


@mcp.tool()
def create_payment(cents: int) -> str:
    key = uuid4().hex
    client = Payments("token")
    return client.payments.create(amount=cents, idempotency_key=key).id
