"""The Hypothesis machine of `tests.rules`, with PostgreSQL as the ledger that all share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from effectfence.stores.postgres import PostgresStore
from tests.engines import PostgresServer
from tests.remote.engine import EngineLedger, Thread
from tests.rules.test_machine import FenceMachine

pytestmark = pytest.mark.rig


class PostgresMachine(FenceMachine):
    server: ClassVar[PostgresServer]
    thread: ClassVar[Thread]
    ledger: EngineLedger

    def new_ledger(self) -> EngineLedger:
        url, tell = self.server.schema_with_clock()
        return EngineLedger(
            self.loop,
            self.history,
            self.thread,
            lambda clock: PostgresStore.open(url, monotonic=clock),
            tell,
        )

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.ledger.close()


del FenceMachine  # else pytest collects the original here as well


@pytest.fixture
def machine(postgres_server: PostgresServer) -> Iterator[type[PostgresMachine]]:
    PostgresMachine.server, PostgresMachine.thread = postgres_server, Thread()
    yield PostgresMachine
    PostgresMachine.thread.close()


@pytest.mark.timeout(1800)
def test_the_fence_machine_finds_nothing_on_postgres(machine: type[PostgresMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=200 if os.environ.get("EFFECTFENCE_LONG") == "1" else 12,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
