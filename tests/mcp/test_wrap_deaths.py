"""`effectfence wrap` when somebody dies or leaves: the proxy, the server, the client, and all that
the server has started. FAULTS 44 and 45; what ends ends in bounded time (the test's), with its
code."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.conftest import LONG, REPOSITORY, Odd, wrap
from tests.mcp.peer import Gone, until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(3600 if LONG else 60)]

HELLO = (
    b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25",'
    b'"capabilities":{},"clientInfo":{"name":"peer","version":"1"}}}'
)
CHARGE = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"charge"}}'

# --- FAULTS 44 and 45 -----------------------------------------------------------------------------


@pytest.fixture
def scratch() -> Iterator[Path]:
    """In memory where that is possible: the page cache outlives a killed process."""
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def killed(job: str, count: int, scratch: Path, *mutant: str) -> dict[str, Any]:
    ran = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.mcp.kills",
            job,
            str(count),
            scratch,
            *mutant,
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    print(job, count, ran.stdout)
    verdict: dict[str, Any] = json.loads(ran.stdout)
    return verdict


def test_the_proxy_dies_after_the_answer_and_before_the_commit(scratch: Path) -> None:
    """Row 44: the client's pipe breaks; the next call, in another process, is told "unknown"."""
    count = 1000 if LONG else 100
    verdict = killed("wrap_dies_before_the_commit", count, scratch)
    assert verdict == {"seen": {"then outcome_unknown": count, "effects": count}, "wrong": []}


def test_the_proxy_dies_at_any_instant(scratch: Path) -> None:
    """Row 44: at most one effect, and whoever had an answer gets that answer again."""
    count = 1000 if LONG else 60
    verdict = killed("wrap_dies_at_any_instant", count, scratch)
    assert verdict["wrong"] == []
    assert verdict["seen"]["then outcome_unknown"] > 0


def test_the_server_dies_during_a_call(scratch: Path) -> None:
    """Row 45: unknown, also for the duplicate that waits and for another process."""
    count = 1000 if LONG else 100
    verdict = killed("server_dies_mid_call", count, scratch)
    assert verdict == {"seen": {"then outcome_unknown": count, "effects": count}, "wrong": []}


def test_the_server_dies_at_any_instant(scratch: Path) -> None:
    """Row 45: an answer that was still read counts; without one it is unknown."""
    count = 1000 if LONG else 60
    verdict = killed("server_dies_at_any_instant", count, scratch)
    assert verdict["wrong"] == []
    assert verdict["seen"]["effects"] == count


@pytest.mark.parametrize("job", ["wrap_dies_before_the_commit"])
def test_a_planted_fault_is_found(scratch: Path, job: str) -> None:
    """A dead process' calls taken for free: the rig is not blind."""
    assert killed(job, 3, scratch, "dead_holder_is_free")["wrong"]


# --- the server ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("exit", 7, "exit code 7"), ("exit", 0, "exit code 0"), ("kill", 137, "SIGKILL")],
)
async def test_a_tool_that_ends_its_server(odd: Odd, how: str, code: int, words: str) -> None:
    """Unknown to the caller, to a duplicate that waits, and later; no new server runs it again."""
    arguments = {"how": how, "code": code, "gate": "go"}
    peer, other = await odd.wrapped(), await odd.wrapped()
    first, second = peer.call("die", arguments), peer.call("die", arguments)
    reading = peer.call("look", {"gate": "never"})
    await peer.ask("ping")
    third = other.call("die", arguments)
    odd.open_gate("go")
    for waiting in (first, second, third):
        told = await waiting
        assert told.code == "outcome_unknown", told.line
        assert told.refused["ran"] is None
        assert "effectfence ledger settle" in told.text
    assert words in (await first).text
    assert words in (await reading).error["message"]
    assert await peer.ended() == code
    assert (await other.call("die", arguments)).code == "outcome_unknown"
    again = await odd.wrapped()
    assert (await again.call("die", arguments)).code == "outcome_unknown"
    assert len(odd.effects()) == 1


async def test_a_server_that_ends_while_nothing_is_asked(odd: Odd) -> None:
    peer = await odd.wrapped()
    (server,) = [pid for pid in odd.alive() if pid != peer.pid]
    os.kill(server, signal.SIGTERM)
    assert await peer.ended() == 128 + signal.SIGTERM


async def test_the_servers_exit_code_is_passed_on(odd: Odd) -> None:
    peer = await odd.wrapped(flags=["--exit", "3"])
    await peer.call("charge")
    assert await peer.close() == 3


async def test_the_last_words_of_a_server_arrive(odd: Odd) -> None:
    """It answers, says something large, and is gone at once."""
    script = (
        "import sys,os\nfor line in sys.stdin:\n"
        ' os.write(1, b\'{"jsonrpc":"2.0","id":0,"result":{"x":"\' + b"y"*300000 + b\'"}}\\n\')\n'
        " os._exit(5)"
    )
    peer = await odd.wrapped(command=[sys.executable, "-I", "-S", "-c", script], greet=False)
    answer = await peer.ask_line(HELLO)
    assert len(answer.result["x"]) == 300000
    assert await peer.ended() == 5


async def test_a_server_that_dies_in_the_handshake(odd: Odd) -> None:
    peer = await odd.wrapped(flags=["dies-in-handshake"], greet=False)
    told = await peer.ask_line(HELLO)
    assert "exit code 3" in told.error["message"]
    assert await peer.ended() == 3
    (line,) = [each for each in peer.complaint().splitlines() if "exit code 3" in each]
    assert line.startswith("effectfence: ")


@pytest.mark.parametrize("command", ["false", "true"])
async def test_a_command_that_is_no_server(odd: Odd, command: str) -> None:
    peer = await odd.wrapped(command=[command], greet=False)
    told = await peer.ask_line(HELLO)
    assert command in told.error["message"]
    assert await peer.ended() == (0 if command == "true" else 1)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("no-such-command-anywhere", 127, "No such file"),
        ("/no/such/file", 127, "No such file"),
        ("/etc/passwd", 126, "denied"),
        ("/tmp", 126, "denied"),
    ],
)
async def test_a_command_that_cannot_be_started(
    odd: Odd, command: str, code: int, words: str
) -> None:
    """One clear line, and the client's first request is told so by a proper answer."""
    peer = await odd.wrapped(command=[command, "secret"], greet=False)
    told = await peer.ask_line(HELLO)
    assert words in told.error["message"]
    assert await peer.ended() == code
    (line,) = peer.complaint().splitlines()
    assert words in line
    assert "secret" not in line


async def test_a_command_that_cannot_be_started_and_nobody_who_asks(odd: Odd) -> None:
    peer = await odd.wrapped(command=["/no/such/file"], greet=False)
    assert await peer.close() == 127


# --- the client ends ------------------------------------------------------------------------------


async def test_calls_that_outlast_the_patience_after_the_client_left_are_unknown(odd: Odd) -> None:
    peer = await odd.wrapped("--drain-seconds", "0.2")
    peer.call("slow", {"gate": "go"})
    await odd.running()
    await peer.close()
    again = await odd.wrapped()
    assert (await again.call("slow", {"gate": "go"})).code == "outcome_unknown"
    assert len(odd.effects()) == 1


async def test_answers_after_the_input_ended_are_still_sent(odd: Odd) -> None:
    """Half-closed, as `printf … | effectfence wrap` is."""
    peer = await odd.wrapped()
    first, second = peer.call("slow", {"gate": "go"}), peer.call("slow", {"gate": "go"})
    reading = peer.call("look", {"gate": "go"})
    await odd.running()
    peer.end_input()
    odd.open_gate("go")
    assert (await first).text == "receipt 1"
    assert (await second).replay
    assert (await reading).text == "look 1"
    assert await peer.ended() == 0


@pytest.mark.parametrize(
    "flags",
    [(), ("ignores-end",), ("ignores-term",), ("ignores-end", "ignores-term")],
    ids=lambda flags: " ".join(flags) or "polite",
)
@pytest.mark.parametrize("end", ["input", "SIGTERM", "SIGINT", "SIGHUP"])
async def test_the_server_ends_with_its_client(odd: Odd, flags: tuple[str, ...], end: str) -> None:
    peer = await odd.wrapped(flags=flags)
    await peer.call("charge")
    if end == "input":
        peer.end_input()
    else:
        peer.signal(getattr(signal, end))
    code = await peer.ended()
    assert odd.alive() == [], "the server is gone before its proxy is"
    stubborn = {
        (): {0, 143},
        ("ignores-end",): {143},
        ("ignores-term",): {0, 137},
        ("ignores-end", "ignores-term"): {137},
    }
    assert code in stubborn[flags]


@pytest.mark.parametrize("end", ["input", "SIGTERM"])
async def test_a_whole_tree_of_processes_ends(odd: Odd, end: str) -> None:
    """As npx starts them: npm, a shell, the server, which listens to nothing but SIGKILL."""
    inner = " ".join(odd.command("ignores-end", "ignores-term"))
    command = ["sh", "-c", f"sh -c '{inner}; true'; true"]
    peer = await odd.wrapped(command=command)
    await peer.call("charge")
    assert len(odd.alive()) == 4
    if end == "input":
        peer.end_input()
    else:
        peer.signal(signal.SIGTERM)
    await peer.ended()
    assert odd.alive() == []


@pytest.mark.parametrize("end", ["input", "SIGTERM", "the server dies"])
@pytest.mark.parametrize("apart", [False, True], ids=["in its group", "in a session of its own"])
async def test_a_grandchild_that_holds_the_output_open(odd: Odd, end: str, apart: bool) -> None:
    """It delays nobody. One that left the group is nobody's to kill."""
    peer = await odd.wrapped()
    grandchild = int((await peer.call("hold_output", {"apart": apart})).text)
    if end == "input":
        peer.end_input()
    elif end == "SIGTERM":
        peer.signal(signal.SIGTERM)
    else:
        told = await peer.call("die")
        assert told.code == "outcome_unknown"
    await peer.ended()
    assert odd.alive() == ([grandchild] if apart else [])
    if apart:
        os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
async def test_a_signal_while_a_call_is_in_flight(odd: Odd, name: str) -> None:
    """The call has a moment to end; without an answer its outcome is unknown, on record."""
    peer = await odd.wrapped()
    peer.call("slow", {"gate": "go"})
    await odd.running()
    peer.signal(getattr(signal, name))
    await peer.ended()
    assert odd.alive() == []
    again = await odd.wrapped()
    assert (await again.call("slow", {"gate": "go"})).code == "outcome_unknown"
    assert len(odd.effects()) == 1


async def test_a_call_that_ends_in_the_moment_after_a_signal_is_recorded(odd: Odd) -> None:
    peer = await odd.wrapped()
    answer = peer.call("slow", {"gate": "go"})
    await odd.running()
    odd.open_gate("go")
    peer.signal(signal.SIGTERM)
    assert (await answer).text == "receipt 1"
    await peer.ended()
    again = await odd.wrapped()
    assert (await again.call("slow", {"gate": "go"})).replay


async def test_a_second_signal_ends_it_at_once(odd: Odd) -> None:
    peer = await odd.wrapped(flags=["ignores-end", "ignores-term"])
    peer.call("slow", {"gate": "go"})
    await odd.running()
    peer.signal(signal.SIGTERM)
    peer.signal(signal.SIGINT)
    assert await peer.ended() == 137
    assert odd.alive() == []


async def test_signals_at_any_instant_of_the_start_leave_nothing_behind(odd: Odd) -> None:
    for n in range(12):
        peer = await odd.wrapped(greet=False)
        for _ in range(n * 40):
            await asyncio.sleep(0)
        peer.signal(signal.SIGTERM)
        await peer.ended()
        await until(lambda: not odd.alive())


async def test_being_asked_for_statistics_at_any_instant_ends_nothing(odd: Odd) -> None:
    peer = await odd.wrapped(greet=False)
    await until(lambda: len(odd.alive()) == 2)  # the server is started; the rest still loads
    for _ in range(50):
        peer.signal(signal.SIGUSR1)
        await asyncio.sleep(0)
    await peer.hello()
    assert (await peer.call("charge")).text == "receipt 1"


async def test_a_killed_proxy_takes_its_server_along(odd: Odd) -> None:
    """The server's input ends with it; what was in flight is unknown to the next."""
    peer = await odd.wrapped()
    call = peer.call("slow", {"gate": "go"})
    await odd.running()
    await peer.kill()
    with pytest.raises(Gone):
        await call
    await until(lambda: not odd.alive())
    again = await odd.wrapped()
    told = await again.call("slow", {"gate": "go"})
    assert told.code == "outcome_unknown"
    assert len(odd.effects()) == 1


async def test_a_server_that_stands_still_holds_nobody(odd: Odd) -> None:
    """Stopped, its input full: the client leaves, and all is over."""
    peer = await odd.wrapped("--drain-seconds", "0.2")
    (server,) = [pid for pid in odd.alive() if pid != peer.pid]
    os.kill(server, signal.SIGSTOP)
    for n in range(20):
        peer.call("charge", {"n": n, "blob": "x" * 200_000})
    peer.end_input()
    await peer.ended()
    assert odd.alive() == []


async def test_a_client_that_reads_nothing_holds_nobody(odd: Odd) -> None:
    """Its pipe is full, and it leaves."""
    output, theirs = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *wrap("--ledger", str(odd.ledger), "--drain-seconds", "0.2", command=odd.command()),
        stdin=asyncio.subprocess.PIPE,
        stdout=theirs,
        env=odd.env,
        cwd=odd.folder,
    )
    os.close(theirs)
    assert process.stdin is not None
    big = {"name": "big", "arguments": {"bytes": 3_000_000}}
    for n in range(3):
        big["arguments"] = {"bytes": 3_000_000, "n": n}
        line = {"jsonrpc": "2.0", "id": n, "method": "tools/call", "params": big}
        process.stdin.write(json.dumps(line).encode() + b"\n")
    await odd.running(3)
    process.stdin.close()
    await process.wait()
    os.close(output)
    assert odd.alive() == []


# --- files, sockets and nothing at all in place of pipes ------------------------------------------


async def ran(odd: Odd, **files: Any) -> int:
    process = await asyncio.create_subprocess_exec(
        *wrap("--ledger", str(odd.ledger), command=odd.command()),
        env=odd.env,
        cwd=odd.folder,
        **files,
    )
    return await process.wait()


@pytest.mark.parametrize("ends", ["with a newline", "without"])
async def test_input_and_output_may_be_regular_files(odd: Odd, ends: str) -> None:
    asked, answered = odd.folder / "asked", odd.folder / "answered"
    lines = [HELLO, CHARGE, CHARGE.replace(b'"id":1', b'"id":2')]
    asked.write_bytes(b"\n".join(lines) + (b"\n" if ends == "with a newline" else b""))
    with asked.open("rb") as stdin, answered.open("wb") as stdout:
        assert await ran(odd, stdin=stdin, stdout=stdout) == 0
    answers = [json.loads(line) for line in answered.read_bytes().splitlines()]
    assert {answer["id"] for answer in answers} == {0, 1, 2}
    assert len(odd.effects()) == 1


async def test_input_may_be_nothing(odd: Odd) -> None:
    nothing = asyncio.subprocess.DEVNULL
    assert await ran(odd, stdin=nothing, stdout=nothing) == 0
    assert odd.alive() == []


async def test_input_and_output_may_be_sockets(odd: Odd) -> None:
    """As Node.js makes them for its children: one for each direction."""
    asking, asked = socket.socketpair()
    reading, answered = socket.socketpair()
    running = asyncio.ensure_future(ran(odd, stdin=asked, stdout=answered))
    _, writer = await asyncio.open_connection(sock=asking)
    reader, unused = await asyncio.open_connection(sock=reading)
    writer.write(CHARGE + b"\n")
    assert json.loads(await reader.readline())["id"] == 1
    writer.write_eof()
    assert await running == 0
    for each in (asked, answered, writer, unused):
        each.close()
    await asyncio.gather(writer.wait_closed(), unused.wait_closed())


async def test_one_socket_may_be_input_and_output(odd: Odd) -> None:
    """As a super-server gives it."""
    ours, theirs = socket.socketpair()
    running = asyncio.ensure_future(ran(odd, stdin=theirs, stdout=theirs))
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        writer.write(CHARGE + b"\n")
        answer = asyncio.ensure_future(reader.readline())
        await asyncio.wait([answer, running], return_when=asyncio.FIRST_COMPLETED)
        theirs.close()
        assert b"receipt 1" in await answer
        writer.write_eof()
        assert await running == 0
    finally:
        theirs.close()
        writer.close()
        await writer.wait_closed()


async def test_standard_error_may_be_closed(odd: Odd) -> None:
    command = wrap("--ledger", str(odd.ledger), command=odd.command())
    peer = await odd.start(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], greet=True)
    await peer.call("noise")
    assert (await peer.call("charge")).text.startswith("receipt")
    assert await peer.close() == 0
    for line in peer.received:
        assert isinstance(json.loads(line), dict), line
