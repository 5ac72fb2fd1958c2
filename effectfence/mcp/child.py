"""The wrapped server's process: started, watched, and ended with all that it started.

Invariants:

1. It runs in a process group of its own, and the whole group is ended in bounded time: its input is
   closed, then SIGTERM, then SIGKILL.
2. It is spawned before anything heavy is imported; this module imports little.
3. `exited` is set by a thread that waits for it, so an exit is seen also while somebody else (a
   grandchild) holds its output open.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from effectfence.mcp.pipes import first

TERM_SECONDS: Final = 2.0
"""From the end of its input to SIGTERM, and from there to SIGKILL."""


class Child:
    """Raises `OSError` when the command can't be started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = os.path.basename(command[0])
        self._process = subprocess.Popen(
            command,
            env=env,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin = os.dup(self._process.stdin.fileno())
        self.stdout = os.dup(self._process.stdout.fileno())
        self._process.stdin.close()
        self._process.stdout.close()

    def watch(self) -> asyncio.Event:
        """Set on the running loop when the process has ended."""
        self.exited = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self._process.wait()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.exited.set)

        threading.Thread(target=wait, name="effectfence-child", daemon=True).start()
        return self.exited

    @property
    def pid(self) -> int:
        """Also the number of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 and the signal's number for one that was killed."""
        code = self._process.poll()
        if code is None:
            return 1
        return 128 - code if code < 0 else code

    def says_how_it_ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return "closed its output"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def signal(self, number: int) -> None:
        """To the whole group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def end(self, grace_seconds: float, term_seconds: float = TERM_SECONDS) -> None:
        """End the group; its input is closed by now. Whoever ends by itself has `grace_seconds`."""
        if grace_seconds:
            await self._exits_within(grace_seconds)
        if self._group_is_there():
            self.signal(signal.SIGTERM)
            await self._group_leaves_within(term_seconds)
        self.signal(signal.SIGKILL)
        await self._exits_within(TERM_SECONDS)

    async def _exits_within(self, seconds: float) -> None:
        await first(self.exited, seconds=seconds)

    async def _group_leaves_within(self, seconds: float) -> None:
        """Nobody tells when a grandchild has ended."""
        ends_at = time.monotonic() + seconds
        while self._group_is_there() and time.monotonic() < ends_at:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)

    def _group_is_there(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def environment(choices: list[str]) -> dict[str, str]:
    """Ours, with what `--env` says."""
    env = dict(os.environ)
    for choice in choices:
        name, given, value = choice.partition("=")
        if given:
            env[name] = value
    return env
