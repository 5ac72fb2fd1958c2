# guards: dedupe
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


class Receipts:
    def __init__(self):
        self.rows = {}

    def get(self, key):
        return self.rows.get(key)


sent_receipts = Receipts()


@mcp.tool()
def send_mail(message_id: str) -> str:
    if sent_receipts.get(message_id):
        return "sent before"
    return requests.post("https://mail/messages", json={"id": message_id}).text
