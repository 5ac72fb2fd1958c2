"""Which ledger a command means, which of its intents, and what every verb's parser shares."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from effectfence.commands.printing import WrongUse, printable, say
from effectfence.errors import LedgerUnavailable
from effectfence.fence import EffectFence
from effectfence.models import IntentRecord, RecordedWord
from effectfence.stores.address import scheme_of, shown

Verb = Callable[[argparse.Namespace], Coroutine[Any, Any, int] | int]
Decision = IntentRecord | RecordedWord
AddVerb = Callable[[str, Verb, str, str, str], argparse.ArgumentParser]

_LOOKED_THROUGH: Final = 20_000
"""Intents, for the one that was meant where a name is not there."""


def names(options: argparse.Namespace, *wanted: str) -> Any:
    """The ledger, and what else is wanted; the ledger may come from the environment."""
    given: list[str] = list(options.names)
    if len(given) == len(wanted):
        given.insert(0, os.environ.get("EFFECTFENCE_LEDGER", ""))
    if len(given) != len(wanted) + 1:
        options.parser.error(f"expected [LEDGER] {' '.join(wanted)}".rstrip())
    if not given[0]:
        options.parser.error("no ledger: name its path, or set EFFECTFENCE_LEDGER")
    return given if wanted else given[0]


def existing(ledger: str) -> str:
    """The ledger, if there is one; looking never makes one."""
    if ledger in ("memory", "memory:"):
        raise WrongUse("a ledger in memory can only be seen from inside its process")
    if scheme_of(ledger):
        return ledger
    if not os.path.lexists(ledger):
        raise WrongUse(f"there is no ledger at {ledger}")
    if os.path.exists(ledger) and not os.path.isfile(ledger):
        raise LedgerUnavailable(ledger=ledger, reason="it is not a regular file")
    return ledger


def file(ledger: str) -> str:
    """The same, of a verb that is for files alone."""
    if scheme_of(ledger):
        raise WrongUse(f"{shown(ledger)} is no file; its server keeps it in order itself")
    return existing(ledger)


def size(path: str) -> int:
    return os.path.getsize(path)


def opened(ledger: str, options: argparse.Namespace) -> Opened:
    return Opened(existing(ledger), options.scope)


class Opened:
    """A ledger's fence, in the scope that was asked for, closed on leaving."""

    def __init__(self, ledger: str, scopes: list[str]) -> None:
        self._opening = EffectFence.open(ledger)
        self._scopes = scopes

    async def __aenter__(self) -> EffectFence:
        fence = await self._opening.__aenter__()
        for scope in self._scopes:
            fence = fence.scoped(scope)
        return fence

    async def __aexit__(self, *exc: Any) -> None:
        await self._opening.__aexit__(*exc)


@asynccontextmanager
async def followed(fence: EffectFence) -> AsyncIterator[AsyncIterator[Decision]]:
    """Decisions from now on: what is looked at meanwhile and what follows leave no gap."""
    decisions = fence.follow(nested=True)
    first: asyncio.Task[Decision] = asyncio.ensure_future(anext(decisions))

    async def all_of_them() -> AsyncIterator[Decision]:
        yield await first
        async for decision in decisions:
            yield decision

    try:
        yield all_of_them()
    finally:
        first.cancel()
        await asyncio.wait((first,))
        if not first.cancelled():
            first.exception()  # told where it was awaited


async def not_there(fence: EffectFence, ledger: str, intent: str, end: str = "") -> int:
    """Say that nothing is recorded, and what may have been meant; exit code 1."""
    names: set[str] = set()
    scopes: set[tuple[str, ...]] = set()
    looked = 0
    async for record in fence.intents(nested=True):
        names.add(record.intent)
        if record.intent == intent:
            scopes.add(record.scope)
        looked += 1
        if looked == _LOOKED_THROUGH:
            break
    said = f"nothing is recorded for {intent!r} in {shown(ledger)}{end}"
    if scopes:
        where = "; or ".join(" ".join(f"--scope {name!r}" for name in s) for s in sorted(scopes))
        return say(f"{said}; it is in a scope: {where}", 1)
    near = difflib.get_close_matches(intent, names, n=1)
    return say(f"{said}; is {printable(near[0])!r} meant?" if near else said, 1)


# --- what the parsers share -----------------------------------------------------------------------


def json_flag(parser: argparse.ArgumentParser, says: str) -> None:
    parser.add_argument("--json", action="store_true", help=says)


def scope_flag(parser: argparse.ArgumentParser, says: str) -> None:
    parser.add_argument(
        "--scope",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{says} `fence.scoped(NAME)`; again for one inside it",
    )
