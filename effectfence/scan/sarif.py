"""The findings as SARIF 2.1.0: every one a note, with the path to it as a code flow."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

from effectfence.scan.findings import RULES, Found
from effectfence.scan.model import Place, Report
from effectfence.scan.suppress import Judged

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: Report, judged: Judged, version: str, new: set[str] | None) -> dict[str, Any]:
    """A SARIF log of one run."""
    results = [_result(one, new) for one in judged.kept]
    for one, ignore in judged.ignored:
        result = _result(one, new)
        result["suppressions"] = [{"kind": "inSource", "justification": ignore.reason}]
        results.append(result)
    notes = [_notification(place, says) for place, says in judged.complaints]
    if not report.tools:
        notes.append(_notification(None, "no tools recognised: nothing is said about this source"))
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "effectfence scan",
                        **({"semanticVersion": version} if _is_semantic(version) else {}),
                        "rules": [_rule(name, says) for name, says in RULES.items()],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
                "results": results,
            }
        ],
    }


def _is_semantic(version: str) -> bool:
    return bool(re.match(r"^\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?$", version))


def _rule(name: str, says: str) -> dict[str, Any]:
    return {
        "id": name,
        "shortDescription": {"text": says},
        "defaultConfiguration": {"level": "note"},
    }


def _result(one: Found, new: set[str] | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": one.rule,
        "ruleIndex": list(RULES).index(one.rule),
        "level": "note",
        "message": {"text": one.says},
        "locations": [{"physicalLocation": _location(one.place)}],
        "partialFingerprints": {"effectfence/v1": one.fingerprint},
    }
    if one.path:
        steps = [*((step.name, step.place) for step in one.path), ("the write", one.place)]
        result["codeFlows"] = [
            {"threadFlows": [{"locations": [_step(name, place) for name, place in steps]}]}
        ]
    if new is not None:
        result["baselineState"] = "new" if one.fingerprint in new else "unchanged"
    return result


def _step(name: str, place: Place) -> dict[str, Any]:
    return {"location": {"physicalLocation": _location(place), "message": {"text": name}}}


def _location(place: Place) -> dict[str, Any]:
    return {
        "artifactLocation": {"uri": quote(place.file or ".", safe="/@._-~")},
        "region": {"startLine": max(1, place.line)},
    }


def _notification(place: Place | None, says: str) -> dict[str, Any]:
    note: dict[str, Any] = {"level": "note", "message": {"text": says}}
    if place is not None:
        note["locations"] = [{"physicalLocation": _location(place)}]
    return note
