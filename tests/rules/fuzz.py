"""Seeded schedules of the real fence over faulty stores, judged by `tests.checker`.

One seed is one scenario: a few processes, each with a fence and a bad connection of its own, want
the same few intents done; they crash, stall past their lease, get cancelled, retry, release,
abort, renew and commit twice, while an operator who only ever tells the truth settles and clears.
No thread, no sleep, no clock: the same seed gives the same run.

    python -m tests.rules.fuzz --policy fence --seeds 0 20000
    python -m tests.rules.fuzz --policy fence --seed 4711          shows one run's history
    python -m tests.rules.fuzz --mutant "no token check at commit"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from effectfence import (
    EffectFence,
    EffectRequest,
    FenceConfig,
    FenceError,
    Fresh,
    LedgerUnavailable,
    NotExecuted,
    PreparedEffect,
    ReadSetEntry,
    claims,
    rules,
)
from effectfence import custody as custody_module
from effectfence import fence as fence_module
from effectfence.leases import Lost, Renew
from effectfence.models import OnLeaseExpiry
from effectfence.stores.contract import ANY, Change, Put, View
from tests.checker import History, double_effects, violations
from tests.rules.faulty import SETTLED, Faults, FaultyStore, Ledger, PromptStore
from tests.rules.simloop import SimLoop

LEASE = 8.0
INTENTS = ("i0", "i1")
DOMAINS = ("d0", "d0")
FACT = "fact"
BUSY = 90.0
ENDS = 400.0


class SimKeeper:
    """Renews on the SimLoop, as the real keeper does in its thread."""

    def keep(
        self, prepared: PreparedEffect, renew: Renew, lease_seconds: float, lost: Lost, *more: Any
    ) -> asyncio.Task[None]:
        async def renewing() -> None:
            while True:
                await asyncio.sleep(lease_seconds / 3)
                try:
                    await renew(prepared)
                except LedgerUnavailable:
                    continue
                except FenceError:
                    lost.known = True
                    lost.set()
                    return

        return asyncio.get_running_loop().create_task(renewing())

    def drop(self, kept: asyncio.Task[None]) -> None:
        kept.cancel()

    def close(self) -> None:
        return None


class Tool:
    """The outside world: fires what reached it, whatever became of who asked."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.fired: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()

    async def call(self, process: Process, ticket: PreparedEffect) -> str:
        """Returns, is refused before anything happened, or leaves open what happened."""
        random, loop, store = self.scenario.random, self.scenario.loop, process.store
        if random.random() < 0.35:  # a stall: the lease may end meanwhile
            await alive(store, asyncio.sleep(random.expovariate(1 / LEASE)))
        if random.random() < 0.15:
            raise NotExecuted("connection refused")
        self.scenario.note_claim(ticket)
        self.under_way[ticket.intent] += 1
        fired = loop.create_future()
        loop.call_later(random.choice((0.0, 0.5, 12.0)), self._fire, ticket, fired)
        if random.random() < 0.15:
            await alive(store, asyncio.sleep(random.random()))
            raise TimeoutError("no answer")
        await alive(store, fired)
        if random.random() < 0.1:
            raise ConnectionResetError
        return f"receipt-{ticket.seq}"

    def _fire(self, ticket: PreparedEffect, fired: asyncio.Future[None]) -> None:
        self.under_way[ticket.intent] -= 1
        self.fired[ticket.intent] += 1
        self.scenario.history.effects.append((ticket.intent, ticket.seq))
        self.scenario.log(f"effect {ticket.intent} seq={ticket.seq}")
        if not fired.done():
            fired.set_result(None)


async def alive(store: FaultyStore, waiting: Any) -> None:
    """Wait; a process that died meanwhile never goes on."""
    await waiting
    if store.dead:
        await asyncio.Event().wait()


class Process:
    """One fence over one connection; dies as a whole."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        self.scenario = scenario
        self.number = number
        self.start()

    def start(self) -> None:
        scenario = self.scenario
        self.store = FaultyStore(scenario.ledger, scenario.loop, scenario.faults)
        self.fence = EffectFence(scenario.config, store=self.store)
        self.fence._shared.keeper = SimKeeper()  # type: ignore[assignment]
        self.may_fire: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    def work(self) -> None:
        random, loop = self.scenario.random, self.scenario.loop
        for _ in range(random.choice((1, 1, 2))):
            task = loop.create_task(self._work())
            self.tasks.append(task)
            if random.random() < 0.3:
                loop.call_later(random.expovariate(0.2), task.cancel)

    def die(self) -> None:
        """Its coroutines never go on, its messages are as far as they are."""
        self.scenario.log(f"p{self.number} dies")
        self.store.dead = True
        self.scenario.corpses.append((self.fence, self.tasks))
        self.start()
        self.work()

    async def _work(self) -> None:
        random, store, may_fire = self.scenario.random, self.store, self.may_fire
        for _ in range(random.randrange(1, 4)):
            await alive(store, asyncio.sleep(random.expovariate(0.5)))
            number = random.randrange(len(INTENTS))
            may_fire[INTENTS[number]] += 1
            try:
                await self._once(number)
            except (FenceError, NotExecuted, OSError):
                continue
            finally:
                may_fire[INTENTS[number]] -= 1

    async def _once(self, number: int) -> None:
        scenario, random = self.scenario, self.scenario.random
        fence = self.fence
        facts = []
        if random.random() < 0.5:
            facts.append(ReadSetEntry(domain=FACT, seq=await fence.current(FACT)))
        if random.random() < 0.2:
            seq = await fence.current(DOMAINS[number])
            facts.append(ReadSetEntry(domain=DOMAINS[number], seq=seq))
        request = EffectRequest(
            intent=INTENTS[number],
            domain=DOMAINS[number],
            tool="charge",
            args={},
            agent=f"a{self.number}",
            read_set=tuple(facts),
        )
        patience = random.choice((0.0, 0.0, 5.0, 60.0))
        if random.random() < 0.3:
            await self._in_one_call(request, patience)
            return
        try:
            admission = await fence.prepare(request, wait_seconds=patience)
        except FenceError as error:
            scenario.log(f"p{self.number} prepare {request.intent}: {type(error).__name__}")
            raise
        if isinstance(admission, Fresh):
            await self._hold(admission.prepared)
        else:
            scenario.acknowledge(self, request.intent, admission.cert.hash)

    async def _in_one_call(self, request: EffectRequest, patience: float) -> None:
        intent = request.intent
        try:
            async with self.fence.effect(request, wait_seconds=patience) as attempt:
                if attempt.fresh:
                    self.scenario.admitted(self, attempt.prepared)
                    attempt.result = await self.scenario.tool.call(self, attempt.prepared)
                    self.scenario.reports(attempt.prepared)
        except FenceError as error:
            self._told(intent, attempt_seq(locals().get("attempt")), error)
            raise
        assert attempt.cert is not None
        self.scenario.acknowledge(self, intent, attempt.cert.hash)

    async def _hold(self, ticket: PreparedEffect) -> None:
        scenario, random, fence = self.scenario, self.scenario.random, self.fence
        scenario.admitted(self, ticket)
        try:
            if random.random() < 0.3:
                await fence.heartbeat(ticket)
            result = await scenario.tool.call(self, ticket)
        except NotExecuted:
            await fence.release(ticket, "did not run")
            scenario.log(f"p{self.number} released {ticket.intent}")
            return
        except (FenceError, OSError, asyncio.CancelledError):
            await fence.abort(ticket, "nobody knows")
            scenario.log(f"p{self.number} aborted {ticket.intent}")
            raise
        scenario.reports(ticket)
        for _ in range(random.choice((1, 1, 2, 3))):
            try:
                cert = await fence.commit(ticket, result)
            except FenceError as error:
                self._told(ticket.intent, ticket.seq, error)
                if not isinstance(error, LedgerUnavailable):
                    raise
            else:
                scenario.acknowledge(self, ticket.intent, cert.hash)

    def _told(self, intent: str, seq: int | None, error: FenceError) -> None:
        self.scenario.log(f"p{self.number} told {intent} seq={seq}: {type(error).__name__}")
        if error.ran is False and (intent, seq) in self.scenario.history.effects:
            self.scenario.history.told_nothing_ran.append(intent)


def attempt_seq(attempt: Any) -> int | None:
    return attempt.prepared.seq if attempt is not None and attempt.fresh else None


class Scenario:
    """Everything of one seed."""

    def __init__(self, seed: int, policy: OnLeaseExpiry) -> None:
        self.loop = SimLoop(seed)
        self.random = self.loop.random
        self.policy = policy
        self.history = History()
        self.zombies: Counter[str] = Counter()
        """Tickets reported on when their lease was over, or another's number stood there."""
        self.lines: list[str] = []
        self.ledger = Ledger(self.loop, self.history)
        rough = self.random.choice((0.0, 1.0, 3.0))
        self.faults = Faults(0.3, 0.1 * rough, 0.1 * rough, 0.02 * rough)
        self.config = FenceConfig(
            lease_ttl=LEASE,
            on_lease_expiry=policy,
            result_ttl=None,
            max_hold=self.random.choice((None, 3 * LEASE)),
        )
        self.tool = Tool(self)
        self.corpses: list[object] = []  # kept, so that nothing of them is collected meanwhile
        self.processes: list[Process] = []

    def run(self) -> list[str]:
        final = self.loop.run_until_complete(self._main())
        found = violations(self.history, final, policy=self.policy)
        for error in self.loop.errors:
            found.append(f"nobody saw {error['message']}: {error.get('exception')!r}")
        bury(asyncio.all_tasks(self.loop))
        return found

    async def _main(self) -> dict[str, tuple[str | None, str | None]]:
        random, loop = self.random, self.loop
        self.processes = [Process(self, number) for number in range(random.randrange(2, 5))]
        for process in self.processes:
            process.work()
            if random.random() < 0.35:
                loop.call_later(random.expovariate(0.1), process.die)
        busy = [loop.create_task(self._operate()), loop.create_task(self._move_facts())]
        await asyncio.sleep(ENDS)
        await asyncio.gather(*busy)
        reader = EffectFence(self.config, store=self.ledger)
        final: dict[str, tuple[str | None, str | None]] = {}
        for intent in INTENTS:
            record = await reader.lookup(intent)
            final[intent] = (
                record and record.state,
                record.cert.hash if record is not None and record.cert is not None else None,
            )
            self.log(f"in the end {intent}: {final[intent]}")
        return final

    async def _operate(self) -> None:
        """Settles what it knows to have fired, clears what it knows can never fire."""
        settling, clearing = (
            EffectFence(self.config, store=kind(self.ledger, self.loop, self.faults))
            for kind in (FaultyStore, PromptStore)
        )
        word = {"by": "ops", "reason": "looked at the tool's log"}
        while self.loop.now < BUSY:
            await asyncio.sleep(self.random.expovariate(0.07))
            intent = self.random.choice(INTENTS)
            try:
                if self.tool.fired[intent]:
                    cert = await settling.settle(intent, SETTLED, **word)
                    self.history.acknowledged.append((intent, cert.hash))
                    self.log(f"settled {intent} {cert.hash[:8]}")
                elif self.can_never_fire(intent) and await clearing.clear(intent, **word):
                    self.log(f"cleared {intent}")
            except FenceError as error:
                self.log(f"operator {intent}: {type(error).__name__}")

    def can_never_fire(self, intent: str) -> bool:
        held = any(process.may_fire[intent] for process in self.processes)
        return not held and not self.tool.under_way[intent]

    async def _move_facts(self) -> None:
        fence = EffectFence(self.config, store=self.ledger)
        while self.loop.now < BUSY:
            await asyncio.sleep(self.random.expovariate(0.1))
            await fence.reserve(FACT, await fence.current(FACT))

    def admitted(self, process: Process, ticket: PreparedEffect) -> None:
        self.log(f"p{process.number} holds {ticket.intent} seq={ticket.seq} {ticket.attempt}")
        self.history.tokens.append(ticket.token)
        if self.tool.fired[ticket.intent] or self.tool.under_way[ticket.intent]:
            self.history.fresh_after_effect.append(ticket.intent)

    def acknowledge(self, process: Process, intent: str, digest: str) -> None:
        self.log(f"p{process.number} got {intent} {digest[:8]}")
        self.history.acknowledged.append((intent, digest))

    def note_claim(self, ticket: PreparedEffect) -> None:
        record = self.ledger.read([f"intent/{ticket.intent}"]).records[f"intent/{ticket.intent}"]
        if record is None or record.label != "open" or record.stamp != ticket.seq:
            self.history.unclaimed.append(ticket.intent)

    def reports(self, ticket: PreparedEffect) -> None:
        """Its holder is about to commit: a zombie, if its lease is over or no longer its own."""
        key = f"intent/{ticket.intent}"
        view = self.ledger.read([key])
        record = view.records[key]
        if record is None or record.tag is None or record.stamp != ticket.seq:
            self.zombies["replaced"] += 1
        elif rules.describe(key, View(view.now, {key: record})).state in ("expired", "unknown"):
            self.zombies["expired"] += 1

    def log(self, line: str) -> None:
        self.lines.append(f"{self.loop.now:8.3f} {line}")


def bury(tasks: set[asyncio.Task[Any]]) -> None:
    """End what never ended, now: the garbage collector would do it in a later seed's time."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        body: Any = task.get_coro()
        for _ in range(20):
            with contextlib.suppress(BaseException):
                body.close()
                break


class _Clock(types.SimpleNamespace):
    """What `effectfence.fence` sees of time and randomness while a scenario runs."""

    loop: SimLoop

    def monotonic(self) -> float:
        return self.loop.now

    time = monotonic

    def time_ns(self) -> int:
        return int(self.loop.now * 1e9)

    def urandom(self, size: int) -> bytes:
        return self.loop.random.randbytes(size)


@contextlib.contextmanager
def simulated() -> Iterator[_Clock]:
    """`effectfence.fence` with the SimLoop's time and randomness."""
    clock = _Clock()
    system = types.SimpleNamespace(urandom=clock.urandom, fspath=os.fspath)
    logging.disable(logging.ERROR)
    try:
        with (
            mock.patch.multiple(fence_module, time=clock, os=system),
            mock.patch.object(custody_module, "time", clock),
        ):
            yield clock
    finally:
        logging.disable(logging.NOTSET)


def scenario(seed: int, policy: OnLeaseExpiry, clock: _Clock) -> tuple[Scenario, list[str]]:
    run = Scenario(seed, policy)
    clock.loop = run.loop
    return run, run.run()


def search(policy: OnLeaseExpiry, seeds: range, *, stop: bool = False) -> dict[str, Any]:
    """All of these seeds (or up to the first that finds something)."""
    report: dict[str, Any] = {"seeds": 0, "effects": 0, "commits": 0, "double_effects": 0}
    report.update(replaced=0, expired=0, violations={})
    with simulated() as clock:
        for seed in seeds:
            run, found = scenario(seed, policy, clock)
            report["seeds"] += 1
            report["effects"] += len(run.history.effects)
            report["commits"] += len(run.history.certified)
            report["replaced"] += run.zombies["replaced"]
            report["expired"] += run.zombies["expired"]
            report["double_effects"] += bool(double_effects(run.history))
            if found:
                report["violations"][seed] = found
                if stop:
                    break
    return report


# --- mutants --------------------------------------------------------------------------------------


def _no_token_check() -> Any:
    seal = rules.seal

    def anybodys(*args: Any) -> rules.Decision:
        decided = seal(*args)
        assert decided.change is not None
        expect = {**decided.change.expect, args[0].intent_key: ANY}
        return rules.Decision(decided.answer, Change(expect, decided.change.puts))

    return mock.patch.multiple(rules, seal=anybodys, _lost=lambda *args: None)


def _expiry_to_absent() -> Any:
    state_of = rules.state_of

    def forgetful(*args: Any, **options: Any) -> rules.State:
        state = state_of(*args, **options)
        return rules.State.ABSENT if state is rules.State.EXPIRED else state

    return mock.patch.object(rules, "state_of", forgetful)


def _token_reused() -> Any:
    def offer(fence: EffectFence) -> claims.Offer:
        return claims.Offer(fence._shared.store.epoch + "0" * 32, "key", 0)

    return mock.patch.object(EffectFence, "_offer", offer)


def _release_frees_any_attempt() -> Any:
    release = rules.release

    def frees(view: View, claim: Any, *args: Any) -> rules.Decision:
        decided = release(view, claim, *args)
        if decided.change is None:
            return decided
        puts = tuple(
            Put(put.key, delete=True) if put.key == claim.intent_key else put
            for put in decided.change.puts
        )
        return rules.Decision(decided.answer, Change(decided.change.expect, puts))

    return mock.patch.object(rules, "release", frees)


def _facts_not_checked_at_commit() -> Any:
    seal = rules.seal

    def blind(*args: Any) -> rules.Decision:
        decided = seal(*args)
        assert decided.change is not None
        key = args[0].intent_key
        change = Change({key: decided.change.expect[key]}, decided.change.puts)
        return rules.Decision(decided.answer, change)

    return mock.patch.object(rules, "seal", blind)


def _takeover_under_fence() -> Any:
    claim_of = claims.claim_of

    def taking(*args: Any, **options: Any) -> claims.Claim:
        claim = claim_of(*args, **options)
        claim.takeover = True
        return claim

    return mock.patch.object(claims, "claim_of", taking)


def _tag_without_certificate() -> Any:
    done_change = rules._done_change

    def vague(intent_key: str, domain_key: str, tag: str, *args: Any) -> Change:
        return done_change(intent_key, domain_key, tag[:66], *args)

    return mock.patch.object(rules, "_done_change", vague)


MUTANTS: dict[str, tuple[OnLeaseExpiry, Callable[[], Any]]] = {
    "no token check at commit": ("takeover", _no_token_check),
    "expiry to absent": ("fence", _expiry_to_absent),
    "check, then act": ("fence", lambda: mock.patch.object(FaultyStore, "check_then_act", True)),
    "token reused": ("fence", _token_reused),
    "release frees any attempt": ("takeover", _release_frees_any_attempt),
    "facts not checked at commit": ("fence", _facts_not_checked_at_commit),
    "a commit takes another's certificate for its own": ("fence", _tag_without_certificate),
    "takeover under fence": ("fence", _takeover_under_fence),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rules.fuzz")
    parser.add_argument("--policy", choices=("fence", "takeover"), default="fence")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 1000), metavar=("FROM", "TO"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--mutant", choices=tuple(MUTANTS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    policy, plant = MUTANTS.get(given.mutant, (given.policy, contextlib.nullcontext))
    with plant():
        if given.seed is not None:
            with simulated() as clock:
                run, found = scenario(given.seed, policy, clock)
            print("\n".join([*run.lines, *found]))
            return bool(found)
        report = search(policy, range(*given.seeds), stop=bool(given.mutant))
    print(json.dumps(report) if given.json else json.dumps(report, indent=1))
    return bool(report["violations"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
