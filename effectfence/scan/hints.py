"""The hints a tool declares about itself, and where its code says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from effectfence.scan.model import Finding, Tool
from effectfence.scan.values import Const, Rec, Sym, Value, alternatives

if TYPE_CHECKING:
    from effectfence.scan.machine import Machine

HINTS: Final = {
    "readOnlyHint": "readOnlyHint",
    "read_only_hint": "readOnlyHint",
    "destructiveHint": "destructiveHint",
    "destructive_hint": "destructiveHint",
    "idempotentHint": "idempotentHint",
    "idempotent_hint": "idempotentHint",
    "openWorldHint": "openWorldHint",
    "open_world_hint": "openWorldHint",
}


def declared(machine: Machine, fields: dict[str, Value]) -> dict[str, bool]:
    """The hints that a declaration carries, under the protocol's own names."""
    found: dict[str, bool] = {}
    given = fields.get("annotations")
    records = [fields]
    for one in alternatives(given) if given is not None else ():
        if isinstance(one, Rec):
            records.append(one.fields)
        elif isinstance(one, Sym):
            continue
    for record in records:
        for key, value in record.items():
            if key in HINTS and isinstance(value, Const) and isinstance(value.value, bool):
                found[HINTS[key]] = value.value
    return found


def contradictions(tool: Tool) -> list[Finding]:
    """Hints that the code speaks against."""
    out: list[Finding] = []
    if tool.annotations.get("readOnlyHint") and tool.writes:
        first = tool.writes[0]
        out.append(
            Finding(
                "read-only-writes",
                f"readOnlyHint is true, and it writes: {first.what} at {first.place}",
                tool.place,
            )
        )
    repeating = [write for write in tool.unguarded if write.repeats == "effect"]
    if tool.annotations.get("idempotentHint") and repeating:
        first = repeating[0]
        out.append(
            Finding(
                "idempotent-repeats",
                f"idempotentHint is true, and a second call does it again: {first.what} at "
                f"{first.place}",
                tool.place,
            )
        )
    return out
