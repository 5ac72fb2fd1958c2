"""What frameworks look at when they make a tool of a function: the fence changes none of it."""

from __future__ import annotations

import asyncio
import inspect
import threading
import typing
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import pytest
from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel, Field, TypeAdapter, validate_call

from effectfence import EffectFence, IntentConflict, blocking


class Line(BaseModel):
    sku: str
    count: int = 1


class Speed(Enum):
    SLOW = "slow"
    FAST = "fast"


class Receipt(BaseModel):
    number: int


def charge(
    order: Annotated[str, Field(description="which order", min_length=1)],
    lines: list[Line],
    speed: Speed = Speed.SLOW,
    *,
    note: str | None = None,
) -> Receipt:
    """Charge an order.

    Args:
        order: which order
        lines: what is in it
    """
    return Receipt(number=len(lines))


async def charge_later(order: str, lines: list[Line], *, note: str | None = None) -> Receipt:
    """Charge an order, by and by."""
    return Receipt(number=len(lines))


def fenced_by_asyncio(function: Callable[..., Any]) -> Callable[..., Any]:
    return EffectFence().fenced("charge:{order}")(function)


def fenced_for_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    fence = blocking.per_process("never-opened.jsonl")
    return fence.fenced("charge:{order}")(function)


PAIRS = [
    pytest.param(charge, fenced_by_asyncio, id="plain"),
    pytest.param(charge_later, fenced_by_asyncio, id="async"),
    pytest.param(charge, fenced_for_threads, id="blocking"),
]

LOOKS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "signature": inspect.signature,
    "signature, evaluated": lambda function: str(inspect.signature(function, eval_str=True)),
    "type hints": typing.get_type_hints,
    "annotations": inspect.get_annotations,
    "names": lambda function: (function.__name__, function.__qualname__, function.__module__),
    "docstring": inspect.getdoc,
    "source": inspect.getsource,
    "pydantic's schema": lambda function: TypeAdapter(function).json_schema(),
    "the MCP SDK's tool": lambda function: tool_of(function),
}


def tool_of(function: Callable[..., Any]) -> Any:
    server = MCPServer("shop")
    server.tool()(function)
    return asyncio.run(server.list_tools())


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(("function", "decorate"), PAIRS)
def test_a_fenced_function_looks_like_the_bare_one(
    function: Callable[..., Any],
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]],
    look: str,
) -> None:
    expected = LOOKS[look](function)
    assert LOOKS[look](decorate(function)) == expected


@pytest.mark.parametrize(("function", "decorate"), PAIRS)
def test_the_bare_function_is_found_beneath(
    function: Callable[..., Any], decorate: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    fenced = decorate(function)
    assert fenced.__wrapped__ is function  # type: ignore[attr-defined]  # functions take attributes
    assert inspect.unwrap(fenced) is function


@pytest.mark.parametrize(("function", "decorate"), PAIRS)
def test_what_annotations_carry_for_a_schema_survives(
    function: Callable[..., Any], decorate: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    bare = typing.get_type_hints(function, include_extras=True)
    hints = typing.get_type_hints(decorate(function), include_extras=True)
    assert [repr(hint) for hint in hints.values()] == [repr(hint) for hint in bare.values()]
    assert hints["return"] is Receipt


@pytest.mark.parametrize("decorate", [fenced_by_asyncio, fenced_for_threads])
def test_who_does_not_look_beneath_sees_the_parameters_too(
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Where annotations are no strings; a signature that is set is not evaluated any more."""

    def charge(order, cents=1, *, note=""):  # type: ignore[no-untyped-def]
        return order

    assert inspect.getfullargspec(decorate(charge)) == inspect.getfullargspec(charge)


def test_it_is_awaited_or_not_as_its_fence_is() -> None:
    assert inspect.iscoroutinefunction(fenced_by_asyncio(charge))
    assert inspect.iscoroutinefunction(fenced_by_asyncio(charge_later))
    assert not inspect.iscoroutinefunction(fenced_for_threads(charge))


async def test_a_bound_method_shows_no_self() -> None:
    class Shop:
        @EffectFence().fenced("charge:{order}")
        async def charge(self, order: str, cents: int = 1) -> Receipt:
            """Charge an order."""
            return Receipt(number=cents)

    tool = Shop().charge
    assert str(inspect.signature(tool, eval_str=True)).startswith("(order: str, cents: int = 1)")
    assert list(TypeAdapter(tool).json_schema()["properties"]) == ["order", "cents"]
    assert await tool(order="o1") == await tool("o1") == Receipt(number=1)


async def test_a_validated_call_reaches_the_function_with_what_pydantic_made_of_it() -> None:
    """As frameworks call: JSON in, models out, defaults filled in."""
    fence, got = EffectFence(), []

    @fence.fenced("charge:{order}")
    async def charge(order: str, lines: list[Line], speed: Speed = Speed.SLOW) -> Receipt:
        got.append((lines, speed))
        return Receipt(number=7)

    tool = validate_call(charge)
    from_json: Any = {"order": "o1", "lines": [{"sku": "a"}], "speed": "fast"}
    assert await tool(**from_json) == await tool(**from_json) == Receipt(number=7)
    assert got == [([Line(sku="a")], Speed.FAST)]


async def test_what_a_framework_hands_in_beside_the_arguments_is_ignored_by_name() -> None:
    """A run's context is no part of the action; it need not even be JSON."""
    fence, got = EffectFence(), []

    @fence.fenced("charge:{order}", ignore=("context",))
    async def charge(context: object, order: str) -> int:
        got.append(context)
        return len(got)

    first = threading.Lock()
    assert [await charge(first, "o1"), await charge(threading.Lock(), "o1")] == [1, 1]
    assert got == [first]
    record = await fence.lookup("charge:o1")
    assert record is not None
    assert record.args == {"order": "o1"}


# --- a parameter more -----------------------------------------------------------------------------


async def test_an_optional_parameter_added_later_changes_no_old_fingerprint() -> None:
    fence = EffectFence()

    async def charge(order: str, cents: int) -> str:
        return "the first version"

    before = fence.fenced("charge:{order}")(charge)
    assert await before("o1", cents=5) == "the first version"

    async def noted(order: str, cents: int, note: str = "", *, fast: bool = False) -> str:
        return "the second version"

    after = fence.fenced("charge:{order}", tool="charge", agent="charge")(noted)
    assert await after("o1", cents=5) == "the first version"
    with pytest.raises(IntentConflict):
        await after("o1", cents=5, note="gift")
    assert await after("o2", cents=5) == "the second version"


async def test_a_caller_that_fills_in_the_new_default_sends_it_unless_it_is_ignored() -> None:
    """Some frameworks do: to them the new call is another one, which is refused, and not run."""
    fence, ran = EffectFence(), []

    async def charge(order: str) -> str:
        return "the first version"

    await fence.fenced("charge:{order}")(charge)("o1")

    async def noted(order: str, note: str = "") -> str:
        ran.append(order)
        return "the second version"

    with pytest.raises(IntentConflict):
        await validate_call(fence.fenced("charge:{order}", tool="charge")(noted))("o1")
    ignoring = fence.fenced("charge:{order}", tool="charge", ignore=("note",))(noted)
    assert await validate_call(ignoring)("o1") == "the first version"
    assert ran == []


# --- together -------------------------------------------------------------------------------------


async def test_nine_calls_of_one_message_run_once() -> None:
    """CASES 14, with call ids as a model makes them: they are nobody's arguments (CASES 1)."""
    fence, ran = EffectFence(), []

    @fence.fenced("charge:{order}:{cents}")
    async def charge(order: str, cents: int) -> Receipt:
        ran.append(order)
        await asyncio.sleep(0)
        return Receipt(number=len(ran))

    calls = {f"call-{n}": {"order": "o1", "cents": 5} for n in range(9)}
    results = await asyncio.gather(*(charge(**arguments) for arguments in calls.values()))
    assert results == [Receipt(number=1)] * 9
    assert ran == ["o1"]
