"""One running shop a server for all tests that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.serving import Shop, serving


@pytest.fixture(scope="session", params=["uvicorn", "aiohttp"])
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """A shop on one worker, on a ledger file; keys are each test's own."""
    with serving(tmp_path_factory.mktemp(request.param) / "shop", request.param) as running:
        yield running
