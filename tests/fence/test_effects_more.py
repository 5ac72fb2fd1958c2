"""Effects at the edges: what callers get wrong, what breaks on the way, and what is kept apart."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from effectfence import (
    Admission,
    EffectCert,
    EffectFence,
    EffectRequest,
    FenceConfig,
    IntentConflict,
    IntentInFlight,
    PreparedEffect,
    ResultNotRecorded,
    current_effect,
)
from effectfence.effects import _Begin, _called
from tests.conftest import asked, claimed

if TYPE_CHECKING:
    from nowhere_but_for_type_checkers import Money  # type: ignore[import-not-found]


async def state_of(fence: EffectFence, intent: str = "charge:o1") -> str:
    record = await fence.lookup(intent)
    return "absent" if record is None else record.state


# --- one use --------------------------------------------------------------------------------------


async def test_an_effect_is_for_one_use(fence: EffectFence) -> None:
    """Else its second use would say fresh although the ledger said that it ran already."""
    attempt = fence.effect(asked())
    async with attempt:
        attempt.result = 1
    with pytest.raises(RuntimeError, match="entered before"):
        async with attempt:
            pytest.fail("ran twice")
    assert fence.stats().total == 1


async def test_an_effect_entered_by_two_tasks_runs_in_one(fence: EffectFence) -> None:
    attempt = fence.effect(asked())
    ran = []

    async def enter() -> None:
        async with attempt:
            ran.append(attempt.fresh)

    outcomes = await asyncio.gather(enter(), enter(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), RuntimeError]
    assert ran == [True]


# --- an effect inside itself ----------------------------------------------------------------------


async def test_an_effect_never_waits_for_itself(fence: EffectFence) -> None:
    async with fence.effect(asked()) as outer:
        async with fence.effect(asked("another")):
            with pytest.raises(IntentInFlight):
                await fence.run(asked(), lambda: 1, wait_seconds=1e6)
        with pytest.raises(IntentConflict):
            await fence.run(asked(args={}), lambda: 1, wait_seconds=1e6)
        outer.result = 1
    assert outer.cert is not None


async def test_a_plain_function_never_waits_for_its_own_effect(fence: EffectFence) -> None:
    loop = asyncio.get_running_loop()

    def effect() -> str:
        inner = fence.run(asked(), lambda: 1, wait_seconds=1e6)
        return type(asyncio.run_coroutine_threadsafe(inner, loop).exception()).__name__

    assert (await fence.run(asked(), effect)).result == "IntentInFlight"


async def test_the_same_intent_in_another_scope_is_another(fence: EffectFence) -> None:
    async with fence.effect(asked()), fence.scoped("b").effect(asked(), wait_seconds=0) as inner:
        assert inner.fresh


async def test_what_an_effect_left_behind_waits_like_everybody(
    fence: EffectFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that outlives its effect has its context, but is no longer inside of it."""
    ended = asyncio.Event()
    prepare, waits = fence.prepare, []

    async def noted(request: EffectRequest, *, wait_seconds: float) -> Admission:
        waits.append(wait_seconds)
        return await prepare(request)

    async def later() -> EffectCert:
        await ended.wait()
        return await fence.run(asked(), lambda: pytest.fail("ran"), wait_seconds=60)

    monkeypatch.setattr(fence, "prepare", noted)
    async with fence.effect(asked(), wait_seconds=5):
        task = asyncio.create_task(later())
    ended.set()
    await task
    assert waits == [5, 60]


# --- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[OSError], "OSError", None, (OSError, "x"), OSError(), int])
async def test_what_is_no_exception_type_is_refused_before_anything_runs(
    fence: EffectFence, wrong: Any
) -> None:
    with pytest.raises(TypeError, match="not_executed"):
        await fence.run(asked(), lambda: pytest.fail("ran"), not_executed=wrong)
    with pytest.raises(TypeError, match="not_executed"):
        fence.fenced("x", not_executed=wrong)
    assert fence.stats().total == 0


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unnotable(Exception):
    def add_note(self, note: str, /) -> None:
        raise RuntimeError("no notes")


class _Unsure(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("who knows")


class Unsure(Exception, metaclass=_Unsure):
    """What no exception can be compared with."""


async def test_an_exception_that_cannot_say_what_it_is_is_recorded_and_goes_on(
    fence: EffectFence,
) -> None:
    with pytest.raises(Mute):
        async with fence.effect(asked()):
            raise Mute
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert (record.state, record.reason) == ("unknown", "Mute")


async def test_an_exception_that_takes_no_note_goes_on(fence: EffectFence) -> None:
    with pytest.raises(Unnotable):  # noqa: PT012 - the body is the point
        async with fence.effect(asked()):
            await fence.clear("charge:o1", reason="test", by="ops", force=True)
            raise Unnotable


async def test_a_fault_while_the_outcome_is_told_fences_and_the_exception_goes_on(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    async def effect() -> None:
        raise ConnectionError("mine")

    with pytest.raises(ConnectionError, match="mine"):
        await fence.run(asked(), effect, not_executed=Unsure)
    assert await state_of(fence) == "unknown"
    assert "who knows" in caplog.text


async def test_a_fault_while_committing_fences_and_is_raised(
    fence: EffectFence, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(*_args: Any) -> EffectCert:
        raise ConnectionError("a fault of ours")

    monkeypatch.setattr(fence, "commit", breaks)
    with pytest.raises(ConnectionError, match="ours"):
        await fence.run(asked(), lambda: "ran", not_executed=ConnectionError)
    assert await state_of(fence) == "unknown", "it ran, whatever the caller's types say"


async def test_a_function_that_got_no_thread_never_began(fence: EffectFence) -> None:
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await fence.run(asked(), lambda: pytest.fail("ran"))
    assert await state_of(fence) == "absent"


class Queue(ThreadPoolExecutor):
    """One thread, and a sign when something stands in line for it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.submitted = asyncio.Event()

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(*args, **kwargs)
        self.submitted.set()
        return future


async def test_a_function_given_up_before_its_thread_began_never_begins(
    fence: EffectFence,
) -> None:
    """As when its event loop ends while it stands in line."""
    loop, queue, go_on, ran = asyncio.get_running_loop(), Queue(), threading.Event(), []
    loop.set_default_executor(queue)
    occupied = loop.run_in_executor(None, go_on.wait)
    queue.submitted.clear()
    caller = asyncio.create_task(fence.run(asked(), ran.append, 1))
    await queue.submitted.wait()
    (body,) = (t for t in asyncio.all_tasks() if t.get_coro().__name__ == "_run_entered")
    body.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await occupied
    await loop.run_in_executor(None, lambda: None)
    assert (ran, await state_of(fence)) == ([], "absent")


def test_what_was_given_up_is_not_begun_by_a_thread_that_comes_late() -> None:
    begin = _Begin()
    assert begin.take()
    assert _called(begin, pytest.fail, ("began",), {}) is None


# --- fenced ---------------------------------------------------------------------------------------


async def test_only_the_return_annotation_is_evaluated(fence: EffectFence) -> None:
    @fence.fenced("charge:{order}")
    async def charge(order: str, amount: Money) -> list[Decimal]:
        return [amount]

    assert await charge("o1", Decimal(5)) == await charge("o1", Decimal(5)) == [Decimal(5)]


class Plain:
    """Nothing that pydantic could build."""


async def test_a_return_type_that_no_record_can_be_turned_into_is_told_when_decorating(
    fence: EffectFence,
) -> None:
    with pytest.raises(TypeError, match=r"charge returns .*Plain, which can't be rebuilt") as told:

        @fence.fenced("charge:{order}")
        async def charge(order: str) -> Plain:
            return Plain()

    assert "\n" not in str(told.value)


async def test_a_return_type_defined_later_is_resolved_at_the_first_call(
    fence: EffectFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def charge(order: str) -> Later:  # type: ignore[name-defined]  # noqa: F821
        return value

    fenced = fence.fenced("charge:{order}")(charge)
    value: Any = None
    monkeypatch.setitem(globals(), "Later", Plain)
    with pytest.raises(TypeError, match="can't be rebuilt"):
        await fenced("o1")
    assert fence.stats().total == 0
    monkeypatch.setitem(globals(), "Later", Receipt)
    value = Receipt(number=1)
    assert await fenced("o1") == await fenced("o1") == value


class Receipt(BaseModel):
    number: int


class Service:
    async def __call__(self, order: str) -> Receipt:
        return Receipt(number=7)


async def service(fee: int, order: str) -> Receipt:
    return Receipt(number=7)


@pytest.mark.parametrize("function", [Service(), functools.partial(service, 1)])
async def test_the_annotation_of_a_callable_object_is_found(
    fence: EffectFence, function: Callable[..., Any]
) -> None:
    fenced = fence.fenced("charge:{order}", tool="charge")(function)
    assert [await fenced(order="o1"), await fenced(order="o1")] == [Receipt(number=7)] * 2


async def test_a_record_that_does_not_fit_the_annotation_is_told_as_having_run(
    fence: EffectFence,
) -> None:
    @fence.fenced("charge:{order}")
    async def charge(order: str) -> int:
        return "not an int"  # type: ignore[return-value]

    assert await charge("o1") == "not an int"
    with pytest.raises(ResultNotRecorded, match=r"does not fit what .*charge returns") as caught:
        await charge("o1")
    assert caught.value.ran is True
    assert caught.value.cert.result == "not an int"


@pytest.mark.parametrize("ignore", ["note", (1,), [b"note"]])
def test_what_to_ignore_is_a_tuple_of_names(ignore: Any) -> None:
    with pytest.raises(TypeError, match="ignore"):
        EffectFence().fenced("x", ignore=ignore)


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        ("5", TypeError),
        (None, TypeError),
        (True, TypeError),
        (-1, ValueError),
        (float("nan"), ValueError),
    ],
)
def test_how_long_to_wait_is_checked_when_decorating(seconds: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="wait_seconds"):
        EffectFence().fenced("x", wait_seconds=seconds)


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["intent", "domain", "tool", "agent", "parent"])
def test_bytes_are_no_names(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        asked(**{field: b"a" * 64})


@pytest.mark.parametrize("seconds", ["5", True, b"5"])
def test_a_number_of_seconds_is_a_number(seconds: Any) -> None:
    for field in ("lease_ttl", "max_hold", "result_ttl", "retry_horizon", "max_record_bytes"):
        with pytest.raises(ValueError, match=field):
            FenceConfig(**{field: seconds})
    with pytest.raises(ValueError, match="result_ttl"):
        asked(result_ttl=seconds)


def test_whole_seconds_are_seconds() -> None:
    assert FenceConfig(lease_ttl=5).lease_ttl == 5.0
    assert asked(result_ttl=5).result_ttl == 5.0


class Colour(Enum):
    RED = "red"


@dataclass
class Item:
    sku: str


async def test_a_ticket_shows_what_was_asked_whatever_becomes_of_the_callers_objects(
    fence: EffectFence,
) -> None:
    args: dict[str, Any] = {"items": [1], "to": {"name": "A"}}
    ticket = await claimed(fence, args=args)
    args["items"].append(2)
    args["to"]["name"] = "B"
    assert ticket.args == {"items": [1], "to": {"name": "A"}}
    travelled = PreparedEffect.model_validate(json.loads(json.dumps(ticket.model_dump())))
    assert (await fence.commit(travelled, 1)).args == ticket.args


async def test_a_ticket_over_values_that_json_lacks_goes_to_json(fence: EffectFence) -> None:
    args = {"path": PurePosixPath("/x"), "n": Decimal("1.10"), "c": Colour.RED, "i": [Item("a")]}
    ticket = await claimed(fence, args=args)
    assert ticket.args == {"path": "/x", "n": "1.10", "c": "red", "i": [{"sku": "a"}]}
    for travelled in (
        PreparedEffect.model_validate(json.loads(json.dumps(ticket.model_dump(mode="json")))),
        PreparedEffect.model_validate_json(ticket.model_dump_json()),
    ):
        assert travelled == ticket
    assert (await fence.commit(travelled, 1)).verify()


def test_what_is_ignored_stays_the_callers_own() -> None:
    session, items = object(), [1]
    args = {"session": session, "card": {"token": session, "items": items, "deep": {}}, "n": [1]}
    ignore = ("session", "card.token", "card.deep.nothing", "no.where", "n.x")
    request = EffectRequest(intent="i", domain="d", tool="t", agent="a", args=args, ignore=ignore)
    items.append(2)
    assert request.args["session"] is session
    assert request.args["card"] == {"token": session, "items": [1], "deep": {}}
    assert request.args["n"] == [1]
    assert args["card"] == {"token": session, "items": [1, 2], "deep": {}}
    assert request.model_copy() == request


@pytest.mark.parametrize("ignore", [("a", "a.b"), ("a.b", "a")])
def test_overlapping_paths_to_ignore_change_nothing_of_the_callers(ignore: Any) -> None:
    inner = {"b": object(), "c": 1}
    request = asked(args={"a": inner, "d": 1}, ignore=ignore)
    assert request.args["a"] is inner
    assert set(inner) == {"b", "c"}
    assert request.__dict__["_args"] == b'{"d":1}'


async def test_inside_an_effect_the_ticket_is_the_innermost_of_several_fences(
    fence: EffectFence, caplog: pytest.LogCaptureFixture
) -> None:
    other = EffectFence()
    with caplog.at_level(logging.WARNING, logger="effectfence"):
        async with fence.effect(asked()), other.effect(asked(), wait_seconds=0) as inner:
            assert inner.fresh
            assert current_effect() is inner.prepared
    assert not caplog.records
    await other.aclose()
