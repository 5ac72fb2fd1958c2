"""Python, as tree-sitter parses it, lowered to `ir`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from effectfence.scan.ir import (
    NONE,
    UNKNOWN,
    Block,
    Class,
    Function,
    Import,
    Module,
    Node,
    Parameter,
)

_DEEPEST: Final = 150
"""Nesting beyond this is not looked into; hand-written code stays below 40."""


def lower_module(file: str, root: Any) -> Module:
    """The top of a file. Function bodies stay as they are until somebody wants them."""
    module = Module(file, "python")
    _Python(file).top(root, module)
    return module


def lower_expression(file: str, node: Any) -> Node:
    """One expression, wherever it stands."""
    return _Python(file).expression(node)


class _Python:
    def __init__(self, file: str) -> None:
        self.file = file
        self.depth = 0

    # --- the top of a file --------------------------------------------------------------------

    def top(self, node: Any, module: Module) -> None:
        for child in node.named_children:
            self._top_statement(child, module)

    def _top_statement(self, node: Any, module: Module) -> None:
        kind = node.type
        if kind in ("import_statement", "import_from_statement"):
            for name, what in self.imports(node):
                if name == "*":
                    module.star_imports.append(what)
                else:
                    module.imports[name] = what
        elif kind in ("if_statement", "try_statement", "with_statement", "block") or kind in (
            "else_clause",
            "elif_clause",
            "except_clause",
            "finally_clause",
        ):
            if kind == "if_statement" and b"__main__" in node.children[1].text:
                module.running.append(self._later(node))
                return
            for child in node.named_children:
                self._top_statement(child, module)
            module.running.append(self._later(node))
        else:
            self._bind(node, module)

    def _bind(self, node: Any, module: Module) -> None:
        if node.type in ("function_definition", "decorated_definition", "class_definition"):
            for statement in self.statement(node):
                module.bindings.setdefault(statement[1].name, []).append(statement)
            module.running.append(self._later(node))
            return
        if node.type != "expression_statement":
            if node.type not in ("comment", "pass_statement"):
                module.running.append(self._later(node))
            return
        inner = node.named_children[0] if node.named_children else node
        if inner.type in ("assignment", "augmented_assignment"):
            for statement in self.statement(node):
                for name in _names_bound(statement[1]):
                    module.bindings.setdefault(name, []).append(statement)
        elif inner.type == "call":
            function = inner.child_by_field_name("function")
            if function is not None and function.type == "attribute":
                root = _root_of(function)
                if root and root in module.bindings:
                    module.bindings[root].extend(self.statement(node))
        module.running.append(self._later(node))

    def _later(self, node: Any) -> Any:
        return (node.start_byte, node.end_byte), lambda: tuple(self.statement(node))

    def imports(self, node: Any) -> Iterator[tuple[str, Import]]:
        if node.type == "import_statement":
            for child in node.named_children:
                if child.type == "aliased_import":
                    name = _text(child.child_by_field_name("name"))
                    yield _text(child.child_by_field_name("alias")), Import(name, "*")
                elif child.type == "dotted_name":
                    name = _text(child)
                    yield name.split(".")[0], Import(name.split(".")[0], "*")
            return
        source = node.child_by_field_name("module_name")
        if source is None:
            return
        level, module = 0, _text(source)
        if source.type == "relative_import":
            stripped = module.lstrip(".")
            level, module = len(module) - len(stripped), stripped
        for child in node.named_children:
            if child == source:
                continue
            if child.type == "wildcard_import":
                yield "*", Import(module, "*", level)
            elif child.type == "aliased_import":
                name = _text(child.child_by_field_name("name"))
                yield _text(child.child_by_field_name("alias")), Import(module, name, level)
            elif child.type == "dotted_name":
                yield _text(child), Import(module, _text(child), level)

    # --- statements ---------------------------------------------------------------------------

    def block(self, node: Any) -> Block:
        if node is None:
            return ()
        out: list[Node] = []
        for child in node.named_children:
            out.extend(self.statement(child))
        return tuple(out)

    def statement(self, node: Any) -> list[Node]:
        if self.depth > _DEEPEST:
            return []
        self.depth += 1
        try:
            method = getattr(self, f"_s_{node.type}", None)
            return method(node) if method else []
        finally:
            self.depth -= 1

    def _s_expression_statement(self, node: Any) -> list[Node]:
        out: list[Node] = []
        for child in node.named_children:
            if child.type == "assignment":
                out.extend(self._assignment(child))
            elif child.type == "augmented_assignment":
                out.append(
                    (
                        "augment",
                        self.expression(child.child_by_field_name("left")),
                        _text(child.child_by_field_name("operator")),
                        self.expression(child.child_by_field_name("right")),
                        _line(child),
                    )
                )
            elif child.type not in ("comment", "string"):
                out.append(("expr", self.expression(child)))
        return out

    def _assignment(self, node: Any) -> list[Node]:
        right = node.child_by_field_name("right")
        if right is None:
            return []
        left = self.target(node.child_by_field_name("left"))
        if right.type == "assignment":
            inner = self._assignment(right)
            return [*inner, ("assign", left, inner[-1][2], _line(node))] if inner else []
        return [("assign", left, self.expression(right), _line(node))]

    def target(self, node: Any) -> Node:
        if node.type in ("pattern_list", "tuple_pattern", "list_pattern", "expression_list"):
            return ("list", tuple(self.target(child) for child in node.named_children))
        return self.expression(node)

    def _s_if_statement(self, node: Any) -> list[Node]:
        test = self.expression(node.child_by_field_name("condition"))
        then = self.block(node.child_by_field_name("consequence"))
        rest = node.children_by_field_name("alternative")
        return [("if", test, then, self._alternatives(rest))]

    def _alternatives(self, rest: list[Any]) -> Block:
        if not rest:
            return ()
        first = rest[0]
        if first.type == "else_clause":
            return self.block(first.child_by_field_name("body"))
        test = self.expression(first.child_by_field_name("condition"))
        then = self.block(first.child_by_field_name("consequence"))
        return (("if", test, then, self._alternatives(rest[1:])),)

    def _s_for_statement(self, node: Any) -> list[Node]:
        target = self.target(node.child_by_field_name("left"))
        iterable = self.expression(node.child_by_field_name("right"))
        body = self.block(node.child_by_field_name("body"))
        return [("loop", target, iterable, body, _line(node))]

    def _s_while_statement(self, node: Any) -> list[Node]:
        test = self.expression(node.child_by_field_name("condition"))
        return [("while", test, self.block(node.child_by_field_name("body")), _line(node))]

    def _s_try_statement(self, node: Any) -> list[Node]:
        handlers: list[Block] = []
        final: Block = ()
        body = self.block(node.child_by_field_name("body"))
        for child in node.named_children:
            if child.type in ("except_clause", "except_group_clause"):
                inner = [c for c in child.named_children if c.type == "block"]
                bound = [
                    ("forget", (_text(t),))
                    for c in child.named_children
                    if c.type == "as_pattern"
                    for t in c.named_children[1:]
                ]
                handlers.append((*bound, *self.block(inner[0] if inner else None)))
            elif child.type == "else_clause":
                body += self.block(child.child_by_field_name("body"))
            elif child.type == "finally_clause":
                inner = [c for c in child.named_children if c.type == "block"]
                final = self.block(inner[0] if inner else None)
        return [("try", body, tuple(handlers), final)]

    def _s_with_statement(self, node: Any) -> list[Node]:
        out: list[Node] = []
        for clause in node.named_children:
            if clause.type != "with_clause":
                continue
            for item in clause.named_children:
                value = item.child_by_field_name("value") or (
                    item.named_children[0] if item.named_children else None
                )
                if value is None:
                    continue
                if value.type == "as_pattern":
                    source = value.named_children[0]
                    alias = value.child_by_field_name("alias")
                    target = self.target(
                        alias.named_children[0] if alias and alias.named_children else alias
                    )
                    entered = ("enter", self.expression(source))
                    out.append(("assign", target, entered, _line(value)))
                else:
                    out.append(("expr", ("enter", self.expression(value))))
        return [*out, *self.block(node.child_by_field_name("body"))]

    def _s_return_statement(self, node: Any) -> list[Node]:
        value = node.named_children
        return [("return", self._tuple(value) if value else NONE, _line(node))]

    def _s_raise_statement(self, node: Any) -> list[Node]:
        value = node.named_children
        return [("raise", self.expression(value[0]) if value else NONE)]

    def _s_break_statement(self, node: Any) -> list[Node]:
        return [("break",)]

    def _s_continue_statement(self, node: Any) -> list[Node]:
        return [("continue",)]

    def _s_delete_statement(self, node: Any) -> list[Node]:
        return []

    def _s_assert_statement(self, node: Any) -> list[Node]:
        return [("expr", ("other", tuple(self.expression(c) for c in node.named_children)))]

    def _s_import_statement(self, node: Any) -> list[Node]:
        return [
            ("import", name, what, _line(node)) for name, what in self.imports(node) if name != "*"
        ]

    _s_import_from_statement = _s_import_statement

    def _s_match_statement(self, node: Any) -> list[Node]:
        subject = self._tuple(node.children_by_field_name("subject"))
        cases: list[tuple[tuple[Node, ...] | None, Block]] = []
        clauses = node.child_by_field_name("body")
        for clause in clauses.named_children if clauses else ():
            if clause.type != "case_clause":
                continue
            tests: list[Node] | None = []
            for pattern in clause.named_children:
                if pattern.type == "case_pattern":
                    tests = self._patterns(pattern, tests)
            guard = clause.child_by_field_name("guard")
            body = self.block(clause.child_by_field_name("consequence"))
            if guard is not None:
                tests = tests or [UNKNOWN]
            cases.append((tuple(tests) if tests is not None else None, body))
        return [("switch", subject, tuple(cases), False)]

    def _patterns(self, node: Any, tests: list[Node] | None) -> list[Node] | None:
        """The constants a case compares with; `None`: it takes everything."""
        inner = node.named_children[0] if node.named_children else None
        if inner is None:
            return None if _text(node) == "_" else tests
        if inner.type == "union_pattern":
            for child in inner.named_children:
                tests = self._pattern(child, tests)
            return tests
        return self._pattern(inner, tests)

    def _pattern(self, node: Any, tests: list[Node] | None) -> list[Node] | None:
        if tests is None or node.type == "_":
            return None
        if node.type == "case_pattern" and node.named_children:
            return self._patterns(node, tests)
        if node.type == "dotted_name":
            names = _text(node).split(".")
            if len(names) == 1:
                return None
            value: Node = ("name", names[0])
            for name in names[1:]:
                value = ("attr", value, name)
            return [*tests, value]
        if node.type in ("string", "concatenated_string", "integer", "true", "false", "none"):
            return [*tests, self.expression(node)]
        return [*tests, UNKNOWN]

    # --- definitions --------------------------------------------------------------------------

    def _s_decorated_definition(self, node: Any) -> list[Node]:
        definition = node.child_by_field_name("definition")
        decorators = [
            (self.expression(child.named_children[0]), _line(child))
            for child in node.named_children
            if child.type == "decorator" and child.named_children
        ]
        if definition is None:
            return []
        out = self.statement(definition)
        for statement in out:
            statement[1].decorators = decorators
            statement[1].span = (node.start_byte, node.end_byte)
            if statement[0] == "def":
                names = [_text(c) for c in node.named_children if c.type == "decorator"]
                kinds = {"@staticmethod": "static", "@classmethod": "class", "@property": "getter"}
                for name in names:
                    statement[1].kind = kinds.get(name, statement[1].kind)
                    if "cached_property" in name:
                        statement[1].kind = "getter"
        return out

    def _s_function_definition(self, node: Any) -> list[Node]:
        return [("def", self.function(node))]

    def function(self, node: Any) -> Function:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        return Function(
            _text(name) if name else "",
            self.file,
            _line(node),
            node.end_point[0] + 1,
            self.parameters(node.child_by_field_name("parameters")),
            lambda: _Python(self.file).block(body),
            span=(node.start_byte, node.end_byte),
            documentation=_docstring(body),
        )

    def parameters(self, node: Any) -> list[Parameter]:
        out: list[Parameter] = []
        named = False
        for child in node.children if node else ():
            kind = child.type
            if kind == "*" or kind == "keyword_separator":
                named = True
                continue
            if not child.is_named or kind in ("comment", "positional_separator"):
                continue
            default = child.child_by_field_name("value")
            annotation = child.child_by_field_name("type")
            name = child.child_by_field_name("name") or child
            if kind == "typed_parameter":
                name = child.named_children[0]
            how = "named" if named else "one"
            if name.type == "list_splat_pattern" or kind == "list_splat_pattern":
                name, how, named = name.named_children[0], "rest", True
            elif name.type == "dictionary_splat_pattern" or kind == "dictionary_splat_pattern":
                name, how = name.named_children[0], "keywords"
            out.append(
                Parameter(
                    ("name", _text(name)),
                    self.expression(default) if default is not None else None,
                    how,
                    _text(annotation) if annotation is not None else "",
                )
            )
        return out

    def _s_class_definition(self, node: Any) -> list[Node]:
        bases: list[Node] = []
        arguments = node.child_by_field_name("superclasses")
        for child in arguments.named_children if arguments else ():
            if child.type not in ("keyword_argument", "comment"):
                bases.append(self.expression(child))
        name = _text(node.child_by_field_name("name"))
        body = node.child_by_field_name("body")
        made = Class(
            name,
            self.file,
            _line(node),
            bases,
            {},
            [],
            span=(node.start_byte, node.end_byte),
            documentation=_docstring(body),
        )
        for child in body.named_children if body else ():
            for statement in self.statement(child):
                if statement[0] == "def":
                    method = statement[1]
                    method.kind = "method" if method.kind == "function" else method.kind
                    made.methods[method.name] = method
                elif statement[0] in ("assign", "class"):
                    made.fields.append(statement)
        return [("class", made)]

    # --- expressions --------------------------------------------------------------------------

    def expression(self, node: Any) -> Node:
        if node is None or self.depth > _DEEPEST:
            return UNKNOWN
        self.depth += 1
        try:
            method = getattr(self, f"_e_{node.type}", None)
            if method:
                return method(node)  # type: ignore[no-any-return]
            return ("other", tuple(self.expression(child) for child in node.named_children))
        finally:
            self.depth -= 1

    def _tuple(self, nodes: list[Any]) -> Node:
        if len(nodes) == 1:
            return self.expression(nodes[0])
        return ("list", tuple(self.expression(node) for node in nodes))

    def _e_identifier(self, node: Any) -> Node:
        return ("name", _text(node))

    def _e_comment(self, node: Any) -> Node:
        return UNKNOWN

    def _e_type(self, node: Any) -> Node:
        return UNKNOWN

    def _e_string(self, node: Any) -> Node:
        parts: list[Node] = []
        literal = False
        for child in node.children:
            if child.type == "interpolation":
                inner = child.child_by_field_name("expression") or child.named_children[0]
                parts.append(self.expression(inner))
                literal = True
        if not literal:
            return ("const", _literal(_text(node)))
        parts = []
        for child in node.children:
            if child.type == "interpolation":
                inner = child.child_by_field_name("expression") or child.named_children[0]
                parts.append(self.expression(inner))
            elif child.type == "string_content":
                parts.append(("const", _text(child)))
        return ("text", tuple(parts))

    def _e_concatenated_string(self, node: Any) -> Node:
        parts = tuple(self.expression(child) for child in node.named_children)
        if all(part[0] == "const" and isinstance(part[1], str) for part in parts):
            return ("const", "".join(part[1] for part in parts))
        return ("text", parts)

    def _e_integer(self, node: Any) -> Node:
        try:
            return ("const", int(_text(node).replace("_", ""), 0))
        except ValueError:
            return UNKNOWN

    def _e_float(self, node: Any) -> Node:
        return ("const", 0.5)

    def _e_true(self, node: Any) -> Node:
        return ("const", True)

    def _e_false(self, node: Any) -> Node:
        return ("const", False)

    def _e_none(self, node: Any) -> Node:
        return NONE

    def _e_attribute(self, node: Any) -> Node:
        return (
            "attr",
            self.expression(node.child_by_field_name("object")),
            _text(node.child_by_field_name("attribute")),
        )

    def _e_subscript(self, node: Any) -> Node:
        keys = node.children_by_field_name("subscript")
        return ("index", self.expression(node.child_by_field_name("value")), self._tuple(keys))

    def _e_call(self, node: Any) -> Node:
        callee = self.expression(node.child_by_field_name("function"))
        args: list[Node] = []
        named: list[tuple[str | None, Node]] = []
        arguments = node.child_by_field_name("arguments")
        if arguments is not None and arguments.type == "generator_expression":
            args.append(self.expression(arguments))
        else:
            for child in arguments.named_children if arguments else ():
                if child.type == "keyword_argument":
                    name = _text(child.child_by_field_name("name"))
                    named.append((name, self.expression(child.child_by_field_name("value"))))
                elif child.type == "dictionary_splat":
                    named.append((None, self.expression(child.named_children[0])))
                elif child.type == "list_splat":
                    args.append(("spread", self.expression(child.named_children[0])))
                elif child.type != "comment":
                    args.append(self.expression(child))
        return ("call", callee, tuple(args), tuple(named), _line(node))

    def _e_parenthesized_expression(self, node: Any) -> Node:
        inner = [child for child in node.named_children if child.type != "comment"]
        return self._tuple(inner)

    def _e_list(self, node: Any) -> Node:
        items: list[Node] = []
        for child in node.named_children:
            if child.type == "list_splat":
                items.append(("spread", self.expression(child.named_children[0])))
            elif child.type != "comment":
                items.append(self.expression(child))
        return ("list", tuple(items))

    _e_tuple = _e_set = _e_expression_list = _e_list

    def _e_dictionary(self, node: Any) -> Node:
        pairs: list[tuple[Node | None, Node]] = []
        for child in node.named_children:
            if child.type == "pair":
                key = self.expression(child.child_by_field_name("key"))
                pairs.append((key, self.expression(child.child_by_field_name("value"))))
            elif child.type == "dictionary_splat":
                pairs.append((None, self.expression(child.named_children[0])))
        return ("dict", tuple(pairs), _line(node))

    def _e_list_comprehension(self, node: Any) -> Node:
        body = node.child_by_field_name("body")
        clauses: list[tuple[Node, Node]] = []
        for child in node.named_children:
            if child.type == "for_in_clause":
                left = self.target(child.child_by_field_name("left"))
                clauses.append((left, self.expression(child.child_by_field_name("right"))))
        if body is not None and body.type == "pair":
            key = self.expression(body.child_by_field_name("key"))
            value = self.expression(body.child_by_field_name("value"))
            return ("comp", ("list", (key, value)), tuple(clauses), "dict")
        return ("comp", self.expression(body), tuple(clauses), "list")

    _e_dictionary_comprehension = _e_generator_expression = _e_set_comprehension = (
        _e_list_comprehension
    )

    def _e_lambda(self, node: Any) -> Node:
        body = node.child_by_field_name("body")
        made = Function(
            "",
            self.file,
            _line(node),
            node.end_point[0] + 1,
            self.parameters(node.child_by_field_name("parameters")),
            lambda: (("return", _Python(self.file).expression(body), _line(node)),),
            kind="arrow",
            span=(node.start_byte, node.end_byte),
        )
        return ("fn", made)

    def _e_conditional_expression(self, node: Any) -> Node:
        inner = [child for child in node.named_children if child.type != "comment"]
        then, test, otherwise = (self.expression(child) for child in inner[:3])
        return ("cond", test, then, otherwise)

    def _e_boolean_operator(self, node: Any) -> Node:
        return (
            "logic",
            _text(node.child_by_field_name("operator")),
            self.expression(node.child_by_field_name("left")),
            self.expression(node.child_by_field_name("right")),
        )

    def _e_not_operator(self, node: Any) -> Node:
        return ("not", self.expression(node.child_by_field_name("argument")))

    def _e_comparison_operator(self, node: Any) -> Node:
        sides = [child for child in node.named_children if child.type != "comment"]
        operators = [child.type for child in node.children if not child.is_named]
        if len(sides) != 2 or not operators:
            return ("other", tuple(self.expression(child) for child in sides))
        names = {"is": "==", "is not": "!=", "<>": "!="}
        operator = " ".join(operators)
        left, right = (self.expression(side) for side in sides)
        return ("cmp", names.get(operator, operator), left, right)

    def _e_binary_operator(self, node: Any) -> Node:
        left = self.expression(node.child_by_field_name("left"))
        right = self.expression(node.child_by_field_name("right"))
        operator = _text(node.child_by_field_name("operator"))
        if operator == "+":
            return ("plus", left, right)
        if operator == "%":
            return ("text", (left, ("other", (right,))))
        if operator == "/":
            return ("text", (left, ("const", "/"), right))
        return ("plus", left, right) if operator == "|" else ("other", (left, right))

    def _e_await(self, node: Any) -> Node:
        return self.expression(node.named_children[0])

    def _e_named_expression(self, node: Any) -> Node:
        target = self.expression(node.child_by_field_name("name"))
        return ("assign", target, self.expression(node.child_by_field_name("value")))

    def _e_yield(self, node: Any) -> Node:
        parts = node.named_children
        return ("yield", self.expression(parts[0]) if parts else NONE)

    def _e_keyword_argument(self, node: Any) -> Node:
        return self.expression(node.child_by_field_name("value"))


# --- text -----------------------------------------------------------------------------------------


def _text(node: Any) -> str:
    return node.text.decode("utf-8", "replace") if node is not None else ""


def _line(node: Any) -> int:
    return int(node.start_point[0]) + 1


def _literal(text: str) -> str:
    """What a string literal without interpolation says."""
    try:
        value = ast.literal_eval(text.lstrip("fFrRbBuU") if text[:1] in "fF" else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip("\"'")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _docstring(body: Any) -> str:
    for child in body.named_children if body else ():
        if child.type == "comment":
            continue
        if child.type == "expression_statement" and child.named_children:
            inner = child.named_children[0]
            if inner.type in ("string", "concatenated_string"):
                return _literal(_text(inner))
        return ""
    return ""


def _names_bound(target: Node) -> Iterator[str]:
    if target[0] == "name":
        yield target[1]
    elif target[0] in ("attr", "index"):
        yield from _names_bound(target[1])
    elif target[0] == "list":
        for part in target[1]:
            yield from _names_bound(part)


def _root_of(node: Any) -> str:
    while node is not None and node.type in ("attribute", "subscript", "call"):
        node = node.named_children[0] if node.named_children else None
    return _text(node) if node is not None and node.type == "identifier" else ""
