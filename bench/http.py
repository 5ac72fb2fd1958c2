"""A POST with an `Idempotency-Key` against the bare handler, in the same run, over real sockets.

    python -m bench.http

The handler takes JSON, validates it and answers JSON, on uvicorn with FastAPI and on aiohttp. The
client writes and reads the sockets itself, so that it costs little beside what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench._measure import Row, fdatasync_seconds, interleaved, main, say, scratch, seconds

CALLS = 200
AT_ONCE = 100
RATE_CALLS = 2000
NAMES = {"fastapi": "FastAPI on uvicorn", "aiohttp": "aiohttp"}


def request(number: int) -> bytes:
    body = b'{"order": %d, "cents": 4900, "currency": "EUR"}' % number
    return (
        b"POST /charges HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b'Idempotency-Key: "8e03978e-40d5-43e8-bc93-%012d"\r\nContent-Length: %d\r\n\r\n%b'
    ) % (number, len(body), body)


class Server:
    """One server process on a port of its own, and one connection to it."""

    def __init__(self, kind: str, ledger: str | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        app = {
            "fastapi": f"uvicorn bench._http_server:fastapi --port {self.port} --no-access-log",
            "aiohttp": f"bench._http_server {self.port}",
        }[kind]
        environment = {**os.environ, "BENCH_FENCE": ledger or ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *app.split()], env=environment, stderr=subprocess.DEVNULL
        )
        self._connection = self._connect()

    def _connect(self) -> socket.socket:
        while self.process.poll() is None:
            try:
                return socket.create_connection(("127.0.0.1", self.port))
            except ConnectionRefusedError:
                continue
        raise RuntimeError(f"{self.process.args!r} ended with {self.process.returncode}")

    def ask(self, number: int) -> None:
        self._connection.sendall(request(number))
        said = b""
        while not _is_whole(said):
            said += self._connection.recv(65536)
        assert said.startswith(b"HTTP/1.1 201"), said

    def ask_at_once(self, numbers: range) -> None:
        asyncio.run(_storm(self.port, iter(numbers)))

    def end(self) -> None:
        self._connection.close()
        self.process.terminate()
        self.process.wait(30)


def _is_whole(said: bytes) -> bool:
    head, end, body = said.partition(b"\r\n\r\n")
    if not end:
        return False
    lowered = head.lower()
    length = lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length)


class _Asker(asyncio.Protocol):
    """One connection that asks for one number after the other."""

    def __init__(self, numbers: Iterator[int], over: asyncio.Future[None]) -> None:
        self._numbers = numbers
        self._over = over
        self._said = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._said += data
        if _is_whole(self._said):
            assert self._said.startswith(b"HTTP/1.1 201"), self._said
            self._said = b""
            self._ask()

    def _ask(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._transport.close()
            self._over.set_result(None)
        else:
            self._transport.write(request(number))


async def _storm(port: int, numbers: Iterator[int]) -> None:
    loop = asyncio.get_running_loop()
    overs = [loop.create_future() for _ in range(AT_ONCE)]
    for over in overs:
        await loop.create_connection(partial(_Asker, numbers, over), "127.0.0.1", port)
    await asyncio.gather(*overs)


@contextmanager
def serving(kind: str, ledger: str | None) -> Iterator[Server]:
    server = Server(kind, ledger)
    try:
        yield server
    finally:
        server.end()


def measure(full: bool) -> list[Row]:
    rows = []
    with scratch() as folder:
        sync = fdatasync_seconds(folder)
        for kind in NAMES:
            say(f"  {kind}")
            rows += _rows(kind, folder, sync, full)
    return rows


def _rows(kind: str, folder: Path, sync: float, full: bool) -> list[Row]:
    orders = itertools.count(1)

    def p50(server: Server, *, again: bool = False) -> Callable[[], float]:
        def measured() -> float:
            numbers = itertools.repeat(0) if again else orders
            return statistics.median(
                seconds(lambda: server.ask(next(numbers))) for _ in range(CALLS)
            )

        return measured

    def at_once(server: Server) -> Callable[[], float]:
        def measured() -> float:
            first = next(orders) * 1_000_000
            return seconds(lambda: server.ask_at_once(range(first, first + RATE_CALLS)))

        return measured

    ledgers = (None, "memory:", str(folder / f"{kind}.jsonl"))
    with ExitStack() as running:
        servers = [running.enter_context(serving(kind, ledger)) for ledger in ledgers]
        bare, in_memory, durable, replayed = interleaved(
            31 if full else 11, *map(p50, servers), p50(servers[1], again=True)
        )
        rates = interleaved(9 if full else 5, *map(at_once, servers))
    name = NAMES[kind]
    return [
        _added(f"http: a fenced POST, {name}, p50, added, in memory", in_memory, bare, 0.0),
        _added("the same, durable", durable, bare, sync),
        Row(
            "the same, a duplicate answered from the record",
            "no promise",
            f"{replayed * 1e3:.2f} ms against {bare * 1e3:.2f} ms",
        ),
        _rate(f"http: {AT_ONCE} connections, {name}, in memory", rates[0], rates[1], 0.6),
        _rate("the same, durable", rates[0], rates[2], None),
    ]


def _added(claim: str, ours: float, bare: float, sync: float) -> Row:
    most = 0.5e-3 + 2 * sync
    target = f"at most 0.5 ms + 2 fdatasync = {most * 1e3:.2f} ms" if sync else "at most 0.5 ms"
    measured = f"{(ours - bare) * 1e3:.2f} ms ({ours * 1e3:.2f} against {bare * 1e3:.2f})"
    return Row(claim, target, measured, ours - bare <= most)


def _rate(claim: str, bare: float, ours: float, least: float | None) -> Row:
    ratio = bare / ours
    measured = f"{ratio:.2f} ({RATE_CALLS / ours:,.0f} against {RATE_CALLS / bare:,.0f} a second)"
    if least is None:
        return Row(claim, "no promise", measured)
    return Row(claim, f"at least {least} of the bare rate", measured, ratio >= least)


if __name__ == "__main__":
    main(measure, "A POST with an Idempotency-Key against the bare handler.")
