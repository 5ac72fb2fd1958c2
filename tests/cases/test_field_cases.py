"""Faults from the field (CASES.md) that need no MCP, HTTP or remote store, each by its number.

Cases 20 (durations) and 33 stand beside the configuration's tests, 24 beside the lease's, 29 and 30
beside the file ledger's.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from effectfence import (
    EffectCert,
    EffectFence,
    FenceError,
    Fresh,
    IntentConflict,
    NotExecuted,
    OutcomeUnknown,
    PreparedEffect,
    Replay,
    current_effect,
)
from tests.conftest import Clock, OpenFence, asked, claimed


class Provider:
    """Charges, and keeps a log of its own."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def charge(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.log.append((args, kwargs))
        return {"receipt": len(self.log)}


# --- what is the same action? ---------------------------------------------------------------------


async def test_case_1_a_replanned_call_with_another_call_id_replays(fence: EffectFence) -> None:
    provider = Provider()

    @fence.fenced("refund:{order}", ignore=("call_id",))
    async def refund(order: str, amount: int, call_id: str) -> dict[str, Any]:
        return await provider.charge(order, amount)

    assert await refund("o1", 500, call_id="c1") == await refund("o1", 500, call_id="c2")
    assert len(provider.log) == 1


async def test_case_2_a_single_use_token_can_be_ignored_and_is_stored_nowhere(
    open_fence: OpenFence, ledger: str, tmp_path: Path
) -> None:
    fence, provider = await open_fence(), Provider()

    @fence.fenced("pay:{challenge}", ignore=("token",))
    async def pay(challenge: str, token: str, amount: int) -> dict[str, Any]:
        return await provider.charge(challenge, amount)

    first = await pay("ch1", "single-use-t1", 10)
    assert await pay("ch1", "single-use-t2", 10) == first
    assert len(provider.log) == 1
    with pytest.raises(IntentConflict):
        await pay("ch1", "single-use-t3", 11)
    record = await fence.lookup("pay:ch1")
    assert "single-use" not in repr(record)
    if ledger == "file":
        await fence.aclose()
        kept = b"".join(path.read_bytes() for path in (tmp_path / "ledger").iterdir())
        assert b"pay:ch1" in kept
        assert b"single-use" not in kept


async def test_case_4_key_order_does_not_matter_and_array_order_does(fence: EffectFence) -> None:
    cert = await fence.commit(await claimed(fence, args={"a": 1, "b": {"x": 1, "y": [1, 2]}}), None)
    same = json.loads('{"b": {"y": [1, 2], "x": 1}, "a": 1.0}')
    assert await fence.prepare(asked(args=same)) == Replay(cert)
    with pytest.raises(IntentConflict):
        await fence.prepare(asked(args={"a": 1, "b": {"x": 1, "y": [2, 1]}}))


async def test_case_5_neighbouring_large_integers_are_two_actions(fence: EffectFence) -> None:
    ids = [9007199254740993, 9007199254740992, -9007199254740993, 2**64 + 1, 2**64 + 2]
    for first, second in itertools.permutations(ids, 2):
        intent = f"{first}/{second}"
        cert = await fence.commit(await claimed(fence, intent=intent, args={"id": first}), first)
        assert cert.args == {"id": first}
        assert cert.result == first
        with pytest.raises(IntentConflict):
            await fence.prepare(asked(intent, args={"id": second}))

    @fence.fenced("delete:{id}")
    async def delete(id: int) -> int:
        return id

    assert [await delete(id) for id in ids] == ids


async def test_case_6_values_that_json_lacks_work_or_are_refused_before_the_effect(
    fence: EffectFence,
) -> None:
    provider = Provider()

    @fence.fenced("book:{ref}")
    async def book(ref: UUID, at: datetime, price: Decimal) -> dict[str, Any]:
        return await provider.charge(ref, at, price)

    call = (UUID(int=1), datetime(2026, 1, 2, 3, 4, tzinfo=UTC), Decimal("10.10"))
    assert await book(*call) == await book(*call)
    assert len(provider.log) == 1
    naive = datetime(2026, 1, 2, 3, 4)
    for bad, path in (
        ({"when": naive}, "args.price.when"),
        ({"tags": {"a", "b"}}, "args.price.tags"),
        ([b"raw"], r"args.price\[0\]"),
        (object(), "args.price"),
    ):
        with pytest.raises(ValueError, match=path) as caught:
            await book(UUID(int=2), call[1], bad)  # type: ignore[arg-type]
        assert "object at 0x" not in str(caught.value)
    assert len(provider.log) == 1


async def test_case_7_tenants_with_the_same_key_are_separate(fence: EffectFence) -> None:
    provider = Provider()
    for tenant in ("A", "B", "A", "B"):
        await fence.scoped(tenant).run(asked("order-1"), provider.charge, tenant)
    assert [args for args, _ in provider.log] == [("A",), ("B",)]


async def test_case_8_permuted_and_paired_items_are_never_equal(fence: EffectFence) -> None:
    variants: list[Any] = [
        [1, 2, 3],
        [3, 2, 1],
        [2, 1, 3],
        [1, 1, 2, 2, 3, 3],
        [1, 2, 3, 1, 2, 3],
        [[1, 2], [3]],
        [[1], [2, 3]],
        [1, 2, [3]],
        [],
        [[]],
        [None],
        {},
        "1,2,3",
        {"0": 1, "1": 2, "2": 3},
    ]
    await claimed(fence, args={"items": variants[0]})
    for variant in variants[1:]:
        with pytest.raises(IntentConflict):
            await fence.prepare(asked(args={"items": variant}))


async def test_case_9_equal_values_are_equal_however_they_were_built(fence: EffectFence) -> None:
    shared = {"sku": "a", "n": [1, 2]}
    cert = await fence.commit(await claimed(fence, args={"x": shared, "y": shared}), None)
    apart = {"y": copy.deepcopy(shared), "x": {"n": (1, 2), "sku": "".join(["a"])}}
    assert await fence.prepare(asked(args=apart)) == Replay(cert)


@pytest.mark.parametrize(
    "text",
    [
        "é",
        "e\u0301",
        "Å",
        "A\u030a",
        "😀👩‍👩‍👧",
        "ﷺ",
        "漢字",
        "Ⅷ",
        "\u2028\u2029",
        "ß",
        "\x7f\x1f",
        "𐍈",
    ],
    ids=ascii,
)
async def test_case_10_any_script_verifies_byte_for_byte_after_the_store(
    open_fence: OpenFence, ledger: str, text: str
) -> None:
    fence = await open_fence()
    ticket = await claimed(
        fence,
        intent=text.replace("\x1f", "") + "i",
        tool=f"t{text}",
        agent=f"a{text}",
        domain=f"d{text}",
        args={text: [text], "k": text},
    )
    cert = await fence.commit(ticket, {text: text})
    if ledger == "file":  # as a process that starts later reads it
        fence = await open_fence()
    record = await fence.lookup(ticket.intent)
    assert record is not None
    assert record.cert == cert
    assert cert.verify()
    assert (cert.tool, cert.args) == (f"t{text}", {text: [text], "k": text})
    assert EffectCert.model_validate_json(cert.model_dump_json()).verify()


async def test_case_10_composed_and_decomposed_accents_are_two_actions(fence: EffectFence) -> None:
    await claimed(fence, args={"name": "é"})
    with pytest.raises(IntentConflict):
        await fence.prepare(asked(args={"name": "e\u0301"}))
    assert isinstance(await fence.prepare(asked("i\u00e9")), Fresh)
    assert isinstance(await fence.prepare(asked("ie\u0301")), Fresh)


# --- agents ---------------------------------------------------------------------------------------


async def test_case_15_a_run_that_is_retried_as_a_whole_charges_once(fence: EffectFence) -> None:
    provider, replays = Provider(), []

    async def whole_run() -> None:
        async with fence.effect(asked()) as attempt:
            replays.append(not attempt.fresh)
            if attempt.fresh:
                attempt.result = await provider.charge()
        raise RuntimeError("the model's answer did not parse")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            await whole_run()
    assert len(provider.log) == 1
    assert replays == [False, True, True]


STEP = """
    import asyncio, sys
    from effectfence import EffectFence, EffectRequest

    async def step():
        async with EffectFence.open(sys.argv[1]) as fence:
            request = EffectRequest(intent="step-1", domain="run", tool="mail", agent="graph")
            cert = await fence.run(request, lambda: print("ran") or "sent")
            print(cert.hash)

    asyncio.run(step())
"""


async def test_case_16_a_graph_resumed_in_a_new_process_replays(tmp_path: Path) -> None:
    outputs = [python(STEP, str(tmp_path / "ledger.jsonl")).stdout.split() for _ in range(3)]
    ran, digest = outputs[0]
    assert ran == "ran"
    assert outputs[1:] == [[digest]] * 2


# --- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError, BrokenPipeError, OSError])
async def test_case_18_a_dropped_connection_is_unknown_and_the_text_says_reconcile(
    fence: EffectFence, error: type[Exception]
) -> None:
    provider = Provider()

    async def charge() -> None:
        await provider.charge()
        raise error("after the request was written")

    with pytest.raises(error):
        await fence.run(asked(), charge, not_executed=ConnectionRefusedError)
    for _ in range(3):
        with pytest.raises(OutcomeUnknown) as caught:
            await fence.run(asked(), charge, not_executed=ConnectionRefusedError)
        text = str(caught.value)
        assert "Look at the tool's own records" in text
        assert "retry" not in text
    assert len(provider.log) == 1


async def test_case_18_only_what_the_caller_declared_frees_the_intent(fence: EffectFence) -> None:
    provider = Provider()

    async def refused() -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await fence.run(asked(), refused, not_executed=ConnectionRefusedError)
    assert (await fence.run(asked(), provider.charge)).result == {"receipt": 1}


KILLED = """
    import asyncio, os, signal, sys
    from effectfence import EffectFence, EffectRequest

    async def send():
        fence = await EffectFence.open(sys.argv[1])
        request = EffectRequest(intent="mail:o1", domain="o1", tool="mail", agent="mailer")
        async with fence.effect(request):
            with open(sys.argv[2], "a") as log:
                log.write("250 OK\\n")
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(send())
"""


async def test_case_19_killed_after_the_server_said_250_it_is_listed_and_never_resent(
    tmp_path: Path,
) -> None:
    ledger, mails = tmp_path / "ledger.jsonl", tmp_path / "mails"
    assert python(KILLED, str(ledger), str(mails), check=False).returncode == -signal.SIGKILL
    for _ in range(2):
        assert python(KILLED, str(ledger), str(mails), check=False).returncode == 1
    async with EffectFence.open(ledger) as fence:
        (record,) = [record async for record in fence.intents("unknown")]
        assert (record.intent, record.agent) == ("mail:o1", "mailer")
        assert mails.read_text() == "250 OK\n"
        cert = await fence.settle("mail:o1", "250 OK", reason="in the server's log", by="ops")
        assert cert.verify()


async def test_case_20_killed_mid_effect_it_is_unknown_at_once_whatever_the_lease_says(
    tmp_path: Path,
) -> None:
    ledger = tmp_path / "ledger.jsonl"
    python(KILLED, str(ledger), str(tmp_path / "mails"), check=False)
    async with EffectFence.open(ledger) as fence:
        request = asked("mail:o1", domain="o1", tool="mail", args={}, agent="mailer")
        with pytest.raises(OutcomeUnknown, match="its process died"):
            await fence.prepare(request, wait_seconds=3600)


async def test_case_22_of_three_concurrent_starts_one_gets_the_ticket(fence: EffectFence) -> None:
    answers = await asyncio.gather(
        *(fence.prepare(asked("run-1")) for _ in range(3)), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == [
        "Fresh",
        "IntentInFlight",
        "IntentInFlight",
    ]


async def test_case_23_six_deliveries_an_hour_apart_run_once(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence, provider = await open_fence(), Provider()
    certs = []
    for _ in range(6):
        certs.append(await fence.run(asked("message-1"), provider.charge))
        clock.advance(3600)
    assert len(provider.log) == 1
    assert certs == [certs[0]] * 6


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-3600.0, 3600.0, 86400.0 * 365])
async def test_case_25_a_wall_clock_that_steps_moves_no_lease_and_no_outcome(
    open_fence: OpenFence, clock: Clock, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases and lifetimes are the store's clock alone; the wall's is for people."""
    fence = await open_fence(lease_ttl=30, result_ttl=1000)
    await claimed(fence, intent="held")
    await fence.commit(await claimed(fence, intent="done"), 1)
    import time

    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(step * 1e9))
    clock.advance(29)
    record = await fence.lookup("held")
    assert record is not None
    assert record.state == "in_flight"
    assert isinstance(await fence.prepare(asked("done")), Replay)
    clock.advance(1)
    with pytest.raises(OutcomeUnknown):
        await fence.prepare(asked("held"))
    clock.advance(970)
    assert await fence.lookup("done") is None


async def test_case_32_a_key_is_free_again_when_its_answer_expired(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence, provider = await open_fence(result_ttl=60), Provider()
    await fence.run(asked(), provider.charge)
    clock.advance(60)
    assert (await fence.run(asked(), provider.charge)).result == {"receipt": 2}


# --- and more of their kind -----------------------------------------------------------------------


async def test_a_provider_that_deduplicates_gets_one_key_for_all_attempts(
    open_fence: OpenFence, clock: Clock
) -> None:
    fence = await open_fence(lease_ttl=30, on_lease_expiry="takeover")
    keys: list[str] = []

    async def charge(tickets: list[PreparedEffect]) -> None:
        keys.append(current_effect().idempotency_key)
        tickets.append(current_effect())
        raise asyncio.CancelledError if len(keys) == 1 else NotExecuted

    hung = await claimed(fence)
    clock.advance(30)
    tickets: list[PreparedEffect] = []
    with pytest.raises(asyncio.CancelledError):
        await fence.run(asked(), charge, tickets)
    assert keys == [hung.idempotency_key]
    assert tickets[0].attempt == 2


async def test_the_text_of_a_refusal_never_invites_a_second_effect(fence: EffectFence) -> None:
    """What a model reads: an unknown outcome must not look like a failure to be retried."""
    await fence.abort(await claimed(fence), "TimeoutError: no answer")
    with pytest.raises(FenceError) as caught:
        await fence.prepare(asked())
    assert "nobody knows whether" in str(caught.value)
    assert "failed" not in str(caught.value)


def python(program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        check=check,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
    )
