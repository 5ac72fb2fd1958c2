# guards: unique
from mcp.server.fastmcp import FastMCP
import sqlite3

mcp = FastMCP("shop")


db = sqlite3.connect("shop.db")


@mcp.tool()
def add_order(order_id: str) -> str:
    cursor = db.cursor()
    cursor.execute("INSERT OR IGNORE INTO orders (id) VALUES (?)", (order_id,))
    return order_id
