"""`effect()`, `run()` and `@fenced`: exactly one outcome for every way a body can end."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from effectfence import (
    CommitStale,
    EffectCert,
    EffectFence,
    EffectRequest,
    FenceConfig,
    IntentConflict,
    IntentInFlight,
    LedgerUnavailable,
    NotExecuted,
    OutcomeUnknown,
    PreparedEffect,
    ReadSetEntry,
    ResultNotRecorded,
    current_effect,
)
from tests.conftest import OpenFence, asked, claimed


async def state_of(fence: EffectFence, intent: str = "charge:o1") -> str:
    record = await fence.lookup(intent)
    return "absent" if record is None else record.state


async def reason_of(fence: EffectFence, intent: str = "charge:o1") -> str:
    record = await fence.lookup(intent)
    assert record is not None
    return record.reason or ""


# --- effect() -------------------------------------------------------------------------------------


async def test_leaving_the_body_commits_its_result(fence: EffectFence) -> None:
    async with fence.effect(asked()) as attempt:
        assert attempt.fresh
        assert attempt.cert is None
        assert attempt.prepared.intent == "charge:o1"
        attempt.result = {"receipt": 1}
    assert attempt.cert is not None
    assert attempt.cert.result == {"receipt": 1}
    async with fence.effect(asked()) as again:
        assert not again.fresh
        assert again.cert == attempt.cert
        with pytest.raises(RuntimeError, match="fresh"):
            _ = again.prepared


async def test_a_result_left_out_is_none(fence: EffectFence) -> None:
    async with fence.effect(asked()) as attempt:
        pass
    assert attempt.cert is not None
    assert attempt.cert.result is None


async def test_not_executed_releases_and_goes_on_to_the_caller(fence: EffectFence) -> None:
    with pytest.raises(NotExecuted, match="no route"):
        async with fence.effect(asked()):
            raise NotExecuted("no route to host")
    assert await state_of(fence) == "absent"


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("no answer"),
        ConnectionResetError(),
        ValueError("bad"),
        KeyboardInterrupt(),
        SystemExit(1),
        ExceptionGroup("two", [NotExecuted(), ValueError("x")]),
        ExceptionGroup("deep", [ExceptionGroup("in", [NotExecuted(), KeyError("k")])]),
    ],
    ids=repr,
)
async def test_any_other_exception_is_recorded_as_unknown_and_goes_on(
    fence: EffectFence, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        async with fence.effect(asked()):
            raise error
    assert caught.value is error
    assert await state_of(fence) == "unknown"
    assert type(error).__name__ in await reason_of(fence)


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("one", [NotExecuted("a")]),
        ExceptionGroup("deep", [NotExecuted(), ExceptionGroup("in", [NotExecuted()])]),
    ],
    ids=repr,
)
async def test_a_group_of_nothing_but_not_executed_releases(
    fence: EffectFence, error: ExceptionGroup[Exception]
) -> None:
    with pytest.raises(ExceptionGroup):
        async with fence.effect(asked()):
            raise error
    assert await state_of(fence) == "absent"


async def test_a_cancelled_body_is_recorded_as_unknown(fence: EffectFence) -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with fence.effect(asked()):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await reason_of(fence) == "cancelled: outcome unknown"


async def test_a_timeout_around_the_body_is_recorded_as_unknown(fence: EffectFence) -> None:
    with pytest.raises(TimeoutError):  # noqa: PT012 - the body is the point
        async with asyncio.timeout(None) as patience, fence.effect(asked()):
            patience.reschedule(0)
            await asyncio.Event().wait()
    assert await reason_of(fence) == "cancelled: outcome unknown"


async def test_a_refusal_never_enters_the_body(fence: EffectFence) -> None:
    await claimed(fence)
    with pytest.raises(IntentInFlight):
        async with fence.effect(asked(), wait_seconds=0):
            pytest.fail("the body ran")


async def test_a_commit_that_is_refused_is_raised_with_the_result(fence: EffectFence) -> None:
    with pytest.raises(CommitStale) as caught:  # noqa: PT012 - the body is the point
        async with fence.effect(asked(read_set=(ReadSetEntry(domain="stock", seq=0),))) as attempt:
            await fence.reserve("stock", 0)
            attempt.result = "ran"
    assert caught.value.result == "ran"
    assert await state_of(fence) == "unknown"


async def test_an_outcome_that_cannot_be_recorded_leaves_the_bodys_exception_with_a_note(
    fence: EffectFence,
) -> None:
    with pytest.raises(ValueError, match="mine") as caught:  # noqa: PT012 - the body is the point
        async with fence.effect(asked()):
            await fence.clear("charge:o1", reason="test", by="ops", force=True)
            raise ValueError("mine")
    assert "no longer speaks" in caught.value.__notes__[0]


async def test_the_current_effect_is_the_innermost_one(fence: EffectFence) -> None:
    with pytest.raises(LookupError, match="no effect is running"):
        current_effect()
    async with fence.effect(asked("outer")):
        async with fence.effect(asked("inner")) as inner:
            assert current_effect() is inner.prepared
            assert await asyncio.to_thread(current_effect) is inner.prepared
        assert current_effect().intent == "outer"
    with pytest.raises(LookupError):
        current_effect()


async def test_leaving_in_another_context_still_records_the_outcome(fence: EffectFence) -> None:
    """An async generator may be entered by one task and closed by another."""

    async def charging() -> AsyncIterator[None]:
        async with fence.effect(asked()):
            yield

    generator = charging()
    await asyncio.create_task(anext(generator), context=contextvars.copy_context())  # type: ignore[arg-type]
    await asyncio.create_task(generator.aclose(), context=contextvars.Context())  # type: ignore[attr-defined]
    assert await state_of(fence) == "unknown"


# --- run() ----------------------------------------------------------------------------------------


def plain(*args: Any, **kwargs: Any) -> Any:
    return {"args": list(args), "kwargs": kwargs}


async def coroutine(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


class AsyncCallable:
    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)


@pytest.mark.parametrize(
    "function",
    [
        plain,
        coroutine,
        functools.partial(coroutine),
        AsyncCallable(),
        lambda *args, **kwargs: coroutine(*args, **kwargs),
    ],
    ids=["plain", "async", "partial", "callable", "returns an awaitable"],
)
async def test_run_runs_once_and_gives_the_certificate_each_time(
    fence: EffectFence, function: Callable[..., Any]
) -> None:
    cert = await fence.run(asked(), function, 1, x=2)
    assert isinstance(cert, EffectCert)
    assert cert.result == {"args": [1], "kwargs": {"x": 2}}
    assert await fence.run(asked(), lambda: pytest.fail("ran twice")) == cert


@pytest.mark.parametrize("how", ["async", "plain"])
async def test_inside_run_the_ticket_is_the_current_effect(fence: EffectFence, how: str) -> None:
    seen: list[PreparedEffect] = []

    async def effect() -> None:
        seen.append(current_effect())

    def plain_effect() -> None:
        seen.append(current_effect())

    await fence.run(asked(), effect if how == "async" else plain_effect)
    assert seen[0].intent == "charge:o1"
    assert len(seen[0].idempotency_key) == 32
    with pytest.raises(LookupError):
        current_effect()


@pytest.mark.parametrize("how", ["async", "plain"])
@pytest.mark.parametrize("given", [ConnectionRefusedError, (KeyError, ConnectionRefusedError)])
async def test_exceptions_that_the_caller_named_release(
    fence: EffectFence, how: str, given: Any
) -> None:
    async def effect() -> None:
        raise ConnectionRefusedError

    def plain_effect() -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await fence.run(asked(), effect if how == "async" else plain_effect, not_executed=given)
    assert await state_of(fence) == "absent"


@pytest.mark.parametrize("error", [TimeoutError, OSError, StopIteration, NotExecuted])
async def test_what_a_plain_function_raises_reaches_the_caller(
    fence: EffectFence, error: type[Exception]
) -> None:
    def effect() -> None:
        raise error("from the thread")

    expected = RuntimeError if error is StopIteration else error
    with pytest.raises(expected):
        await fence.run(asked(), effect)
    assert await state_of(fence) == ("absent" if error is NotExecuted else "unknown")


async def test_what_cannot_be_run_is_refused_before_anything_else(fence: EffectFence) -> None:
    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    for function in (generator, async_generator, "no function"):
        with pytest.raises(TypeError):
            await fence.run(asked(), function)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            fence.fenced("x")(function)  # type: ignore[arg-type]
    assert await fence.intent_count() == 0


async def test_a_cancelled_async_effect_is_unknown(fence: EffectFence) -> None:
    entered = asyncio.Event()

    async def effect() -> None:
        entered.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(fence.run(asked(), effect))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state_of(fence) == "unknown"


async def test_a_plain_function_goes_on_when_its_caller_is_cancelled_and_is_committed(
    fence: EffectFence,
) -> None:
    loop = asyncio.get_running_loop()
    entered, go_on = asyncio.Event(), threading.Event()

    def effect() -> str:
        loop.call_soon_threadsafe(entered.set)
        go_on.wait()
        return "ran"

    task = asyncio.create_task(fence.run(asked(), effect))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state_of(fence) == "in_flight"
    go_on.set()
    await fence.aclose(drain_seconds=60)
    reopened = EffectFence(store=fence._shared.store)
    if fence._shared.store.durable:
        return  # its ledger is closed; what aclose drained is looked at by the memory variant
    record = await reopened.lookup("charge:o1")
    assert record is not None
    assert record.cert is not None
    assert record.cert.result == "ran"


async def test_a_failure_that_nobody_waits_for_any_more_is_logged(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    entered, go_on = asyncio.Event(), threading.Event()

    def effect() -> str:
        loop.call_soon_threadsafe(entered.set)
        go_on.wait()
        raise OSError("the cable")

    task = asyncio.create_task(fence.run(asked(), effect))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (owned,) = fence._shared.custody.owned
    with caplog.at_level(logging.WARNING, logger="effectfence"):
        go_on.set()
        await asyncio.wait([owned])
        await asyncio.sleep(0)
    assert "the cable" in caplog.text
    assert await state_of(fence) == "unknown"


async def test_a_result_that_was_not_recorded_is_the_callers_own_and_marked_for_others(
    fence: EffectFence,
) -> None:
    @fence.fenced("charge:{order}")
    async def charge(order: str) -> Any:
        return threading.Lock()

    assert hasattr(await charge("o1"), "acquire")
    with pytest.raises(ResultNotRecorded) as caught:
        await charge("o1")
    assert caught.value.ran is True
    assert caught.value.cert.verify()
    assert not caught.value.cert.result_recorded


# --- fenced ---------------------------------------------------------------------------------------


async def test_fenced_runs_once_for_an_intent_and_gives_duplicates_the_result(
    fence: EffectFence,
) -> None:
    calls = []

    @fence.fenced("charge:{order_id}", domain="order:{order_id}")
    async def charge(order_id: str, *, amount: int = 1) -> dict[str, Any]:
        calls.append((order_id, amount))
        return {"receipt": len(calls)}

    assert [await charge("o1"), await charge("o1"), await charge(order_id="o1")] == [
        {"receipt": 1}
    ] * 3
    assert await charge("o2") == {"receipt": 2}
    assert calls == [("o1", 1), ("o2", 1)]
    assert await fence.current("order:o1") == 1


async def test_fenced_keeps_what_people_and_frameworks_look_at(fence: EffectFence) -> None:
    async def charge(order_id: str, amount: int = 1, *, note: str = "") -> dict[str, str]:
        """Charge an order."""
        return {}

    fenced = fence.fenced("charge:{order_id}")(charge)
    assert inspect.signature(fenced) == inspect.signature(charge)
    assert inspect.iscoroutinefunction(fenced)
    assert (fenced.__name__, fenced.__doc__) == ("charge", "Charge an order.")
    assert inspect.get_annotations(fenced) == inspect.get_annotations(charge)


async def test_a_plain_function_that_is_fenced_is_awaited(fence: EffectFence) -> None:
    caller, ran_in = threading.get_ident(), []

    @fence.fenced("charge:{order_id}")
    def charge(order_id: str) -> int:
        ran_in.append(threading.get_ident())
        return 7

    assert [await charge("o1"), await charge("o1")] == [7, 7]
    assert len(ran_in) == 1
    assert ran_in[0] != caller


async def test_a_plain_function_that_returns_an_awaitable_gives_its_value(
    fence: EffectFence,
) -> None:
    async def inner(order_id: str) -> int:
        return 7

    @fence.fenced("charge:{order_id}")
    @functools.wraps(inner)
    def charge(order_id: str) -> Any:
        return inner(order_id)

    assert [await charge("o1"), await charge("o1")] == [7, 7]


async def test_a_method_is_fenced_without_its_self(fence: EffectFence) -> None:
    class Account:
        def __init__(self, name: str) -> None:
            self.name = name
            self.calls = 0

        @fence.fenced("charge:{self.name}:{order_id}")
        async def charge(self, order_id: str) -> int:
            self.calls += 1
            return self.calls

    account = Account("a")
    assert [await account.charge("o1"), await account.charge("o1")] == [1, 1]
    assert await Account("b").charge("o1") == 1
    record = await fence.lookup("charge:a:o1")
    assert record is not None
    assert record.args == {"order_id": "o1"}


async def test_the_fingerprint_is_of_what_the_caller_sent(fence: EffectFence) -> None:
    @fence.fenced("charge:{order_id}")
    async def charge(order_id: str, amount: int = 1) -> int:
        return amount

    assert await charge("o1") == 1
    assert await charge(order_id="o1") == 1
    with pytest.raises(IntentConflict):
        await charge("o1", amount=1)
    with pytest.raises(IntentConflict):
        await charge("o1", 2)


async def test_variable_arguments_are_in_the_fingerprint(fence: EffectFence) -> None:
    @fence.fenced("send:{to}")
    async def send(to: str, *lines: str, **headers: str) -> int:
        return 1

    await send("a", "x", "y", subject="s")
    record = await fence.lookup("send:a")
    assert record is not None
    assert record.args == {"to": "a", "lines": ["x", "y"], "subject": "s"}
    for args, kwargs in ((("x",), {"subject": "s"}), (("x", "y"), {"subject": "t"})):
        with pytest.raises(IntentConflict):
            await send("a", *args, **kwargs)


async def test_two_arguments_of_one_name_never_hide_each_other(fence: EffectFence) -> None:
    @fence.fenced("send:{kind}")
    async def send(kind: str, to: str, /, **fields: Any) -> int:
        return 1

    with pytest.raises(ValueError, match="to"):
        await send("mail", "alice", to="bob")
    assert await fence.intent_count() == 0


async def test_a_template_must_name_what_the_function_takes(fence: EffectFence) -> None:
    async def charge(order_id: str) -> None: ...

    with pytest.raises(ValueError, match="order, which the function does not take"):
        fence.fenced("charge:{order}")(charge)
    with pytest.raises(ValueError, match="customer"):
        fence.fenced("charge:{order_id}", domain="{customer}")(charge)

    @fence.fenced("x:{anything}")
    async def takes_any(**fields: Any) -> None: ...

    await takes_any(anything=1)
    with pytest.raises(ValueError, match="anything"):
        await takes_any(other=1)


@pytest.mark.parametrize("order_id", [None, 1.5j, object(), [1], float("nan")])
async def test_a_value_that_makes_no_name_is_refused_before_the_effect(
    fence: EffectFence, order_id: Any
) -> None:
    @fence.fenced("charge:{order_id}")
    async def charge(order_id: Any) -> None:
        pytest.fail("ran")

    with pytest.raises(ValueError, match="order_id"):
        await charge(order_id)


class Receipt(BaseModel):
    number: int
    at: datetime


@dataclass
class Line:
    sku: str
    price: Decimal


@pytest.mark.parametrize(
    ("returns", "value"),
    [
        (Receipt, Receipt(number=1, at=datetime(2026, 1, 2, tzinfo=UTC))),
        (list[Line], [Line("a", Decimal("1.10")), Line("b", Decimal("2E+3"))]),
        (Decimal, Decimal("0.10")),
        (datetime, datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)),
        (tuple[int, str], (1, "a")),
        (dict[str, int], {"a": 2**70}),
        (Receipt | None, None),
        (None, None),
        (Any, {"free": [1]}),
        (bytes | None, None),
        ("Receipt", Receipt(number=2, at=datetime(2026, 1, 2, tzinfo=UTC))),
        (inspect.Signature.empty, [1, "a", None]),
    ],
    ids=repr,
)
async def test_a_recorded_result_is_rebuilt_through_the_return_annotation(
    fence: EffectFence, returns: Any, value: Any
) -> None:
    async def charge(order_id: str) -> Any:
        return value

    if returns is inspect.Signature.empty:
        del charge.__annotations__["return"]
    else:
        charge.__annotations__["return"] = returns
    fenced = fence.fenced("charge:{order_id}")(charge)
    first, second = await fenced("o1"), await fenced("o1")
    assert first == second == value
    assert type(second) is type(value)


async def test_a_return_annotation_that_cannot_be_rebuilt_is_told_before_anything_runs(
    fence: EffectFence,
) -> None:
    async def charge(order_id: str) -> "Nowhere":  # type: ignore[name-defined]  # noqa: F821, UP037
        pytest.fail("ran")

    with pytest.raises(NameError, match="Nowhere"):
        await fence.fenced("charge:{order_id}")(charge)("o1")
    assert await fence.intent_count() == 0


async def test_tool_agent_ignore_and_lifetime_reach_the_request(
    open_fence: OpenFence, clock: Any
) -> None:
    fence = await open_fence()

    @fence.fenced(
        "charge:{order_id}", tool="stripe.charge", agent="billing", ignore=("card",), result_ttl=50
    )
    async def charge(order_id: str, card: str) -> int:
        return 1

    await charge("o1", "4242")
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert (record.tool, record.agent, record.args) == (
        "stripe.charge",
        "billing",
        {"order_id": "o1"},
    )
    assert await charge("o1", card="1111") == 1
    clock.advance(50)
    assert await fence.lookup("charge:o1") is None


async def test_tool_and_agent_are_the_functions_name_unless_said(fence: EffectFence) -> None:
    @fence.fenced("charge:{order_id}")
    async def charge(order_id: str) -> int:
        return 1

    await charge("o1")
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert (record.tool, record.agent, record.domain) == ("charge", "charge", "charge:o1")


async def test_concurrent_callers_of_a_fenced_function_all_get_the_one_result(
    fence: EffectFence,
) -> None:
    calls = 0

    @fence.fenced("charge:{order_id}")
    async def charge(order_id: str) -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        return calls

    assert await asyncio.gather(*(charge("o1") for _ in range(9))) == [1] * 9


# --- what is held ---------------------------------------------------------------------------------


async def test_a_refused_commit_is_held_no_more(fence: EffectFence) -> None:
    """Else `aclose` would wait for it, and the process keep it for ever."""
    ticket = await claimed(fence, read_set=(ReadSetEntry(domain="stock", seq=0),))
    await fence.reserve("stock", 0)
    with pytest.raises(CommitStale):
        await fence.commit(ticket, 1)
    lost = await claimed(fence, intent="lost")
    await fence.clear("lost", reason="test", by="ops", force=True)
    with pytest.raises(Exception, match="cleared"):
        await fence.commit(lost, 1)
    assert not fence._shared.custody.held


async def test_effects_leave_nothing_held(fence: EffectFence) -> None:
    for n, error in enumerate((None, NotExecuted(), ValueError())):
        try:
            async with fence.effect(asked(f"i{n}")):
                if error:
                    raise error
        except (NotExecuted, ValueError):
            pass
    await fence.run(asked("i9"), plain)
    assert not fence._shared.custody.held
    assert fence._shared.keeper is not None
    assert not fence._shared.keeper._kept


async def test_a_closed_fence_refuses_new_effects(fence: EffectFence) -> None:
    await fence.aclose()
    with pytest.raises(LedgerUnavailable) as caught:
        await fence.run(asked(), plain)
    assert caught.value.ran is False


async def test_an_unknown_outcome_reaches_the_caller_of_run(fence: EffectFence) -> None:
    with pytest.raises(TimeoutError):
        await fence.run(asked(), _times_out)
    with pytest.raises(OutcomeUnknown):
        await fence.run(asked(), _times_out)


async def _times_out() -> None:
    raise TimeoutError


def test_an_effect_needs_no_running_loop_until_it_is_entered() -> None:
    fence = EffectFence(FenceConfig())
    assert isinstance(asked(), EffectRequest)
    fence.effect(asked())
    fence.fenced("x:{n}")
