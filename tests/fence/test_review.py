"""Faults that a reader of the code found; each was seen to happen before it was mended."""

import asyncio
import os
import pickle
import threading
from pathlib import Path

import pytest

from effectfence import (
    CommitStale,
    EffectFence,
    EffectRequest,
    FenceConfig,
    Fresh,
    HolderAlive,
    InvalidTicket,
    LeaseLost,
    LedgerCorrupt,
    LedgerUnavailable,
    PreparedEffect,
    ReadSetEntry,
)
from effectfence.stores.contract import Applied, Change, View
from effectfence.stores.memory import MemoryStore


def request(**fields: object) -> EffectRequest:
    given = {"intent": "i", "domain": "d", "tool": "t", "args": {"n": 1}, "agent": "a", **fields}
    return EffectRequest(**given)  # type: ignore[arg-type]  # pydantic checks them


async def ticket(fence: EffectFence, **fields: object) -> PreparedEffect:
    admission = await fence.prepare(request(**fields))
    assert isinstance(admission, Fresh)
    return admission.prepared


@pytest.mark.parametrize(
    "option", [{"result_ttl": 0.001}, {"on_lease_expiry": "takeover"}, {"ignore": ("x",)}]
)
async def test_what_a_ticket_says_beside_its_certificate_is_sealed_too(
    option: dict[str, object],
) -> None:
    """A shorter lifetime slipped into a returning ticket would make the intent runnable again."""
    fence = EffectFence()
    told = (await ticket(fence)).model_dump(mode="json")
    told["request"].update(option)
    with pytest.raises(InvalidTicket):
        await fence.commit(PreparedEffect.model_validate(told), 1)


async def test_after_clear_another_action_gets_a_key_of_its_own() -> None:
    """A provider would answer the second amount with the first one's receipt."""
    fence = EffectFence()
    first = await ticket(fence)
    await fence.abort(first, "timeout")
    await fence.clear("i", reason="not there", by="ada")
    other = await ticket(fence, args={"n": 1000})
    assert other.idempotency_key != first.idempotency_key


class Gate(MemoryStore):
    """A store whose swaps wait at a gate that the test opens."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.reached = asyncio.Event()

    async def swap(self, change: Change) -> Applied | View:
        self.reached.set()
        await self.open.wait()
        return await super().swap(change)


async def test_a_prepare_that_is_under_way_is_drained_before_the_ledger_closes() -> None:
    store = Gate()
    fence = EffectFence(store=store)
    preparing = asyncio.create_task(fence.prepare(request()))
    await store.reached.wait()
    closing = asyncio.create_task(fence.aclose(30.0))
    store.open.set()
    admission = await preparing
    assert isinstance(admission, Fresh)
    assert not closing.done()
    cert = await fence.commit(admission.prepared, 1)
    await closing
    assert cert.verify()


async def test_closing_is_bounded_though_the_default_executor_is_full() -> None:
    fence = EffectFence()
    hold, loop = threading.Event(), asyncio.get_running_loop()
    blocked = [loop.run_in_executor(None, hold.wait) for _ in range(64)]
    async with fence.effect(request()) as attempt:
        assert attempt.fresh
    try:
        async with asyncio.timeout(30):
            await fence.aclose()
    finally:
        hold.set()
        await asyncio.gather(*blocked)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, None, "5"])
async def test_closing_with_a_bad_bound_is_refused_and_closes_nothing(seconds: object) -> None:
    fence = EffectFence()
    with pytest.raises(ValueError, match="drain_seconds"):
        await fence.aclose(seconds)  # type: ignore[arg-type]  # the point
    assert isinstance(await fence.prepare(request()), Fresh)


async def test_a_domain_is_not_forgotten_under_a_reader_that_slips_in() -> None:
    """The reader comes between the look at the open intents and the deletion."""
    fence = EffectFence(FenceConfig(result_ttl=0.000001))
    await fence.reserve("stock", 0)
    inner = fence._opens
    readers: list[PreparedEffect] = []

    async def opens(but: str = "", *, facts: bool = False) -> list[tuple[str, int]]:
        found = await inner(but, facts=facts)
        if not readers:
            readers.append(await ticket(fence, read_set=[ReadSetEntry(domain="stock", seq=1)]))
        return found

    fence._opens = opens  # type: ignore[method-assign]  # the race, made to happen
    with pytest.raises(HolderAlive, match="in use"):
        await fence.evict_domain("stock")
    with pytest.raises(CommitStale):  # its fact did move: by one, and the fence says so
        await fence.commit(readers[0], 1)


@pytest.mark.parametrize("expected", [None, True, 1.0, "0", -1])
async def test_a_number_is_reserved_only_against_a_number(expected: object) -> None:
    fence = EffectFence()
    with pytest.raises(ValueError, match="expected"):
        await fence.reserve("d", expected)  # type: ignore[arg-type]  # the point
    assert await fence.current("d") == 0


async def test_a_ticket_of_a_committed_effect_is_told_that_its_certificate_stands() -> None:
    fence = EffectFence()
    prepared = await ticket(fence)
    await fence.commit(prepared, 1)
    with pytest.raises(LeaseLost, match="certificate stands"):
        await fence.heartbeat(prepared)


def test_a_damaged_ledger_found_at_a_commit_does_not_say_that_nothing_ran() -> None:
    error = LedgerCorrupt(path="l", line=3, offset=9, reason="cut")
    assert "Nothing was run" in str(error)
    error.ran = True
    assert "Nothing was run" not in str(error)


def test_an_error_arrives_though_its_result_cannot_be_pickled() -> None:
    error = LedgerUnavailable(ledger="l", reason="full").with_result(lambda: None)
    assert "lambda" in pickle.loads(pickle.dumps(error)).result


async def test_a_scoped_view_closes_nothing() -> None:
    fence = EffectFence()
    async with fence.scoped("tenant") as view:
        assert isinstance(await view.prepare(request()), Fresh)
    assert isinstance(await fence.prepare(request()), Fresh)


async def test_a_closed_fence_lists_nothing() -> None:
    fence = EffectFence()
    await fence.aclose()
    with pytest.raises(LedgerUnavailable):
        _ = [record async for record in fence.intents()]


async def test_wrong_configuration_is_said_at_once_and_opens_nothing(tmp_path: Path) -> None:
    for wrong in ({"lease_ttl": 1}, {}):
        with pytest.raises(TypeError, match="FenceConfig"):
            EffectFence.open(tmp_path / "l.jsonl", wrong)  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="empty"):
        EffectFence.open("")
    assert os.listdir(tmp_path) == []


async def test_a_fence_that_was_not_awaited_says_so(tmp_path: Path) -> None:
    opening = EffectFence.open(tmp_path / "l.jsonl")
    with pytest.raises(AttributeError, match="await"):
        _ = opening.prepare  # type: ignore[attr-defined]  # the point


@pytest.mark.parametrize("name", [5, None, "", "a\0"])
async def test_an_operators_word_names_an_intent(name: object) -> None:
    fence = EffectFence()
    with pytest.raises((TypeError, ValueError), match="intent"):
        await fence.clear(name, reason="r", by="ada")  # type: ignore[arg-type]  # the point
    with pytest.raises((TypeError, ValueError), match="intent"):
        await fence.lookup(name)  # type: ignore[arg-type]  # the point


async def test_tickets_that_are_never_reported_are_not_kept_for_ever() -> None:
    """Neither in memory nor, at the end, as a reason to wait."""
    fence = EffectFence(FenceConfig(lease_ttl=0.000001))
    for n in range(3000):
        await ticket(fence, intent=f"i{n}")
    assert len(fence._shared.custody.held) < 1500
    async with asyncio.timeout(30):
        await fence.aclose(drain_seconds=3600.0)
