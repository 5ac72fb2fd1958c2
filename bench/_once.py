"""once-kernel 0.2.1 as the others' measure. It keeps a result for a key; no domains, no read sets,
no certificates. Its SQLite store comes with `synchronous=NORMAL`, which forgets the last commits in
a power cut; `FULL` is the promise that the file ledger makes."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

try:
    from once import AsyncOnce, Once
    from once.sqlite import SqliteStore
except ImportError as error:  # the extra `bench`
    raise SystemExit(f"{error}: pip install once-kernel==0.2.1") from None

__all__ = ["AsyncOnce", "Once", "sqlite_once"]


class _FullSqlite(SqliteStore):  # type: ignore[misc]  # it has no types
    """Each of its connections synced at every commit."""

    def _conn(self) -> sqlite3.Connection:
        fresh = getattr(self._local, "conn", None) is None
        connection: sqlite3.Connection = super()._conn()
        if fresh:
            connection.execute("PRAGMA synchronous=FULL")
        return connection


def sqlite_once(folder: Path, *, full: bool) -> Any:
    """A new database through `AsyncOnce`."""
    kind = _FullSqlite if full else SqliteStore
    number = len(list(folder.glob("once-*.db")))
    return AsyncOnce(Once(kind(str(folder / f"once-{number}.db"))))
