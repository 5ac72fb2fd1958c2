"""A child under strace: its calls written down, and one of them failing or killing it.

Counts are those of each thread by itself, as strace counts; all of a ledger's calls but those of
its opening caller come from one thread.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.forks import Forks

CHANGING = ("write", "pwrite64", "fdatasync", "fsync", "rename", "ftruncate", "unlink", "mkdir",
            "fchmod", "chmod", "writev", "openat")  # fmt: skip
"""Calls that leave the disk, or the world, other than it was."""

LOOKING = ("flock", "fcntl", "pread64", "newfstatat", "fstat", "lseek", "close", "fadvise64")


def need_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is missing: apt-get install strace")


_BY_NAME = ("openat", "rename", "unlink", "mkdir")
_AT = re.compile(r"<((?:\\x[0-9a-f]{2})*)>")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Call:
    """One finished (or, with `result` "?", unfinished) call."""

    thread: int
    name: str
    arguments: str
    result: str
    began: int
    ended: int
    """Lines of the trace."""

    def path(self) -> Path:
        """Of the file or folder that it names, or that its descriptor is open on."""
        found = _STRING.search(self.arguments) if self.name in _BY_NAME else None
        found = found or _AT.search(self.arguments)
        return Path(unescaped(found[1]).decode().removesuffix(" (deleted)") if found else "")

    def other(self) -> Path:
        """The second name."""
        return Path(unescaped(_STRING.findall(self.arguments)[1]).decode())

    def last_number(self) -> int:
        """An offset or a size."""
        return int(self.arguments.rpartition(", ")[2])

    def data(self) -> bytes:
        """What it writes."""
        found = _STRING.search(self.arguments)
        assert found is not None
        return unescaped(found[1])


def traced(
    forks: Forks,
    job: str,
    *,
    trace: tuple[str, ...],
    inject: tuple[str, ...] = (),
    out: Path | None = None,
    **spec: Any,
) -> int:
    """Run the job under strace; the child's exit status."""
    pid = forks.fork(job, **spec)
    with attached([pid], trace=trace, inject=inject, out=out):
        forks.let_go(pid)
        return forks.wait(pid)


class attached:
    """strace on these children, with all their threads, until they end."""

    def __init__(
        self,
        pids: list[int],
        *,
        trace: tuple[str, ...],
        inject: tuple[str, ...] = (),
        out: Path | None = None,
    ) -> None:
        command = ["strace", "-f", "-y", "-xx", "-s", "1000000", "-o", str(out or "/dev/null")]
        command += ["-e", f"trace={','.join(trace)}", "-e", "signal=none"]
        for each in inject:
            command += ["-e", f"inject={each}"]
        for pid in pids:
            command += ["-p", str(pid)]
        self._command = command
        self._pids = len(pids)

    def __enter__(self) -> None:
        self._strace = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._strace.stderr is not None
        for _ in range(self._pids):
            line = self._strace.stderr.readline()
            assert "attached" in line, f"strace cannot attach here: {line}"

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._strace.kill()
        assert self._strace.stderr is not None
        self._strace.stderr.read()
        self._strace.stderr.close()
        self._strace.wait()


_LINE = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(?:\(| resumed>)(.*)$", re.DOTALL)


def calls(out: Path) -> list[Call]:
    """What strace wrote down, in the order in which the calls ended."""
    begun: dict[int, tuple[int, str]] = {}
    found: list[Call] = []
    for number, line in enumerate(out.read_text().splitlines()):
        match = _LINE.match(line)
        if match is None:  # a thread's or process's end
            continue
        thread, name, rest = int(match[1]), match[2], match[3]
        if rest.endswith(" <unfinished ...>"):
            begun[thread] = number, rest.removesuffix(" <unfinished ...>")
            continue
        began, before = begun.pop(thread, (number, ""))
        arguments, _, result = (before + rest).rpartition(" = ")
        arguments = arguments.rstrip().removesuffix(")")
        found.append(Call(thread, name, arguments, result, began, number))
    for thread, (number, arguments) in begun.items():
        found.append(Call(thread, "unfinished", arguments, "?", number, number))
    return found


def counted(forks: Forks, job: str, names: tuple[str, ...], out: Path, **spec: Any) -> Counter[str]:
    """How often, at most, one thread of the job makes each of these calls."""
    assert traced(forks, job, trace=names, out=out, **spec) == 0
    return most(calls(out))


def most(made: list[Call]) -> Counter[str]:
    by_thread = Counter((call.name, call.thread) for call in made)
    counts: Counter[str] = Counter()
    for (name, _), count in by_thread.items():
        counts[name] = max(counts[name], count)
    return counts


def instants(counts: Counter[str], names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Before each single call: (call, which one)."""
    for name in names:
        for k in range(1, counts[name] + 1):
            yield name, k


def unescaped(text: str) -> bytes:
    """The bytes of a string as `strace -xx` writes it."""
    return bytes.fromhex(text.replace("\\x", ""))
