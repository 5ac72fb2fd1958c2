"""The library with one promise broken, planted in a child by its bootstrap; never by the library.

Each must be caught by the rig that is there for it, or that rig is blind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from effectfence import rules
from effectfence.stores import file, ledger_file
from effectfence.stores.file import FileStore
from effectfence.stores.ledger_file import LedgerFile
from effectfence.stores.machine import Machine


def no_fsync() -> None:
    """What was written is called durable."""
    Machine.sync_data = Machine.sync = lambda self, descriptor: None  # type: ignore[method-assign]


def acknowledged_before_fsync() -> None:
    """Each batch is answered at once and synced with the next one."""
    sync_data = Machine.sync_data
    due: list[int] = []

    def later(self: Machine, descriptor: int) -> None:
        if due:
            sync_data(self, descriptor)
        due.append(descriptor)

    Machine.sync_data = later  # type: ignore[method-assign]


def retry_after_failed_fsync() -> None:
    """The second call "succeeds": the kernel has dropped what the first could not write."""
    for name in ("sync_data", "sync"):
        setattr(Machine, name, _twice(getattr(Machine, name)))


def _twice(sync: Callable[[Machine, int], None]) -> Callable[[Machine, int], None]:
    def twice(self: Machine, descriptor: int) -> None:
        try:
            sync(self, descriptor)
        except OSError:
            sync(self, descriptor)

    return twice


def replay_not_yet_durable() -> None:
    """What a dead process wrote is told without having been synced."""
    LedgerFile._sync_or_die = lambda self: None  # type: ignore[method-assign]


def dead_holder_is_free() -> None:
    """What a dead process held is taken never to have run."""
    state_of = rules.state_of

    def forgetful(*args: Any, gone: bool) -> rules.State:
        return rules.State.ABSENT if gone else state_of(*args, gone=gone)

    rules.state_of = forgetful


def answered_before_the_write() -> None:
    """Callers are told at once; the batch goes into the file a moment later."""
    decide = FileStore._decide

    def early(self: FileStore, *args: Any) -> Any:
        answered, contents, undo = decide(self, *args)
        if contents:
            file._deliver(answered)
            time.sleep(0.001)
        return answered, contents, undo

    FileStore._decide = early  # type: ignore[method-assign]


def folder_not_synced() -> None:
    """A new file's name is taken to be on the disk with the file."""
    ledger_file.sync_folder = lambda path, machine: None


MUTANTS: dict[str, Callable[[], Any]] = {
    mutant.__name__: mutant
    for mutant in (
        no_fsync,
        acknowledged_before_fsync,
        answered_before_the_write,
        retry_after_failed_fsync,
        replay_not_yet_durable,
        folder_not_synced,
        dead_holder_is_free,
    )
}
