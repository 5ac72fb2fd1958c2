"""How many processes serve this application, as far as a worker can honestly know.

A worker is told its number by nobody. What can be known: the server's command line (this process's,
or the one that started it), and the environment variables that servers read. Where a supervisor is
seen but no number, that is said too, never guessed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VARIABLES: Final = (
    ("uvicorn", ("UVICORN_WORKERS", "WEB_CONCURRENCY")),
    ("gunicorn", ("WEB_CONCURRENCY",)),
    ("granian", ("GRANIAN_WORKERS",)),
    ("fastapi", ("WEB_CONCURRENCY",)),
)
"""Servers, and what each of them reads where its command line says nothing."""
_SERVERS: Final = ("uvicorn", "gunicorn", "hypercorn", "granian", "fastapi")


@dataclass(frozen=True, slots=True)
class Workers:
    """`count` is `None` if there may be several and nobody said how many; `told_by` says why."""

    count: int | None
    told_by: str


def count_workers(
    environment: Mapping[str, str], commands: Sequence[Sequence[str]], *, supervised: bool
) -> Workers:
    """From the environment, the command lines of this process and its parent, and whether another
    process of this program started it."""
    for command in commands:
        server = _server_of(command)
        if server is None:
            continue
        words = [*shlex.split(environment.get("GUNICORN_CMD_ARGS", "")), *command]
        if (count := _option(words)) is not None:
            return Workers(count, f"the command line of {server}")
        for variable in dict(_VARIABLES).get(server, ()):
            if (number := environment.get(variable, "")).isdigit():
                return Workers(int(number), variable)
        if server == "gunicorn" or _has_file(words):
            return Workers(None, f"{server} may read a number from a configuration file")
        return Workers(1, f"{server} starts one worker where nobody says otherwise")
    if environment.get("WEB_CONCURRENCY", "").isdigit():
        return Workers(int(environment["WEB_CONCURRENCY"]), "WEB_CONCURRENCY")
    if supervised:
        return Workers(None, "another process of this program started this one")
    return Workers(1, "nothing speaks of others")


def workers_here() -> Workers:
    """Of this process."""
    commands = [command for pid in (os.getpid(), os.getppid()) if (command := _command(pid))]
    return count_workers(
        os.environ,
        commands or [sys.orig_argv],
        supervised=multiprocessing.parent_process() is not None,
    )


def _server_of(command: Sequence[str]) -> str | None:
    """The server that a command line starts: by its own name, or as `python -m NAME`."""
    for index, word in enumerate(command[:4]):
        name = Path(word).name
        if name in _SERVERS and (index == 0 or "-c" not in command[:index]):
            return name
    return None


def _option(words: Sequence[str]) -> int | None:
    """The last `--workers N`, `--workers=N`, `-w N` or `-wN`."""
    count = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("--workers", "-w") and following.isdigit():
            count = int(following)
        elif found := re.fullmatch(r"(?:--workers=|-w=?)([0-9]+)", word):
            count = int(found[1])
    return count


def _has_file(words: Sequence[str]) -> bool:
    return any(word in ("-c", "--config") or word.startswith("--config=") for word in words)


def _command(pid: int) -> list[str]:
    try:
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in said.split(b"\0")[:-1]]
