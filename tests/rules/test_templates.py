"""Names made from values: different values never make one name."""

from __future__ import annotations

import datetime
import itertools
import re
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectfence.templates import Template

TEMPLATES = [
    "{a}:{b}",
    "pay:{a}:{b}",
    "{a}/{b}",
    "{a}_{b}",
    "{a}-{b}",
    "x{a}::{b}y",
    "{a} {b}.",
    "{a}%{b}",
]
TEXTS = st.text(alphabet="ab12:%_/-. é3A5F", max_size=5)


@pytest.mark.parametrize("text", TEMPLATES)
@given(one=st.tuples(TEXTS, TEXTS), two=st.tuples(TEXTS, TEXTS))
def test_two_different_pairs_never_make_the_same_name(
    text: str, one: tuple[str, str], two: tuple[str, str]
) -> None:
    template = Template(text)
    names = {template.fill({"a": a, "b": b}) for a, b in (one, two)}
    assert len(names) == len({one, two})


@pytest.mark.parametrize("text", TEMPLATES)
def test_all_short_pairs_have_names_of_their_own(text: str) -> None:
    template = Template(text)
    values = ["".join(letters) for n in range(4) for letters in itertools.product("a:%_", repeat=n)]
    names = {template.fill({"a": a, "b": b}) for a in values for b in values}
    assert len(names) == len(values) ** 2


def test_the_example_of_the_api_page() -> None:
    template = Template("pay:{a}:{b}")
    assert template.fill({"a": "1:2", "b": "3"}) != template.fill({"a": "1", "b": "2:3"})


def test_plain_values_stay_readable() -> None:
    assert Template("charge:{order_id}").fill({"order_id": "o-1_x"}) == "charge:o-1_x"
    assert Template("charge:{n}").fill({"n": 42}) == "charge:42"
    assert Template("charge:{n}").fill({"n": "Grüße 😀"}) == "charge:Grüße 😀"


@pytest.mark.parametrize("text", ["{a}{b}", "{a}x{b}", "{a}1{b}", "{a}é{b}", "x:{a}y{b}"])
def test_placeholders_that_could_run_into_each_other_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="separator"):
        Template(text)


@pytest.mark.parametrize("text", ["{}", "{0}", "{a!r}", "{a:>4}", "{a!s}"])
def test_only_plain_placeholders_are_taken(text: str) -> None:
    with pytest.raises(ValueError, match="placeholders"):
        Template(text)


@pytest.mark.parametrize("text", ["{", "}", "{a", "a}"])
def test_what_is_no_template_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=re.compile("brace|Single|expected")):
        Template(text)


def test_braces_can_be_written() -> None:
    assert Template("{{{a}}}").fill({"a": 1}) == "{1}"


@pytest.mark.parametrize(
    "value", [None, 1.5j, object(), [], {}, (1,), b"x", float("inf"), datetime.datetime(2026, 1, 1)]
)
def test_a_value_that_makes_no_name_is_refused_with_its_placeholder(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\{a\}"):
        Template("x:{a}").fill({"a": value})


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (True, "true"),
        (1, "1"),
        (1.0, "1"),
        (2**70, str(2**70)),
        (Decimal("1.10"), "1.10"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (Colour.RED, "red"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        ("", ""),
    ],
)
def test_scalars_are_named_as_canonical_json_shows_them(value: Any, name: str) -> None:
    assert Template("{a}").fill({"a": value}) == name


def test_attributes_and_items_can_be_reached() -> None:
    order = SimpleNamespace(id="o1", lines=[{"sku": "s"}])
    template = Template("{order.id}:{order.lines[0][sku]}")
    assert template.names == {"order"}
    assert template.fill({"order": order}) == "o1:s"


@pytest.mark.parametrize("text", ["{b}", "{a.id}", "{a[x]}", "{a[0].y}"])
def test_a_placeholder_that_leads_nowhere_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="leads nowhere"):
        Template(text).fill({"a": 1})
