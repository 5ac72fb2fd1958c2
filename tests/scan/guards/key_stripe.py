# guards: key
from mcp.server.fastmcp import FastMCP
import stripe

mcp = FastMCP("shop")


@mcp.tool()
def charge(order_id: str, cents: int) -> str:
    intent = stripe.PaymentIntent.create(
        amount=cents, currency="eur", idempotency_key="order-" + order_id
    )
    return intent.id
