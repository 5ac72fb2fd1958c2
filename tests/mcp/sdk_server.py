"""A server as people write them, on the official SDK: both eras, and what it did in a file.

python sdk_server.py EFFECTS GATES
"""

import asyncio
import os
import sys
from typing import Annotated

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve
from mcp_types import ToolAnnotations
from pydantic import BaseModel

server = MCPServer("charges")


class Receipt(BaseModel):
    number: int
    cents: int


class Sure(BaseModel):
    sure: bool


def effect(word: str) -> int:
    """Written down; how many there are by now."""
    file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{word}\n".encode())
    count = os.pread(file, 1 << 20, 0).count(b"\n")
    os.close(file)
    return count


async def ask(order: str) -> Elicit[Sure]:
    return Elicit(f"pay {order}?", Sure)


@server.tool()
def charge(order: str, cents: int) -> Receipt:
    return Receipt(number=effect("charge"), cents=cents)


@server.tool()
async def slow(order: str, ctx: Context) -> str:
    number = effect("slow")
    await ctx.report_progress(1, 2, "begun")
    while not os.path.exists(os.path.join(sys.argv[2], order)):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.002)
    await ctx.report_progress(2, 2, "done")
    return f"slow {number}"


@server.tool()
def declined(order: str) -> str:
    raise ToolError(f"declined {effect('declined')}")


@server.tool()
def confirmed(order: str, answer: Annotated[Sure, Resolve(ask)]) -> str:
    return f"confirmed {effect('confirmed')}: {answer.sure}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look() -> str:
    return f"look {effect('look')}"


@server.resource("charges://all")
def everything() -> str:
    return "all of them"


@server.prompt()
def refund(order: str) -> str:
    return f"Refund {order}, please."


server.run()
