"""PostgreSQL and Redis for tests and benches: private servers on free ports, in temporary folders.

They come from the system's packages, run as another user when started by root, listen on the
loopback alone, and end with the process that started them, whatever ended that.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

POSTGRES_HINT: Final = "no PostgreSQL server: apt-get install postgresql"
REDIS_HINT: Final = "no Redis server: apt-get install redis-server"
_START_SECONDS: Final = 60.0
_numbers = itertools.count(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class NotInstalled(Exception):
    """A server's program is missing; says the line that installs it."""


class Server:
    """One program, its folder and its log; ends with this process."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                **unprivileged(),
            )

    def until(self, ready: Any) -> None:
        """Until `ready()`; the server's log, if it ended or never was."""
        deadline = time.monotonic() + _START_SECONDS
        while not ready():
            ended = self._process is not None and self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{self._command[0]} did not start: {self.log.read_text()}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the program and everything that it started, at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGSTOP)
        for pid in (self._process.pid, *children(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that live."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def unprivileged() -> dict[str, Any]:
    """How a program is started by root as somebody else: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return {}
    found = _somebody()
    return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}


def _somebody() -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


def server_folder(name: str, *, on_disk: bool = False) -> Path:
    """A new folder for a server, in memory where there is room; it belongs to its user."""
    place = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        roomy = shutil.disk_usage("/dev/shm").free > 1 << 30 and os.access("/dev/shm", os.W_OK)
        if roomy and not on_disk:
            place = "/dev/shm"
    folder = Path(tempfile.mkdtemp(prefix=f"effectfence-{name}-", dir=place))
    if os.geteuid() == 0:
        found = _somebody()
        os.chown(folder, found.pw_uid, found.pw_gid)
    return folder


def _die_with_parent() -> None:
    """In the child, before it becomes the server: the kernel ends it with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


# PostgreSQL ---------------------------------------------------------------------------------------


def postgres_programs() -> Path:
    """Where `initdb` and `postgres` are."""
    for folder in sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=_version, reverse=True):
        if os.access(f"{folder}/initdb", os.X_OK):
            return Path(folder)
    found = shutil.which("initdb")
    if found is None or shutil.which("postgres") is None:
        raise NotInstalled(POSTGRES_HINT)
    return Path(os.path.realpath(found)).parent


def _version(folder: str) -> float:
    return float(folder.split("/")[-2])


class PostgresServer(Server):
    """A cluster of its own. `settings` go into its command line."""

    user = "postgres"

    def __init__(self, folder: Path, port: int, settings: Mapping[str, str]) -> None:
        self.port = port
        self.data = folder / "data"
        given = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": str(folder),
            "shared_buffers": "16MB",
            "max_connections": "60",
            "min_wal_size": "32MB",
            "max_wal_size": "64MB",
            "logging_collector": "off",
            "autovacuum_naptime": "5s",
            **settings,
        }
        programs = postgres_programs()
        flags = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
        super().__init__(folder, [str(programs / "postgres"), "-D", str(self.data), *flags])
        self._programs = programs

    @classmethod
    def create(cls, *, on_disk: bool = False, **settings: str) -> Self:
        """A new cluster, started."""
        folder = server_folder("postgres", on_disk=on_disk)
        server = cls(folder, free_port(), settings)
        server.run("initdb", "-D", str(server.data), "-U", cls.user, "-A", "trust", "-E", "UTF8",
                   "--locale=C", "--no-sync", "--no-instructions")  # fmt: skip
        server.start()
        return server

    @property
    def url(self) -> str:
        """The address of the database `postgres`, over TCP."""
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/postgres"

    def schema_url(self) -> str:
        """The same with a schema that nobody else has."""
        return f"{self.url}?schema=t{os.getpid()}_{next(_numbers)}"

    def run(self, program: str, *arguments: str) -> str:
        """One of PostgreSQL's own programs, as the server's user."""
        ran: subprocess.CompletedProcess[str] = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            **unprivileged(),
        )
        if ran.returncode:
            raise RuntimeError(f"{program}: {ran.stdout}{ran.stderr}")
        return ran.stdout

    def sql(self, text: str) -> str:
        """What psql answers, rows by line, columns by `|`."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", self.user, "-d", "postgres"]
        return self.run("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", *where, "-c", text).strip()

    def schema_with_clock(self) -> tuple[str, Callable[[float], None]]:
        """A new schema's address, and what sets the time that its server takes for its own."""
        from effectfence.stores.postgres_server import schema_sql

        url = self.schema_url()
        schema = url.partition("?schema=")[2]
        file = self.folder / f"clock-{schema}"
        clock = f"CREATE OR REPLACE FUNCTION {schema}.clock() RETURNS double precision LANGUAGE sql"
        read = f"VOLATILE AS $$ SELECT pg_read_file('{file}')::double precision $$"
        self.sql(f"{schema_sql(schema)};{clock} {read}")

        def tell(seconds: float) -> None:
            fresh = file.with_suffix(".new")
            fresh.write_text(repr(seconds))
            fresh.chmod(0o644)
            fresh.rename(file)

        return url, tell

    def start(self) -> None:
        self.spawn()
        self.until(self._answers)

    def _answers(self) -> bool:
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-q"]
        try:
            self.run("pg_isready", *where)
        except RuntimeError:
            return False
        return True

    def standby(self, port: int | None = None, **settings: str) -> PostgresServer:
        """A new server that follows this one, by way of `port` where that is given."""
        folder = server_folder("postgres")
        follower = PostgresServer(folder, free_port(), settings)
        where = f"host=127.0.0.1 port={port or self.port} user={self.user}"
        plainly = "sslmode=disable gssencmode=disable"  # a test's proxy reads it
        self.run("pg_basebackup", "-d", f"{where} {plainly}", "-D", str(follower.data), "-R",
                 "-X", "stream", "-c", "fast", "--no-sync")  # fmt: skip
        follower.start()
        return follower

    def promote(self) -> None:
        self.sql("SELECT pg_promote(true, 60)")

    def stop(self) -> None:
        """An orderly, fast end."""
        if self._process is not None:
            self.signal(signal.SIGINT)
            self.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


# Redis --------------------------------------------------------------------------------------------


class RedisServer(Server):
    """A server of its own, with `appendonly` and `appendfsync always` unless told otherwise."""

    def __init__(self, folder: Path, port: int, settings: Mapping[str, str]) -> None:
        self.port = port
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise NotInstalled(REDIS_HINT)
        given = {
            "bind": "127.0.0.1",
            "port": str(port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            **settings,
        }
        flags = [word for name, value in given.items() for word in (f"--{name}", value)]
        super().__init__(folder, [program, *flags])

    @classmethod
    def create(cls, **settings: str) -> Self:
        """A new server, started. A setting's `_` stands for `-`."""
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        server = cls(server_folder("redis"), free_port(), given)
        server.start()
        return server

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def prefix_url(self) -> str:
        """The same with a prefix that nobody else has."""
        return f"{self.url}?prefix=t{os.getpid()}_{next(_numbers)}"

    def command(self, *words: str) -> bytes:
        """One command over a connection of its own, as it came back."""
        sent = b"*%d\r\n" % len(words)
        for word in words:
            data = word.encode()
            sent += b"$%d\r\n%b\r\n" % (len(data), data)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(sent)
            return connection.recv(1 << 20)

    def start(self) -> None:
        self.spawn()
        self.until(self._answers)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGTERM)
            self.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
