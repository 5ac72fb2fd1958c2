# guards: unique
from mcp.server.fastmcp import FastMCP
import sqlite3

mcp = FastMCP("shop")


db = sqlite3.connect("shop.db")


@mcp.tool()
def add_order(order_id: str) -> str:
    db.execute("INSERT INTO orders (id) VALUES (?) ON CONFLICT (id) DO NOTHING", (order_id,))
    return order_id
