"""What a scan finds, as data: tools, their writes with path and guards, and what stayed unseen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Repeats = Literal["effect", "same", "depends"]
"""What a second, identical call does: a second effect; the same end state; that is for its input
to say."""

EFFECTIVE: Final = frozenset(("key", "dedupe", "unique", "check"))
"""Guards that keep a second call from being a second effect, as far as source can tell."""


@dataclass(frozen=True, slots=True)
class Place:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Step:
    """One station of the path from a tool to what it writes."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class Guard:
    kind: str
    """key · optional · fresh · available · check · dedupe · unique"""
    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class Retry:
    how: str
    """library · decorator · loop"""
    name: str
    place: Place


@dataclass(slots=True)
class Write:
    kind: str
    """http · sql · sdk · file · process · queue · mail · key-value"""
    what: str
    """for people: `POST /v1/refunds`, `INSERT INTO orders`, `docker.containers.run()`"""
    place: Place
    repeats: Repeats
    because: str
    path: tuple[Step, ...] = ()
    when: str = ""
    guards: tuple[Guard, ...] = ()
    retries: tuple[Retry, ...] = ()
    money: bool = False
    library: str = ""

    @property
    def guarded(self) -> bool:
        return any(guard.kind in EFFECTIVE for guard in self.guards)


@dataclass(slots=True)
class Tool:
    name: str
    place: Place
    handler: Place | None = None
    description: str = ""
    annotations: dict[str, bool] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    contradictions: list[Finding] = field(default_factory=list)
    asks_for_new_keys: Place | None = None
    """its description asks the model for a new key on every call"""

    @property
    def unguarded(self) -> list[Write]:
        return [write for write in self.writes if not write.guarded]

    @property
    def candidate(self) -> bool:
        """It writes, and no guard that would hold was seen."""
        return bool(self.unguarded)

    @property
    def repeats(self) -> Repeats | None:
        """Of all its writes without such a guard, the one that matters most."""
        found = {write.repeats for write in self.unguarded or self.writes}
        order: tuple[Repeats, ...] = ("effect", "depends", "same")
        return next((kind for kind in order if kind in found), None)

    @property
    def money(self) -> bool:
        return any(write.money for write in self.writes)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a tool that has a rule's name, and can be ignored by it."""

    rule: str
    says: str
    place: Place


@dataclass(frozen=True, slots=True)
class Unseen:
    """Something the scan could not see, and where it stood before it."""

    kind: str
    says: str
    place: Place


@dataclass(slots=True)
class Report:
    root: str
    tools: list[Tool] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    beyond: list[Unseen] = field(default_factory=list)
    """what no reader of this source could see, such as a service that deduplicates by itself"""
    files: int = 0
    lines: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """At least one tool, every one bound to its code, nothing unseen."""
        return bool(self.tools) and not self.unseen and all(tool.handler for tool in self.tools)
