"""An MCP server behind `effectfence wrap`, against the same server directly, in the same run.

    python -m bench.wrapped            a ledger of 10,000 recorded intents
    python -m bench.wrapped --full     also one of 1,000,000

The client writes and reads the pipes itself, so that what is measured is the server and what stands
in front of it. Two servers: one that does nothing but answer, where all that wrap adds stands out,
and one on the official SDK, as most servers are.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench._durable import CarelessMachine, each, file_fence
from bench._echo_server import INITIALIZED
from bench._measure import Row, fdatasync_seconds, interleaved, main, say, scratch, seconds
from effectfence import EffectRequest
from effectfence.stores import ledger_file

SERVER = [sys.executable, "-S", "-m", "bench._echo_server"]
SDK_SERVER = [sys.executable, "-m", "bench._sdk_server"]
WRAP = [sys.executable, "-m", "effectfence", "wrap"]
CALLS = 200
AT_ONCE = 1000
LARGE = 20_000_000


class Client:
    """One session over a process's pipes, one call after the other."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._ids = itertools.count(1)

    def start(self) -> Any:
        params = {**INITIALIZED, "clientInfo": {"name": "bench", "version": "1"}}
        self.ask("initialize", params)
        self._write({"method": "notifications/initialized"})
        return self.ask("tools/list", {})

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        self._write({"id": next(self._ids), "method": method, "params": params})
        return self._read()

    def call(self, **arguments: Any) -> Any:
        return self.ask("tools/call", {"name": "charge", "arguments": arguments})

    def call_at_once(self, orders: range) -> None:
        def write() -> None:
            for order in orders:
                params = {"name": "charge", "arguments": {"order": order}}
                self._write({"id": next(self._ids), "method": "tools/call", "params": params})

        writer = threading.Thread(target=write)
        writer.start()
        answers = {self._read()["content"][0]["text"] for _ in orders}
        writer.join()
        assert answers == {f"charged {order}" for order in orders}

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        said = json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":"))
        self.process.stdin.write(said.encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())["result"]


@contextmanager
def session(command: list[str]) -> Iterator[Client]:
    client = Client(command)
    try:
        client.start()
        yield client
    finally:
        client.end()


def wrapped(ledger: str | Path, server: list[str] = SERVER) -> list[str]:
    return [*WRAP, "--ledger", str(ledger), "--scope", "bench", "--", *server]


def measure(full: bool) -> list[Row]:
    with scratch() as folder:
        recorded = folder / "recorded.jsonl"
        asyncio.run(_grow(recorded, 10_000))
        sync = fdatasync_seconds(folder)
        say("  latency, rate, a large result")
        rows = _calls(folder, sync, full)
        say("  starting")
        rows += _starting(folder, recorded, full)
        rows.append(_memory(recorded))
    return rows


def _calls(folder: Path, sync: float, full: bool) -> list[Row]:
    orders = itertools.count()

    def p50(client: Client, *, again: bool = False) -> Callable[[], float]:
        def measured() -> float:
            numbers = itertools.repeat(-1) if again else orders
            return statistics.median(
                seconds(lambda: client.call(order=next(numbers))) for _ in range(CALLS)
            )

        return measured

    def at_once(client: Client) -> Callable[[], float]:
        def measured() -> float:
            first = next(orders) * AT_ONCE + 1_000_000
            return seconds(lambda: client.call_at_once(range(first, first + AT_ONCE)))

        return measured

    def large(client: Client) -> Callable[[], float]:
        return lambda: seconds(lambda: client.call(order=next(orders), bytes=LARGE))

    with ExitStack() as sessions:
        sub = [
            sessions.enter_context(session(command))
            for server in (SERVER, SDK_SERVER)
            for command in (
                server,
                wrapped("memory:", server),
                wrapped(folder / f"{len(server)}.jsonl", server),
            )
        ]
        echo, sdk = sub[:3], sub[3:]
        rounds = 31 if full else 11
        base, in_memory, on_disk, again, replayed = interleaved(
            rounds, *map(p50, echo), p50(echo[0], again=True), p50(echo[2], again=True)
        )
        sdk_again, sdk_replayed = interleaved(
            rounds, p50(sdk[0], again=True), p50(sdk[2], again=True)
        )
        rates = interleaved(9 if full else 5, *map(at_once, [*sdk, *echo]))
        one_large, memory_large, durable_large = interleaved(9 if full else 5, *map(large, echo))
    added, added_durable = in_memory - base, on_disk - base
    return [
        Row(
            "wrap: added latency of a fenced call, p50, ledger in memory",
            "at most 0.4 ms",
            f"{added * 1e3:.2f} ms ({in_memory * 1e3:.2f} against {base * 1e3:.2f})",
            added <= 0.4e-3,
        ),
        Row(
            "the same, durable",
            f"at most 0.4 ms + 2 fdatasync = {0.4 + 2e3 * sync:.2f} ms",
            f"{added_durable * 1e3:.2f} ms",
            added_durable <= 0.4e-3 + 2 * sync,
        ),
        Row(
            "wrap: a duplicate answered from the ledger, p50, server on the SDK",
            "no slower than the direct call",
            f"{sdk_replayed * 1e3:.2f} ms against {sdk_again * 1e3:.2f} ms",
            sdk_replayed <= sdk_again,
        ),
        Row(
            "the same, a server that does nothing but answer",
            "no promise",
            f"{replayed * 1e3:.2f} ms against {again * 1e3:.2f} ms",
        ),
        *(_rate(*each, rates) for each in _RATES),
        Row(
            f"wrap: a result of {LARGE // 1_000_000} MB, added, in memory / durable",
            "at most 0.3 s",
            f"{memory_large - one_large:.2f} s / {durable_large - one_large:.2f} s",
            max(memory_large, durable_large) - one_large <= 0.3,
        ),
    ]


_RATES = (
    (f"wrap: {AT_ONCE:,} distinct calls at once, server on the SDK, in memory", 0, 1),
    ("the same, durable", 0, 2),
    ("the same, a server that does nothing but answer, in memory", 3, 4),
    ("the same, a server that does nothing but answer, durable", 3, 5),
)
"""Which of the subjects are compared: the direct one's place, and ours."""


def _rate(claim: str, direct: int, ours: int, taken: list[float]) -> Row:
    ratio = taken[direct] / taken[ours]
    measured = f"{ratio:.2f} ({AT_ONCE / taken[ours]:,.0f} calls/s)"
    if direct:
        return Row(claim, "no promise", measured)
    return Row(claim, "at least 0.6 of the direct rate", measured, ratio >= 0.6)


def _starting(folder: Path, recorded: Path, full: bool) -> list[Row]:
    def listed(command: list[str]) -> Callable[[], float]:
        def start() -> float:
            begun = time.perf_counter()
            client = Client(command)
            client.start()
            taken = time.perf_counter() - begun
            client.end()
            return taken

        return start

    subjects = [listed(SERVER), listed(wrapped(recorded))]
    if full:
        say("  making a ledger of 1,000,000 recorded intents")
        million = folder / "million.jsonl"
        asyncio.run(_grow(million, 1_000_000))
        subjects.append(listed(wrapped(million)))
    alone, *others = interleaved(15 if full else 7, *subjects)
    rows = [
        Row(
            "wrap: start to the first tools/list, added, on 10,000 recorded intents",
            "at most 250 ms",
            f"{(others[0] - alone) * 1e3:.0f} ms (alone {alone * 1e3:.0f} ms)",
            others[0] - alone <= 0.25,
        )
    ]
    if full:
        added = others[1] - alone
        rows.append(Row("the same on 1,000,000", "no promise", f"{added * 1e3:.0f} ms"))
    return rows


def _memory(recorded: Path) -> Row:
    with session(wrapped(recorded)) as client:
        client.call(order=-1)  # by now the ledger is open
        with open(f"/proc/{client.process.pid}/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return Row(
        "wrap: memory at rest, resident, on 10,000 recorded intents",
        "at most 60 MB",
        f"{resident / 1e6:.0f} MB",
        resident <= 60e6,
    )


async def _grow(path: Path, count: int) -> None:
    """Recorded calls as wrap leaves them, without syncs and without compactions on the way."""
    with patch.object(ledger_file, "_COMPACT_ABOVE", 1 << 60):
        async with file_fence(path, CarelessMachine()) as root:
            fence = root.scoped("bench")

            async def once(number: int) -> None:
                request = EffectRequest(
                    intent=f"charge:{number:064x}",
                    domain="tool:charge",
                    tool="charge",
                    args={"order": -2 - number},
                    agent="wrap",
                )
                admission = await fence.prepare(request)
                text = '{"content": [{"type": "text", "text": "charged"}]}'
                await fence.commit(admission.prepared, {"call_tool_result": text})

            await each(once, 100, count // 100)


if __name__ == "__main__":
    main(measure, "An MCP server behind wrap, against the same server directly.")
