"""The fence as an MCP server: six tools over an `EffectFence`, and stdio. `http` adds the network.

The SDK owns the protocol, in all its versions; here stand the tools. Invariants:

1. Every property of every schema declares its type, in place: clients render forms from it. The
   schemas are the models' own, with references put in their place.
2. Arguments are looked at whole before the fence is asked. What is refused is a tool error that
   says what to mend, and has left nothing behind.
3. A report (commit, abort, release, heartbeat) is a task of the server's own: a client that cancels
   or hangs up never cancels what is being written down.
4. A ticket that was not handed out is released: by the fence when the asking was cancelled, here
   when its asker has hung up before it was answered.
5. Tickets are the agents' to hold. They are not renewed here, and outlive the server in its ledger.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Final, cast

import anyio
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolRequestParams,
    CallToolResult,
    ErrorData,
    JSONRPCError,
    JSONRPCResponse,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import BaseModel, ValidationError

from effectfence.doctor import version
from effectfence.errors import FenceError, ResultNotRecorded
from effectfence.fence import EffectFence
from effectfence.mcp.border import REFUSED, Unread, passed
from effectfence.models import EffectCert, EffectRequest, Fresh, PreparedEffect, Replay

_log = logging.getLogger("effectfence")

CALLER: Final = "effectfence.caller"
"""Where an HTTP request's scope carries its `Caller`."""

_FINISH_SECONDS: Final = 5.0
_WRITE_SECONDS: Final = 2.0
"""For a client that does not read what it is still told."""
_LONGEST_LINE: Final = 64 << 20
_SHOWN: Final = 5

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the fence as this caller sees it, and whether it has hung up."""

    fence: EffectFence
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Mend(Exception):
    """Arguments that can't be acted upon, and what is wrong with them."""


class Desk:
    """Answers the calls of the tools, and sees through what it has begun to write down."""

    def __init__(self, fence: EffectFence) -> None:
        self._everybody = Caller(fence)
        self._reports: set[asyncio.Task[Any]] = set()
        self._verbs: dict[str, Callable[[Caller, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "fence_prepare": self._prepare,
            "fence_commit": self._commit,
            "fence_abort": self._abort,
            "fence_release": self._release,
            "fence_heartbeat": self._heartbeat,
            "fence_stats": self._stats,
        }
        self.tools = tools(fence.config.lease_ttl)
        self._schemas = {tool.name: tool.input_schema for tool in self.tools}

    def server(self) -> Server[Any]:
        return Server(
            "effectfence",
            title="effectfence: one intent runs once",
            version=version(),
            instructions=instructions(self._everybody.fence.config.lease_ttl),
            get_tool_input_schema=self._schemas.get,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def close(self) -> bool:
        """Wait, within a bound, for what is being written down, and close the fence; whether
        everything was. What was not, the ledger tells as unknown once this process is gone."""
        if self._reports:
            await asyncio.wait(tuple(self._reports), timeout=_FINISH_SECONDS)
        await self._everybody.fence.aclose(drain_seconds=0.0)
        return not self._reports

    async def _list(
        self, _context: ServerRequestContext[Any], _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=list(self.tools))

    async def _call(
        self, context: ServerRequestContext[Any], params: CallToolRequestParams
    ) -> CallToolResult:
        if params.name not in self._verbs:
            raise MCPError(INVALID_PARAMS, f"there is no tool {params.name[:64]!r}")
        caller = self._everybody
        if context.request is not None:
            caller = context.request.scope[CALLER]
        arguments = {} if params.arguments is None else params.arguments
        try:
            _check_fields(arguments, self._schemas[params.name])
            return _answer(await self._verbs[params.name](caller, arguments))
        except FenceError as error:
            return _refusal(str(error), error.code, error.ran, error.facts)
        except (Mend, ValidationError, ValueError) as error:
            said = f"{_in_words(error)}. Nothing was recorded: mend it and call again."
            return _refusal(said, "invalid_arguments", _RAN_IF_REFUSED.get(params.name), {})
        except Exception:
            _log.exception("%s failed", params.name)
            said = f"{params.name} failed inside the server; its log says how."
            return _refusal(said, "internal_error", None, {})

    # --- the tools --------------------------------------------------------------------------------

    async def _prepare(self, caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
        admission = await caller.fence.prepare(EffectRequest.model_validate(arguments))
        match admission:
            case Replay(cert):
                if not cert.result_recorded:  # a marker is never handed out as a result
                    raise ResultNotRecorded(cert=cert, reason=next(iter(cert.result.values())))
                return {"status": "already_done", "cert": _plain(cert)}
            case Fresh(prepared):
                if caller.gone.is_set():
                    reason = "its agent hung up before the ticket was handed out"
                    await self._see_through(caller.fence.release(prepared, reason))
                return {"status": "fresh", "prepared": _plain(prepared)}

    async def _commit(self, caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
        prepared = _ticket(arguments)
        cert = await self._see_through(caller.fence.commit(prepared, arguments["result"]))
        return {"status": "committed", "cert": _plain(cert)}

    async def _abort(self, caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
        prepared = _ticket(arguments)
        await self._see_through(caller.fence.abort(prepared, _reason(arguments)))
        return {"status": "aborted", "intent": prepared.intent}

    async def _release(self, caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
        prepared = _ticket(arguments)
        await self._see_through(caller.fence.release(prepared, _reason(arguments)))
        return {"status": "released", "intent": prepared.intent}

    async def _heartbeat(self, caller: Caller, arguments: dict[str, Any]) -> dict[str, Any]:
        prepared = _ticket(arguments)
        ends = await self._see_through(caller.fence.heartbeat(prepared))
        return {"status": "extended", "lease_expires_at": ends}

    async def _stats(self, caller: Caller, _arguments: dict[str, Any]) -> dict[str, Any]:
        stats = caller.fence.stats()
        refused = {name: getattr(stats, counter) for name, counter in _REFUSED_COUNTERS.items()}
        return {
            "admitted": stats.admitted,
            "replayed": stats.replayed,
            "refused": refused,
            "total_attempts": stats.total,
            "prevented": stats.prevented,
            "log_line": stats.log_line(),
        }

    async def _see_through(self, report: Coroutine[Any, Any, Any]) -> Any:
        """Its outcome; cancelled, it goes on without the caller, undisturbed: what the SDK cancels
        it cancels anew at every turn of the loop."""
        task = asyncio.get_running_loop().create_task(report)
        self._reports.add(task)
        task.add_done_callback(self._reported)
        return await asyncio.shield(task)

    def _reported(self, task: asyncio.Task[Any]) -> None:
        self._reports.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, if there still is one


_RAN_IF_REFUSED: Final = {"fence_prepare": False, "fence_commit": True}
"""What the arguments' refusal leaves open: whoever commits says that it ran."""

_REFUSED_COUNTERS: Final = {
    "stale_read_set": "refused_stale",
    "domain_race": "refused_race",
    "in_flight": "refused_inflight",
    "unknown_outcome": "refused_unknown",
    "conflict": "refused_conflict",
    "causal": "refused_causal",
}


# --- arguments in ---------------------------------------------------------------------------------


def _check_fields(arguments: dict[str, Any], schema: Schema) -> None:
    """That they are those of the schema, no other, and none is missing."""
    if (reason := arguments.get(REFUSED)) is not None:
        raise Mend(str(reason))
    known = schema["properties"]
    wrong = [f"`{name[:64]}` is not one of its fields" for name in arguments if name not in known]
    wrong += [f"`{name}` is missing" for name in schema["required"] if name not in arguments]
    if wrong:
        takes = ", ".join(known) or "nothing"
        raise Mend(f"{_at_most(wrong)} (it takes {takes})")


def _ticket(arguments: dict[str, Any]) -> PreparedEffect:
    prepared = arguments["prepared"]
    if not isinstance(prepared, dict):
        raise Mend("`prepared` must be the object that fence_prepare gave, as it came")
    try:
        return PreparedEffect.model_validate(prepared)
    except ValidationError as error:
        raise Mend(f"not a ticket: {_in_words(error, 'prepared')}") from None


def _reason(arguments: dict[str, Any]) -> str:
    reason = arguments["reason"]
    if not isinstance(reason, str):
        raise Mend("`reason` must be a string")
    return reason


def _in_words(error: Exception, inside: str = "") -> str:
    """What is wrong, without the values: they may be secret, and may be huge."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return _at_most([_one_in_words(one, inside) for one in found])


def _one_in_words(one: Mapping[str, Any], inside: str) -> str:
    path = ".".join(str(step)[:64] for step in (inside, *one["loc"]) if step != "")
    if one["type"] == "missing":
        return f"`{path}` is missing"
    if one["type"] == "extra_forbidden":
        return f"`{path}` is not one of its fields"
    said = one["msg"].removeprefix("Value error, ")
    for python, json_word in _JSON_WORDS.items():
        said = said.replace(python, json_word, 1)
    return f"`{path}`: {said}" if one["loc"] else said


_JSON_WORDS: Final = {"Input should": "should", "dictionary": "object", "tuple": "array"}


def _at_most(wrong: list[str]) -> str:
    rest = len(wrong) - _SHOWN
    return "; ".join(wrong[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


# --- answers out ----------------------------------------------------------------------------------


def _answer(says: dict[str, Any]) -> CallToolResult:
    text = json.dumps(says, ensure_ascii=False, separators=(",", ":"))
    return CallToolResult(content=[TextContent(text=text)], structured_content=says)


def _refusal(text: str, code: str, ran: bool | None, facts: Mapping[str, Any]) -> CallToolResult:
    text = text.encode("utf-8", "backslashreplace").decode()
    says = {"code": code, "ran": ran, **{name: _plain(fact) for name, fact in facts.items()}}
    return CallToolResult(content=[TextContent(text=text)], structured_content=says, is_error=True)


def _plain(value: Any) -> Any:
    """A fact as JSON has it."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case tuple():
            return [_plain(each) for each in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


# --- what is said to agents -----------------------------------------------------------------------


def instructions(lease_seconds: float) -> str:
    """The protocol in five lines."""
    return (
        "Before anything with a side effect call fence_prepare: `intent` names the one action "
        "(charge:order-123; the same for every retry), `agent` is your stable role.\n"
        "fresh: run it once, then fence_commit with `prepared` exactly as it came and the result; "
        f"fence_heartbeat while it takes longer than {lease_seconds / 2:g} s.\n"
        "already_done: it ran before. Do not run it; `cert.result` is its result.\n"
        "An error from fence_prepare: do not run it; the text says whose move is next.\n"
        "It certainly did not run: fence_release. You are not sure (timeout, lost connection): "
        "fence_abort, and never run it again on your own."
    )


def tools(lease_seconds: float) -> tuple[Tool, ...]:
    """The six tools, with schemas made from the models."""
    request = schema_of(EffectRequest)
    fields = ("intent", "domain", "tool", "args", "agent", "read_set", "parent", "known_clock")
    asks = {name: request["properties"][name] for name in fields}
    ticket = {"prepared": schema_of(PreparedEffect)}
    because = {**ticket, "reason": _REASON}
    cert = {"cert": schema_of(EffectCert)}
    intent = {"intent": request["properties"]["intent"]}
    lease = f"Its lease lasts {lease_seconds:g} s."
    return (
        _tool(
            "fence_prepare",
            "May this action run? Ask before every side effect. fresh: run it, then report with "
            f"`prepared`. already_done: do not run it. An error: do not run it. {lease}",
            _object(asks, ("intent", "domain", "tool", "args", "agent")),
            _says({"fresh": ticket, "already_done": cert}),
            ToolAnnotations(destructive_hint=False, idempotent_hint=False),
        ),
        _tool(
            "fence_commit",
            "It ran, with this result. May be repeated: the same result gets the same certificate.",
            _object({**ticket, "result": _ANY_JSON}, ("prepared", "result")),
            _says({"committed": cert}),
            ToolAnnotations(destructive_hint=False, idempotent_hint=True),
        ),
        _tool(
            "fence_abort",
            "You do not know whether it ran. Nobody runs it again until an operator says so.",
            _object(because, ("prepared", "reason")),
            _says({"aborted": intent}),
            ToolAnnotations(destructive_hint=False, idempotent_hint=True),
        ),
        _tool(
            "fence_release",
            "It certainly did not run: the action is free again. Not for timeouts.",
            _object(because, ("prepared", "reason")),
            _says({"released": intent}),
            ToolAnnotations(destructive_hint=True, idempotent_hint=True),
        ),
        _tool(
            "fence_heartbeat",
            f"It is still running: the lease is renewed from now. {lease}",
            _object(ticket, ("prepared",)),
            _says({"extended": {"lease_expires_at": _UNIX_SECONDS}}),
            ToolAnnotations(destructive_hint=False, idempotent_hint=False),
        ),
        _tool(
            "fence_stats",
            "How the attempts at this server ended, since it started.",
            _object({}, ()),
            _says_stats(),
            ToolAnnotations(read_only_hint=True),
        ),
    )


def _tool(
    name: str, description: str, takes: Schema, says: Schema, annotations: ToolAnnotations
) -> Tool:
    return Tool(
        name=name,
        description=description,
        input_schema=takes,
        output_schema=says,
        annotations=annotations.model_copy(update={"open_world_hint": False}),
    )


_ANY_JSON: Final[Schema] = {
    "type": ["object", "array", "string", "number", "boolean", "null"],
    "description": "Any JSON: what the action answered.",
}
_REASON: Final[Schema] = {"type": "string", "description": "How you know, for the operator."}
_UNIX_SECONDS: Final[Schema] = {
    "type": "number",
    "description": "Unix time, by the server's clock.",
}
_ERROR: Final[Schema] = {
    "code": {"type": "string", "description": "Of an error: which one."},
    "ran": {
        "type": ["boolean", "null"],
        "description": "Of an error: whether the action ran; null: nobody knows.",
    },
}


def _object(properties: Schema, required: tuple[str, ...]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _says(answers: dict[str, Schema]) -> Schema:
    """One of the answers, or an error: there are clients that hold errors to it as well."""
    status = {"type": "string", "enum": list(answers)}
    properties: Schema = {"status": status}
    for answer in answers.values():
        properties |= answer
    shapes = [{"required": ["status", *answer]} for answer in answers.values()]
    return _or_error(properties, shapes)


def _says_stats() -> Schema:
    count = {"type": "integer", "minimum": 0}
    counts = dict.fromkeys(("admitted", "replayed", "total_attempts", "prevented"), count)
    refused = _object(dict.fromkeys(_REFUSED_COUNTERS, count), tuple(_REFUSED_COUNTERS))
    properties = {**counts, "refused": refused, "log_line": {"type": "string"}}
    return _or_error(properties, [{"required": list(properties)}])


def _or_error(properties: Schema, shapes: list[Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {**properties, **_ERROR},
        "anyOf": [*shapes, {"required": list(_ERROR)}],
    }


# --- schemas from models --------------------------------------------------------------------------

_MEANS: Final = {
    "intent": "Names the one logical action, e.g. charge:order-123: the same for every retry.",
    "domain": "What the action contends for, e.g. order:123.",
    "tool": "What is called.",
    "args": "What it is called with. The same intent with other args is refused.",
    "agent": "Your stable role, never a run id.",
    "read_set": "The numbers of the domains that the decision was based on.",
    "parent": "The hash of the certificate that this action follows.",
    "known_clock": "The vector clock of what you know.",
    "prepared": "The ticket from fence_prepare, exactly as it came.",
    "result": _ANY_JSON["description"],
    "attempt": "More than 1: an earlier attempt may have run.",
    "idempotency_key": "The same over attempts: pass it to a provider that takes one.",
    "token": "Whoever holds it speaks for the intent.",
    "hash": "SHA-256 over the canonical JSON of the other ten members.",
}


def schema_of(model: type[BaseModel]) -> Schema:
    """A model's schema in one piece, each property with its type."""
    schema = model.model_json_schema()
    found = _in_place(schema, schema.get("$defs", {}))
    found.pop("$defs", None)
    return found


def _in_place(schema: Schema, definitions: Schema) -> Schema:
    if (reference := schema.get("$ref")) is not None:
        schema = {**definitions[reference.rpartition("/")[2]], **schema}
    kept = {name: value for name, value in schema.items() if name not in _LEFT_OUT}
    for name in ("items", "additionalProperties"):
        if isinstance(kept.get(name), dict):
            kept[name] = _in_place(kept[name], definitions)
    if "properties" in kept:
        kept["properties"] = {
            name: _described(name, _in_place(below, definitions))
            for name, below in kept["properties"].items()
        }
    if "anyOf" in kept:
        kept = _or_null(kept)
    return kept if "type" in kept else {**_ANY_JSON, **kept}


_LEFT_OUT: Final = ("$ref", "$defs", "title", "description")
"""The models' own descriptions speak to programmers."""


def _or_null(schema: Schema) -> Schema:
    """`X | None`, said by the type."""
    options = schema.pop("anyOf")
    (option,) = [option for option in options if option != {"type": "null"}]
    if "enum" in option:
        option = {**option, "enum": [*option["enum"], None]}
    return {**schema, **option, "type": [option["type"], "null"]}


def _described(name: str, schema: Schema) -> Schema:
    return {**schema, "description": _MEANS[name]} if name in _MEANS else schema


# --- stdio ----------------------------------------------------------------------------------------


async def serve_stdio(fence: EffectFence, stop: asyncio.Event) -> bool:
    """Serve one client on stdin and stdout until it closes stdin, or `stop` is set; whether all of
    it ended in time.

    Calls that came before the end are answered, within a bound. Then the fence is closed: tickets
    that agents still hold are recorded as unknown, and their holders may still commit them at the
    next server on the same ledger.
    """
    desk, source = Desk(fence), _Input(0)
    serving = asyncio.create_task(_serve_stdio(desk, _Lines(source)))
    ends = [asyncio.create_task(event.wait()) for event in (source.ended, stop)]
    await asyncio.wait((serving, *ends), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        source.end()
    await asyncio.wait((serving,), timeout=_FINISH_SECONDS + _WRITE_SECONDS)
    for end in ends:
        end.cancel()
    recorded = await desk.close()
    if serving.done() and (error := serving.exception()) is not None:
        raise error
    return recorded and serving.done()


async def _serve_stdio(desk: Desk, lines: _Lines) -> None:
    server = desk.server()
    try:
        # The SDK asks only that it can be iterated over.
        async with stdio_server(stdin=cast("anyio.AsyncFile[str]", lines)) as (incoming, outgoing):
            lines.answers = _Answers(outgoing.send, outgoing.aclose)
            await server.run(incoming, lines.answers, server.create_initialization_options())
    except* BrokenPipeError:
        pass  # nobody reads our answers any more: as if it had closed stdin


class _Answers:
    """The SDK's stream of answers, which remembers what is not answered yet."""

    def __init__(
        self,
        send: Callable[[SessionMessage], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._send = send
        self._close = close
        self._owed: set[str | int] = set()
        self._settled = asyncio.Event()
        self._settled.set()

    def owe(self, message: dict[str, Any]) -> None:
        """A request came, or was cancelled: then it is not answered."""
        id = message.get("id")
        if "method" in message and id is not None:
            self._owed.add(id)
            self._settled.clear()
        elif message.get("method") == "notifications/cancelled":
            self._settle((message.get("params") or {}).get("requestId"))

    async def settled(self) -> None:
        """Wait, within a bound, until everything is answered."""
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                await self._settled.wait()
        except TimeoutError:
            _log.warning("%d calls were not answered before the end", len(self._owed))

    async def send(self, item: SessionMessage, /) -> None:
        await self._send(item)
        if isinstance(item.message, JSONRPCResponse | JSONRPCError):
            self._settle(item.message.id)

    async def refuse(self, unread: Unread) -> None:
        error = ErrorData(code=unread.code, message=unread.reason)
        await self._send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=unread.id, error=error)))

    def _settle(self, id: Any) -> None:
        if isinstance(id, str | int):
            self._owed.discard(id)
        if not self._owed:
            self._settled.set()

    async def aclose(self) -> None:
        await self._close()

    async def __aenter__(self) -> _Answers:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()


class _Lines:
    """What the client wrote, line by line, as the SDK may read it; the rest is answered here."""

    answers: _Answers

    def __init__(self, source: _Input) -> None:
        self._source = source

    async def __aiter__(self) -> AsyncIterator[str]:
        async for line in self._source:
            if not line.strip():
                continue
            try:
                if len(line) > _LONGEST_LINE:
                    raise Unread(
                        None, INVALID_REQUEST, f"a line of more than {_LONGEST_LINE} bytes"
                    )
                data, message = passed(line)
            except Unread as unread:
                await self.answers.refuse(unread)
                continue
            self.answers.owe(message)
            yield data.decode()
        await self.answers.settled()


class _Input:
    """Lines of a descriptor of any kind. A thread of its own reads it, and dies with the process:
    an end on a signal waits for nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(4)
        self.ended = asyncio.Event()

    def end(self) -> None:
        """As if the input had ended here."""
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(b"")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._read, args=(loop,), name="effectfence-stdin", daemon=True
        ).start()
        begun = bytearray()
        while chunk := await self._chunks.get():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                yield bytes(begun) + end
                begun.clear()
            begun += rest[: max(0, _LONGEST_LINE + 1 - len(begun))]
        if begun:
            yield bytes(begun)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._hand_over(self._next(), loop):
            pass

    def _next(self) -> bytes:
        try:
            return os.read(self._descriptor, 1 << 18)
        except OSError:
            return b""

    def _hand_over(self, chunk: bytes, loop: asyncio.AbstractEventLoop) -> bool:
        """Wait until it is taken; whether there may be more."""
        putting = self._chunks.put(chunk)
        try:
            if not chunk:
                loop.call_soon_threadsafe(self.ended.set)
            asyncio.run_coroutine_threadsafe(putting, loop).result()
        except (RuntimeError, CancelledError):  # the loop has ended: nobody listens any more
            putting.close()
            return False
        return bool(chunk)
