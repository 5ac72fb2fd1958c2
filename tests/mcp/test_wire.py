"""JSON-RPC lines: read without loss, cut and joined without touching a digit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectfence.mcp import wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
SPACED = pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\t", " :\r")])


def message(line: bytes) -> wire.Message:
    read = wire.read(line)
    assert isinstance(read, wire.Message)
    return read


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("1", 1), ('"1"', "1"), ('""', ""), ("-7", -7), ("18446744073709551617", 2.0**64)],
)
def test_an_id_keeps_its_type_and_its_digits(text: str, number: object) -> None:
    asked = message(b'{"jsonrpc":"2.0","id":%s,"method":"ping"}' % text.encode())
    assert (asked.id, type(asked.id)) == (number, type(number))
    assert asked.id_bytes() == text.encode()


@pytest.mark.parametrize("text", ["null", "true", "[]", "{}"])
def test_what_is_no_id_is_none(text: str) -> None:
    assert message(b'{"id":%s,"method":"ping"}' % text.encode()).id is None


NO_MESSAGES = [b"", b"  ", b"listening on 8080", b"[]", b"[1]", b"7", b"{", b'"', b'{"a":"\xff"}']
UTF_16 = '{"id":1,"method":"ping"}'.encode("utf-16")


@pytest.mark.parametrize("line", [*NO_MESSAGES, UTF_16, b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_message_is_none(line: bytes) -> None:
    assert wire.read(line) is None


def test_json_that_strict_readers_refuse_is_a_message_still() -> None:
    assert message(b'{"id":1,"result":{"x":NaN,"y":"\\ud800"}}').id == 1


@pytest.mark.parametrize(
    "digits", ["1.0", "1e2", "0.10", "9007199254740993", "123456789012345678901234567890", "-0.0"]
)
@SPACED
def test_a_member_is_cut_out_with_its_own_digits(digits: str, separators: tuple[str, str]) -> None:
    comma, colon = separators
    line = f'{{"id"{colon}5{comma}"result"{colon}{{"n"{colon}{digits}}}}}'.encode()
    assert message(line).member("result", "n") == digits.encode()
    assert message(line).member("result", "m") is None
    assert message(line).member("nothing", "n") is None
    assert message(line).member("id", "n") is None


@given(VALUES, st.booleans())
def test_any_member_is_cut_out_as_it_stands(value: object, ascii_only: bool) -> None:
    part = json.dumps(value, ensure_ascii=ascii_only)
    line = f'{{ "a":1, "wanted" : {part} , "z":[{part}]}}'.encode()
    assert message(line).member("wanted") == part.encode()


@given(st.lists(st.dictionaries(st.text(), VALUES), min_size=1))
def test_a_batch_is_split_into_its_own_bytes(values: list[dict[str, object]]) -> None:
    parts = [json.dumps(value).encode() for value in values]
    read = wire.read(b" [ " + b" , ".join(parts) + b" ] ")
    assert isinstance(read, list)
    assert [each.line for each in read] == parts
    assert wire.batch(parts) == b"[" + b",".join(parts) + b"]"


def test_a_member_named_twice_is_the_last_one_as_parsers_take_it() -> None:
    line = b'{"params":{"arguments":{"a":1}},"params":{"arguments":{"a":2}}}'
    assert message(line).member("params", "arguments") == b'{"a":2}'


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (b"{}", {"_meta": {"k": 1}}),
        (b' { "n" : 1.0 } ', {"_meta": {"k": 1}, "n": 1.0}),
        (b'{"_meta":{},"n":1}', {"_meta": {"k": 1}, "n": 1}),
        (b'{"n":1, "_meta" : { "a":{"b":2} }}', {"_meta": {"k": 1, "a": {"b": 2}}, "n": 1}),
    ],
)
def test_a_mark_joins_the_meta_that_is_there(result: bytes, expected: object) -> None:
    assert json.loads(wire.marked(result, "k", 1)) == expected


def test_a_mark_leaves_every_digit_alone() -> None:
    assert b'"n": 1.00' in wire.marked(b'{"n": 1.00, "_meta": {"t": 0.10}}', "k", 1)
    assert b'"t": 0.10' in wire.marked(b'{"n": 1.00, "_meta": {"t": 0.10}}', "k", 1)


def test_an_answer_can_be_readdressed() -> None:
    line = b'{"jsonrpc": "2.0", "result": {"id": 7, "n": 1.0}, "id": 7, "x": true}'
    assert wire.readdressed(line, b'"other"') == (
        b'{"jsonrpc": "2.0", "result": {"id": 7, "n": 1.0}, "id": "other", "x": true}'
    )


ANSWERED = {"content": [{"type": "text", "text": "ok"}]}


@pytest.mark.parametrize(
    ("given_", "shown"),
    [
        (
            {"content": [{"type": "text", "text": "ok"}]},
            {"content": [{"type": "text", "text": "ok"}]},
        ),
        ("charged", {"content": [{"type": "text", "text": "charged"}]}),
        (None, {"content": [{"type": "text", "text": "null"}]}),
        (
            {"charge": "ch_1"},
            {
                "content": [{"type": "text", "text": '{"charge": "ch_1"}'}],
                "structuredContent": {"charge": "ch_1"},
            },
        ),
    ],
)
def test_an_operators_word_becomes_a_tool_result(given_: object, shown: object) -> None:
    assert json.loads(wire.tool_result(given_)) == shown


def test_requests_and_answers_are_told_apart() -> None:
    assert message(b'{"id":1,"result":null}').answers
    assert message(b'{"id":1,"error":{}}').answers
    assert not message(b'{"id":1,"method":"ping"}').answers
    assert not message(b'{"method":"x","result":{}}').answers
    assert message(b'{"id":1,"method":7}').method is None
    assert message(b'{"method":"x","params":[1]}').params == {}
