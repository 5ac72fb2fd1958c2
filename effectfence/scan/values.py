"""What the machine knows of a value: constants, texts with holes, records, and names from outside.

1. A value is never wrong about what it claims to know; what is not known is a `Sym`, which says
   where it came from (`requests.Session().post`, an argument of the tool, nowhere).
2. `Many` holds the values of several ways through the code; at most `_MOST`, the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from effectfence.scan.ir import Class, Function

_MOST: Final = 6
_LONGEST_CHAIN: Final = 24


class Value:
    """Any of the below."""

    __slots__ = ()


@dataclass(slots=True, frozen=True)
class Const(Value):
    value: Any


@dataclass(slots=True, frozen=True)
class Text(Value):
    """A text of which some parts are known."""

    parts: tuple[Any, ...]
    """`str` where known, a `Value` where not"""


@dataclass(slots=True, frozen=True)
class Sym(Value):
    """Something from outside: where it came from, and what was looked up on it since."""

    root: str
    """module · global · input · context · unknown · field · fresh"""
    path: tuple[str, ...] = ()

    def then(self, *names: str) -> Sym:
        if len(self.path) >= _LONGEST_CHAIN:
            return self
        return Sym(self.root, self.path + names)

    @property
    def dotted(self) -> str:
        return ".".join(self.path).replace(".()", "()")


@dataclass(slots=True, eq=False)
class Seq(Value):
    items: list[Value]
    open: bool = False
    """there may be more, or fewer"""
    fewer: bool = False
    """there may be fewer, but no others"""


@dataclass(slots=True, eq=False)
class Rec(Value):
    """An object or a dictionary; with `kind`, an instance of a class of the package."""

    fields: dict[str, Value] = field(default_factory=dict)
    open: bool = False
    kind: Kls | None = None
    line: int = 0
    file: str = ""
    made_by: str = ""
    """the constructor that was called, as in `types.Tool`"""


@dataclass(slots=True, eq=False)
class Fun(Value):
    function: Function
    env: Env
    this: Value | None = None
    owner: Kls | None = None
    wraps: Fun | None = None
    """what `functools.wraps` says it stands for"""


@dataclass(slots=True, eq=False)
class Kls(Value):
    made: Class
    env: Env
    bases: list[Value] | None = None
    instance: Rec | None = None


@dataclass(slots=True, frozen=True)
class Mod(Value):
    """A file of the package, as its importers see it."""

    file: str


@dataclass(slots=True, eq=False)
class Native(Value):
    """A method of a known value, not called yet."""

    receiver: Value
    name: str


@dataclass(slots=True, eq=False)
class Super(Value):
    this: Value
    owner: Kls


@dataclass(slots=True, frozen=True)
class Many(Value):
    values: tuple[Value, ...]


class Env:
    """Names of one function or block; the module's own stand behind the last."""

    __slots__ = ("file", "is_function", "owner", "parent", "vars")

    def __init__(self, parent: Env | None, file: str, *, is_function: bool = False) -> None:
        self.parent = parent
        self.file = file
        self.vars: dict[str, Value] = {}
        self.is_function = is_function
        self.owner: Kls | None = parent.owner if parent else None

    def find(self, name: str) -> Env | None:
        env: Env | None = self
        while env is not None:
            if name in env.vars:
                return env
            env = env.parent
        return None

    def own_chain(self) -> list[Env]:
        """This and its blocks, up to and with the function they belong to."""
        chain: list[Env] = []
        env: Env | None = self
        while env is not None:
            chain.append(env)
            if env.is_function:
                break
            env = env.parent
        return chain


NOTHING: Final = Const(None)
UNKNOWN: Final = Sym("unknown")


def many(values: Iterable[Value]) -> Value:
    """The values of several ways, each once."""
    out: list[Value] = []
    for value in values:
        for one in alternatives(value):
            if not any(one is kept or _same(one, kept) for kept in out):
                out.append(one)
    if not out:
        return UNKNOWN
    return out[0] if len(out) == 1 else Many(tuple(out[:_MOST]))


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Const) and isinstance(b, Const):
        return type(a.value) is type(b.value) and bool(a.value == b.value)
    if isinstance(a, Fun) and isinstance(b, Fun):
        return a.function is b.function and a.this is b.this
    return isinstance(a, Sym) and isinstance(b, Sym) and a == b


def alternatives(value: Value) -> tuple[Value, ...]:
    return value.values if isinstance(value, Many) else (value,)


def truth(value: Value) -> bool | None:
    """Whether a condition holds, or `None` where it may go either way."""
    if isinstance(value, Const):
        return bool(value.value)
    if isinstance(value, Seq):
        return None if value.open or value.fewer else bool(value.items)
    if isinstance(value, Rec):
        return True if value.kind or value.fields or value.made_by else None
    if isinstance(value, Fun | Kls | Mod):
        return True
    if isinstance(value, Text):
        return True if any(isinstance(part, str) and part for part in value.parts) else None
    if isinstance(value, Many):
        known = {truth(one) for one in value.values}
        return known.pop() if len(known) == 1 else None
    return None


def texts(value: Value | None) -> list[str]:
    """Every text that a value may be; `{}` stands where a part is not known."""
    if value is None:
        return []
    out: list[str] = []
    for one in alternatives(value):
        if isinstance(one, Const) and isinstance(one.value, str):
            out.append(one.value)
        elif isinstance(one, Text):
            out.append("".join(part if isinstance(part, str) else "{}" for part in one.parts))
    return out


def text_of(value: Value | None) -> str | None:
    """The one text that a value is, if that is known."""
    if isinstance(value, Const) and isinstance(value.value, str):
        return value.value
    return None


def joined(parts: list[Value]) -> Value:
    """The text that these make, one after the other."""
    out: list[Any] = []
    for part in parts:
        if isinstance(part, Many):
            known = [one for one in part.values if isinstance(one, Const | Text)]
            part = known[0] if known else part
        if isinstance(part, Const) and part.value is not None and not isinstance(part.value, bool):
            pieces: tuple[Any, ...] = (str(part.value),)
        elif isinstance(part, Text):
            pieces = part.parts
        else:
            pieces = (part,)
        for piece in pieces:
            if isinstance(piece, str) and out and isinstance(out[-1], str):
                out[-1] += piece
            else:
                out.append(piece)
    if all(isinstance(piece, str) for piece in out):
        return Const("".join(out))
    return Text(tuple(out[:60]))


def inside(value: Value | None, depth: int = 4) -> Iterator[tuple[str, Value]]:
    """Every named part of a value and of what it holds: key, value."""
    if value is None or depth < 0:
        return
    for one in alternatives(value):
        if isinstance(one, Rec):
            for name, part in list(one.fields.items()):
                yield name, part
                yield from inside(part, depth - 1)
        elif isinstance(one, Seq):
            for part in one.items[:20]:
                yield from inside(part, depth - 1)


def syms(value: Value | None, depth: int = 4) -> Iterator[Sym]:
    """Every outside thing that a value is made of."""
    if value is None or depth < 0:
        return
    for one in alternatives(value):
        if isinstance(one, Sym):
            yield one
        elif isinstance(one, Text):
            for part in one.parts:
                if isinstance(part, Value):
                    yield from syms(part, depth - 1)
        elif isinstance(one, Seq):
            for part in one.items[:20]:
                yield from syms(part, depth - 1)
        elif isinstance(one, Rec) and not one.kind:
            for part in list(one.fields.values())[:40]:
                yield from syms(part, depth - 1)
