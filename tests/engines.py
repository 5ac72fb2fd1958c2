"""The servers that tests share, and those that they start to kill, cut or replace.

A test that needs one takes the fixture `postgres_server` or `redis_server`: one server a test
process, shared; each test has a schema or a prefix of its own in it. Where a program is missing
they skip, and say the line that installs it; so does `skipping()` around a server of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers import (
    NotInstalled,
    PostgresServer,
    RedisServer,
    Server,
    children,
    free_port,
    server_folder,
    unprivileged,
)

__all__ = [
    "PostgresServer",
    "RedisServer",
    "Server",
    "children",
    "free_port",
    "server_folder",
    "unprivileged",
]


@contextmanager
def skipping() -> Iterator[None]:
    """A missing program skips the test."""
    try:
        yield
    except NotInstalled as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """This test process's PostgreSQL; tests share it, each with a schema of its own."""
    with skipping():
        server = PostgresServer.create()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """This test process's Redis; tests share it, each with a prefix of its own."""
    with skipping():
        server = RedisServer.create()
    yield server
    server.remove()
