"""The same work for many things, on as many processes as there are processors.

1. The answers come in the order of the things, and are those of one process doing it all.
2. Processes are forked only when the rest is worth it, and never from a program with threads.
3. What a child could not do (it was killed, its answer can't be carried) the parent does itself.

Forked, because a child then has the syntax trees and what was evaluated, none of which can be sent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

_WORTH_SECONDS: Final = 0.25
_MOST: Final = 8

Answer = TypeVar("Answer")


def spread(work: Callable[[int], Answer], count: int) -> list[Answer]:
    """`[work(0), …, work(count - 1)]`."""
    done: dict[int, Answer] = {}
    begun = time.perf_counter()
    for at in range(count):
        done[at] = work(at)
        spent = time.perf_counter() - begun
        left = spent / (at + 1) * (count - at - 1)
        if left > _WORTH_SECONDS and at >= 2 and _processes() > 1:
            _forked(work, list(range(at + 1, count)), done)
            break
    return [done[at] if at in done else work(at) for at in range(count)]


def _processes() -> int:
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return 1
    known = getattr(os, "sched_getaffinity", None)
    return min(_MOST, len(known(0)) if known else os.cpu_count() or 1)


def _forked(work: Callable[[int], Answer], left: list[int], done: dict[int, Answer]) -> None:
    """Part the rest: each child takes its share, the parent the first one."""
    shares = [left[at :: _processes()] for at in range(_processes())]
    children = [_child(work, share) for share in shares[1:] if share]
    try:
        for at in shares[0]:
            done[at] = work(at)
    finally:
        for pid, reading in children:
            with contextlib.suppress(Exception), os.fdopen(reading, "rb") as pipe:
                done.update(pickle.load(pipe))
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _child(work: Callable[[int], Answer], share: list[int]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        answers = {at: work(at) for at in share}
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answers, pipe, pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)
