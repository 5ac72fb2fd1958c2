"""Prometheus: what a scrape over HTTP shows is what the fence decided."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from effectfence import EffectFence, IntentConflict
from effectfence.prometheus import instrument
from tests.conftest import asked, claimed


async def decide(fence: EffectFence) -> None:
    """One of each: admitted, conflict, committed, replayed; another left unknown."""
    ticket = await claimed(fence)
    with pytest.raises(IntentConflict):
        await fence.prepare(asked(args={"secret": "s3cret"}))
    await fence.commit(ticket, 1)
    await fence.prepare(asked())
    await fence.abort(await claimed(fence, intent="other"), "cut off")


async def test_a_scrape_shows_the_decisions() -> None:
    registry = CollectorRegistry()
    fence, other = EffectFence(), EffectFence()
    instrument(fence, name="a", registry=registry)
    instrument(other, name="b", registry=registry)
    await decide(fence)
    await claimed(other)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(address) as answer:  # noqa: ASYNC210 - a test may wait
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    lines = set(text.splitlines())
    for fact, count in (
        ('decision="admitted",fence="a"', 2),
        ('decision="committed",fence="a"', 1),
        ('decision="replayed",fence="a"', 1),
        ('decision="aborted",fence="a"', 1),
        ('decision="admitted",fence="b"', 1),
    ):
        assert f'effectfence_decisions_total{{code="",{fact}}} {count}.0' in lines
    refused = 'code="intent_conflict",decision="refused",fence="a"'
    assert f"effectfence_decisions_total{{{refused}}} 1.0" in lines
    assert 'effectfence_prepare_seconds_count{decision="admitted",fence="a"} 2.0' in lines
    assert 'effectfence_effect_seconds_count{decision="committed",fence="a"} 1.0' in lines
    assert 'effectfence_held{fence="a"} 0.0' in lines
    assert 'effectfence_held{fence="b"} 1.0' in lines
    assert "s3cret" not in text


async def test_it_stops_when_it_is_told_to() -> None:
    registry = CollectorRegistry()
    fence = EffectFence()
    stop = instrument(fence, registry=registry)
    stop()
    await decide(fence)
    labels = {"fence": "default", "decision": "admitted", "code": ""}
    assert registry.get_sample_value("effectfence_decisions_total", labels) is None
