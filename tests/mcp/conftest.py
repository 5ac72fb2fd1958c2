"""An odd server with a fence in front of it, and real servers from npm and PyPI."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.peer import Peer, alive, end_all, until

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".cache" / "mcp"
LONG = bool(os.environ.get("EFFECTFENCE_LONG"))


class Odd:
    """One odd server's command, what it did, and peers in front of it, raw or wrapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gates = folder / "gates"
        self.gates.mkdir()
        self.ledger = folder / "ledger" / "effects.jsonl"
        self.mark = uuid.uuid4().hex
        self.peers: list[Peer] = []
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("EFFECTFENCE_")},
            "PYTHONPATH": str(REPOSITORY),
            "XDG_STATE_HOME": str(folder / "state"),
            "ODD_MARK": self.mark,
        }
        if core := os.environ.get("EFFECTFENCE_CORE"):
            self.env["EFFECTFENCE_CORE"] = core

    def command(self, *flags: str) -> list[str]:
        return [
            *(sys.executable, "-I", "-S", str(Path(__file__).with_name("odd_server.py"))),
            *("--effects", str(self.folder / "effects"), "--heard", str(self.folder / "heard")),
            *("--gates", str(self.gates), *flags),
        ]

    async def start(self, command: Sequence[str], *, greet: bool, **env: str) -> Peer:
        peer = await Peer.start(command, env=self.env | env, cwd=self.folder)
        self.peers.append(peer)
        if greet:
            await peer.hello()
        return peer

    async def raw(self, *flags: str, greet: bool = True) -> Peer:
        return await self.start(self.command(*flags), greet=greet)

    async def wrapped(
        self,
        *options: str,
        flags: Sequence[str] = (),
        command: Sequence[str] | None = None,
        ledger: Path | str | None = None,
        greet: bool = True,
        **env: str,
    ) -> Peer:
        """`ledger` "": the one that wrap chooses by itself."""
        at = self.ledger if ledger is None else ledger
        at_ = ("--ledger", str(at)) if at else ()
        inner = list(command) if command is not None else self.command(*flags)
        return await self.start(wrap(*at_, *options, command=inner), greet=greet, **env)

    def effects(self, tool: str | None = None) -> list[Any]:
        """The arguments of every execution, or of one tool's."""
        path = self.folder / "effects"
        lines = path.read_text().splitlines() if path.exists() else []
        ran = [json.loads(line) for line in lines]
        return [each["args"] for each in ran if tool is None or each["tool"] == tool]

    def heard(self) -> list[bytes]:
        """What came to the server, line by line."""
        path = self.folder / "heard"
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    def open_gate(self, name: str) -> None:
        (self.gates / name).touch()

    async def running(self, count: int = 1) -> None:
        """Until so many executions have begun."""
        await until(lambda: len(self.effects()) >= count)

    def alive(self) -> list[int]:
        return alive(self.mark)

    def ledger_said(self, *arguments: str, ledger: Path | None = None) -> Any:
        """What `effectfence ledger …` answers, with --json."""
        verb, *rest = arguments
        done = subprocess.run(
            [*EFFECTFENCE, "ledger", verb, str(ledger or self.ledger), *rest, "--json"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


EFFECTFENCE = (sys.executable, "-m", "effectfence")


def wrap(*options: str, command: Sequence[str]) -> list[str]:
    return [*EFFECTFENCE, "wrap", *options, "--", *command]


@pytest.fixture
async def odd(tmp_path: Path) -> AsyncIterator[Odd]:
    """When the test is over all peers are closed, and none of their processes is left."""
    odd = Odd(tmp_path)
    try:
        yield odd
        odd.open_gate("all")
        for pid in odd.alive():  # a test that failed may have left one standing
            os.kill(pid, signal.SIGCONT)
        for peer in odd.peers:
            await peer.close()
        await until(lambda: not odd.alive())
    finally:
        end_all(odd.alive())


# --- from npm and PyPI ----------------------------------------------------------------------------

NPM = {
    "@modelcontextprotocol/server-memory": "2026.8.31",
    "@modelcontextprotocol/server-filesystem": "2026.8.31",
    "@modelcontextprotocol/server-everything": "2026.8.31",
    "@modelcontextprotocol/sdk": "1.32.2",
    "@modelcontextprotocol/client": "2.4.0",
}
"""All of them run on Node.js 18, Debian 12's."""
PYPI = {
    "git": "mcp-server-git==2026.10.19",
    "time": "mcp-server-time==2026.10.19",
    "once": "once-kernel[mcp]==0.2.1",
}


@pytest.fixture(scope="session")
def npm() -> Path:
    """The folder `node_modules` with the servers and clients of `NPM`."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs Node.js and npm: apt-get install nodejs npm")

    def install(folder: Path) -> None:
        (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": NPM}))
        _install(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], folder)

    return _cached(f"npm-{_short(json.dumps(NPM))}", install) / "node_modules"


@pytest.fixture(scope="session")
def environments() -> dict[str, Path]:
    """The folders `bin` of an environment for each server of `PYPI`."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(PYPI, pool.map(_environment, PYPI), strict=True))


def _environment(name: str) -> Path:
    def install(folder: Path) -> None:
        _install([sys.executable, "-m", "venv", "--without-pip", "."], folder)
        pip = [sys.executable, "-m", "pip", "--python", "bin/python", "install"]
        _install([*pip, "--quiet", "--disable-pip-version-check", PYPI[name]], folder)

    return _cached(f"{name}-{_short(PYPI[name] + sys.version + sys.prefix)}", install) / "bin"


def _cached(name: str, install: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache, filled by whoever comes first."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            install(folder)
            (folder / "installed").touch()
    return folder


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed: {done.stdout[-2000:]}")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
