"""The fence in front of MCP servers: `wrap` outside of their process, `fence_tools` inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effectfence.mcp.inprocess import fence_tools
    from effectfence.mcp.policy import Policy, ToolPolicy

__all__ = ["Policy", "ToolPolicy", "fence_tools"]

_HOMES = {"fence_tools": "inprocess", "Policy": "policy", "ToolPolicy": "policy"}


def __getattr__(name: str) -> Any:
    """From where it lives: `wrap` starts without the SDK, and without what it does not use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'effectfence.mcp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"effectfence.mcp.{_HOMES[name]}"), name)
