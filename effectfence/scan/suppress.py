"""`# effectfence: ignore[rule] reason=…`: what somebody looked at and leaves as it is.

1. A comment on a line of its own speaks for the next statement, one behind code for its line.
2. It names a rule and gives a reason; without either it ignores nothing and is reported.
3. One that matches nothing is reported: what it spoke of is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from effectfence.scan.findings import RULES, Found
from effectfence.scan.model import Place
from effectfence.scan.program import Source

_COMMENT: Final = re.compile(
    rb"(?P<before>[^\n]*?)(?:\#|//)[ \t]*effectfence:[ \t]*ignore"
    rb"(?:\[(?P<rules>[^\]\n]*)\])?(?:[ \t]+reason=(?P<reason>[^\n]*))?[^\n]*"
)
_GOES_ON: Final = re.compile(rb"^\s*(?:@|#|//|\*|/\*|export\s*$|\)|$)")


@dataclass(slots=True)
class Ignore:
    place: Place
    rules: tuple[str, ...]
    reason: str
    covers: range
    used: bool = False
    wrong: str = ""


@dataclass(slots=True)
class Judged:
    """Findings with those that a comment ignores set aside."""

    kept: list[Found] = field(default_factory=list)
    ignored: list[tuple[Found, Ignore]] = field(default_factory=list)
    complaints: list[tuple[Place, str]] = field(default_factory=list)


def judge(found: Iterable[Found], sources: dict[str, Source]) -> Judged:
    """Set aside what comments in the source ignore."""
    by_file = {path: list(_comments(source)) for path, source in sources.items()}
    out = Judged()
    for one in found:
        ignore = _for(one, by_file)
        if ignore is None:
            out.kept.append(one)
        else:
            ignore.used = True
            out.ignored.append((one, ignore))
    for ignores in by_file.values():
        for ignore in ignores:
            if ignore.wrong:
                out.complaints.append((ignore.place, ignore.wrong))
            elif not ignore.used:
                says = f"ignore[{', '.join(ignore.rules)}] matches nothing any more: remove it"
                out.complaints.append((ignore.place, says))
    return out


def _for(one: Found, by_file: dict[str, list[Ignore]]) -> Ignore | None:
    for place in (one.place, one.at):
        for ignore in by_file.get(place.file, ()):
            if not ignore.wrong and one.rule in ignore.rules and place.line in ignore.covers:
                return ignore
    return None


def _comments(source: Source) -> Iterable[Ignore]:
    if b"effectfence:" not in source.text:
        return
    lines = source.text.split(b"\n")
    for at, line in enumerate(lines):
        match = _COMMENT.match(line)
        if match is None:
            continue
        alone = not match["before"].strip()
        covers = _next_statement(lines, at) if alone else range(at + 1, at + 2)
        names = (match["rules"] or b"").decode("utf-8", "replace")
        rules = tuple(name.strip() for name in names.split(",") if name.strip())
        reason = (match["reason"] or b"").decode("utf-8", "replace").strip(" \t\r\"'*/")
        yield Ignore(Place(source.path, at + 1), rules, reason, covers, wrong=_wrong(rules, reason))


def _wrong(rules: tuple[str, ...], reason: str) -> str:
    if not rules:
        return f"ignore names no rule, and so ignores nothing; one of: {', '.join(RULES)}"
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        return f"there is no rule `{unknown[0]}`; one of: {', '.join(RULES)}"
    if not reason:
        return "ignore gives no reason, and so ignores nothing: add reason=…"
    return ""


def _next_statement(lines: list[bytes], at: int) -> range:
    """From the comment to the first line of what follows it, decorators passed over."""
    depth = 0
    for line in range(at + 1, min(at + 25, len(lines))):
        text = lines[line]
        depth += text.count(b"(") - text.count(b")")
        if not _GOES_ON.match(text) and depth <= 0:
            return range(at + 1, line + 2)
        if not _GOES_ON.match(text) and not lines[at + 1].lstrip().startswith(b"@"):
            return range(at + 1, line + 2)
    return range(at + 1, at + 3)
