"""Processes to be killed: a server that has imported everything forks one in two milliseconds.

The server is a process of its own (`python -m tests.crash.forks`) without threads. A child blocks
at its gate until it is let go, so that a tracer can be attached first; then it plants the mutant it
was asked for, does its job (see `worker`), and leaves.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
BROKEN = 70
"""Exit status of a child whose job raised what it should not; its `stderr` says what."""


class Forks:
    """The client of one server."""

    def __init__(self, **environment: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
        )
        self.running: set[int] = set()

    def fork(self, job: str, **spec: Any) -> int:
        """A child that waits at its gate."""
        for name in ("ledger", "notes"):
            spec[name] = str(spec[name])
        pid: int = self._ask({"do": "fork", "job": job, **spec})
        self.running.add(pid)
        return pid

    def let_go(self, pid: int) -> None:
        self._ask({"do": "let go", "pid": pid})

    def start(self, job: str, **spec: Any) -> int:
        pid = self.fork(job, **spec)
        self.let_go(pid)
        return pid

    def wait(self, pid: int) -> int:
        """The exit status; negative: the signal that ended it."""
        status: int = self._ask({"do": "wait", "pid": pid})
        self.running.discard(pid)
        return status

    def kill(self, pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        return self.wait(pid)

    def run(self, job: str, **spec: Any) -> None:
        """To its end, which must be a good one."""
        status = self.wait(self.start(job, **spec))
        assert status == 0, (status, complaint(spec["notes"]))

    def close(self) -> None:
        for pid in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                self.kill(pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


def complaint(notes: Path | str) -> str:
    path = Path(notes) / "stderr"
    return path.read_text() if path.exists() else ""


def _serve() -> None:
    from tests.crash import mutants, worker  # all that a child needs, before the first fork

    worker.warm_up()
    gc.collect()
    gc.freeze()
    gates: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        match question.pop("do"):
            case "fork":
                answer, gates_end = _fork(question, worker, mutants, list(gates.values()))
                gates[answer] = gates_end
            case "let go":
                answer = os.write(gates[question["pid"]], b"!")
            case _:
                os.close(gates.pop(question["pid"]))
                answer = os.waitstatus_to_exitcode(os.waitpid(question["pid"], 0)[1])
        print(json.dumps(answer), flush=True)


def _fork(spec: dict[str, Any], worker: Any, mutants: Any, others: list[int]) -> tuple[int, int]:
    gate, let_go = os.pipe()
    pid = os.fork()
    if pid:
        os.close(gate)
        return pid, let_go
    try:
        for descriptor in (let_go, *others):
            os.close(descriptor)
        redirect(Path(spec["notes"]))
        if os.read(gate, 1) != b"!":
            os._exit(0)
        os.close(gate)
        if spec.get("mutant"):
            mutants.MUTANTS[spec["mutant"]]()
        worker.do(spec)
        os._exit(0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(BROKEN)


def redirect(notes: Path) -> None:
    """A child's input and output go nowhere, its complaints to its notes."""
    notes.mkdir(exist_ok=True)
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(notes / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(errors, 2)
    os.close(null)
    os.close(errors)


if __name__ == "__main__":
    _serve()
