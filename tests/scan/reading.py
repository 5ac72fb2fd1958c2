"""Small packages for the scanner to read, written into a folder and scanned."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter", reason="pip install 'effectfence-asyncio[scan]'")

from effectfence.scan.model import Report, Tool
from effectfence.scan.scan import scan

PYTHON = """
from mcp.server.fastmcp import FastMCP
import httpx
mcp = FastMCP("demo")
"""
JAVASCRIPT = """
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
const server = new McpServer({ name: "demo", version: "1" });
"""


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """The files, below `folder`; their indentation is taken off."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), "utf-8")
    return folder


def read(folder: Path, files: Mapping[str, str]) -> Report:
    """What the scanner says of these files."""
    return scan(write(folder, files)).report


def python(folder: Path, body: str) -> dict[str, Tool]:
    """The tools of a one-file Python server, by name."""
    return named(read(folder, {"server.py": PYTHON + textwrap.dedent(body)}).tools)


def javascript(folder: Path, body: str) -> dict[str, Tool]:
    """The tools of a one-file JavaScript server, by name."""
    return named(read(folder, {"server.js": JAVASCRIPT + textwrap.dedent(body)}).tools)


def named(tools: Iterable[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


def what(tool: Tool) -> list[str]:
    return [write.what for write in tool.writes]
