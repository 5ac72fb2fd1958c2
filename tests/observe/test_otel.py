"""OpenTelemetry, with its own SDK: spans and their links, metrics and their units."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from effectfence import EffectFence, IntentConflict
from effectfence.otel import instrument
from tests.conftest import asked, claimed


class Telemetry:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self._reader])

    def spans(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def fence(telemetry: Telemetry) -> EffectFence:
    fence = EffectFence()
    instrument(fence, tracer_provider=telemetry.tracers, meter_provider=telemetry.meters)
    return fence


def named(telemetry: Telemetry, name: str) -> list[Any]:
    return [span for span in telemetry.spans() if span.name == f"effectfence {name}"]


async def test_an_effect_leaves_three_spans_below_its_callers(
    telemetry: Telemetry, fence: EffectFence
) -> None:
    with telemetry.tracers.get_tracer("mine").start_as_current_span("mine") as mine:
        cert = await fence.run(asked(), lambda: 1)
    names = [span.name for span in telemetry.spans()]
    assert sorted(names) == [
        "effectfence commit", "effectfence effect", "effectfence prepare", "mine",
    ]  # fmt: skip
    for span in telemetry.spans():
        if span.name != "mine":
            assert span.parent.span_id == mine.get_span_context().span_id
            assert span.start_time <= span.end_time
    (effect,) = named(telemetry, "effect")
    assert effect.attributes["effectfence.certificate"] == cert.hash
    assert effect.attributes["effectfence.intent"] == "charge:o1"


async def test_a_replay_is_linked_to_the_effect_and_an_effect_to_its_cause(
    telemetry: Telemetry, fence: EffectFence
) -> None:
    cert = await fence.run(asked(), lambda: 1)
    await fence.run(asked(), lambda: 1)
    await fence.run(asked(intent="mail", parent=cert.hash), lambda: 1)
    first, mail = named(telemetry, "effect")
    _, replayed, _ = named(telemetry, "prepare")
    for span in (replayed, mail):
        (link,) = span.links
        assert link.context.span_id == first.context.span_id
    assert not first.links


async def test_what_fails_is_an_error_and_nothing_secret_is_told(
    telemetry: Telemetry, fence: EffectFence
) -> None:
    ticket = await claimed(fence, args={"card": "s3cret"})
    with pytest.raises(IntentConflict):
        await fence.prepare(asked(args={"card": "s3cret-2"}))
    await fence.abort(ticket, "s3cret reason")
    admitted, refused = named(telemetry, "prepare")
    assert admitted.status.status_code is trace.StatusCode.UNSET
    assert refused.status.status_code is trace.StatusCode.ERROR
    assert refused.attributes["error.type"] == "intent_conflict"
    (unknown,) = named(telemetry, "effect")
    assert unknown.status.description == "outcome unknown"
    assert "s3cret" not in "".join(span.to_json() for span in telemetry.spans())


async def test_metrics_have_units_and_few_attributes(
    telemetry: Telemetry, fence: EffectFence
) -> None:
    await fence.run(asked(), lambda: 1)
    await fence.run(asked(), lambda: 1)
    found = telemetry.metrics()
    assert {name: metric.unit for name, metric in found.items()} == {
        "effectfence.decisions": "{decision}",
        "effectfence.prepare.duration": "s",
        "effectfence.effect.duration": "s",
    }
    counted = {
        point.attributes["effectfence.decision"]: point.value
        for point in found["effectfence.decisions"].data.data_points
    }
    assert counted == {"admitted": 1, "committed": 1, "replayed": 1}
    attributes = {
        name
        for metric in found.values()
        for point in metric.data.data_points
        for name in point.attributes
    }
    assert attributes == {"effectfence.decision"}


async def test_it_stops_when_it_is_told_to(telemetry: Telemetry) -> None:
    fence = EffectFence()
    stop = instrument(fence, tracer_provider=telemetry.tracers, meter_provider=telemetry.meters)
    stop()
    await fence.run(asked(), lambda: 1)
    assert telemetry.spans() == []
