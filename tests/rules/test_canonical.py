"""Canonical JSON: the vectors, an encoder written a second time, and the cases from the field."""

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import pickle
import struct
import subprocess
import sys
import types
import uuid
from collections import ChainMap, OrderedDict, deque, namedtuple
from decimal import Decimal
from typing import Annotated, Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PlainSerializer, RootModel, SecretStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from effectfence.canonical import (
    Undecodable,
    Unencodable,
    _Exact,
    _items_left_if_plain,
    check_name,
    decode,
    detached,
    encode,
    encode_text,
    fingerprint,
    sha256_hex,
    strict_decode,
)

VECTORS = pathlib.Path(__file__).parents[1] / "vectors"
UTC = datetime.UTC


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (VECTORS / name).read_bytes().splitlines()]


def exactly(value: object) -> bytes:
    return _Exact(64, 10**6).encode(value)


def strict(data: bytes, **limits: int) -> Any:
    return strict_decode(data, **{"max_bytes": 1 << 20, **limits})


def refusal(value: object, **options: Any) -> Unencodable:
    with pytest.raises(Unencodable) as caught:
        encode(value, **{"name": "args", **options})
    return caught.value


# A second encoder, by the book: RFC 8785 section 3.2, and ECMAScript's Number::toString.


def by_the_book(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return number_by_the_book(value)
        case str():
            return string_by_the_book(value)
        case list() | tuple():
            return "[" + ",".join(map(by_the_book, value)) + "]"
        case dict():
            keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
            members = (f"{string_by_the_book(key)}:{by_the_book(value[key])}" for key in keys)
            return "{" + ",".join(members) + "}"
    raise AssertionError(type(value))


def string_by_the_book(text: str) -> str:
    short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
    long = {code: f"\\u{code:04x}" for code in range(32)}
    return '"' + text.translate(long | short) + '"'


def number_by_the_book(number: float) -> str:
    if number == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    s, k = "".join(map(str, digits)), len(digits)
    n = k + exponent
    if k <= n <= 21:
        text = s + "0" * (n - k)
    elif 0 < n <= 21:
        text = f"{s[:n]}.{s[n:]}"
    elif -6 < n <= 0:
        text = "0." + "0" * -n + s
    else:
        text = s[0] + ("." + s[1:] if k > 1 else "") + f"e{n - 1:+d}"
    return "-" * sign + text


big_integers = st.integers(-(10**40), 10**40) | st.sampled_from(
    [2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64]
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
everyday_numbers = st.decimals(-1000, 1000, places=2).map(float)
odd_text = st.text(st.sampled_from('a"\\/\x00\x1f\x7f\b\té\u2028\ud7ff\ue000\uffff\U00010000😀'))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | odd_text
scalars = st.none() | st.booleans() | big_integers | numbers | everyday_numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


# The vectors


def test_every_number_vector_is_written_as_ecmascript_writes_it():
    for row in lines("numbers.jsonl"):
        (number,) = struct.unpack(">d", bytes.fromhex(row["bits"]))
        assert encode(number).decode() == row["text"]
        assert encode([number]).decode() == f"[{row['text']}]"
        assert exactly(number).decode() == row["text"]


def test_every_canonical_vector_has_its_text_and_hash():
    for row in lines("canonical.jsonl"):
        assert encode(row["value"]).decode() == row["canonical"]
        assert exactly(row["value"]).decode() == row["canonical"]
        assert sha256_hex(encode(row["value"])) == row["sha256"]


def test_every_certificate_vector_hashes_over_its_ten_members():
    rows = lines("certificates.jsonl")
    assert rows
    for row in rows:
        certified = row.pop("hash")
        assert len(row) == 10
        assert sha256_hex(encode(row)) == certified


# One value, one text, whichever way it takes


@given(values)
@example({"\U00010000": 1, "\uffff": 2})
@example({"\uffff": 1, "a": ["\U00010000"]})
@example([0.00001, 0.0001, 0.00011, 1e15, 999999999999999.9, 1e15 + 0.5, -0.0, 5e-324])
def test_the_fast_way_the_exact_way_and_the_book_agree(value):
    assert encode(value).decode() == by_the_book(value)
    assert exactly(value).decode() == by_the_book(value)


@given(numbers | everyday_numbers)
def test_a_number_has_the_same_text_alone_and_in_company(number):
    assert encode([number, {"n": number}]) == b'[%b,{"n":%b}]' % (encode(number), encode(number))


@given(values)
def test_what_was_decoded_encodes_to_the_same_bytes(value):
    data = encode(value)
    assert encode(decode(data)) == data
    assert encode(strict(data)) == data


@given(values)
def test_a_value_reads_back_equal(value):
    assert decode(encode(value)) == value or any_float(value)


def any_float(value: Any) -> bool:
    """A float of 2^53 and more reads back as the integer whose digits it is written with."""
    match value:
        case dict():
            return any(map(any_float, value.values()))
        case list():
            return any(map(any_float, value))
    return isinstance(value, float) and abs(value) >= 2**53


@pytest.mark.parametrize("code", [*range(32), 0x22, 0x2F, 0x5C, 0x7F, 0x2028])
def test_a_character_is_escaped_only_where_the_book_says_so(code):
    assert encode([chr(code)]).decode() == f"[{string_by_the_book(chr(code))}]"


def test_what_the_proof_takes_for_plain_does_not_include_what_orjson_writes_its_own_way():
    class Color(enum.Enum):
        RED = "red"

    strange = [
        *(1.0, 1e16, 1e-7, 0.00001, float("nan"), float("inf"), orjson.Fragment(b"{")),
        *(Color.RED, uuid.UUID(int=1), OrderedDict(), b"", datetime.date(2026, 1, 1)),
    ]
    for value in strange:
        assert _items_left_if_plain([value], 64, 100) < 0
        assert _items_left_if_plain({"a": [value]}, 64, 100) < 0
    assert _items_left_if_plain({"a": [1, None, True, "x", 1.5, {"b": ()}]}, 64, 100) >= 0


# Cases from the field: 4, 5, 8, 9, 10


def test_key_order_does_not_matter_and_array_order_does():
    assert encode({"a": 1, "b": {"x": 1, "y": 2}}) == encode({"b": {"y": 2, "x": 1}, "a": 1})
    assert encode([1, 2]) != encode([2, 1])


@given(st.dictionaries(texts, scalars, max_size=8), st.randoms(use_true_random=False))
def test_no_order_of_keys_changes_a_byte(members, random):
    shuffled = list(members.items())
    random.shuffle(shuffled)
    assert encode(dict(shuffled)) == encode(members)


def test_neighbouring_large_ids_are_two_different_actions():
    assert encode({"id": 9007199254740993}) == b'{"id":9007199254740993}'
    assert encode({"id": 9007199254740993}) != encode({"id": 9007199254740992})
    assert decode(b'{"id":9007199254740993}') == {"id": 9007199254740993}


@pytest.mark.parametrize("digits", [17, 19, 20, 21, 309, 641, 4300])
def test_an_integer_of_any_allowed_size_keeps_every_digit(digits):
    number = 10 ** (digits - 1) + 7
    text = b"1" + b"0" * (digits - 2) + b"7"
    assert encode([number, -number]) == b"[%b,-%b]" % (text, text)
    for read in (decode, strict):
        assert read(b"[%b,-%b]" % (text, text)) == [number, -number]


def test_an_integer_beyond_the_limit_is_refused_by_name_both_ways():
    assert refusal({"n": 10**4300}).path == "args.n"
    assert refusal({"n": -(10**4300)}).path == "args.n"
    assert "4300 digits" in str(refusal({"n": 10**50_000}))
    with pytest.raises(Undecodable, match="4300 digits"):
        strict(b"1" + b"0" * 4300)


def test_the_process_wide_limit_on_digits_changes_nothing():
    code = (
        "import sys; sys.set_int_max_str_digits(640)\n"
        "from effectfence.canonical import decode, encode\n"
        "n = 10**4299 + 7\n"
        "assert encode(n) == b'1' + b'0' * 4298 + b'7'\n"
        "assert decode(encode(n)) == n\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 1, 2, 2], [1, 2, 1, 2]),
        ([1, 1], []),
        ([1, 1, 1], [1]),
        ([[1, 2], [3]], [[3], [1, 2]]),
        ([{"a": 1}, {"a": 1}], [{"a": 1}]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": "b", "c": "d"}, {"a": "d", "c": "b"}),
    ],
)
def test_items_permuted_or_repeated_never_cancel_out(one, other):
    assert encode(one) != encode(other)


def test_shared_and_unshared_parts_are_one_value():
    shared = {"sku": 9}
    assert encode([shared, shared]) == encode([{"sku": 9}, {"sku": 9}])
    assert exactly([shared, shared]) == encode([{"sku": 9}, {"sku": 9}])


def test_text_is_never_normalised():
    composed, decomposed = "\u00e9", "e\u0301"
    assert encode(composed) != encode(decomposed)
    for text in (composed, decomposed, "送金", "🙏", "👩‍🔬", "ﷺ", "\u202eabc"):
        assert decode(encode({text: text})) == {text: text}
        assert strict(encode({text: [text]})) == {text: [text]}


def test_one_is_one_however_it_is_written():
    for one in (1, 1.0, decode(b"1.0"), decode(b"1e0")):
        assert encode({"n": one}) == b'{"n":1}'
    assert encode({"n": True}) != encode({"n": 1})
    assert encode({"n": "1"}) != encode({"n": 1})
    assert encode(-0.0) == encode(0)


def test_an_empty_object_is_not_one_with_a_null():
    assert encode({}) != encode({"x": None})


# Case 6: what JSON lacks


class Color(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    LARGE = 3


class Tag(enum.StrEnum):
    NEW = "new"


@dataclasses.dataclass
class Line:
    sku: str
    due: Any = None
    passed: dataclasses.InitVar[int] = 0
    count: int = dataclasses.field(default=1, repr=False)


class Order(BaseModel):
    total: Decimal
    placed: Any = None
    lines: list[Line] = Field(default_factory=list)
    extra: Any = None


@pydantic_dataclass
class Address:
    city: str
    raw: Any = None


Point = namedtuple("Point", "x y")
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))

CONVERTED = {
    "decimal": (lambda: Decimal("1.50"), '"1.50"'),
    "large decimal": (lambda: Decimal("1E+5"), '"1E+5"'),
    "datetime": (
        lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        '"2026-01-02T03:04:05Z"',
    ),
    "datetime elsewhere": (
        lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=EAST),
        '"2026-01-02T03:04:05.000006+05:30"',
    ),
    "time": (lambda: datetime.time(1, 2, tzinfo=UTC), '"01:02:00Z"'),
    "date": (lambda: datetime.date(2026, 1, 2), '"2026-01-02"'),
    "timedelta": (lambda: datetime.timedelta(days=-1, seconds=3), '"-PT23H59M57S"'),
    "uuid": (lambda: uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
    "path": (lambda: pathlib.PurePosixPath("/a/b"), '"/a/b"'),
    "enum": (lambda: Color.RED, '"red"'),
    "int enum": (lambda: Size.LARGE, "3"),
    "str enum": (lambda: Tag.NEW, '"new"'),
    "dataclass": (
        lambda: Line("a", uuid.UUID(int=2)),
        '{"count":1,"due":"00000000-0000-0000-0000-000000000002","sku":"a"}',
    ),
    "model": (
        lambda: Order(total=Decimal("1.10"), lines=[Line("a")], placed=datetime.date(2026, 1, 2)),
        '{"extra":null,"lines":[{"count":1,"due":null,"sku":"a"}],"placed":"2026-01-02","total":"1.10"}',
    ),
    "pydantic dataclass": (lambda: Address("Łódź"), '{"city":"Łódź","raw":null}'),
    "root model": (lambda: RootModel[list[int]]([1, 2]), "[1,2]"),
    "named tuple": (lambda: Point(1, 2), "[1,2]"),
    "tuple": (lambda: (1, (2,)), "[1,[2]]"),
    "ordered dict": (lambda: OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
    "mapping": (lambda: types.MappingProxyType({"b": 1, "a": 2}), '{"a":2,"b":1}'),
    "chain map": (lambda: ChainMap({"a": 1}, {"a": 2}), '{"a":1}'),
    "str subclass": (lambda: type("Loud", (str,), {"__str__": lambda self: "!"})("x"), '"x"'),
    "int subclass": (lambda: type("Count", (int,), {"__int__": lambda self: 0})(7), "7"),
    "float subclass": (lambda: type("Rate", (float,), {})(1.5), "1.5"),
    "list subclass": (lambda: type("Rows", (list,), {})([1]), "[1]"),
    "str subclass key": (
        lambda: {type("Loud", (str,), {"__str__": lambda self: "!"})("x"): 1},
        '{"x":1}',
    ),
    "str enum key": (lambda: {Tag.NEW: 1}, '{"new":1}'),
}


@pytest.mark.parametrize(("build", "text"), CONVERTED.values(), ids=CONVERTED)
def test_a_value_that_json_lacks_is_written_as_pydantic_writes_it(build, text):
    """Case 6: built twice, alone and inside, and the same every time."""
    assert encode(build()).decode() == text
    assert encode(build()) == encode(build())
    assert encode({"a": [build()]}).decode() == f'{{"a":[{text}]}}'


def test_a_model_is_written_as_its_own_json_mode_says():
    class Event(BaseModel):
        at: Annotated[datetime.datetime, PlainSerializer(lambda at: at.timestamp())]
        tags: Annotated[set[str], PlainSerializer(sorted)]
        host: Any = None
        by_id: dict[int, str] = Field(default_factory=dict)
        by_tag: dict[Tag, int] = Field(default_factory=dict)

    event = Event(
        at=datetime.datetime(2026, 1, 1, tzinfo=UTC),
        tags={"b", "a"},
        by_id={10: "x", 9: "y"},
        by_tag={Tag.NEW: 1},
    )
    assert encode(event) == encode(event.model_dump(mode="json"))


def test_a_decimal_has_one_text_in_every_context():
    expected = encode(Decimal("1E+5"))
    with decimal.localcontext() as context:
        context.capitals = 0
        context.prec = 2
        assert encode(Decimal("1E+5")) == expected
        assert encode(123456789012345678901234567890) == b"123456789012345678901234567890"


class Broken(Exception):
    pass


class NoClock(datetime.tzinfo):
    def utcoffset(self, when):
        raise Broken("a secret")


class Ghost(datetime.tzinfo):
    def utcoffset(self, when):
        return None


@dataclasses.dataclass
class Unready:
    missing: int = dataclasses.field(init=False)


ODD_OFFSET = datetime.timezone(datetime.timedelta(hours=1, seconds=7))
REFUSED = {
    "bytes": b"x",
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"x"),
    "set": {1},
    "empty frozenset": frozenset(),
    "naive datetime": datetime.datetime(2026, 1, 1),
    "naive time": datetime.time(1),
    "datetime whose zone has no offset": datetime.datetime(2026, 1, 1, tzinfo=Ghost()),
    "datetime whose zone fails": datetime.datetime(2026, 1, 1, tzinfo=NoClock()),
    "datetime whose offset would be cut": datetime.datetime(2026, 1, 1, tzinfo=ODD_OFFSET),
    "not a number": float("nan"),
    "infinity": float("-inf"),
    "decimal not a number": Decimal("sNaN"),
    "decimal infinity": Decimal("Infinity"),
    "complex": 1j,
    "object": object(),
    "class": int,
    "model class": Order,
    "dataclass class": Line,
    "dataclass class with defaults": dataclasses.make_dataclass("Flags", [("on", int, 1)]),
    "object whose type has no hash": type("Meta", (type,), {"__hash__": None})("Odd", (), {})(),
    "key whose type has no hash": {type("Meta", (type,), {"__hash__": None})("Odd", (), {})(): 1},
    "function": len,
    "module": json,
    "range": range(3),
    "deque": deque([1]),
    "generator": (n for n in [1]),
    "ready text": orjson.Fragment(b"1"),
    "exception": ValueError("x"),
    "secret": SecretStr("x"),
    "pattern": __import__("re").compile("a"),
    "half-built dataclass": Unready(),
    "enum of bytes": enum.Enum("Raw", {"A": b"x"}).A,
    "surrogate": "\ud83d",
    "surrogate in a path": pathlib.PurePosixPath("\udc80"),
    "surrogate key": {"\ude00": 1},
    "integer key": {1: 2},
    "null key": {None: 1},
    "bool key": {True: 1},
    "tuple key": {(1, 2): 1},
    "bytes key": {b"a": 1},
    "keys with one text": {"a": 1, type("Own", (str,), {"__hash__": lambda self: 7})("a"): 2},
}


PYDANTIC_HAS_A_FORM = {"complex", "deque", "pattern", "integer key", "bool key", "null key"}
"""Refused as they are, but in a field of a model it is the model that says how they look."""
PLACES = [
    (lambda value: value, "args"),
    (lambda value: {"items": [0, 1, 2, {"due": value}]}, "args.items[3].due"),
    (lambda value: (types.MappingProxyType({"a b": [value]}),), 'args[0]["a b"][0]'),
    (lambda value: [Line("x", due=value)], "args[0].due"),
]
PLACES_IN_MODELS = [
    (lambda value: {"order": Order(total=1, extra={"x": [value]})}, "args.order"),
    (lambda value: Order(total=1, lines=[Line("x", due=value)]), "args"),
    (lambda value: [Address("x", raw=value)], "args[0]"),
]


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize(("place", "path"), PLACES)
def test_what_cannot_be_encoded_is_refused_by_its_path_and_never_shown(place, path, value):
    error = refusal(place(value))
    assert isinstance(error, ValueError)
    if isinstance(value, dict) and isinstance(next(iter(value)), str) and len(value) == 1:
        path += '["\\ude00"]'  # the key itself is what is wrong
    assert error.path == path
    assert str(error) == f"{error.path} {error.reason}"
    assert len(str(error)) < 200
    assert "a secret" not in str(error)


@pytest.mark.parametrize("kind", sorted(REFUSED.keys() - PYDANTIC_HAS_A_FORM))
@pytest.mark.parametrize(("place", "path"), PLACES_IN_MODELS)
def test_what_cannot_be_encoded_is_refused_inside_models_too(place, path, kind):
    error = refusal(place(REFUSED[kind]))
    assert error.path.startswith(path)
    assert len(str(error)) < 250


@pytest.mark.parametrize(
    ("kind", "path"),
    [("bytes", "args.extra.x[0]"), ("set", "args.extra.x[0]"), ("secret", "args.extra.x[0]")],
)
def test_what_a_model_would_disguise_is_refused_by_its_path(kind, path):
    assert refusal(Order(total=1, extra={"x": [REFUSED[kind]]})).path == path
    assert refusal(Order(total=1, extra={"x": deque([REFUSED[kind]])})).path == path


def test_a_zone_without_an_offset_is_none():
    assert "without a time zone" in refusal(REFUSED["datetime whose zone has no offset"]).reason
    assert "without a time zone" in refusal(REFUSED["naive time"]).reason


def test_keys_that_a_model_would_write_alike_are_refused():
    assert "share one text" in refusal(Order(total=1, extra={1: "a", "1": "b"})).reason
    assert encode(Order(total=1, extra={1: "a", 2: "b"}))


def test_a_model_that_contains_itself_is_refused():
    order = Order(total=1)
    order.extra = [order]
    assert refusal([order]).path == "args[0]"


def test_a_message_stays_short_and_shows_no_value():
    huge = "k" * 10_000
    error = refusal({huge: {huge: {huge: {huge: {"card 4111": b"4111111111111111"}}}}})
    assert len(str(error)) < 300
    assert "4111111" not in str(error)
    assert str(error).endswith("or send it as base64")
    assert error.path.endswith('["card 4111"]')


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("due", "args.due"),
        ("naïve", "args.naïve"),
        ("a.b", 'args["a.b"]'),
        ("", 'args[""]'),
        ("0", 'args["0"]'),
        ('a"b', 'args["a\\"b"]'),
        ("a\nb", 'args["a\\nb"]'),
        ("送 金", 'args["送 金"]'),
        ("\x1b[31m", 'args["\\u001b[31m"]'),
    ],
)
def test_a_path_shows_each_key_so_that_it_can_be_found(key, shown):
    assert refusal({key: b""}).path == shown


def test_an_error_survives_pickle():
    error = pickle.loads(pickle.dumps(refusal([b""])))
    assert (error.path, str(error)) == ("args[0]", str(refusal([b""])))
    with pytest.raises(Undecodable) as caught:
        strict(b"[1,")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.offset, str(again)) == (3, str(caught.value))


# Limits


def nested(depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = [inner] if depth % 2 else {"a": inner}
    return inner


@pytest.mark.parametrize("inner", [0, 1.0, "\U00010000\uffff", Line("x")])
def test_depth_64_is_encoded_and_depth_65_refused(inner):
    inside = isinstance(inner, Line)
    assert encode(nested(64 - inside, inner))
    assert "deeper than 64 levels" in refusal(nested(65 - inside, inner)).reason
    assert encode({}, max_depth=1) == b"{}"
    assert encode(1, max_depth=0) == b"1"
    assert refusal([], max_depth=0).path == "args"


def test_a_cycle_is_refused():
    rows: list[Any] = []
    rows += [rows, rows]
    assert "deeper than 64 levels" in refusal(rows).reason
    members: dict[str, Any] = {"z": 1.0}
    members["a"] = members
    assert refusal(members).path == "args" + ".a" * 64


@pytest.mark.parametrize("leaf", ["x", 1.0])
def test_parts_that_are_shared_many_times_over_are_counted_before_they_are_written(leaf):
    bomb: Any = leaf
    for _ in range(60):
        bomb = [bomb, bomb]
    error = refusal(bomb, max_bytes=10_000)
    assert (error.path, "10000 bytes" in error.reason) == ("args", True)


def test_a_value_of_just_the_largest_size_is_encoded():
    for value in ([0] * 500, {"é": "x" * 90}, [[]] * 30, [1.0, {"a": 1e21}], {"": 0}):
        size = len(encode(value))
        assert encode(value, max_bytes=size) == encode(value)
        assert refusal(value, max_bytes=size - 1).path == "args"


@given(values)
def test_the_count_of_items_never_refuses_what_fits(value):
    data = encode(value)
    assert encode(value, max_bytes=len(data)) == data


# Untrusted bytes


pieces = """{ } [ ] , : " "a" \\ \\u d800 1 - e9 . 0 1e999 NaN -Infinity true null é \ufeff \x00"""
json_like = st.lists(st.sampled_from([*pieces.split(" "), "1" * 25, " ", "\n"]), max_size=40).map(
    lambda parts: "".join(parts).encode()
)


@given(st.binary() | json_like | values.map(lambda value: json.dumps(value).encode()))
def test_untrusted_bytes_give_a_value_that_can_be_encoded_or_undecodable(data):
    try:
        value = strict(data)
    except Undecodable:
        return
    assert strict(encode(value)) == value or any_float(value)


@given(values, st.booleans())
def test_the_strict_reader_reads_what_any_json_writer_wrote(value, ascii_only):
    data = json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()
    assert strict(data, max_bytes=len(data)) == value


@pytest.mark.parametrize(
    ("data", "offset", "reason"),
    [
        (b'{"a":1,"a":1}', None, "one key twice"),
        (b'[{"b":{"a":1,"a":2}}]', None, "one key twice"),
        (b'{"a":1,"\\u0061":2}', None, "one key twice"),
        (b'{ "a":1, "b":2, "a":1 }', None, "one key twice"),
        (b"NaN", None, "NaN"),
        (b"[Infinity]", None, "Infinity"),
        (b"[-Infinity]", None, "-Infinity"),
        (b"[1e999]", None, "too large"),
        (b"[-1e999]", None, "too large"),
        (b'["\\ud800"]', None, "lone surrogate"),
        (b'{"\\udc00":1}', None, "lone surrogate"),
        (b'["a\xff"]', 3, "UTF-8"),
        (b'["\xed\xa0\x80"]', 2, "UTF-8"),
        ("[1]".encode("utf-16"), 0, "UTF-8"),
        (b"\xef\xbb\xbf1", 0, "JSON"),
        (b"", 0, "JSON"),
        (b"[1]]", 3, "JSON"),
        (b"1 2", 2, "JSON"),
        (b"[1,]", None, "JSON"),
        (b"01", 1, "JSON"),
        (b"'a'", 0, "JSON"),
        (b'["\t"]', 2, "JSON"),
        (b'["\x00"]', 2, "JSON"),
        ('["é",x]'.encode(), 6, "JSON"),
        (b"[" * 65 + b"]" * 65, None, "deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, None, "deeper than 64"),
        (b"[" * 1_000_000, None, "deeper than 64"),
        (b'{"a":[' * 100_000, None, "deeper than 64"),
        (b"[]" * 40 + b"[" * 65, None, "deeper than 64"),
        (b'["\\\\",' * 65 + b'"]"' * 65, None, "deeper than 64"),
    ],
)
def test_bytes_that_are_not_strictly_json_are_refused(data, offset, reason):
    with pytest.raises(Undecodable, match=reason) as caught:
        strict(data)
    if offset is not None:
        assert caught.value.offset == offset
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 64 + b"]" * 64,
        b"[" + b"[]," * 100 + b"[]]",
        b"[[]," + b"[" * 63 + b"]" * 63 + b"]",
        b'["' + b"[" * 100 + b'"]',
        b'["\\"' + b"[" * 100 + b'"]',
        b'["\\\\","' + b"{" * 100 + b'"]',
        b'["\\\\\\"' + b"{" * 100 + b'"]',
    ],
)
def test_brackets_side_by_side_or_in_strings_are_not_depth(data):
    assert strict(data) == json.loads(data)


def test_too_many_bytes_are_refused_before_they_are_looked_at():
    assert strict(b"[1]", max_bytes=3) == [1]
    with pytest.raises(Undecodable, match="limit of 2"):
        strict(b"\xff\xff\xff", max_bytes=2)


@pytest.mark.parametrize("read", [decode, strict])
@pytest.mark.parametrize(
    "text", ["18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" * 400]
)
def test_integers_beyond_64_bits_are_read_exactly(read, text):
    assert read(f'{{"id":[{text}]}}'.encode()) == {"id": [int(text)]}
    assert read(f'{{"id": [{text}]}}'.encode()) == {"id": [int(text)]}


def test_decode_says_undecodable_of_what_is_not_json():
    for data in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(Undecodable):
            decode(data)


@given(values)
def test_a_detached_value_is_what_its_bytes_decode_to(value):
    data = encode(value)
    assert encode(detached(value, data)) == data
    assert type(detached(value, data)) is type(decode(data))


@pytest.mark.parametrize("value", [{"a": 1}, {"a": [1]}, [1], {"a": {"b": 1}}])
def test_a_later_change_does_not_reach_a_detached_value(value):
    data = encode(value)
    own = detached(value, data)
    inner = value["a"] if isinstance(value, dict) and value["a"] != 1 else value
    inner.clear()
    assert encode(own) == data


@given(texts)
def test_text_known_to_be_sound_has_its_canonical_form(text):
    assert encode_text(text) == encode(text)


# Fingerprints and names


@given(texts, texts, values)
def test_a_fingerprint_is_the_hash_of_the_canonical_three(tool, domain, args):
    whole = encode({"tool": tool, "domain": domain, "args": args})
    assert (
        fingerprint(tool=encode(tool), domain=encode(domain), args=encode(args))
        == sha256_hex(whole).encode()
    )


def test_a_fingerprint_tells_tool_domain_and_arguments_apart():
    def of(tool: str = "t", domain: str = "d", args: object = 1) -> str:
        return fingerprint(tool=encode(tool), domain=encode(domain), args=encode(args))

    assert len({of(), of(tool="d"), of(domain="t"), of(args="1"), of("d", "t")}) == 5


@pytest.mark.parametrize("name", ["a", "x" * 1024, "é" * 512, "🙏" * 256, " ", "\x01", Tag.NEW])
def test_a_name_of_1_to_1024_bytes_is_taken_as_it_is(name):
    assert check_name(name, what="intent") == name
    assert type(check_name(name, what="intent")) is str


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("", ValueError, "intent is empty"),
        ("x" * 1025, ValueError, "intent takes 1025 bytes"),
        ("é" * 513, ValueError, "intent takes 1026 bytes"),
        ("🙏" * 257, ValueError, "intent takes 1028 bytes"),
        ("a\0b", ValueError, "intent holds a NUL"),
        ("\ud800", ValueError, "intent holds a lone surrogate"),
        (b"a", TypeError, "intent is a bytes"),
        (None, TypeError, "intent is a NoneType"),
    ],
)
def test_any_other_name_is_refused(name, error, reason):
    with pytest.raises(error, match=reason):
        check_name(name, what="intent")
