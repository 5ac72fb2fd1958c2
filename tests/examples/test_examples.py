"""Each example and the storm, run as a user runs them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments, env=None, cwd=ROOT):
    """What a user's shell would see."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **(env or {})},
    )


def fields(text):
    """The storm's `name : value` lines."""
    return dict(re.findall(r"^ *([A-Za-z ]+?) +: +([^←\n]+?) *(?:←.*)?$", text, re.MULTILINE))


def storm(*arguments, **more):
    ran = run("bench.storm", "--json", *arguments, **more)
    assert (ran.returncode, ran.stderr) == (0, "")
    return json.loads(ran.stdout)


# --- examples -------------------------------------------------------------------------------------


def test_the_quickstart_charges_once():
    ran = run("examples.quickstart")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "asked 2000 times, charged 1 time(s)\n"


def test_the_turf_war_executes_one_of_three():
    ran = run("examples.turf_war")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "ADMITTED and run, as seq 1 of cluster:prod-us-east-1" in ran.stdout
    assert "'metrics:prod-us-east-1' at seq 0, the world is at seq 1" in ran.stdout
    assert "does not know what happened in 'cluster:prod-us-east-1'" in ran.stdout
    assert "concurrent: True" in ran.stdout
    assert "Actions proposed: 3   executed: 1" in ran.stdout


def test_a_crash_between_effect_and_commit_is_settled_by_an_operator():
    ran = run("examples.crash_and_restart")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "nobody knows whether 'mail:invoice-42' ran" in ran.stdout
    assert "replayed: {'status': '250 accepted'}" in ran.stdout
    assert ran.stdout.endswith("mails sent: 1\n")


@pytest.mark.rig
def test_a_reconciler_asks_stripe_what_two_dead_workers_did(tmp_path):
    """One charge is found and settled; one is not, is cleared after the grace, and runs once."""
    ran = run(
        "examples.reconcile_stripe",
        env={"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "PYTHONWARNINGS": "error"},
        cwd=tmp_path,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [
        "two workers were killed; charges at Stripe: 1",
        "order 1: refused, its process died",
        "order 2: refused, its process died",
        "asked: settled=1 too early to say no=1",
        "asked after the grace: cleared=1",
        "order 1: {'cents': 4900, 'charge': 'ch_1'}",
        "order 2: {'charge': 'ch_2', 'cents': 4900}",
        "charges at Stripe: 2",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rig
def test_a_celery_task_charges_once(tmp_path):
    """Case 23: one message delivered six times; and a worker process killed in the middle."""
    pytest.importorskip("celery", reason="needs Celery: pip install celery")
    ran = run("examples.celery_charge", env={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "order 1: delivered 6 times, charged 1 time(s)",
        "order 2: its worker was killed; redelivered, the answer is outcome_unknown",
        "order 2: charged 1 time(s)",
        "order 2: settled, delivered again, charged 1 time(s)",
    ]
    assert list(tmp_path.iterdir()) == []


STORY = [
    "replanned: asked 2 times, charged 1 time(s)",
    "nine at once: asked 9 times, charged 1 time(s)",
    "run again: asked 3 times, charged 1 time(s)",
    "interrupted: asked 2 times, charged 1 time(s)",
]


def test_an_agents_tool_charges_once_whatever_its_model_does():
    """Cases 1, 14, 15 and 16; the last in a process of its own, with the same certificate."""
    ran = run("examples.anyio_agent")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line for line in ran.stdout.splitlines() if not line.startswith(" ")] == STORY
    assert "replays so far: 11, charges 3" in ran.stdout
    assert "resumed in a new process: replays 1, the same receipt" in ran.stdout


@pytest.mark.parametrize("name", ["quickstart", "turf_war", "crash_and_restart", "anyio_agent"])
def test_an_example_leaves_nothing_behind(name, tmp_path):
    ran = run(f"examples.{name}", env={"TMPDIR": str(tmp_path)}, cwd=tmp_path)
    assert ran.returncode == 0
    assert list(tmp_path.iterdir()) == []


# --- the storm ------------------------------------------------------------------------------------


def test_a_thousand_racers_charge_once():
    ran = run("bench.storm")
    assert (ran.returncode, ran.stderr) == (0, "")
    told = fields(ran.stdout)
    assert told["attempts"] == "1,000"
    assert told["ACTUAL EXECUTIONS"] == "1"
    assert int(told["served sealed receipt"]) + int(told["told to stand down"]) == 999
    assert "double-charges prevented this run: $48,951.00" in ran.stdout
    assert "ONE execution." in ran.stdout
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--threads", "5"],
        ["--racers", "1", "--waves", "1"],
        ["--ledger", "storm.jsonl"],
        ["--ledger", "storm.jsonl", "--threads", "3"],
        ["--ledger", "storm.jsonl", "--processes", "3", "--threads", "2", "--waves", "10"],
    ],
    ids=" ".join,
)
def test_one_charge_however_the_racers_are_spread(arguments, tmp_path):
    told = storm(*arguments, cwd=tmp_path)
    assert told["held"]
    assert told["executions"] == 1
    assert told["certificates"] == 1
    assert told["executions"] + told["served"] + told["stood_down"] == told["attempts"]


def test_the_storm_wants_an_order_that_was_not_charged_yet(tmp_path):
    storm("--waves", "2", "--ledger", "storm.jsonl", cwd=tmp_path)
    ran = run("bench.storm", "--ledger", "storm.jsonl", cwd=tmp_path)
    assert ran.returncode == 2
    assert "already knows 'charge:order-777' (done)" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "2"], "several processes need a ledger they can share"),
        (["--racers", "0"], "0 is not a positive number"),
        (["--racers", "3", "--threads", "4"], "3 racers can't be shared out among 4 workers"),
    ],
)
def test_wrong_use_of_the_storm_is_said_and_exits_2(arguments, says):
    ran = run("bench.storm", *arguments)
    assert ran.returncode == 2
    assert says in ran.stderr


def test_a_ledger_that_is_damaged_fails_the_storm_in_one_sentence(tmp_path):
    (tmp_path / "bad.jsonl").write_text("not a ledger\n")
    ran = run("bench.storm", "--ledger", "bad.jsonl", cwd=tmp_path)
    assert ran.returncode == 1
    assert "damaged at line 1" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_one_dead_worker_fails_the_storm_clearly(tmp_path):
    ledger = str(tmp_path / "storm.jsonl")
    storming = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bench.storm",
            "--processes=3",
            "--waves=100000",
            "--ledger",
            ledger,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        victim = wait_for_workers(storming.pid, 3)[1]
        time.sleep(1.0)
        os.kill(victim, signal.SIGKILL)
        out, said = storming.communicate(timeout=60)
    finally:
        storming.terminate()
    assert (storming.returncode, out) == (1, "")
    assert f"worker {victim} died (SIGKILL) before it could report; nothing is proven" in said


def wait_for_workers(parent, count):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        workers = [int(child) for child in children if "spawn_main" in command_of(child)]
        if len(workers) == count:
            return workers
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def command_of(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


# --- the storm on a terminal ----------------------------------------------------------------------


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_on_a_terminal_unless_it_is_not_wanted(no_color, coloured):
    pty = pytest.importorskip("pty")
    shown, terminal = pty.openpty()
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    ran = subprocess.run(
        [sys.executable, "-m", "bench.storm", "--waves", "2"],
        cwd=ROOT,
        stdout=terminal,
        env=environment,
        timeout=60,
    )
    os.close(terminal)
    text = os.read(shown, 65536).decode()
    os.close(shown)
    assert ran.returncode == 0
    assert ("\x1b[" in text) is coloured
