"""`ledger tail`: decisions as they are recorded, by whatever process."""

from __future__ import annotations

import argparse
import heapq
import sys
import time

from effectfence.commands.ledger import shown
from effectfence.commands.ledger.looking import Filter, count, filter_flags
from effectfence.commands.ledger.opened import (
    AddVerb,
    Decision,
    followed,
    json_flag,
    names,
    opened,
    scope_flag,
)
from effectfence.commands.printing import print_json
from effectfence.fence import EffectFence
from effectfence.models import IntentRecord


async def _tail(options: argparse.Namespace) -> int:
    wanted = Filter.of(options)
    filtered = wanted != Filter()
    async with opened(names(options), options) as fence, followed(fence) as decisions:
        for last in await _last(fence, wanted, options.last, words=not filtered):
            _print(last, options)
        sys.stdout.flush()
        async for decision in decisions:
            if wanted.wants(decision) if isinstance(decision, IntentRecord) else not filtered:
                _print(decision, options)
                sys.stdout.flush()
    return 0


async def _last(fence: EffectFence, wanted: Filter, number: int, *, words: bool) -> list[Decision]:
    """The newest, oldest of them first; never more in memory than are wanted."""
    newest: list[tuple[float, int, Decision]] = []

    def keep(decision: Decision) -> None:
        recorded_at = time.monotonic() - decision.age_seconds  # pages are read one after another
        heapq.heappush(newest, (recorded_at, next(order), decision))
        if len(newest) > number:
            heapq.heappop(newest)

    order = iter(range(sys.maxsize))
    if number:
        async for record in wanted.of_fence(fence):
            keep(record)
        if words:
            async for said in fence.history(nested=True):
                keep(said)
    return [decision for _, _, decision in sorted(newest, key=lambda item: item[:2])]


def _print(decision: Decision, options: argparse.Namespace) -> None:
    if options.json:
        print_json(decision.model_dump(mode="json"))
    elif isinstance(decision, IntentRecord):
        print(shown.line(decision))
    else:
        print(shown.word(decision))


def add(verb: AddVerb) -> None:
    tailed = verb(
        "tail",
        _tail,
        "the last decisions, and each new one as it is recorded, until Ctrl-C",
        "[LEDGER] [-n N] [--state STATE] [--tool NAME] [--agent NAME] [--domain NAME] "
        "[--scope NAME] [--json]",
        "effectfence ledger tail effects.jsonl -n 20",
    )
    tailed.add_argument(
        "-n", "--last", type=count, default=10, metavar="N", help="so many to begin with (10)"
    )
    filter_flags(tailed)
    json_flag(tailed, "one JSON object a line")
    scope_flag(tailed, "only those of")
