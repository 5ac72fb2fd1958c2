"""Near-duplicates: calls of one tool whose arguments differ in one place alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

_REMEMBERED: Final = 100
"""Calls of a tool that a new one is compared with."""


class NearDuplicates:
    """Each (tool, place) is told once. What is ignored anyway is not compared."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[dict[str, Any]]] = {}
        self._told: set[tuple[str, str]] = set()

    def seen(self, tool: str, arguments: dict[str, Any], ignored: tuple[str, ...]) -> list[str]:
        """Take in one call; the places (JSON pointers) that are told of now."""
        hidden = {"/" + path.replace(".", "/") for path in ignored}
        leaves = {place: value for place, value in _leaves(arguments, "") if place not in hidden}
        before = self._seen.setdefault(tool, deque(maxlen=_REMEMBERED))
        found = []
        for earlier in before:
            place = _only_difference(earlier, leaves)
            if place is not None and (tool, place) not in self._told:
                self._told.add((tool, place))
                found.append(place)
        before.append(leaves)
        return found


def _only_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    differing = [
        place
        for place in one.keys() | other.keys()
        if place not in one or place not in other or one[place] != other[place]
    ]
    return differing[0] if len(differing) == 1 and len(one) + len(other) > 2 else None


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{place}/{name}")
    elif isinstance(value, list) and value:
        for index, below in enumerate(value):
            yield from _leaves(below, f"{place}/{index}")
    else:
        yield place, value
