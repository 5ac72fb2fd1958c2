"""A store as a process sees it over a bad network, on the SimLoop.

Over one shared `Ledger` each process has a `FaultyStore` of its own. Its calls take effect in the
order they were made (contract, promise 9) and late; answers get lost, and are cured as the contract
says, by sending the identical change again; a change may arrive once more, long after it was
answered; the ledger may be unreachable; the process may die, with what it sent under way.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from effectfence.errors import LedgerUnavailable
from effectfence.stores.contract import Applied, Change, Record, View
from effectfence.stores.memory import MemoryStore
from tests.checker import History
from tests.rules.simloop import SimLoop

SETTLED = "looked up"
"""What the operator settles with: a word about what happened, whatever the facts are now."""


class Ledger(MemoryStore):
    """The shared truth; notes for the checker what is written."""

    def __init__(self, loop: SimLoop, history: History) -> None:
        super().__init__(lambda: loop.now)
        self.epoch = f"{loop.random.getrandbits(128):032x}"
        self._history = history

    def write(self, change: Change, *, checked: bool = True) -> Applied | View:
        """`swap`, as one synchronous step; `checked=False` only for a mutant."""
        table, now = self._table, self._clock()
        if checked and not table.holds(change, now):
            keys = dict.fromkeys(change.expect)
            keys.update((put.key, None) for put in change.puts)
            return View(now, table.view(keys, now))
        facts = {key: record.version for key, record in table.records.items()}
        written = table.write(change, now)
        self._watchers.wake(written)
        self._note(written, facts)
        return Applied(now, written)

    def _note(self, written: dict[str, Record | None], facts: dict[str, int]) -> None:
        """What was certified; `facts` are the versions that stood before."""
        for record in written.values():
            if record is not None and record.label == "done":
                body = json.loads(record.body)
                cert = body["cert"]
                self._history.certified.append((cert["intent"], body["hash"]))
                for entry in cert["read_set"] if cert["result"] != SETTLED else ():
                    actual = facts.get(f"domain/{entry['domain']}", 0)
                    if entry["domain"] != cert["domain"] and actual != entry["seq"]:
                        self._history.stale_facts.append(cert["intent"])

    def read(self, keys: Iterable[str]) -> View:
        now = self._clock()
        return View(now, self._table.view(keys, now))


@dataclass
class Faults:
    """Probabilities."""

    slow: float = 0.3
    lost: float = 0.1
    doubled: float = 0.1
    unreachable: float = 0.02


@dataclass
class _Call:
    answer: asyncio.Future[Any]
    change: Change | None
    apply: Callable[[], Any]
    sent: int = 0


class FaultyStore:
    name = "memory:"
    durable = False

    check_then_act = False
    """A mutant's: look, and write without looking again."""

    def __init__(self, ledger: Ledger, loop: SimLoop, faults: Faults) -> None:
        self.epoch = ledger.epoch
        self.dead = False
        self._ledger = ledger
        self._loop = loop
        self._random = loop.random
        self._faults = faults
        self._calls: deque[_Call] = deque()

    def peek(self, key: str) -> bool:
        """A hint, maybe stale."""
        return (
            self._ledger.peek(key) if self._random.random() < 0.5 else self._random.random() < 0.2
        )

    async def load(self, keys: Iterable[str]) -> View:
        names = tuple(keys)
        view: View = await self._ask(None, lambda: self._ledger.read(names))
        return view

    async def swap(self, change: Change) -> Applied | View:
        answer: Applied | View = await self._ask(change, lambda: self._ledger.write(change))
        return answer

    async def changed(self, key: str, tag: str, seconds: float) -> None:
        await self._ledger.changed(key, tag, seconds)

    async def scan(self, label: str) -> AsyncIterator[View]:
        async for view in self._ledger.scan(label):
            yield view

    async def purge(self, limit: int = 1000) -> int:
        return await self._ledger.purge(limit)

    async def aclose(self) -> None:
        return None

    def _ask(self, change: Change | None, apply: Callable[[], Any]) -> asyncio.Future[Any]:
        call = _Call(self._loop.create_future(), change, apply)
        self._calls.append(call)
        if len(self._calls) == 1:
            self._soon(self._serve)
        return call.answer

    def _soon(self, step: Callable[[], None]) -> None:
        random = self._random
        if random.random() < self._faults.slow:
            self._loop.call_later(random.expovariate(0.5), step)
        else:
            self._loop.call_soon(step)

    def _serve(self) -> None:
        """One message arrives at the ledger."""
        if self.dead and self._random.random() < 0.5:
            return
        call, faults, random = self._calls[0], self._faults, self._random
        if call.sent == 0 and random.random() < faults.unreachable:
            return self._answer(call, LedgerUnavailable(ledger="memory:", reason="unreachable"))
        if self.check_then_act and call.change is not None:
            change, now = call.change, self._loop.now
            if self._ledger._table.holds(change, now):
                self._loop.call_later(0.01, lambda: self._act(call, change))
                return None
        answer = call.apply()
        call.sent += 1
        if call.change is not None:
            if random.random() < faults.doubled:
                self._loop.call_later(random.expovariate(0.1), call.apply)
            if random.random() < faults.lost:
                if call.sent < 3:
                    self._soon(self._serve)
                    return None
                answer = LedgerUnavailable(ledger="memory:", reason="no answer", ran=None)
            elif call.sent > 1:
                answer = cured(call.change, answer)
        self._answer(call, answer)

    def _act(self, call: _Call, change: Change) -> None:
        self._answer(call, self._ledger.write(change, checked=False))

    def _answer(self, call: _Call, answer: Any) -> None:
        self._calls.popleft()
        if self._calls:
            self._soon(self._serve)
        self._soon(lambda: self._deliver(call.answer, answer))

    def _deliver(self, future: asyncio.Future[Any], answer: Any) -> None:
        if self.dead or future.done():
            return
        if isinstance(answer, LedgerUnavailable):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class PromptStore(FaultyStore):
    """At once, but maybe once more later: for whoever must know what stands when it speaks."""

    async def load(self, keys: Iterable[str]) -> View:
        return self._ledger.read(keys)

    async def swap(self, change: Change) -> Applied | View:
        if self._random.random() < self._faults.doubled:
            later = self._random.expovariate(0.1)
            self._loop.call_later(later, lambda: self._ledger.write(change))
        return self._ledger.write(change)


def cured(change: Change, answer: Applied | View) -> Applied | View:
    """A view that bears the caller's own tag, or word, is the caller's own work."""
    if isinstance(answer, Applied):
        return answer
    records = answer.records
    for put in change.puts:
        record = records[put.key]
        if put.tag is not None and (record is None or record.tag != put.tag):
            return answer
        if put.label == "history" and (record is None or record.body != put.body):
            return answer
    marked = any(put.tag is not None or put.label == "history" for put in change.puts)
    return Applied(answer.now, {p.key: records[p.key] for p in change.puts}) if marked else answer
