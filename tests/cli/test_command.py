"""The command itself: help, version, doctor, and how it ends."""

import asyncio
import fcntl
import json
import os
import re
import signal
import stat
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from effectfence import _native, doctor
from tests.cli.conftest import fill, start

BY = ("--by", "ada", "--reason", "seen in the books")
COMMANDS = [
    [],
    ["ledger"],
    ["ledger", "verify"],
    ["ledger", "list"],
    ["ledger", "show"],
    ["ledger", "stats"],
    ["ledger", "settle"],
    ["ledger", "clear"],
    ["ledger", "compact"],
    ["serve"],
    ["doctor"],
    ["wrap"],
    ["probe"],
    ["demo"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_that_parses(command, effectfence):
    code, out, err = effectfence(*command, "--help")
    assert (code, err) == (0, "")
    assert re.search(r"^example: effectfence ", out, re.MULTILINE)


def test_the_version_is_that_of_the_distribution(effectfence):
    assert effectfence("--version") == (0, f"effectfence {doctor.version()}\n", "")


def test_without_arguments_at_a_terminal_it_helps():
    pty = pytest.importorskip("pty")
    person, terminal = pty.openpty()
    with start(stdin=terminal) as command:
        out, err = command.communicate(timeout=30)
    os.close(person)
    os.close(terminal)
    assert (command.returncode, err) == (0, "")
    assert out.startswith("usage: effectfence")


def test_a_reader_that_leaves_is_no_error(ledger):
    reading, writing = os.pipe()
    os.close(reading)
    with start("ledger", "list", ledger, stdout=writing) as command:
        os.close(writing)
        _, err = command.communicate(timeout=30)
    assert err == ""
    assert command.returncode == 128 + signal.SIGPIPE


def waits_for_a_lock(process: int) -> bool:
    """By the system's own list: `1: -> FLOCK ADVISORY WRITE <process> …`"""
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(row[1] == "->" and row[5] == str(process) for row in waiting)


def test_an_interrupt_ends_it_quietly_even_while_somebody_holds_the_ledgers_lock(tmp_path):
    asyncio.run(fill(tmp_path / "effects.jsonl"))
    with (tmp_path / "effects.jsonl.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with start("ledger", "clear", tmp_path / "effects.jsonl", "unknown", *BY) as command:
            while not waits_for_a_lock(command.pid):
                time.sleep(0.01)
            command.send_signal(signal.SIGINT)
            try:
                out, err = command.communicate(timeout=30)
            finally:
                command.kill()
    assert (command.returncode, out, err) == (-signal.SIGINT, "", "")


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_says_which_core_is_active(effectfence):
    code, out, err = effectfence("doctor")
    assert (code, err) == (0, "")
    assert _native.describe() in out
    assert "none named" in out


def test_doctor_says_whether_the_mcp_server_can_be_started(effectfence):
    found = json.loads(effectfence("doctor", "--json")[1])["mcp server"]
    assert found == (f"mcp {version('mcp')}" if find_spec("mcp") else found)
    assert find_spec("mcp") or "pip install 'effectfence-asyncio[mcp]'" in found


@pytest.mark.parametrize("core", ["python", *(["c"] if find_spec("effectfence._core") else [])])
def test_doctor_says_why_the_core_is_the_one_it_is(core):
    with start("doctor", "--json", env={**os.environ, "EFFECTFENCE_CORE": core}) as command:
        out, err = command.communicate(timeout=30)
    assert (command.returncode, err) == (0, "")
    assert json.loads(out)["core"].startswith(core)
    assert json.loads(out)["findings"] == []


def test_doctor_of_a_good_ledger_promises_and_touches_nothing(effectfence, ledger):
    before = listing(ledger)
    code, out, _ = effectfence("doctor", ledger)
    assert code == 0
    assert "one effect per intent among all processes of this machine" in out
    assert "-rw-------" in out
    assert "state        whole: " in out
    assert listing(ledger) == before


def test_doctor_of_a_ledger_not_there_yet_makes_none(effectfence, tmp_path):
    code, out, _ = effectfence("doctor", tmp_path / "new" / "effects.jsonl")
    assert code == 0
    assert "not there yet" in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_memory_says_that_it_is_forgotten(effectfence):
    _, out, _ = effectfence("doctor", "memory:")
    assert "within one process, for as long as it lives" in out


def test_doctor_names_the_line_that_mends_permissions(effectfence, ledger):
    Path(ledger).chmod(0o644)
    code, out, _ = effectfence("doctor", ledger)
    assert code == 0
    assert f"warning: others may read what the agents did\n  mend it: chmod 600 {ledger}" in out
    Path(ledger).chmod(0o666)
    code, out, _ = effectfence("doctor", ledger)
    assert code == 1
    assert f"mend it: chmod 600 {ledger}" in out


def test_doctor_names_the_line_that_mends_the_folder(effectfence, ledger):
    folder = Path(ledger).parent
    folder.chmod(0o777)
    code, out, _ = effectfence("doctor", ledger)
    folder.chmod(0o700)
    assert code == 1
    assert f"mend it: chmod go-w {folder}" in out


def test_doctor_finds_damage(effectfence, ledger):
    Path(ledger).write_text("not a ledger\n")
    code, out, _ = effectfence("doctor", ledger)
    assert code == 1
    assert "PROBLEM: " in out
    assert "is damaged at line 1" in out


def test_doctor_says_that_a_file_system_in_memory_forgets(effectfence, monkeypatch, ledger):
    monkeypatch.setattr(doctor, "_file_system", lambda folder: "tmpfs")
    code, out, _ = effectfence("doctor", ledger)
    assert code == 0
    assert "at power-off the ledger is forgotten" in out


def test_doctor_finds_the_other_project_of_that_name(effectfence, monkeypatch):
    version_of = doctor._version_of
    monkeypatch.setattr(
        doctor, "_version_of", lambda name: "0.3" if name == "effectfence" else version_of(name)
    )
    code, out, _ = effectfence("doctor")
    assert code == 1
    assert "it is another project" in out
    assert "mend it: pip uninstall -y effectfence effectfence-asyncio" in out


def test_doctor_takes_the_ledger_from_the_environment(effectfence, monkeypatch, ledger):
    monkeypatch.setenv("EFFECTFENCE_LEDGER", ledger)
    assert json.loads(effectfence("doctor", "--json")[1])["ledger"] == ledger


@pytest.mark.parametrize("arguments", [["a", "b"], ["redis://h"]])
def test_doctor_used_wrongly_exits_2(arguments, effectfence):
    code, out, err = effectfence("doctor", *arguments)
    assert (code, out) == (2, "")
    assert err


def listing(ledger):
    return [
        (path.name, stat.S_IMODE(path.stat().st_mode), path.stat().st_mtime_ns)
        for path in sorted(Path(ledger).parent.iterdir())
    ]
