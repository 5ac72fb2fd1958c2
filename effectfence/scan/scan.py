"""One scan: files in, a report out."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from effectfence.scan import declared, effects, guards, hints, parse
from effectfence.scan.files import take
from effectfence.scan.model import Place, Report, Tool, Unseen
from effectfence.scan.program import Program, Source
from effectfence.scan.workers import spread

_RECURSION: Final = 12_000


@dataclass(frozen=True, slots=True)
class Scanned:
    report: Report
    sources: dict[str, Source]


def scan(root: Path) -> Scanned:
    """Everything that can be said of the source below `root`."""
    parse.check()
    begun = time.perf_counter()
    taken = take(root)
    report = Report(str(root), unseen=list(taken.unseen), files=len(taken.sources))
    report.lines = sum(source.lines for source in taken.sources.values())
    program = Program(taken.sources)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION))
    try:
        _look(program, report)
    finally:
        sys.setrecursionlimit(before)
    for path, line in sorted(program.errors.items()):
        report.unseen.append(Unseen("syntax", "was not understood in full", Place(path, line)))
    report.seconds = time.perf_counter() - begun
    return Scanned(report, taken.sources)


def _look(program: Program, report: Report) -> None:
    found = declared.find(program)
    report.unseen += found.unseen
    outside: dict[str, Place] = {}
    for tool, unseen in spread(lambda at: _tool(program, found, found.tools[at]), len(found.tools)):
        report.tools.append(tool)
        report.unseen += unseen
        for write in tool.writes:
            if write.library:
                outside.setdefault(write.library, write.place)
    for name, place in sorted(outside.items()):
        says = f"`{name}` and the service behind it may know a second call again"
        report.beyond.append(Unseen("service", says, place))
    report.unseen = list(dict.fromkeys(report.unseen))


def _tool(
    program: Program, found: declared.Declarations, one: declared.Declared
) -> tuple[Tool, list[Unseen]]:
    """One tool, followed to its writes; and what of it stayed unseen."""
    its, handler = effects.follow(program, found, one)
    tool = Tool(one.name, one.place, handler, one.description, dict(one.annotations))
    tool.writes = sorted(its.writes, key=lambda write: _ORDER[write.repeats])
    if guards.asks_for_new_keys(one.description):
        tool.asks_for_new_keys = one.place
    tool.contradictions = hints.contradictions(tool)
    unseen = list(its.unseen)
    if handler is None:
        says = f"the code of `{one.name}` could not be found"
        unseen.append(Unseen("handler", says, one.place))
    elif its.lost is not None and not its.writes:
        says = f"what `{one.name}` calls here is only known at run time"
        unseen.append(Unseen("handler", says, its.lost))
    return tool, unseen


_ORDER: Final = {"effect": 0, "depends": 1, "same": 2}
