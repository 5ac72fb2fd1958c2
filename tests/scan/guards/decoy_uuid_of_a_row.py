# guards: none
from mcp.server.fastmcp import FastMCP
import uuid
import requests

mcp = FastMCP("shop")


@mcp.tool()
def add_note(text: str) -> str:
    name = f"note-{uuid.uuid4()}"
    return requests.post("https://notes/notes", json={"name": name, "text": text}).text
