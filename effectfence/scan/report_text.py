"""The report for people: money first, then second effects, then the rest; every line can be opened.

It tells what was found and where. What to think of it is the reader's affair, and so is what no
source shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from effectfence.scan.findings import Found
from effectfence.scan.model import Report, Tool, Unseen, Write
from effectfence.scan.suppress import Judged

_GUARDS: Final = {
    "key": "a key is passed on ({name})",
    "optional": "a key only if the caller gives one ({name})",
    "fresh": "a new random id at each call ({name}): nothing is known again by it",
    "available": "the client would take a key ({name}), and none is passed",
    "check": "it looks first ({name}); two at once both find nothing",
    "dedupe": "what was done is recorded and asked for ({name})",
    "unique": "{name}",
}
_SECTIONS: Final[tuple[tuple[str, Callable[[Tool], bool]], ...]] = (
    ("Money, and a second call does it again", lambda t: t.money and t.repeats != "same"),
    ("A second call does it again", lambda t: t.repeats == "effect"),
    ("What a second call does is for its input to say", lambda t: t.repeats == "depends"),
    ("A second call leaves the same state behind", lambda t: True),
)
_MOST_WRITES: Final = 4
_MOST_UNSEEN: Final = 40


def as_text(report: Report, judged: Judged, new: set[str] | None) -> str:
    """The report as lines of text."""
    return "\n".join(_lines(report, judged, new)) + "\n"


def _lines(report: Report, judged: Judged, new: set[str] | None) -> Iterator[str]:
    yield (
        f"{report.root}: {_count(report.files, 'file')}, {report.lines:,} lines, "
        f"{report.seconds:.1f} s"
    )
    if not report.tools:
        yield "No tools recognised. That is no statement about what this source does."
    else:
        yield _summary(report)
    left = [tool for tool in report.tools if tool.candidate]
    for title, belongs in _SECTIONS:
        these = [tool for tool in left if belongs(tool)]
        left = [tool for tool in left if tool not in these]
        if these:
            yield ""
            yield title
            for tool in these:
                yield from _tool(tool)
    yield from _guarded(report)
    yield from _notes(judged, new)
    reading = [tool.name for tool in report.tools if not tool.writes and tool.handler]
    if reading:
        yield ""
        yield f"No write was seen in: {', '.join(reading)}"
    yield from _unseen("Could not see", report.unseen)
    yield from _unseen("Not for this source to show", report.beyond)


def _summary(report: Report) -> str:
    writing = [tool for tool in report.tools if tool.writes]
    bare = [tool for tool in writing if tool.candidate]
    again = [tool for tool in bare if tool.repeats == "effect"]
    words = [
        _count(len(report.tools), "tool"),
        f"{len(writing)} write",
        f"{len(bare)} of them without a guard that would hold",
        f"{len(again)} with a second effect at a second call",
    ]
    return ", ".join(words) + "."


def _tool(tool: Tool) -> Iterator[str]:
    hints = ", ".join(f"{name}: {str(value).lower()}" for name, value in tool.annotations.items())
    yield f"  {tool.name}  {tool.place}{f'  ({hints})' if hints else ''}"
    for write in tool.unguarded[:_MOST_WRITES]:
        yield from _write(write)
    more = len(tool.unguarded) - _MOST_WRITES
    if more > 0:
        yield f"    and {more} more"


def _write(write: Write) -> Iterator[str]:
    when = f"  when {write.when}" if write.when else ""
    yield f"    {write.what}  {write.place}{when}"
    yield f"      {write.because}"
    if len(write.path) > 1:
        yield "      by " + " > ".join(f"{step.name} {step.place}" for step in write.path[1:])
    for guard in write.guards:
        yield f"      {_GUARDS[guard.kind].format(name=guard.name)}  {guard.place}"
    for retry in write.retries:
        yield f"      made again when it fails: {retry.how} {retry.name}  {retry.place}"


def _guarded(report: Report) -> Iterator[str]:
    these = [tool for tool in report.tools if tool.writes and not tool.candidate]
    if not these:
        return
    yield ""
    yield "Writes, and a guard stands before every one of them"
    for tool in these:
        yield f"  {tool.name}  {tool.place}"
        for write in tool.writes[:_MOST_WRITES]:
            yield from _write(write)


def _notes(judged: Judged, new: set[str] | None) -> Iterator[str]:
    titles = {
        "read-only-writes": "Declared read-only, and writes",
        "idempotent-repeats": "Declared idempotent, and repeats",
        "new-key-each-call": "Asks the model for a new key at every call",
        "retried": "Made again by the program itself, without a key",
    }
    for rule, title in titles.items():
        yield from _rule(title, [one for one in judged.kept if one.rule == rule])
    if new is not None:
        fresh = [one for one in judged.kept if one.fingerprint in new]
        yield from _rule("New since then", fresh or [])
        if not fresh:
            yield ""
            yield "Nothing new since then."
    if judged.ignored:
        yield ""
        yield f"Ignored, with a reason: {len(judged.ignored)}"
        for one, ignore in judged.ignored:
            yield f"  {one.rule} of {one.tool or one.place}: {ignore.reason}  {ignore.place}"
    for place, says in judged.complaints:
        yield f"{place}: {says}"


def _rule(title: str, found: list[Found]) -> Iterator[str]:
    if not found:
        return
    yield ""
    yield title
    for one in found:
        yield f"  {one.tool or one.rule}  {one.place}"
        yield f"    {one.says}"


def _unseen(title: str, unseen: list[Unseen]) -> Iterator[str]:
    if not unseen:
        return
    yield ""
    yield title
    for one in unseen[:_MOST_UNSEEN]:
        yield f"  {one.place}  {one.says}"
    if len(unseen) > _MOST_UNSEEN:
        yield f"  and {len(unseen) - _MOST_UNSEEN} more"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
