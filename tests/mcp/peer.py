"""A raw JSON-RPC peer: starts a process, sends exact bytes, keeps every line that comes back.

It knows nothing of MCP's models, so it sees what a client library would hide. Invariants:

1. What is sent is what was given, byte for byte; what came is kept as it came (`received`).
2. An answer belongs to the request whose id is of the same type and value: 1 is not "1".
3. Lines may be of any length. Nothing is left running: `close` waits for the end of the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_LONGEST = 1 << 30
_HELD_SECONDS = 10.0
"""After its end; nothing takes that long unless it is broken."""

Key = tuple[type, Any]
Responder = Callable[[dict[str, Any]], bytes | None]


class Gone(Exception):
    """The process closed its output before it answered."""


class Answer:
    """One response: its line, and what stands in it."""

    def __init__(self, line: bytes, value: dict[str, Any]) -> None:
        self.line = line
        self.value = value

    @property
    def result(self) -> Any:
        assert "result" in self.value, self.value
        return self.value["result"]

    @property
    def error(self) -> Any:
        assert "error" in self.value, self.value
        return self.value["error"]

    @property
    def text(self) -> str:
        """The first text of a tool's result."""
        return str(self.result["content"][0]["text"])

    @property
    def is_error(self) -> bool:
        return self.result.get("isError") is True

    def _mark(self, name: str) -> Any:
        result = self.value.get("result")
        meta = result.get("_meta") if isinstance(result, dict) else None
        return meta.get(name) if isinstance(meta, dict) else None

    @property
    def replay(self) -> Any:
        """What the fence says of a recorded result, else `None`."""
        return self._mark("effectfence/replay")

    @property
    def refused(self) -> Any:
        """What the fence says of a call that it did not run, else `None`."""
        return self._mark("effectfence/refused")

    @property
    def code(self) -> str | None:
        return None if self.refused is None else str(self.refused["code"])


class Peer:
    """The client's end of one process. `async with await Peer.start(command) as peer: …`"""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.errors = bytearray()
        """Its standard error."""
        self.responders: dict[str, Responder] = {}
        """By method: the exact line that answers a request of the server's."""
        self._waiting: dict[Key, asyncio.Future[Answer]] = {}
        self._arrived = asyncio.Event()
        self._next_id = 1000
        self._reading = [
            asyncio.ensure_future(self._read_output()),
            asyncio.ensure_future(self._read_errors()),
        ]

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Self:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        return cls(process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- sending ----------------------------------------------------------------------------------

    def line(self, line: bytes) -> None:
        """Send these bytes and a newline."""
        assert self.process.stdin is not None
        self.sent.append(line)
        self.process.stdin.write(line + b"\n")

    def send(self, value: Any) -> None:
        self.line(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())

    def notify(self, method: str, params: Any = None) -> None:
        self.send(message(method, params))

    def ask(self, method: str, params: Any = None, *, id: Any = None) -> asyncio.Future[Answer]:
        """Send a request; the answer, when it comes."""
        if id is None:
            self._next_id += 1
            id = self._next_id
        answer = self.expect(id)
        self.send({"jsonrpc": "2.0", "id": id, **message(method, params, version=False)})
        return answer

    def ask_line(self, line: bytes) -> asyncio.Future[Answer]:
        """The same with exact bytes."""
        answer = self.expect(json.loads(line)["id"])
        self.line(line)
        return answer

    def expect(self, id: Any) -> asyncio.Future[Answer]:
        """The answer to a request that is sent some other way."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[type(id), id] = answer
        return answer

    def call(
        self, tool: str, arguments: Any = None, *, id: Any = None, **params: Any
    ) -> asyncio.Future[Answer]:
        """`tools/call`; further keyword arguments are further members of its params."""
        return self.ask("tools/call", {"name": tool, "arguments": arguments or {}, **params}, id=id)

    async def hello(self, version: str = "2025-11-25", *, listing: bool = True) -> Answer:
        """The handshake of the eras before 2026-07-28, and a look at the tools."""
        answer = await self.ask(
            "initialize",
            {
                "protocolVersion": version,
                "capabilities": {"sampling": {}, "elicitation": {}, "roots": {"listChanged": True}},
                "clientInfo": {"name": "peer", "version": "1"},
            },
        )
        self.notify("notifications/initialized")
        if listing:
            await self.ask("tools/list", {})
        return answer

    # --- what came --------------------------------------------------------------------------------

    def messages(self, method: str | None = None) -> list[dict[str, Any]]:
        """What came by now, those of one method or all."""
        found = []
        for line in self.received:
            value = json.loads(line)
            for each in value if isinstance(value, list) else [value]:
                if method is None or each.get("method") == method:
                    found.append(each)
        return found

    async def until(self, condition: Callable[[], object]) -> None:
        """Until what came by now fulfils it. Raises `Gone` when nothing more will come."""
        while not condition():
            if all(task.done() for task in self._reading):
                raise Gone(self.complaint())
            self._arrived.clear()
            waiting = asyncio.ensure_future(self._arrived.wait())
            await asyncio.wait([waiting, *self._reading], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def says(self, text: str) -> None:
        """Until that stands on its standard error."""
        await self.until(lambda: text in self.complaint())

    def complaint(self) -> str:
        return self.errors.decode(errors="replace")

    # --- the end ----------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end_output(self) -> None:
        """Read nothing more, as a client that was killed."""
        pipe = self.process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]  # no API
        pipe.close()

    async def close(self) -> int:
        """End its input and wait for it; its exit code."""
        self.end_input()
        return await self.ended()

    async def ended(self) -> int:
        """Its exit code, once it has ended and its output is read to the end."""
        code = await self.process.wait()
        _, held = await asyncio.wait(self._reading, timeout=_HELD_SECONDS)
        assert not held, "it has ended, and something that it started holds its output open"
        await asyncio.gather(*self._reading)
        self.end_input()
        with suppress(BrokenPipeError, ConnectionResetError):
            assert self.process.stdin is not None
            await self.process.stdin.wait_closed()
        return code

    async def kill(self) -> None:
        """Its own children may live on, and hold its standard error."""
        self.signal(signal.SIGKILL)
        await until(lambda: self.process.returncode is not None)

    # --- reading ----------------------------------------------------------------------------------

    async def _read_output(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.received.append(line.removesuffix(b"\n"))
            self._take(self.received[-1])
            self._arrived.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Gone(self.complaint()))
                answer.exception()  # seen, should nobody wait for it
        self._arrived.set()

    def _take(self, line: bytes) -> None:
        try:
            value = json.loads(line)
        except ValueError:
            return  # the test that looks at `received` will find it
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                continue
            if "method" not in each:
                waiting = self._waiting.pop((type(each.get("id")), each.get("id")), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(Answer(line, each))
            elif "id" in each and each["method"] in self.responders:
                answer = self.responders[each["method"]](each)
                if answer is not None:
                    self.line(answer)

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(1 << 16):
            self.errors += data
            self._arrived.set()
        self._arrived.set()


def message(method: str, params: Any, *, version: bool = True) -> dict[str, Any]:
    start: dict[str, Any] = {"jsonrpc": "2.0"} if version else {}
    return start | {"method": method} | ({} if params is None else {"params": params})


def alive(mark: str) -> list[int]:
    """The processes whose environment carries this mark; zombies have none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def end_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], object]) -> None:
    """Until another process has made it true; the test's timeout is the bound."""
    while not condition():  # noqa: ASYNC110 - no event comes from there
        await asyncio.sleep(0.002)
