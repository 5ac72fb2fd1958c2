"""`effectfence wrap`: the fence in front of any MCP server, message by message.

The client's own bytes go to the server and the server's own bytes to the client. Only `tools/call`
of a tool that may change the world takes another way, through `fenced.py`.

Invariants:

1. What is not fenced is forwarded as it came, in the order in which it came.
2. The ledger is opened while the client and the server shake hands; nothing but a fenced call waits
   for it. When it can't be used, no fenced call runs.
3. Whatever ends this process ends the server's process group, in bounded time, and every request
   that is open then is answered.
4. Nothing heavy is imported before the server runs, nor on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from effectfence.commands.printing import printable
from effectfence.mcp import wire
from effectfence.mcp.call import Call, NotSent, ServerEnded
from effectfence.mcp.child import TERM_SECONDS, Child
from effectfence.mcp.pipes import Reader, Writer, first
from effectfence.mcp.policy import Policy
from effectfence.mcp.tools import Tools
from effectfence.mcp.wire import Id, Message

if TYPE_CHECKING:
    from effectfence.fence import EffectFence
    from effectfence.mcp.fenced import FencedCalls, ObservedCalls

_FIRST_WORD_SECONDS: Final = 5.0
_LAST_OUTPUT_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 2.0
_SIGNAL_GRACE_SECONDS: Final = 1.0
"""A client that ends its server kills it about two seconds after SIGTERM."""

Answer = Callable[[bytes], None]


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
class _Opened:
    """The ledger, and who answers fenced calls with it."""

    fence: EffectFence
    calls: FencedCalls
    observed: ObservedCalls


class Wrap:
    """One client, one server, one fence between them."""

    def __init__(self, child: Child, settings: Settings) -> None:
        self._child = child
        self._settings = settings
        self._passed = 0
        self._tools = Tools()
        self._calls: dict[Id, Call] = {}
        """Fenced calls that are not answered yet."""
        self._pending: dict[Id, tuple[Message, Answer]] = {}
        """Requests that were passed on, and where their answers go."""
        self._awaited: dict[Id, asyncio.Future[Message]] = {}
        """Answers that go to whoever forwarded the request, not to the client."""
        self._observed: dict[Id, asyncio.Future[Message]] = {}
        """Answers that go to the client, and to one who looks on."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opening: asyncio.Task[_Opened] | None = None
        self._server_ended = False
        self._signals = 0
        self._stopped = asyncio.Event()
        self._client_gone = asyncio.Event()
        self._spoken = asyncio.Event()
        """The client has said something."""
        self._output_ended = asyncio.Event()

    async def run(self) -> int:
        """Until the client or the server is done; the server's exit code."""
        exited = self._child.watch()
        self._handle_signals()
        self._to_client = Writer(1, on_full=self._hold_server, on_lost=self._client_gone.set)
        self._to_server = Writer(self._child.stdin, owned=True, on_full=self._hold_client)
        self._client = Reader(0, self._from_client, self._client_gone.set)
        self._server = Reader(self._child.stdout, self._from_server, self._output_ended.set)
        for pipe in (self._to_client, self._to_server, self._server, self._client):
            await pipe.start()
        self._open()
        await first(exited, self._output_ended, self._client_gone, self._stopped)
        await self._end(exited)
        return self._child.exit_code

    # --- the end ----------------------------------------------------------------------------------

    async def _end(self, exited: asyncio.Event) -> None:
        if not exited.is_set() and not self._output_ended.is_set():
            await self._drain(exited)
        elif not self._spoken.is_set():  # the client's first request is to be told
            await first(self._client_gone, self._stopped, self._spoken, seconds=_FIRST_WORD_SECONDS)
        self._client.hold(True)
        hurry = self._stopped.is_set()
        if not exited.is_set():
            await self._to_server.close(_SIGNAL_GRACE_SECONDS if hurry else _CLOSE_SECONDS)
            await self._child.end(*self._patience(hurry))
        await first(self._output_ended, seconds=_LAST_OUTPUT_SECONDS)
        self._server_is_gone()
        await self._child.end(*self._patience(True))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        self._report()
        await self._close_ledger()
        await self._to_client.close(_CLOSE_SECONDS)

    async def _drain(self, exited: asyncio.Event) -> None:
        """Let the calls in flight end; for a short while only once a signal came."""
        idle = asyncio.Event()
        landing = asyncio.ensure_future(_all_done(set(self._tasks), idle))
        ended = (idle, exited, self._output_ended)
        if not self._stopped.is_set():
            await first(*ended, self._stopped, seconds=self._settings.drain_seconds)
        if self._stopped.is_set():
            await first(*ended, seconds=_SIGNAL_GRACE_SECONDS)
        landing.cancel()

    def _patience(self, hurry: bool) -> tuple[float, float]:
        """Seconds for the server to end by itself, its input being closed, and after SIGTERM."""
        if hurry:
            return 0.0, _SIGNAL_GRACE_SECONDS / 2
        return self._settings.drain_seconds if self._pending else TERM_SECONDS, TERM_SECONDS

    def _server_is_gone(self) -> None:
        """Nothing that was asked will be answered any more."""
        self._server_ended = True
        text = f"the wrapped server {self._child.name} {self._child.says_how_it_ended()}"
        for waiting in (*self._awaited.values(), *self._observed.values()):
            if not waiting.done():
                waiting.set_exception(ServerEnded(f"{text} before it answered"))
        if self._pending:
            self._say(f"{text} before it answered")
        for message, answer in self._pending.values():
            told = f"{text} before it answered"
            answer(wire.failure(message.id_bytes(), wire.SERVER_ENDED, told))
        self._pending.clear()

    async def _close_ledger(self) -> None:
        if self._opening is not None:
            if not self._opening.done():
                self._opening.cancel()
            with suppress(asyncio.CancelledError, Exception):
                opened = await self._opening
                await opened.fence.aclose(drain_seconds=0)

    # --- signals ----------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._report)

    def _stop(self) -> None:
        """Orderly at the first signal, at once at the second."""
        self._signals += 1
        if self._signals > 1:
            self._child.signal(signal.SIGKILL)
        self._stopped.set()

    def _report(self) -> None:
        """The statistics, on standard error."""
        opened = self._opened()
        counted = "effectfence since boot: the ledger is not open"
        shared = 0
        if opened is not None:
            counted, shared = opened.fence.stats().log_line(), opened.calls.shared_answers
        _write_error(f"{counted} passed={self._passed} shared={shared}")
        if opened is not None and self._settings.observe:
            self._say(opened.observed.summary())

    # --- from the client --------------------------------------------------------------------------

    def _from_client(self, line: bytes) -> None:
        self._spoken.set()
        read = wire.read(line)
        if isinstance(read, Message):
            self._take(read, self._write)
        elif read is not None and any(each.method == "tools/call" for each in read):
            answers = _Answers(read, self._write)
            for each in read:
                self._take(each, self._write if each.id is None else answers.add)
        elif read is None and wire.may_hide_a_call(line):
            text = "a line that can't be read was not passed on: it may hold a call that is fenced"
            self._say(text)
            self._write(wire.failure(b"null", wire.PARSE_ERROR, text))
        else:
            for each in read or ():
                self._remember(each, self._write)
            self._to_server.line(line)

    def _take(self, message: Message, answer: Answer) -> None:
        if message.method == "tools/call":
            self._take_call(message, answer)
        elif message.method != "notifications/cancelled" or not self._cancel(message):
            self._pass_on(message, answer)

    def _pass_on(self, message: Message, answer: Answer) -> None:
        if message.method == "notifications/cancelled":
            self._forget(message)
        if not self._to_server.closed:
            self._remember(message, answer)
            self._to_server.line(message.line)
        elif message.id is not None:
            text = f"the wrapped server {self._child.name} reads nothing any more"
            answer(wire.failure(message.id_bytes(), wire.SERVER_ENDED, text))

    def _remember(self, message: Message, answer: Answer) -> None:
        if message.method is not None and message.id is not None:
            self._pending[message.id] = message, answer

    def _forget(self, cancelled: Message) -> None:
        """A request that was passed on and cancelled may never be answered."""
        meant = wire.identifier(cancelled.params.get("requestId"))
        if meant is not None and self._pending.get(meant, (None, None))[1] == self._write:
            del self._pending[meant]

    def _cancel(self, message: Message) -> bool:
        """Whether a fenced call was meant: its effect runs on, and nobody wants its answer."""
        meant = wire.identifier(message.params.get("requestId"))
        call = None if meant is None else self._calls.get(meant)
        if call is None:
            return False
        call.cancelled = True
        return True

    def _take_call(self, message: Message, answer: Answer) -> None:
        tool = message.params.get("name")
        if message.id is None:
            self._say("a tools/call without an id was dropped: nobody could be told its outcome")
        elif message.id in self._calls or message.id in self._pending:
            text = "another request with this id is in flight; nothing ran"
            answer(wire.failure(message.id_bytes(), wire.INVALID_REQUEST, text))
        elif not isinstance(tool, str):
            self._pass_on(message, answer)  # a call of no tool: the server says so
        else:
            policy = self._settings.policy.of(tool)
            self._start(Call(message, tool, policy, answer, message.id))

    def _start(self, call: Call) -> None:
        passes = self._passes(call)
        if self._settings.observe:
            self._pass_on(call.message, call.answer)
            if not passes:
                self._own(self._observe(call))
        elif passes:
            self._passed += 1
            self._pass_on(call.message, call.answer)
        else:
            self._calls[call.id] = call
            self._own(self._fenced(call))

    def _passes(self, call: Call) -> bool | None:
        """Whether the call needs no fence; `None` as long as the server has not been asked."""
        if call.policy.fence is not None:
            return not call.policy.fence
        return False if self._settings.fence_all else self._tools.only_reads(call.tool)

    async def _fenced(self, call: Call) -> None:
        try:
            if self._passes(call) is None:
                await self._tools.ask(self._ask_server, call.message)
            if self._passes(call):
                self._passed += 1
                del self._calls[call.id]
                self._pass_on(call.message, call.answer)
                return
            try:
                opened = await self._ledger()
            except Exception as error:
                code = str(getattr(error, "code", "ledger_unavailable"))
                call.refuse(code, False, None, f"{error} (no call of {call.tool!r} ran)")
            else:
                await opened.calls.handle(call)
                self._reopen_if_closed(opened)
        finally:
            self._calls.pop(call.id, None)

    async def _observe(self, call: Call) -> None:
        """Forwarded by now; say what would have been stopped."""
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._observed[call.id] = answered
        try:
            opened = await self._ledger()
        except Exception:
            return  # it was said why
        await opened.observed.look_at(call, answered)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- to the server, and back ------------------------------------------------------------------

    async def _forward(self, call: Call) -> Message:
        return await self._ask_server(call.message)

    async def _ask_server(self, message: Message) -> Message:
        """Its answer, kept from the client. Raises `NotSent` or `ServerEnded`."""
        assert message.id is not None
        if self._server_ended or self._to_server.closed:
            raise NotSent(f"the wrapped server {self._child.name} had ended before it was asked")
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._awaited[message.id] = answered
        self._to_server.line(message.line)
        try:
            return await answered
        finally:
            del self._awaited[message.id]

    def _from_server(self, line: bytes) -> None:
        read = wire.read(line)
        if isinstance(read, Message):
            self._answer(read)
        elif read is None:
            _write_error(line)  # it is no message
        elif any(map(self._is_ours, read)):
            for each in read:
                self._answer(each)
        else:
            for each in read:
                self._settle(each)
            self._write(line)

    def _is_ours(self, message: Message) -> bool:
        """Whether it answers what was not simply passed on."""
        if not message.answers or message.id is None:
            return False
        passed = self._pending.get(message.id)
        return message.id in self._awaited or (passed is not None and passed[1] != self._write)

    def _answer(self, message: Message) -> None:
        awaited = None
        if message.answers and message.id is not None:
            awaited = self._awaited.get(message.id)
        if awaited is None:
            self._settle(message)(message.line)
        elif not awaited.done():
            awaited.set_result(message)

    def _settle(self, message: Message) -> Answer:
        """Take note of what the server says; where it goes."""
        if not message.answers or message.id is None:
            if message.method == "notifications/tools/list_changed":
                self._tools.changed()
            return self._write
        observed = self._observed.pop(message.id, None)
        if observed is not None and not observed.done():
            observed.set_result(message)
        asked, answer = self._pending.pop(message.id, (None, self._write))
        if asked is not None and asked.method == "tools/list":
            self._tools.learn(message)
        return answer

    def _write(self, line: bytes) -> None:
        if line:
            self._to_client.line(line)

    def _hold_server(self, full: bool) -> None:
        self._server.hold(full)

    def _hold_client(self, full: bool) -> None:
        self._client.hold(full)

    # --- the ledger -------------------------------------------------------------------------------

    def _open(self) -> None:
        self._opening = asyncio.get_running_loop().create_task(self._open_ledger())
        self._opening.add_done_callback(self._say_if_failed)

    async def _open_ledger(self) -> _Opened:
        home = await asyncio.to_thread(import_module, "effectfence.mcp.fenced")
        settings = self._settings
        config = home.FenceConfig(
            lease_ttl=settings.lease_seconds, result_ttl=settings.result_ttl_seconds
        )
        fence = await home.EffectFence.open(settings.ledger, config)
        calls = home.FencedCalls(fence, self._forward, ledger=settings.ledger, scope=settings.scope)
        return _Opened(fence, calls, home.ObservedCalls(fence, self._say))

    async def _ledger(self) -> _Opened:
        """Opened in the background; again if that failed, since it may be mended meanwhile."""
        if self._opening is None or (self._opening.done() and self._opened() is None):
            self._open()
        assert self._opening is not None
        return await asyncio.shield(self._opening)

    def _opened(self) -> _Opened | None:
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result()

    def _reopen_if_closed(self, opened: _Opened) -> None:
        """A ledger that closed itself is opened anew by the next call."""
        if opened.calls.closed and self._opened() is opened:
            self._opening = None
            self._own(opened.fence.aclose(drain_seconds=0))

    def _say_if_failed(self, opening: asyncio.Task[_Opened]) -> None:
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._say(f"{error} Fenced calls are refused until that is mended.")

    def _say(self, sentence: str) -> None:
        _write_error(f"effectfence: {sentence}")


class _Answers:
    """Gathers the answers to a batch; written as one when the last is there."""

    def __init__(self, messages: list[Message], write: Answer) -> None:
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


async def refuse_everything(name: str, reason: str) -> None:
    """For a server that could not be started: the client's first request is told why."""
    ended = asyncio.Event()

    def told(line: bytes) -> None:
        read = wire.read(line)
        first = read[0] if isinstance(read, list) else read
        if first is not None and first.id is not None:
            text = f"the wrapped server {name} could not be started: {reason}"
            writer.line(wire.failure(first.id_bytes(), wire.SERVER_ENDED, text))
            ended.set()

    writer = Writer(1, on_lost=ended.set)
    await writer.start()
    await Reader(0, told, ended.set).start()
    await first(ended, seconds=_FIRST_WORD_SECONDS)
    await writer.close(_CLOSE_SECONDS)


async def _all_done(tasks: set[asyncio.Task[Any]], idle: asyncio.Event) -> None:
    if tasks:
        await asyncio.wait(tasks)
    idle.set()


def _write_error(line: str | bytes) -> None:
    """A line of ours, or one of the server's as it came."""
    data = printable(line).encode() if isinstance(line, str) else line
    if data.strip():
        with suppress(OSError, ValueError):
            sys.stderr.buffer.write(data + b"\n")
            sys.stderr.buffer.flush()
