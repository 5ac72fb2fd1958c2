"""JavaScript and TypeScript, as tree-sitter parses them, lowered to `ir`."""

from __future__ import annotations

import re
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
from effectfence.scan.tables import table

_DEEPEST: Final = 200
_TRANSPARENT: Final = frozenset(
    (
        "as_expression",
        "satisfies_expression",
        "non_null_expression",
        "await_expression",
        "instantiation_expression",
    )
)
_DECLARATIONS: Final = table(
    """function_declaration generator_function_declaration class_declaration
    abstract_class_declaration lexical_declaration variable_declaration enum_declaration"""
)
_HELPERS: Final = table(
    """__importStar __importDefault __toESM _interopRequireDefault _interopRequireWildcard
    __toCommonJS _interop_require_default _interop_require_wildcard"""
)
"""What compilers put around `require`: the module itself, for our purposes."""
_DEFAULT_HELPERS: Final = frozenset(
    ("__importDefault", "_interopRequireDefault", "_interop_require_default")
)


def lower_module(file: str, root: Any) -> Module:
    """The top of a file. Function bodies stay as they are until somebody wants them."""
    module = Module(file, "javascript")
    _JavaScript(file).top(root, module)
    return module


def lower_expression(file: str, node: Any) -> Node:
    """One expression, wherever it stands."""
    return _JavaScript(file).expression(node)


class _JavaScript:
    def __init__(self, file: str) -> None:
        self.file = file
        self.depth = 0

    # --- the top of a file --------------------------------------------------------------------

    def top(self, node: Any, module: Module) -> None:
        for child in node.named_children:
            self._top_statement(child, module)

    def _top_statement(self, node: Any, module: Module) -> None:
        kind = node.type
        if kind == "import_statement":
            self._import(node, module)
        elif kind == "export_statement":
            self._export(node, module)
        elif kind in _DECLARATIONS:
            self._declare(node, module)
        elif kind == "ambient_declaration":
            return
        elif kind in ("if_statement", "try_statement", "statement_block", "else_clause"):
            for child in node.named_children:
                if (
                    child.type in ("statement_block", "else_clause", "if_statement")
                    or child.type in _DECLARATIONS
                    or child.type == "expression_statement"
                ):
                    self._top_statement(child, module)
            if kind in ("if_statement", "try_statement"):
                module.running.append(self._later(node))
        elif kind == "expression_statement":
            self._run(node, module)
        elif kind not in ("comment", "empty_statement"):
            module.running.append(self._later(node))

    def _declare(self, node: Any, module: Module) -> list[str]:
        names: list[str] = []
        if node.type not in ("lexical_declaration", "variable_declaration"):
            for statement in self.statement(node):
                made = statement[1]
                name = made[1] if isinstance(made, tuple) else made.name
                module.bindings.setdefault(name, []).append(statement)
                names.append(name)
            if node.type.endswith("class_declaration") or node.type.startswith("abstract"):
                module.running.append(self._later(node))
            return names
        for child in node.named_children:
            if child.type != "variable_declarator":
                continue
            names += self._declarator(child, module)
        module.running.append(self._later(node))
        return names

    def _declarator(self, node: Any, module: Module) -> list[str]:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        required = _required(value)
        if required is not None and name.type == "identifier":
            module.imports[_text(name)] = Import(*required)
            return [_text(name)]
        if required is not None and name.type == "object_pattern":
            for local, imported in _pattern_names(name):
                module.imports[local] = Import(required[0], imported)
            return [local for local, _ in _pattern_names(name)]
        if value is None:
            module.bindings.setdefault(_text(name), [])
            return [_text(name)]
        late: Node = ("late", self._once(node), value.type == "class")
        names = _names_in(name)
        for bound in names:
            module.bindings.setdefault(bound, []).append(late)
        return names

    def _once(self, node: Any) -> Any:
        """A declarator's statement, lowered when first wanted."""
        made: list[Node] = []

        def lower() -> Node:
            if not made:
                made.append(_JavaScript(self.file)._declarator_statement(node))
            return made[0]

        return lower

    def _declarator_statement(self, node: Any) -> Node:
        value = node.child_by_field_name("value")
        target = self.target(node.child_by_field_name("name"))
        lowered = self.expression(value) if value is not None else NONE
        if lowered[0] == "fn" and not lowered[1].name and target[0] == "name":
            lowered[1].name = target[1]
        return ("assign", target, lowered, _line(node))

    def _import(self, node: Any, module: Module) -> None:
        source = node.child_by_field_name("source")
        if source is None:
            return
        name = _string(source)
        found = False
        for clause in node.named_children:
            if clause.type != "import_clause":
                continue
            for child in clause.named_children:
                found = True
                if child.type == "identifier":
                    module.imports[_text(child)] = Import(name, "default")
                elif child.type == "namespace_import":
                    module.imports[_text(child.named_children[0])] = Import(name, "*")
                elif child.type == "named_imports":
                    for spec in child.named_children:
                        imported = spec.child_by_field_name("name")
                        alias = spec.child_by_field_name("alias") or imported
                        if imported is not None:
                            module.imports[_text(alias)] = Import(name, _name(imported))
        if not found:
            module.star_imports.append(Import(name, ""))

    def _export(self, node: Any, module: Module) -> None:
        source = node.child_by_field_name("source")
        declaration = node.child_by_field_name("declaration")
        is_default = any(child.type == "default" for child in node.children)
        if declaration is not None:
            for name in self._declare(declaration, module):
                module.exports["default" if is_default else name] = name
            return
        value = node.child_by_field_name("value")
        if value is not None:
            if value.type == "identifier":
                module.exports["default"] = _text(value)
            else:
                statement = ("assign", ("name", "default"), self.expression(value), _line(node))
                module.bindings["default"] = [statement]
                module.exports["default"] = "default"
                module.running.append(self._later(node))
            return
        star = any(child.type == "*" for child in node.children)
        for child in node.named_children:
            if child.type == "namespace_export" and source is not None:
                name = _text(child.named_children[0])
                module.reexports[name] = Import(_string(source), "*")
            elif child.type == "export_clause":
                for spec in child.named_children:
                    local = spec.child_by_field_name("name")
                    alias = spec.child_by_field_name("alias") or local
                    if local is None:
                        continue
                    if source is not None:
                        module.reexports[_name(alias)] = Import(_string(source), _name(local))
                    else:
                        module.exports[_name(alias)] = _name(local)
        if (
            star
            and source is not None
            and not any(child.type == "namespace_export" for child in node.named_children)
        ):
            module.star_imports.append(Import(_string(source), "*"))

    def _run(self, node: Any, module: Module) -> None:
        inner = node.named_children[0] if node.named_children else None
        module.running.append(self._later(node))
        if inner is None:
            return
        for part in inner.named_children if inner.type == "sequence_expression" else (inner,):
            self._amend(part, module)

    def _amend(self, node: Any, module: Module) -> None:
        """What `exports.x = …`, `X.y = …`, `X.push(…)` and `(function (X) {})(X)` add to a name."""
        late: Node = ("late", lambda: ("expr", _JavaScript(self.file).expression(node)), False)
        if node.type == "assignment_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            path = _text(left) if left.end_byte - left.start_byte < 200 else ""
            if path == "module.exports" or path.endswith("module.exports"):
                self._exports_object(right, module)
                statement = ("assign", ("name", "module.exports"), self._lazy(right), _line(node))
                module.bindings["module.exports"] = [statement]
                return
            if path.startswith(("exports.", "module.exports.")):
                name = path.rpartition(".")[2]
                if right.type == "identifier":
                    module.exports[name] = _text(right)
                elif right.type != "unary_expression" and right.type != "assignment_expression":
                    statement = ("assign", ("name", f"exports.{name}"), self._lazy(right), 0)
                    module.bindings[f"exports.{name}"] = [statement]
                    module.exports[name] = f"exports.{name}"
                return
            root = _root_of(left)
            if root in module.bindings or left.type == "identifier":
                module.bindings.setdefault(root or path, []).append(late)
        elif node.type == "call_expression":
            callee = node.child_by_field_name("function")
            arguments = node.child_by_field_name("arguments")
            if callee.type == "member_expression":
                root = _root_of(callee)
                if root in module.bindings:
                    module.bindings[root].append(late)
            elif callee.type == "parenthesized_expression" and arguments is not None:
                for argument in arguments.named_children:
                    if argument.type == "binary_expression":
                        argument = argument.named_children[0]
                    if argument.type == "identifier":
                        module.bindings.setdefault(_text(argument), []).append(late)
            elif callee.type == "identifier" and _text(callee) in ("__export", "__exportStar"):
                self._bundled_exports(arguments, module)

    def _bundled_exports(self, arguments: Any, module: Module) -> None:
        parts: list[Any] = arguments.named_children if arguments is not None else []
        if len(parts) == 2 and parts[0].type == "identifier" and parts[1].type == "object":
            late: Node = (
                "late",
                lambda: ("getters", _text(parts[0]), self.expression(parts[1])),
                False,
            )
            module.bindings.setdefault(_text(parts[0]), []).append(late)

    def _exports_object(self, right: Any, module: Module) -> None:
        if right.type == "identifier":
            module.exports["default"] = _text(right)
        for child in right.named_children if right.type == "object" else ():
            if child.type == "shorthand_property_identifier":
                module.exports[_text(child)] = _text(child)
            elif child.type == "pair":
                value = child.child_by_field_name("value")
                if value.type == "identifier":
                    module.exports[_name(child.child_by_field_name("key"))] = _text(value)

    def _lazy(self, node: Any) -> Node:
        return ("lazy", lambda: _JavaScript(self.file).expression(node))

    def _later(self, node: Any) -> Any:
        return (node.start_byte, node.end_byte), lambda: tuple(self.statement(node))

    # --- statements ---------------------------------------------------------------------------

    def block(self, node: Any) -> Block:
        if node is None:
            return ()
        if node.type != "statement_block":
            return tuple(self.statement(node))
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
            if child.type == "sequence_expression":
                out.extend(("expr", self.expression(part)) for part in child.named_children)
            elif child.type != "comment":
                out.append(("expr", self.expression(child)))
        return out

    def _s_lexical_declaration(self, node: Any) -> list[Node]:
        return [
            self._declarator_statement(child)
            for child in node.named_children
            if child.type == "variable_declarator"
        ]

    _s_variable_declaration = _s_lexical_declaration

    def _s_statement_block(self, node: Any) -> list[Node]:
        return [("block", self.block(node))]

    def _s_if_statement(self, node: Any) -> list[Node]:
        test = self.expression(node.child_by_field_name("condition"))
        then = self.block(node.child_by_field_name("consequence"))
        other = node.child_by_field_name("alternative")
        otherwise: Block = ()
        if other is not None:
            inner = [child for child in other.named_children if child.type != "comment"]
            otherwise = self.block(inner[0]) if inner else ()
        return [("if", test, (("block", then),), (("block", otherwise),))]

    def _s_switch_statement(self, node: Any) -> list[Node]:
        subject = self.expression(node.child_by_field_name("value"))
        cases: list[tuple[tuple[Node, ...] | None, Block]] = []
        body = node.child_by_field_name("body")
        for clause in body.named_children if body else ():
            if clause.type not in ("switch_case", "switch_default"):
                continue
            value = clause.child_by_field_name("value")
            statements: list[Node] = []
            for child in clause.named_children:
                if value is not None and child == value:
                    continue
                statements.extend(self.statement(child))
            tests = (self.expression(value),) if value is not None else None
            cases.append((tests, tuple(statements)))
        return [("switch", subject, tuple(cases), True)]

    def _s_for_in_statement(self, node: Any) -> list[Node]:
        target = self.target(node.child_by_field_name("left"))
        iterable = self.expression(node.child_by_field_name("right"))
        operator = _text(node.child_by_field_name("operator"))
        body = self.block(node.child_by_field_name("body"))
        if operator == "in":
            iterable = ("call", ("attr", ("name", "Object"), "keys"), (iterable,), (), _line(node))
        return [("loop", target, iterable, body, _line(node))]

    def _s_for_statement(self, node: Any) -> list[Node]:
        first = node.child_by_field_name("initializer")
        test = node.child_by_field_name("condition")
        return [
            *(self.statement(first) if first is not None else ()),
            (
                "while",
                self.expression(test) if test is not None else UNKNOWN,
                self.block(node.child_by_field_name("body")),
                _line(node),
            ),
        ]

    def _s_while_statement(self, node: Any) -> list[Node]:
        test = self.expression(node.child_by_field_name("condition"))
        return [("while", test, self.block(node.child_by_field_name("body")), _line(node))]

    _s_do_statement = _s_while_statement

    def _s_try_statement(self, node: Any) -> list[Node]:
        handler = node.child_by_field_name("handler")
        final = node.child_by_field_name("finalizer")
        caught: tuple[Block, ...] = ()
        if handler is not None:
            parameter = handler.child_by_field_name("parameter")
            forgotten = tuple(_names_in(parameter)) if parameter is not None else ()
            inner = self.block(handler.child_by_field_name("body"))
            caught = ((("block", (("forget", forgotten), *inner)),),)
        body = (("block", self.block(node.child_by_field_name("body"))),)
        return [
            (
                "try",
                body,
                caught,
                self.block(final.child_by_field_name("body")) if final is not None else (),
            )
        ]

    def _s_return_statement(self, node: Any) -> list[Node]:
        value = [child for child in node.named_children if child.type != "comment"]
        return [("return", self.expression(value[0]) if value else NONE, _line(node))]

    def _s_throw_statement(self, node: Any) -> list[Node]:
        value = node.named_children
        return [("raise", self.expression(value[0]) if value else NONE)]

    def _s_break_statement(self, node: Any) -> list[Node]:
        return [("break",)]

    def _s_continue_statement(self, node: Any) -> list[Node]:
        return [("continue",)]

    def _s_labeled_statement(self, node: Any) -> list[Node]:
        body = node.child_by_field_name("body")
        return self.statement(body) if body is not None else []

    def _s_export_statement(self, node: Any) -> list[Node]:
        declaration = node.child_by_field_name("declaration")
        if declaration is not None:
            return self.statement(declaration)
        value = node.child_by_field_name("value")
        return [("expr", self.expression(value))] if value is not None else []

    # --- definitions --------------------------------------------------------------------------

    def _s_function_declaration(self, node: Any) -> list[Node]:
        return [("def", self.function(node))]

    _s_generator_function_declaration = _s_function_declaration

    def _s_class_declaration(self, node: Any) -> list[Node]:
        return [("class", self.a_class(node))]

    _s_abstract_class_declaration = _s_class_declaration

    def _s_enum_declaration(self, node: Any) -> list[Node]:
        name = _text(node.child_by_field_name("name"))
        pairs: list[tuple[Node | None, Node]] = []
        body = node.child_by_field_name("body")
        for child in body.named_children if body else ():
            if child.type == "enum_assignment":
                key = _name(child.child_by_field_name("name"))
                pairs.append((("const", key), self.expression(child.child_by_field_name("value"))))
        value: Node = ("dict", tuple(pairs), _line(node))
        return [("assign", ("name", name), value, _line(node))]

    def function(self, node: Any, kind: str = "function") -> Function:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        file = self.file

        def lower() -> Block:
            lowering = _JavaScript(file)
            if body is None:
                return ()
            if body.type == "statement_block":
                return lowering.block(body)
            return (("return", lowering.expression(body), _line(body)),)

        return Function(
            _name(name) if name is not None else "",
            self.file,
            _line(node),
            node.end_point[0] + 1,
            self.parameters(node),
            lower,
            kind=kind,
            span=(node.start_byte, node.end_byte),
        )

    def parameters(self, node: Any) -> list[Parameter]:
        single = node.child_by_field_name("parameter")
        if single is not None:
            return [Parameter(("name", _text(single)))]
        out: list[Parameter] = []
        listed = node.child_by_field_name("parameters")
        for child in listed.named_children if listed else ():
            if child.type == "comment":
                continue
            pattern, default, how, sets = child, None, "one", False
            annotation = ""
            if child.type in ("required_parameter", "optional_parameter"):
                pattern = child.child_by_field_name("pattern") or child
                default = child.child_by_field_name("value")
                sets = any(
                    part.type in ("accessibility_modifier", "override_modifier", "readonly")
                    for part in child.children
                )
                typed = child.child_by_field_name("type")
                annotation = _text(typed)[:120] if typed is not None else ""
                if child.type == "optional_parameter" and default is None:
                    annotation += " optional"
                if pattern.type == "this":
                    continue
            if pattern.type == "assignment_pattern":
                default = pattern.child_by_field_name("right")
                pattern = pattern.child_by_field_name("left")
            if pattern.type == "rest_pattern":
                pattern, how = pattern.named_children[0], "rest"
            value = self.expression(default) if default is not None else None
            out.append(Parameter(self.target(pattern), value, how, annotation, sets))
        return out

    def a_class(self, node: Any) -> Class:
        name = node.child_by_field_name("name")
        bases: list[Node] = []
        for child in node.named_children:
            if child.type == "class_heritage":
                for part in child.named_children:
                    if part.type == "extends_clause":
                        value = part.child_by_field_name("value")
                        if value is not None:
                            bases.append(self.expression(value))
                    elif part.type != "implements_clause":
                        bases.append(self.expression(part))
        made = Class(
            _text(name) if name is not None else "",
            self.file,
            _line(node),
            bases,
            {},
            [],
            span=(node.start_byte, node.end_byte),
        )
        body = node.child_by_field_name("body")
        pending: list[tuple[Node, int]] = []
        for child in body.named_children if body else ():
            if child.type == "decorator" and child.named_children:
                pending.append((self.expression(child.named_children[0]), _line(child)))
            elif child.type == "method_definition":
                words = {part.type for part in child.children}
                kind = "static" if "static" in words else "getter" if "get" in words else "method"
                method = self.function(child, kind)
                inside = [
                    (self.expression(part.named_children[0]), _line(part))
                    for part in child.named_children
                    if part.type == "decorator" and part.named_children
                ]
                method.decorators, pending = [*pending, *inside], []
                made.methods[method.name] = method
            elif child.type in ("field_definition", "public_field_definition"):
                key = child.child_by_field_name("property") or child.child_by_field_name("name")
                value = child.child_by_field_name("value")
                pending = []
                if key is None or value is None:
                    continue
                if value.type in ("arrow_function", "function_expression"):
                    method = self.function(value, "method")
                    method.name = _name(key)
                    made.methods[method.name] = method
                else:
                    statement = ("assign", ("name", _name(key)), self.expression(value), 0)
                    made.fields.append(statement)
        return made

    # --- targets ------------------------------------------------------------------------------

    def target(self, node: Any) -> Node:
        if node is None:
            return ("name", "")
        kind = node.type
        if kind == "array_pattern":
            return ("list", tuple(self.target(child) for child in node.named_children))
        if kind == "assignment_pattern":
            return self.target(node.child_by_field_name("left"))
        if kind == "object_pattern":
            return self._pattern(node)
        if kind in ("identifier", "shorthand_property_identifier_pattern"):
            return ("name", _text(node))
        if kind in ("lexical_declaration", "variable_declaration", "rest_pattern"):
            return self.target(node.named_children[0])
        return self.expression(node)

    def _pattern(self, node: Any) -> Node:
        pairs: list[tuple[str, Node, Node | None]] = []
        rest = ""
        for child in node.named_children:
            if child.type == "shorthand_property_identifier_pattern":
                pairs.append((_text(child), ("name", _text(child)), None))
            elif child.type == "object_assignment_pattern":
                left = child.child_by_field_name("left")
                default = self.expression(child.child_by_field_name("right"))
                pairs.append((_text(left), self.target(left), default))
            elif child.type == "pair_pattern":
                value = child.child_by_field_name("value")
                default_node: Node | None = None
                if value.type == "assignment_pattern":
                    default_node = self.expression(value.child_by_field_name("right"))
                key = _name(child.child_by_field_name("key"))
                pairs.append((key, self.target(value), default_node))
            elif child.type == "rest_pattern" and child.named_children:
                rest = _text(child.named_children[0])
        return ("pattern", tuple(pairs), rest)

    # --- expressions --------------------------------------------------------------------------

    def expression(self, node: Any) -> Node:
        if node is None or self.depth > _DEEPEST:
            return UNKNOWN
        kind = node.type
        while kind in _TRANSPARENT:
            inner = node.named_children
            if not inner:
                return UNKNOWN
            node = inner[0]
            kind = node.type
        self.depth += 1
        try:
            method = getattr(self, f"_e_{kind}", None)
            if method:
                return method(node)  # type: ignore[no-any-return]
            return ("other", tuple(self.expression(child) for child in node.named_children))
        finally:
            self.depth -= 1

    def _e_identifier(self, node: Any) -> Node:
        name = _text(node)
        return NONE if name == "undefined" else ("name", name)

    _e_shorthand_property_identifier = _e_property_identifier = _e_identifier

    def _e_undefined(self, node: Any) -> Node:
        return NONE

    def _e_comment(self, node: Any) -> Node:
        return UNKNOWN

    def _e_this(self, node: Any) -> Node:
        return ("name", "this")

    def _e_super(self, node: Any) -> Node:
        return ("name", "super")

    def _e_string(self, node: Any) -> Node:
        return ("const", _string(node))

    def _e_regex(self, node: Any) -> Node:
        return ("regex", _text(node))

    def _e_template_string(self, node: Any) -> Node:
        parts: list[Node] = []
        at = node.start_byte + 1
        raw = node.text
        for child in node.named_children:
            if child.type != "template_substitution":
                continue
            before = raw[at - node.start_byte : child.start_byte - node.start_byte]
            if before:
                parts.append(("const", _unescaped(before.decode("utf-8", "replace"))))
            if child.named_children:
                parts.append(self.expression(child.named_children[0]))
            at = child.end_byte
        last = raw[at - node.start_byte : -1]
        if last or not parts:
            parts.append(("const", _unescaped(last.decode("utf-8", "replace"))))
        if len(parts) == 1 and parts[0][0] == "const":
            return parts[0]
        return ("text", tuple(parts))

    def _e_number(self, node: Any) -> Node:
        try:
            return ("const", int(_text(node), 0))
        except ValueError:
            return ("const", 0.5)

    def _e_true(self, node: Any) -> Node:
        return ("const", True)

    def _e_false(self, node: Any) -> Node:
        return ("const", False)

    def _e_null(self, node: Any) -> Node:
        return NONE

    def _e_member_expression(self, node: Any) -> Node:
        return (
            "attr",
            self.expression(node.child_by_field_name("object")),
            _text(node.child_by_field_name("property")).lstrip("#"),
        )

    def _e_subscript_expression(self, node: Any) -> Node:
        return (
            "index",
            self.expression(node.child_by_field_name("object")),
            self.expression(node.child_by_field_name("index")),
        )

    def _e_call_expression(self, node: Any) -> Node:
        required = _required(node)
        if required is not None:
            return ("require", Import(*required))
        callee = self.expression(node.child_by_field_name("function"))
        if callee[0] == "other" and callee[1] and callee[1][-1][0] == "attr":
            callee = callee[1][-1]  # `(0, x.y)(…)`
        arguments = node.child_by_field_name("arguments")
        return ("call", callee, self._arguments(arguments), (), _line(_callee_end(node)))

    def _e_new_expression(self, node: Any) -> Node:
        callee = self.expression(node.child_by_field_name("constructor"))
        arguments = node.child_by_field_name("arguments")
        return ("new", callee, self._arguments(arguments), (), _line(node))

    def _arguments(self, node: Any) -> tuple[Node, ...]:
        out: list[Node] = []
        if node is not None and node.type == "template_string":
            return (self.expression(node),)
        for child in node.named_children if node else ():
            if child.type == "spread_element":
                out.append(("spread", self.expression(child.named_children[0])))
            elif child.type != "comment":
                out.append(self.expression(child))
        return tuple(out)

    def _e_object(self, node: Any) -> Node:
        pairs: list[tuple[Node | None, Node]] = []
        for child in node.named_children:
            if child.type == "pair":
                key = child.child_by_field_name("key")
                value = self.expression(child.child_by_field_name("value"))
                if key.type == "computed_property_name":
                    keyed: Node = self.expression(key.named_children[0])
                else:
                    keyed = ("const", _name(key))
                if value[0] == "fn" and not value[1].name and keyed[0] == "const":
                    value[1].name = str(keyed[1])
                pairs.append((keyed, value))
            elif child.type == "shorthand_property_identifier":
                pairs.append((("const", _text(child)), self._e_identifier(child)))
            elif child.type == "spread_element":
                pairs.append((None, self.expression(child.named_children[0])))
            elif child.type == "method_definition":
                method = self.function(child)
                pairs.append((("const", method.name), ("fn", method)))
        return ("dict", tuple(pairs), _line(node))

    def _e_array(self, node: Any) -> Node:
        items: list[Node] = []
        for child in node.named_children:
            if child.type == "spread_element":
                items.append(("spread", self.expression(child.named_children[0])))
            elif child.type != "comment":
                items.append(self.expression(child))
        return ("list", tuple(items))

    def _e_arrow_function(self, node: Any) -> Node:
        return ("fn", self.function(node, "arrow"))

    def _e_function_expression(self, node: Any) -> Node:
        return ("fn", self.function(node))

    _e_generator_function = _e_function = _e_function_expression

    def _e_class(self, node: Any) -> Node:
        return ("class", self.a_class(node))

    def _e_ternary_expression(self, node: Any) -> Node:
        return (
            "cond",
            self.expression(node.child_by_field_name("condition")),
            self.expression(node.child_by_field_name("consequence")),
            self.expression(node.child_by_field_name("alternative")),
        )

    def _e_binary_expression(self, node: Any) -> Node:
        operator = node.child_by_field_name("operator").type
        left = self.expression(node.child_by_field_name("left"))
        right = self.expression(node.child_by_field_name("right"))
        if operator in ("||", "&&", "??"):
            return ("logic", {"||": "or", "&&": "and"}.get(operator, operator), left, right)
        if operator in ("==", "===", "!=", "!=="):
            return ("cmp", operator[:2], left, right)
        if operator == "in":
            return ("cmp", "in", left, right)
        if operator == "+":
            return ("plus", left, right)
        if operator in ("<", ">", "<=", ">="):
            return ("cmp", operator, left, right)
        return ("other", (left, right))

    def _e_unary_expression(self, node: Any) -> Node:
        operator = node.child_by_field_name("operator").type
        value = self.expression(node.child_by_field_name("argument"))
        if operator == "!":
            if value[0] == "const" and isinstance(value[1], int):
                return ("const", not value[1])
            return ("not", value)
        if operator == "void" and value[0] == "const":
            return NONE
        if operator == "typeof":
            return ("other", (value,))
        return ("other", (value,))

    def _e_assignment_expression(self, node: Any) -> Node:
        return (
            "assign",
            self.target(node.child_by_field_name("left")),
            self.expression(node.child_by_field_name("right")),
        )

    def _e_augmented_assignment_expression(self, node: Any) -> Node:
        target = self.target(node.child_by_field_name("left"))
        operator = node.child_by_field_name("operator").type
        right = self.expression(node.child_by_field_name("right"))
        if operator in ("||=", "??="):
            return ("assign", target, ("logic", "or", target, right))
        if operator == "+=":
            return ("assign", target, ("plus", target, right))
        return ("assign", target, ("other", (target, right)))

    def _e_parenthesized_expression(self, node: Any) -> Node:
        inner = [child for child in node.named_children if child.type != "comment"]
        return self.expression(inner[0]) if inner else UNKNOWN

    def _e_sequence_expression(self, node: Any) -> Node:
        return ("sequence", tuple(self.expression(child) for child in node.named_children))

    def _e_yield_expression(self, node: Any) -> Node:
        inner = node.named_children
        return ("yield", self.expression(inner[0]) if inner else NONE)

    def _e_type_annotation(self, node: Any) -> Node:
        return UNKNOWN

    _e_type_arguments = _e_predefined_type = _e_type_identifier = _e_type_annotation

    def _e_type_assertion(self, node: Any) -> Node:
        return self.expression(node.named_children[-1])


# --- text -----------------------------------------------------------------------------------------


def _text(node: Any) -> str:
    return node.text.decode("utf-8", "replace") if node is not None else ""


def _line(node: Any) -> int:
    return int(node.start_point[0]) + 1


def _callee_end(node: Any) -> Any:
    """In a chain over several lines, the line of the method's own name."""
    callee = node.child_by_field_name("function")
    if callee is not None and callee.type == "member_expression":
        name = callee.child_by_field_name("property")
        if name is not None:
            return name
    return node


_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_ESCAPE: Final = re.compile(
    r"\\(?:u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.S
)


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text

    def one(match: re.Match[str]) -> str:
        number = match[1] or match[2] or match[3]
        if number:
            value = int(number, 16)
            return chr(value) if value < 0x110000 else ""
        return "" if match[4] == "\n" else _ESCAPES.get(match[4], match[4])

    return _ESCAPE.sub(one, text)


def _string(node: Any) -> str:
    return _unescaped(_text(node)[1:-1])


def _name(node: Any) -> str:
    """A property's name, quoted or not."""
    if node.type == "string":
        return _string(node)
    text = _text(node)
    return text[1:-1] if text[:1] == "[" else text.lstrip("#")


def _names_in(node: Any) -> list[str]:
    """Every name that a pattern binds."""
    if node.type in ("identifier", "shorthand_property_identifier_pattern"):
        return [_text(node)]
    out: list[str] = []
    for child in node.named_children:
        if node.type == "pair_pattern" and child == node.child_by_field_name("key"):
            continue
        if node.type in ("assignment_pattern", "object_assignment_pattern") and (
            child == node.child_by_field_name("right")
        ):
            continue
        out += _names_in(child)
    return out


def _pattern_names(node: Any) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for child in node.named_children:
        if child.type == "shorthand_property_identifier_pattern":
            out.append((_text(child), _text(child)))
        elif child.type == "pair_pattern":
            value = child.child_by_field_name("value")
            if value.type == "identifier":
                out.append((_text(value), _name(child.child_by_field_name("key"))))
    return out


def _required(node: Any) -> tuple[str, str] | None:
    """`require("x")` and `await import("x")`, also inside a compiler's helper: module, name."""
    if node is None:
        return None
    if node.type in ("await_expression", "parenthesized_expression") and node.named_children:
        return _required(node.named_children[0])
    if node.type == "member_expression":
        inner = _required(node.child_by_field_name("object"))
        if inner and inner[1] in ("*", "default"):
            return inner[0], _text(node.child_by_field_name("property"))
        return None
    if node.type != "call_expression":
        return None
    callee, arguments = node.child_by_field_name("function"), node.child_by_field_name("arguments")
    if arguments is None or not arguments.named_children or callee is None:
        return None
    first = arguments.named_children[0]
    if callee.type == "import" or (callee.type == "identifier" and callee.text == b"require"):
        return (_string(first), "*") if first.type == "string" else None
    if callee.type == "identifier" or callee.type == "member_expression":
        name = _text(callee).rpartition(".")[2] if callee.end_byte - callee.start_byte < 80 else ""
        if name in _HELPERS:
            return _required(first)
    return None


def _root_of(node: Any) -> str:
    while node is not None and node.type in (
        "member_expression",
        "subscript_expression",
        "call_expression",
    ):
        node = node.named_children[0] if node.named_children else None
    return _text(node) if node is not None and node.type == "identifier" else ""
