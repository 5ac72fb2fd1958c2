"""What a client sent, looked at before the SDK sees it. No I/O.

The SDK's own parsers drop a line that they cannot read (its sender then waits for ever), keep the
last of two equal keys, and take NaN and 1e400 for numbers. Here a message is strict JSON, or its
sender is told what to mend. Invariants:

1. What passes, passes as the bytes that came: no number is rounded on the way.
2. What is not a message is refused with a JSON-RPC error; whoever called a tool with arguments that
   are not strict JSON, or no object, gets a tool error, in the protocol version of its own. So
   only the arguments are taken out of the message, and the reason put in their place.
3. Nothing but `Unread` is raised, whatever came, and nothing of it is shown but paths.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, Final

from mcp_types import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR

from effectfence.canonical import (
    MAX_DEPTH,
    MAX_INTEGER_DIGITS,
    Undecodable,
    Unencodable,
    encode,
    strict_decode,
)

REFUSED: Final = f"effectfence/refused/{secrets.token_hex(16)}"
"""The one member of the arguments that stand for refused ones; no client can guess it."""

_DEEPEST: Final = MAX_DEPTH + 36
"""Of a message: `args` of the greatest depth inside a ticket, inside the arguments of a call."""


class Unread(Exception):
    """Not a message that can be acted upon; `id` is its sender's, where it could be found."""

    def __init__(self, id: str | int | None, code: int, reason: str) -> None:
        super().__init__(reason)
        self.id = id
        self.code = code
        self.reason = reason


def passed(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """A message's bytes as the SDK may read them, and what they say. Raises `Unread`."""
    wrong: Undecodable | None = None
    try:
        message = _strict(data)
    except Undecodable as error:
        wrong, message = error, _leniently(data, error)
    _check_envelope(message)
    reason = _refusal(message, wrong)
    if reason is not None and _calls_a_tool(message):
        message["params"]["arguments"] = {REFUSED: reason}
        data, reason = json.dumps(message).encode(), None
        try:
            _strict(data)
        except Undecodable as error:  # what is wrong stands elsewhere as well
            reason = str(error)
    if reason is not None:
        raise Unread(message.get("id"), INVALID_REQUEST, _printable(reason))
    return data, message


def _strict(data: bytes) -> Any:
    return strict_decode(data, max_depth=_DEEPEST, max_bytes=len(data))


def _leniently(data: bytes, why: Undecodable) -> Any:
    """The value, though it is not strict JSON: to find out who asked, and for what."""
    try:
        return json.loads(b"".join(_shallow(data)), parse_int=_integer)
    except (ValueError, RecursionError):
        raise Unread(None, PARSE_ERROR, f"not a JSON-RPC message: {why}") from None


_TOKENS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)


def _shallow(data: bytes) -> Iterator[bytes]:
    """The same text, with null for whatever is nested too deep to be read."""
    depth, begin = 0, 0
    for token in _TOKENS.finditer(data):
        bracket = token[0][:1]
        if bracket in b"[{":
            depth += 1
            if depth == _DEEPEST + 1:
                yield data[begin : token.start()] + b"null"
        elif bracket in b"]}":
            if depth == _DEEPEST + 1:
                begin = token.end()
            depth -= 1
    if depth <= _DEEPEST:
        yield data[begin:]


def _integer(digits: str) -> int:
    """Of so many digits that Python would refuse: any other, since it is refused anyway."""
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else 0


def _check_envelope(message: Any) -> None:
    if not isinstance(message, dict):
        raise Unread(None, INVALID_REQUEST, "one JSON-RPC message is wanted, an object")
    id = message.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int | None):
        raise Unread(None, INVALID_REQUEST, "the id must be a string or an integer")
    if isinstance(id, str) and not _is_text(id):
        raise Unread(None, INVALID_REQUEST, "the id holds a lone surrogate")
    if message.get("jsonrpc") != "2.0":
        raise Unread(id, INVALID_REQUEST, 'jsonrpc must be "2.0"')
    if "method" not in message and ("result" in message or "error" in message):
        return
    if not isinstance(message.get("method"), str):
        raise Unread(id, INVALID_REQUEST, "the method must be a string")
    if "id" in message and id is None:
        raise Unread(None, INVALID_REQUEST, "the id must be a string or an integer, not null")
    if not isinstance(message.get("params"), dict | None):
        raise Unread(id, INVALID_PARAMS, "params must be an object")


def _calls_a_tool(message: dict[str, Any]) -> bool:
    return (
        message.get("method") == "tools/call"
        and message.get("id") is not None
        and isinstance(message.get("params"), dict)
    )


def _refusal(message: dict[str, Any], wrong: Undecodable | None) -> str | None:
    """Why the message, or a call's arguments, can't be taken; `None` if they can."""
    arguments = (message.get("params") or {}).get("arguments")
    if _calls_a_tool(message) and not isinstance(arguments, dict | None):
        return f"arguments must be an object, not {_kind(arguments)}"
    if wrong is None:
        return None
    try:
        encode(arguments, max_depth=_DEEPEST, name="arguments")
    except Unencodable as error:
        return str(error)
    if "nested deeper" in wrong.reason:
        return f"nested too deep: args and results may be {MAX_DEPTH} levels deep"
    return wrong.reason


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "a number"


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
