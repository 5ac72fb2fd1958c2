"""Runs the source without running it: values where they are known, both ways where they are not.

Owns the walk from a function through its helpers, across files. Who listens (`Listener`) hears of
every call that leaves the package, with what is known of its arguments and the path to it.

1. Nothing of the scanned package is ever executed: the machine knows constants, texts, lists,
   records, functions and classes, and everything else is a name from outside.
2. A condition that is known takes one way (so a dispatcher, given a tool's name, leads to that
   tool's code alone); one that is not takes both, and what differs afterwards is `Many`.
3. Everything is bounded: steps, depth of calls, items of a loop. Where a bound is met, `met` says
   so, and the report passes it on.

Why an interpreter and not patterns: a verb reaches a request through an options object, a factory,
a class and a switch in as many files, and a pattern for each way through them knows the packages it
was written for and no others.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from effectfence.scan import natives
from effectfence.scan.ir import Block, Class, Function, Import, Node, Parameter
from effectfence.scan.program import Program
from effectfence.scan.tables import table
from effectfence.scan.values import (
    NOTHING,
    UNKNOWN,
    Const,
    Env,
    Fun,
    Kls,
    Many,
    Mod,
    Native,
    Rec,
    Seq,
    Super,
    Sym,
    Text,
    Value,
    alternatives,
    joined,
    many,
    truth,
)

_DEEPEST_CALL: Final = 14
_DEEPEST_EXPRESSION: Final = 120
_LONGEST_LOOP: Final = 1_000
_FOLLOWED_METHODS: Final = 2
_NOT_FOLLOWED: Final = table(
    """get set add push pop append update map filter forEach then catch finally on emit join split
    keys values items toString format log info error warn debug close start stop parse has next
    read write end find includes slice test match replace use constructor init run call apply
    bind name tool register connect"""
)
"""Too common to be looked up by name alone when nobody knows whose method it is."""

DECLARES: Final = table(
    """tool registerTool register_tool addTool add_tool registerAppTool resource setRequestHandler
    list_tools call_tool registerResource registerPrompt prompt addTools addResource addPrompt
    add_resource add_prompt registerTools"""
)
"""What declares to a server: the functions it is handed run when a client asks, not now."""
SDK: Final = "@modelcontextprotocol/sdk"
_ASIDE: Final = 4_000
_MOST_ENTRIES: Final = 24
"""How often one walk enters the same function with ever other arguments."""

RETURN, BREAK, CONTINUE, RAISE = "return", "break", "continue", "raise"


@dataclass(slots=True)
class Frame:
    """A call that is being followed."""

    function: Function
    file: str
    line: int
    """where it was called"""
    arguments: Env
    returned: list[Value] = field(default_factory=list)


@dataclass(slots=True)
class Call:
    """A call that leaves the package."""

    callee: Sym
    args: list[Value]
    named: dict[str, Value]
    file: str
    line: int
    new: bool = False

    @property
    def name(self) -> str:
        return self.callee.path[-1] if self.callee.path else ""


class Listener(Protocol):
    """Who hears what the machine meets."""

    def called(self, machine: Machine, call: Call) -> Value | None: ...

    def decorated(self, machine: Machine, decorator: Call, function: Fun) -> None: ...

    def follows(self, machine: Machine, function: Function) -> bool: ...

    def left_on(self, machine: Machine, test: Node, then: Block, env: Env) -> None: ...


class Deaf:
    """Hears nothing: for values that are worked out aside."""

    def called(self, machine: Machine, call: Call) -> Value | None:
        return NOTHING if call.name in DECLARES else None

    def decorated(self, machine: Machine, decorator: Call, function: Fun) -> None:
        return

    def follows(self, machine: Machine, function: Function) -> bool:
        return len(machine.frames) < 5

    def left_on(self, machine: Machine, test: Node, then: Block, env: Env) -> None:
        return


class OutOfSteps(Exception):
    """The bound on the work for one tool."""


class Machine:
    """One walk. Modules' names are shared between walks of one program."""

    def __init__(self, program: Program, listener: Listener, steps: int = 60_000) -> None:
        self.program = program
        self.listener = listener
        self.left = steps
        self.frames: list[Frame] = []
        self.when: list[str] = []
        self.facts: dict[tuple[str, tuple[str, ...]], Value] = {}
        self.uncertain = 0
        self.loops: list[tuple[str, int]] = []
        self.tries = 0
        self.met: set[str] = set()
        self.depth = 0
        self.globals: dict[str, Env] = {}
        self.classes: dict[str, list[Kls]] = {}
        self._evaluating: set[tuple[str, str]] = set()
        self._completed: set[tuple[str, str]] = set()
        self._answers: dict[Any, Value] = {}
        self._entries: dict[Function, int] = {}
        self.file = ""
        self.line = 0
        self.hot: Callable[[Function], bool] = lambda _: False
        self.asked: Node | None = None
        """the call that is being made, as it stands in the source"""
        self.made: list[Fun] = []
        self.wrappers: list[tuple[str, str, int]] = []
        self.entered: set[Function] = set()

    # --- names of modules ---------------------------------------------------------------------

    def module_env(self, path: str) -> Env:
        if path not in self.globals:
            self.globals[path] = Env(None, path, is_function=True)
        return self.globals[path]

    def member(self, path: str, name: str) -> Value:
        """What an importer of a file gets by that name."""
        module = self.program.module(path)
        if name in ("*", ""):
            return Mod(path)
        if module.language == "python":
            return self.global_name(path, name)
        if name in module.reexports:
            return self.imported(path, module.reexports[name])
        if name == "default" and "default" not in module.exports:
            if "module.exports" in module.bindings:
                return self.global_name(path, "module.exports")
            return Mod(path)
        local = module.exports.get(name)
        if local is not None:
            return self.global_name(path, local)
        if name in module.bindings:
            return self.global_name(path, name)
        for star in module.star_imports:
            found = self.program.resolve(path, star) if star.name == "*" else None
            if found and found[0] != path and (path, name) not in self._evaluating:
                self._evaluating.add((path, name))
                try:
                    value = self.member(found[0], name)
                finally:
                    self._evaluating.discard((path, name))
                if not (isinstance(value, Sym) and value.root == "unknown"):
                    return value
        if "module.exports" in module.bindings:
            return self.attribute(self.global_name(path, "module.exports"), name)
        return UNKNOWN

    def imported(self, importer: str, what: Import) -> Value:
        found = self.program.resolve(importer, what)
        if found is None:
            names = [what.module] if what.name in ("*", "default", "") else [what.module, what.name]
            return Sym("module", tuple(names))
        if found[0] == importer:
            return UNKNOWN
        return self.member(*found)

    def global_name(self, path: str, name: str) -> Value:
        """A name of a file's top, evaluated when first asked for."""
        env = self.module_env(path)
        if name in env.vars:
            return env.vars[name]
        module = self.program.module(path)
        if name in module.bindings:
            if (path, name) in self._evaluating:
                return UNKNOWN
            self._evaluating.add((path, name))
            with self._elsewhere(path):
                try:
                    for statement in module.bindings[name]:
                        self._run_binding(statement, env)
                finally:
                    self._evaluating.discard((path, name))
            if name not in env.vars:
                env.vars[name] = NOTHING if not module.bindings[name] else UNKNOWN
            if _set_later(env.vars[name]):
                self._global_set_later(path, name, env)
            return env.vars[name]
        if name in module.imports:
            env.vars[name] = self.imported(path, module.imports[name])
            return env.vars[name]
        if module.language == "python":
            for star in module.star_imports:
                found = self.program.resolve(path, star)
                if found and found[0] != path:
                    other = self.program.module(found[0])
                    if name in other.bindings or name in other.imports or other.star_imports:
                        value = self.global_name(found[0], name)
                        if not (isinstance(value, Sym) and value.root == "global"):
                            return value
        return Sym("global", (name,))

    def _global_set_later(self, path: str, name: str, env: Env) -> None:
        """A name that begins as nothing: also what functions of the file put there."""
        before = env.vars[name]
        if isinstance(before, Seq | Rec):
            before.open = True
            return
        env.vars[name] = many((before, Sym("field", (name,))))
        source = self.program.sources[path].text
        setter = re.compile(
            rb"(?<![\w.])" + re.escape(name.encode()) + rb"\s*(?::[^=\n]{0,60})?=[^=>]"
        )
        offsets = [match.start() for match in setter.finditer(source)]
        module = self.program.module(path)
        python = module.language == "python"
        for statements in list(module.bindings.values()) if offsets else ():
            for statement in statements:
                if statement[0] != "def" or not within(offsets, statement[1].span):
                    continue
                function: Function = statement[1]
                if python and not re.search(
                    rb"global\s[^\n]*\b" + re.escape(name.encode()) + rb"\b",
                    source[function.span[0] : function.span[1]],
                ):
                    continue
                fun = Fun(function, env)
                with self._unheard(path):
                    inner = self.bind(fun, *self.unknown_arguments(fun))
                    self.frames.append(Frame(function, path, 0, inner))
                    try:
                        self.block(function.body, inner)
                    finally:
                        self.frames.pop()
                        found = inner.vars.get(name) if python else None
                        if found is not None:
                            env.vars[name] = many((found, *alternatives(env.vars[name])))

    @contextlib.contextmanager
    def _elsewhere(self, path: str) -> Iterator[None]:
        """A name's own value does not depend on who asks for it."""
        before = self.file, self.when, self.uncertain, self.facts, self.line
        self.file, self.when, self.uncertain, self.facts = path, [], 0, {}
        try:
            yield
        finally:
            self.file, self.when, self.uncertain, self.facts, self.line = before

    def _run_binding(self, statement: Node, env: Env) -> None:
        if statement[0] == "late":
            statement = statement[1]()
        if statement[0] == "getters":
            self._getters(statement, env)
            return
        self.statement(statement, env)

    def _getters(self, statement: Node, env: Env) -> None:
        target = env.vars.get(statement[1])
        value = self.value(statement[2], env)
        if not isinstance(target, Rec):
            target = env.vars[statement[1]] = Rec(file=env.file)
        for name, getter in (value.fields if isinstance(value, Rec) else {}).items():
            target.fields[name] = (
                self.call(getter, [], {}, 0) if isinstance(getter, Fun) else getter
            )

    # --- statements ---------------------------------------------------------------------------

    def block(self, statements: Block, env: Env) -> str | None:
        for statement in statements:
            flow = self.statement(statement, env)
            if flow is not None:
                return flow
        return None

    def statement(self, node: Node, env: Env) -> str | None:
        self.left -= 1
        if self.left < 0:
            self.met.add("steps")
            raise OutOfSteps
        method: Callable[[Node, Env], str | None] = _STATEMENTS[node[0]]
        return method(self, node, env)  # type: ignore[call-arg,arg-type]

    def _s_expr(self, node: Node, env: Env) -> None:
        self.value(node[1], env)

    def _s_assign(self, node: Node, env: Env) -> None:
        self.assign(node[1], self.value(node[2], env), env, declare=True)

    def _s_late(self, node: Node, env: Env) -> str | None:
        return self.statement(node[1](), env)

    def _s_augment(self, node: Node, env: Env) -> None:
        old = self.value(node[1], env)
        added = self.value(node[3], env)
        if node[2] == "+=" and isinstance(old, Seq):
            natives.extend(self, old, added)
            return
        if node[2] == "|=" and isinstance(old, Rec):
            natives.merge(self, old, added)
            return
        self.assign(node[1], self._plus(old, added) if node[2] == "+=" else UNKNOWN, env)

    def _s_import(self, node: Node, env: Env) -> None:
        env.vars[node[1]] = self.imported(env.file, node[2])

    def _s_forget(self, node: Node, env: Env) -> None:
        for name in node[1]:
            env.vars[name] = UNKNOWN

    def _s_def(self, node: Node, env: Env) -> None:
        function: Function = node[1]
        made = Fun(function, env, owner=env.owner)
        env.vars[function.name] = made
        self.made.append(made)
        for decorator, line in function.decorators:
            self.decorate(decorator, line, made, env)

    def decorate(self, decorator: Node, line: int, made: Fun, env: Env) -> None:
        """Tell the listener what a function was decorated with."""
        args: list[Value] = []
        named: dict[str, Value] = {}
        if decorator[0] == "call":
            callee = self.value(decorator[1], env)
            args, named = self.arguments(decorator[2], decorator[3], env)
        else:
            callee = self.value(decorator, env)
        for one in alternatives(callee):
            if isinstance(one, Native):
                one = Sym("field", (one.name,))
            if isinstance(one, Sym):
                call = Call(one, args, named, env.file, line)
                if call.name == "wraps" and args and isinstance(args[0], Fun):
                    made.wraps = args[0].wraps or args[0]
                self.listener.decorated(self, call, made)
            elif isinstance(one, Fun) and self.hot(one.function):
                result = self.call(one, args, named, line) if decorator[0] == "call" else one
                for inner in alternatives(result):
                    if isinstance(inner, Fun):
                        self.call(inner, [made], {}, line)

    def _s_class(self, node: Node, env: Env) -> None:
        made: Class = node[1]
        kls = Kls(made, env)
        env.vars[made.name] = kls
        if any(method.decorators for method in made.methods.values()):
            for method in made.methods.values():
                bound: Fun | None = None
                for decorator, line in method.decorators:
                    bound = bound or Fun(method, env, self.instance(kls), kls)
                    self.decorate(decorator, line, bound, env)
        for method in made.methods.values():
            if self.hot(method):
                self.made.append(Fun(method, env, None, kls))

    def _s_return(self, node: Node, env: Env) -> str:
        value = self.value(node[1], env)
        if self.frames:
            self.frames[-1].returned.append(value)
        return RETURN

    def _s_raise(self, node: Node, env: Env) -> str:
        self.value(node[1], env)
        return RAISE

    def _s_break(self, node: Node, env: Env) -> str:
        return BREAK

    def _s_continue(self, node: Node, env: Env) -> str:
        return CONTINUE

    def _s_block(self, node: Node, env: Env) -> str | None:
        inner = Env(env, env.file)
        for statement in node[1]:
            if statement[0] == "def":
                inner.vars[statement[1].name] = Fun(statement[1], inner, owner=env.owner)
        return self.block(node[1], inner)

    def _s_if(self, node: Node, env: Env) -> str | None:
        _, test, then, otherwise = node
        holds = truth(self.value(test, env))
        if holds is not None:
            return self.block(then if holds else otherwise, env)
        if _ends(then):
            self.listener.left_on(self, test, then, env)
        label, facts, negative = self._learned(test, env)
        ways = [(then, label, facts), (otherwise, f"not {label}" if label else "", negative)]
        return self._ways([(way, name, learned) for way, name, learned in ways], env)

    def _ways(
        self, ways: list[tuple[Block, str, dict[tuple[str, tuple[str, ...]], Value]]], env: Env
    ) -> str | None:
        """Take every way from here; afterwards whatever differs is `Many`."""
        chain = env.own_chain()
        start = [dict(one.vars) for one in chain]
        ends: list[list[dict[str, Value]]] = []
        flows: list[str | None] = []
        self.uncertain += 1
        facts_before = self.facts
        try:
            for way, label, facts in ways:
                for one, names in zip(chain, start, strict=True):
                    one.vars = dict(names)
                self.facts = {**facts_before, **facts}
                if label:
                    self.when.append(label)
                try:
                    flow = self.block(way, env)
                finally:
                    if label:
                        self.when.pop()
                flows.append(flow)
                if flow in (None, CONTINUE, BREAK):
                    ends.append([one.vars for one in chain])
        finally:
            self.uncertain -= 1
            self.facts = facts_before
        self._merge(chain, ends or [start])
        if all(flows) and flows:
            kinds = set(flows)
            return flows[0] if len(kinds) == 1 else RETURN if kinds <= {RETURN, RAISE} else None
        return None

    def _merge(self, chain: list[Env], ends: list[list[dict[str, Value]]]) -> None:
        for at, env in enumerate(chain):
            first = ends[0][at]
            if len(ends) == 1:
                env.vars = first
                continue
            merged = dict(first)
            for other in ends[1:]:
                for name, value in other[at].items():
                    if name not in merged:
                        merged[name] = value
                    elif merged[name] is not value:
                        merged[name] = many((merged[name], value))
            env.vars = merged

    def _learned(
        self, test: Node, env: Env
    ) -> tuple[str, dict[tuple[str, tuple[str, ...]], Value], dict[Any, Value]]:
        """What holds where a test does: a label for people, facts for the way."""
        while test[0] == "other" and len(test[1]) == 1:
            test = test[1][0]
        if test[0] == "logic" and test[1] == "and":
            label, facts, _ = self._learned(test[2], env)
            more, others, _ = self._learned(test[3], env)
            return " and ".join(filter(None, (label, more))), {**facts, **others}, {}
        if test[0] == "logic" and test[1] == "or":
            label, facts, _ = self._learned(test[2], env)
            more, others, _ = self._learned(test[3], env)
            same = facts.keys() == others.keys()
            joint = {key: many((facts[key], others[key])) for key in facts} if same else {}
            return (f"{label} or {more}" if label and more else ""), joint, {}
        if test[0] != "cmp" or test[1] not in ("==", "!=", "in"):
            return "", {}, {}
        before, self.uncertain = self.uncertain, self.uncertain + 1
        left, right = self.value(test[2], env), self.value(test[3], env)
        self.uncertain = before
        if isinstance(right, Sym) and isinstance(left, Const):
            left, right = right, left
        if not isinstance(left, Sym) or not left.path:
            return "", {}, {}
        key = (left.root, left.path)
        shown = left.path[-1]
        if test[1] == "in" and isinstance(right, Seq) and right.items:
            names = [one.value for one in right.items if isinstance(one, Const)]
            label = f"{shown} in {', '.join(map(str, names))}"
            return label[:120], {key: Many(tuple(right.items[:12]))}, {}
        if isinstance(right, Const) and isinstance(right.value, str) and test[1] == "==":
            return f"{shown} = {right.value}", {key: right}, {}
        return "", {}, {}

    def _s_switch(self, node: Node, env: Env) -> str | None:
        _, subject, cases, falls = node
        value = self.value(subject, env)
        if falls:
            env = Env(env, env.file)
        tested = [
            None if tests is None else [self.value(test, env) for test in tests]
            for tests, _ in cases
        ]
        if isinstance(value, Const | Many):
            taken = self._taken(value, tested)
            if taken is not None:
                flow = self._from_case(cases, taken, falls, env) if taken >= 0 else None
                return None if flow == BREAK and falls else flow
        constants = [
            one.value
            for options in tested
            for one in options or ()
            if isinstance(one, Const) and isinstance(one.value, str)
        ]
        ways: list[tuple[Block, str, dict[tuple[str, tuple[str, ...]], Value]]] = []
        labels: list[Const] = []
        complete = False
        for at, options in enumerate(tested):
            if options is None:
                complete = True
            labels += [one for one in options or () if isinstance(one, Const)]
            if falls and not cases[at][1]:
                continue
            body: Block = cases[at][1]
            following = at + 1
            while falls and following < len(cases) and not _ends(body):
                body += cases[following][1]
                following += 1
            label, facts = "", {}
            if labels and isinstance(value, Sym) and value.path:
                label = f"{value.path[-1]} = {', '.join(str(one.value) for one in labels)}"
                facts = {(value.root, value.path): many(labels)}
            elif options is None and constants and isinstance(value, Sym) and value.path:
                label = f"{value.path[-1]} = anything else"
            ways.append((body, label[:120], facts))
            labels = []
        if not complete:
            ways.append(((), "", {}))
        flow = self._ways(ways, env)
        return None if flow == BREAK and falls else flow

    def _taken(self, value: Value, tested: list[list[Value] | None]) -> int | None:
        """The case a known value leads to; -1: none of them; `None`: cannot be said."""
        if not isinstance(value, Const):
            return None
        default = -1
        for at, options in enumerate(tested):
            if options is None:
                default = at if default < 0 else default
                continue
            for option in options:
                if not isinstance(option, Const):
                    return None
                if option.value == value.value:
                    return at
        return default

    def _from_case(self, cases: Any, at: int, falls: bool, env: Env) -> str | None:
        while at < len(cases):
            flow = self.block(cases[at][1], env)
            if flow is not None or not falls:
                return flow
            at += 1
        return None

    def _s_loop(self, node: Node, env: Env) -> str | None:
        _, target, iterable, body, line = node
        over = self.value(iterable, env)
        items = natives.iterated(over)
        inner = Env(env, env.file)
        if items is not None and len(items) <= _LONGEST_LOOP:
            for item in items:
                self.assign(target, item, inner, declare=True)
                flow = self.block(body, inner)
                if flow in (RETURN, RAISE):
                    return flow
                if flow == BREAK:
                    break
            if not (isinstance(over, Seq) and over.open):
                return None
        self.assign(target, natives.an_item(over), inner, declare=True)
        self._maybe(body, inner, line)
        return None

    def _maybe(self, body: Block, env: Env, line: int) -> None:
        """A body that runs some number of times."""
        self.loops.append((env.file, line))
        try:
            self._ways([(body, "", {}), ((), "", {})], env)
        finally:
            self.loops.pop()

    def _s_while(self, node: Node, env: Env) -> str | None:
        self.value(node[1], env)
        self._maybe(node[2], Env(env, env.file), node[3])
        return None

    def _s_try(self, node: Node, env: Env) -> str | None:
        _, body, handlers, final = node
        self.tries += 1 if handlers else 0
        try:
            flow = self.block(body, env)
        finally:
            self.tries -= 1 if handlers else 0
        flows = [flow]
        if handlers:
            chain = env.own_chain()
            start = [dict(one.vars) for one in chain]
            ends = [start] if flow is None else []
            self.uncertain += 1
            self.when.append("after an error")
            try:
                for handler in handlers:
                    for one, names in zip(chain, start, strict=True):
                        one.vars = dict(names)
                    flows.append(self.block(handler, env))
                    if flows[-1] is None:
                        ends.append([one.vars for one in chain])
            finally:
                self.when.pop()
                self.uncertain -= 1
            self._merge(chain, ends or [start])
        last = self.block(final, env)
        if last is not None:
            return last
        if all(flows):
            return flow if flow in (BREAK, CONTINUE) else RETURN
        return None

    # --- assignment ---------------------------------------------------------------------------

    def assign(self, target: Node, value: Value, env: Env, *, declare: bool = False) -> None:
        kind = target[0]
        if kind == "name":
            where = None if declare and env.file.endswith(_JS) else env.find(target[1])
            if where is None:
                where = env
                if not env.file.endswith(_JS):
                    where = env.own_chain()[-1]
            elif not env.file.endswith(_JS) and where not in env.own_chain():
                where = env.own_chain()[-1]
            where.vars[target[1]] = value
        elif kind == "attr":
            for owner in alternatives(self.value(target[1], env)):
                self.set_field(owner, target[2], value)
        elif kind == "index":
            key = self.value(target[2], env)
            for owner in alternatives(self.value(target[1], env)):
                if isinstance(key, Const) and isinstance(key.value, str):
                    self.set_field(owner, key.value, value)
                elif isinstance(owner, Rec):
                    owner.open = True
                    owner.fields.setdefault("*", value)
                elif isinstance(owner, Seq):
                    owner.open = True
        elif kind == "list":
            items = value.items if isinstance(value, Seq) and not value.open else None
            for at, part in enumerate(target[1]):
                known = items[at] if items is not None and at < len(items) else None
                item = known if known is not None else self.index(value, Const(at))
                self.assign(part, item, env, declare=declare)
        elif kind == "pattern":
            for key, part, default in target[1]:
                item = self.attribute(value, key)
                if default is not None and (
                    item == NOTHING or (isinstance(item, Sym) and item.root == "unknown")
                ):
                    item = self.value(default, env)
                self.assign(part, item, env, declare=declare)
            if target[2]:
                self.assign(("name", target[2]), self._rest(value, target[1]), env, declare=declare)

    def _rest(self, value: Value, taken: Any) -> Value:
        if not isinstance(value, Rec):
            return value
        names = {key for key, _, _ in taken}
        left = {name: item for name, item in value.fields.items() if name not in names}
        return Rec(left, value.open, file=value.file, line=value.line)

    def set_field(self, owner: Value, name: str, value: Value) -> None:
        if isinstance(owner, Rec):
            if self.uncertain and name in owner.fields:
                value = many((owner.fields[name], value))
            owner.fields[name] = value
        elif isinstance(owner, Kls):
            self.instance(owner).fields[name] = value

    # --- expressions --------------------------------------------------------------------------

    def value(self, node: Node, env: Env) -> Value:
        self.left -= 1
        if self.left < 0:
            self.met.add("steps")
            raise OutOfSteps
        if self.depth > _DEEPEST_EXPRESSION * _DEEPEST_CALL:
            return UNKNOWN
        self.depth += 1
        try:
            method: Callable[[Node, Env], Value] = _EXPRESSIONS[node[0]]
            return method(self, node, env)  # type: ignore[call-arg,arg-type]
        finally:
            self.depth -= 1

    def _e_const(self, node: Node, env: Env) -> Value:
        return Const(node[1])

    def _e_regex(self, node: Node, env: Env) -> Value:
        return Sym("global", ("RegExp", node[1][:80]))

    def _e_lazy(self, node: Node, env: Env) -> Value:
        return self.value(node[1](), env)

    def _e_require(self, node: Node, env: Env) -> Value:
        return self.imported(env.file, node[1])

    def _e_name(self, node: Node, env: Env) -> Value:
        name = node[1]
        where = env.find(name)
        if where is not None:
            return self._known(where.vars[name])
        return self._known(self.global_name(env.file, name))

    def _known(self, value: Value) -> Value:
        if self.facts and isinstance(value, Sym):
            return self.facts.get((value.root, value.path), value)
        return value

    def _e_attr(self, node: Node, env: Env) -> Value:
        return self._known(self.attribute(self.value(node[1], env), node[2]))

    def _e_index(self, node: Node, env: Env) -> Value:
        return self._known(self.index(self.value(node[1], env), self.value(node[2], env)))

    def index(self, owner: Value, key: Value) -> Value:
        out: list[Value] = []
        for one in alternatives(owner):
            for by in alternatives(key):
                out.append(self._index(one, by))
        return many(out)

    def _index(self, owner: Value, key: Value) -> Value:
        if isinstance(key, Const) and isinstance(key.value, str):
            return self.attribute(owner, key.value)
        if isinstance(owner, Seq):
            if isinstance(key, Const) and isinstance(key.value, int) and not owner.open:
                with contextlib.suppress(IndexError):
                    return owner.items[key.value]
            return many(owner.items) if owner.items else UNKNOWN
        if isinstance(owner, Rec):
            return many(owner.fields.values()) if owner.fields else UNKNOWN
        if isinstance(owner, Sym):
            return owner.then("[]") if owner.root != "unknown" else owner
        return UNKNOWN

    def attribute(self, owner: Value, name: str) -> Value:
        if isinstance(owner, Many):
            return many(self.attribute(one, name) for one in owner.values)
        if isinstance(owner, Sym):
            if name == "default" and owner.root == "module":
                return owner
            return owner.then(name)
        if isinstance(owner, Rec):
            return self._field(owner, name)
        if isinstance(owner, Mod):
            value = self.member(owner.file, name)
            if isinstance(value, Sym) and value.root == "global" and value.path == (name,):
                found = self.program.resolve(owner.file, Import("", name, 1))
                return self.member(*found) if found else UNKNOWN
            return value
        if isinstance(owner, Kls):
            return self._of_class(owner, name)
        if isinstance(owner, Super):
            return self._of_bases(owner.owner, owner.this, name) or UNKNOWN
        if isinstance(owner, Const | Text) and name == "value":
            return owner
        if isinstance(owner, Fun) and name in ("__name__", "name"):
            return Const(owner.function.name)
        if isinstance(owner, Fun):
            extra = owner.env.vars.get(f"{owner.function.name}.{name}")
            return extra if extra is not None else Native(owner, name)
        if isinstance(owner, Seq) and name == "length" and not owner.open:
            return Const(len(owner.items))
        if owner == NOTHING:
            return UNKNOWN
        return Native(owner, name)

    def _field(self, owner: Rec, name: str) -> Value:
        if name in owner.fields:
            value = owner.fields[name]
            if owner.kind is not None and _set_later(value):
                return self._as_set_later(owner, owner.kind, name)
            return value
        if owner.kind is not None:
            found = self._method(owner.kind, owner, name)
            if found is not None:
                return found
            self._as_set_later(owner, owner.kind, name)
            return owner.fields.get(name, Sym("field", (owner.kind.made.name, name)))
        if natives.has(owner, name):
            return Native(owner, name)
        if owner.open:
            return owner.fields.get("*", Sym("unknown", (name,)))
        if owner.made_by:
            return Sym("unknown", (name,))
        return NOTHING

    def _as_set_later(self, owner: Rec, kls: Kls, name: str) -> Value:
        """A field that begins as nothing: also what other methods of the class put there."""
        key = (f"{kls.made.file}:{kls.made.line}", name)
        if key not in self._completed:
            self._completed.add(key)
            setter = re.compile(
                rb"(?:this|self)\.#?" + re.escape(name.encode()) + rb"\b[^=\n(]{0,80}=[^=]"
            )
            source = self.program.sources[kls.made.file].text
            offsets = [match.start() for match in setter.finditer(source, *kls.made.span)]
            for method in kls.made.methods.values():
                if method.name in ("__init__", "constructor") or not within(offsets, method.span):
                    continue
                with self._unheard(method.file):
                    fun = Fun(method, kls.env, owner, kls)
                    self.call(fun, *self.unknown_arguments(fun), 0)
        before = owner.fields.get(name, NOTHING)
        if _set_later(before):
            empty = isinstance(before, Seq | Rec)
            owner.fields[name] = (
                before if empty else many((before, Sym("field", (kls.made.name, name))))
            )
            if isinstance(before, Seq | Rec):
                before.open = True
        return owner.fields[name]

    @contextlib.contextmanager
    def _unheard(self, path: str) -> Iterator[None]:
        """Values are wanted, not what is done on the way to them."""
        before = self.listener, self.frames, self.left, self.loops, self.tries
        self.listener, self.frames, self.loops, self.tries = Deaf(), [], [], 0
        self.left = min(self.left, _ASIDE)
        try:
            with self._elsewhere(path):
                self.uncertain = 1
                yield
        except OutOfSteps:
            self.met.discard("steps")
        finally:
            self.listener, self.frames, self.left, self.loops, self.tries = before

    def bases(self, kls: Kls) -> list[Value]:
        if kls.bases is None:
            kls.bases = []
            kls.bases = [self.value(base, kls.env) for base in kls.made.bases]
        return kls.bases

    def _method(self, kls: Kls, this: Value, name: str) -> Value | None:
        method = kls.made.methods.get(name)
        if method is not None:
            made = Fun(method, kls.env, None if method.kind == "static" else this, kls)
            if method.kind == "class":
                made.this = kls
            return self.call(made, [], {}, self.line) if method.kind == "getter" else made
        for statement in kls.made.fields:
            if statement[0] == "assign" and statement[1] == ("name", name):
                inner = Env(kls.env, kls.env.file, is_function=True)
                inner.vars["this"] = this
                inner.owner = kls
                value = self.value(statement[2], inner)
                if isinstance(this, Rec):
                    this.fields[name] = value
                return value
        return self._of_bases(kls, this, name)

    def _of_bases(self, kls: Kls, this: Value, name: str) -> Value | None:
        for base in self.bases(kls):
            for one in alternatives(base):
                if isinstance(one, Kls) and one is not kls:
                    found = self._method(one, this, name)
                    if found is not None:
                        return found
                elif isinstance(one, Sym) and one.root == "module":
                    return one.then("()", name)
        return None

    def _of_class(self, kls: Kls, name: str) -> Value:
        if kls.instance is not None and name in kls.instance.fields:
            return kls.instance.fields[name]
        inner = next((s[1] for s in kls.made.fields if s[0] == "class" and s[1].name == name), None)
        if inner is not None:
            return Kls(inner, kls.env)
        found = self._method(kls, kls, name)
        if found is not None:
            if isinstance(found, Fun) and found.function.kind == "method":
                found.this = None  # unbound: `Client.create(client, …)`
            return found
        return Sym("field", (kls.made.name, name))

    def instance(self, kls: Kls) -> Rec:
        """The instance that a method is called on when nobody says which."""
        if kls.instance is None:
            kls.instance = Rec(kind=kls, file=kls.made.file, line=kls.made.line)
            with self._elsewhere(kls.made.file):
                self._construct(kls, kls.instance, [], {}, 0, guess=True)
        return kls.instance

    def _construct(
        self,
        kls: Kls,
        made: Rec,
        args: list[Value],
        named: dict[str, Value],
        line: int,
        *,
        guess: bool = False,
    ) -> None:
        for name in ("__init__", "constructor"):
            found = self._method(kls, made, name) if name in _constructors(self, kls) else None
            if isinstance(found, Fun):
                if guess:
                    args, named = self.unknown_arguments(found)
                self.call(found, args, named, line)
                return
        for statement in kls.made.fields:  # a dataclass
            if statement[0] == "assign" and statement[1][0] == "name":
                made.fields.setdefault(statement[1][1], self.value(statement[2], kls.env))
        made.fields.update(named)

    def unknown_arguments(self, function: Fun) -> tuple[list[Value], dict[str, Value]]:
        parameters = function.function.parameters
        if _takes_self(function.function):
            parameters = parameters[1:]
        args: list[Value] = []
        for parameter in parameters:
            if parameter.kind != "one":
                break
            args.append(self.unknown_for(parameter, function.env))
        return args, {}

    def unknown_for(self, parameter: Parameter, env: Env) -> Value:
        """An argument that nobody passed: of its annotation's class, if that is the package's."""
        annotation = parameter.annotation.strip(": ")
        name = annotation.split("[")[0].split("|")[0].strip().strip("\"'").rpartition(".")[2]
        if name.isidentifier() and name[:1].isupper() and annotation:
            where = env.find(name)
            found = where.vars[name] if where else self.global_name(env.file, name)
            if isinstance(found, Kls):
                return self.instance(found)
            if isinstance(found, Sym) and found.root == "module":
                return found.then("()")
        return Sym("param", (parameter.name or "argument",))

    def _e_list(self, node: Node, env: Env) -> Value:
        out = Seq([])
        for item in node[1]:
            if item[0] == "spread":
                natives.extend(self, out, self.value(item[1], env))
            else:
                out.items.append(self.value(item, env))
        return out

    def _e_dict(self, node: Node, env: Env) -> Value:
        out = Rec(line=node[2], file=env.file)
        for key, item in node[1]:
            value = self.value(item, env)
            if key is None:
                natives.merge(self, out, value)
                continue
            by = self.value(key, env)
            if isinstance(by, Const):
                out.fields[str(by.value)] = value
            else:
                out.open = True
                out.fields.setdefault("*", value)
        return out

    def _e_fn(self, node: Node, env: Env) -> Value:
        made = Fun(node[1], env, owner=env.owner)
        self.made.append(made)
        return made

    def _e_class(self, node: Node, env: Env) -> Value:
        self._s_class(node, inner := Env(env, env.file))
        return inner.vars[node[1].name]

    def _e_cond(self, node: Node, env: Env) -> Value:
        holds = truth(self.value(node[1], env))
        if holds is not None:
            return self.value(node[2] if holds else node[3], env)
        self.uncertain += 1
        try:
            label, facts, _ = self._learned(node[1], env)
            before = self.facts
            self.facts = {**before, **facts}
            if label:
                self.when.append(label)
            try:
                then = self.value(node[2], env)
            finally:
                self.facts = before
                if label:
                    self.when.pop()
            return many((then, self.value(node[3], env)))
        finally:
            self.uncertain -= 1

    def _e_logic(self, node: Node, env: Env) -> Value:
        left = self.value(node[2], env)
        if node[1] == "??":
            if left == NOTHING:
                return self.value(node[3], env)
            if not isinstance(left, Sym | Many):
                return left
        else:
            holds = truth(left)
            if holds is not None:
                return left if holds == (node[1] == "or") else self.value(node[3], env)
        self.uncertain += 1
        try:
            right = self.value(node[3], env)
        finally:
            self.uncertain -= 1
        if node[1] == "and":
            return right if truth(right) is False else many((Const(False), right))
        kept = [one for one in alternatives(left) if truth(one) is not False]
        return many((*kept, right))

    def _e_cmp(self, node: Node, env: Env) -> Value:
        left, right = self.value(node[2], env), self.value(node[3], env)
        operator = node[1]
        if operator in ("==", "!="):
            same = _equal(left, right)
            if same is None:
                return Sym("unknown", ("compared",))
            return Const(same if operator == "==" else not same)
        if operator in ("in", "not in") and isinstance(left, Const):
            known = natives.holds(right, left)
            if known is not None:
                return Const(known if operator == "in" else not known)
        return Sym("unknown", ("compared",))

    def _e_not(self, node: Node, env: Env) -> Value:
        holds = truth(self.value(node[1], env))
        return Sym("unknown", ("not",)) if holds is None else Const(not holds)

    def _e_text(self, node: Node, env: Env) -> Value:
        return joined([self.value(part, env) for part in node[1]])

    def _e_plus(self, node: Node, env: Env) -> Value:
        return self._plus(self.value(node[1], env), self.value(node[2], env))

    def _plus(self, left: Value, right: Value) -> Value:
        if isinstance(left, Seq):
            out = Seq(list(left.items), left.open)
            natives.extend(self, out, right)
            return out
        if isinstance(left, Rec):
            made = Rec(dict(left.fields), left.open, file=left.file, line=left.line)
            natives.merge(self, made, right)
            return made
        if isinstance(left, Const | Text | Many) or isinstance(right, Const | Text):
            if isinstance(left, Const) and isinstance(left.value, int):
                return UNKNOWN
            return joined([left, right])
        return joined([left, right]) if isinstance(left, Sym) else UNKNOWN

    def _e_comp(self, node: Node, env: Env) -> Value:
        _, element, clauses, kind = node
        inner = Env(env, env.file, is_function=False)
        out = Seq([])
        self._comprehend(element, clauses, 0, inner, out)
        if kind != "dict":
            return out
        made = Rec(open=out.open, file=env.file)
        for pair in out.items:
            if isinstance(pair, Seq) and len(pair.items) == 2:
                key = pair.items[0]
                if isinstance(key, Const):
                    made.fields[str(key.value)] = pair.items[1]
                else:
                    made.open = True
                    made.fields.setdefault("*", pair.items[1])
        return made

    def _comprehend(self, element: Node, clauses: Any, at: int, env: Env, out: Seq) -> None:
        if at == len(clauses):
            out.items.append(self.value(element, env))
            return
        target, iterable = clauses[at]
        over = self.value(iterable, env)
        items = natives.iterated(over)
        if items is None or len(items) > _LONGEST_LOOP:
            out.open = True
            items = [natives.an_item(over)]
            self.uncertain += 1
            try:
                self._comprehend_one(element, clauses, at, env, out, target, items[0])
            finally:
                self.uncertain -= 1
            return
        for item in items:
            self._comprehend_one(element, clauses, at, env, out, target, item)

    def _comprehend_one(
        self, element: Node, clauses: Any, at: int, env: Env, out: Seq, target: Node, item: Value
    ) -> None:
        inner = Env(env, env.file, is_function=True)
        self.assign(target, item, inner, declare=True)
        self._comprehend(element, clauses, at + 1, inner, out)

    def _e_assign(self, node: Node, env: Env) -> Value:
        value = self.value(node[2], env)
        self.assign(node[1], value, env)
        return value

    def _e_sequence(self, node: Node, env: Env) -> Value:
        value: Value = UNKNOWN
        for part in node[1]:
            value = self.value(part, env)
        return value

    def _e_enter(self, node: Node, env: Env) -> Value:
        """What `with x as y` gives y."""
        value = self.value(node[1], env)
        for one in alternatives(value):
            if isinstance(one, Rec) and one.kind is not None:
                for name in ("__aenter__", "__enter__"):
                    found = self._method(one.kind, one, name)
                    if isinstance(found, Fun):
                        return self.call(found, [], {}, self.line)
        return value

    def _e_yield(self, node: Node, env: Env) -> Value:
        value = self.value(node[1], env)
        if self.frames:
            self.frames[-1].returned.append(value)
        return UNKNOWN

    def _e_spread(self, node: Node, env: Env) -> Value:
        return self.value(node[1], env)

    def _e_other(self, node: Node, env: Env) -> Value:
        for part in node[1]:
            self.value(part, env)
        return UNKNOWN

    # --- calls --------------------------------------------------------------------------------

    def arguments(self, args: Any, named: Any, env: Env) -> tuple[list[Value], dict[str, Value]]:
        out: list[Value] = []
        for arg in args:
            if arg[0] == "spread":
                value = self.value(arg[1], env)
                items = natives.iterated(value)
                out.extend(items if items is not None else [natives.an_item(value)])
            else:
                out.append(self.value(arg, env))
        by_name: dict[str, Value] = {}
        for name, arg in named:
            value = self.value(arg, env)
            if name is not None:
                by_name[name] = value
            else:
                for one in alternatives(value):
                    if isinstance(one, Rec):
                        by_name.update(one.fields)
                    elif isinstance(one, Sym):
                        by_name["**"] = one
        return out, by_name

    def _e_call(self, node: Node, env: Env) -> Value:
        callee = self._callee(node[1], env)
        args, named = self.arguments(node[2], node[3], env)
        self.file, self.line, self.asked = env.file, node[4], node
        return self.call(callee, args, named, node[4], file=env.file)

    def _callee(self, node: Node, env: Env) -> Value:
        if node[0] == "name" and node[1] == "super":
            this = env.find("this")
            if env.owner is not None:
                return Super(this.vars["this"] if this else UNKNOWN, env.owner)
        if node[0] == "attr" and node[1] == ("name", "super") and env.owner is not None:
            this = env.find("this")
            return (
                self._of_bases(env.owner, this.vars["this"] if this else UNKNOWN, node[2])
                or UNKNOWN
            )
        return self.value(node, env)

    def _e_new(self, node: Node, env: Env) -> Value:
        callee = self.value(node[1], env)
        args, named = self.arguments(node[2], node[3], env)
        self.file, self.line = env.file, node[4]
        return self.call(callee, args, named, node[4], file=env.file, new=True)

    def call(
        self,
        callee: Value,
        args: list[Value],
        named: dict[str, Value],
        line: int,
        *,
        file: str = "",
        new: bool = False,
    ) -> Value:
        file = file or self.file
        if isinstance(callee, Many):
            self.uncertain += 1
            try:
                return many(
                    self.call(one, args, named, line, file=file, new=new) for one in callee.values
                )
            finally:
                self.uncertain -= 1
        if isinstance(callee, Fun):
            if callee.function.name in DECLARES and self._of_sdk(callee.owner):
                sym = Sym("module", (SDK, callee.function.name))
                return self._external(Call(sym, args, named, file, line, new))
            return self.enter(callee, args, named, line, file)
        if isinstance(callee, Kls):
            made = Rec(kind=callee, file=callee.made.file, line=callee.made.line)
            made.line, made.file = line, file
            self._construct(callee, made, args, named, line)
            return made
        if isinstance(callee, Native):
            return natives.call(self, callee, args, named, line, file)
        if isinstance(callee, Super):
            if not args and not named and file.endswith(".py"):
                return callee
            self._construct_base(callee, args, named, line)
            return NOTHING
        if isinstance(callee, Rec) and callee.kind is not None:
            found = self._method(callee.kind, callee, "__call__")
            return self.call(found, args, named, line, file=file) if found else UNKNOWN
        if isinstance(callee, Sym):
            return self._external(Call(callee, args, named, file, line, new))
        return UNKNOWN

    def _of_sdk(self, kls: Kls | None) -> bool:
        """Whether a class is the SDK's own server, packed into the same bundle."""
        seen: list[Kls] = [kls] if kls is not None else []
        for one in seen[:6]:
            if {"setRequestHandler", "setToolRequestHandlers"} & one.made.methods.keys():
                return True
            seen += [base for base in self.bases(one) if isinstance(base, Kls)]
        return False

    def _construct_base(
        self, callee: Super, args: list[Value], named: dict[str, Value], line: int
    ) -> None:
        for base in self.bases(callee.owner):
            if isinstance(base, Kls) and isinstance(callee.this, Rec):
                self._construct(base, callee.this, args, named, line)

    def _external(self, call: Call) -> Value:
        answer = natives.known_function(self, call)
        if answer is not None:
            return answer
        followed = self._by_name(call)
        if followed is not None:
            return followed
        answer = self.listener.called(self, call)
        if answer is not None:
            return answer
        self._callbacks(call)
        if call.callee.root == "unknown" and not call.callee.path:
            return UNKNOWN
        return call.callee.then("()")

    def _by_name(self, call: Call) -> Value | None:
        """A method of nobody knows what: the package's own one of that name, if there is one."""
        sym = call.callee
        if sym.root not in ("unknown", "param", "field", "input", "context") or len(sym.path) < 2:
            return None
        name = sym.path[-1]
        if name in _NOT_FOLLOWED or len(name) < 4:
            return None
        found = self.program.methods_named(name)
        if not found or len(found) > 8:
            return None
        functions = [fun for fun in (self._method_at(name, *where) for where in found) if fun]
        seen: dict[Function, Fun] = {fun.function: fun for fun in functions}
        chosen = list(seen.values())[:_FOLLOWED_METHODS]
        if not chosen:
            return None
        self.uncertain += 1
        try:
            return many(
                self.enter(fun, call.args, call.named, call.line, call.file) for fun in chosen
            )
        finally:
            self.uncertain -= 1

    def _method_at(self, wanted: str, path: str, offset: int) -> Fun | None:
        """The method of a class at the top of a file that is defined at this byte."""
        for one in self._classes_of(path):
            method = one.made.methods.get(wanted)
            if method is None or method.file != path:
                continue
            if method.span[0] <= offset <= method.span[1]:
                this = None if method.kind == "static" else self.instance(one)
                return Fun(method, one.env, this, one)
        return None

    def _classes_of(self, path: str) -> list[Kls]:
        """The classes at the top of a file."""
        known = self.classes.get(path)
        if known is None:
            known = self.classes[path] = []
            for name, statements in list(self.program.module(path).bindings.items()):
                if any(s[0] == "class" or (s[0] == "late" and s[2]) for s in statements):
                    found = alternatives(self.global_name(path, name))
                    known += [one for one in found if isinstance(one, Kls)]
        return known

    def share(self, other: Machine) -> None:
        """Go on with what another walk of the same program evaluated."""
        self.globals, self.classes = other.globals, other.classes

    def _callbacks(self, call: Call) -> None:
        """Functions handed to the outside are taken to be called there."""
        for value in (*call.args, *call.named.values()):
            for one in alternatives(value):
                if isinstance(one, Fun) and one.function not in {f.function for f in self.frames}:
                    args, named = self.unknown_arguments(one)
                    self.uncertain += 1
                    self.wrappers.append((call.callee.dotted, call.file, call.line))
                    try:
                        self.enter(one, args, named, call.line, call.file)
                    finally:
                        self.wrappers.pop()
                        self.uncertain -= 1

    def enter(
        self, fun: Fun, args: list[Value], named: dict[str, Value], line: int, file: str
    ) -> Value:
        """Follow a call into a function of the package."""
        function = fun.function
        depth = sum(1 for frame in self.frames if frame.function is function)
        if depth > 1 or len(self.frames) >= _DEEPEST_CALL:
            if len(self.frames) >= _DEEPEST_CALL:
                self.met.add("depth")
            return UNKNOWN
        if not self.listener.follows(self, function):
            return UNKNOWN
        key = (
            function,
            id(fun.env),
            _print_of(fun.this),
            tuple(map(_print_of, args)),
            tuple((name, _print_of(value)) for name, value in named.items()),
            tuple(self.facts.items()) if self.facts else (),
        )
        if key in self._answers:
            return self._answers[key]
        seen = self._entries.get(function, 0)
        if seen >= _MOST_ENTRIES and not self._evaluating and not self.hot(function):
            return UNKNOWN
        self._entries[function] = seen + 1
        env = self.bind(fun, args, named)
        frame = Frame(function, file, line, env)
        before = self.file, self.line, self.facts, self.loops
        self.frames.append(frame)
        self.entered.add(function)
        self.file, self.loops = function.file, list(self.loops)
        try:
            self._hoist(function.body, env)
            self.block(function.body, env)
        finally:
            self.frames.pop()
            self.file, self.line, self.facts, self.loops = before
        answer = many(frame.returned) if frame.returned else NOTHING
        if not any(isinstance(one, Seq | Rec) for one in alternatives(answer)):
            self._answers[key] = answer
        return answer

    def _hoist(self, body: Block, env: Env) -> None:
        if env.file.endswith(_JS):
            for statement in body:
                if statement[0] == "def":
                    env.vars[statement[1].name] = Fun(statement[1], env, owner=env.owner)

    def bind(self, fun: Fun, args: list[Value], named: dict[str, Value]) -> Env:
        """A function's names when it is called so."""
        function = fun.function
        env = Env(fun.env, function.file, is_function=True)
        env.owner = fun.owner or fun.env.owner
        given = list(args)
        if _takes_self(function):
            if fun.this is not None:
                given.insert(0, fun.this)
            elif not given and fun.owner is not None:
                given.insert(0, self.instance(fun.owner))
        if function.kind != "arrow":
            if fun.this is not None:
                env.vars["this"] = fun.this
            elif fun.owner is not None and function.kind == "method":
                env.vars["this"] = self.instance(fun.owner)
        used: set[str] = set()
        for parameter in function.parameters:
            if parameter.kind == "rest":
                self.assign(parameter.target, Seq(given), env, declare=True)
                given = []
            elif parameter.kind == "keywords":
                left = {name: v for name, v in named.items() if name not in used}
                open_ = "**" in left
                left.pop("**", None)
                self.assign(parameter.target, Rec(left, open_), env, declare=True)
            else:
                value = self._argument(parameter, given, named, used, fun)
                self.assign(parameter.target, value, env, declare=True)
                if parameter.sets_field and isinstance(fun.this, Rec):
                    fun.this.fields[parameter.name] = value
        return env

    def _argument(
        self,
        parameter: Parameter,
        given: list[Value],
        named: dict[str, Value],
        used: set[str],
        fun: Fun,
    ) -> Value:
        if parameter.kind == "one" and given:
            value = given.pop(0)
            if value == NOTHING and parameter.default is not None and fun.env.file.endswith(_JS):
                return self.value(parameter.default, fun.env)
            return value
        name = parameter.name
        if name in named:
            used.add(name)
            return named[name]
        if "**" in named and isinstance(named["**"], Sym):
            return named["**"].then(name)
        if parameter.default is not None:
            return self.value(parameter.default, fun.env)
        if fun.env.file.endswith(_JS):
            return NOTHING
        return self.unknown_for(parameter, fun.env)


_JS: Final = (".js", ".mjs", ".cjs", ".jsx", ".ts", ".mts", ".cts", ".tsx")


def _print_of(value: Value | None, depth: int = 2) -> Any:
    """Equal for values that lead the same way."""
    if isinstance(value, Const):
        return ("const", type(value.value).__name__, str(value.value))
    if isinstance(value, Fun):
        return ("fun", id(value.function), id(value.this))
    if isinstance(value, Rec) and not value.kind and depth and len(value.fields) < 20:
        parts = tuple((name, _print_of(part, depth - 1)) for name, part in value.fields.items())
        return ("rec", value.open, parts)
    if isinstance(value, Seq) and depth and len(value.items) < 20:
        return ("seq", value.open, tuple(_print_of(item, depth - 1) for item in value.items))
    if isinstance(value, Many):
        return tuple(_print_of(one, depth) for one in value.values)
    if isinstance(value, Sym):
        return value
    return id(value) if value is not None else None


def within(offsets: Sequence[int], span: tuple[int, int]) -> bool:
    """Whether one of these, in order, lies in a span."""
    at = bisect.bisect_left(offsets, span[0])
    return at < len(offsets) and offsets[at] < span[1]


def _set_later(value: Value) -> bool:
    """A value that something is put in place of, or into, at some other time."""
    if isinstance(value, Const):
        return value.value is None or value.value is False
    if isinstance(value, Seq):
        return not value.items and not value.open
    return isinstance(value, Rec) and not (
        value.fields or value.open or value.kind or value.made_by
    )


def _takes_self(function: Function) -> bool:
    return function.kind in ("method", "class", "getter") and function.file.endswith(
        (".py", ".pyw")
    )


def _constructors(machine: Machine, kls: Kls) -> tuple[str, ...]:
    name = "__init__" if kls.made.file.endswith((".py", ".pyw")) else "constructor"
    seen: list[Kls] = [kls]
    for one in seen[:8]:
        if name in one.made.methods:
            return (name,)
        for base in machine.bases(one):
            if isinstance(base, Kls) and base not in seen:
                seen.append(base)
    return ()


def _equal(left: Value, right: Value) -> bool | None:
    if isinstance(left, Const) and isinstance(right, Const):
        return bool(left.value == right.value)
    for one, other in ((left, right), (right, left)):
        if one == NOTHING and isinstance(other, Rec | Seq | Fun | Kls | Mod | Text):
            return False
        if (
            isinstance(one, Many)
            and isinstance(other, Const)
            and all(isinstance(v, Const) and v.value != other.value for v in one.values)
        ):
            return False
    if left is right and isinstance(left, Fun | Kls):
        return True
    return None


def _ends(body: Block) -> bool:
    """Whether a block surely leaves: by its last statement."""
    if not body:
        return False
    last = body[-1]
    if last[0] in ("return", "raise", "break", "continue"):
        return True
    if last[0] == "block":
        return _ends(last[1])
    if last[0] == "if":
        return _ends(last[2]) and _ends(last[3])
    return False


_STATEMENTS: Final[dict[str, Any]] = {
    name.removeprefix("_s_"): value
    for name, value in vars(Machine).items()
    if name.startswith("_s_")
}
_EXPRESSIONS: Final[dict[str, Any]] = {
    name.removeprefix("_e_"): value
    for name, value in vars(Machine).items()
    if name.startswith("_e_")
}
