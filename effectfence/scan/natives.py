"""What the machine knows of the languages' own functions: lists, records, texts, promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from effectfence.scan.tables import table
from effectfence.scan.values import (
    NOTHING,
    UNKNOWN,
    Const,
    Fun,
    Kls,
    Many,
    Native,
    Rec,
    Seq,
    Sym,
    Text,
    Value,
    alternatives,
    joined,
    many,
    texts,
    truth,
)

if TYPE_CHECKING:
    from effectfence.scan.machine import Call, Machine

_RECORD_METHODS: Final = table(
    """get items keys values update setdefault pop copy has set hasOwnProperty entries forEach
    clear delete model_dump dict toString"""
)
_SAME_TEXT: Final = table(
    """strip lstrip rstrip trim trimStart trimEnd toString encode decode trimEnd valueOf expandtabs
    normalize dedent"""
)
_CASE: Final = {
    "lower": str.lower,
    "toLowerCase": str.lower,
    "upper": str.upper,
    "toUpperCase": str.upper,
    "casefold": str.lower,
    "title": str.title,
    "capitalize": str.capitalize,
}
_SAME_LIST: Final = table(
    """filter slice copy sort toSorted reverse toReversed flat values entries_ concat_"""
)
_PASSED_THROUGH: Final = table(
    """JSON.stringify json.dumps str String bytes orjson.dumps list tuple Array.from copy.copy
    copy.deepcopy structuredClone Promise.resolve sorted Object.freeze Object.seal typing.cast
    Symbol frozenset Array.of MappingProxyType types.MappingProxyType urllib.parse.quote
    encodeURIComponent textwrap.dedent inspect.cleandoc urllib.parse.urlencode shlex.split
    reversed functools.wraps contextlib.closing contextlib.aclosing contextlib.nullcontext closing
    asyncio.shield asyncio.create_task asyncio.ensure_future
    asyncio.run anyio.run util.promisify promisify util.promisify deepcopy node:util.promisify
    frozendict Number int asyncio.wait_for"""
)
_CALLS_FIRST: Final = table(
    """asyncio.to_thread anyio.to_thread.run_sync run_in_threadpool to_thread
    starlette.concurrency.run_in_threadpool asgiref.sync.sync_to_async anyio.run_sync
    to_thread.run_sync asyncer.asyncify setImmediate setTimeout queueMicrotask process.nextTick
    threading.Thread"""
)
_ALL: Final = frozenset(
    ("Promise.all", "Promise.allSettled", "Promise.race", "Promise.any", "asyncio.gather")
)


def has(owner: Rec, name: str) -> bool:
    return name in _RECORD_METHODS


# --- iterating ------------------------------------------------------------------------------------


def iterated(value: Value) -> list[Value] | None:
    """What a loop over this goes through, if that is known in full."""
    if isinstance(value, Seq):
        return list(value.items)
    if isinstance(value, Rec) and not value.kind and not value.open and not value.made_by:
        return [Const(name) for name in value.fields]
    if isinstance(value, Many):
        known = [iterated(one) for one in value.values if one != NOTHING]
        if known and all(items is not None for items in known):
            return [item for items in known for item in items or ()]
    if isinstance(value, Kls):
        named = [s for s in value.made.fields if s[0] == "assign" and s[2][0] == "const"]
        return [Const(s[2][1]) for s in named] or None
    if value == NOTHING:
        return []
    return None


def an_item(value: Value) -> Value:
    """Any one of what a loop over this goes through."""
    for one in alternatives(value):
        if isinstance(one, Seq) and one.items:
            return many(one.items)
        if isinstance(one, Rec) and one.fields:
            return UNKNOWN
        if isinstance(one, Sym) and one.root != "unknown":
            return one.then("[]")
    return UNKNOWN


def extend(machine: Machine, target: Seq, added: Value) -> None:
    items = iterated(added)
    if items is None or (isinstance(added, Seq) and added.open) or machine.uncertain:
        target.open = True
    target.items.extend((items if items is not None else [an_item(added)])[:1_000])


def merge(machine: Machine, target: Rec, added: Value) -> None:
    for one in alternatives(added):
        if isinstance(one, Rec):
            for name, value in one.fields.items():
                known = target.fields.get(name) if isinstance(added, Many) else None
                target.fields[name] = value if known is None else many((known, value))
            target.open = target.open or one.open or bool(one.kind)
        elif isinstance(one, Seq):
            for pair in one.items:
                if isinstance(pair, Seq) and len(pair.items) == 2:
                    key = pair.items[0]
                    if isinstance(key, Const):
                        target.fields[str(key.value)] = pair.items[1]
        elif one != NOTHING:
            target.open = True


def holds(container: Value, item: Const) -> bool | None:
    """`item in container`, where that can be said."""
    if isinstance(container, Seq) and all(isinstance(one, Const) for one in container.items):
        found = any(one.value == item.value for one in container.items if isinstance(one, Const))
        return True if found else None if container.open else False
    if isinstance(container, Rec) and not container.kind:
        found = str(item.value) in container.fields
        return True if found else None if container.open else False
    if isinstance(container, Const) and isinstance(container.value, str):
        return str(item.value) in container.value
    if isinstance(container, Kls):
        known = iterated(container)
        return None if known is None else any(one == item for one in known)
    return None


# --- methods of known values ----------------------------------------------------------------------
def call(
    machine: Machine,
    callee: Native,
    args: list[Value],
    named: dict[str, Value],
    line: int,
    file: str,
) -> Value:
    """A method of a known value."""
    receiver, name = callee.receiver, callee.name
    if isinstance(receiver, Fun):
        return _of_function(machine, receiver, name, args, named, line, file)
    if isinstance(receiver, Seq):
        return _of_list(machine, receiver, name, args, line, file)
    if isinstance(receiver, Rec):
        return _of_record(machine, receiver, name, args, named, line, file)
    if isinstance(receiver, Const | Text):
        return _of_text(machine, receiver, name, args, named)
    return UNKNOWN


def _of_function(
    machine: Machine,
    receiver: Fun,
    name: str,
    args: list[Value],
    named: dict[str, Value],
    line: int,
    file: str,
) -> Value:
    if name in ("call", "fn", "run", "ainvoke", "invoke", "execute"):
        return machine.enter(receiver, args[1:] if name == "call" else args, named, line, file)
    if name == "apply":
        items = iterated(args[1]) if len(args) > 1 else []
        return machine.enter(receiver, items or [UNKNOWN], {}, line, file)
    if name == "bind":
        this = args[0] if args else receiver.this
        return Fun(receiver.function, receiver.env, this, receiver.owner)
    if name in ("then", "finally", "catch"):
        return receiver
    return UNKNOWN


def _of_list(
    machine: Machine, receiver: Seq, name: str, args: list[Value], line: int, file: str
) -> Value:
    if name in ("append", "push", "add", "unshift", "appendleft"):
        receiver.items.extend(args if len(receiver.items) < 1_000 else ())
        receiver.open = receiver.open or bool(machine.uncertain)
        return NOTHING
    if name in ("extend", "update"):
        for arg in args:
            extend(machine, receiver, arg)
        return NOTHING
    if name == "insert" and len(args) == 2:
        receiver.items.append(args[1])
        return NOTHING
    if name in ("concat",):
        out = Seq(list(receiver.items), receiver.open)
        for arg in args:
            extend(machine, out, arg if not isinstance(arg, Rec) else Seq([arg]))
        return out
    if name in _SAME_LIST:
        out = Seq(list(receiver.items), receiver.open or name in ("filter", "slice"))
        if name == "filter" and args:
            results = _each(machine, receiver, args[0], line, file)
            held = [truth(result) for result in results]
            pairs = zip(receiver.items, held, strict=False)
            out.items = [item for item, holds_ in pairs if holds_ is not False]
            out.open, out.fewer = receiver.open, receiver.fewer or None in held
        return out
    if name in ("map", "flatMap", "forEach", "some", "every", "find", "reduce", "findIndex"):
        results = _each(machine, receiver, args[0], line, file) if args else []
        if name == "map":
            return Seq(results, receiver.open)
        if name == "flatMap":
            flat = Seq([], receiver.open)
            for result in results:
                extend(machine, flat, result)
            return flat
        if name == "find":
            return _found(machine, receiver, results)
        return UNKNOWN
    if name == "join":
        separator = args[0] if args else Const(",")
        parts: list[Value] = []
        for at, item in enumerate(receiver.items[:40]):
            parts += [separator, item] if at else [item]
        return joined(parts) if parts else Const("")
    if name in ("includes", "__contains__") and args and isinstance(args[0], Const):
        known = holds(receiver, args[0])
        return UNKNOWN if known is None else Const(known)
    if name in ("pop", "shift", "at", "popleft"):
        return many(receiver.items) if receiver.items else UNKNOWN
    if name == "entries":
        return Seq([Seq([Const(at), item]) for at, item in enumerate(receiver.items)])
    return UNKNOWN


def _found(machine: Machine, receiver: Seq, results: list[Value]) -> Value:
    """`find`: the item whose test surely holds, or any whose test may."""
    possible: list[Value] = []
    for item, result in zip(receiver.items, results, strict=False):
        holds_ = truth(result)
        if holds_:
            return item
        if holds_ is None:
            possible.append(item)
    if receiver.open:
        possible.append(UNKNOWN)
    return many(possible) if possible else NOTHING


def _each(machine: Machine, receiver: Seq, function: Value, line: int, file: str) -> list[Value]:
    results: list[Value] = []
    items = receiver.items[:1_000]
    if receiver.open and not items:
        items = [UNKNOWN]
    for at, item in enumerate(items):
        results.append(machine.call(function, [item, Const(at)], {}, line, file=file))
    return results


def _of_record(
    machine: Machine,
    receiver: Rec,
    name: str,
    args: list[Value],
    named: dict[str, Value],
    line: int,
    file: str,
) -> Value:
    if name in ("get", "pop", "setdefault"):
        key = args[0] if args else UNKNOWN
        if name == "setdefault" and len(args) > 1:
            if not isinstance(key, Const):
                receiver.open = True
                return receiver.fields.setdefault("*", args[1])
            return receiver.fields.setdefault(str(key.value), args[1])
        found = machine.index(receiver, key)
        if found == NOTHING and len(args) > 1:
            return args[1]
        return found
    if name == "set" and len(args) == 2:
        if isinstance(args[0], Const):
            machine.set_field(receiver, str(args[0].value), args[1])
        else:
            receiver.open = True
            receiver.fields.setdefault("*", args[1])
        return receiver
    if name == "update":
        for arg in args:
            merge(machine, receiver, arg)
        receiver.fields.update(named)
        return NOTHING
    if name in ("has", "hasOwnProperty") and args and isinstance(args[0], Const):
        known = holds(receiver, args[0])
        return UNKNOWN if known is None else Const(known)
    if name == "keys":
        return Seq([Const(key) for key in receiver.fields], receiver.open)
    if name == "values":
        return Seq(list(receiver.fields.values()), receiver.open)
    if name in ("items", "entries"):
        return Seq(
            [Seq([Const(key), value]) for key, value in receiver.fields.items()], receiver.open
        )
    if name == "forEach" and args:
        for named_, value in list(receiver.fields.items()):
            machine.call(args[0], [value, Const(named_)], {}, line, file=file)
        return NOTHING
    if name in ("copy", "model_dump", "dict"):
        return Rec(dict(receiver.fields), receiver.open, file=receiver.file, line=receiver.line)
    return UNKNOWN


def _of_text(
    machine: Machine, receiver: Const | Text, name: str, args: list[Value], named: dict[str, Value]
) -> Value:
    if isinstance(receiver, Const) and not isinstance(receiver.value, str):
        return UNKNOWN
    if name in _SAME_TEXT:
        if isinstance(receiver, Const) and name in ("strip", "trim"):
            return Const(receiver.value.strip())
        return receiver
    if name in _CASE:
        if isinstance(receiver, Const):
            return Const(_CASE[name](receiver.value))
        return Text(tuple(_CASE[name](p) if isinstance(p, str) else p for p in receiver.parts))
    whole = receiver.value if isinstance(receiver, Const) else None
    if name in ("replace", "replaceAll") and len(args) == 2:
        old, new = texts(args[0]), texts(args[1])
        if whole is not None and old and new and isinstance(args[0], Const):
            return Const(whole.replace(old[0], new[0]))
        return receiver  # mostly it is made harmless, and reads as before
    if name == "format":
        return Text((whole, *args, *named.values())) if whole is not None else receiver
    if name in ("startswith", "startsWith") and whole is not None and args:
        options = args[0].items if isinstance(args[0], Seq) else [args[0]]
        prefixes = [text for option in options for text in texts(option)]
        if prefixes:
            return Const(any(whole.startswith(prefix) for prefix in prefixes))
    if name in ("endswith", "endsWith") and whole is not None and args:
        suffixes = texts(args[0])
        if suffixes:
            return Const(whole.endswith(suffixes[0]))
    if name == "includes" and whole is not None and isinstance(args[0] if args else None, Const):
        return Const(str(args[0].value) in whole)  # type: ignore[attr-defined]
    if name in ("split", "splitlines") and whole is not None:
        separator = texts(args[0])[0] if args and texts(args[0]) else None
        pieces = whole.split(separator) if separator != "" else list(whole)
        return Seq([Const(piece) for piece in pieces[:80]])
    if name == "join" and args:
        items = iterated(args[0])
        if items is None:
            return Text((UNKNOWN,))
        parts: list[Value] = []
        for at, item in enumerate(items[:40]):
            parts += [receiver, item] if at else [item]
        return joined(parts) if parts else Const("")
    if name in ("concat",):
        return joined([receiver, *args])
    if name in ("removeprefix", "removesuffix") and whole is not None and args and texts(args[0]):
        method = getattr(whole, name)
        return Const(method(texts(args[0])[0]))
    if name in ("slice", "substring", "substr", "split", "padStart", "padEnd", "zfill"):
        return Text((UNKNOWN,))
    return UNKNOWN


# --- functions that everybody has -----------------------------------------------------------------
def known_function(machine: Machine, call: Call) -> Value | None:
    """The answer of a function whose meaning is known; `None`: it is not one of them."""
    sym = call.callee
    dotted = ".".join(sym.path)
    args = call.args
    if sym.root not in ("module", "global"):
        return _of_outsiders(machine, call)
    if dotted in _PASSED_THROUGH:
        if (
            args
            and isinstance(args[0], Sym)
            and dotted in ("list", "tuple", "sorted", "Array.from")
        ):
            return None
        return args[0] if args else None
    if dotted in _CALLS_FIRST and args:
        function = call.named.get("target", args[0])
        return machine.call(function, args[1:], call.named, call.line, file=call.file)
    if dotted in _ALL:
        if dotted == "asyncio.gather":
            return Seq(args)
        return args[0] if args else Seq([])
    if dotted in ("functools.partial", "partial") and args:
        return _partial(machine, args, call)
    if dotted in ("Object.assign",) and args:
        target = args[0] if isinstance(args[0], Rec) else Rec(file=call.file, line=call.line)
        for arg in args[1:]:
            merge(machine, target, arg)
        return target
    if dotted in ("Object.keys", "Object.values", "Object.entries", "Object.fromEntries") and args:
        return _object(machine, dotted.rpartition(".")[2], args[0], call)
    if dotted == "dict":
        made = Rec(dict(call.named), file=call.file, line=call.line)
        made.fields.pop("**", None)
        for arg in args:
            merge(machine, made, arg)
        return made
    if dotted in ("Map", "WeakMap", "Set") and call.new:
        return _collection(machine, dotted, args, call)
    if dotted in ("set", "list", "tuple", "collections.deque") and not args:
        return Seq([])
    if dotted in ("set", "enumerate") and args:
        items = iterated(args[0])
        if items is None:
            return None
        if dotted == "set":
            return Seq(items)
        return Seq([Seq([Const(at), item]) for at, item in enumerate(items)])
    if dotted in ("getattr",) and len(args) >= 2 and isinstance(args[1], Const):
        return machine.attribute(args[0], str(args[1].value))
    if dotted == "getattr" and len(args) >= 2:
        return Sym("unknown", ("getattr",))
    if dotted in ("map", "filter") and len(args) == 2 and isinstance(args[1], Seq):
        results = _each(machine, args[1], args[0], call.line, call.file)
        return Seq(results) if dotted == "map" else args[1]
    if dotted in ("Array.isArray", "isinstance", "callable", "Boolean", "bool", "len", "hasattr"):
        return Sym("unknown", (dotted,))
    return None


def _of_outsiders(machine: Machine, call: Call) -> Value | None:
    name = call.name
    if name in ("then", "finally") and call.args and len(call.callee.path) > 1:
        given = Sym(call.callee.root, call.callee.path[:-1])
        return machine.call(call.args[0], [given], {}, call.line, file=call.file)
    if name == "run_in_executor" and len(call.args) >= 2:
        return machine.call(call.args[1], call.args[2:], {}, call.line, file=call.file)
    return None


def _partial(machine: Machine, args: list[Value], call: Call) -> Value:
    first = args[0]
    if not isinstance(first, Fun):
        return first
    from effectfence.scan.ir import Function, Parameter
    from effectfence.scan.values import Env

    env = Env(first.env, first.function.file, is_function=True)
    env.vars["partial function"] = first
    given: list[Any] = []
    for at, arg in enumerate(args[1:]):
        env.vars[f"partial {at}"] = arg
        given.append(("name", f"partial {at}"))
    named: list[Any] = []
    for name, arg in call.named.items():
        env.vars[f"partial {name}"] = arg
        named.append((name, ("name", f"partial {name}")))
    rest = Parameter(("name", "rest of them"), kind="rest")
    others = Parameter(("name", "others of them"), kind="keywords")
    body = (
        "return",
        (
            "call",
            ("name", "partial function"),
            (*given, ("spread", ("name", "rest of them"))),
            (*named, (None, ("name", "others of them"))),
            call.line,
        ),
        call.line,
    )
    made = Function(
        first.function.name,
        first.function.file,
        first.function.line,
        first.function.end_line,
        [rest, others],
        lambda: (body,),
        kind="arrow",
    )
    return Fun(made, env)


def _object(machine: Machine, what: str, value: Value, call: Call) -> Value:
    found: list[Value] = []
    for one in alternatives(value):
        if what == "fromEntries":
            made = Rec(file=call.file, line=call.line, open=not isinstance(one, Seq))
            merge(machine, made, one)
            found.append(made)
        elif isinstance(one, Rec):
            found.append(_of_record(machine, one, what, [], {}, call.line, call.file))
        elif isinstance(one, Seq):
            found.append(_of_list(machine, one, what, [], call.line, call.file))
        else:
            from effectfence.scan.values import Mod

            if isinstance(one, Mod):
                found.append(_of_module(machine, one.file, what))
            elif isinstance(one, Sym) and one.root != "unknown":
                found.append(one.then(what, "()"))
    return many(found)


def _of_module(machine: Machine, path: str, what: str) -> Value:
    """`Object.values(await import("./tools"))`."""
    exports = machine.program.module(path).exports
    made = Rec({name: machine.member(path, name) for name in exports}, file=path)
    return _of_record(machine, made, what, [], {}, 0, path)


def _collection(machine: Machine, what: str, args: list[Value], call: Call) -> Value:
    if what == "Set":
        made_list = Seq([])
        if args:
            extend(machine, made_list, args[0])
        return made_list
    made = Rec(file=call.file, line=call.line)
    if args:
        merge(machine, made, args[0])
    return made
