"""Who waits for which key in this process: futures of any event loop, woken from any thread.

Not synchronised: whoever owns the table owns this too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Watchers:
    def __init__(self) -> None:
        self.keys: dict[str, dict[asyncio.Future[None], None]] = {}

    def add(self, key: str) -> asyncio.Future[None]:
        """A future of the running loop that is done once `key` was written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.keys.setdefault(key, {})[future] = None  # in order: first come, first woken
        return future

    def remove(self, key: str, future: asyncio.Future[None]) -> None:
        futures = self.keys.get(key)
        if futures is not None:
            futures.pop(future, None)
            if not futures:
                del self.keys[key]

    def wake(self, written: Iterable[str]) -> None:
        """Wake everybody who waits for one of these keys."""
        for key in written:
            for future in self.keys.pop(key, ()):
                wake(future)


def wake(future: asyncio.Future[None]) -> None:
    """Finish a future from any thread; one whose loop is closed has nobody left to tell."""
    try:
        future.get_loop().call_soon_threadsafe(_finish, future)
    except RuntimeError:
        return


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
