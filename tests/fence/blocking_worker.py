"""Programs that use a blocking fence as users' programs do, to be ended in ways of their own.

`python -m tests.fence.blocking_worker JOB LEDGER`. What an effect did is a line in a log beside the
ledger, which knows nothing of the fence.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from effectfence import EffectRequest, LedgerUnavailable, background, blocking

CHARGE = EffectRequest(intent="charge:o1", domain="order:o1", tool="charge", agent="billing")


def take_effect(ledger: Path) -> dict[str, int]:
    with ledger.with_suffix(".effects").open("a") as log:
        log.write(f"{os.getpid()}\n")
    return {"charge": os.getpid()}


def exit_while_a_thread_hangs(ledger: Path) -> None:
    background.DRAIN_SECONDS = 0.2
    fence = blocking.open(ledger)
    begun = threading.Event()

    def hang() -> None:
        take_effect(ledger)
        begun.set()
        threading.Event().wait()

    threading.Thread(target=lambda: fence.run(CHARGE, hang), daemon=True).start()
    begun.wait()


def exit_while_a_thread_ends(ledger: Path) -> None:
    fence = blocking.open(ledger)
    begun, exiting = threading.Event(), threading.Event()

    def end() -> dict[str, int]:
        begun.set()
        exiting.wait()
        return take_effect(ledger)

    threading.Thread(target=lambda: fence.run(CHARGE, end), daemon=True).start()
    begun.wait()
    atexit.register(exiting.set)  # before the fence is closed: the last registered runs first


def exit_and_then_ask(ledger: Path) -> None:
    def ask() -> None:
        try:
            fence.run(CHARGE, take_effect, ledger)
        except LedgerUnavailable as error:
            print(error.ran, error.reason)

    def open_late() -> None:
        try:
            blocking.open(ledger)
        except LedgerUnavailable as error:
            print(error.ran, error.reason)

    atexit.register(open_late)
    atexit.register(ask)
    fence = blocking.open(ledger)  # first registered, last run: it is closed before they ask


def race_in_forks(ledger: Path) -> None:
    """Eight workers of a pre-fork server, whose module made the fence before they were forked."""
    fence = blocking.per_process(ledger)

    @fence.fenced(intent="charge:{order}")
    def charge(order: str) -> dict[str, int]:
        return take_effect(ledger)

    gate, opener = os.pipe()

    def work() -> None:
        os.close(opener)
        os.read(gate, 1)  # until the last writer closes
        receipts: list[dict[str, int]] = []
        threads = [threading.Thread(target=lambda: receipts.append(charge("o1"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert receipts == [receipts[0]] * 4, receipts
        fence.close()

    children = [forked(work) for _ in range(8)]
    os.close(opener)
    print([waited(child) for child in children])


def fork_after_opening(ledger: Path) -> None:
    fence, each = blocking.open(ledger), blocking.per_process(ledger)
    fence.run(CHARGE, take_effect, ledger)
    each.run(CHARGE, take_effect, ledger)

    def child() -> None:
        with pytest.raises(LedgerUnavailable, match="opened before a fork") as refused:
            fence.prepare(CHARGE)
        assert refused.value.ran is False
        fence.close()  # nothing of ours
        assert each.run(CHARGE, take_effect, ledger).result == {"charge": os.getppid()}
        each.close()
        with blocking.open(ledger) as own:
            assert own.run(CHARGE, take_effect, ledger).result == {"charge": os.getppid()}

    def unwinding() -> None:
        """A child that is forked inside a body, and leaves through it."""
        other = CHARGE.model_copy(update={"intent": "other", "domain": "other"})
        with fence.effect(other) as attempt:
            grandchild = os.fork()
            if not grandchild:
                raise SystemExit(5)
            assert waited(grandchild) == 5
            attempt.result = 1
        record = fence.lookup("other")
        assert record is not None
        assert record.state == "done"

    assert waited(forked(child)) == 0
    unwinding()
    fence.run(CHARGE, take_effect, ledger)  # the parent's loop goes on
    print("done")


def forked(work: Callable[[], None]) -> int:
    """A child that ends as programs end, with its handlers at exit."""
    child = os.fork()
    if not child:
        work()
        sys.exit(0)
    return child


def waited(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


JOBS: dict[str, Callable[[Path], None]] = {
    job.__name__: job
    for job in (
        exit_while_a_thread_hangs,
        exit_while_a_thread_ends,
        exit_and_then_ask,
        race_in_forks,
        fork_after_opening,
    )
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](Path(sys.argv[2]))
