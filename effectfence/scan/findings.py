"""What a report says of its tools, as findings with a rule's name and a lasting fingerprint.

A fingerprint holds no line: moving code changes nothing; another write, another path or another
tool does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from effectfence.scan.model import Place, Report, Step, Tool, Write

RULES: Final = {
    "repeats-effect": "A second call has a second effect, and no guard that would hold was seen.",
    "depends-on-input": "What a second call does is for its input to say, and no guard was seen.",
    "same-state": "A second call writes again and leaves the same state behind.",
    "read-only-writes": "The tool is declared `readOnlyHint: true`, and its code writes.",
    "idempotent-repeats": "The tool is declared `idempotentHint: true`, and a second call repeats.",
    "new-key-each-call": "The tool's description asks the model for a new key at every call.",
    "retried": "Something on the path makes the write again when it fails, without a key.",
    "unseen": "The scan could not see what stands behind this place.",
}
CONTRADICTIONS: Final = ("read-only-writes", "idempotent-repeats")
WRITES: Final = ("repeats-effect", "depends-on-input", "same-state")
_BY_REPEATS: Final = {
    "effect": "repeats-effect",
    "depends": "depends-on-input",
    "same": "same-state",
}


@dataclass(frozen=True, slots=True)
class Found:
    """One finding, ready to be told, ignored or compared."""

    rule: str
    tool: str
    says: str
    place: Place
    at: Place
    """where the tool is declared"""
    path: tuple[Step, ...] = ()
    fingerprint: str = ""


def findings(report: Report) -> list[Found]:
    """Everything a report says that can be ignored, compared with a baseline, or annotated."""
    out: list[Found] = []
    for tool in report.tools:
        out += [_of_write(tool, write) for write in tool.unguarded]
        out += [_of_retry(tool, write) for write in tool.unguarded if _retried(write)]
        for one in tool.contradictions:
            out.append(_made(one.rule, tool, one.says, one.place, (), one.rule))
        if tool.asks_for_new_keys:
            says = RULES["new-key-each-call"]
            out.append(_made("new-key-each-call", tool, says, tool.place, (), "description"))
    for unseen in report.unseen:
        mark = _hash("unseen", unseen.kind, unseen.says, unseen.place.file)
        out.append(Found("unseen", "", unseen.says, unseen.place, unseen.place, (), mark))
    return _numbered(out)


def _retried(write: Write) -> bool:
    return bool(write.retries) and write.repeats != "same"


def _of_write(tool: Tool, write: Write) -> Found:
    rule = _BY_REPEATS[write.repeats]
    names = [step.name for step in write.path]
    when = f" when {write.when}" if write.when else ""
    says = f"`{tool.name}`{when}: {write.what}; {write.because}"
    return _made(rule, tool, says, write.place, write.path, write.what, *names)


def _of_retry(tool: Tool, write: Write) -> Found:
    retry = write.retries[0]
    says = f"`{tool.name}`: {retry.how} `{retry.name}` makes {write.what} again when it fails"
    return _made("retried", tool, says, retry.place, write.path, retry.name, write.what)


def _made(
    rule: str, tool: Tool, says: str, place: Place, path: tuple[Step, ...], *marks: str
) -> Found:
    mark = _hash(rule, tool.name, tool.place.file, place.file, *marks)
    return Found(rule, tool.name, says, place, tool.place, path, mark)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:32]


def _numbered(found: list[Found]) -> list[Found]:
    """Two alike differ by their number, so that a third is new."""
    seen: dict[str, int] = {}
    out: list[Found] = []
    for one in found:
        count = seen[one.fingerprint] = seen.get(one.fingerprint, 0) + 1
        mark = one.fingerprint if count == 1 else _hash(one.fingerprint, str(count))
        out.append(Found(one.rule, one.tool, one.says, one.place, one.at, one.path, mark))
    return out
