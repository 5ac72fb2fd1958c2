"""The client of `effectfence probe` and `demo`: starts any MCP server and calls one of its tools.

It speaks the protocol by itself, over stdio, in whichever era the server wants: `initialize` first,
`server/discover` (2026-07-28) when that is refused. It calls nothing that it was not told to call.

Invariants:

1. Every request is answered, times out, or fails when the server is gone: no wait is endless.
2. An answer belongs to the request with the same id, and only the first one counts.
3. Leaving ends the server's whole process group in bounded time (`child.py`), and then whatever
   it had started outside of it, as `wrap` has its own server in another group.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import signal
import termios
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, TypeVar

from effectfence.mcp.child import Child
from effectfence.mcp.pipes import Reader, Writer

T = TypeVar("T")

LEGACY: Final = "2025-11-25"
MODERN: Final = "2026-07-28"

_ME: Final = {"name": "effectfence-probe", "version": "1"}
_NO_SUCH_METHOD: Final = -32601
_PAGES: Final = 1000
"""Of a tools listing."""
_LAST_MOMENT_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 1.0
_GRACE_SECONDS: Final = 2.0
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotProbe(Exception):
    """The server can't be talked to, or has no such tool; no tool was called."""


class Gone(Exception):
    """The server ended, or closed its output, before it answered."""


class Server:
    """One process of an MCP server: `async with Server(command) as server`.

    Raises `CannotProbe` when it can't be started, or the handshake fails.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_seconds: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._start_seconds = start_seconds
        self._env = os.environ if env is None else env
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_id = 0
        self._meta: dict[str, Any] = {}
        self._output_ended = asyncio.Event()
        self._over = False
        self.name = os.path.basename(command[0])
        """The command's, until the server says its own."""
        self.version = ""
        self.stray_lines = 0
        """Of its output, lines that are no JSON-RPC."""

    async def __aenter__(self) -> Server:
        try:
            self._child = Child(self._command, self._env)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CannotProbe(f"{self.name} could not be started: {reason}") from None
        exited = self._child.watch()
        self._to = Writer(self._child.stdin, owned=True)
        await self._to.start()
        await Reader(self._child.stdout, self._line, self._output_ended.set).start()
        self._gone = asyncio.create_task(self._when_gone(exited))
        try:
            await self._in_time(self._shake_hands(), "answer the handshake")
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave()

    async def tools(self) -> dict[str, dict[str, Any]]:
        """What the server lists, by name."""
        return await self._in_time(self._list(), "list its tools")

    def call(self, tool: str, arguments: Any) -> asyncio.Future[dict[str, Any]]:
        """Send one `tools/call`; the future is its whole response, or raises `Gone`."""
        return self._request("tools/call", {"name": tool, "arguments": arguments})

    async def has_read_everything(self) -> None:
        """Returns once nothing of what was sent is left in the pipe."""
        while not self._over and _bytes_in(self._child.stdin):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.001)

    async def kill(self) -> None:
        """SIGKILL to the server, and to all that it started, at once."""
        started = _descendants(self._child.pid)
        self._child.signal(signal.SIGKILL)
        _kill(started)
        await self._child.exited.wait()

    # --- the protocol -----------------------------------------------------------------------------

    async def _shake_hands(self) -> None:
        params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": _ME}
        answer = await self._request("initialize", params)
        result = answer.get("result")
        if isinstance(result, dict) and result.get("protocolVersion") != MODERN:
            self.version = str(result.get("protocolVersion"))
            self._introduced(result.get("serverInfo"))
            self._send({"method": "notifications/initialized"})
            return
        await self._discover(answer)

    async def _discover(self, refusal: dict[str, Any]) -> None:
        self._meta = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientInfo": _ME,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        answer = await self._request("server/discover", {})
        result = answer.get("result")
        versions = result.get("supportedVersions") if isinstance(result, dict) else None
        if not isinstance(versions, list) or MODERN not in versions:
            raise CannotProbe(f"{self.name} refused the handshake: {what_it_says(refusal)}")
        self.version = MODERN
        stamps = result.get("_meta") if isinstance(result, dict) else None
        if isinstance(stamps, dict):
            self._introduced(stamps.get("io.modelcontextprotocol/serverInfo"))

    def _introduced(self, info: Any) -> None:
        if isinstance(info, dict) and isinstance(info.get("name"), str) and info["name"]:
            self.name = info["name"]

    async def _list(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        cursor: dict[str, Any] = {}
        for _ in range(_PAGES):
            answer = await self._request("tools/list", cursor)
            result = answer.get("result")
            if not isinstance(result, dict) or not isinstance(result.get("tools"), list):
                raise CannotProbe(f"{self.name} lists no tools: {what_it_says(answer)}")
            for tool in result["tools"]:
                if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                    found.setdefault(tool["name"], tool)
            if result.get("nextCursor") is None:
                return found
            cursor = {"cursor": result["nextCursor"]}
        raise CannotProbe(f"{self.name} lists tools without end")

    def _request(self, method: str, params: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        self._last_id += 1
        answered = asyncio.get_running_loop().create_future()
        self._waiting[self._last_id] = answered
        if self._meta:
            params = {**params, "_meta": self._meta}
        self._send({"id": self._last_id, "method": method, "params": params})
        if self._over:
            self._fail_everything()
        return answered

    def _send(self, message: dict[str, Any]) -> None:
        self._to.line(json.dumps({"jsonrpc": "2.0", **message}).encode())

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        messages = value if isinstance(value, list) else [value]
        if not all(isinstance(message, dict) for message in messages):
            self.stray_lines += 1
            return
        for message in messages:
            self._message(message)

    def _message(self, message: dict[str, Any]) -> None:
        to = message.get("id")
        if "method" in message:
            if to is not None:
                self._send({"id": to, **_answer_to_server(message["method"])})
        elif isinstance(to, int) and not isinstance(to, bool):
            answered = self._waiting.pop(to, None)
            if answered is not None and not answered.done():
                answered.set_result(message)

    # --- how it ends ------------------------------------------------------------------------------

    async def _in_time(self, doing: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._start_seconds):
                return await doing
        except TimeoutError:
            raise CannotProbe(
                f"{self.name} did not {what} within {self._start_seconds:g} s"
            ) from None
        except Gone as gone:
            raise CannotProbe(f"{gone} before it could {what}") from None

    async def _when_gone(self, exited: asyncio.Event) -> None:
        """Whichever of the two comes first, the other one has a moment: for what was said last, or
        for how it ended."""
        both = [asyncio.create_task(event.wait()) for event in (exited, self._output_ended)]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(both, timeout=_LAST_MOMENT_SECONDS)
        finally:
            for task in both:
                task.cancel()
            self._over = True
            self._fail_everything()

    def _fail_everything(self) -> None:
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for answered in waiting:
            if not answered.done():
                answered.set_exception(Gone(f"{self.name} {self._child.says_how_it_ended()}"))
                answered.exception()  # somebody may have stopped waiting

    async def _leave(self) -> None:
        started = _descendants(self._child.pid)
        await self._to.close(_CLOSE_SECONDS)
        await self._child.end(_GRACE_SECONDS)
        _kill(started)
        await asyncio.wait([self._gone], timeout=_CLOSE_SECONDS)
        self._gone.cancel()  # not even SIGKILL ended it
        if self._output_ended.is_set():
            os.close(self._child.stdout)  # else a process that left the group holds it


def what_it_says(response: dict[str, Any]) -> str:
    """An error response's own words."""
    error = response.get("error")
    if isinstance(error, dict):
        return f"{error.get('message')} ({error.get('code')})"
    return "its answer is not the protocol's"


def _answer_to_server(method: Any) -> dict[str, Any]:
    if method == "ping":
        return {"result": {}}
    return {"error": {"code": _NO_SUCH_METHOD, "message": f"the probe has no {method}"}}


Process = tuple[int, str]
"""Its id, and when it started: ids are used again."""


def _descendants(pid: int) -> list[Process]:
    """What a process started, and what that started, also in groups of their own; nothing where
    there is no /proc."""
    children: dict[int, list[Process]] = {}
    for process, parent in _processes():
        children.setdefault(parent, []).append(process)
    found = list(children.get(pid, ()))
    for each in found:  # which grows
        found += children.get(each[0], ())
    return found


def _processes() -> Iterator[tuple[Process, int]]:
    """Each with its parent."""
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                yield (int(entry), fields[19].decode()), int(fields[1])


def _kill(processes: Iterable[Process]) -> None:
    """Those of them that are still there."""
    there = {process for process, _ in _processes()} if processes else set()
    for process in there.intersection(processes):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process[0], signal.SIGKILL)


def _bytes_in(pipe: int) -> int:
    """How much a pipe holds; 0 where the system can't say."""
    waiting = array.array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


def interruptible(doing: Coroutine[Any, Any, T]) -> T | int:
    """Run it; on a signal it is cancelled, so that it ends its servers, and the result is the
    exit code that a shell expects."""
    came: list[int] = []

    async def run() -> T:
        task = asyncio.ensure_future(doing)
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if not came:  # a second one does not cut the ending short: it is bounded
                task.cancel()
            came.append(number)

        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                loop.add_signal_handler(number, stop, number)
        try:
            return await task
        finally:
            for number in _STOPPING:
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        return 128 + came[0]
