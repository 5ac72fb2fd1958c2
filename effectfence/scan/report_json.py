"""The report as JSON: versioned, and documented by `report.schema.json` beside this file."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from effectfence.scan.findings import Found
from effectfence.scan.model import Place, Report, Tool, Unseen, Write
from effectfence.scan.suppress import Judged

FORMAT: Final = "effectfence-scan/1"


def schema() -> str:
    """The JSON Schema of what `as_json` gives."""
    return resources.files("effectfence.scan").joinpath("report.schema.json").read_text("utf-8")


def as_json(report: Report, judged: Judged, new: set[str] | None) -> dict[str, Any]:
    """Everything a report holds. `new`: the fingerprints that were not known before."""
    return {
        "format": FORMAT,
        "root": report.root,
        "files": report.files,
        "lines": report.lines,
        "complete": report.complete,
        "tools_recognised": bool(report.tools),
        "tools": [_tool(tool) for tool in report.tools],
        "findings": [
            *(_found(one, new) for one in judged.kept),
            *(
                {**_found(one, new), "ignored": {"reason": why.reason, **_place(why.place)}}
                for one, why in judged.ignored
            ),
        ],
        "unseen": [_unseen(one) for one in report.unseen],
        "beyond": [_unseen(one) for one in report.beyond],
        "ignores": [{**_place(place), "says": says} for place, says in judged.complaints],
    }


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        **_place(tool.place),
        "handler": _place(tool.handler) if tool.handler else None,
        "annotations": tool.annotations,
        "writes": [_write(write) for write in tool.writes],
        "repeats": tool.repeats,
        "unguarded": tool.candidate,
        "money": tool.money,
        "asks_for_new_keys": tool.asks_for_new_keys is not None,
        "contradictions": [
            {"rule": one.rule, "says": one.says, **_place(one.place)} for one in tool.contradictions
        ],
    }


def _write(write: Write) -> dict[str, Any]:
    return {
        "kind": write.kind,
        "what": write.what,
        **_place(write.place),
        "repeats": write.repeats,
        "because": write.because,
        "when": write.when or None,
        "path": [{"name": step.name, **_place(step.place)} for step in write.path],
        "guarded": write.guarded,
        "guards": [
            {"kind": guard.kind, "name": guard.name, **_place(guard.place)}
            for guard in write.guards
        ],
        "retries": [
            {"how": retry.how, "name": retry.name, **_place(retry.place)} for retry in write.retries
        ],
        "library": write.library or None,
    }


def _found(one: Found, new: set[str] | None) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "rule": one.rule,
        "tool": one.tool or None,
        "says": one.says,
        **_place(one.place),
        "fingerprint": one.fingerprint,
    }
    if new is not None:
        shown["new"] = one.fingerprint in new
    return shown


def _unseen(one: Unseen) -> dict[str, Any]:
    return {"kind": one.kind, "says": one.says, **_place(one.place)}


def _place(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line}
