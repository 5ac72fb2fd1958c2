"""`ledger list|show|stats`: what is recorded."""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Self, get_args

from effectfence.commands.ledger import shown
from effectfence.commands.ledger.opened import (
    AddVerb,
    followed,
    json_flag,
    names,
    not_there,
    opened,
    scope_flag,
    size,
)
from effectfence.commands.printing import print_facts, print_json
from effectfence.fence import EffectFence
from effectfence.models import IntentRecord, IntentState
from effectfence.stores.address import scheme_of
from effectfence.stores.address import shown as address_shown

STATES: Final = get_args(IntentState)
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", re.ASCII)
_UNITS: Final = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_REDRAW_SECONDS: Final = 2.0
_REST: Final = 9.0
"""Seconds without looking for each second of it: watching costs a tenth of a core at most."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which intents are wanted."""

    state: str | None = None
    tool: str | None = None
    agent: str | None = None
    domain: str | None = None
    older_than: float | None = None
    newer_than: float | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        return cls(**{name: getattr(options, name, None) for name in cls.__dataclass_fields__})

    def wants(self, record: IntentRecord) -> bool:
        return (
            self.state in (None, record.state)
            and self.tool in (None, record.tool)
            and self.agent in (None, record.agent)
            and self.domain in (None, record.domain)
            and (self.older_than is None or record.age_seconds > self.older_than)
            and (self.newer_than is None or record.age_seconds < self.newer_than)
        )

    async def of_fence(self, fence: EffectFence) -> AsyncIterator[IntentRecord]:
        async for record in fence.intents(self.state, nested=True):
            if self.wants(record):
                yield record


def age(text: str) -> float:
    """`90s`, `15m`, `2h`, `7d`, or seconds."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age, such as 90s, 15m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return int(text)


# --- list -----------------------------------------------------------------------------------------


async def _list(options: argparse.Namespace) -> int:
    wanted = Filter.of(options)
    async with opened(names(options), options) as fence:
        if options.watch:
            return await _watch(fence, wanted, options)
        left = options.limit
        async for record in wanted.of_fence(fence):
            if left is not None and left <= 0:
                break
            left = None if left is None else left - 1
            _print(record, options)
    return 0


def _print(record: IntentRecord, options: argparse.Namespace) -> None:
    if options.json:
        print_json(record.model_dump(mode="json"))
    else:
        print(shown.line(record))


async def _watch(fence: EffectFence, wanted: Filter, options: argparse.Namespace) -> int:
    """At a terminal the list, drawn again and again; else, after the list, what changes in it."""
    if options.json or not sys.stdout.isatty():
        async with followed(fence) as decisions:
            async for record in wanted.of_fence(fence):
                _print(record, options)
            sys.stdout.flush()
            async for decision in decisions:
                if isinstance(decision, IntentRecord) and wanted.wants(decision):
                    _print(decision, options)
                    sys.stdout.flush()
    while True:
        began = time.monotonic()
        await _draw(fence, wanted, options.limit)
        await asyncio.sleep(max(_REDRAW_SECONDS, _REST * (time.monotonic() - began)))


async def _draw(fence: EffectFence, wanted: Filter, limit: int | None) -> None:
    columns, rows = shutil.get_terminal_size()
    room = max(1, rows - 2) if limit is None else min(limit, max(1, rows - 2))
    lines: list[str] = []
    found = 0
    async for record in wanted.of_fence(fence):
        found += 1
        if len(lines) < room:
            lines.append(shown.line(record)[: columns - 1])
    more = f", {found - len(lines):,} more" if found > len(lines) else ""
    head = f"{found:,} intents at {time.strftime('%H:%M:%S')}{more}; Ctrl-C ends this"
    sys.stdout.write("\x1b[H\x1b[2J" + "\n".join([head, *lines]) + "\n")
    sys.stdout.flush()


# --- show, stats ----------------------------------------------------------------------------------


async def _show(options: argparse.Namespace) -> int:
    ledger, intent = names(options, "INTENT")
    async with opened(ledger, options) as fence:
        record = await fence.lookup(intent)
        words = [word async for word in fence.history(intent)]
        words.sort(key=lambda word: -word.age_seconds)
        if record is None:
            for said in words if not options.json else ():
                print(shown.word(said))
            return await not_there(fence, ledger, intent)
    if options.json:
        history = [word.model_dump(mode="json") for word in words]
        print_json({**record.model_dump(mode="json"), "history": history})
        return 0
    print_facts(shown.facts(record))
    for word in words:
        print(shown.word(word))
    if record.state in ("unknown", "expired"):
        print(shown.what_to_do(ledger, record, options.scope))
    return 0


async def _stats(options: argparse.Namespace) -> int:
    ledger = names(options)
    states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
    oldest: dict[str, float] = {}
    async with opened(ledger, options) as fence:
        async for record in fence.intents():
            states[record.state] += 1
            if record.state in ("unknown", "expired"):
                oldest[record.state] = max(oldest.get(record.state, 0.0), record.age_seconds)
        counted: dict[str, Any] = {
            "intents": await fence.intent_count(),
            "domains": await fence.domain_count(),
        }
    counted |= {"scoped_elsewhere": counted["intents"] - states.total(), **states}
    if not scheme_of(ledger):
        counted["bytes"] = size(ledger)
    if options.json:
        print_json({"path": address_shown(ledger), **counted})
        return 0
    facts = {name.replace("_", " "): f"{number:,}" for name, number in counted.items()}
    facts |= {f"oldest {state}": shown.ago(seconds) for state, seconds in oldest.items()}
    print_facts(facts)
    return 0


# --- the parsers ----------------------------------------------------------------------------------


def filter_flags(parser: argparse.ArgumentParser, *, state: bool = True) -> None:
    if state:
        parser.add_argument("--state", choices=STATES, help="only these")
    for name in ("tool", "agent", "domain"):
        parser.add_argument(f"--{name}", metavar="NAME", help=f"only those of this {name}")
    parser.add_argument(
        "--older-than", type=age, metavar="AGE", help="changed longer ago: 90s, 15m, 2h, 7d"
    )
    parser.add_argument("--newer-than", type=age, metavar="AGE", help="changed since then")


def add(verb: AddVerb) -> None:
    listed = verb(
        "list",
        _list,
        "every intent, of every scope, one a line",
        "[LEDGER] [--state STATE] [--tool NAME] [--agent NAME] [--domain NAME] [--older-than AGE] "
        "[--newer-than AGE] [--limit N] [--scope NAME] [--watch] [--json]",
        "effectfence ledger list effects.jsonl --state unknown --older-than 15m",
    )
    filter_flags(listed)
    listed.add_argument("--limit", type=count, metavar="N", help="at most so many")
    listed.add_argument("--watch", action="store_true", help="go on showing what changes")
    json_flag(listed, "one JSON object a line")
    scope_flag(listed, "only those of")
    showing = verb(
        "show",
        _show,
        "all that is recorded of one intent, and what was said of it",
        "[LEDGER] INTENT [--scope NAME] [--json]",
        "effectfence ledger show effects.jsonl charge:order-123",
    )
    json_flag(showing, "one JSON object")
    scope_flag(showing, "the intents of")
    counted = verb(
        "stats",
        _stats,
        "how many intents in which state",
        "[LEDGER] [--scope NAME] [--json]",
        "effectfence ledger stats effects.jsonl",
    )
    json_flag(counted, "one JSON object")
    scope_flag(counted, "the intents of")
