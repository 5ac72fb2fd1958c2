# guards: unique
from mcp.server.fastmcp import FastMCP
import redis

mcp = FastMCP("shop")


r = redis.Redis()


@mcp.tool()
def reserve(seat: str, who: str) -> str:
    r.set(f"seat:{seat}", who, nx=True)
    return seat
