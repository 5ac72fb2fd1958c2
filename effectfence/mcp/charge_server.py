"""The built-in MCP server of `effectfence demo`: it charges cards, and writes every charge down.

Raw JSON-RPC over stdio and the standard library alone, so that it starts at once and runs anywhere.
It does what most servers do: every call that arrives is carried out.

    python -m effectfence.mcp.charge_server CHARGES.jsonl [SECONDS]

Each `charge_card` appends one line to the file, which is the money that moved, waits for SECONDS
(none), as a provider that answers late, and answers with an id that no other charge has.

Invariants:

1. A line of the file is one effect, written whole by one append; there is no effect without its
   line, and the line is there before the answer.
2. A call that is refused (an argument missing or of the wrong type) writes nothing.
3. Calls run at the same time, at most 64; the input's end waits for those that run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

LEGACY: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN: Final = "2026-07-28"
VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"

_INFO: Final = {"name": "effectfence-charges", "version": "1"}
_CAPABILITIES: Final[dict[str, Any]] = {"tools": {}}
_AT_ONCE: Final = 64
_PARSE_ERROR: Final = -32700
_INVALID_REQUEST: Final = -32600
_METHOD_NOT_FOUND: Final = -32601
_INVALID_PARAMS: Final = -32602
_UNSUPPORTED_VERSION: Final = -32022

TOOLS: Final = (
    {
        "name": "charge_card",
        "description": "Charge the card of an order. Every call is one charge.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "order_id": {"type": "string", "description": "whose card"},
                "amount_cents": {"type": "integer", "minimum": 1, "description": "how much"},
                "memo": {"type": "string", "description": "what the statement shows"},
            },
            "required": ["order_id", "amount_cents"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False},
    },
    {
        "name": "list_charges",
        "description": "Every charge so far.",
        "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
        "annotations": {"readOnlyHint": True},
    },
)


class Refused(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message} | ({"data": data} if data else {})


class ChargeServer:
    """Answers requests; the charges are in the file at `path`."""

    def __init__(self, path: str, answer_after_seconds: float = 0.0) -> None:
        self._path = path
        self._answer_after_seconds = answer_after_seconds

    def answer(self, message: Any) -> dict[str, Any] | None:
        """The response to one message; `None` to a notification."""
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            if isinstance(message, dict) and ("result" in message or "error" in message):
                return None  # nothing was asked
            return _failed(None, Refused(_INVALID_REQUEST, "not a JSON-RPC request"))
        if "id" not in message:
            return None
        params = message.get("params")
        try:
            result = self._result(message["method"], params if isinstance(params, dict) else {})
        except Refused as refused:
            return _failed(message["id"], refused)
        return {"jsonrpc": "2.0", "id": message["id"], "result": result}

    def _result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            asked = params.get("protocolVersion")
            version = asked if asked in LEGACY else LEGACY[-1]
            return {
                "protocolVersion": version,
                "capabilities": _CAPABILITIES,
                "serverInfo": _INFO,
            }
        modern = _is_modern(params)
        if method == "ping" and not modern:
            return {}
        if method == "server/discover" and modern:
            found: dict[str, Any] = {"supportedVersions": [MODERN], "capabilities": _CAPABILITIES}
            return _modern(found | _FRESH_ONLY)
        if method == "tools/list":
            listed: dict[str, Any] = {"tools": list(TOOLS)}
            return _modern(listed | _FRESH_ONLY) if modern else listed
        if method == "tools/call":
            called = self._call(params)
            return _modern(called) if modern else called
        raise Refused(_METHOD_NOT_FOUND, f"no method {method}")

    def _call(self, params: dict[str, Any]) -> dict[str, Any]:
        arguments = params.get("arguments", {})
        match params.get("name"):
            case "charge_card":
                wrong = _what_is_wrong(arguments)
                return _error(wrong) if wrong else self._charge(arguments)
            case "list_charges":
                charges = self._charges()
                return _tool_result(f"{len(charges)} charges", {"charges": charges})
            case name:
                raise Refused(_INVALID_PARAMS, f"no tool {name}")

    def _charge(self, order: Mapping[str, Any]) -> dict[str, Any]:
        charge = {"charge_id": f"ch_{os.urandom(8).hex()}", **order}
        _append(self._path, json.dumps(charge).encode() + b"\n")
        if self._answer_after_seconds:
            time.sleep(self._answer_after_seconds)
        amount = f"{order['amount_cents'] // 100}.{order['amount_cents'] % 100:02d}"
        return _tool_result(f"{charge['charge_id']}: {amount} for {order['order_id']}", charge)

    def _charges(self) -> list[Any]:
        try:
            with open(self._path, encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []


def serve(server: ChargeServer) -> None:
    """Until the input ends; whatever was called is answered."""
    writing = threading.Lock()
    free = threading.BoundedSemaphore(_AT_ONCE)

    def carry_out(line: bytes) -> None:
        try:
            answer = _answer_line(server, line)
        finally:
            free.release()
        if answer is not None:
            with writing, suppress(BrokenPipeError):  # the charge stands, whoever left meanwhile
                _write(1, json.dumps(answer).encode() + b"\n")

    for line in sys.stdin.buffer:
        if line.strip():
            free.acquire()
            threading.Thread(target=carry_out, args=(line,)).start()


def _answer_line(server: ChargeServer, line: bytes) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _failed(None, Refused(_PARSE_ERROR, "not JSON"))
    if not isinstance(value, list):
        return server.answer(value)
    answers = [answer for answer in map(server.answer, value) if answer is not None]
    return answers or None


def _is_modern(params: dict[str, Any]) -> bool:
    meta = params.get("_meta")
    version = meta.get(VERSION_KEY) if isinstance(meta, dict) else None
    if version not in (None, MODERN):
        data = {"supported": [MODERN], "requested": version}
        raise Refused(_UNSUPPORTED_VERSION, f"unsupported protocol version {version}", data)
    return version is not None


_FRESH_ONLY: Final[dict[str, Any]] = {"ttlMs": 0, "cacheScope": "private"}
_STAMP: Final = {"io.modelcontextprotocol/serverInfo": _INFO}


def _modern(result: dict[str, Any]) -> dict[str, Any]:
    return {"resultType": "complete", **result, "_meta": _STAMP}


def _what_is_wrong(arguments: Any) -> str | None:
    if not isinstance(arguments, dict):
        return "the arguments are not an object"
    order, cents = arguments.get("order_id"), arguments.get("amount_cents")
    if not isinstance(order, str) or not order:
        return "order_id is missing: a text is wanted"
    if isinstance(cents, bool) or not isinstance(cents, int) or cents < 1:
        return "amount_cents is missing: a whole number above 0 is wanted"
    if not isinstance(arguments.get("memo", ""), str):
        return "memo is not a text"
    unknown = sorted(arguments.keys() - {"order_id", "amount_cents", "memo"})
    return f"there is no argument {unknown[0]}" if unknown else None


def _tool_result(text: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "structuredContent": value}


def _error(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": f"nothing was charged: {text}"}], "isError": True}


def _failed(to: Any, refused: Refused) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": to, "error": refused.error}


def _append(path: str, line: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        _write(file, line)
    finally:
        os.close(file)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def main(arguments: list[str]) -> int:
    """Serve over stdin and stdout."""
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m effectfence.mcp.charge_server FILE [SECONDS]\n")
        return 2
    serve(ChargeServer(arguments[0], *map(float, arguments[1:])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
