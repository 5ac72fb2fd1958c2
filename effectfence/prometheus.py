"""Prometheus metrics of a fence (extra `prometheus`): what this process decided.

    from effectfence.prometheus import instrument
    instrument(fence)                       # into the default registry; expose it as you do

| metric | labels | what |
| --- | --- | --- |
| `effectfence_decisions_total` | fence, decision, code | every decision, by what came of it |
| `effectfence_prepare_seconds` | fence, decision | how long `prepare` took, waiting included |
| `effectfence_effect_seconds` | fence, decision | from the ticket to what was reported of it |
| `effectfence_held` | fence | tickets handed out by this process and not reported |

Counted are decisions, not what stands in the ledger: how many outcomes are unknown now, whoever
left them, is what `effectfence ledger stats --json` says. Intents, domains and tools are no labels:
they would grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from effectfence.events import FenceEvent
from effectfence.fence import EffectFence

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError:
    raise ImportError(
        "prometheus_client is not installed: pip install 'effectfence-asyncio[prometheus]'"
    ) from None

_REPORTED: Final = frozenset({"committed", "aborted", "released"})
_ASKED: Final = frozenset({"admitted", "replayed", "refused", "unavailable"})
_SECONDS: Final = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one registry; several fences may share them, told apart by their label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "effectfence_decisions",
            "Decisions of this process, by what came of them.",
            ("fence", "decision", "code"),
            registry=registry,
        )
        self.prepare = Histogram(
            "effectfence_prepare_seconds",
            "How long prepare took, waiting included.",
            ("fence", "decision"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.effect = Histogram(
            "effectfence_effect_seconds",
            "From the ticket to what was reported of it.",
            ("fence", "decision"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.held = Gauge(
            "effectfence_held",
            "Tickets that this process handed out and that were not reported.",
            ("fence",),
            registry=registry,
        )

    def take(self, fence: str, event: FenceEvent) -> None:
        self.decisions.labels(fence, event.kind, event.code or "").inc()
        if event.kind in _ASKED and event.seconds is not None and event.held_seconds is None:
            self.prepare.labels(fence, event.kind).observe(event.seconds)
        if event.kind == "admitted":
            self.prepare.labels(fence, event.kind).observe(event.seconds or 0.0)
        if event.kind in _REPORTED and event.held_seconds is not None:
            self.effect.labels(fence, event.kind).observe(event.held_seconds)


_of_registry: dict[int, Metrics] = {}


def instrument(
    fence: EffectFence, *, name: str = "default", registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Count what `fence` decides, labelled `fence=name`; call what is returned to stop.

    With several worker processes, use prometheus_client's multiprocess mode, as for any metric.
    """
    metrics = _of_registry.get(id(registry))
    if metrics is None:
        metrics = _of_registry[id(registry)] = Metrics(registry)
    taken = metrics
    held = fence._shared.custody.held
    taken.held.labels(name).set_function(lambda: len(held))

    def take(event: FenceEvent) -> None:
        taken.take(name, event)

    fence.on_event(take)
    return lambda: fence.off_event(take)
