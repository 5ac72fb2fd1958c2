"""What really happened, counted by the fake tools themselves and never by the fence.

One line per effect, appended with one `write` to a file opened with O_APPEND: lines of any number
of threads and processes neither tear nor overwrite each other.
"""

from __future__ import annotations

import os
from pathlib import Path


class EffectLog:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def append(self, what: str) -> None:
        """The effect: from here on it has happened."""
        os.write(self._descriptor, f"{what}\n".encode())

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def close(self) -> None:
        os.close(self._descriptor)
