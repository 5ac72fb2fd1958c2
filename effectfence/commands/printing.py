"""How a command speaks to a terminal: nothing that was recorded is obeyed by it."""

from __future__ import annotations

import json
import sys
from typing import Any


class WrongUse(Exception):
    """What was typed can't be carried out; exit 2."""


def say(sentence: str, code: int) -> int:
    """One sentence on stderr; gives the exit code back."""
    print(f"effectfence: {printable(sentence)}", file=sys.stderr)
    return code


def printable(text: str) -> str:
    """Control and format characters shown as escapes, never sent to the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: Any) -> None:
    """One line of ASCII. DEL, the one control character JSON lets stand, is escaped too."""
    print(json.dumps(value).replace("\x7f", "\\u007f"))


def print_facts(facts: dict[str, str]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {printable(value)}")


def pasted(text: str) -> str:
    """Recorded text as one word of a command line: a shell that gets it runs none of it."""
    return "'" + printable(text).replace("'", "'\\''") + "'"
