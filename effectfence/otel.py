"""OpenTelemetry spans and metrics of a fence (extra `otel`; the API alone, the SDK is yours).

    from effectfence.otel import instrument
    instrument(fence)                       # the global providers, or those that are given

Spans, children of the span that is current where the decision is taken: `effectfence prepare`,
`effectfence effect` (from the ticket to its report) and `effectfence commit`. A replay is linked to
the span of the effect that made its certificate, and an effect to the one that caused it, as far as
this process ran them and remembers: a certificate itself holds no trace. Metrics:

| instrument | unit | attributes |
| --- | --- | --- |
| counter `effectfence.decisions` | `{decision}` | `effectfence.decision`, `error.type` |
| histogram `effectfence.prepare.duration` | `s` | `effectfence.decision`, `error.type` |
| histogram `effectfence.effect.duration` | `s` | `effectfence.decision` |

Intents and domains are on spans, never on metrics; arguments, results and reasons on neither.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from effectfence.events import FenceEvent
from effectfence.fence import EffectFence

try:
    from opentelemetry import metrics, trace
except ImportError:
    raise ImportError(
        "opentelemetry-api is not installed: pip install 'effectfence-asyncio[otel]'"
    ) from None

_REMEMBERED: Final = 10_000
"""Certificates whose spans are known here."""
_ASKED: Final = frozenset({"admitted", "replayed", "refused"})
_REPORTED: Final = frozenset({"committed", "aborted", "released"})


def instrument(
    fence: EffectFence,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> Callable[[], None]:
    """Tell OpenTelemetry what `fence` decides; call what is returned to stop."""
    told = _Instrumented(
        trace.get_tracer("effectfence", tracer_provider=tracer_provider),
        metrics.get_meter("effectfence", meter_provider=meter_provider),
    )
    fence.on_event(told.take)
    return lambda: fence.off_event(told.take)


class _Instrumented:
    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._decisions = meter.create_counter(
            "effectfence.decisions", unit="{decision}", description="Decisions of the fence"
        )
        self._prepare = meter.create_histogram(
            "effectfence.prepare.duration", unit="s", description="Of prepare, waiting included"
        )
        self._effect = meter.create_histogram(
            "effectfence.effect.duration", unit="s", description="From ticket to report"
        )
        self._spans: OrderedDict[str, trace.SpanContext] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, event: FenceEvent) -> None:
        attributes: dict[str, str] = {"effectfence.decision": event.kind}
        if event.code is not None:
            attributes["error.type"] = event.code
        self._decisions.add(1, attributes)
        if event.kind in _ASKED:
            self._prepare.record(event.seconds or 0.0, attributes)
            self._span("prepare", event, event.seconds)
        elif event.kind in _REPORTED:
            self._effect.record(event.held_seconds or 0.0, attributes)
            made = self._span("effect", event, event.held_seconds)
            if event.certificate is not None:
                self._remember(event.certificate, made)
                self._span("commit", event, event.seconds)

    def _span(self, name: str, event: FenceEvent, seconds: float | None) -> trace.SpanContext:
        """One that is over already: the decision was taken."""
        ends = time.time_ns()
        span = self._tracer.start_span(
            f"effectfence {name}",
            start_time=ends - int((seconds or 0.0) * 1e9),
            links=self._links(event),
            attributes={
                f"effectfence.{fact}": value
                for fact in ("kind", "intent", "domain", "tool", "agent", "attempt", "certificate")
                if (value := getattr(event, fact)) is not None
            },
        )
        if event.code is not None:
            span.set_attribute("error.type", event.code)
        if event.code is not None or event.kind == "aborted":
            span.set_status(trace.StatusCode.ERROR, event.code or "outcome unknown")
        span.end(ends)
        return span.get_span_context()

    def _links(self, event: FenceEvent) -> list[trace.Link]:
        """To the effect that is replayed, and to the one that caused this."""
        replayed = event.certificate if event.kind == "replayed" else None
        known = (self._spans.get(digest) for digest in (replayed, event.parent) if digest)
        return [trace.Link(context) for context in known if context is not None]

    def _remember(self, certificate: str, context: trace.SpanContext) -> None:
        with self._lock:
            self._spans[certificate] = context
            while len(self._spans) > _REMEMBERED:
                self._spans.popitem(last=False)
