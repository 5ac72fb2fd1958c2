# guards: check
from mcp.server.fastmcp import FastMCP
import git

mcp = FastMCP("shop")


@mcp.tool()
def create_branch(name: str) -> str:
    repo = git.Repo(".")
    if any(head.name == name for head in repo.heads):
        raise ValueError(f"branch {name} already exists")
    repo.create_head(name)
    return name
