# guards: unique
from mcp.server.fastmcp import FastMCP
import asyncpg

mcp = FastMCP("shop")


@mcp.tool()
async def save_row(key: str, value: str) -> str:
    conn = await asyncpg.connect("postgres://")
    await conn.execute(
        """
        INSERT INTO rows (key, value) VALUES ($1, $2)
        ON CONFLICT (key) DO UPDATE SET value = excluded.value
        """,
        key,
        value,
    )
    return key
