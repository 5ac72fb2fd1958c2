"""JSON-RPC lines as they stand: what a message is, and its members' own bytes. No I/O.

Invariants:

1. What is forwarded is the line that came. What is made anew is cut out of such lines, so that
   numbers keep their digits and unknown members stay.
2. An id is told apart by type: 1 is not "1". 0 is an id; null, and anything else, is none.
3. Reading raises nothing: a line that is no message is `None`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]  # not in its stubs
from typing import Any, Final

import orjson

Id = str | int | float

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
SERVER_ENDED: Final = -32000
"""Of the range that JSON-RPC leaves to implementations."""

_WHITE: Final = frozenset(" \t\n\r")
_MODERN: Final = "io.modelcontextprotocol/protocolVersion"
_decode = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class Message:
    """One JSON-RPC message; `line` is how it came, without the newline."""

    line: bytes
    value: dict[str, Any]
    _echoes: bool | None = None
    """Whether writing `value` gives `line` again: then nothing was lost by reading it, and each
    member's bytes are what writing it gives."""

    @property
    def id(self) -> Id | None:
        return identifier(self.value.get("id"))

    @property
    def method(self) -> str | None:
        value = self.value.get("method")
        return value if isinstance(value, str) else None

    @property
    def params(self) -> dict[str, Any]:
        value = self.value.get("params")
        return value if isinstance(value, dict) else {}

    @property
    def answers(self) -> bool:
        """Whether it is a response."""
        return "method" not in self.value and ("result" in self.value or "error" in self.value)

    def member(self, *path: str) -> bytes | None:
        """The bytes of the value at `path`, as they came."""
        if self._echoes is None:
            self._echoes = _written(self.value) == self.line
        if self._echoes:
            value: Any = self.value
            for name in path:
                if not isinstance(value, dict) or name not in value:
                    return None
                value = value[name]
            return orjson.dumps(value)
        text: str | None = self.line.decode()
        for name in path:
            text = None if text is None else _member(text, name)
        return None if text is None else text.encode()

    def id_bytes(self) -> bytes:
        """The id, to be answered to."""
        value = self.id
        if isinstance(value, float):  # an integer beyond 64 bits was read as one
            return self.member("id") or b"null"
        return orjson.dumps(value)


def identifier(value: Any) -> Id | None:
    return None if isinstance(value, bool) or not isinstance(value, Id) else value


def read(line: bytes) -> Message | list[Message] | None:
    """A message, the messages of a batch, or `None` for what is neither."""
    value = _loads(line)
    if isinstance(value, dict):
        return Message(line, value)
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [Message(part, each) for part, each in zip(_elements(line), value, strict=True)]
    return None


def may_hide_a_call(line: bytes) -> bool:
    """Of a line that could not be read: whether a more lenient reader could find a call in it. A
    method's name has these letters, or an escape in their place."""
    return b"call" in line or b"\\" in line


def answer(to: bytes, result: bytes) -> bytes:
    """The response whose id is the bytes `to`."""
    return b'{"jsonrpc":"2.0","id":' + to + b',"result":' + result + b"}"


def failure(to: bytes, code: int, message: str) -> bytes:
    """The error response whose id is the bytes `to`."""
    error = {"code": code, "message": message}
    return b'{"jsonrpc":"2.0","id":' + to + b',"error":' + orjson.dumps(error) + b"}"


def batch(lines: list[bytes]) -> bytes:
    return b"[" + b",".join(lines) + b"]"


def readdressed(line: bytes, to: bytes) -> bytes:
    """The same response, to another request of the same session."""
    text = line.decode()
    for name, start, end in _members(text):
        if name == "id":
            return text[:start].encode() + to + text[end:].encode()
    return line


def tool_error(text: str, meta: dict[str, Any], *, modern: bool) -> bytes:
    """A tool result that says no."""
    result: dict[str, Any] = {"resultType": "complete"} if modern else {}
    result |= {"content": [{"type": "text", "text": text}], "isError": True, "_meta": meta}
    return orjson.dumps(result)


def tool_result(value: Any) -> bytes:
    """A tool result that a person gave: one as it stands, any other value as text."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        return json.dumps(value, ensure_ascii=False).encode()
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    result: dict[str, Any] = {"content": [{"type": "text", "text": shown}]}
    if isinstance(value, dict):
        result["structuredContent"] = value
    return json.dumps(result, ensure_ascii=False).encode()


def marked(result: bytes, key: str, value: Any) -> bytes:
    """The same result with one more member in its `_meta`."""
    mark = orjson.dumps(key) + b":" + orjson.dumps(value)
    text = result.decode()
    for name, start, end in _members(text):
        if name == "_meta" and text[start] == "{":
            rest = text[start + 1 : end]
            comma = b"" if rest.lstrip().startswith("}") else b","
            return (text[: start + 1].encode() + mark + comma + rest.encode()) + text[end:].encode()
    rest = text[text.index("{") + 1 :]
    comma = b"" if rest.lstrip().startswith("}") else b","
    return b'{"_meta":{' + mark + b"}" + comma + rest.encode()


def is_modern(call: Message) -> bool:
    """Whether a request is of the era without a handshake (2026-07-28)."""
    meta = call.params.get("_meta")
    return isinstance(meta, dict) and _MODERN in meta


def modern_meta(call: Message) -> dict[str, Any]:
    """What a request of ours must carry to be of the same era and client as `call`."""
    meta = call.params.get("_meta")
    if not isinstance(meta, dict):
        return {}
    return {name: meta[name] for name in meta if name.startswith("io.modelcontextprotocol/")}


def _loads(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass  # NaN, lone surrogates: not JSON to everybody, and no business of ours
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def _written(value: Any) -> bytes | None:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None


def _member(text: str, wanted: str) -> str | None:
    found = None
    if text.lstrip().startswith("{"):
        for name, start, end in _members(text):
            if name == wanted:
                found = text[start:end]  # the last one, as every parser takes it
    return found


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Of an object that was read before: each member's name, and where its value stands."""
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] == '"':
        name, at = scanstring(text, at + 1)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _decode(text, start)
        yield name, start, end
        at = _skip(text, end)
        if text[at] != ",":
            return
        at = _skip(text, at + 1)


def _elements(line: bytes) -> Iterator[bytes]:
    """The elements of an array that was read before."""
    text = line.decode()
    at = _skip(text, 0) + 1
    while True:
        start = _skip(text, at)
        _, end = _decode(text, start)
        yield text[start:end].encode()
        at = _skip(text, end) + 1
        if text[at - 1] != ",":
            return


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] not in _WHITE:
        return at
    return WHITESPACE.match(text, at).end()  # type: ignore[no-any-return]  # not in its stubs
