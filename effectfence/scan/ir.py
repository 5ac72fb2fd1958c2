"""One small language that Python, JavaScript and TypeScript are lowered to.

Owns the shapes that the front ends (`lower_python`, `lower_javascript`) write and `machine` reads.

1. An expression or statement is a tuple: its tag first, its operands after it. Tuples, because a
   scan makes hundreds of thousands of them and looks at each a few times.
2. Nothing here knows about tools, writes or guards.
3. Bodies are lowered when somebody asks for them: in a bundle of 50,000 lines a handful of
   functions is ever reached from a tool.

Expressions
    const value · name id · attr object name · index object key · call callee args kwargs line
    new callee args kwargs line · list items · dict pairs line · fn Function · class Class
    cond test then otherwise · logic op left right · cmp op left right · not x · text parts
    plus left right · comp element clauses kind · assign target value · spread x
    other parts (evaluated for what they do, their value unknown)
Statements
    expr x · assign target value line · augment target op value line · if test then otherwise
    switch subject cases · loop target iterable body · while test body · try body handlers final
    return x · raise x · break · continue · def Function · class Class · block body · forget names
    late thunk · import name what line
Targets
    name · attr · index · list · pattern pairs rest (destructuring)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Node = tuple[Any, ...]
Block = tuple[Node, ...]

NONE: Node = ("const", None)
UNKNOWN: Node = ("other", ())


@dataclass(slots=True)
class Parameter:
    """One parameter: a name or a pattern, its default, and how it takes its argument."""

    target: Node
    default: Node | None = None
    kind: str = "one"
    """one · rest (`*a`, `...a`) · keywords (`**k`) · named (after `*`)"""
    annotation: str = ""
    sets_field: bool = False

    @property
    def name(self) -> str:
        return str(self.target[1]) if self.target[0] == "name" else ""


@dataclass(slots=True, eq=False)
class Function:
    """A function, method, arrow or lambda. `body` is lowered on first use."""

    name: str
    file: str
    line: int
    end_line: int
    parameters: list[Parameter]
    lower: Callable[[], Block]
    decorators: list[tuple[Node, int]] = field(default_factory=list)
    kind: str = "function"
    """function · method · static · class (a classmethod) · getter · arrow"""
    span: tuple[int, int] = (0, 0)
    _body: Block | None = None
    documentation: str = ""

    @property
    def body(self) -> Block:
        if self._body is None:
            self._body = self.lower()
        return self._body


@dataclass(slots=True, eq=False)
class Class:
    """A class: its bases, its methods by name, and the statements that give it attributes."""

    name: str
    file: str
    line: int
    bases: list[Node]
    methods: dict[str, Function]
    fields: list[Node]
    """`assign` statements, run when a class or an instance is looked into"""
    decorators: list[tuple[Node, int]] = field(default_factory=list)
    span: tuple[int, int] = (0, 0)
    documentation: str = ""


@dataclass(slots=True)
class Import:
    """One imported name: `name` of `module` (`*` the module itself, `default` its default)."""

    module: str
    name: str
    level: int = 0
    """how many dots stand before a Python module"""


@dataclass(slots=True)
class Module:
    """The top of a file: what each name is bound by, in order."""

    file: str
    language: str
    bindings: dict[str, list[Node]] = field(default_factory=dict)
    """statements that bind or amend a name"""
    imports: dict[str, Import] = field(default_factory=dict)
    star_imports: list[Import] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    """exported name -> local name"""
    reexports: dict[str, Import] = field(default_factory=dict)
    running: list[tuple[tuple[int, int], Callable[[], Block]]] = field(default_factory=list)
    """statements at the top that do something, with their span, lowered on use"""
