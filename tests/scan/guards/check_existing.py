# guards: check
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def create_customer(email: str) -> str:
    existing = requests.get("https://crm/customers", params={"email": email}).json()
    if existing:
        return "exists"
    return requests.post("https://crm/customers", json={"email": email}).text
