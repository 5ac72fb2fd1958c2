"""The command `effectfence serve` as clients find it: over stdio, and over HTTP on a free port.

A ledger's lock, held by the test, is what stops a server between a call's arrival and its record:
nothing here waits for a while, but for what the system's own lists say.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.mcp.peer import Peer, until

ROOT = Path(__file__).parents[2]
EFFECTFENCE = (sys.executable, "-m", "effectfence")
LEGACY = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}


def asking(intent: str = "charge:o1", **fields: Any) -> dict[str, Any]:
    """The arguments of fence_prepare."""
    base = {
        "intent": intent,
        "domain": f"of:{intent}",
        "tool": "charge",
        "args": {"cents": 4900},
        "agent": "billing",
    }
    return {**base, **fields}


class Place:
    """A folder with a ledger, and the servers that were started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "effects.jsonl"
        self.peers: list[Peer] = []
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("EFFECTFENCE_HTTP")},
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(folder / "state"),
            "EFFECTFENCE_LEDGER": str(self.ledger),
        }

    async def start(self, *arguments: str, **env: str) -> Peer:
        peer = await Peer.start([*EFFECTFENCE, *arguments], env=self.env | env, cwd=self.folder)
        self.peers.append(peer)
        return peer

    async def stdio(self, version: str = LEGACY[-1], **env: str) -> Peer:
        """A server on stdio, greeted."""
        peer = await self.start(**env)
        await peer.hello(version, listing=False)
        return peer

    async def http(self, *options: str, **env: str) -> Web:
        """A server on a free port of the loopback interface."""
        peer = await self.start("serve", "--http", "127.0.0.1:0", *options, **env)
        await peer.says("serving http://")
        return Web(peer, env.get("EFFECTFENCE_HTTP_TOKEN"))

    async def said(self, *arguments: str, scope: str | None = None) -> Any:
        """What `effectfence ledger …` answers, with --json."""
        verb, *rest = arguments
        scoped = ("--scope", scope) if scope else ()
        peer = await self.start("ledger", verb, str(self.ledger), *rest, *scoped, "--json")
        await peer.ended()
        answers = [json.loads(line) for line in peer.received]
        return answers[0] if verb in ("show", "stats") and answers else answers

    async def state(self, intent: str, scope: str | None = None) -> str | None:
        shown = await self.said("show", intent, scope=scope)
        return str(shown["state"]) if shown else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody decides or writes anything on this ledger meanwhile."""
        with Path(f"{self.ledger}.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    async def close(self) -> None:
        for peer in self.peers:
            if peer.process.returncode is None:
                await peer.kill()


class Web:
    """One server over HTTP."""

    def __init__(self, peer: Peer, token: str | None) -> None:
        self.peer = peer
        said = peer.complaint()
        self.url = said.split("serving ")[1].split()[0]
        self.port = int(self.url.split(":")[2].split("/")[0])
        self.token = token or said.split("not shown again: ")[1].split()[0]

    @asynccontextmanager
    async def client(self, mode: str = "auto", token: str | None = None) -> AsyncIterator[Client]:
        """The SDK's own client."""
        headers = {"authorization": f"Bearer {token or self.token}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode) as client,
        ):
            yield client

    def request(
        self, body: Any, method: str = "POST", path: str = "/mcp", **headers: str | None
    ) -> bytes:
        """An HTTP request as bytes; `_` in a header's name is `-`, `None` leaves it out."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: dict[str, str | None] = {
            "host": f"127.0.0.1:{self.port}",
            "authorization": f"Bearer {self.token}",
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"{name}: {value}" for name, value in sent.items() if value is not None]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + content

    async def ask(self, body: Any = b"", **how: Any) -> Reply:
        """One request on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(self.request(body, **how))
            return Reply(await reader.read())
        finally:
            writer.close()

    async def call(self, tool: str, arguments: Any, **how: Any) -> Reply:
        """`tools/call` as the older eras have it."""
        return await self.ask(calling(tool, arguments), **how)

    def connections(self) -> int:
        """How many sockets the server's process has open."""
        links = Path(f"/proc/{self.peer.pid}/fd")
        return sum(_is_socket(link) for link in links.iterdir())


def _is_socket(link: Path) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except FileNotFoundError:
        return False


class Reply:
    """What came back over HTTP."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        pairs = [line.split(": ", 1) for line in rest]
        self.headers = {name.lower(): value for name, value in pairs}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def says(self) -> Any:
        """The structured content of a tool's answer."""
        return self.json["result"]["structuredContent"]


def calling(tool: str, arguments: Any, id: Any = 1, **params: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, **params}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


def says(answer: Any) -> Any:
    """The structured content of a peer's answer."""
    return answer.result["structuredContent"]


async def waits_for_a_lock(process: int) -> None:
    """Until the system's list says so: `1: -> FLOCK ADVISORY WRITE <process> …`"""

    def waiting() -> bool:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any(row[1] == "->" and row[5] == str(process) for row in rows)

    await until(waiting)
