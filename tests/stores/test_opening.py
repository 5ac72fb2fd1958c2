"""Which store a ledger's name means, and what of an address is ever shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from effectfence import EffectFence, LedgerUnavailable
from effectfence.stores import opening
from effectfence.stores.address import scrubbed, shown
from effectfence.stores.file import FileStore
from effectfence.stores.memory import MemoryStore
from effectfence.stores.opening import open_store

SECRET = "postgresql://ann:s3cr%40t@db1:5432,db2/app?schema=fence&password=oth3r&sslmode=require"


async def test_a_path_is_a_file_and_memory_is_memory(tmp_path: Path) -> None:
    assert isinstance(await open_store("memory:"), MemoryStore)
    store = await open_store(str(tmp_path / "effects.jsonl"), require_durable=True)
    assert isinstance(store, FileStore)
    await store.aclose()


async def test_memory_is_refused_where_durability_is_required() -> None:
    with pytest.raises(ValueError, match="forgets everything"):
        await EffectFence.open(require_durable=True)


@pytest.mark.parametrize("ledger", ["mysql://u:s3cr3t@h/d", "http://u:s3cr3t@h/"])
async def test_a_scheme_without_a_store_is_refused_by_its_name_alone(ledger: str) -> None:
    with pytest.raises(ValueError, match=r"no store for (mysql|http)://") as caught:
        await open_store(ledger)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("ledger", "driver"),
    [("postgresql://u:s3cr3t@h/d", "asyncpg")],
)
async def test_a_missing_driver_is_asked_for_by_its_extra(
    ledger: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = opening.ENGINES[ledger.split("://")[0]][0]
    for name in [name for name in sys.modules if name.startswith(f"effectfence.stores.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(LedgerUnavailable) as caught:
        await open_store(ledger)
    assert caught.value.ran is False
    assert f"pip install 'effectfence-asyncio[{module}]'" in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_an_address_is_shown_without_credentials() -> None:
    assert shown(SECRET) == "postgresql://db1:5432,db2/app?schema=fence"
    assert shown("rediss://:s3cr3t@cache:6379/0?prefix=a") == "rediss://cache:6379/0?prefix=a"
    assert shown("unix:///run/redis.sock?db=2&password=x") == "unix:///run/redis.sock?db=2"


def test_what_a_driver_says_is_shown_without_credentials() -> None:
    said = scrubbed(f"invalid {SECRET}: for ann 's3cr@t' (s3cr%40t, oth3r)", SECRET)
    assert said == "invalid ***: for ann '***' (***, ***)"
