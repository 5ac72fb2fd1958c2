"""The rigs' server of processes, and a place for ledgers that go through thousands of crashes."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.forks import Forks

LONG = bool(os.environ.get("EFFECTFENCE_LONG"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.rig)
            if LONG:
                item.add_marker(pytest.mark.timeout(4000))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of torn tails are set aside here; each of them would be a warning."""
    logging.getLogger("effectfence").setLevel(logging.ERROR)
    yield
    logging.getLogger("effectfence").setLevel(logging.NOTSET)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """In memory where that is possible: a crash leaves the same there, and syncs cost nothing."""
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
