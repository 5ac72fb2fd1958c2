"""Calls that may change the world: each is run once, and its duplicates are answered.

    call ──▶ fence.effect ── fresh ──▶ server ── answer ──▶ commit ──▶ client
                  └─ ran before ──▶ the recorded result, marked as a replay

How an answer is taken:

    a result                          done: recorded, then handed on
    `isError`, or a JSON-RPC error    it answered: released (unknown where the policy says so)
    more input is required            released: nothing is complete yet (2026-07-28)
    none, for the server ended        unknown: fenced until an operator says

Invariants:

1. A call reaches the server only while this process holds its ticket.
2. An answer is recorded before the client sees it; what can't be recorded is handed on as well.
3. A call's effect belongs to its ticket, not to its client: cancelled or abandoned, it runs on, and
   its outcome is recorded.
4. Duplicates that wait never run by themselves. In this process they end as the first one ended;
   those of another process are told when it was released.
5. `handle` raises nothing: whatever goes wrong, the call is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from effectfence.canonical import MAX_DEPTH, encode, sha256_hex, strict_decode
from effectfence.commands.printing import pasted
from effectfence.errors import FenceError, IntentInFlight, LedgerUnavailable, NotExecuted, Refused
from effectfence.fence import EffectFence
from effectfence.mcp import wire
from effectfence.mcp.call import Call, NotSent, ServerEnded
from effectfence.mcp.observe import NearDuplicates
from effectfence.mcp.policy import ToolPolicy
from effectfence.mcp.wire import Message
from effectfence.models import (
    UNRECORDED,
    EffectCert,
    EffectRequest,
    FenceConfig,
    Fresh,
    without,
)
from effectfence.stores.address import shown
from effectfence.templates import Template

INTENT: Final = "effectfence/intent"
"""In a request's `_meta`: the client's own name for the action."""
REPLAY: Final = "effectfence/replay"
"""In a result's `_meta`: it was recorded earlier, and nothing ran now."""

_RESULT: Final = "call_tool_result"
"""Of a recorded result: the text of the server's `result`, digit for digit."""
_LARGE: Final = 1 << 19
"""Bytes of arguments from which on their hash is recorded in their place."""
_MOST_ARGUMENT_BYTES: Final = 64 << 20
_ROUND: Final = ("inputResponses", "requestState")
_ALWAYS_RELEASED: Final = (wire.METHOD_NOT_FOUND, wire.INVALID_PARAMS)

__all__ = ["EffectFence", "FenceConfig", "FencedCalls", "ObservedCalls"]

_log = logging.getLogger("effectfence")

Forward = Callable[[Call], Awaitable[Message]]
"""Sends a call to the server; its answer, or `NotSent`, or `ServerEnded`."""


@dataclass(eq=False)
class Flight:
    """A call that this process runs: what its duplicates here wait for."""

    request: EffectRequest
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    answer: bytes | None = None
    """What the server answered, if that is not recorded."""
    failure: Exception | None = None
    """Why it did not run, or what is not known of it."""
    given_up: bool = False
    """Whether it was cancelled before it was sent."""


class _Released(Exception):
    """What was waited for ran to no result, and is free again."""


class _AnsweredWithError(Exception):
    """The server answered with an error that may have come after the effect."""


class FencedCalls:
    """`ledger` and `scope` are what an operator names, to settle what nobody knows."""

    def __init__(
        self, fence: EffectFence, forward: Forward, *, ledger: str, scope: str | None
    ) -> None:
        self._fence = fence if scope is None else fence.scoped(scope)
        self._forward = forward
        where = shown(ledger)
        self._where = f"{where} {{}}" if scope is None else f"{where} {{}} --scope {scope}"
        self._flights: dict[str, Flight] = {}
        self.closed = False
        """Whether the ledger closed itself: it has to be opened anew."""
        self.shared_answers = 0

    async def handle(self, call: Call) -> None:
        """Run it if nobody has; answer it in any case."""
        try:
            await self._admit(call, request_of(call))
        except FenceError as error:
            self.closed |= isinstance(error, LedgerUnavailable) and error.closed
            self._refuse(call, error)
        except _Released:
            call.refuse("released", False, _intent(call, _arguments(call)), _RELEASED)
        except NotSent as error:
            call.refuse("not_sent", False, None, f"{error}; nothing ran")
        except ServerEnded as error:
            intent = _intent(call, _arguments(call))
            text = f"nobody knows whether this call of {call.tool!r} ran: {error}"
            text = f"{text}. It is not run again. {self._what_to_do(intent)}"
            call.refuse("outcome_unknown", None, intent, text)
        except ValueError as error:
            text = f"arguments of {call.tool!r} that can't be fenced; nothing ran: {_lean(error)}"
            call.refuse("invalid_arguments", False, None, text)
        except Exception as error:
            _log.exception("a call failed")
            text = f"the fence failed ({type(error).__name__}: {error}); see its standard error"
            call.refuse("fence_error", None, None, text)

    async def _admit(self, call: Call, request: EffectRequest) -> None:
        flight = self._flights.get(request.intent)
        if flight is not None and _action(flight.request) == _action(request):
            await self._join(call, request, flight)
            return
        flight = Flight(request)
        leads = self._flights.setdefault(request.intent, flight) is flight
        try:
            try:
                await self._lead(call, request, flight)
            except IntentInFlight:
                await self._after(call, request, call.policy.wait_seconds)
        except Exception as error:
            flight.failure = error
            raise
        finally:
            if leads:
                del self._flights[request.intent]
            flight.landed.set()

    async def _lead(self, call: Call, request: EffectRequest, flight: Flight) -> None:
        """Ask, and run it if nobody has."""
        answered: Message | None = None
        try:
            async with self._fence.effect(request, wait_seconds=0) as attempt:
                if attempt.fresh:
                    if call.cancelled:
                        flight.given_up = True
                        raise NotExecuted("cancelled before it was sent")
                    answered = await self._forward(call)
                    attempt.result = _taken(answered, call.policy)
        except NotSent:
            raise
        except (NotExecuted, _AnsweredWithError):
            flight.answer = None if answered is None else answered.line
        except FenceError as error:
            if answered is None:
                raise
            flight.answer = answered.line
            _log.warning("%s The client got the answer.", error)
        if attempt.cert is not None and answered is None:
            self._replay(call, attempt.cert)
        else:
            call.reply(b"" if answered is None else answered.line)

    async def _join(self, call: Call, request: EffectRequest, flight: Flight) -> None:
        """Wait for a call of this process that is the same."""
        with suppress(TimeoutError):
            async with asyncio.timeout(call.policy.wait_seconds):
                await flight.landed.wait()
        if flight.given_up:
            await self._admit(call, request)  # in its place
        elif flight.failure is not None:
            self.shared_answers += 1
            raise flight.failure
        elif flight.answer is not None:
            self.shared_answers += 1
            call.reply_again(flight.answer)
        else:
            await self._after(call, request, 0)

    async def _after(self, call: Call, request: EffectRequest, wait_seconds: float) -> None:
        """What became of a call that somebody else ran; it never runs by this one."""
        admission = await self._fence.prepare(request, wait_seconds=wait_seconds)
        if isinstance(admission, Fresh):
            await self._fence.release(admission.prepared, "it had only waited for another attempt")
            raise _Released
        self._replay(call, admission.cert)

    # --- answers ----------------------------------------------------------------------------------

    def _replay(self, call: Call, cert: EffectCert) -> None:
        recorded = cert.result
        if isinstance(recorded, dict) and set(recorded) == {UNRECORDED}:
            text = (
                f"this call of {call.tool!r} ran before and was not run again, but its result was "
                f"not recorded ({recorded[UNRECORDED]}). Ask the tool itself for it."
            )
            call.refuse("result_not_recorded", True, cert.intent, text)
            return
        if isinstance(recorded, dict) and set(recorded) == {_RESULT}:
            result = str(recorded[_RESULT]).encode()
        else:
            result = wire.tool_result(recorded)  # an operator's word
        mark = {"intent": cert.intent, "certificate": cert.hash}
        call.reply_result(wire.marked(result, REPLAY, mark))

    def _refuse(self, call: Call, error: FenceError) -> None:
        intent: str | None = getattr(error, "intent", None)
        text = str(error)
        if error.code == "outcome_unknown" and intent is not None:
            text = (
                f"nobody knows whether this call of {call.tool!r} ran before "
                f"({error.facts['reason']}). It was not run again. {self._what_to_do(intent)}"
            )
        elif error.code == "intent_in_flight":
            text = (
                f"this call of {call.tool!r} was made before and is still running; it was not "
                "executed again. Ask again later for its result."
            )
        call.refuse(error.code, error.ran, intent, text)

    def _what_to_do(self, intent: str) -> str:
        where = self._where.format(pasted(intent))
        by = "--by YOU --reason HOW_YOU_KNOW"
        return (
            "Look at what the tool did. If it ran: "
            f"`effectfence ledger settle {where} --result JSON {by}`; if it did not: "
            f"`effectfence ledger clear {where} {by}`."
        )


class ObservedCalls:
    """Stops nothing: says what would have been stopped, once it is known."""

    def __init__(self, fence: EffectFence, say: Callable[[str], None]) -> None:
        self._fence = fence
        self._say = say
        self._near = NearDuplicates()
        self._stopped: Counter[str] = Counter()

    async def look_at(self, call: Call, answered: Awaitable[Message]) -> None:
        """Follow a call that was forwarded. Raises nothing."""
        try:
            request = request_of(call)
            self._compare(call, request)
            async with self._fence.effect(request, wait_seconds=0) as attempt:
                if attempt.fresh:
                    attempt.result = _taken(await answered, call.policy)
                else:
                    self._note(call, "it had been answered before")
        except Refused as error:
            self._note(call, str(error))
        except (NotExecuted, _AnsweredWithError, ServerEnded):
            pass
        except (FenceError, ValueError) as error:
            self._say(f"a call of {call.tool!r} could not be observed: {_lean(error)}")
        except Exception:
            _log.exception("a call could not be observed")

    def summary(self) -> str:
        each = ", ".join(f"{tool} {count}" for tool, count in sorted(self._stopped.items()))
        return f"observed only: would have stopped {self._stopped.total()} ({each or 'none'})"

    def _note(self, call: Call, why: str) -> None:
        self._stopped[call.tool] += 1
        self._say(f"would have stopped a call of {call.tool!r}: {why}")

    def _compare(self, call: Call, request: EffectRequest) -> None:
        for place in self._near.seen(call.tool, request.args, call.policy.unhashed):
            path = place[1:].replace("/", ".")
            self._say(
                f"near-duplicate: two calls of {call.tool!r} differ in {place} alone; if they are "
                f'the same action, say so in the policy: ignore = ["{path}"]'
            )


# --- what a call asks of the fence ----------------------------------------------------------------


def request_of(call: Call) -> EffectRequest:
    """The call as the fence sees it. Raises `ValueError` for arguments that can't be fenced."""
    arguments = _arguments(call)
    domain = f"tool:{call.tool}"
    if call.policy.domain is not None:
        domain = Template(call.policy.domain).fill(arguments)
    return EffectRequest(
        intent=_intent(call, arguments),
        domain=domain,
        tool=call.tool,
        args=_recordable(arguments, call),
        agent=call.agent,
        ignore=call.policy.unhashed,
        result_ttl=call.policy.result_ttl,
    )


def _arguments(call: Call) -> dict[str, Any]:
    """With exact numbers, whatever their size."""
    data = call.message.member("params", "arguments")
    if data is None or data == b"null":
        return {}
    arguments = strict_decode(data, max_depth=MAX_DEPTH, max_bytes=_MOST_ARGUMENT_BYTES)
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _intent(call: Call, arguments: dict[str, Any]) -> str:
    """What the client named, else the tool and a hash of what identifies the action."""
    meta = call.message.params.get("_meta")
    named = meta.get(INTENT) if isinstance(meta, dict) else None
    if named is not None:
        if not isinstance(named, str):
            raise ValueError(f"_meta[{INTENT!r}] must be a string")
        return named
    picked = _picked(arguments, call.policy.identity)
    identifying = {
        "tool": call.tool,
        "args": picked or without(arguments, call.policy.unhashed),
        **_round(call),
    }
    content = encode(identifying, max_depth=MAX_DEPTH + 1, name="call")
    return f"{call.tool[:200]}:{sha256_hex(content)}"


def _round(call: Call) -> dict[str, Any]:
    """What tells one round of a multi-round-trip call from another (2026-07-28)."""
    return {name: call.message.params[name] for name in _ROUND if name in call.message.params}


def _picked(arguments: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The arguments at these dotted paths, as far as they are there."""
    picked = {}
    for path in paths:
        value: Any = arguments
        for step in path.split("."):
            if not isinstance(value, dict) or step not in value:
                break
            value = value[step]
        else:
            picked[path] = value
    return picked


def _recordable(arguments: dict[str, Any], call: Call) -> dict[str, Any]:
    """The arguments, or what tells them from others where they are too large for a record."""
    if len(call.message.line) <= _LARGE:
        return arguments
    content = encode(without(arguments, call.policy.unhashed), name="arguments")
    if len(content) <= _LARGE:
        return arguments
    return {"sha256": sha256_hex(content), "bytes": len(content)}


def _action(request: EffectRequest) -> bytes:
    """Equal for two requests that the fence would take for the same action."""
    return encode([request.tool, request.domain, without(request.args, request.ignore)])


# --- how an answer is taken -----------------------------------------------------------------------


def _taken(answered: Message, policy: ToolPolicy) -> dict[str, str]:
    """What is recorded of an answer. Raises what says how it ends instead."""
    error = answered.value.get("error")
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        raise _failed(f"the server answered with error {code}", policy, code)
    result = answered.value.get("result")
    members = result if isinstance(result, dict) else {}
    kind = members.get("resultType", "complete")
    if kind == "input_required":
        raise NotExecuted("the server asked for more input")
    if kind != "complete":
        raise _AnsweredWithError(f"the server answered with {kind!r}: it goes on elsewhere")
    if members.get("isError") is True:
        raise _failed("the tool answered with an error", policy)
    recorded = answered.member("result")
    assert recorded is not None
    return {_RESULT: recorded.decode()}


def _failed(how: str, policy: ToolPolicy, code: Any = None) -> Exception:
    if policy.on_error == "unknown" and code not in _ALWAYS_RELEASED:
        return _AnsweredWithError(how)
    return NotExecuted(how)


def _lean(error: Exception) -> str:
    """A validation error without its library's own noise."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
        for each in error.errors(include_url=False)
    )


_RELEASED: Final = (
    "another attempt at this very call, for which this one waited, was answered with an error (or "
    "never sent) and freed it again; this one did not run. Ask again to run it."
)
