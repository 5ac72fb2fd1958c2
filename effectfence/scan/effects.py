"""From a tool to what it writes: runs its handler on the machine and takes down every write.

1. A write belongs to the tool whose handler reached it, with the path it was reached by.
2. A write that is reached by several ways is told once, by its shortest path.
3. What keeps house (a token stored, a log written, a cache filled) is not an effect of the tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from effectfence.scan import guards, retries
from effectfence.scan.declared import Declarations, Declared
from effectfence.scan.ir import Block, Function, Node
from effectfence.scan.machine import DECLARES, Call, Frame, Machine, OutOfSteps
from effectfence.scan.model import Guard, Place, Repeats, Retry, Step, Unseen, Write
from effectfence.scan.program import Program
from effectfence.scan.tables import table
from effectfence.scan.values import (
    NOTHING,
    Const,
    Env,
    Fun,
    Rec,
    Sym,
    Value,
    alternatives,
    syms,
    texts,
)
from effectfence.scan.words import about_money, meaning, words
from effectfence.scan.writes import ASKS, Written, classify

_STEPS: Final = 40_000
_FEWEST_STEPS: Final = 10_000
_MOST_DISPATCHERS: Final = 8
_NO_TOOL: Final = "no such tool"
_HOUSEKEEPING: Final = table(
    """auth authenticate authorize token tokens credentials credential cache log logger logging
    login oauth session telemetry metrics track config settings init initialize setup ensure
    refresh trace load cleanup audit analytics history debug temp tmp lock"""
)
_LETS_IN: Final = table(
    """auth authenticate authorize credential credentials login oauth authentication authorization
    relogin reauth"""
)
"""Being let in is no effect of a tool, unless that is what the tool is for."""
_KEEPING_KINDS: Final = frozenset(("file", "key-value", "sql"))


class Effects:
    """The writes of one tool (the machine's listener)."""

    def __init__(self, program: Program, declared: Declared) -> None:
        self.program = program
        self.declared = declared
        self.writes: list[Write] = []
        self.unseen: list[Unseen] = []
        self.checks: list[tuple[int, Guard]] = []
        self.reads_only: list[int] = []
        self.optional_inputs: set[str] = set()
        self.calls: list[tuple[str, int]] = []
        self.lost: Place | None = None
        """where all of its input was handed to nobody knows what"""
        self.outside: list[tuple[str, Place]] = []

    # --- listening ----------------------------------------------------------------------------

    def follows(self, machine: Machine, function: Function) -> bool:
        return True

    def decorated(self, machine: Machine, decorator: Call, function: Fun) -> None:
        return

    def left_on(self, machine: Machine, test: Node, then: Block, env: Env) -> None:
        if not machine.frames:
            return
        found = guards.of_test(machine, test, then, env)
        if found is not None:
            self.checks.append((len(machine.frames), found))
            if found.kind == "dedupe":  # taking the claim is not what it guards
                self.writes = [one for one in self.writes if one.place != found.place]
        if _admits_selects_only(test):
            self.reads_only.append(len(machine.frames))

    def called(self, machine: Machine, call: Call) -> Value | None:
        self.calls.append((call.file, call.line))
        name = call.name
        if name in DECLARES or name in ("Tool", "ToolAnnotations"):
            return NOTHING
        if name in ("callTool", "call_tool") and call.callee.root != "global":
            self.unseen.append(
                Unseen(
                    "proxy",
                    "the call is handed on to another MCP server",
                    Place(call.file, call.line),
                )
            )
            return None
        found = classify(call)
        if found is not None:
            self._written(machine, call, found)
        elif call.callee.root == "unknown" and Sym("input") in call.args:
            self.lost = self.lost or Place(call.file, call.line)
        return None

    # --- taking down ---------------------------------------------------------------------------

    def _written(self, machine: Machine, call: Call, found: Written) -> None:
        if found.what in ("kill()", "terminate()") and "after an error" in machine.when:
            return
        if found.kind == "sql" and found.verb == "given" and self.reads_only:
            return
        unknown = found.kind == "process" and found.repeats == "depends" and found.verb != "given"
        if unknown and meaning(self.declared.name) == "read":
            return
        path = self._path(machine, call)
        if found.verb == ASKS:
            if meaning(self.declared.name) not in ("effect", "same"):
                return
            found.verb = "POST"
        if found.verb == "POST" and self._asks_by_post(found, path):
            return
        if self._keeps_house(machine, call, found, path):
            return
        repeats, because = self._judge(found, path)
        kept = [guard for depth, guard in self.checks if depth <= len(machine.frames)]
        own = list(guards.of_call(machine, call, found.kind, found.verb))
        place = Place(call.file, call.line)
        place = self._where_asked(machine, found, call, place)
        write = Write(
            found.kind,
            found.what,
            place,
            repeats,
            because,
            path,
            " and ".join(dict.fromkeys(machine.when))[:160],
            tuple(dict.fromkeys([*own, *kept])),
            tuple(dict.fromkeys(self._retries(machine, call))),
            about_money(self.declared.name, found.what),
            found.library,
        )
        self._add(write)

    def _where_asked(self, machine: Machine, found: Written, call: Call, place: Place) -> Place:
        """Where a request was given its verb, or a function what to call: further out than where
        all requests are sent."""
        for frame in reversed(machine.frames):
            if not _was_given(frame, found, call):
                return place
            place = Place(frame.file, frame.line)
        return place

    def _add(self, write: Write) -> None:
        for at, known in enumerate(self.writes):
            if known.place == write.place and known.what == write.what:
                if len(write.path) < len(known.path):
                    write.when = known.when if known.when != write.when else write.when
                    self.writes[at] = write
                return
        if len(self.writes) < 60:
            self.writes.append(write)

    def _path(self, machine: Machine, call: Call) -> tuple[Step, ...]:
        steps = [Step(self.declared.name, self.declared.place)]
        for frame in machine.frames:
            function = frame.function
            step = Step(function.name, Place(function.file, function.line))
            if function.name and step.place != steps[-1].place and step.name != "__init__":
                steps.append(step)
        return tuple(steps[:12])

    def _keeps_house(
        self, machine: Machine, call: Call, found: Written, path: tuple[Step, ...]
    ) -> bool:
        if (
            found.kind == "file"
            and meaning(self.declared.name) in ("read", None)
            and not any(sym.root == "input" for arg in call.args for sym in syms(arg))
        ):
            return True
        own = set(words(self.declared.name))
        return any(_keeps(step.name, own, found.kind) for step in path[1:])

    def _asks_by_post(self, found: Written, path: tuple[Step, ...]) -> bool:
        """A tool that reads, through an API that takes its questions as `POST`."""
        if meaning(self.declared.name) != "read":
            return False
        parts = [part for part in found.what.split("/")[1:] if part.strip("…{}")]
        names = [*parts, *(step.name for step in path[1:])]
        return not any(meaning(name) in ("effect", "same") for name in names if not _sends(name))

    def _judge(self, found: Written, path: tuple[Step, ...]) -> tuple[Repeats, str]:
        """A `POST` says little by itself; the names on its way say what it is for."""
        if found.kind != "http" or found.verb != "POST":
            return found.repeats, found.because
        for step in [path[0], *reversed(path[1:])]:
            said = meaning(step.name)
            if said == "same":
                return "same", f"POST, and `{step.name}` leaves the same state behind"
            if said == "effect":
                return "effect", found.because
        return found.repeats, found.because

    def _retries(self, machine: Machine, call: Call) -> Iterable[Retry]:
        yield from retries.around(machine, self._source_line)
        if retries.of_receiver(call.callee):
            yield Retry("library", call.callee.dotted[:60], Place(call.file, call.line))

    def _source_line(self, file: str, line: int) -> str:
        source = self.program.sources.get(file)
        if source is None or not line:
            return ""
        lines = source.text.split(b"\n", line)
        return lines[line - 1][:300].decode("utf-8", "replace") if len(lines) >= line else ""


_SENDING: Final = table(
    """post put patch delete request requests send call api fetch http rpc do make execute run async
    json raw perform rest client invoke wrapper retry with cb handler fn graphql query"""
)


def _sends(name: str) -> bool:
    """A function through which all requests go, reading or not."""
    return set(words(name)) <= _SENDING


def _keeps(name: str, own: set[str], kind: str) -> bool:
    """Whether a function on the way is there for the program itself, by its name."""
    parts = set(words(name))
    if parts & _LETS_IN and not own & _LETS_IN:
        return True
    if not parts & _HOUSEKEEPING or parts & own & _HOUSEKEEPING:
        return False
    return kind in _KEEPING_KINDS or meaning(name) in (None, "read")


def _was_given(frame: Frame, found: Written, call: Call) -> bool:
    """Whether a function got that verb, or what it calls, from who called it."""
    verb = found.verb if found.kind == "http" else "\0"
    for parameter in frame.function.parameters:
        value = frame.arguments.vars.get(parameter.name)
        for one in alternatives(value) if value is not None else ():
            if one == call.callee or any(text.upper() == verb for text in texts(one)):
                return True
            if isinstance(one, Rec) and any(
                text.upper() == verb for text in texts(one.fields.get("method"))
            ):
                return True
    return False


# --- running --------------------------------------------------------------------------------------


def follow(
    program: Program, declarations: Declarations, declared: Declared
) -> tuple[Effects, Place | None]:
    """The writes of one tool, and where its code begins; `None`: it was not found."""
    effects = Effects(program, declared)
    if declared.handler is not None:
        handler = declared.handler
        _run(program, declarations, effects, handler, *_handler_arguments(effects, handler))
        place = Place(handler.function.file, handler.function.line)
        return effects, place
    bound: Place | None = None
    for dispatcher in _near(declarations.dispatchers, declared):
        tried = Effects(program, declared)
        steps = _run(
            program,
            declarations,
            tried,
            dispatcher,
            *_dispatched_arguments(dispatcher, declared.name),
        )
        if (steps, tried.calls) != _nobody(program, declarations, dispatcher):
            effects.writes += tried.writes
            effects.unseen += tried.unseen
            effects.lost = tried.lost
            bound = Place(dispatcher.function.file, dispatcher.function.line)
            break
    return effects, bound


def _nobody(
    program: Program, declarations: Declarations, dispatcher: Fun
) -> tuple[int, list[tuple[str, int]]]:
    """What a dispatcher does with a name that no tool has."""
    known = declarations.nobody.get(dispatcher)
    if known is None:
        nobody = Effects(program, Declared(_NO_TOOL, Place("", 0)))
        steps = _run(
            program, declarations, nobody, dispatcher, *_dispatched_arguments(dispatcher, _NO_TOOL)
        )
        known = declarations.nobody[dispatcher] = (steps, nobody.calls)
    return known


def _near(dispatchers: list[Fun], declared: Declared) -> list[Fun]:
    """Those of its own server first, then those of its file; a few of the others."""
    own = [fun for fun in dispatchers if fun.env is declared.server]
    others = [fun for fun in dispatchers if fun.env is not declared.server]
    others.sort(key=lambda fun: fun.function.file != declared.place.file)
    return [*own, *others][:_MOST_DISPATCHERS]


def _run(
    program: Program,
    declarations: Declarations,
    effects: Effects,
    handler: Fun,
    args: list[Value],
    named: dict[str, Value],
) -> int:
    steps = max(_FEWEST_STEPS, min(_STEPS, declarations.steps_left))
    machine = Machine(program, effects, steps)
    if declarations.machine is not None:
        machine.share(declarations.machine)
    place = Place(handler.function.file, handler.function.line)
    try:
        if handler.this is None and handler.owner is not None:
            handler.this = machine.instance(handler.owner)
        machine.enter(handler, args, named, handler.function.line, handler.function.file)
    except OutOfSteps:
        effects.unseen.append(Unseen("bounded", "its code is larger than is followed", place))
    except RecursionError:
        effects.unseen.append(
            Unseen("bounded", "its code is nested deeper than is followed", place)
        )
    used = steps - machine.left
    declarations.steps_left -= used
    return used


_CONTEXT: Final = re.compile(r"\b(?:Context|RequestContext|ServerContext)\b")


def _handler_arguments(effects: Effects, handler: Fun) -> tuple[list[Value], dict[str, Value]]:
    """What a tool's own function is called with: its input, and who asks."""
    function = handler.function
    parameters = list(function.parameters)
    if function.file.endswith((".py", ".pyw")):
        if function.kind in ("method", "class"):
            parameters = parameters[1:]
        named: dict[str, Value] = {}
        for parameter in parameters:
            if parameter.kind in ("rest", "keywords"):
                continue
            if (
                parameter.default is not None
                or "None" in parameter.annotation
                or ("Optional" in parameter.annotation)
            ):
                effects.optional_inputs.add(parameter.name)
            if _CONTEXT.search(parameter.annotation) or parameter.name in ("ctx", "context"):
                named[parameter.name] = Sym("context", (parameter.name,))
            elif parameter.default is not None and "Depends" in str(parameter.default):
                continue
            else:
                named[parameter.name] = Sym("input", (parameter.name,))
        return [], named
    args: list[Value] = [Sym("input", ()), Sym("context", ("extra",))]
    for parameter in parameters[:1]:
        if parameter.target[0] == "pattern":
            for key, _, default in parameter.target[1]:
                if default is not None:
                    effects.optional_inputs.add(key)
    return args[: max(1, len(parameters))], {}


def _dispatched_arguments(handler: Fun, name: str) -> tuple[list[Value], dict[str, Value]]:
    """What a dispatcher is called with, in the shapes the SDKs have had."""
    parameters = list(handler.function.parameters)
    arguments = Sym("input", ())
    params = Rec({"name": Const(name), "arguments": arguments, "_meta": Sym("context", ("meta",))})
    request = Rec({**params.fields, "params": params, "method": Const("tools/call")})
    if not handler.function.file.endswith((".py", ".pyw")):
        return [request, Sym("context", ("extra",))][: max(1, len(parameters))], {}
    if handler.function.kind in ("method", "class"):
        parameters = parameters[1:]
    if len(parameters) == 1:
        return [request], {}
    first = parameters[0].name if parameters else ""
    if first in ("ctx", "context", "_ctx", "_context", "_") or "Context" in (
        parameters[0].annotation if parameters else ""
    ):
        return [Sym("context", (first,)), request], {}
    return [Const(name), arguments][: len(parameters)], {}


def _admits_selects_only(test: Node) -> bool:
    """`if not query.upper().startswith("SELECT"): raise …`."""
    if test[0] == "not" or (test[0] == "cmp" and test[1] in ("!=", "not in")):
        text = str(test)
        asks = ("startswith", "startsWith", "'regex'", "match", "includes", "'in'", "test", "cmp")
        return bool(re.search(r"(?i)'(?:\^?\s*\(?)?(?:\\\\s\*)?\(?select", text)) and any(
            word in text for word in asks
        )
    return False
