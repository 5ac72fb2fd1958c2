# guards: available
from mcp.server.fastmcp import FastMCP
import httpx

mcp = FastMCP("shop")


class PayClient:
    def __init__(self):
        self.http = httpx.Client(base_url="https://pay")

    def create_payment(self, amount: int, idempotency_key: str | None = None):
        headers = {}
        if idempotency_key:
            headers["Idempotency-Key"] = idempotency_key
        return self.http.post("/payments", json={"amount": amount}, headers=headers)


client = PayClient()


@mcp.tool()
def create_payment(amount: int) -> str:
    return client.create_payment(amount).text
