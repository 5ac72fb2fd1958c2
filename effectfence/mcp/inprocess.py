"""`fence_tools(server, fence)`: the tools of an MCP server, fenced in its own process.

It is a middleware of the SDK's server: what `wrap` does between two pipes happens here between the
session and the handler, by the very same code (`fenced.FencedCalls`), so the same policy, answers
and marks. Everything but `tools/call` goes through untouched. Invariants:

1. A fenced handler runs in a task of the fence's own: a client that cancels or vanishes ends its
   waiting, not the effect, whose outcome is recorded; `fence.aclose` drains it.
2. An exception that leaves a handler is an outcome that nobody knows, unless it is the SDK's
   `MCPError`, which is an answer. A tool of an `MCPServer` never gets there: the SDK makes an
   `isError` result of its exceptions, which releases or is unknown as the policy says.
3. Which tools only read is asked of the server itself, once, and learned from listings; until then,
   and of a tool that no listing names, a call is fenced.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from effectfence.fence import EffectFence
from effectfence.mcp.call import Call, ServerEnded
from effectfence.mcp.fenced import FencedCalls
from effectfence.mcp.policy import Policy, ToolPolicy
from effectfence.mcp.tools import Tools
from effectfence.mcp.wire import Message

if TYPE_CHECKING:
    from mcp.server.context import CallNext, HandlerResult, ServerRequestContext

    Context = ServerRequestContext[Any, Any]

_log = logging.getLogger("effectfence")

_MOST_SCOPES: Final = 10_000
_ID: Final = 1
"""Of a call here: it has one answer, and nobody else sees it."""

Scope = Callable[["Context"], "str | None"]


def fence_tools(
    server: Any,
    fence: EffectFence,
    *,
    policy: Policy | Mapping[str, ToolPolicy] | str | None = None,
    strict: bool = False,
    fence_all: bool = False,
    scope: Scope | None = None,
) -> None:
    """Fence the tools of an `mcp` 2.x server (`MCPServer`, the low-level `Server`) or a `FastMCP`.

    `policy`: a tool's name -> `ToolPolicy`, or the path of a policy file of `wrap`. `strict`: an
    error answer leaves the outcome unknown, as it may have come after the effect; give it to tools
    that move money. `fence_all`: also those that say `readOnlyHint`. `scope`: a callable from the
    request's context to a principal's name, so that two principals' equal calls stay apart.

    Raises `TypeError` for what is no such server. Call it once, before the server runs.
    """
    defaults = ToolPolicy(on_error="unknown" if strict else "release")
    chain = _chain_of(server)
    if any(isinstance(each, _FencedTools) for each in chain):
        raise ValueError("the tools of this server are fenced already")
    chain.append(_FencedTools(fence, _policy(policy, defaults), fence_all, scope, _name(server)))


def _chain_of(server: Any) -> list[Any]:
    """The list of the SDK's own middlewares."""
    try:
        from mcp.server import Server
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise TypeError(
            "fence_tools is for servers of the mcp SDK 2.x: pip install 'effectfence-asyncio[mcp]'"
        ) from None
    if isinstance(server, MCPServer | Server):
        return server.middleware
    inner = getattr(server, "_mcp_server", None)  # FastMCP's; its own middlewares see no raw call
    if isinstance(inner, Server):
        return inner.middleware
    raise TypeError(
        f"fence_tools is for an MCPServer or Server of the mcp SDK 2.x, or a FastMCP 4 that is "
        f"built on it, not for {type(server).__module__}.{type(server).__qualname__}"
    )


def _name(server: Any) -> str:
    return str(getattr(server, "name", None) or "mcp")


def _policy(given: Policy | Mapping[str, ToolPolicy] | str | None, defaults: ToolPolicy) -> Policy:
    if isinstance(given, Policy):
        return given
    if isinstance(given, Mapping):
        if not all(isinstance(each, ToolPolicy) for each in given.values()):
            raise TypeError("a policy is a mapping of tools' names to ToolPolicy")
        return Policy(defaults, dict(given))
    try:
        return Policy.load(given, defaults)
    except Exception as error:  # a command's word for wrong use
        raise ValueError(str(error)) from None


@dataclass(eq=False)
class _Called(Call):
    """A call with the way on to its handler."""

    go_on: Callable[[], Awaitable[HandlerResult]] | None = None


class _FencedTools:
    """The middleware."""

    def __init__(
        self,
        fence: EffectFence,
        policy: Policy,
        fence_all: bool,
        scope: Scope | None,
        agent: str,
    ) -> None:
        self._fence = fence
        self._policy = policy
        self._fence_all = fence_all
        self._scope = scope
        self._agent = agent
        self._tools = Tools()
        self._calls: dict[str | None, FencedCalls] = {}

    async def __call__(self, context: Context, call_next: CallNext) -> HandlerResult:
        if context.method == "tools/call" and context.request_id is not None:
            tool = (context.params or {}).get("name")
            if isinstance(tool, str) and await self._is_fenced(tool, context, call_next):
                return await self._fenced(tool, context, call_next)
        result = await call_next(context)
        if context.method == "tools/list":
            self._tools.learn(_answer(result))
        return result

    # --- which -----------------------------------------------------------------------------------

    async def _is_fenced(self, tool: str, context: Context, call_next: CallNext) -> bool:
        said = self._policy.of(tool).fence
        if said is not None or self._fence_all:
            return said is not False
        only_reads = self._tools.only_reads(tool)
        if only_reads is None:
            await self._tools.ask(partial(_ask, context, call_next), _message(context))
            only_reads = self._tools.only_reads(tool)
        return not only_reads

    # --- a fenced call ---------------------------------------------------------------------------

    async def _fenced(self, tool: str, context: Context, call_next: CallNext) -> HandlerResult:
        answers: list[bytes] = []
        call = _Called(
            message=_message(context),
            tool=tool,
            policy=self._policy.of(tool),
            answer=answers.append,
            id=_ID,
            agent=self._agent,
            go_on=partial(call_next, context),
        )
        handled = self._calls_of(context).handle(call)
        task = self._fence._shared.custody.own(handled)
        await asyncio.shield(task)
        return _result(answers[0])

    def _calls_of(self, context: Context) -> FencedCalls:
        scope = self._scope(context) if self._scope is not None else None
        found = self._calls.get(scope)
        if found is None:
            if len(self._calls) >= _MOST_SCOPES:
                self._calls.clear()  # those in flight are still held by the ledger
            name = self._fence._shared.store.name
            found = FencedCalls(self._fence, _forward, ledger=name, scope=scope)
            self._calls[scope] = found
        return found


async def _forward(call: Call) -> Message:
    """The handler's answer."""
    assert isinstance(call, _Called)
    assert call.go_on is not None
    from mcp.shared.exceptions import MCPError

    try:
        return _answer(await call.go_on())
    except MCPError as error:
        said = error.error.model_dump(mode="json", exclude_none=True)
        return _written({"jsonrpc": "2.0", "id": _ID, "error": said})
    except asyncio.CancelledError:
        raise
    except Exception as error:
        kind = "its arguments" if isinstance(error, ValidationError) else "its handler"
        _log.exception("a tool call of %r failed in %s", call.tool, kind)
        raise ServerEnded(f"the tool raised {type(error).__name__}: {error}") from error


async def _ask(context: Context, call_next: CallNext, asked: Message) -> Message:
    """The answer of this server to a request of our own."""
    try:
        listing = replace(context, method="tools/list", params=asked.params or None)
        return _answer(await call_next(listing))
    except Exception:  # it lists no tools: then each may change the world
        _log.debug("the tools could not be listed", exc_info=True)
        return _answer(None)


def _message(context: Context) -> Message:
    params = dict(context.params or {})
    return _written({"jsonrpc": "2.0", "id": _ID, "method": "tools/call", "params": params})


def _answer(result: HandlerResult) -> Message:
    if result is not None and not isinstance(result, dict):
        result = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    return _written({"jsonrpc": "2.0", "id": _ID, "result": result or {}})


def _result(line: bytes) -> dict[str, Any]:
    """What the session is to be answered with; an error is raised, for the SDK to shape."""
    value: dict[str, Any] = json.loads(line)
    if "error" in value:
        from mcp.shared.exceptions import MCPError

        error = value["error"]
        raise MCPError(error["code"], error["message"], error.get("data"))
    result: dict[str, Any] = value["result"]
    return result


def _written(value: dict[str, Any]) -> Message:
    line = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Message(line.encode("utf-8", "surrogatepass"), value)
