"""A small MCP server for the benches: answers at once, with as many bytes as it is asked for. Its
JSON is written without spaces, as SDKs write it."""

from __future__ import annotations

import json
import sys
from typing import Any

INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "echo", "version": "1"},
}
TOOLS = {"tools": [{"name": "charge", "inputSchema": {"type": "object"}}]}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        return INITIALIZED
    if method == "tools/list":
        return TOOLS
    arguments = params["arguments"]
    text = "x" * arguments.get("bytes", 0) or f"charged {arguments['order']}"
    return {"content": [{"type": "text", "text": text}]}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            result = answer(asked["method"], asked.get("params", {}))
            said = {"jsonrpc": "2.0", "id": asked["id"], "result": result}
            sys.stdout.write(json.dumps(said, separators=(",", ":")) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
