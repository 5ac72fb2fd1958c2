"""The blocking fence on a database: its connections live on the background loop."""

from __future__ import annotations

import threading

import pytest

from effectfence import blocking
from tests.conftest import asked
from tests.engines import PostgresServer

pytestmark = pytest.mark.rig


def test_threads_race_on_postgresql_and_one_runs(postgres_server: PostgresServer) -> None:
    url = postgres_server.schema_url()
    ran: list[int] = []
    certs: list[object] = []
    with blocking.open(url) as fence, blocking.open(url) as other:
        threads = [
            threading.Thread(
                target=lambda each=each: certs.append(each.run(asked(), lambda: ran.append(1)))
            )
            for each in (fence, other) * 10
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [record.state for record in fence.intents()] == ["done"]
    assert ran == [1]
    assert certs == [certs[0]] * 20
