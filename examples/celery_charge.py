"""A Celery task that charges once: delivered six times, and with its worker killed in the middle.

    pip install celery
    python -m examples.celery_charge

Celery delivers at least once: with `acks_late` a message comes again whenever a worker is lost. A
real worker (prefork, on Celery's file system broker) gets one message six times and charges once.
Another worker process charges and dies of SIGKILL before it can say so; Celery delivers the message
again, and nobody knows: it is not charged again, it waits for somebody who looks and settles it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject
from celery.signals import worker_process_shutdown

from effectfence import FenceError, blocking, current_effect

if "CELERY_CHARGE_FOLDER" not in os.environ:  # the worker finds it there
    os.environ["CELERY_CHARGE_FOLDER"] = tempfile.mkdtemp(prefix="celery-charge-")
FOLDER = Path(os.environ["CELERY_CHARGE_FOLDER"])
QUEUE, CHARGES, ANSWERS = FOLDER / "queue", FOLDER / "charges.jsonl", FOLDER / "answers.jsonl"
QUEUE.mkdir(exist_ok=True)

app = Celery("charges", broker="filesystem://")
app.conf.update(
    broker_transport_options={
        "data_folder_in": str(QUEUE),
        "data_folder_out": str(QUEUE),
        "control_folder": str(FOLDER / "control"),
        "polling_interval": 0.05,
    },
    task_acks_late=True,  # a message is done when its task is, not when it begins …
    task_reject_on_worker_lost=True,  # … and comes again if its worker process dies
    worker_prefetch_multiplier=1,
    worker_lost_wait=1.0,
)

# Opened by each worker process at its first task: Celery forks them after this module is imported.
fence = blocking.per_process(FOLDER / "effects.jsonl")
worker_process_shutdown.connect(lambda **_: fence.close(), weak=False)


@fence.fenced(intent="charge:{order_id}", domain="order:{order_id}")
def charge_card(order_id: str, cents: int) -> dict[str, str]:
    """What must happen once: the provider's API, which here is a line in a file."""
    key = current_effect().idempotency_key  # for a provider that takes one
    note(CHARGES, order=order_id, cents=cents, key=key)
    if order_id == "order-2":
        os.kill(os.getpid(), signal.SIGKILL)  # the charge is made, and nobody is left to say so
    return {"charge": f"ch-{key[:8]}"}


@app.task(bind=True, max_retries=20)
def charge(task: Task, order_id: str, cents: int) -> None:
    """One delivery of one message."""
    try:
        note(ANSWERS, order=order_id, answer=charge_card(order_id, cents))
    except FenceError as error:
        if error.ran is False:  # another delivery runs it, or the ledger is away: later, then
            raise task.retry(exc=error, countdown=1) from error
        note(ANSWERS, order=order_id, answer=error.code)
        raise Reject(str(error), requeue=False) from error  # a person's turn; no retry helps


# --- the story ------------------------------------------------------------------------------------


def main() -> None:
    command = "-m celery -A examples.celery_charge worker -c 2 -l CRITICAL"
    quiet = "--without-gossip --without-mingle --without-heartbeat"
    worker = subprocess.Popen(
        [sys.executable, *command.split(), *quiet.split()],
        env={**os.environ, "TMPDIR": str(FOLDER), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(6):
            charge.apply_async(("order-1", 4900), task_id="the-one-message")
        wait_for(lambda: len(answers("order-1")) == 6, worker)
        print(f"order 1: delivered 6 times, charged {len(charges('order-1'))} time(s)")
        assert answers("order-1") == [answers("order-1")[0]] * 6

        charge.delay("order-2", 100)
        wait_for(lambda: answers("order-2"), worker)
        print(f"order 2: its worker was killed; redelivered, the answer is {answers('order-2')[0]}")
        print(f"order 2: charged {len(charges('order-2'))} time(s)")

        with blocking.open(FOLDER / "effects.jsonl") as operator:
            for record in operator.intents("unknown"):
                assert record.idempotency_key == charges("order-2")[0]["key"], "else: clear"
                receipt = {"charge": f"ch-{record.idempotency_key[:8]}"}
                operator.settle(record.intent, receipt, by="ada", reason="in the provider's log")

        charge.delay("order-2", 100)
        wait_for(lambda: len(answers("order-2")) == 2, worker)
        print(f"order 2: settled, delivered again, charged {len(charges('order-2'))} time(s)")
        assert answers("order-2")[1] == receipt
    finally:
        os.killpg(worker.pid, signal.SIGKILL)  # nothing is under way; a shutdown takes Celery 5 s
        worker.wait()
        shutil.rmtree(FOLDER)


def note(file: Path, **line: Any) -> None:
    with file.open("a") as log:
        log.write(json.dumps(line) + "\n")


def lines(file: Path, order_id: str) -> list[dict[str, Any]]:
    written = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, written) if line["order"] == order_id]


def charges(order_id: str) -> list[dict[str, Any]]:
    return lines(CHARGES, order_id)


def answers(order_id: str) -> list[Any]:
    return [line["answer"] for line in lines(ANSWERS, order_id)]


def wait_for(condition: Callable[[], object], worker: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert worker.poll() is None, "the worker ended"
        time.sleep(0.05)


if __name__ == "__main__":
    # One module, whether it is the program or imported by the worker: tasks are known by name.
    from examples import celery_charge

    celery_charge.main()
