"""Real servers on free ports, as a user starts them, and what their shop did."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
SERVERS = ("uvicorn", "hypercorn", "granian", "aiohttp")
SHOP = "tests.web.shop:app"


def command(server: str, port: int, workers: int = 1, app: str = SHOP) -> list[str]:
    at = f"--host 127.0.0.1 --port {port} --workers {workers}"
    words = {
        "uvicorn": f"uvicorn {app} {at} --no-access-log --timeout-graceful-shutdown 1",
        "hypercorn": f"hypercorn {app} --bind 127.0.0.1:{port} --workers {workers} "
        "--graceful-timeout 1",
        "granian": f"granian {app} {at} --interface asgi",
        "aiohttp": f"tests.web.shop {port}",
        "aiohttp --cancels": f"tests.web.shop {port} --cancels",
    }
    return [sys.executable, "-m", *words[server].split()]


class Shop:
    """A folder with effects, gates and a ledger, and a server in front of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gates").mkdir(parents=True)
        self.ledger = folder / "ledger" / "effects.jsonl"
        self.log = folder / "log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], **environment: str) -> None:
        env = {
            **{
                k: v
                for k, v in os.environ.items()
                if not k.startswith(("WEB_CONC", "EFFECTFENCE_L"))
            },
            "PYTHONPATH": str(ROOT),
            "SHOP": str(self.folder),
            "EFFECTFENCE_LEDGER": str(self.ledger),
            "XDG_STATE_HOME": str(self.folder / "state"),
            **environment,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def answers(self) -> None:
        """Wait until it accepts connections and answers."""
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(httpx.TransportError):
            return self.get("/who").status_code == 200
        return False

    def all_answer(self, workers: int) -> set[int]:
        """Wait until so many processes have answered; who they are."""
        seen: set[int] = set()

        def everybody() -> bool:
            with contextlib.suppress(httpx.TransportError):
                seen.add(self.get("/who").json()["pid"])
            return len(seen) >= workers

        until(everybody)
        return seen

    def stop(self) -> None:
        """As an operator would; what is left of its group after that is killed."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    # --- clients ----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=60)

    def post(self, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        """On a connection of its own."""
        headers = dict(more.pop("headers", {}))
        if key is not None:
            headers["Idempotency-Key"] = key
        return httpx.post(self.url + path, headers=headers, trust_env=False, timeout=60, **more)

    def charge(self, key: str | None, cents: int = 4900, **more: Any) -> httpx.Response:
        return self.post("/charges", key, json={"cents": cents}, **more)

    def hang_up_during(self, path: str, key: str, ask: dict[str, Any]) -> None:
        """Send a request, wait until its handler runs, and reset the connection."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(raw_request(path, key, ask))
            until(lambda: self.effects(key))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody decides or writes anything on the ledger meanwhile."""
        with Path(f"{self.ledger}.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --- what was done ----------------------------------------------------------------------------

    def effects(self, key: str) -> list[int]:
        """The processes that executed requests with this key, one for each execution."""
        path = self.folder / "effects"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[-1]) for line in lines if line.split()[0] == key]

    def open_gate(self, name: str) -> None:
        (self.folder / "gates" / name).touch()

    def ledger_said(self, verb: str, *arguments: str) -> Any:
        """What `effectfence ledger …` answers, with --json."""
        words = [sys.executable, "-m", "effectfence", "ledger", verb, str(self.ledger), *arguments]
        done = subprocess.run(
            [*words, "--json"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def state(self, key: str) -> str:
        return str(self.ledger_said("show", f"http:{key}")["state"])


@contextmanager
def serving(
    folder: Path, server: str, workers: int = 1, *, app: str = SHOP, **environment: str
) -> Iterator[Shop]:
    shop = Shop(folder)
    try:
        shop.start(command(server, shop.port, workers, app), **environment)
        shop.answers()
        yield shop
    finally:
        shop.stop()
    for slip in ("never retrieved", "never awaited", "was destroyed", "ResourceWarning"):
        assert slip not in shop.said()


def raw_request(path: str, key: str, ask: dict[str, Any]) -> bytes:
    body = json.dumps(ask).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def new_key() -> str:
    return str(uuid.uuid4())


def until(condition: Callable[[], object]) -> None:
    """Until another process has made it true; the test's timeout is the bound."""
    while not condition():
        time.sleep(0.005)
