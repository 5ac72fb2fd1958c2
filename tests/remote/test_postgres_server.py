"""What a PostgreSQL server is asked before it is relied on, and how the schema comes about."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from effectfence import EffectFence, LedgerUnavailable
from effectfence.stores.contract import ABSENT, Applied, Change, Put
from effectfence.stores.postgres import PostgresStore
from effectfence.stores.postgres_server import VERSION, parse, schema_sql
from tests.conftest import asked, claimed
from tests.engines import PostgresServer
from tests.remote.opened import opened

pytestmark = pytest.mark.rig


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.schema_url()


def schema_of(url: str) -> str:
    return url.partition("?schema=")[2]


def as_user(url: str, user: str) -> str:
    return url.replace("postgres@", f"{user}@", 1)


@contextmanager
def configured(server: PostgresServer, setting: str, value: str) -> Iterator[None]:
    """A setting that the whole server has for a while."""
    server.sql(f"ALTER SYSTEM SET {setting} = '{value}'")
    server.sql("SELECT pg_reload_conf()")
    server.until(lambda: server.sql(f"SHOW {setting}") == value)
    try:
        yield
    finally:
        server.sql(f"ALTER SYSTEM RESET {setting}")
        server.sql("SELECT pg_reload_conf()")
        server.until(lambda: server.sql(f"SHOW {setting}") != value)


# Settings


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes", "synchronous_commit"])
async def test_a_server_that_may_forget_is_refused_by_its_setting(
    postgres_server: PostgresServer, url: str, setting: str
) -> None:
    with (
        configured(postgres_server, setting, "off"),
        pytest.raises(LedgerUnavailable, match=f"{setting}=off") as caught,
    ):
        await EffectFence.open(url)
    assert caught.value.ran is False
    assert postgres_server.sql(f"SELECT to_regnamespace('{schema_of(url)}')") == ""


async def test_a_setting_that_is_turned_off_later_is_refused_from_then_on(
    postgres_server: PostgresServer, url: str
) -> None:
    async with opened(f"{url}&timeout=1") as fence:
        prepared = await claimed(fence)
        with (
            configured(postgres_server, "synchronous_commit", "off"),
            pytest.raises(LedgerUnavailable, match="synchronous_commit is off") as caught,
        ):
            await fence.prepare(asked("charge:o2"))
        assert caught.value.ran is False
        await fence.commit(prepared, "paid")


async def test_a_weakness_is_said_loudly_and_refused_where_durability_is_required(
    postgres_server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    postgres_server.sql("ALTER DATABASE postgres SET synchronous_commit = 'remote_write'")
    try:
        with configured(postgres_server, "synchronous_standby_names", "nobody"):
            with pytest.raises(LedgerUnavailable, match="synchronous_commit=remote_write"):
                await PostgresStore.open(f"{url}&timeout=1", require_durable=True)
            with caplog.at_level(logging.WARNING), pytest.raises(LedgerUnavailable):
                await PostgresStore.open(f"{url}&timeout=1")  # its commit waits for nobody's answer
        assert "synchronous_commit=remote_write" in caplog.text
    finally:
        postgres_server.sql("ALTER DATABASE postgres RESET synchronous_commit")


async def test_another_encoding_is_refused(postgres_server: PostgresServer, url: str) -> None:
    if not postgres_server.sql("SELECT FROM pg_database WHERE datname = 'latin'"):
        postgres_server.sql("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(LedgerUnavailable, match="encoding LATIN1; UTF8 is needed"):
        await PostgresStore.open(url.replace("/postgres?", "/latin?"))


async def test_another_isolation_is_not_inherited(
    postgres_server: PostgresServer, url: str
) -> None:
    with configured(postgres_server, "default_transaction_isolation", "serializable"):
        async with opened(url) as fence:
            await fence.commit(await claimed(fence), "paid")
        with pytest.raises(LedgerUnavailable, match="default_transaction_isolation=serializable"):
            await PostgresStore.open(f"{url}&pgbouncer=true")


# The schema


async def test_racing_creators_make_one_ledger(url: str) -> None:
    stores = await asyncio.gather(*(PostgresStore.open(url) for _ in range(8)))
    assert len({store.epoch for store in stores}) == 1
    for store in stores:
        await store.aclose()


async def test_a_newer_schema_is_refused_and_left_alone(
    postgres_server: PostgresServer, url: str
) -> None:
    schema = schema_of(url)
    postgres_server.sql(f"{schema_sql(schema)}; UPDATE {schema}.meta SET version = {VERSION + 1}")
    with pytest.raises(LedgerUnavailable, match=f"has version {VERSION + 1}.*update the library"):
        await EffectFence.open(url)
    assert postgres_server.sql(f"SELECT version FROM {schema}.meta") == str(VERSION + 1)


async def test_an_older_schema_is_brought_up_to_date_with_what_it_holds(
    postgres_server: PostgresServer, url: str
) -> None:
    schema = schema_of(url)
    first_step = schema_sql(schema).partition("-- Compare some records")[0]
    row = "'a', 7, 't', 3, 0, 'l', 'body', 'Infinity', 1"
    postgres_server.sql(f"{first_step}; INSERT INTO {schema}.records VALUES ({row})")
    epoch = postgres_server.sql(f"SELECT epoch FROM {schema}.meta WHERE version = 1")
    store = await PostgresStore.open(url)
    found = (await store.load(["a"])).records["a"]
    assert store.epoch == epoch
    assert found is not None
    assert (found.version, found.tag, found.body) == (7, "t", b"body")
    await store.aclose()


async def test_a_role_that_may_not_create_is_told_how_and_then_needs_little(
    postgres_server: PostgresServer, url: str
) -> None:
    schema = schema_of(url)
    role = f"role_{schema}"
    postgres_server.sql(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(LedgerUnavailable, match="ledger init --print-sql") as caught:
        await PostgresStore.open(as_user(url, role))
    assert f"--schema {schema}" in str(caught.value)
    postgres_server.sql(
        f"{schema_sql(schema)}; GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT, INSERT, "
        f"UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}"
    )
    async with opened(as_user(url, role)) as fence:
        await fence.commit(await claimed(fence), "paid")
        await fence.sweep()


async def test_two_schemas_of_one_database_know_nothing_of_each_other(
    postgres_server: PostgresServer,
) -> None:
    one = await PostgresStore.open(postgres_server.schema_url())
    two = await PostgresStore.open(postgres_server.schema_url())
    change = Change({"a": ABSENT}, (Put("a", tag="t"),))
    assert one.epoch != two.epoch
    assert isinstance(await one.swap(change), Applied)
    assert isinstance(await two.swap(change), Applied)
    await one.aclose()
    await two.aclose()


async def test_another_ledger_in_the_same_place_is_not_taken_for_this_one(
    postgres_server: PostgresServer, url: str
) -> None:
    """A restored or emptied database: the tickets of the one before must not speak there."""
    schema = schema_of(url)
    async with opened(f"{url}&timeout=1") as fence:
        prepared = await claimed(fence)
        postgres_server.sql(f"DROP SCHEMA {schema} CASCADE; {schema_sql(schema)}")
        hang_up(postgres_server)
        with pytest.raises(LedgerUnavailable, match="another ledger stands there"):
            await fence.prepare(asked("charge:o2"))
        with pytest.raises(LedgerUnavailable):
            await fence.commit(prepared, "paid")


def hang_up(server: PostgresServer) -> None:
    server.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name LIKE 'effectfence%'"
    )


async def test_connections_that_are_ended_between_calls_are_not_noticed(
    postgres_server: PostgresServer, url: str
) -> None:
    async with opened(url) as fence:
        for number in range(5):
            prepared = await claimed(fence, intent=f"charge:{number}")
            hang_up(postgres_server)
            await fence.commit(prepared, "paid")
            hang_up(postgres_server)


# Addresses


@pytest.mark.parametrize(
    "options", ["schema=A", "schema=a-b", f"schema={'x' * 41}", "pool=0", "timeout=nan", "pool=x"]
)
def test_an_option_that_means_nothing_is_refused(options: str) -> None:
    with pytest.raises(ValueError, match=r"schema|pool"):
        parse(f"postgresql://ann:s3cr3t@host/db?{options}")


async def test_no_credential_is_shown_by_an_error_a_name_or_a_repr(
    postgres_server: PostgresServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = url.replace("postgres@", "ghost:s3cr3t@", 1)
    shown = [repr(parse(secret)), parse(secret).name]
    with pytest.raises(LedgerUnavailable) as refused:
        await EffectFence.open(secret)
    with pytest.raises(LedgerUnavailable) as nowhere:
        await EffectFence.open("postgresql://ghost:s3cr3t@127.0.0.1:1/db?timeout=1")
    with pytest.raises(LedgerUnavailable) as odd:
        await EffectFence.open(f"{secret}&sslmode=s3cr3t-mode")
    for error in (refused, nowhere, odd):
        assert error.value.ran is False
        shown += [str(error.value), repr(error.value)]
    assert "ghost" in str(refused.value), "whom the server refused is worth knowing"
    assert not any("s3cr3t@" in text or ":s3cr3t" in text for text in (*shown, caplog.text))


async def test_the_driver_takes_its_own_options_from_the_address(
    postgres_server: PostgresServer, url: str
) -> None:
    store = await PostgresStore.open(f"{url}&sslmode=disable&work_mem=65kB")
    rows = await store._session()._ask_server("SHOW work_mem")
    assert rows[0][0] == "65kB"
    await store.aclose()


# Processes


async def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(url: str) -> None:
    async with opened(url) as fence:
        prepared = await claimed(fence)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                fence._shared.store.load(["a"]).send(None)  # type: ignore[attr-defined]
            except LedgerUnavailable as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await fence.commit(prepared, "paid")


async def test_the_pool_is_bounded(postgres_server: PostgresServer, url: str) -> None:
    async with opened(f"{url}&pool=2") as fence:
        name = schema_of(url)
        await asyncio.gather(*(claimed(fence, intent=f"i{n}", domain=f"d{n}") for n in range(300)))
        store = fence._shared.store
        assert isinstance(store, PostgresStore)
        assert len(store._session()._links) <= 2, name


async def test_a_driver_error_on_the_way_is_told_as_such(url: str) -> None:
    store = await PostgresStore.open(url)
    with pytest.raises(ValueError, match="NUL"):
        await store.swap(Change({}, (Put("a\0b"),)))
    with pytest.raises(ValueError, match="NUL, or more than 2600 bytes"):
        await store.swap(Change({}, (Put("k" * 3000),)))
    with pytest.raises(ValueError, match="put twice"):
        await store.swap(Change({}, (Put("a"), Put("a"))))
    assert isinstance(await store.swap(Change({}, (Put("a"),))), Applied)
    await store.aclose()
    with pytest.raises(LedgerUnavailable, match="closed"):
        await store.load(["a"])


def test_the_page_names_every_option_and_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "postgres.md").read_text("utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    plain = parse("postgresql://h/d")
    assert told == {
        "schema": plain.schema,
        "pool": str(plain.pool),
        "timeout": f"{plain.timeout:g}",
        "pgbouncer": str(plain.pooled).lower(),
    }
