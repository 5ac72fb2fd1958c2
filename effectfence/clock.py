"""Vector clocks: what an agent knew when it acted.

1. A clock maps an agent to the number of its effects that are known. An absent agent counts as 0,
   and so a zero is dropped where it comes in: clocks that compare equal have one text, one digest.
2. Counts are 0 to 2^63 - 1, so that every engine can hold them; at most 1,024 agents, which are
   stable roles, never run ids.
3. `<=` is a partial order, `merge` its least upper bound. Neither of two clocks `<=` the other:
   the effects were concurrent. Clocks show concurrency; only a read set proves freshness.
4. A clock changes in place (`tick`, `merge`), never half: a refused change leaves it as it was.
   Hence it has no hash, and whoever keeps one keeps a copy.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any, Self

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from effectfence.canonical import check_name, encode, sha256_hex

MAX_AGENTS = 1024
MAX_COUNT = 2**63 - 1


class VectorClock(Mapping[str, int]):
    """Agents and their counts; prints, dumps and encodes as a plain JSON object.

    Takes a mapping, another clock, or pairs, and copies it. A name or count that cannot stand in
    a clock raises `TypeError` or `ValueError`.
    """

    __slots__ = ("_counts",)
    __hash__ = None  # type: ignore[assignment]  # it changes in place

    def __init__(self, mapping: Mapping[str, int] | Iterable[tuple[str, int]] = ()) -> None:
        self._counts: dict[str, int] = _checked(mapping)

    @classmethod
    def trusted(cls, counts: dict[str, int]) -> Self:
        """A clock around counts that a clock once held, e.g. from a record: neither checked nor
        copied. Not for anything that comes from outside."""
        clock = cls.__new__(cls)
        clock._counts = counts
        return clock

    def tick(self, agent: str) -> int:
        """Count one more effect of `agent`, and return its new count."""
        count = self._counts.get(agent, 0) + 1
        if count == 1:
            agent = check_name(agent, what="agent")
            _refuse_crowd(len(self._counts) + 1)
        if count > MAX_COUNT:
            raise ValueError(f"the count of {agent!r} is at its limit, {MAX_COUNT}")
        self._counts[agent] = count
        return count

    def merge(self, other: Mapping[str, int]) -> None:
        """Know what `other` knows too: the higher count of each agent."""
        mine = self._counts
        news = {
            agent: count for agent, count in _counts_of(other).items() if count > mine.get(agent, 0)
        }
        _refuse_crowd(len(mine | news))
        mine.update(news)

    def le(self, other: Mapping[str, int]) -> bool:
        """Whether everything known here is known to `other`."""
        mine, theirs = self._counts, _counts_of(other)
        if len(mine) > len(theirs):
            return False
        return all(count <= theirs.get(agent, 0) for agent, count in mine.items())

    def concurrent(self, other: Mapping[str, int]) -> bool:
        """Whether each knows something that the other does not."""
        theirs = VectorClock.trusted(_counts_of(other))
        return not self.le(theirs) and not theirs.le(self)

    def digest(self) -> str:
        """SHA-256 over the canonical JSON, in lower-case hex."""
        return sha256_hex(encode(self._counts))

    def copy(self) -> Self:
        return self.trusted(self._counts.copy())

    def get(self, agent: str, default: int = 0) -> int:  # type: ignore[override]  # absent is 0
        return self._counts.get(agent, default)

    def items(self) -> ItemsView[str, int]:
        return self._counts.items()

    def __getitem__(self, agent: str) -> int:
        return self._counts[agent]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, agent: object) -> bool:
        return agent in self._counts

    def __eq__(self, other: object) -> bool:
        if isinstance(other, VectorClock):
            return self._counts == other._counts
        if isinstance(other, Mapping):
            return self._counts == {agent: count for agent, count in other.items() if count != 0}
        return NotImplemented

    def __le__(self, other: object) -> bool:
        return self.le(other) if isinstance(other, VectorClock) else NotImplemented

    def __str__(self) -> str:
        return encode(self._counts).decode()

    def __repr__(self) -> str:
        return f"VectorClock({self._counts!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, int]]]:
        return type(self), (self._counts.copy(),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validated,
            serialization=core_schema.plain_serializer_function_ser_schema(
                dict, return_schema=core_schema.dict_schema()
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}

    @classmethod
    def _validated(cls, value: Any) -> Self:
        """A copy; pydantic reports a `ValueError` as its own, but lets a `TypeError` through."""
        try:
            if not isinstance(value, Mapping):
                raise TypeError(f"a clock is an object of counts, not {type(value).__name__}")
            return cls(value)
        except TypeError as error:
            raise ValueError(str(error)) from None


def _checked(mapping: Mapping[str, int] | Iterable[tuple[str, int]]) -> dict[str, int]:
    if isinstance(mapping, VectorClock):
        return mapping._counts.copy()
    pairs = mapping.items() if isinstance(mapping, Mapping) else mapping
    counts: dict[str, int] = {}
    for agent, count in pairs:
        agent = check_name(agent, what="agent")
        if agent in counts:
            raise ValueError(f"the clock names {agent!r} twice")
        if counted := _checked_count(agent, count):
            counts[agent] = counted
    _refuse_crowd(len(counts))
    return counts


def _checked_count(agent: str, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"the count of {agent!r} is not an integer but {type(count).__name__}")
    if not 0 <= count <= MAX_COUNT:
        raise ValueError(f"the count of {agent!r} is not between 0 and {MAX_COUNT}")
    return int(count)


def _counts_of(clock: Mapping[str, int]) -> dict[str, int]:
    return clock._counts if isinstance(clock, VectorClock) else _checked(clock)


def _refuse_crowd(agents: int) -> None:
    if agents > MAX_AGENTS:
        raise ValueError(
            f"a clock names at most {MAX_AGENTS} agents, not {agents}: "
            "an agent is a stable role, never a run id"
        )
