"""Wrap sessions to be killed, a thousand a minute: FAULTS 44 and 45.

    python -m tests.mcp.kills JOB COUNT FOLDER [MUTANT]

This process has imported everything and forks a wrap for each kill. Another wrap on the same
ledger, which nobody kills, is asked for the same call afterwards: it must never run what has run.
All waits are for a byte in a pipe. Prints what was seen, and how often, as JSON; `wrong` must be
empty.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from effectfence import cli, doctor, fence  # noqa: F401 - all that a wrap needs, before the first fork
from effectfence.mcp import fenced, wrap  # noqa: F401 - the same
from tests.crash import mutants

IDS_BEFORE = 1_000_000
LONGEST_SECONDS = 20.0
"""For a server's word; nothing waits that long unless it is broken."""
LEDGER_LASTS = 100
"""Kills on one ledger."""


class Session:
    """One forked wrap, and its client's ends of the pipes."""

    def __init__(self, arguments: list[str], errors: Path) -> None:
        their_input, self.input = os.pipe()
        self.output, their_output = os.pipe()
        self.rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                log = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                for theirs, ours in ((their_input, 0), (their_output, 1), (log, 2)):
                    os.dup2(theirs, ours)
                os.closerange(3, 1000)
                sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
                os._exit(cli.main(arguments) or 0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(70)
        os.close(their_input)
        os.close(their_output)

    def call(self, number: int, *, id: int | None = None) -> None:
        line = (
            b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":'
            b'{"name":"charge","arguments":{"n":%d}}}\n' % (number if id is None else id, number)
        )
        with suppress(BrokenPipeError):  # it is dead by now
            os.write(self.input, line)

    def answer(self) -> Any:
        """The next one; `None` when there will be none."""
        while b"\n" not in self.rest:
            data = os.read(self.output, 65536)
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)["result"]

    def stop(self) -> None:
        """Stand still, from a point in time that is known."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Close its input; its exit code, or minus the signal that killed it."""
        os.close(self.input)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.output)
        return code


class Rig:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.effects = folder / "effects"
        self.effects.touch()
        for name in ("said", "go"):
            os.mkfifo(folder / name)
        # Both ends of both, so that opening one never waits and none ever ends.
        self.said = os.open(folder / "said", os.O_RDWR)
        self.go = os.open(folder / "go", os.O_RDWR)
        self.policy = folder / "policy.toml"
        self.policy.write_text("[defaults]\nfence = true\n")  # nobody asks for the tools
        self.heard = b""
        self.ledgers = 0

    def session(self) -> Session:
        server = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tiny_server.py"))]
        names = [str(self.folder / name) for name in ("effects", "said", "go")]
        ledger = self.folder / f"ledger-{self.ledgers}" / "effects.jsonl"
        options = ["--ledger", str(ledger), "--policy", str(self.policy), "--wait-seconds", "20"]
        return Session(["wrap", *options, "--", *server, *names], self.folder / "errors")

    def hears(self, what: bytes, number: int) -> int:
        """Wait until the server has said so; its process."""
        while True:
            while b"\n" not in self.heard:
                if not select.select([self.said], [], [], LONGEST_SECONDS)[0]:
                    raise TimeoutError((self.folder / "errors").read_text()[-2000:])
                self.heard += os.read(self.said, 65536)
            line, _, self.heard = self.heard.partition(b"\n")
            said, about, pid = line.split()
            if (said, about) == (what, b"%d" % number):
                return int(pid)

    def let_go(self) -> None:
        os.write(self.go, b"!")

    def run(self, job: Callable[[Rig, Session, int], None], count: int) -> None:
        witness = self.session()
        for number in range(1, count + 1):
            if number % LEDGER_LASTS == 0:
                self.let_go_of(witness)
                self.ledgers += 1
                witness = self.session()
            job(self, witness, number)
        self.let_go_of(witness)
        executed = Counter(self.effects.read_text().split())
        self.wrong += [
            f"{number} ran {times} times" for number, times in executed.items() if times > 1
        ]
        self.seen["effects"] = len(executed)

    def let_go_of(self, witness: Session) -> None:
        code = witness.end()
        if code != 0:
            self.wrong.append(f"the witness ended with {code}")

    def check(self, holds: bool, number: int, what: str) -> None:
        if not holds:
            self.wrong.append(f"{number}: {what}")

    def ask(self, witness: Session, number: int) -> str:
        """What the other process says of the call: "replay", a refusal's code, or "ran"."""
        os.write(self.go, b"!")  # should it run it, it is not to wait
        witness.call(number, id=IDS_BEFORE + number)
        kind, told = kind_of(witness.answer())
        os.set_blocking(self.go, False)
        with suppress(BlockingIOError):
            os.read(self.go, 64)
        os.set_blocking(self.go, True)
        self.seen[f"then {kind}"] += 1
        self.last_text = told
        return kind


def kind_of(result: Any) -> tuple[str, str]:
    if result is None:
        return "nothing", ""
    meta = result.get("_meta", {})
    text = result["content"][0]["text"]
    if "effectfence/refused" in meta:
        refused = meta["effectfence/refused"]
        assert refused["ran"] is (None if refused["code"] == "outcome_unknown" else False), refused
        return refused["code"], text
    return ("replay" if "effectfence/replay" in meta else "ran"), text


# --- row 44: wrap is killed -----------------------------------------------------------------------


def wrap_dies_before_the_commit(rig: Rig, witness: Session, number: int) -> None:
    """The answer is in the pipe; who would have read it stands still, then is killed."""
    session = rig.session()
    session.call(number)
    rig.hears(b"E", number)
    session.stop()
    rig.let_go()
    rig.hears(b"A", number)
    session.kill()
    rig.check(session.answer() is None, number, "the client got an answer")
    rig.check(session.end() == -signal.SIGKILL, number, "was not killed")
    kind = rig.ask(witness, number)
    rig.check(kind == "outcome_unknown", number, f"answered with {kind}")


def wrap_dies_at_any_instant(rig: Rig, witness: Session, number: int) -> None:
    session = rig.session()
    rig.let_go()
    session.call(number)
    if rig.random.random() < 0.7:
        rig.hears(b"E", number)
        until = time.perf_counter() + rig.random.uniform(0, 0.002)
    else:
        until = time.perf_counter() + rig.random.uniform(0, 0.06)
    while time.perf_counter() < until:
        pass
    session.kill()
    first, text = kind_of(session.answer())
    rig.seen[f"first {first}"] += 1
    session.end()
    kind = rig.ask(witness, number)
    if first == "ran":
        rig.check(kind == "replay", number, f"answered, and then {kind}")
        rig.check(rig.last_text == text, number, f"{text!r}, and then {rig.last_text!r}")
    rig.check(kind in ("replay", "outcome_unknown", "ran"), number, f"answered with {kind}")


# --- row 45: the server is killed -----------------------------------------------------------------


def server_dies_mid_call(rig: Rig, witness: Session, number: int) -> None:
    """With a duplicate that waits: both are told."""
    session = rig.session()
    session.call(number)
    session.call(number, id=IDS_BEFORE + number)
    pid = rig.hears(b"E", number)
    os.kill(pid, signal.SIGKILL)
    for which in ("first", "waiting"):
        kind, text = kind_of(session.answer())
        rig.check(kind == "outcome_unknown", number, f"the {which} was told {kind}: {text}")
    kind = rig.ask(witness, number)
    rig.check(kind == "outcome_unknown", number, f"answered with {kind}")
    code = session.end()
    rig.check(code == 128 + signal.SIGKILL, number, f"ended with {code}")


def server_dies_at_any_instant(rig: Rig, witness: Session, number: int) -> None:
    session = rig.session()
    rig.let_go()
    session.call(number)
    pid = rig.hears(b"E", number)
    until = time.perf_counter() + rig.random.uniform(0, 0.0002)
    while time.perf_counter() < until:
        pass
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    first, text = kind_of(session.answer())
    rig.seen[f"first {first}"] += 1
    session.end()
    kind = rig.ask(witness, number)
    if first == "ran":
        rig.check(kind == "replay", number, f"answered, and then {kind}")
        rig.check(rig.last_text == text, number, f"{text!r}, and then {rig.last_text!r}")
    else:
        rig.check(first == "outcome_unknown", number, f"the client was told {first}: {text}")
        rig.check(kind == "outcome_unknown", number, f"answered with {kind}")


JOBS = {
    job.__name__: job
    for job in (
        wrap_dies_before_the_commit,
        wrap_dies_at_any_instant,
        server_dies_mid_call,
        server_dies_at_any_instant,
    )
}


def main(job: str, count: str, folder: str, mutant: str = "") -> None:
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if mutant:
        mutants.MUTANTS[mutant]()
    rig = Rig(Path(folder), seed=int(count))
    rig.run(JOBS[job], int(count))
    print(json.dumps({"seen": rig.seen, "wrong": rig.wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
