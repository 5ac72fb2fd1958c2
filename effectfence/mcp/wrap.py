"""`effectfence wrap`: the fence in front of any MCP server, message by message.

The client's own bytes go to the server and the server's own bytes to the client; only `tools/call`
of a tool that may change the world is asked about first:

    client ── tools/call ──▶ fence.effect ── fresh ──▶ server ── answer ──▶ commit ──▶ client
                                   └─ ran before ──▶ the recorded result, marked as a replay

How an answer is taken:

    a result                          done: recorded, then handed on
    `isError`, or a JSON-RPC error    it answered: released (unknown where the policy says so)
    more input is required            released: nothing is complete yet (2026-07-28)
    none, for the server ended        unknown: fenced until an operator says

Invariants:

1. A fenced call reaches the server only while this process holds its ticket.
2. An answer is recorded before the client sees it; what can't be recorded is handed on as well.
3. A call's effect belongs to its ticket, not to its client: cancelled or abandoned, it runs on, and
   its outcome is recorded.
4. Duplicates that wait never run by themselves. In this process they get the first one's answer;
   those of another process are told that it was released.
5. Whatever ends this process ends the server's process group, in bounded time.
6. When the ledger can't be used, nothing that is fenced runs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from effectfence.mcp import wire
from effectfence.mcp.child import TERM_SECONDS, Child
from effectfence.mcp.observe import NearDuplicates
from effectfence.mcp.pipes import Reader, Writer
from effectfence.mcp.policy import Policy, ToolPolicy
from effectfence.mcp.wire import Id, Message

if TYPE_CHECKING:
    from effectfence.fence import EffectFence
    from effectfence.models import EffectCert, EffectRequest

INTENT: Final = "effectfence/intent"
"""In a request's `_meta`: the client's own name for the action."""
REPLAY: Final = "effectfence/replay"
"""In a result's `_meta`: it was recorded earlier, and nothing ran now."""
REFUSED: Final = "effectfence/refused"
"""In a result's `_meta`: why nothing ran now."""

_RESULT: Final = "call_tool_result"
"""Of a recorded result: the text of the server's `result`, digit for digit."""
_AGENT: Final = "wrap"
_LARGE: Final = 1 << 19
"""Bytes of arguments from which on their hash is recorded in their place."""
_LISTING_SECONDS: Final = 5.0
_SIGNAL_GRACE_SECONDS: Final = 1.0
"""A client that ends its server kills it about two seconds after SIGTERM."""
_LAST_OUTPUT_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 2.0
_ALWAYS_RELEASED: Final = (wire.METHOD_NOT_FOUND, wire.INVALID_PARAMS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line and the environment say."""

    ledger: str
    scope: str | None
    policy: Policy
    lease_seconds: float
    result_ttl_seconds: float
    drain_seconds: float
    fence_all: bool
    observe: bool


@dataclass(eq=False)
class Call:
    """One `tools/call`. `answer` is where its answer goes, `cancelled` whether nobody wants it."""

    message: Message
    tool: str
    policy: ToolPolicy
    answer: Callable[[bytes], None]
    id: Id
    cancelled: bool = False

    @property
    def to(self) -> bytes:
        """Its id, as it came."""
        return self.message.member("id") or b"null"


@dataclass(eq=False)
class Flight:
    """A fenced call that this process runs: what its duplicates here wait for."""

    request: EffectRequest
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    error_answer: bytes | None = None
    """What the server answered, if that was an error."""


class _ServerEnded(Exception):
    """It will never answer."""


class _AnsweredWithError(Exception):
    """An error that may have come after the effect."""


class Wrap:
    """One client, one server, one fence between them."""

    def __init__(self, child: Child, settings: Settings) -> None:
        self._child = child
        self._settings = settings
        self._passed = 0
        self._shared_answers = 0
        self._calls: dict[Id, Call] = {}
        self._awaited: dict[Id, asyncio.Future[Message]] = {}
        """Answers that are handed to whoever forwarded the call, not to the client."""
        self._pending: dict[Id, tuple[Message, Callable[[bytes], None]]] = {}
        """Requests that were passed on, and where their answers go."""
        self._observed: dict[Id, asyncio.Future[Message]] = {}
        """The same answers as the client's, for whoever only looks on."""
        self._flights: dict[str, Flight] = {}
        self._tools = _Tools()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: asyncio.Task[EffectFence] | None = None
        self._server_ended = False
        self._spoken = asyncio.Event()
        """The client has said something."""
        self._client_gone = asyncio.Event()
        self._output_ended = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stops = 0
        self._near = NearDuplicates()
        self._would_have_stopped: dict[str, int] = {}

    async def run(self) -> int:
        """Until the client or the server is done; the server's exit code."""
        self._loop = asyncio.get_running_loop()
        exited = self._child.watch()
        self._handle_signals()
        self._to_client = Writer(1, on_full=self._hold_server, on_lost=self._client_gone.set)
        self._to_server = Writer(self._child.stdin, owned=True, on_full=self._hold_client)
        self._client = Reader(0, self._from_client, self._client_gone.set)
        self._server = Reader(self._child.stdout, self._from_server, self._output_ended.set)
        for pipe in (self._to_client, self._to_server, self._server, self._client):
            await pipe.start()
        self._open()
        await _first(exited, self._output_ended, self._client_gone, self._stopped)
        await self._end(exited)
        return self._child.exit_code

    # --- the end ----------------------------------------------------------------------------------

    async def _end(self, exited: asyncio.Event) -> None:
        if not exited.is_set() and not self._output_ended.is_set():
            await self._drain(exited)
        elif not self._spoken.is_set():  # it ended at once: the client's first request is told so
            await _first(self._client_gone, self._stopped, self._spoken, seconds=TERM_SECONDS)
        self._client.hold(True)
        hurry = self._stopped.is_set()
        if not exited.is_set():
            await self._to_server.close(_SIGNAL_GRACE_SECONDS if hurry else _CLOSE_SECONDS)
            await self._child.end(*self._patience(hurry))
        await _first(self._output_ended, seconds=_LAST_OUTPUT_SECONDS)
        self._server_is_gone()
        await self._child.end(*self._patience(True))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        self._report()
        await self._close_fence()
        await self._to_client.close(_CLOSE_SECONDS)

    async def _drain(self, exited: asyncio.Event) -> None:
        """Let the calls in flight end; for a short while only once a signal came."""
        idle = asyncio.Event()
        landing = asyncio.ensure_future(_all_done(set(self._tasks), idle))
        ended = (idle, exited, self._output_ended)
        if not self._stopped.is_set():
            await _first(*ended, self._stopped, seconds=self._settings.drain_seconds)
        if self._stopped.is_set():
            await _first(*ended, seconds=_SIGNAL_GRACE_SECONDS)
        landing.cancel()

    def _patience(self, hurry: bool) -> tuple[float, float]:
        """Seconds for the server to end by itself, its input being closed, and after SIGTERM."""
        if hurry:
            return 0.0, _SIGNAL_GRACE_SECONDS / 2
        return self._settings.drain_seconds if self._pending else TERM_SECONDS, TERM_SECONDS

    def _server_is_gone(self) -> None:
        """Nothing that was asked will be answered any more."""
        self._server_ended = True
        how = self._child.says_how_it_ended()
        for waiting in (*self._awaited.values(), *self._observed.values()):
            if not waiting.done():
                waiting.set_exception(_ServerEnded(f"the server {how} before it answered"))
        if self._pending:
            text = f"the wrapped server {self._child.name} {how} before it answered"
            _say(text)
            for message, answer in self._pending.values():
                answer(wire.failure(message.member("id") or b"null", wire.SERVER_ENDED, text))
        self._pending.clear()

    async def _close_fence(self) -> None:
        if self._opening is None:
            return
        if not self._opening.done():
            self._opening.cancel()
        with suppress(asyncio.CancelledError, Exception):
            fence = await self._opening
            await fence.aclose(drain_seconds=0)

    # --- signals ----------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._stop, number)
        self._loop.add_signal_handler(signal.SIGUSR1, self._report)

    def _stop(self, number: int) -> None:
        self._stops += 1
        if self._stops > 1:
            self._child.signal(signal.SIGKILL)
        self._stopped.set()

    # --- from the client --------------------------------------------------------------------------

    def _from_client(self, line: bytes) -> None:
        self._spoken.set()
        read = wire.read(line)
        if isinstance(read, Message):
            self._ask(read, self._to_client.line)
        elif read is not None and any(each.method == "tools/call" for each in read):
            self._batch(read)
        else:
            for each in read or ():
                self._remember(each, self._to_client.line)
            self._to_server.line(line)

    def _batch(self, messages: list[Message]) -> None:
        """One by one, and the answers in one batch again."""
        answers = _Answers(messages, self._to_client.line)
        for each in messages:
            self._ask(each, answers.add if each.id is not None else self._to_client.line)

    def _ask(self, message: Message, answer: Callable[[bytes], None]) -> None:
        method = message.method
        if method == "tools/call":
            self._call(message, answer)
        elif method == "notifications/cancelled" and self._cancelled(message):
            pass  # the effect runs on
        else:
            self._pass_on(message, answer)

    def _pass_on(self, message: Message, answer: Callable[[bytes], None]) -> None:
        self._remember(message, answer)
        self._to_server.line(message.line)

    def _remember(self, message: Message, answer: Callable[[bytes], None]) -> None:
        if message.method is not None and message.id is not None:
            self._pending[message.id] = message, answer

    def _cancelled(self, message: Message) -> bool:
        """Whether a call of ours was meant, whose answer nobody wants any more."""
        meant = wire.identifier(message.params.get("requestId"))
        call = None if meant is None else self._calls.get(meant)
        if call is None:
            return False
        call.cancelled = True
        return True

    def _call(self, message: Message, answer: Callable[[bytes], None]) -> None:
        tool = message.params.get("name")
        arguments = message.params.get("arguments")
        if message.id is None:
            _say("a tools/call without an id was dropped: its outcome could not be told to anybody")
            return
        if message.id in self._calls or message.id in self._pending:
            to = message.member("id") or b"null"
            answer(wire.failure(to, wire.INVALID_REQUEST, "a request with this id is in flight"))
            return
        if not isinstance(tool, str) or not isinstance(arguments, dict | None):
            self._pass_on(message, answer)  # the server says what is wrong with it
            return
        call = Call(message, tool, self._settings.policy.of(tool), answer, message.id)
        if self._settings.observe:
            self._pass_on(message, answer)
            self._start(call, self._observe(call))
        elif self._passes(call) is True:
            self._passed += 1
            self._pass_on(message, answer)
        else:
            self._start(call, self._fenced(call))

    def _start(self, call: Call, work: Coroutine[Any, Any, None]) -> None:
        self._calls[call.id] = call
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._calls.pop(call.id, None))

    def _passes(self, call: Call) -> bool | None:
        """Whether the call needs no fence; `None` as long as the server has not been asked."""
        if call.policy.fence is not None:
            return not call.policy.fence
        if self._settings.fence_all:
            return False
        return self._tools.only_reads(call.tool)

    # --- a fenced call ----------------------------------------------------------------------------

    async def _fenced(self, call: Call) -> None:
        try:
            if self._passes(call) is None:
                await self._learn(call)
            if self._passes(call):
                self._passed += 1
                self._calls.pop(call.id, None)
                self._pass_on(call.message, call.answer)
                return
            request = self._request(call)
            await self._admit(call, request)
        except Exception as error:
            self._refuse(call, error)

    async def _admit(self, call: Call, request: EffectRequest) -> None:
        from effectfence.errors import IntentInFlight

        fence = await self._fence()
        flight = self._flights.get(request.intent)
        if flight is not None and _action(flight.request) == _action(request):
            await self._join(call, request, flight)
            return
        flight = Flight(request)
        mine = self._flights.setdefault(request.intent, flight) is flight
        try:
            await self._lead(fence, call, request, flight)
        except IntentInFlight:
            await self._after(fence, call, request)
        finally:
            if mine:
                del self._flights[request.intent]
            flight.landed.set()

    async def _lead(
        self, fence: EffectFence, call: Call, request: EffectRequest, flight: Flight
    ) -> None:
        """Ask, and run it if nobody has."""
        from effectfence.errors import FenceError, NotExecuted

        answered: Message | None = None
        try:
            async with fence.effect(request, wait_seconds=0) as attempt:
                if attempt.fresh:
                    if call.cancelled:
                        raise NotExecuted("cancelled before it was sent")
                    answered = await self._forward(call)
                    attempt.result = _taken(answered, call.policy)
        except (NotExecuted, _AnsweredWithError):
            if answered is not None:
                flight.error_answer = answered.line
        except FenceError as error:
            if answered is None:
                raise
            _say(f"{error} (the client got the answer)")
        if answered is not None:
            self._reply(call, answered.line)
        elif attempt.cert is not None:
            self._replay(call, attempt.cert)

    async def _forward(self, call: Call) -> Message:
        """The server's answer. Raises `_ServerEnded`."""
        if self._server_ended:
            raise _ServerEnded("the server had ended before it was asked")
        answered: asyncio.Future[Message] = self._loop.create_future()
        self._awaited[call.id] = answered
        self._to_server.line(call.message.line)
        try:
            return await answered
        finally:
            del self._awaited[call.id]

    async def _join(self, call: Call, request: EffectRequest, flight: Flight) -> None:
        """Wait for a call of this process that is the same."""
        with suppress(TimeoutError):
            async with asyncio.timeout(call.policy.wait_seconds):
                await flight.landed.wait()
        if flight.error_answer is not None:
            self._shared_answers += 1
            self._reply(call, wire.readdressed(flight.error_answer, call.to))
            return
        await self._after(await self._fence(), call, request, waited=True)

    async def _after(
        self, fence: EffectFence, call: Call, request: EffectRequest, *, waited: bool = False
    ) -> None:
        """What became of a call that somebody else runs; it never runs by this one."""
        from effectfence.models import Fresh

        seconds = 0.0 if waited else call.policy.wait_seconds
        admission = await fence.prepare(request, wait_seconds=seconds)
        if isinstance(admission, Fresh):
            await fence.release(admission.prepared, "it had only waited for another attempt")
            self._refuse_as(call, "released", False, request.intent, _RELEASED)
        else:
            self._replay(call, admission.cert)

    # --- answers ----------------------------------------------------------------------------------

    def _reply(self, call: Call, line: bytes) -> None:
        call.answer(b"" if call.cancelled else line)

    def _replay(self, call: Call, cert: EffectCert) -> None:
        from effectfence.models import UNRECORDED

        recorded = cert.result
        if isinstance(recorded, dict) and set(recorded) == {UNRECORDED}:
            text = (
                f"this call of {call.tool!r} ran before and was not run again, but its result was "
                f"not recorded ({recorded[UNRECORDED]}). Ask the tool itself for it."
            )
            self._refuse_as(call, "result_not_recorded", True, cert.intent, text)
            return
        if isinstance(recorded, dict) and set(recorded) == {_RESULT}:
            result = str(recorded[_RESULT]).encode()
        else:
            result = wire.tool_result(recorded)  # an operator's word
        mark = {"intent": cert.intent, "certificate": cert.hash}
        self._reply(call, wire.answer(call.to, wire.marked(result, REPLAY, mark)))

    def _refuse(self, call: Call, error: Exception) -> None:
        """Nothing ran by this call; or nobody knows."""
        from effectfence.errors import FenceError

        if isinstance(error, FenceError):
            self._forget_closed(error)
            text = self._what_to_do(call, error)
            intent = getattr(error, "intent", None)
            self._refuse_as(call, error.code, error.ran, intent, text)
        elif isinstance(error, _ServerEnded):
            intent = self._name(call)
            text = f"nobody knows whether this call of {call.tool!r} ran: {error}."
            text = f"{text} It is not run again. {self._settle_line(intent)}"
            self._refuse_as(call, "outcome_unknown", None, intent, text)
        elif isinstance(error, ValueError):
            text = (
                f"the arguments of {call.tool!r} can't be fenced, and nothing ran: {_lean(error)}"
            )
            self._refuse_as(call, "invalid_arguments", False, None, text)
        else:
            logging.getLogger("effectfence").error("a call failed", exc_info=error)
            text = f"the fence failed ({type(error).__name__}: {error}); see its standard error"
            self._refuse_as(call, "fence_error", None, None, text)

    def _what_to_do(self, call: Call, error: Any) -> str:
        if error.code == "outcome_unknown":
            return (
                f"nobody knows whether this call of {call.tool!r} ran before ({error.reason}). "
                f"It was not run again. {self._settle_line(error.intent)}"
            )
        if error.code == "intent_in_flight":
            return (
                f"this call of {call.tool!r} is still running (asked for earlier, attempt "
                f"{error.attempt}); it was not executed again. Ask again later for its result."
            )
        return str(error)

    def _settle_line(self, intent: str | None) -> str:
        where = f"{self._settings.ledger} '{intent}'"
        if self._settings.scope is not None:
            where = f"{where} --scope {self._settings.scope}"
        by = "--by YOU --reason HOW_YOU_KNOW"
        return (
            "Look at what the tool did. If it ran: "
            f"`effectfence ledger settle {where} --result JSON {by}`; if it did not: "
            f"`effectfence ledger clear {where} {by}`."
        )

    def _refuse_as(
        self, call: Call, code: str, ran: bool | None, intent: str | None, text: str
    ) -> None:
        facts = {"code": code, "ran": ran, "intent": intent}
        modern = wire.is_modern(call.message)
        result = wire.tool_error(f"effectfence: {text}", {REFUSED: facts}, modern=modern)
        self._reply(call, wire.answer(call.to, result))

    # --- what is asked of the fence ---------------------------------------------------------------

    def _request(self, call: Call) -> EffectRequest:
        """Raises `ValueError` for arguments that can't be fenced."""
        from effectfence.models import EffectRequest
        from effectfence.templates import Template

        arguments = _arguments(call)
        domain = f"tool:{call.tool}"
        if call.policy.domain is not None:
            domain = Template(call.policy.domain).fill(arguments)
        return EffectRequest(
            intent=_intent(call, arguments),
            domain=domain,
            tool=call.tool,
            args=_recordable(arguments, call),
            agent=_AGENT,
            ignore=call.policy.unhashed,
            result_ttl=call.policy.result_ttl,
        )

    def _name(self, call: Call) -> str | None:
        with suppress(ValueError):
            return _intent(call, _arguments(call))
        return None

    def _open(self) -> None:
        self._opening = self._loop.create_task(self._open_fence())
        self._opening.add_done_callback(_seen)

    async def _open_fence(self) -> EffectFence:
        home = await asyncio.to_thread(import_module, "effectfence.fence")
        models = import_module("effectfence.models")
        config = models.FenceConfig(
            lease_ttl=self._settings.lease_seconds, result_ttl=self._settings.result_ttl_seconds
        )
        return await home.EffectFence.open(self._settings.ledger, config)  # type: ignore[no-any-return]

    async def _fence(self) -> EffectFence:
        """Opened in the background; again if that failed, so that it can be mended meanwhile."""
        if self._opening is None or (self._opening.done() and not _succeeded(self._opening)):
            self._open()
        assert self._opening is not None
        fence = await asyncio.shield(self._opening)
        return fence if self._settings.scope is None else fence.scoped(self._settings.scope)

    def _forget_closed(self, error: Any) -> None:
        """A ledger that closed itself is opened anew by the next call."""
        if getattr(error, "closed", False) and self._opening is not None and self._opening.done():
            broken, self._opening = self._opening, None
            if _succeeded(broken):
                closing = self._loop.create_task(broken.result().aclose(drain_seconds=0))
                self._tasks.add(closing)
                closing.add_done_callback(self._tasks.discard)

    # --- what the server says of its tools --------------------------------------------------------

    async def _learn(self, call: Call) -> None:
        """Ask the server for its tools, since the client never did."""
        if self._tools.asking is None:
            self._tools.asking = self._loop.create_task(self._list_tools(call.message))
            self._tasks.add(self._tools.asking)
            self._tools.asking.add_done_callback(self._tasks.discard)
        await asyncio.shield(self._tools.asking)

    async def _list_tools(self, call: Message) -> None:
        cursor: str | None = None
        with suppress(TimeoutError, _ServerEnded):
            async with asyncio.timeout(_LISTING_SECONDS):
                for page in range(_Tools.MOST_PAGES):
                    ask = _list_request(f"effectfence:tools:{page}", call, cursor)
                    self._awaited[ask.id] = listed = self._loop.create_future()  # type: ignore[index]
                    try:
                        self._to_server.line(ask.line)
                        cursor = self._tools.learn((await listed).value.get("result"))
                    finally:
                        del self._awaited[ask.id]  # type: ignore[arg-type]
                    if cursor is None:
                        break
        self._tools.known = True

    # --- from the server --------------------------------------------------------------------------

    def _from_server(self, line: bytes) -> None:
        read = wire.read(line)
        if isinstance(read, Message):
            self._answer(read)
        elif read is None:
            if line.strip():
                sys.stderr.buffer.write(line + b"\n")
                sys.stderr.buffer.flush()
        elif any(self._is_ours(each) for each in read):
            for each in read:
                self._answer(each)
        else:
            for each in read:
                self._settle(each)
            self._to_client.line(line)

    def _is_ours(self, message: Message) -> bool:
        """Whether it answers what was not simply passed on."""
        if not message.answers or message.id is None:
            return False
        passed = self._pending.get(message.id)
        return message.id in self._awaited or (
            passed is not None and passed[1] != self._to_client.line
        )

    def _answer(self, message: Message) -> None:
        awaited = None
        if message.answers and message.id is not None:
            awaited = self._awaited.get(message.id)
        if awaited is None:
            self._settle(message)(message.line)
        elif not awaited.done():
            awaited.set_result(message)

    def _settle(self, message: Message) -> Callable[[bytes], None]:
        """Take note of what the server says; where it goes."""
        if not message.answers or message.id is None:
            if message.method == "notifications/tools/list_changed":
                self._tools.changed()
            return self._to_client.line
        observed = self._observed.pop(message.id, None)
        if observed is not None and not observed.done():
            observed.set_result(message)
        asked, answer = self._pending.pop(message.id, (None, self._to_client.line))
        if asked is not None and asked.method == "tools/list":
            self._tools.known |= self._tools.learn(message.value.get("result")) is None
        return answer

    # --- the week before enforcing ----------------------------------------------------------------

    async def _observe(self, call: Call) -> None:
        """Everything was forwarded; say what would have been stopped."""
        from effectfence.errors import FenceError, NotExecuted, Refused

        self._observed[call.id] = answered = self._loop.create_future()
        self._calls.pop(call.id, None)  # its cancellation is passed on
        try:
            if self._passes(call):
                return
            request = self._request(call)
            for path in self._near.seen(call.tool, request.args, call.policy.unhashed):
                _say(
                    f"near-duplicate: two calls of {call.tool!r} differ in {path} alone; if that "
                    f"is no other action: ignore = [{path[1:].replace('/', '.')!r}] in the policy"
                )
            fence = await self._fence()
            async with fence.effect(request, wait_seconds=0) as attempt:
                if attempt.fresh:
                    attempt.result = _taken(await answered, call.policy)
                else:
                    self._note(call, "it was answered before")
        except Refused as error:
            self._note(call, str(error))
        except (NotExecuted, _AnsweredWithError, _ServerEnded):
            pass
        except (FenceError, ValueError) as error:
            _say(f"a call of {call.tool!r} could not be observed: {_lean(error)}")

    def _note(self, call: Call, why: str) -> None:
        self._would_have_stopped[call.tool] = self._would_have_stopped.get(call.tool, 0) + 1
        _say(f"would have stopped a call of {call.tool!r}: {why}")

    def _report(self) -> None:
        """The statistics line."""
        counted = "effectfence since boot: the ledger is not open"
        if self._opening is not None and _succeeded(self._opening):
            counted = self._opening.result().stats().log_line()
        _say_plain(f"{counted} passed={self._passed} shared={self._shared_answers}")
        if self._settings.observe:
            stopped = self._would_have_stopped
            each = ", ".join(f"{tool} {count}" for tool, count in sorted(stopped.items()))
            _say(f"observed only: would have stopped {sum(stopped.values())} ({each or 'none'})")

    # --- holding back -----------------------------------------------------------------------------

    def _hold_server(self, full: bool) -> None:
        self._server.hold(full)

    def _hold_client(self, full: bool) -> None:
        self._client.hold(full)


class _Tools:
    """What is known of the server's tools from its listings."""

    MOST_PAGES: Final = 100

    def __init__(self) -> None:
        self.known = False
        self.asking: asyncio.Task[None] | None = None
        self._only_read: dict[str, bool] = {}

    def only_reads(self, tool: str) -> bool | None:
        if tool in self._only_read:
            return self._only_read[tool]
        return False if self.known else None

    def learn(self, result: Any) -> str | None:
        """Take in one page of a listing; the next page's cursor, if there is one."""
        if not isinstance(result, dict) or not isinstance(result.get("tools"), list):
            return None
        for tool in result["tools"]:
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                hints = tool.get("annotations")
                hint = hints.get("readOnlyHint") if isinstance(hints, dict) else None
                self._only_read[tool["name"]] = hint is True
        cursor = result.get("nextCursor")
        return cursor if isinstance(cursor, str) else None

    def changed(self) -> None:
        """What was read-only may be so no more: look again before the next call passes."""
        self.known = False
        self.asking = None
        self._only_read.clear()


class _Answers:
    """Gathers the answers to a batch; written as one when the last is there."""

    def __init__(self, messages: list[Message], write: Callable[[bytes], None]) -> None:
        self._missing = sum(each.id is not None and each.method is not None for each in messages)
        self._lines: list[bytes] = []
        self._write = write

    def add(self, line: bytes) -> None:
        """One answer, or nothing for a call that was cancelled."""
        self._missing -= 1
        if line:
            self._lines.append(line)
        if self._missing == 0 and self._lines:
            self._write(wire.batch(self._lines))


# --- pure pieces ----------------------------------------------------------------------------------


def _arguments(call: Call) -> dict[str, Any]:
    """The call's arguments with exact numbers. Raises `ValueError`."""
    from effectfence.canonical import MAX_DEPTH, strict_decode

    data = call.message.member("params", "arguments")
    if data is None or data == b"null":
        return {}
    arguments = strict_decode(data, max_depth=MAX_DEPTH, max_bytes=1 << 26)
    assert isinstance(arguments, dict)
    return arguments


def _intent(call: Call, arguments: dict[str, Any]) -> str:
    """What the client named, else the tool and a hash of what identifies the action."""
    from effectfence.canonical import encode, sha256_hex
    from effectfence.models import without

    meta = call.message.params.get("_meta")
    named = meta.get(INTENT) if isinstance(meta, dict) else None
    if named is not None:
        if not isinstance(named, str):
            raise ValueError(f"_meta[{INTENT!r}] must be a string")
        return named
    identifying = _picked(arguments, call.policy.identity) or without(
        arguments, call.policy.unhashed
    )
    content = encode({"tool": call.tool, "args": identifying}, name="params")
    return f"{call.tool[:200]}:{sha256_hex(content)}"


def _recordable(arguments: dict[str, Any], call: Call) -> dict[str, Any]:
    """The arguments, or what tells them from others where they are too large for a record."""
    from effectfence.canonical import encode, sha256_hex
    from effectfence.models import without

    if len(call.message.line) <= _LARGE:
        return arguments
    content = encode(without(arguments, call.policy.unhashed), name="arguments")
    if len(content) <= _LARGE:
        return arguments
    return {"sha256": sha256_hex(content), "bytes": len(content)}


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


def _action(request: EffectRequest) -> bytes:
    """Equal for two requests that the fence would take for the same action."""
    from effectfence.canonical import encode
    from effectfence.models import without

    return encode([request.tool, request.domain, without(request.args, request.ignore)])


def _taken(answered: Message, policy: ToolPolicy) -> dict[str, str]:
    """What is recorded of an answer. Raises what says how it ends instead."""
    from effectfence.errors import NotExecuted

    error = answered.value.get("error")
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        if policy.on_error == "unknown" and code not in _ALWAYS_RELEASED:
            raise _AnsweredWithError(f"the server answered with error {code}")
        raise NotExecuted(f"the server answered with error {code}")
    result = answered.value.get("result")
    kind = result.get("resultType", "complete") if isinstance(result, dict) else "complete"
    if kind == "input_required":
        raise NotExecuted("the server asked for more input")
    if kind != "complete":
        raise _AnsweredWithError(f"the server answered with {kind!r}: it goes on elsewhere")
    if isinstance(result, dict) and result.get("isError") is True:
        if policy.on_error == "unknown":
            raise _AnsweredWithError("the tool answered with an error")
        raise NotExecuted("the tool answered with an error")
    recorded = answered.member("result")
    assert recorded is not None
    return {_RESULT: recorded.decode()}


def _list_request(id: str, call: Message, cursor: str | None) -> Message:
    import json

    params: dict[str, Any] = {} if cursor is None else {"cursor": cursor}
    if meta := wire.modern_meta(call):
        params["_meta"] = meta
    value = {"jsonrpc": "2.0", "id": id, "method": "tools/list", "params": params}
    return Message(json.dumps(value).encode(), value)


def _lean(error: Exception) -> str:
    """A validation error without its library's own noise."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
        for each in errors(include_url=False)
    )


_RELEASED: Final = (
    "another attempt at this very call, which this one waited for, was answered with an error and "
    "freed it; this one did not run. Ask again to run it."
)


async def _first(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until one of them is set, or so long."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()


async def _all_done(tasks: set[asyncio.Task[None]], idle: asyncio.Event) -> None:
    if tasks:
        await asyncio.wait(tasks)
    idle.set()


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _seen(task: asyncio.Task[Any]) -> None:
    """Its failure is told to whoever calls; nobody may ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _say(f"{error}; fenced calls are refused until that is mended")


def _say(sentence: str) -> None:
    _say_plain(f"effectfence: {sentence}")


def _say_plain(line: str) -> None:
    from effectfence.commands.printing import printable

    with suppress(OSError, ValueError):
        sys.stderr.write(f"{printable(line)}\n")
        sys.stderr.flush()


async def refuse_everything(name: str, reason: str) -> None:
    """For a server that could not be started: the client's first request is told why."""
    ended = asyncio.Event()

    def told(line: bytes) -> None:
        read = wire.read(line)
        first = read[0] if isinstance(read, list) else read
        if first is not None and first.id is not None:
            to = first.member("id") or b"null"
            text = f"the wrapped server {name} could not be started: {reason}"
            writer.line(wire.failure(to, wire.SERVER_ENDED, text))
            ended.set()

    writer = Writer(1, on_lost=ended.set)
    await writer.start()
    await Reader(0, told, ended.set).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LISTING_SECONDS):
            await ended.wait()
    await writer.close(_CLOSE_SECONDS)
