"""The package as a whole: its files, parsed when wanted, and what their names refer to."""

from __future__ import annotations

import posixpath
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Final

from effectfence.scan import lower_javascript, lower_python
from effectfence.scan.ir import Import, Module
from effectfence.scan.parse import parse

_JS_ENDINGS: Final = (".ts", ".tsx", ".mts", ".cts", ".js", ".jsx", ".mjs", ".cjs")
_DEFINED_PYTHON: Final = re.compile(rb"^[ \t]+(?:async[ \t]+)?def[ \t]+(\w+)", re.M)
_DEFINED_JS: Final = re.compile(
    rb"(?:^|[\s;{},])(?:async\s+)?#?([A-Za-z_$][\w$]*)\s*"
    rb"(?:=\s*(?:async\s*)?)?\([^()]*(?:\([^()]*\)[^()]*)*\)\s*"
    rb"(?::\s*[\w$<>\[\]|. ,{}]+)?\s*(?:=>\s*)?\{"
)
_NOT_METHODS: Final = frozenset(
    (b"if", b"for", b"while", b"switch", b"catch", b"function", b"constructor", b"return", b"with")
)


@dataclass(slots=True)
class Source:
    """One file that was read."""

    path: str
    text: bytes
    language: str
    lines: int = 0


@dataclass(slots=True)
class Program:
    """Sources by path, `/` between folders, relative to what was scanned."""

    sources: dict[str, Source]
    parsed: dict[str, Module] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    """files whose syntax was not understood in full, with the first line of it"""
    _dotted: dict[str, list[str]] | None = None
    _methods: dict[str, list[tuple[str, int]]] | None = None

    def module(self, path: str) -> Module:
        """The top of a file, parsed now if it was not yet."""
        if path not in self.parsed:
            source = self.sources[path]
            root = self.root(path)
            lower = lower_python if source.language == "python" else lower_javascript
            self.parsed[path] = lower.lower_module(path, root)
        return self.parsed[path]

    def root(self, path: str) -> Any:
        if path not in self.trees:
            source = self.sources[path]
            tree = parse(source.text, source.language)
            self.trees[path] = tree
            if tree.root_node.has_error:
                self.errors[path] = _first_error(tree.root_node)
        return self.trees[path].root_node

    # --- imports ------------------------------------------------------------------------------

    def resolve(self, importer: str, what: Import) -> tuple[str, str] | None:
        """The file of the package that an import names, and the name in it; `None`: outside."""
        if self.sources[importer].language == "python":
            return self._resolve_python(importer, what)
        path = self._resolve_javascript(importer, what.module)
        return (path, what.name) if path else None

    def _resolve_python(self, importer: str, what: Import) -> tuple[str, str] | None:
        if what.level:
            folder = posixpath.dirname(importer)
            for _ in range(what.level - 1):
                folder = posixpath.dirname(folder)
            base = posixpath.join(folder, what.module.replace(".", "/")) if what.module else folder
            return self._python_at(base, what.name)
        first = what.module.split(".")[0]
        if first in sys.stdlib_module_names:
            return None
        near = posixpath.dirname(importer)
        dotted = what.module.replace(".", "/")
        for base in (posixpath.join(near, dotted), dotted, *self._by_tail(what.module)):
            found = self._python_at(base, what.name)
            if found:
                return found
        return None

    def _python_at(self, base: str, name: str) -> tuple[str, str] | None:
        base = base.strip("/")
        inside = posixpath.join(base, name) if base else name
        if name != "*":
            for path in (f"{inside}.py", f"{inside}/__init__.py"):
                if path in self.sources:
                    package = f"{base}/__init__.py" if base else "__init__.py"
                    what = self._imported_there(package, name)
                    if what is not None and (what.module or what.level != 1):
                        return package, name
                    return path, "*"
        for path in (f"{base}.py", f"{base}/__init__.py" if base else "__init__.py"):
            if path in self.sources:
                return path, name
        return None

    def _imported_there(self, package: str, name: str) -> Import | None:
        return self.module(package).imports.get(name) if package in self.sources else None

    def _by_tail(self, module: str) -> list[str]:
        if self._dotted is None:
            self._dotted = {}
            for path, source in self.sources.items():
                if source.language != "python":
                    continue
                base = path.removesuffix(".py").removesuffix("/__init__")
                parts = base.split("/")
                for start in range(1, len(parts)):
                    self._dotted.setdefault(".".join(parts[start:]), []).append(base)
        return sorted(self._dotted.get(module, ()), key=len)[:3]

    def _resolve_javascript(self, importer: str, module: str) -> str | None:
        if module.startswith("."):
            base = posixpath.normpath(posixpath.join(posixpath.dirname(importer), module))
            return self._javascript_at(base)
        for alias in ("@/", "~/", "#"):
            if module.startswith(alias):
                tail = module.removeprefix(alias)
                folder = posixpath.dirname(importer)
                while True:
                    for start in (posixpath.join(folder, "src"), folder):
                        found = self._javascript_at(posixpath.normpath(posixpath.join(start, tail)))
                        if found:
                            return found
                    if not folder:
                        return None
                    folder = posixpath.dirname(folder)
        return self._javascript_at(module) if module.startswith("src/") else None

    def _javascript_at(self, base: str) -> str | None:
        stem, ending = posixpath.splitext(base)
        tried = [base]
        if ending in (".js", ".mjs", ".cjs", ".jsx"):
            tried += [stem + other for other in _JS_ENDINGS]
        tried += [base + other for other in _JS_ENDINGS]
        tried += [f"{base}/index{other}" for other in _JS_ENDINGS]
        return next((path for path in tried if path in self.sources), None)

    # --- methods by name ----------------------------------------------------------------------

    def methods_named(self, name: str) -> list[tuple[str, int]]:
        """Where a method or nested function of that name may be defined: file, byte."""
        if self._methods is None:
            self._methods = {}
            for path, source in self.sources.items():
                pattern = _DEFINED_PYTHON if source.language == "python" else _DEFINED_JS
                for match in pattern.finditer(source.text):
                    if match[1] not in _NOT_METHODS:
                        found = self._methods.setdefault(match[1].decode("ascii", "replace"), [])
                        found.append((path, match.start(1)))
        return self._methods.get(name, [])


def _first_error(root: Any) -> int:
    node = root
    for _ in range(400):
        inner = next((child for child in node.children if child.has_error), None)
        if inner is None:
            break
        node = inner
    return int(node.start_point[0]) + 1
