"""Names made from values: `"pay:{a}:{b}"`, so that different values never make the same name.

Why two values can't run into each other: between any two placeholders stands at least one
character that is neither letter nor digit, and each such character of the template is escaped
inside values (as `%` and hex, `%` itself too). So the name splits in one way only.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

from effectfence.canonical import encode

_formatter = string.Formatter()


class Template:
    """Raises `ValueError` when built from a template that could make one name of two values."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        before = ""  # "{{" and "}}" come as pieces of their own
        for literal, name, form, conversion in _formatter.parse(text):
            if name is not None and (not name or name[0].isdigit() or form or conversion):
                raise ValueError(
                    f"{text!r}: only plain placeholders such as {{order_id}} are taken"
                )
            before += literal
            if name is not None:
                self._parts.append((before, name))
                before = ""
        self._parts.append((before, None))
        for literal, name in self._parts[1:]:
            if name is not None and literal.isalnum() | (not literal):
                raise ValueError(
                    f"{text!r}: put a separator such as ':' before {{{name}}}, or two different "
                    "pairs of values could make the same name"
                )
        special = {c for literal, _ in self._parts for c in literal if not c.isalnum()} | {"%", ":"}
        self._escapes = str.maketrans({c: _escaped(c) for c in special - {"_"}})
        if "_" in special and not self._splits_without_underscore():
            self._escapes[ord("_")] = _escaped("_")
        self.names = frozenset(
            name.split(".")[0].split("[")[0] for _, name in self._parts if name is not None
        )

    def fill(self, values: Mapping[str, Any]) -> str:
        """The name. Raises `ValueError` naming the placeholder whose value makes no name."""
        return "".join(
            literal if name is None else literal + self._value(name, values)
            for literal, name in self._parts
        )

    def _splits_without_underscore(self) -> bool:
        return all(
            name is None or any(not c.isalnum() and c != "_" for c in literal)
            for literal, name in self._parts[1:]
        )

    def _value(self, name: str, values: Mapping[str, Any]) -> str:
        try:
            value, _ = _formatter.get_field(name, (), values)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{self.text!r}: {{{name}}} leads nowhere; nothing ran") from error
        if value is None:
            raise ValueError(f"{self.text!r}: {{{name}}} is None; nothing ran")
        text = value if isinstance(value, str) else _plain(value, f"{self.text!r}: {{{name}}}")
        return text.translate(self._escapes)


def _plain(value: Any, name: str) -> str:
    """A scalar as canonical JSON shows it, without quotes."""
    shown = encode(value, max_depth=0, name=name).decode()
    return str(json.loads(shown)) if shown.startswith('"') else shown


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
