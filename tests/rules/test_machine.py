"""A Hypothesis state machine drives the real fence on the SimLoop, with virtual time.

Hypothesis chooses what callers, holders, operators and time do next, and shrinks what goes wrong to
a short story; the loop's seed chooses the schedule in between. Calls stay under way while others
begin; processes die; the checker looks after every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from effectfence import (
    EffectFence,
    EffectRequest,
    FenceConfig,
    FenceError,
    Fresh,
    NotExecuted,
    PreparedEffect,
    ReadSetEntry,
    Replay,
)
from tests.checker import History, violations
from tests.rules.faulty import SETTLED, Faults, FaultyStore, Ledger, PromptStore
from tests.rules.fuzz import SimKeeper, bury, simulated
from tests.rules.simloop import SimLoop

LEASE = 10.0
INTENTS = ("i0", "i1")
FACT = "fact"
WORD = {"by": "ops", "reason": "looked at the tool's log"}


@dataclass(eq=False)
class Process:
    fence: EffectFence
    store: FaultyStore
    asking: Counter[str] = field(default_factory=Counter)
    """Intents for which a ticket may still come."""


@dataclass(eq=False)
class Hold:
    """A ticket in somebody's hands: what its effect has come to, and how it is reported."""

    process: Process
    ticket: PreparedEffect
    fired: bool = False
    ended: bool = False
    body: asyncio.Future[str] | None = None
    """Set by `effect()`: the body waits here for how it ends."""


class FenceMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(["fence", "takeover"]),
        causal=st.sampled_from(["off", "off", "strict"]),
        rough=st.sampled_from([0.0, 1.0, 3.0]),
        slow=st.sampled_from([0.0, 0.3]),
        eager=st.sampled_from([0, 30]),
    )
    def begin(
        self, seed: int, policy: str, causal: str, rough: float, slow: float, eager: int
    ) -> None:
        self.eager = eager
        self.stack = contextlib.ExitStack()
        clock = self.stack.enter_context(simulated())
        self.loop = clock.loop = SimLoop(seed)
        self.history = History()
        self.ledger = self.new_ledger()
        self.policy = policy
        self.faults = Faults(slow, 0.1 * rough, 0.1 * rough, 0.02 * rough)
        self.config = FenceConfig(
            lease_ttl=LEASE, on_lease_expiry=policy, causal=causal, result_ttl=None
        )
        self.reader = EffectFence(self.config, store=self.ledger)
        self.operator = EffectFence(
            self.config, store=PromptStore(self.ledger, self.loop, self.faults)
        )
        self.settler = EffectFence(
            self.config, store=FaultyStore(self.ledger, self.loop, self.faults)
        )
        self.processes = [self.process() for _ in range(3)]
        self.dead: list[Process] = []
        self.holds: list[Hold] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.fired: Counter[str] = Counter()

    def new_ledger(self) -> Ledger:
        return Ledger(self.loop, self.history)

    def process(self) -> Process:
        store = FaultyStore(self.ledger, self.loop, self.faults)
        fence = EffectFence(self.config, store=store)
        fence._shared.keeper = SimKeeper()  # type: ignore[assignment]
        return Process(fence, store)

    # --- callers ----------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 2),
        intent=st.sampled_from(INTENTS),
        on_fact=st.booleans(),
        patience=st.sampled_from([0.0, 0.0, 5.0, 100.0]),
        in_one_call=st.booleans(),
    )
    def ask(
        self, which: int, intent: str, on_fact: bool, patience: float, in_one_call: bool
    ) -> None:
        process = self.processes[which]
        seen = self.at_once(self.reader.observe("d", FACT))
        request = EffectRequest(
            intent=intent,
            domain="d",
            tool="charge",
            args={},
            agent=f"a{which}",
            read_set=(ReadSetEntry(domain=FACT, seq=seen.read_set[1].seq),) if on_fact else (),
            known_clock=seen.clock,
        )
        call = self.in_one_call if in_one_call else self.prepare
        self.start(call(process, request, patience))

    async def prepare(self, process: Process, request: EffectRequest, patience: float) -> None:
        process.asking[request.intent] += 1
        try:
            admission = await process.fence.prepare(request, wait_seconds=patience)
        finally:
            process.asking[request.intent] -= 1
        match admission:
            case Fresh(prepared):
                self.admitted(Hold(process, prepared))
            case Replay(cert):
                self.history.acknowledged.append((request.intent, cert.hash))

    async def in_one_call(self, process: Process, request: EffectRequest, patience: float) -> None:
        process.asking[request.intent] += 1
        hold = None
        try:
            async with process.fence.effect(request, wait_seconds=patience) as attempt:
                if attempt.fresh:
                    hold = Hold(process, attempt.prepared, body=self.loop.create_future())
                    self.admitted(hold)
                    assert hold.body is not None
                    attempt.result = await hold.body
        except FenceError as error:
            self.told(hold, error)
            raise
        finally:
            process.asking[request.intent] -= 1
            if hold is not None:
                hold.ended = True
        assert attempt.cert is not None
        self.history.acknowledged.append((request.intent, attempt.cert.hash))

    def admitted(self, hold: Hold) -> None:
        self.holds.append(hold)
        self.history.tokens.append(hold.ticket.token)
        if self.fired[hold.ticket.intent]:
            self.history.fresh_after_effect.append(hold.ticket.intent)

    # --- holders ----------------------------------------------------------------------------------

    def some(self, number: int, *, fired: bool | None = None) -> Hold | None:
        """A living holder's ticket that was not reported yet."""
        holds = [
            hold
            for hold in self.holds
            if not hold.ended and not hold.process.store.dead and fired in (None, hold.fired)
        ]
        return holds[number % len(holds)] if holds else None

    @precondition(lambda self: self.some(0, fired=False))
    @rule(number=st.integers(0, 9))
    def fire(self, number: int) -> None:
        hold = self.some(number, fired=False)
        assert hold is not None
        hold.fired = True
        intent, seq = hold.ticket.intent, hold.ticket.seq
        key = f"intent/{intent}"
        record = self.ledger.read([key]).records[key]
        if record is None or record.label != "open" or record.stamp != seq:
            self.history.unclaimed.append(intent)
        self.fired[intent] += 1
        self.history.effects.append((intent, seq))

    @precondition(lambda self: self.some(0, fired=True))
    @rule(number=st.integers(0, 9), times=st.integers(1, 2))
    def commit(self, number: int, times: int) -> None:
        hold = self.some(number, fired=True)
        assert hold is not None
        if hold.body is not None:
            if not hold.body.done():
                hold.body.set_result("ran")
            return
        hold.ended = times == 2
        for _ in range(times):
            self.start(self.committing(hold))

    async def committing(self, hold: Hold) -> None:
        try:
            cert = await hold.process.fence.commit(hold.ticket, "ran")
        except FenceError as error:
            self.told(hold, error)
            raise
        self.history.acknowledged.append((hold.ticket.intent, cert.hash))

    def told(self, hold: Hold | None, error: FenceError) -> None:
        if hold is not None and hold.fired and error.ran is False:
            self.history.told_nothing_ran.append(hold.ticket.intent)

    @precondition(lambda self: self.some(0))
    @rule(number=st.integers(0, 9))
    def abort(self, number: int) -> None:
        hold = self.some(number)
        assert hold is not None
        if hold.body is None:
            self.start(hold.process.fence.abort(hold.ticket, "nobody knows"))
        elif not hold.body.done():
            hold.body.set_exception(TimeoutError())

    @precondition(lambda self: self.some(0, fired=False))
    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        hold = self.some(number, fired=False)
        assert hold is not None
        hold.ended = True
        if hold.body is None:
            self.start(hold.process.fence.release(hold.ticket, "connection refused"))
        elif not hold.body.done():
            hold.body.set_exception(NotExecuted())

    @precondition(lambda self: self.some(0))
    @rule(number=st.integers(0, 9))
    def heartbeat(self, number: int) -> None:
        hold = self.some(number)
        assert hold is not None
        self.start(hold.process.fence.heartbeat(hold.ticket))

    # --- the world --------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, LEASE / 2, LEASE, 5 * LEASE]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @precondition(lambda self: self.tasks)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        self.tasks[number % len(self.tasks)].cancel()

    @rule(which=st.integers(0, 2))
    def die(self, which: int) -> None:
        process = self.processes[which]
        process.store.dead = True
        self.dead.append(process)
        self.processes[which] = self.process()

    @rule()
    def the_fact_moves(self) -> None:
        async def move() -> None:
            await self.reader.reserve(FACT, await self.reader.current(FACT))

        self.at_once(move())

    @rule(intent=st.sampled_from(INTENTS))
    def an_operator_who_knows_settles_or_clears(self, intent: str) -> None:
        if self.fired[intent]:
            self.start(self.settling(intent))
        elif not self.may_fire(intent):
            with contextlib.suppress(FenceError):
                self.at_once(self.operator.clear(intent, **WORD))

    async def settling(self, intent: str) -> None:
        cert = await self.settler.settle(intent, SETTLED, **WORD)
        self.history.acknowledged.append((intent, cert.hash))

    def may_fire(self, intent: str) -> bool:
        asking = any(process.asking[intent] for process in self.processes)
        holding = any(
            hold.ticket.intent == intent and not hold.ended and not hold.process.store.dead
            for hold in self.holds
        )
        return asking or holding

    # --- looking ----------------------------------------------------------------------------------

    @invariant()
    def the_checker_is_content(self) -> None:
        final: dict[str, tuple[str | None, str | None]] = {}
        for intent in INTENTS:
            record = self.at_once(self.reader.lookup(intent))
            cert = record.cert if record is not None else None
            final[intent] = (record and record.state, cert and cert.hash)
        assert not violations(self.history, final, policy=self.policy)

    @invariant()
    def no_exception_is_lost(self) -> None:
        ended = [task for task in self.tasks if task.done()]
        self.tasks = [task for task in self.tasks if not task.done()]
        for task in ended:
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, FenceError | NotExecuted | TimeoutError), error
        assert not self.loop.errors

    def teardown(self) -> None:
        try:
            self.loop.run_until_complete(asyncio.sleep(1000))
            self.the_checker_is_content()
            self.no_exception_is_lost()
        finally:
            bury(asyncio.all_tasks(self.loop))
            self.stack.close()

    def start(self, call: Coroutine[Any, Any, Any]) -> None:
        """Begin a call, and let it come as far as it does without waiting for anybody."""
        self.tasks.append(self.loop.create_task(call))
        for _ in range(self.eager):
            self.loop.run_until_complete(asyncio.sleep(0))

    def at_once(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The answer of a call over a store that never suspends."""
        try:
            call.send(None)
        except StopIteration as answered:
            return answered.value
        raise AssertionError("it suspended")


FenceMachine.TestCase.settings = settings(
    max_examples=2_000 if os.environ.get("EFFECTFENCE_LONG") == "1" else 150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFenceMachine = FenceMachine.TestCase
