"""The same small server on the official SDK, as most servers are."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("sdk")


@server.tool()
def charge(order: int) -> str:
    """Charge an order."""
    return f"charged {order}"


if __name__ == "__main__":
    server.run()
