"""Behind PgBouncer, which hands out connections by the transaction."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from effectfence import LedgerUnavailable, Replay
from effectfence.stores.postgres import PostgresStore
from tests.conftest import asked, claimed
from tests.engines import PostgresServer, Server, free_port, server_folder
from tests.remote.opened import opened

pytestmark = pytest.mark.rig


class PgBouncer(Server):
    """In front of `server`, two connections to it for everybody."""

    def __init__(self, server: PostgresServer) -> None:
        program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if program is None:
            pytest.skip("no PgBouncer: apt-get install pgbouncer")
        folder = server_folder("pgbouncer")
        self.port = free_port()
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port} user={server.user}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
        )
        config.chmod(0o644)
        super().__init__(folder, [program, str(config)])
        self.spawn()

    def url_of(self, url: str, server: PostgresServer) -> str:
        return url.replace(f":{server.port}/", f":{self.port}/")


@pytest.fixture
def pooler(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    pooler = PgBouncer(postgres_server)
    yield pooler
    pooler.kill()
    shutil.rmtree(pooler.folder, ignore_errors=True)


@pytest.fixture
def url(postgres_server: PostgresServer, pooler: PgBouncer) -> str:
    """Told what is between; without a word of it the next test says what is said."""
    return pooler.url_of(postgres_server.schema_url(), postgres_server) + "&sslmode=disable"


async def ready(url: str) -> None:
    """Until the pooler listens."""
    for _ in range(600):
        try:
            await (await PostgresStore.open(url)).aclose()
            return
        except LedgerUnavailable as refused:
            error = refused
            if "can't be opened" not in str(refused):
                raise
            await asyncio.sleep(0.02)
    raise AssertionError(f"it does not come up: {error}")


async def test_told_of_the_pooler_it_fences_and_wakes(url: str) -> None:
    url += "&pgbouncer=true"
    await ready(url)
    async with opened(url) as one, opened(url) as two:
        prepared = await claimed(one)
        waiting = [asyncio.create_task(two.prepare(asked(), wait_seconds=60)) for _ in range(20)]
        tickets = await asyncio.gather(
            *(claimed(fence, intent=f"{fence is one}:{n}", domain="hot")
              for fence in (one, two) for n in range(40))
        )  # fmt: skip
        assert sorted(ticket.seq for ticket in tickets) == list(range(1, 81))
        cert = await one.commit(prepared, "paid")
        for answer in await asyncio.gather(*waiting):
            assert isinstance(answer, Replay)
            assert answer.cert == cert
        assert isinstance(await two.prepare(asked()), Replay)


async def test_not_told_of_the_pooler_it_says_what_to_set(url: str) -> None:
    await ready(url + "&pgbouncer=true")
    with pytest.raises(LedgerUnavailable, match=r"\?pgbouncer=true") as caught:
        await PostgresStore.open(url)
    assert caught.value.ran is False
