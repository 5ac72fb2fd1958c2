"""What a wrapped server says of its tools: which of them only read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from effectfence.mcp import wire
from effectfence.mcp.call import NotSent, ServerEnded
from effectfence.mcp.wire import Message

_MOST_PAGES: Final = 100
_LISTING_SECONDS: Final = 5.0

Ask = Callable[[Message], Awaitable[Message]]


class Tools:
    """Learns from the listings that pass by; asks for one itself if a call comes first.

    A tool that no listing names is taken to change the world.
    """

    def __init__(self) -> None:
        self._known = False
        self._only_read: dict[str, bool] = {}
        self._asking: asyncio.Task[None] | None = None

    def only_reads(self, tool: str) -> bool | None:
        """`None`: the server has not been asked yet."""
        if tool in self._only_read:
            return self._only_read[tool]
        return False if self._known else None

    def learn(self, answer: Message) -> str | None:
        """Take in one page of a listing; the next page's cursor, if there is one."""
        result = answer.value.get("result")
        if not isinstance(result, dict) or not isinstance(result.get("tools"), list):
            return None
        for tool in result["tools"]:
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                hints = tool.get("annotations")
                hint = hints.get("readOnlyHint") if isinstance(hints, dict) else None
                self._only_read[tool["name"]] = hint is True
        cursor = result.get("nextCursor")
        if isinstance(cursor, str):
            return cursor
        self._known = True
        return None

    def changed(self) -> None:
        """What only read may do more by now: look again before the next call passes."""
        self._known = False
        self._asking = None
        self._only_read.clear()

    async def ask(self, ask: Ask, call: Message) -> None:
        """Ask the server, once for all who wait. `call` says of which era and client we are."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._list(ask, call))
        await asyncio.shield(self._asking)

    async def _list(self, ask: Ask, call: Message) -> None:
        cursor: str | None = None
        with suppress(TimeoutError, NotSent, ServerEnded):
            async with asyncio.timeout(_LISTING_SECONDS):
                for page in range(_MOST_PAGES):
                    cursor = self.learn(await ask(_request(page, call, cursor)))
                    if cursor is None:
                        break
        self._known = True


def _request(page: int, call: Message, cursor: str | None) -> Message:
    params: dict[str, Any] = {} if cursor is None else {"cursor": cursor}
    if meta := wire.modern_meta(call):
        params["_meta"] = meta
    value = {
        "jsonrpc": "2.0",
        "id": f"effectfence:tools:{page}",
        "method": "tools/list",
        "params": params,
    }
    return Message(json.dumps(value).encode(), value)
