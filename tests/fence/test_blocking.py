"""`BlockingFence`: the same calls for synchronous code, its body in the caller's own thread."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pydantic
import pytest

import effectfence
from effectfence import (
    BlockingFence,
    CommitConflict,
    DomainRace,
    EffectFence,
    FenceConfig,
    Fresh,
    IntentInFlight,
    LeaseLost,
    LedgerUnavailable,
    NotExecuted,
    OutcomeUnknown,
    Replay,
    background,
    blocking,
    current_effect,
    lease_lost,
    records,
)
from effectfence.stores.contract import Applied, Change, View
from effectfence.stores.memory import MemoryStore
from tests.conftest import asked


@pytest.fixture(params=["memory", "file"])
def fence(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockingFence]:
    ledger = "memory:" if request.param == "memory" else tmp_path / "ledger" / "effects.jsonl"
    opened = blocking.open(ledger)
    yield opened
    opened.close(drain_seconds=0)


class Slow(MemoryStore):
    """A store whose swaps wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.let_go = threading.Event()
        self.slow: Callable[[Change], bool] = lambda _: True

    async def swap(self, change: Change) -> Applied | View:
        if self.slow(change) and not self.let_go.is_set():
            self.asked.set()
            await asyncio.to_thread(self.let_go.wait)
        return await super().swap(change)


@pytest.fixture
def slow() -> Iterator[Slow]:
    store = Slow()
    yield store
    store.let_go.set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def interrupt_when(condition: threading.Event, *more: threading.Event) -> threading.Thread:
    """Ctrl-C for the main thread, as a terminal would send it."""

    def interrupt() -> None:
        for event in (condition, *more):
            event.wait()
            os.kill(os.getpid(), signal.SIGINT)

    return in_thread(interrupt)


# --- the calls ------------------------------------------------------------------------------------


def test_the_protocol_by_hand(fence: BlockingFence) -> None:
    admission = fence.prepare(asked())
    assert isinstance(admission, Fresh)
    with pytest.raises(IntentInFlight):
        fence.prepare(asked())
    assert fence.heartbeat(admission.prepared) > 0
    cert = fence.commit(admission.prepared, {"id": "ch_1"})
    assert fence.prepare(asked()) == Replay(cert)
    with pytest.raises(CommitConflict) as conflict:
        fence.commit(admission.prepared, {"id": "ch_2"})
    assert conflict.value.result == {"id": "ch_2"}


def test_release_frees_and_abort_fences(fence: BlockingFence) -> None:
    admission = fence.prepare(asked())
    assert isinstance(admission, Fresh)
    fence.release(admission.prepared, "nothing was sent")
    admission = fence.prepare(asked())
    assert isinstance(admission, Fresh)
    fence.abort(admission.prepared, "no answer")
    with pytest.raises(OutcomeUnknown):
        fence.prepare(asked())


def test_a_function_runs_once_and_its_duplicates_get_its_result(fence: BlockingFence) -> None:
    ran: list[int] = []

    @fence.fenced(intent="charge:{order}")
    def charge(order: str, cents: int = 100) -> dict[str, tuple[int, int]]:
        """Charge a card."""
        ran.append(cents)
        return {"charge": (1, cents)}

    assert charge("o1") == charge(order="o1") == {"charge": (1, 100)}
    assert ran == [100]
    assert (charge.__name__, charge.__doc__) == ("charge", "Charge a card.")
    assert not inspect.iscoroutinefunction(charge)
    assert list(inspect.signature(charge).parameters) == ["order", "cents"]


def test_a_method_is_fenced_without_its_self(fence: BlockingFence) -> None:
    class Shop:
        def __init__(self) -> None:
            self.charged = 0

        @fence.fenced(intent="charge:{order}")
        def charge(self, order: str) -> int:
            self.charged += 1
            return self.charged

    shop = Shop()
    assert (shop.charge("o1"), shop.charge("o1"), shop.charged) == (1, 1, 1)
    record = fence.lookup("charge:o1")
    assert record is not None
    assert record.args == {"order": "o1"}


def test_a_block_commits_its_result(fence: BlockingFence) -> None:
    with fence.effect(asked()) as attempt:
        assert attempt.fresh
        assert attempt.prepared == current_effect()
        assert not lease_lost()
        attempt.result = {"id": "ch_1"}
    assert attempt.cert is not None
    assert attempt.cert.result == {"id": "ch_1"}
    with fence.effect(asked()) as again:
        assert not again.fresh
        with pytest.raises(LookupError):
            current_effect()
    assert again.cert == attempt.cert
    with pytest.raises(RuntimeError, match="entered before"):
        again.__enter__()


def test_an_attempt_entered_again_inside_itself_is_reported_all_the_same(
    fence: BlockingFence,
) -> None:
    with fence.effect(asked()) as attempt:
        with pytest.raises(RuntimeError, match="entered before"):
            attempt.__enter__()
        assert current_effect() == attempt.prepared
        attempt.result = 7
    assert fence.prepare(asked()) == Replay(attempt.cert)


def test_what_the_body_raises_goes_on_as_it_is(fence: BlockingFence) -> None:
    error = TimeoutError("no answer")

    def lost() -> None:
        raise error

    with pytest.raises(TimeoutError) as raised:
        fence.run(asked(), lost)
    assert raised.value is error
    ours = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert ours[-2:] == ["run", "lost"]
    with pytest.raises(OutcomeUnknown, match="TimeoutError: no answer"):
        fence.run(asked(), lost)
    with pytest.raises(LookupError):
        current_effect()


def test_a_refusal_shows_no_frames_of_the_loop(fence: BlockingFence) -> None:
    fence.prepare(asked())
    with pytest.raises(IntentInFlight) as refused:
        fence.prepare(asked())
    files = {
        Path(frame.filename).name
        for frame in refused.traceback and traceback.extract_tb(refused.value.__traceback__)
    }
    assert files == {"test_blocking.py", "threads.py", "background.py"}


def test_what_did_not_run_is_free_again(fence: BlockingFence) -> None:
    def refused() -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        fence.run(asked(), refused, not_executed=ConnectionRefusedError)

    def not_executed() -> None:
        raise NotExecuted("nothing was sent")

    with pytest.raises(NotExecuted):
        fence.run(asked(), not_executed)
    assert fence.run(asked(), lambda: 1).result == 1


def test_domains_and_facts(fence: BlockingFence) -> None:
    assert (fence.current("stock"), fence.reserve("stock", 0)) == (0, 1)
    with pytest.raises(DomainRace):
        fence.reserve("stock", 0)
    seen = fence.observe("stock")
    assert [(entry.domain, entry.seq) for entry in seen.read_set] == [("stock", 1)]
    assert (fence.domain_count(), fence.intent_count()) == (1, 0)


def test_the_operators_calls(fence: BlockingFence) -> None:
    for intent in ("a", "b"):
        admission = fence.prepare(asked(intent, domain=intent))
        assert isinstance(admission, Fresh)
        fence.abort(admission.prepared, "no answer")
    assert {record.intent for record in fence.intents("unknown")} == {"a", "b"}
    cert = fence.settle("a", {"id": 1}, by="ada", reason="found it")
    assert cert.result == {"id": 1}
    assert fence.clear("b", by="ada", reason="nothing there")
    assert {record.intent: record.state for record in fence.intents()} == {
        "a": "done",
        "b": "cleared",
    }
    assert {word.intent: word.by for word in fence.history()} == {"a": "ada", "b": "ada"}
    assert fence.sweep() == 0
    assert fence.stats().admitted == 2


def test_decisions_are_followed_from_another_thread(fence: BlockingFence) -> None:
    seen: list[str] = []
    done = threading.Event()

    def follow() -> None:
        for decision in fence.follow():
            seen.append(decision.intent)
            done.set()
            return

    following = in_thread(follow)
    number = 0
    while not done.wait(0.05):  # following begins at some time of its own
        number += 1
        fence.run(asked(f"i{number}", domain=f"d{number}"), int)
    following.join()
    assert seen[0].startswith("i")


def test_more_intents_than_a_page_are_listed_once_each(fence: BlockingFence) -> None:
    for number in range(300):
        fence.run(asked(f"i{number}", domain=f"d{number}"), int)
    assert sorted(r.intent for r in fence.intents("done")) == sorted(f"i{n}" for n in range(300))
    listing = fence.intents()
    next(listing)
    listing.close()  # left in the middle


def test_scopes_have_names_of_their_own(fence: BlockingFence) -> None:
    tenant = fence.scoped("tenant-a")
    assert tenant.run(asked(), lambda: 1).result == 1
    assert fence.run(asked(), lambda: 2).result == 2
    tenant.close()  # closes nothing
    assert tenant.run(asked(), lambda: 3).result == 1
    with pytest.raises(ValueError, match="scope"):
        fence.scoped("")


def test_the_calls_are_those_of_the_fence() -> None:
    """But for life cycles, which have names of their own, and reconcilers, which are async."""
    from tests.test_public_api import SIGNATURES, bare

    here = {name for name in vars(BlockingFence) if not name.startswith("_")}
    async_only = {"aclose", "reconciler", "reconcile", "reconciling"}
    assert here == {*SIGNATURES, "config", "close", "within"} - async_only, (
        "give BlockingFence the same call, or name it as one that only an async program has"
    )
    for name in here & SIGNATURES.keys():
        assert bare(getattr(BlockingFence, name)) == SIGNATURES[name]
        assert getattr(BlockingFence, name).__doc__


# --- threads and loops ----------------------------------------------------------------------------


def test_a_hundred_threads_race_and_one_runs(fence: BlockingFence) -> None:
    ran, got = [], []
    ready = threading.Barrier(100)

    @fence.fenced(intent="charge:{order}")
    def charge(order: str) -> dict[str, int]:
        ran.append(threading.get_ident())
        return {"charge": len(ran)}

    def race() -> None:
        ready.wait()
        got.append(charge("o1"))

    for thread in [in_thread(race) for _ in range(100)]:
        thread.join()
    assert (len(ran), got) == (1, [{"charge": 1}] * 100)
    assert fence.stats().log_line().startswith("effectfence since boot: admitted=1 replayed=99 ")


def test_the_body_runs_in_the_callers_thread_with_its_context(fence: BlockingFence) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("a")

    def body() -> tuple[bool, str]:
        tenant.set("b")
        return threading.current_thread() is here, current_effect().intent

    here = threading.current_thread()
    assert fence.run(asked(), body).result == [True, "charge:o1"]
    assert tenant.get() == "b"


def test_effects_nest_and_the_outer_one_is_current_again(fence: BlockingFence) -> None:
    with fence.effect(asked("outer")) as outer:
        with fence.effect(asked("inner", domain="inner")) as inner:
            assert current_effect() == inner.prepared
        assert current_effect() == outer.prepared


def test_an_effect_inside_itself_is_refused_at_once(fence: BlockingFence) -> None:
    with fence.effect(asked()), pytest.raises(IntentInFlight):
        fence.run(asked(), lambda: 1, wait_seconds=600)


def test_a_duplicate_waits_for_the_outcome(fence: BlockingFence) -> None:
    got: list[Any] = []
    with fence.effect(asked()) as attempt:
        waiting = in_thread(lambda: got.append(fence.run(asked(), lambda: 2)))
        attempt.result = 1
    waiting.join()
    assert got == [attempt.cert]


async def test_a_thread_with_an_event_loop_is_refused(fence: BlockingFence) -> None:
    ran: list[int] = []
    calls: list[Callable[[], object]] = [
        lambda: fence.prepare(asked()),
        lambda: fence.run(asked(), lambda: ran.append(1)),
        lambda: fence.effect(asked()),
        lambda: list(fence.intents()),
        lambda: fence.close(),
        lambda: blocking.open(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this thread runs an event loop"):
            call()
    assert ran == []
    assert await asyncio.to_thread(lambda: fence.run(asked(), lambda: 1).result) == 1


async def test_an_async_fence_serves_threads_while_its_loop_is_busy(tmp_path: Path) -> None:
    async with EffectFence.open(tmp_path / "effects.jsonl") as fence:
        done = threading.Event()

        def work() -> None:
            fence.blocking.run(asked(), lambda: current_effect().intent)
            done.set()

        thread = in_thread(work)
        done.wait()  # this loop stands still meanwhile
        thread.join()
        replay = await fence.prepare(asked())
        assert isinstance(replay, Replay)
        assert replay.cert.result == "charge:o1"


async def test_closing_the_async_fence_waits_for_what_threads_hold() -> None:
    fence = EffectFence()
    begun, go_on = threading.Event(), threading.Event()
    certs: list[Any] = []

    def body() -> int:
        begun.set()
        go_on.wait()
        return 7

    thread = in_thread(lambda: certs.append(fence.blocking.run(asked(), body)))
    await asyncio.to_thread(begun.wait)
    closing = asyncio.create_task(fence.aclose(60.0))
    while not fence._shared.closing:  # noqa: ASYNC110 - nobody could set an event for it
        await asyncio.sleep(0)
    go_on.set()
    await closing
    await asyncio.to_thread(thread.join)
    assert certs[0].result == 7


def test_one_background_thread_serves_every_fence() -> None:
    with blocking.open() as one, blocking.open() as other:
        one.run(asked(), lambda: 1)
        other.run(asked(), lambda: 1)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("effectfence-blocking") == 1


def test_a_fault_does_not_end_the_background_loop(fence: BlockingFence) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    call = background.Call(leave)
    background.background().start(call)
    assert call.wait()
    assert isinstance(call.error, SystemExit)
    assert fence.run(asked(), lambda: 1).result == 1


async def test_a_call_begins_once_and_never_after_it_was_taken_back() -> None:
    begun: list[int] = []

    async def begin() -> int:
        begun.append(1)
        return 7

    running: set[asyncio.Task[None]] = set()
    call = background.Call(begin)
    call.begin(running)
    call.begin(running)
    await asyncio.wait(set(running))
    undone: list[int] = []

    async def undo(value: int) -> None:
        undone.append(value)

    await call.take_back(undo)
    assert (begun, undone, call.result()) == ([1], [7], 7)
    late = background.Call(begin)
    await late.take_back(undo)
    late.begin(running)
    await asyncio.sleep(0)
    assert (begun, undone, running) == ([1], [7], set())


# --- what is refused before anything runs ---------------------------------------------------------


def test_async_functions_and_generators_are_refused(fence: BlockingFence) -> None:
    async def charge() -> None: ...

    def generate() -> Iterator[int]:
        yield 1

    for function in (charge, generate):
        with pytest.raises(TypeError):
            fence.run(asked(), function)
        with pytest.raises(TypeError):
            fence.fenced(intent="i")(function)
    assert fence.lookup("charge:o1") is None


def test_a_function_that_returns_an_awaitable_is_unknown(fence: BlockingFence) -> None:
    async def charge() -> None: ...

    with pytest.raises(TypeError, match="awaitable"):
        fence.run(asked(), lambda: charge())
    with pytest.raises(OutcomeUnknown):
        fence.run(asked(), lambda: 1)


def test_what_a_caller_got_wrong_is_refused(fence: BlockingFence) -> None:
    with pytest.raises(ValueError, match="wait_seconds"):
        fence.prepare(asked(), wait_seconds=-1)
    with pytest.raises(ValueError, match="does not take"):
        fence.fenced(intent="charge:{nobody}")(lambda order: order)
    with pytest.raises(TypeError, match="EffectRequest"):
        fence.prepare("charge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 seconds"):
        fence.within(0)


serialized_in: list[threading.Thread] = []


class Receipt(pydantic.BaseModel):
    id: str

    @pydantic.field_serializer("id")
    def _id(self, value: str) -> str:
        serialized_in.append(threading.current_thread())
        return value


# --- results --------------------------------------------------------------------------------------


def test_a_result_is_encoded_in_its_own_thread(fence: BlockingFence) -> None:
    serialized_in.clear()

    @fence.fenced(intent="charge")
    def charge() -> Receipt:
        return Receipt(id="ch_1")

    first = charge()
    assert isinstance(first, Receipt)
    assert set(serialized_in) == {threading.current_thread()}
    assert charge() == first


def test_a_result_that_is_no_json_is_marked(fence: BlockingFence) -> None:
    thing = object()

    @fence.fenced(intent="charge")
    def charge() -> Any:
        return thing

    assert charge() is thing
    with pytest.raises(effectfence.ResultNotRecorded):
        charge()


# --- leases ---------------------------------------------------------------------------------------


def test_a_lost_lease_is_seen_in_the_body_and_refused_at_its_end() -> None:
    with blocking.open(config=FenceConfig(lease_ttl=0.2, max_hold=0.3)) as fence:

        def hang() -> None:
            with fence.effect(asked()) as attempt:
                assert attempt.lost.wait(60)
                assert lease_lost()
                attempt.result = {"id": "ch_1"}
                fence.clear("charge:o1", by="ada", reason="it hangs", force=True)

        with pytest.raises(LeaseLost) as lost:
            hang()
        assert (lost.value.ran, lost.value.result) == (True, {"id": "ch_1"})


def test_a_lease_is_renewed_while_the_body_blocks() -> None:
    with blocking.open(config=FenceConfig(lease_ttl=0.3)) as fence:
        renewed = threading.Event()
        real, renewals = fence._source.fence()._renew, []

        async def renew(prepared: Any) -> float:
            seconds = await real(prepared)
            renewals.append(seconds)
            if len(renewals) == 4:  # more than a lease
                renewed.set()
            return seconds

        fence._source.fence()._renew = renew  # type: ignore[method-assign]
        with fence.effect(asked()) as attempt:
            assert renewed.wait(60)
        assert attempt.cert is not None
        assert not attempt.lost.is_set()


def test_an_attempt_that_nobody_has_any_more_is_unknown(fence: BlockingFence) -> None:
    attempt = fence.effect(asked())
    contextvars.copy_context().run(attempt.__enter__)
    del attempt
    with pytest.raises(OutcomeUnknown, match="let go of it"):
        fence.run(asked(), lambda: 1, wait_seconds=60)


def test_a_thread_that_ends_inside_a_body_leaves_it_unknown(fence: BlockingFence) -> None:
    def body() -> None:
        raise SystemExit

    def work() -> None:
        with suppress(SystemExit):  # which pytest would report
            fence.run(asked(), body)

    in_thread(work).join()
    with pytest.raises(OutcomeUnknown, match="SystemExit"):
        fence.run(asked(), lambda: 1)


# --- interruptions --------------------------------------------------------------------------------


def test_an_interrupt_before_the_ticket_is_handed_out_releases_it(slow: Slow) -> None:
    fence = EffectFence(store=slow).blocking
    ran: list[int] = []
    interrupting = interrupt_when(slow.asked)
    with pytest.raises(KeyboardInterrupt):
        fence.run(asked(), lambda: ran.append(1))
    interrupting.join()
    slow.let_go.set()
    assert fence.run(asked(), lambda: 2, wait_seconds=60).result == 2
    assert ran == []
    with pytest.raises(LookupError):
        current_effect()


def test_an_interrupt_in_a_bare_prepare_releases_what_it_came_to(slow: Slow) -> None:
    fence = EffectFence(store=slow).blocking
    interrupting = interrupt_when(slow.asked)
    with pytest.raises(KeyboardInterrupt):
        fence.prepare(asked())
    interrupting.join()
    slow.let_go.set()
    assert isinstance(fence.prepare(asked(), wait_seconds=60), Fresh)


def test_a_ticket_that_arrives_as_its_waiter_is_interrupted_is_released(
    fence: BlockingFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = background.Call.result

    def interrupted(call: Any) -> Any:
        real(call)
        monkeypatch.undo()
        raise KeyboardInterrupt  # between the answer and the caller

    monkeypatch.setattr(background.Call, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fence.prepare(asked())
    assert isinstance(fence.prepare(asked()), Fresh)
    monkeypatch.setattr(background.Call, "result", interrupted)
    with pytest.raises(KeyboardInterrupt), fence.effect(asked("other", domain="other")):
        pytest.fail("its body began")
    assert isinstance(fence.prepare(asked("other", domain="other")), Fresh)


def test_an_interrupted_body_is_unknown(fence: BlockingFence) -> None:
    begun, never = threading.Event(), threading.Lock()
    never.acquire()

    def body() -> None:
        begun.set()
        while not never.acquire(timeout=0.1):  # a signal on its threshold ends no long wait
            pass

    interrupting = interrupt_when(begun)
    with pytest.raises(KeyboardInterrupt):
        fence.run(asked(), body)
    interrupting.join()
    with pytest.raises(OutcomeUnknown, match="KeyboardInterrupt"):
        fence.run(asked(), lambda: 1)


def commits(change: Change) -> bool:
    return any(put.label == records.DONE for put in change.puts)


def test_an_interrupt_while_it_is_recorded_goes_on_after_the_recording(slow: Slow) -> None:
    slow.slow = commits
    fence = EffectFence(store=slow).blocking
    interrupted = threading.Event()

    def handle(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        interrupting = interrupt_when(slow.asked)
        letting_go = in_thread(lambda: interrupted.wait() and slow.let_go.set())
        with pytest.raises(KeyboardInterrupt), fence.effect(asked()) as attempt:
            attempt.result = 7
    finally:
        signal.signal(signal.SIGINT, before)
    interrupting.join()
    letting_go.join()
    assert attempt.cert is not None
    assert attempt.cert.result == 7
    assert fence.prepare(asked()) == Replay(attempt.cert)


def test_a_second_interrupt_leaves_and_the_recording_goes_on(slow: Slow) -> None:
    slow.slow = commits
    fence = EffectFence(store=slow).blocking
    first = threading.Event()

    def handle(*_: object) -> None:
        first.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        interrupting = interrupt_when(slow.asked, first)
        with pytest.raises(KeyboardInterrupt):
            fence.run(asked(), lambda: 7)
    finally:
        signal.signal(signal.SIGINT, before)
    interrupting.join()
    slow.let_go.set()
    replay = fence.prepare(asked(), wait_seconds=60)
    assert isinstance(replay, Replay)
    assert replay.cert.result == 7


# --- a ledger that does not answer ----------------------------------------------------------------


def test_within_gives_up_on_an_admission_and_nothing_ran(slow: Slow) -> None:
    fence = EffectFence(store=slow).blocking
    ran: list[int] = []
    with pytest.raises(LedgerUnavailable, match=r"within 0\.05 s") as late:
        fence.within(0.05).run(asked(), lambda: ran.append(1), wait_seconds=0)
    assert (late.value.ran, ran) == (False, [])
    slow.let_go.set()
    assert fence.run(asked(), lambda: 2, wait_seconds=60).result == 2


def test_within_gives_up_on_a_commit_and_it_is_recorded_later(slow: Slow) -> None:
    slow.slow = commits
    fence = EffectFence(store=slow).blocking
    with pytest.raises(LedgerUnavailable, match="its outcome is not recorded yet") as late:
        fence.within(0.05).run(asked(), lambda: 7)
    assert (late.value.ran, late.value.result) == (True, 7)
    slow.let_go.set()
    assert fence.commit(late.value.prepared, 7).result == 7


def test_the_bodys_error_goes_on_although_the_ledger_does_not_answer(slow: Slow) -> None:
    slow.slow = lambda change: any(expect.tag for expect in change.expect.values())
    fence = EffectFence(store=slow).blocking

    def lost() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        fence.within(0.05).run(asked(), lost)
    slow.let_go.set()
    with pytest.raises(OutcomeUnknown):
        fence.run(asked(), lost, wait_seconds=60)


# --- one for each process -------------------------------------------------------------------------


def test_a_fence_for_each_process_opens_at_the_first_call(tmp_path: Path) -> None:
    ledger = tmp_path / "effects.jsonl"
    fence = blocking.per_process(ledger)

    @fence.fenced(intent="charge:{order}")
    def charge(order: str) -> int:
        return 1

    assert not ledger.exists()
    assert charge("o1") == 1
    assert ledger.exists()
    fence.close()
    assert charge("o1") == 1  # opened again
    fence.close()
    fence.close()


def test_a_memory_fence_for_each_process_is_refused() -> None:
    with pytest.raises(ValueError, match="memory: is another fence in each process"):
        blocking.per_process("memory:")


def test_a_closed_fence_refuses(fence: BlockingFence) -> None:
    fence.close()
    fence.close()
    with pytest.raises(LedgerUnavailable, match="it is closed"):
        fence.run(asked(), lambda: 1)
