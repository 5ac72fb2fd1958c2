"""Finds the tools: every style of declaration, names evaluated, handlers bound.

1. A name is taken where it is declared to an MCP server (a decorator, a registration call, a list
   that a tools/list handler answers with), never because some object has a `name`.
2. A declaration whose name is only known at run time is not dropped: it becomes an `Unseen`.
3. Places that could declare are found by words in the text; what they mean, by the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from effectfence.scan import hints, lower_javascript, lower_python, natives
from effectfence.scan.ir import Block, Function, Node
from effectfence.scan.machine import Call, Machine, OutOfSteps, within
from effectfence.scan.model import Place, Unseen
from effectfence.scan.program import Program
from effectfence.scan.tables import table
from effectfence.scan.values import (
    NOTHING,
    UNKNOWN,
    Const,
    Env,
    Fun,
    Kls,
    Rec,
    Seq,
    Sym,
    Value,
    alternatives,
    inside,
    text_of,
    texts,
)

_WORDS: Final = re.compile(
    rb"\b(?:tool|registerTool|register_tool|addTool|add_tool|addTools|add_tools|registerAppTool|setRequestHandler|"
    rb"list_tools|call_tool|on_list_tools|on_call_tool|from_openapi|from_fastapi|as_proxy|"
    rb"FastMCP|MCPServer|MCPTool|FastApiMCP|from_function|create_proxy|Tool|registerTools|register_tools|"
    rb"defineTool|createTool|defineTools|createMcpHandler)\b[\s]*(?:<[^;(){}]*>)?\s*(?:\(|\n|\[|extends|=)|"
    rb"(?:extends|\()\s*MCPTool\b|\bTools?Schema\b"
)
_MCP: Final = re.compile(
    rb"modelcontextprotocol|\bmcp\b|fastmcp|FastMCP|MCPServer|McpServer|setRequestHandler", re.I
)
_DEFINING: Final = re.compile(rb"(?:input_?schema|parameters)[\"']?\s*[:=]", re.I)
_NOT_MCP: Final = table(
    """langchain langchain_core langgraph strands agents crewai crewai_tools smolagents llama_index
    autogen autogen_core semantic_kernel agno ai @langchain/core langchain_community pydantic_ai
    haystack dspy @openai/agents livekit google.adk openai marvin controlflow @ai-sdk/openai
    @mastra/core @anthropic-ai/claude-agent-sdk"""
)
"""Their `tool` makes a tool of an agent in this process, not of an MCP server."""

_REGISTER: Final = table(
    """tool registerTool register_tool addTool add_tool registerAppTool Tool addTools add_tools
    from_function tool_plain registerTools"""
)
_PROXIES: Final[dict[str, tuple[str, str]]] = {
    "from_openapi": ("openapi", "tools are made from an OpenAPI description at run time"),
    "from_fastapi": ("openapi", "tools are made from a FastAPI application's routes at run time"),
    "as_proxy": ("remote", "tools are those of another MCP server, asked at run time"),
    "create_proxy": ("remote", "tools are those of another MCP server, asked at run time"),
    "FastApiMCP": ("openapi", "tools are made from a FastAPI application's routes at run time"),
    "import_openapi": ("openapi", "tools are made from an OpenAPI description at run time"),
}
_PROXY_WORDS: Final = re.compile(
    rb"(?<!def )(?<!class )\b(" + "|".join(_PROXIES).encode() + rb")\s*\("
)
_SERVES: Final = re.compile(
    rb"\bsetRequestHandler\s*\(|\bnew\s+McpServer\b|\b(?:FastMCP|MCPServer)\s*\(|tools/list"
)
_STEPS: Final = 600_000
_CALLED: Final = re.compile(rb"([A-Za-z_$][\w$]*)\s*\(")
_FARTHEST: Final = 4
"""calls from the top of a file to what declares"""
_MINIFIED: Final = 300
"""Letters a line, from which names are as short as they can be and say nothing."""
_MOST_FILLED: Final = 300
_LONGEST_FILLING: Final = 2_000
_BY_HAND: Final = 30_000


@dataclass(slots=True, eq=False)
class Declared:
    """A tool as it was declared."""

    name: str
    place: Place
    description: str = ""
    annotations: dict[str, bool] = field(default_factory=dict)
    handler: Fun | None = None
    how: str = "call"
    """call · decorator · listed (its code is found through a dispatcher)"""
    server: Env | None = None
    """where the handler that lists it was made: its dispatcher was made there too"""


@dataclass(slots=True)
class Declarations:
    tools: list[Declared] = field(default_factory=list)
    dispatchers: list[Fun] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    machine: Machine | None = None
    steps_left: int = 6_000_000
    """for following all tools together; then each gets the fewest"""
    nobody: dict[Fun, tuple[int, list[tuple[str, int]]]] = field(default_factory=dict)
    """what each dispatcher does with a name that no tool has"""


def find(program: Program) -> Declarations:
    """Every tool that the package declares."""
    return _Finder(program).run()


class _Finder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.out = Declarations()
        self.machine = Machine(program, self, _STEPS)
        self.machine.hot = self.is_hot
        self.out.machine = self.machine
        self.hits: dict[str, list[int]] = {}
        self.listers: list[Fun] = []
        self.decorators: dict[int, Call] = {}
        self.listed: list[Value] = []
        self._hot: dict[Function, bool] = {}
        self.nameless: dict[tuple[str, int], Unseen] = {}
        self.named_at: set[tuple[str, int]] = set()

    # --- the walk -----------------------------------------------------------------------------

    def run(self) -> Declarations:
        self._find_words()
        if self.hits:
            for path in sorted(self.hits):
                self._run_top(path)
            self._run_left()
            self._classes()
            self._fill()
            self._lists()
        seen: dict[tuple[str, str, int], Declared] = {}
        for tool in self.out.tools:
            seen.setdefault((tool.name, tool.place.file, tool.place.line), tool)
        self.out.tools = _without_doubles(list(seen.values()))
        self._proxies()
        if not (self.out.tools or self.out.unseen or self.nameless):
            self._nothing()
        self.out.unseen += [
            unseen for where, unseen in self.nameless.items() if where not in self.named_at
        ]
        return self.out

    def _proxies(self) -> None:
        """Whole servers made at run time, also where nobody was seen to come by."""
        told = {(unseen.place.file, unseen.place.line) for unseen in self.out.unseen}
        for path, source in sorted(self.program.sources.items()):
            for match in _PROXY_WORDS.finditer(source.text):
                line = source.text.count(b"\n", 0, match.start()) + 1
                node = self.program.root(path).descendant_for_byte_range(
                    match.start(), match.end(1)
                )
                if (path, line) not in told and "identifier" in node.type:
                    kind, says = _PROXIES[match[1].decode()]
                    self.out.unseen.append(Unseen(kind, says, Place(path, line)))

    def _nothing(self) -> None:
        """A server is built here, and none of its tools was recognised."""
        for path in sorted(self.hits):
            source = self.program.sources[path].text
            match = _SERVES.search(source)
            if match is not None:
                line = source.count(b"\n", 0, match.start()) + 1
                says = "an MCP server is built here, and no tool of it was recognised"
                self.out.unseen.append(Unseen("run-time", says, Place(path, line)))
                return

    def _find_words(self) -> None:
        """Where something may be declared, and everything that calls what may."""
        new: dict[str, list[int]] = {}
        for path, source in self.program.sources.items():
            found = [
                at.start() for at in _WORDS.finditer(source.text) if _declares(source.text, at)
            ]
            registers = re.search(rb"\.(?:tool|registerTool|addTool)\s*\(", source.text)
            if found and (source.language == "python" or registers or _MCP.search(source.text)):
                new[path] = found
        names: set[tuple[str, bytes]] = set()
        for _ in range(_FARTHEST):
            for path, offsets in new.items():
                self.hits[path] = sorted({*self.hits.get(path, ()), *offsets})
            fresh = self._names_around(new) - names
            names |= fresh
            new = self._calls_of(fresh) if fresh else {}
            if not new:
                return

    def _names_around(self, hits: dict[str, list[int]]) -> set[tuple[str, bytes]]:
        """The functions that stand around these places, with their files."""
        names: set[tuple[str, bytes]] = set()
        for path, offsets in hits.items():
            root = self.program.root(path)
            source = self.program.sources[path]
            shortest = 3 if len(source.text) > _MINIFIED * source.lines else 1
            for offset in offsets[:4000]:
                node = root.descendant_for_byte_range(offset, offset)
                while node is not None:
                    if node.type in _FUNCTION_NODES:
                        name = node.child_by_field_name("name")
                        if name is None and node.parent is not None:
                            name = node.parent.child_by_field_name("name")
                        text = name.text if name is not None else b""
                        if len(text) > shortest and text.isascii():
                            names.add((path, text))
                    node = node.parent
        return names

    def _calls_of(self, names: set[tuple[str, bytes]]) -> dict[str, list[int]]:
        """Where these are called: in their own file, and in those that do not define the name."""
        out: dict[str, list[int]] = {}
        far: dict[bool, set[bytes]] = {True: set(), False: set()}
        for path, name in names:
            if name not in _COMMON:
                far[self.program.sources[path].language == "python"].add(name)
        for path, source in self.program.sources.items():
            own = {name for where, name in names if where == path}
            others = far[source.language == "python"] - own
            wanted = own | {name for name in others if name in source.text}
            if not wanted:
                continue
            if others:
                defined = {name for name in wanted - own if _defines(source.text, name)}
                wanted -= defined
            known = set(self.hits.get(path, ()))
            found = [match.start() for match in _call_pattern(wanted).finditer(source.text)]
            if found and not known.issuperset(found):
                out[path] = found
        return out

    def is_hot(self, function: Function) -> bool:
        known = self._hot.get(function)
        if known is None:
            start, end = function.span
            known = within(self.hits.get(function.file, ()), (start, end))
            self._hot[function] = known
        return known

    def _run_top(self, path: str) -> None:
        module = self.program.module(path)
        env = self.machine.module_env(path)
        offsets = self.hits[path]
        for (start, end), lower in module.running:
            if not within(offsets, (start, end)):
                continue
            for statement in lower():
                self._statement(statement, env, path)

    def _statement(self, statement: Node, env: Env, path: str) -> None:
        kind = statement[0]
        self.machine.file = path
        try:
            if kind in ("def", "class"):
                name = statement[1].name
                value = env.vars.get(name) or self.machine.global_name(path, name)
                for one in alternatives(value):
                    self._revisit(one, statement, env)
            elif (
                kind == "assign"
                and statement[1][0] == "name"
                and statement[1][1] in (self.program.module(path).bindings)
            ):
                self.machine.global_name(path, statement[1][1])
            else:
                self.machine.statement(statement, env)
        except OutOfSteps:
            self._out_of_steps(path)
        except RecursionError:
            self.machine.met.add("depth")

    def _revisit(self, value: Value, statement: Node, env: Env) -> None:
        """A name that something else evaluated before: its functions are still to be run."""
        if isinstance(value, Fun):
            self.machine.made.append(value)
        elif not isinstance(value, Kls):
            self.machine.statement(statement, env)

    def _out_of_steps(self, path: str) -> None:
        self.machine.left = _BY_HAND
        self.out.unseen.append(
            Unseen("bounded", "declaring code is larger than is followed", Place(path, 1))
        )

    def _run_left(self) -> None:
        """Functions that could declare and that nobody was seen to call: as if they were."""
        for path in sorted(self.hits):
            self._functions_of(path)
        for _ in range(6):
            waiting = [
                fun
                for fun in self.machine.made
                if fun.function not in self.machine.entered and self.is_hot(fun.function)
            ]
            if not waiting:
                return
            called = self._called_names(waiting)
            roots = [fun for fun in waiting if fun.function.name not in called] or waiting
            for fun in roots:
                if fun.function in self.machine.entered:
                    continue
                self._run_unknown(fun)

    def _functions_of(self, path: str) -> None:
        module = self.program.module(path)
        for name, statements in list(module.bindings.items()):
            for statement in statements:
                if statement[0] in ("def", "class") and within(self.hits[path], statement[1].span):
                    value = self.machine.global_name(path, name)
                    for one in alternatives(value):
                        if isinstance(one, Fun):
                            self.machine.made.append(one)

    def _called_names(self, waiting: list[Fun]) -> set[str]:
        """The names that some of these call, of others of these."""
        out: set[str] = set()
        for fun in waiting:
            source = self.program.sources[fun.function.file].text
            called = {name.decode() for name in _CALLED.findall(source, *fun.function.span)}
            out |= called - {fun.function.name}
        return {fun.function.name for fun in waiting if len(fun.function.name) > 1} & out

    def _run_unknown(self, fun: Fun) -> None:
        if fun.this is None and fun.owner is not None:
            fun.this = self.machine.instance(fun.owner)
        args, named = self.machine.unknown_arguments(fun)
        self.machine.left = max(self.machine.left, _BY_HAND)
        try:
            self.machine.enter(fun, args, named, fun.function.line, fun.function.file)
        except OutOfSteps:
            self._out_of_steps(fun.function.file)
        except RecursionError:
            self.machine.met.add("depth")

    # --- what the machine meets -----------------------------------------------------------------

    def follows(self, machine: Machine, function: Function) -> bool:
        if self.is_hot(function):
            return True
        return len(machine.frames) < 6 and machine.left > 2_000

    def left_on(self, machine: Machine, test: Node, then: Block, env: Env) -> None:
        return

    def decorated(self, machine: Machine, decorator: Call, function: Fun) -> None:
        names = [part for part in decorator.callee.path if part not in ("()", "[]")]
        last = names[-1] if names else ""
        if last in ("call_tool", "callTool") and len(names) > 1:
            self.out.dispatchers.append(function)
        elif last in ("list_tools", "listTools") and len(names) > 1:
            self.listers.append(function)
        elif last in ("tool", "Tool", "mcp_tool", "tool_plain") and not _other_framework(decorator):
            if last == "tool" and len(names) == 1 and decorator.callee.root == "global":
                return
            self._decorated_tool(decorator, function)

    def _decorated_tool(self, decorator: Call, function: Fun, by_hand: Place | None = None) -> None:
        function = function.wraps or function
        config = decorator.args[0] if decorator.args else None
        fields: dict[str, Value] = dict(decorator.named)
        for one in alternatives(config) if config is not None else ():
            if isinstance(one, Rec):
                fields = {**one.fields, **fields}
        name = fields.get("name")
        if name is None and config is not None and not isinstance(config, Rec):
            name = config
        named = name is not None and name != NOTHING
        if by_hand and not named and self._made_in_a_loop(function):
            self._nameless(by_hand, "tools are made at run time")
            return
        self._declare(
            name if name is not None and named else Const(function.function.name),
            Place(function.function.file, function.function.line),
            fields,
            function,
            "decorator",
            by_hand,
        )

    def _made_in_a_loop(self, function: Fun) -> bool:
        """A function made by a function, once for each of nobody knows what."""
        return bool(self.machine.loops) and function.env.parent is not None

    def called(self, machine: Machine, call: Call) -> Value | None:
        name = call.name
        if call.callee.root == "tool":
            return self._decorator_called(call)
        if name in _PROXIES:
            kind, says = _PROXIES[name]
            self.out.unseen.append(Unseen(kind, says, Place(call.file, call.line)))
        elif name == "setRequestHandler":
            self._request_handler(call)
        elif name in ("Server", "LowLevelServer") and (
            "on_call_tool" in call.named or "on_list_tools" in call.named
        ):
            self._take(call.named.get("on_call_tool"), self.out.dispatchers)
            self._take(call.named.get("on_list_tools"), self.listers)
        elif name in ("FastMCP", "MCPServer") and "tools" in call.named:
            for item in natives.iterated(call.named["tools"]) or ():
                self._declare_item(item, call)
        elif name in ("Tool", "ToolAnnotations") and call.callee.path:
            return self._constructed(call)
        elif name in ("list_tools", "listTools") and call.args and len(call.callee.path) > 1:
            self._take(call.args[0], self.listers)
        elif name in ("call_tool", "callTool") and call.args and isinstance(call.args[0], Fun):
            self._take(call.args[0], self.out.dispatchers)
        elif name == "()" and call.callee.path[-2:-1] in (("call_tool",), ("list_tools",)):
            where = self.out.dispatchers if call.callee.path[-2] == "call_tool" else self.listers
            self._take(call.args[0] if call.args else None, where)
        elif name in _REGISTER and not _other_framework(call):
            return self._registered(call)
        return None

    def _take(self, value: Value | None, where: list[Fun]) -> None:
        for one in alternatives(value) if value is not None else ():
            if isinstance(one, Fun) and not any(
                f.function is one.function and f.env is one.env for f in where
            ):
                where.append(one)

    def _constructed(self, call: Call) -> Value | None:
        """`Tool(name=…)`, `ToolAnnotations(…)`: kept as records."""
        if not call.named and not call.args:
            return None
        fields = dict(call.named)
        made_by = ".".join(call.callee.path)
        if call.args and isinstance(call.args[0], Rec):
            fields = {**call.args[0].fields, **fields}
        elif call.args and call.name == "Tool":
            for key, value in zip(("name", "description", "inputSchema"), call.args, strict=False):
                fields.setdefault(key, value)
        return Rec(fields, "**" in fields, line=call.line, file=call.file, made_by=made_by)

    def _request_handler(self, call: Call) -> None:
        if len(call.args) < 2:
            return
        named = _schema_name(call.args[0]) or self._schema_by_text(call)
        if named == "CallTool":
            self._take(call.args[1], self.out.dispatchers)
        elif named == "ListTools":
            self._take(call.args[1], self.listers)
            if not any(isinstance(one, Fun) for one in alternatives(call.args[1])):
                self.out.unseen.append(
                    Unseen(
                        "handler",
                        "what answers tools/list could not be found",
                        Place(call.file, call.line),
                    )
                )

    def _schema_by_text(self, call: Call) -> str:
        """In a bundle that holds its SDK too: what the schema's own definition says."""
        asked = self.machine.asked
        if not asked or not asked[2] or asked[2][0][0] != "name":
            return ""
        name = re.escape(asked[2][0][1].encode())
        source = self.program.sources[call.file].text
        pattern = rb"(?<![\w$.])" + name + rb"\s*=[^;]{0,160}?[\"']tools/(list|call)[\"']"
        match = re.search(pattern, source)
        return {b"list": "ListTools", b"call": "CallTool"}[match[1]] if match else ""

    def _registered(self, call: Call) -> Value | None:
        functions = [
            (at, one)
            for at, arg in enumerate(call.args)
            for one in alternatives(arg)
            if isinstance(one, Fun)
        ]
        place = Place(call.file, call.line)
        if call.name == "from_function":
            return self._from_function(call)
        if call.name in ("tool", "Tool") and not functions and not _looks_registered(call):
            if call.callee.root == "global" and len(call.callee.path) == 1:
                return None
            return self._decorator(call)
        if call.name in ("addTools", "add_tools", "registerTools"):
            for arg in call.args:
                for item in natives.iterated(arg) or ():
                    self._declare_item(item, call)
            return None
        if not call.args and not call.named:
            return None
        texted = [at for at, arg in enumerate(call.args[:2]) if texts(arg)]
        first = call.args[0] if call.args else None
        if call.name == "registerAppTool" and len(call.args) > 1:
            first = call.args[1]
        elif call.name in ("addTool", "add_tool") and isinstance(first, Rec):
            self._declare_item(first, call)
            return None
        fields = dict(call.named)
        for arg in call.args:
            for one in alternatives(arg):
                if isinstance(one, Rec) and not one.kind:
                    fields = {**_config_fields(one), **fields}
        if len(call.args) > 2 and texts(call.args[1]) and texted:
            fields.setdefault("description", call.args[1])
        if call.callee.root == "unknown" and not call.callee.path[:-1]:
            return None
        functions = [(at, one.wraps or one) for at, one in functions]
        if functions and functions[0][0] == 0 and not texted:  # Python: add_tool(function)
            self._declare(
                fields.get("name") or Const(functions[0][1].function.name),
                Place(functions[0][1].function.file, functions[0][1].function.line),
                fields,
                functions[0][1],
            )
            return functions[0][1]
        name = fields.get("name") if first is None or isinstance(first, Rec) else first
        handler = functions[-1][1] if functions else self._callable(call, fields)
        if handler is None and not _looks_registered(call):
            return None
        if call.name == "tool" and call.file.endswith(".py") and handler is None:
            return self._decorator(call)
        self._declare(name or UNKNOWN, place, fields, handler)
        return NOTHING

    def _callable(self, call: Call, fields: dict[str, Value]) -> Fun | None:
        for key in ("handler", "execute", "callback", "cb", "run", "call", "fn", "invoke"):
            for one in alternatives(fields[key]) if key in fields else ():
                if isinstance(one, Fun):
                    return one
        return None

    def _from_function(self, call: Call) -> Value | None:
        function = call.args[0] if call.args else call.named.get("fn")
        for one in alternatives(function) if function is not None else ():
            if isinstance(one, Fun):
                fields = {"name": Const(one.function.name), "handler": one, **call.named}
                return Rec(fields, line=call.line, file=call.file, made_by="Tool.from_function")
        return None

    def _decorator(self, call: Call) -> Value:
        """`mcp.tool(…)`, before the function it decorates is known."""
        key = len(self.decorators)
        self.decorators[key] = call
        return Sym("tool", (str(key),))

    def _decorator_called(self, call: Call) -> Value | None:
        decorator = self.decorators.get(int(call.callee.path[0])) if call.callee.path else None
        if decorator is None or not call.args:
            return None
        place = Place(call.file, call.line)
        for one in alternatives(call.args[0]):
            if isinstance(one, Fun):
                self._decorated_tool(decorator, one, place)
                return one
        self._nameless(Place(call.file, call.line), "the function is only known at run time")
        return None

    def _declare_item(self, item: Value, call: Call) -> None:
        for one in alternatives(item):
            place = Place(call.file, call.line)
            if isinstance(one, Fun):
                where = Place(one.function.file, one.function.line)
                self._declare(Const(one.function.name), where, {}, one)
            elif isinstance(one, Rec):
                if one.line:
                    place = Place(one.file or call.file, one.line)
                fields = dict(one.fields)
                if one.kind is not None:
                    fields = {
                        key: self.machine.attribute(one, key)
                        for key in (
                            "name",
                            "description",
                            "annotations",
                            "execute",
                            "handler",
                            "run",
                        )
                    }
                name = fields.get("name", UNKNOWN)
                if isinstance(name, Sym) and not texts(name):
                    tool = fields.get("tool") or fields.get("definition") or fields.get("schema")
                    if isinstance(tool, Rec):
                        fields = {**tool.fields, **fields, "name": tool.fields.get("name", UNKNOWN)}
                        name = fields["name"]
                self._declare(name, place, fields, self._callable(call, fields))
            else:
                self._nameless(place, "the tool is only known at run time")

    # --- declaring ------------------------------------------------------------------------------

    def _declare(
        self,
        name: Value,
        place: Place,
        fields: dict[str, Value],
        handler: Fun | None,
        how: str = "call",
        by_hand: Place | None = None,
    ) -> None:
        names = [text for text in texts(name) if _plausible(text)]
        if not names or any("{}" in text for text in names):
            names = [text for text in names if "{}" not in text] or _prefixed(names)
        if not names:
            says = "a tool's name is only known at run time"
            if handler is not None and self._hands_on(handler):
                says = "a tool of another MCP server is handed on, its name known at run time"
            self._nameless(by_hand or place, says)
            return
        self.named_at.add((place.file, place.line))
        description = next(iter(texts(fields.get("description"))), "")
        if not description and handler is not None:
            description = handler.function.documentation
        for one in names:
            self.out.tools.append(
                Declared(
                    one,
                    place,
                    description,
                    hints.declared(self.machine, fields),
                    handler,
                    how if handler is not None else "listed",
                )
            )

    def _nameless(self, place: Place, says: str) -> None:
        loops = self.machine.loops
        self.nameless.setdefault(
            (place.file, place.line),
            Unseen("run-time", f"{says}{' (declared in a loop)' if loops else ''}", place),
        )

    # --- registries that are filled while files load --------------------------------------------

    def _fill(self) -> None:
        """`registry.add(…)` at the top of files that a dispatcher's file leads to."""
        waiting = [fun.function.file for fun in (*self.listers, *self.out.dispatchers)]
        seen: set[str] = set()
        while waiting and len(seen) < _MOST_FILLED:
            path = waiting.pop(0)
            if path in seen:
                continue
            seen.add(path)
            module = self.program.module(path)
            for what in (*module.imports.values(), *module.star_imports):
                found = self.program.resolve(path, what)
                if found is not None:
                    waiting.append(found[0])
        for path in sorted(seen):
            self._fill_from(path)

    def _fill_from(self, path: str) -> None:
        env = self.machine.module_env(path)
        offsets = self.hits.get(path, ())
        for (start, end), lower in self.program.module(path).running:
            if end - start > _LONGEST_FILLING or within(offsets, (start, end)):
                continue
            for statement in lower():
                if statement[0] in ("expr", "loop"):
                    self.machine.left = max(self.machine.left, _BY_HAND)
                    self._statement(statement, env, path)

    # --- classes that are tools -----------------------------------------------------------------

    def _classes(self) -> None:
        """`class X extends MCPTool { name = …; execute() {…} }`."""
        for path in sorted(self.hits):
            if not re.search(rb"(?:extends\s+|\()\s*MCPTool\b", self.program.sources[path].text):
                continue
            module = self.program.module(path)
            for name, statements in list(module.bindings.items()):
                if not any(s[0] == "class" for s in statements):
                    continue
                for kls in alternatives(self.machine.global_name(path, name)):
                    if isinstance(kls, Kls) and any(
                        isinstance(base, Sym) and "MCPTool" in base.path
                        for base in self.machine.bases(kls)
                    ):
                        self._class_tool(kls)

    def _class_tool(self, kls: Kls) -> None:
        this = self.machine.instance(kls)
        fields = {
            key: self.machine.attribute(this, key) for key in ("name", "description", "annotations")
        }
        handler = next(
            (
                found
                for key in ("execute", "run", "handle")
                for found in (self.machine.attribute(this, key),)
                if isinstance(found, Fun)
            ),
            None,
        )
        if handler is not None:
            place = Place(kls.made.file, kls.made.line)
            self._declare(fields["name"], place, fields, handler)

    # --- lists ------------------------------------------------------------------------------------

    def _lists(self) -> None:
        """What the handlers of tools/list answer with."""
        unresolved: list[Fun] = []
        for lister in self.listers:
            args, named = self.machine.unknown_arguments(lister)
            self.machine.left = max(self.machine.left, _BY_HAND)
            value: Value = UNKNOWN
            try:
                value = self.machine.enter(
                    lister, args, named, lister.function.line, lister.function.file
                )
            except (OutOfSteps, RecursionError):
                self.machine.met.add("steps")
            if not self._from_list(value, lister):
                unresolved.append(lister)
        dispatched = bool(self.out.dispatchers)
        known = {tool.name for tool in self.out.tools}
        if (unresolved or (dispatched and not self.listers)) and dispatched:
            found = [tool for tool in self._definitions() if tool.name not in known]
            self.out.tools += found
            if found:
                unresolved = []
        for lister in unresolved:
            place = Place(lister.function.file, lister.function.line)
            says = "what tools/list answers is only known at run time"
            if self._asks_elsewhere(lister):
                says = "what tools/list answers comes from another MCP server"
                self.out.unseen.append(Unseen("remote", says, place))
            else:
                self.out.unseen.append(Unseen("run-time", says, place))

    def _hands_on(self, handler: Fun) -> bool:
        source = self.program.sources[handler.function.file].text
        start, end = handler.function.span
        return bool(re.search(rb"\.(?:callTool|call_tool)\s*\(", source[start:end]))

    def _asks_elsewhere(self, lister: Fun) -> bool:
        source = self.program.sources[lister.function.file].text
        body = source[lister.function.span[0] : lister.function.span[1]]
        return bool(re.search(rb"\.(?:listTools|list_tools)\s*\(|tools/list", body))

    def _from_list(self, value: Value, lister: Fun) -> bool:
        """Declare what a list holds; whether all of it could be read."""
        found = complete = False
        for one in alternatives(value):
            tools: Value = one
            if isinstance(one, Rec):
                tools = one.fields.get("tools", UNKNOWN)
            for listed in alternatives(tools):
                if listed == NOTHING:
                    continue
                if isinstance(listed, Seq) and (listed.items or not listed.open):
                    complete = not listed.open
                    for item in listed.items:
                        found = self._listed(item, lister) or found
                        complete = complete and not isinstance(item, Sym)
        return found and complete

    def _listed(self, item: Value, lister: Fun) -> bool:
        found = False
        for one in alternatives(item):
            if not isinstance(one, Rec):
                continue
            fields = one.fields
            if one.kind is not None:
                fields = {
                    key: self.machine.attribute(one, key)
                    for key in ("name", "description", "annotations", "inputSchema", "input_schema")
                }
            elif one.fields.get("name") is None:
                inner = one.fields.get("definition") or one.fields.get("tool")
                if isinstance(inner, Rec):
                    fields = inner.fields
            place = Place(one.file or lister.function.file, one.line or lister.function.line)
            handler = self._callable(Call(UNKNOWN, [], {}, "", 0), fields)
            before = len(self.out.tools)
            self._declare(fields.get("name", UNKNOWN), place, fields, None)
            for tool in self.out.tools[before:]:
                tool.handler, tool.server = handler, lister.env
                found = True
        return found

    # --- definitions read by their shape ---------------------------------------------------------

    def _definitions(self) -> Iterator[Declared]:
        """Objects with a name and an input schema, where the list itself could not be followed."""
        for path, source in sorted(self.program.sources.items()):
            seen: set[int] = set()
            for match in _DEFINING.finditer(source.text):
                node = self.program.root(path).descendant_for_byte_range(
                    match.start(), match.start() + 1
                )
                node = _enclosing_definition(node)
                if node is None or node.start_byte in seen:
                    continue
                seen.add(node.start_byte)
                yield from self._definition(path, node)

    def _definition(self, path: str, node: Any) -> Iterator[Declared]:
        python = self.program.sources[path].language == "python"
        lowered = (lower_python if python else lower_javascript).lower_expression(path, node)
        env = Env(self.machine.module_env(path), path, is_function=True)
        try:
            value = self.machine.value(lowered, env)
        except (OutOfSteps, RecursionError):
            return
        for one in alternatives(value):
            if not isinstance(one, Rec):
                continue
            name = text_of(one.fields.get("name"))
            if name and _plausible(name):
                yield Declared(
                    name,
                    Place(path, int(node.start_point[0]) + 1),
                    next(iter(texts(one.fields.get("description"))), ""),
                    hints.declared(self.machine, one.fields),
                    None,
                    "listed",
                )


_FUNCTION_NODES: Final = table(
    """function_definition function_declaration method_definition arrow_function
    function_expression generator_function_declaration public_field_definition"""
)
_COMMON: Final = frozenset(
    (
        b"constructor",
        b"__init__",
        b"main",
        b"run",
        b"start",
        b"init",
        b"setup",
        b"get",
        b"set",
        b"tool",
        b"wrapper",
        b"decorator",
        b"then",
        b"map",
        b"list_tools",
        b"call_tool",
        b"handler",
        b"inner",
        b"wrapped",
        b"execute",
        b"connect",
        b"serve",
        b"create",
        b"add",
        b"register_",
        b"fn",
        b"filter",
        b"push",
        b"forEach",
        b"use",
        b"parse",
        b"call",
        b"apply",
        b"on",
        b"addTool",
        b"registerTool",
        b"add_tool",
        b"lifespan",
        b"test",
        b"handle",
        b"process",
        b"update",
    )
)


def _declares(text: bytes, match: re.Match[bytes]) -> bool:
    """Whether a word may declare: `tool` at the end of a line only as a decorator."""
    if match[0].strip() != b"tool":
        return True
    begins = text.rfind(b"\n", 0, match.start()) + 1
    return text[begins : match.start()].lstrip().startswith(b"@")


def _defines(text: bytes, name: bytes) -> bool:
    return bool(re.search(rb"\b(?:def|function)\s+" + re.escape(name) + rb"\b", text))


def _call_pattern(names: set[bytes]) -> re.Pattern[bytes]:
    """Where one of these is called. A common name counts only as a bare call."""
    own = b"|".join(re.escape(name) for name in sorted(names - _COMMON)) or b"(?!)"
    bare = b"|".join(re.escape(name) for name in sorted(names & _COMMON)) or b"(?!)"
    return re.compile(
        rb"(?<![\w$])(?<!function )(?<!def )(?:" + own + rb")(?=\s*\()|"
        rb"(?<![\w$.])(?<!function )(?<!def )(?:" + bare + rb")(?=\s*\()"
    )


def _config_fields(record: Rec) -> dict[str, Value]:
    known = (
        "name",
        "description",
        "annotations",
        "handler",
        "execute",
        "title",
        "callback",
        "cb",
        "readOnlyHint",
        "destructiveHint",
        "idempotentHint",
        "openWorldHint",
        "run",
    )
    return {key: record.fields[key] for key in known if key in record.fields}


def _other_framework(call: Call) -> bool:
    if call.callee.root != "module" or not call.callee.path:
        return False
    first = call.callee.path[0]
    return first in _NOT_MCP or first.split(".")[0] in _NOT_MCP or first.split("/")[0] in _NOT_MCP


def _looks_registered(call: Call) -> bool:
    """A registration even where its function is not known: it has a name and a configuration."""
    if call.name in ("registerTool", "registerAppTool", "register_tool"):
        return len(call.args) >= 2
    if call.name in ("addTool", "add_tool"):
        return bool(call.args)
    if call.name == "tool" and not call.file.endswith(".py"):
        return len(call.args) >= 3 and call.callee.root != "global"
    return False


def _schema_name(value: Value) -> str:
    """`CallToolRequestSchema`, under whatever name it was imported; `"tools/call"`."""
    for one in alternatives(value):
        if isinstance(one, Sym) and one.path:
            for name in ("CallTool", "ListTools"):
                if one.path[-1].startswith(name):
                    return name
        for text in texts(one):
            if text in ("tools/call", "tools/list"):
                return "CallTool" if text == "tools/call" else "ListTools"
        if isinstance(one, Rec | Sym):
            for key, part in inside(one):
                if key in ("method", "value") and texts(part):
                    text = texts(part)[0]
                    if text in ("tools/call", "tools/list"):
                        return "CallTool" if text == "tools/call" else "ListTools"
    return ""


def _plausible(name: str) -> bool:
    return (
        bool(name)
        and len(name) <= 128
        and "\n" not in name
        and name.strip() == name
        and (" " not in name or len(name) < 40)
    )


def _prefixed(names: list[str]) -> list[str]:
    """`{prefix}read_graph`, where only the prefix is for run time to say."""
    out: list[str] = []
    for name in names:
        rest = name.removeprefix("{}")
        if "{}" not in rest and len(rest) > 2 and re.match(r"^[A-Za-z]", rest.lstrip("_-./")):
            out.append(rest.lstrip("_-./"))
    return out


def _without_doubles(tools: list[Declared]) -> list[Declared]:
    """One tool of a name and server: `cjs` beside `esm`, a list beside its registration."""
    out: list[Declared] = []
    by_name: dict[str, Declared] = {}
    for tool in tools:
        known = by_name.get(tool.name)
        if known is None:
            by_name[tool.name] = tool
            out.append(tool)
            continue
        if known.handler is None and tool.handler is not None:
            out[out.index(known)] = by_name[tool.name] = tool
            tool.annotations = tool.annotations or known.annotations
        else:
            known.annotations = known.annotations or tool.annotations
            known.description = known.description or tool.description
    return out


def _enclosing_definition(node: Any) -> Any:
    for _ in range(6):
        if node is None:
            return None
        if node.type in ("object", "dictionary"):
            return node if _has_name(node) else None
        if node.type == "call" and node.child_by_field_name("arguments") is not None:
            return node if _has_name(node.child_by_field_name("arguments")) else None
        node = node.parent
    return None


def _has_name(node: Any) -> bool:
    for child in node.named_children:
        key = child.child_by_field_name("key") or child.child_by_field_name("name")
        if key is not None and key.text.strip(b"\"'") == b"name":
            return True
    return False
