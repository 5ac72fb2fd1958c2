# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


@mcp.tool()
def create_order(customer: str) -> str:
    found = requests.get(f"https://crm/customers/{customer}")
    if found.status_code == 404:
        return "customer does not exist"
    return requests.post("https://shop/orders", json={"customer": customer}).text
