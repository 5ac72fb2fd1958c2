"""What calls a write again when it fails: a library, a decorator, a loop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from effectfence.scan.model import Place, Retry
from effectfence.scan.values import Sym

if TYPE_CHECKING:
    from effectfence.scan.machine import Machine

_RETRY: Final = re.compile(r"retr(?:y|ies|ying)|backoff|attempt|tenacity|stamina", re.I)
_LIBRARY: Final = re.compile(
    r"retr(?:y|ies|ying|ier)|backoff|tenacity|stamina|withRetry|axios-retry|p-retry|HTTPAdapter|"
    r"RetryTransport|fetch-retry|cockatiel",
    re.I,
)


def around(machine: Machine, source_line: Any) -> Iterator[Retry]:
    """Everything on the way to here that runs it again."""
    for frame in machine.frames:
        for decorator, line in frame.function.decorators:
            name = _dotted(decorator)
            if _RETRY.search(name):
                yield Retry("decorator", name, Place(frame.function.file, line))
    for name, file, line in machine.wrappers:
        if _LIBRARY.search(name):
            yield Retry("library", name, Place(file, line))
    for file, line in machine.loops:
        text = source_line(file, line)
        if _RETRY.search(text) and machine.tries:
            yield Retry("loop", text.strip()[:60], Place(file, line))


def of_receiver(sym: Sym) -> bool:
    return any(_LIBRARY.search(part) for part in sym.path)


def _dotted(node: Any) -> str:
    if node[0] == "call":
        return _dotted(node[1])
    if node[0] == "attr":
        return f"{_dotted(node[1])}.{node[2]}"
    return str(node[1]) if node[0] == "name" else ""
