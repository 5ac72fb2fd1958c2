"""Which store a ledger's name means: `memory:`, a path, or the address of a database.

1. A store's module, and the driver that it needs, is imported when it is asked for; a driver that
   is not installed is asked for by name.
2. No error shows what an address holds beside the place (`address.shown`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from effectfence.errors import LedgerUnavailable
from effectfence.stores.address import scheme_of, shown
from effectfence.stores.contract import Store
from effectfence.stores.memory import MemoryStore

CheckBody = Callable[[str, str, Any], None]

ENGINES: Final = {
    "postgresql": ("postgres", "PostgresStore"),
    "postgres": ("postgres", "PostgresStore"),
    "redis": ("redis", "RedisStore"),
    "rediss": ("redis", "RedisStore"),
    "valkey": ("redis", "RedisStore"),
    "valkeys": ("redis", "RedisStore"),
    "unix": ("redis", "RedisStore"),
}
"""Scheme -> the module in `effectfence.stores` (and the extra that it needs), and its class."""

_DRIVERS: Final = {"postgres": "asyncpg", "redis": "redis"}


async def open_store(
    ledger: str,
    *,
    check_body: CheckBody | None = None,
    accept_rollback: bool = False,
    require_durable: bool = False,
) -> Store:
    """The store that `ledger` names, opened.

    `require_durable` refuses what may forget an outcome that it acknowledged, by its own settings.
    Raises `LedgerUnavailable` or `LedgerCorrupt`, and `ValueError` for a name that means nothing.
    """
    if not ledger:
        raise ValueError("the ledger's name is empty; a path or 'memory:' is wanted")
    if ledger == "memory:":
        if require_durable:
            raise ValueError(
                "memory: forgets everything with its process, and require_durable was asked for; "
                "name a path, or a database"
            )
        return MemoryStore()
    if scheme := scheme_of(ledger):
        store: Store = await _engine(scheme, ledger).open(ledger, require_durable=require_durable)
        return store
    from effectfence.stores.file import FileStore

    return await FileStore.open(ledger, check_body=check_body, accept_rollback=accept_rollback)


def _engine(scheme: str, ledger: str) -> Any:
    """The store's class; its module is there even where its driver is not."""
    if scheme not in ENGINES:
        raise ValueError(
            f"no store for {scheme}:// in this version; a path, 'memory:', postgresql:// or "
            "redis:// is wanted"
        )
    name, kind = ENGINES[scheme]
    try:
        return getattr(import_module(f"effectfence.stores.{name}"), kind)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == _DRIVERS[name]:
            raise _missing(name, ledger) from None
        if error.name == f"effectfence.stores.{name}":
            raise ValueError(f"no store for {scheme}:// in this version") from None
        raise


def _missing(extra: str, ledger: str) -> LedgerUnavailable:
    return LedgerUnavailable(
        ledger=shown(ledger),
        reason=f"{_DRIVERS[extra]} is not installed: pip install 'effectfence-asyncio[{extra}]'",
    )
