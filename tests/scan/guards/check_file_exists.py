# guards: check
from mcp.server.fastmcp import FastMCP
from pathlib import Path

mcp = FastMCP("shop")


@mcp.tool()
def create_note(name: str, text: str) -> str:
    path = Path(name)
    if path.exists():
        raise FileExistsError("note already exists")
    path.write_text(text)
    return name
