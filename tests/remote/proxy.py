"""A TCP proxy before PostgreSQL: counts what goes over, loses answers, falls silent, goes away.

It knows where a message of PostgreSQL's protocol ends, and so when the server has answered a
question for good (`ReadyForQuery`: what was asked is committed). An answer that is to be lost is
lost there, whole, with its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

_GOODBYE = b"X\0\0\0\4"


class Proxy:
    def __init__(self, port: int) -> None:
        self._port = port
        self.port = 0
        self.asked = 0
        """Questions that the server answered, over all connections; each is one round trip."""
        self.connections = 0
        self.lost = 0
        self.lose: Callable[[], bool] = lambda: False
        """Asked at each answer: whether it gets lost."""
        self.silent = False
        """Nothing goes over any more, and nobody hangs up."""
        self.spoken: dict[int, int] = {}
        """How many messages each connection's client sent."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nobody listens any more, and all connections are cut."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers |= {to_client, to_server}
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._ask(number, client, to_server))
                    group.create_task(self._answer(server, to_client))
            finally:
                self._writers -= {to_client, to_server}
                to_client.transport.abort()
                to_server.transport.abort()
        except* (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            to_client.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _ask(
        self, number: int, client: asyncio.StreamReader, to_server: asyncio.StreamWriter
    ) -> None:
        while data := await client.read(1 << 16):
            if data != _GOODBYE:
                self.spoken[number] = self.spoken.get(number, 0) + 1
            while self.silent:  # noqa: ASYNC110 - a test's switch
                await asyncio.sleep(0.01)
            to_server.write(data)
            await to_server.drain()
        raise ConnectionResetError

    async def _answer(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        held = b""
        while True:
            head = await server.readexactly(5)
            held += head + await server.readexactly(int.from_bytes(head[1:], "big") - 4)
            kind = head[:1]
            if kind == b"Z" and held[:1] == b"2":
                self.asked += 1
                if self.lose():
                    self.lost += 1
                    raise ConnectionResetError
            elif held[:1] == b"2":
                continue  # an answer is shown when it is complete
            while self.silent:  # noqa: ASYNC110 - a test's switch
                await asyncio.sleep(0.01)
            to_client.write(held)
            held = b""
            with suppress(ConnectionError):
                await to_client.drain()


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def through(proxy: Proxy, url: str, *, timeout: float | None = None) -> str:
    """The same ledger's address, through the proxy."""
    place, _, query = url.partition("?")
    before, _, after = place.rpartition(":")
    database = after.partition("/")[2]
    options = f"{query}&sslmode=disable" + (f"&timeout={timeout}" if timeout else "")
    return f"{before}:{proxy.port}/{database}?{options}"
