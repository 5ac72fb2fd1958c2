# guards: none
from mcp.server.fastmcp import FastMCP
import requests

mcp = FastMCP("shop")


COLOURS = {"red", "green"}


@mcp.tool()
def create_label(colour: str) -> str:
    if colour in COLOURS:
        return "reserved"
    return requests.post("https://shop/boxes", json={"colour": colour}).text
