"""Vector clocks: the laws, the limits at the border, and what users expect of a mapping."""

import copy
import enum
import json
import pickle
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from effectfence.canonical import encode, sha256_hex
from effectfence.clock import MAX_AGENTS, MAX_COUNT, VectorClock

agents = st.sampled_from(["a", "b", "c", "エージェント", "\uffff", "\U00010000"])
counts = st.dictionaries(agents, st.integers(0, 3) | st.just(MAX_COUNT), max_size=4)
clocks = counts.map(VectorClock)


def merged(*clocks: VectorClock) -> VectorClock:
    result = VectorClock()
    for clock in clocks:
        result.merge(clock)
    return result


# Laws


@given(clocks, clocks, clocks)
def test_at_most_is_a_partial_order(a, b, c):
    assert a <= a
    assert (a <= b and b <= a) == (a == b)
    assert not (a <= b <= c) or a <= c


@given(counts, counts)
def test_at_most_compares_agent_by_agent_with_absent_as_zero(a, b):
    expected = all(a.get(agent, 0) <= b.get(agent, 0) for agent in a.keys() | b.keys())
    assert VectorClock(a).le(VectorClock(b)) == expected
    assert (VectorClock(a) <= VectorClock(b)) == expected
    assert (VectorClock(b) >= VectorClock(a)) == expected
    assert VectorClock(a).le(b) == expected


@given(clocks, clocks, clocks)
def test_merge_is_the_least_upper_bound(a, b, c):
    both = merged(a, b)
    assert a <= both
    assert b <= both
    assert (a <= c and b <= c) == (both <= c)
    assert all(both.get(agent) in (a.get(agent), b.get(agent)) for agent in both)


@given(clocks, clocks, clocks)
def test_merging_in_any_order_and_grouping_and_twice_is_the_same(a, b, c):
    assert merged(a, b) == merged(b, a)
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, a) == a
    assert merged(a, VectorClock()) == a


@given(clocks, clocks)
def test_concurrent_is_symmetric_and_means_that_neither_is_in_the_others_past(a, b):
    assert a.concurrent(b) == b.concurrent(a) == (not a <= b and not b <= a)
    assert not a.concurrent(a)
    assert a.concurrent(b.copy()) == a.concurrent(dict(b))


@given(clocks, st.sampled_from(["a", "x"]))
def test_a_tick_puts_the_clock_after_what_it_was(clock, agent):
    before = clock.copy()
    if clock.get(agent) == MAX_COUNT:
        return
    assert clock.tick(agent) == before.get(agent) + 1 == clock.get(agent)
    assert before <= clock
    assert not clock <= before
    assert [other for other in clock if clock.get(other) != before.get(other)] == [agent]


@given(counts, counts)
def test_equal_clocks_and_they_alone_have_one_digest(a, b):
    assert (VectorClock(a) == VectorClock(b)) == (
        VectorClock(a).digest() == VectorClock(b).digest()
    )


def test_two_agents_that_did_not_hear_of_each_other_are_concurrent():
    one, other = VectorClock({"a": 2, "b": 1}), VectorClock({"a": 1, "b": 2})
    assert one.concurrent(other)
    other.merge(one)
    assert other == {"a": 2, "b": 2}
    assert one <= other
    assert one == {"a": 2, "b": 1}


# Zero is absence


def test_a_zero_entry_and_an_absent_one_are_the_same_everywhere():
    zero, absent = VectorClock({"a": 0, "b": 1}), VectorClock({"b": 1})
    assert zero == absent
    assert zero <= absent <= zero
    assert zero.digest() == absent.digest()
    assert list(zero) == ["b"]
    assert "a" not in zero
    assert zero.get("a") == 0
    assert zero == {"a": 0, "b": 1}
    assert VectorClock({"a": 0}) == VectorClock()


def test_the_digest_is_the_hash_of_the_canonical_json():
    assert VectorClock().digest() == sha256_hex(b"{}")
    clock = VectorClock({"b": 3, "a": 1, "A": MAX_COUNT})
    assert clock.digest() == sha256_hex(b'{"A":9223372036854775807,"a":1,"b":3}')


# The border


@pytest.mark.parametrize(
    ("mapping", "error", "reason"),
    [
        ({"a": True}, TypeError, "'a' is not an integer but bool"),
        ({"a": 1.0}, TypeError, "'a' is not an integer but float"),
        ({"a": "1"}, TypeError, "'a' is not an integer but str"),
        ({"a": None}, TypeError, "'a' is not an integer but NoneType"),
        ({"a": -1}, ValueError, "'a' is not between 0 and"),
        ({"a": 2**63}, ValueError, "'a' is not between 0 and"),
        ({"": 1}, ValueError, "agent is empty"),
        ({"x" * 1025: 1}, ValueError, "agent takes 1025 bytes"),
        ({"a\0": 1}, ValueError, "agent holds a NUL"),
        ({"\ud800": 0}, ValueError, "agent holds a lone surrogate"),
        ({1: 1}, TypeError, "agent is an int"),
        ({f"agent-{n}": 1 for n in range(1025)}, ValueError, "at most 1024 agents, not 1025"),
        ([("a", 1), ("a", 2)], ValueError, "'a' twice"),
    ],
)
def test_what_cannot_stand_in_a_clock_is_refused_by_name(mapping, error, reason):
    with pytest.raises(error, match=reason):
        VectorClock(mapping)
    with pytest.raises(error, match=reason):
        VectorClock({"b": 1}).merge(VectorClock(mapping))


def test_the_limits_themselves_are_allowed():
    full = VectorClock({f"agent-{n}": MAX_COUNT for n in range(MAX_AGENTS)})
    assert len(full) == 1024
    assert full.get("agent-0") == 2**63 - 1
    assert len(VectorClock({f"agent-{n}": int(n < 1024) for n in range(2000)})) == 1024


def test_a_refused_change_leaves_the_clock_as_it_was():
    full = VectorClock({f"agent-{n}": 1 for n in range(MAX_AGENTS)})
    before = full.copy()
    with pytest.raises(ValueError, match="at most 1024 agents, not 1025"):
        full.tick("one more")
    with pytest.raises(ValueError, match="at most 1024 agents, not 1025"):
        full.merge({"agent-0": 7, "one more": 1})
    assert full == before
    assert full.tick("agent-0") == 2
    full.merge({"agent-1": 9})

    at_the_limit = VectorClock({"a": MAX_COUNT})
    with pytest.raises(ValueError, match="'a' is at its limit"):
        at_the_limit.tick("a")
    assert at_the_limit == {"a": MAX_COUNT}


@pytest.mark.parametrize("agent", ["", "\0", "\ud800", "x" * 1025, None, 1])
def test_a_tick_takes_only_a_name(agent):
    clock = VectorClock()
    with pytest.raises((ValueError, TypeError), match="agent"):
        clock.tick(agent)
    assert clock == VectorClock()


# As users expect


def test_a_clock_reads_like_a_mapping():
    clock = VectorClock([("b", 2), ("a", 1)])
    assert len(clock) == 2
    assert dict(clock) == dict(clock.items()) == {"b": 2, "a": 1}
    assert set(clock) == set(clock.keys()) == {"a", "b"}
    assert ("a" in clock, "c" in clock) == (True, False)
    assert (clock["a"], clock.get("c"), clock.get("c", 5)) == (1, 0, 5)
    assert bool(clock)
    assert not VectorClock()
    with pytest.raises(KeyError):
        clock["c"]


def test_a_clock_equals_a_mapping_and_nothing_else():
    assert VectorClock({"a": 1}) == {"a": 1}
    assert VectorClock({"a": 1}) != {"a": 2}
    assert VectorClock({"a": 1}) != {"a": "x"}
    assert VectorClock() != ()
    assert VectorClock() != "{}"
    with pytest.raises(TypeError):
        _ = VectorClock() <= {}


def test_a_clock_has_no_hash():
    assert not isinstance(VectorClock(), Hashable)


def test_a_clock_prints_and_encodes_as_a_plain_json_object():
    clock = VectorClock({"b": 2, "a": 1})
    assert str(clock) == '{"a":1,"b":2}'
    assert encode({"clock": clock}) == b'{"clock":{"a":1,"b":2}}'
    assert eval(repr(clock)) == clock  # noqa: S307 - our own text


@pytest.mark.parametrize(
    "copied",
    [
        VectorClock.copy,
        VectorClock,
        copy.copy,
        copy.deepcopy,
        lambda clock: pickle.loads(pickle.dumps(clock)),
    ],
)
def test_a_copy_lives_a_life_of_its_own(copied):
    clock = VectorClock({"a": 1})
    other = copied(clock)
    assert other == clock
    other.tick("a")
    clock.tick("b")
    assert clock == {"a": 1, "b": 1}
    assert other == {"a": 2}


def test_names_and_counts_become_plain_ones():
    class Agent(enum.StrEnum):
        PAYER = "payer"

    class Count(enum.IntEnum):
        THREE = 3

    ((agent, count),) = VectorClock({Agent.PAYER: Count.THREE}).items()
    assert (type(agent), type(count)) == (str, int)
    ticked = VectorClock()
    ticked.tick(Agent.PAYER)
    assert [type(agent) for agent in ticked] == [str]


def test_the_given_mapping_is_copied():
    given_counts = {"a": 1}
    clock = VectorClock(given_counts)
    given_counts["a"] = 9
    assert clock == {"a": 1}


def test_a_trusted_clock_is_one_like_any_other():
    assert VectorClock.trusted({"a": 1}) == VectorClock({"a": 1})


# In models


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)
    clock: VectorClock = Field(default_factory=VectorClock)


def test_a_model_copies_the_clock_that_it_is_given():
    mine = VectorClock({"a": 1})
    model = Model(clock=mine)
    mine.tick("a")
    assert model.clock == {"a": 1}
    assert isinstance(model.clock, VectorClock)
    assert Model(clock={"a": 1, "b": 0}) == model
    assert Model().clock is not Model().clock


def test_a_model_dumps_its_clock_as_a_plain_object_and_reads_it_back():
    model = Model(clock={"b": 2, "a": 1})
    for dumped in (model.model_dump(), model.model_dump(mode="json")):
        assert type(dumped["clock"]) is dict
        assert Model.model_validate(dumped) == model
    assert json.loads(model.model_dump_json()) == {"clock": {"a": 1, "b": 2}}
    assert Model.model_validate_json(model.model_dump_json()) == model
    assert encode(model) == b'{"clock":{"a":1,"b":2}}'


@pytest.mark.parametrize(
    "bad", [None, 1, "a", [["a", 1]], {"a": True}, {"a": -1}, {"a": 1.5}, {"": 1}, {"a": 2**63}]
)
def test_a_model_reports_a_bad_clock_as_a_validation_error(bad):
    with pytest.raises(ValidationError) as caught:
        Model(clock=bad)
    assert caught.value.errors()[0]["loc"] == ("clock",)


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_json_schema_is_an_object_of_counts(mode):
    schema = TypeAdapter(VectorClock).json_schema(mode=mode)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] == {"type": "integer", "minimum": 0}
