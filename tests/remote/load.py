"""Callers who want a few intents done, whatever becomes of the ledger; and the judge of it all."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field

from effectfence import (
    EffectFence,
    Fresh,
    IntentInFlight,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    Replay,
)
from tests.checker import History, violations
from tests.conftest import asked
from tests.remote.linear import Op, linearizable


@dataclass
class Load:
    """`seed` decides who asks for what; the fences are those of as many processes."""

    fences: list[EffectFence]
    seed: int
    intents: int = 12
    ops: defaultdict[str, list[Op]] = field(default_factory=lambda: defaultdict(list))
    history: History = field(default_factory=History)
    stop: bool = False
    _ticks: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, callers: int) -> None:
        """Until `stop`, and everything that was begun has ended."""
        await asyncio.gather(*(self._caller(n) for n in range(callers)))

    async def _caller(self, number: int) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        fence = self.fences[number % len(self.fences)]
        while not self.stop:
            generation = len(self.history.acknowledged) // 40
            await self._once(fence, f"{generation}/{chance.randrange(self.intents)}")

    async def _once(self, fence: EffectFence, intent: str) -> None:
        began = next(self._ticks)
        told, value = "", ""
        try:
            admission = await fence.prepare(asked(intent, domain=f"d{len(intent)}"))
        except IntentInFlight:
            told = "in_flight"
        except OutcomeUnknown:
            told = "unknown"
        except LedgerUnavailable as error:
            if error.ran is not False:
                self.history.told_nothing_ran.append(f"{intent}, which was not begun")
        else:
            match admission:
                case Fresh(prepared):
                    told, value = "fresh", prepared.token
                case Replay(cert):
                    told, value = "replay", cert.hash
                    self.history.acknowledged.append((intent, cert.hash))
        self.ops[intent].append(Op(began, next(self._ticks), told, value))
        if told == "fresh":
            await self._effect(fence, prepared)

    async def _effect(self, fence: EffectFence, prepared: PreparedEffect) -> None:
        intent = prepared.intent
        self.history.tokens.append(prepared.token)
        self.history.effects.append((intent, prepared.seq))
        began = next(self._ticks)
        while True:
            try:
                cert = await fence.commit(prepared, "done")
                break
            except LedgerUnavailable as error:
                if error.ran is not True:
                    self.history.told_nothing_ran.append(intent)
        self.history.acknowledged.append((intent, cert.hash))
        value = f"{prepared.token} {cert.hash}"
        self.ops[intent].append(Op(began, next(self._ticks), "committed", value))

    async def judged(self, fence: EffectFence) -> list[str]:
        """Every clause that is broken; `fence` reads what the ledger says at last."""
        final: dict[str, tuple[str | None, str | None]] = {}
        for intent in self.ops:
            record = await fence.lookup(intent)
            final[intent] = (
                record and record.state,
                record.cert.hash if record is not None and record.cert else None,
            )
        found = violations(self.history, final, policy="fence")
        found += [f"no order: {name}" for name, ops in self.ops.items() if not linearizable(ops)]
        return found
