# guards: optional
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


class Client:
    def __init__(self):
        self.session = requests.Session()

    def create(self, cents, idempotency_key=None):
        headers = {}
        if idempotency_key:
            headers["Idempotency-Key"] = idempotency_key
        return self.session.post("https://bank/payments", json={"cents": cents}, headers=headers)


client = Client()


@mcp.tool()
def pay(cents: int, idempotency_key: str | None = None) -> str:
    return client.create(cents, idempotency_key=idempotency_key).text
