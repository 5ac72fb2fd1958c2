"""Errors say whether it ran and whose move is next; models survive every way of being copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

import effectfence
from effectfence import (
    EffectCert,
    EffectFence,
    EffectRequest,
    FenceConfig,
    FenceError,
    FenceStats,
    IntentFailed,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    ReadSetEntry,
    Refused,
    VectorClock,
)
from effectfence.errors import ERRORS
from effectfence.models import MAX_READ_SET
from tests.conftest import asked, claimed


async def every_error() -> list[FenceError]:
    fence = EffectFence()
    ticket = await claimed(fence)
    cert = await fence.commit(ticket, 1)
    facts: dict[str, Any] = {
        "intent": "charge:o1",
        "domain": "order:o1",
        "differs": ("args",),
        "reason": "socket closed",
        "agent": "billing",
        "attempt": 2,
        "seconds_left": 12.5,
        "expected": 1,
        "actual": 2,
        "cert": cert,
        "state": "in_flight",
        "ledger": "memory:",
        "path": "/l.jsonl",
        "line": 3,
        "offset": 99,
    }
    return [kind(**{k: facts[k] for k in facts if k in _annotations(kind)}) for kind in ERRORS]


def _annotations(kind: type[FenceError]) -> set[str]:
    return set(inspect.get_annotations(kind)) - {"ran", "prepared"}


async def test_every_error_survives_pickle_with_its_facts_and_what_it_ran_on() -> None:
    for error in await every_error():
        error.with_result({"receipt": 1})
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert (back.facts, str(back), back.ran) == (error.facts, str(error), error.ran)
        assert back.result == {"receipt": 1}


async def test_an_error_keeps_what_it_learned_on_its_way_through_pickle() -> None:
    fence = EffectFence()
    ticket = await claimed(fence)
    await fence.aclose(drain_seconds=0)
    with pytest.raises(LedgerUnavailable) as caught:
        await fence.commit(ticket, 7)
    back = pickle.loads(pickle.dumps(caught.value))
    assert (back.ran, back.prepared, back.result) == (True, ticket, 7)
    assert "The effect ran" in str(back)


async def test_every_error_says_whether_it_ran() -> None:
    says = {type(error).__name__: error.ran for error in await every_error()}
    assert says == {
        "IntentConflict": False,
        "OutcomeUnknown": None,
        "IntentInFlight": False,
        "ReadSetStale": False,
        "CausalConflict": False,
        "DomainRace": False,
        "CommitStale": True,
        "LeaseLost": None,
        "CommitConflict": True,
        "ResultNotRecorded": True,
        "InvalidTicket": None,
        "HolderAlive": None,
        "NoSuchIntent": False,
        "LedgerUnavailable": False,
        "LedgerCorrupt": False,
    }


async def test_a_message_says_what_is_known_and_whose_move_is_next() -> None:
    texts = {type(error).__name__: str(error) for error in await every_error()}
    next_move = {
        "IntentConflict": "an intent of its own",
        "OutcomeUnknown": "settle",
        "IntentInFlight": "ask again later",
        "ReadSetStale": "Observe again",
        "CausalConflict": "Observe the domain",
        "DomainRace": "Observe again",
        "CommitStale": "operator",
        "LeaseLost": "Stop the effect",
        "CommitConflict": ".cert",
        "ResultNotRecorded": "Ask the tool itself",
        "InvalidTicket": "Nothing changed",
        "HolderAlive": "With force",
        "NoSuchIntent": "nothing changed",
        "LedgerUnavailable": "Nothing ran",
        "LedgerCorrupt": "Look:",
    }
    assert set(texts) == set(next_move)
    for name, words in next_move.items():
        assert words in texts[name], name
    nothing_ran = ("IntentConflict", "IntentInFlight", "ReadSetStale", "CausalConflict")
    for name in (*nothing_ran, "DomainRace"):
        assert "nothing ran" in texts[name] or "nothing was run" in texts[name]


def test_codes_are_stable_and_each_its_own() -> None:
    codes = [kind.code for kind in ERRORS]
    assert len(set(codes)) == len(codes)
    assert all(100 < kind.http_status < 600 for kind in ERRORS)


def test_the_tree_of_errors_is_the_protocols() -> None:
    refused = {kind.__name__ for kind in ERRORS if issubclass(kind, Refused)}
    assert refused == {
        "ReadSetStale",
        "DomainRace",
        "IntentInFlight",
        "IntentConflict",
        "CausalConflict",
        "OutcomeUnknown",
    }
    assert IntentFailed is OutcomeUnknown
    assert all(issubclass(kind, FenceError) for kind in ERRORS)
    assert all(getattr(effectfence, kind.__name__) is kind for kind in ERRORS)


# --- models ---------------------------------------------------------------------------------------


async def copies_of_a_used_ticket() -> tuple[EffectFence, PreparedEffect, list[PreparedEffect]]:
    fence = EffectFence()
    ticket = await claimed(
        fence, args={"nested": {"n": [1]}}, read_set=(ReadSetEntry(domain="s", seq=0),)
    )
    return (
        fence,
        ticket,
        [
            copy.copy(ticket),
            copy.deepcopy(ticket),
            ticket.model_copy(deep=True),
            pickle.loads(pickle.dumps(ticket)),
            PreparedEffect.model_validate(ticket.model_dump()),
            PreparedEffect.model_validate(ticket.model_dump(mode="json")),
            PreparedEffect.model_validate_json(ticket.model_dump_json()),
        ],
    )


@pytest.mark.parametrize("which", range(7))
async def test_however_a_ticket_is_copied_it_speaks_for_its_intent(which: int) -> None:
    fence, ticket, copies = await copies_of_a_used_ticket()
    assert copies[which] == ticket
    assert (await fence.commit(copies[which], 1)).verify()


async def test_what_this_library_makes_equals_what_validation_makes() -> None:
    fence = EffectFence()
    ticket = await claimed(fence, read_set=(ReadSetEntry(domain="s", seq=0),))
    cert = await fence.commit(ticket, {"n": [1, 2.5, None]})
    for made in (ticket, cert):
        validated = type(made).model_validate(made.model_dump())
        assert made == validated
        assert validated == made
        assert made.model_dump_json() == validated.model_dump_json()
        assert made.model_fields_set == validated.model_fields_set
        assert repr(made) == repr(validated)
        assert pickle.loads(pickle.dumps(made)) == made


async def test_what_the_caller_does_to_its_objects_afterwards_changes_nothing() -> None:
    fence = EffectFence()
    args: dict[str, Any] = {"items": [1, 2], "card": {"last4": "1234"}}
    clock = VectorClock({"a": 1})
    ticket = await claimed(fence, args=args, known_clock=clock)
    args["items"].append(3)
    args["card"]["last4"] = "0000"
    clock.tick("a")
    result = {"receipt": ["r1"]}
    cert = await fence.commit(ticket, result)
    result["receipt"].append("r2")
    assert cert.verify()
    assert cert.args == {"items": [1, 2], "card": {"last4": "1234"}}
    assert cert.result == {"receipt": ["r1"]}
    assert cert.vector_clock == {"a": 1, "billing": 1}
    again = await fence.commit(ticket, {"receipt": ["r1"]})
    assert again == cert


async def test_what_a_reader_does_to_a_certificate_reaches_nobody_else() -> None:
    fence = EffectFence()
    cert = await fence.commit(await claimed(fence), {"rows": [1]})
    cert.result["rows"].append(2)
    cert.args["amount"] = 0
    cert.vector_clock.tick("billing")
    assert not cert.verify()
    replay = await fence.prepare(asked())
    assert isinstance(replay, effectfence.Replay)
    assert replay.cert.verify()


def test_models_are_frozen_and_take_no_unknown_members() -> None:
    request = asked()
    with pytest.raises(ValueError, match="frozen"):
        request.intent = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="not permitted"):
        asked(colour="red")


@pytest.mark.parametrize("field", ["intent", "domain", "tool", "agent"])
@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 1025, "é" * 513, 7, None])
def test_a_name_is_1_to_1024_bytes_of_utf8_without_nul(field: str, name: Any) -> None:
    with pytest.raises(ValueError, match=field):
        asked(**{field: name})
    assert asked(**{field: "é" * 512})


@pytest.mark.parametrize(
    "read_set",
    [
        [{"domain": "a", "seq": -1}],
        [{"domain": "a", "seq": 1.5}],
        [{"domain": "a", "seq": True}],
        [{"domain": "", "seq": 1}],
        [{"domain": "a", "seq": 1}, {"domain": "a", "seq": 2}],
        [{"domain": f"d{n}", "seq": 0} for n in range(MAX_READ_SET + 1)],
    ],
)
def test_a_read_set_names_each_domain_once_with_a_number(read_set: Any) -> None:
    with pytest.raises(ValueError, match="read_set"):
        asked(read_set=read_set)


def test_the_largest_read_set_is_taken() -> None:
    entries = tuple(ReadSetEntry(domain=f"d{n}", seq=0) for n in range(MAX_READ_SET))
    assert len(asked(read_set=entries).read_set) == MAX_READ_SET


@pytest.mark.parametrize("field", ["result_ttl", "on_lease_expiry", "parent"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "sometimes"])
def test_a_requests_odd_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        asked(**{field: value})


@pytest.mark.parametrize(
    "field",
    ["lease_ttl", "max_hold", "result_ttl", "unknown_ttl", "history_ttl", "retry_horizon"],
)
@pytest.mark.parametrize("seconds", [0, 0.0, -1, float("nan"), float("inf"), "soon"])
def test_case_20_no_duration_is_zero_negative_or_nan(field: str, seconds: Any) -> None:
    with pytest.raises(ValueError, match=field):
        FenceConfig(**{field: seconds})


@pytest.mark.parametrize("field", ["lease_ttl", "history_ttl", "max_record_bytes", "causal"])
def test_case_20_none_is_not_taken_where_it_has_no_meaning(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        FenceConfig(**{field: None})


def test_the_defaults_are_the_documented_ones() -> None:
    config = FenceConfig()
    assert config.model_dump() == {
        "lease_ttl": 60.0,
        "max_hold": None,
        "result_ttl": 86400.0,
        "unknown_ttl": None,
        "history_ttl": 90 * 86400.0,
        "retry_horizon": None,
        "on_lease_expiry": "fence",
        "causal": "off",
        "max_record_bytes": 1024 * 1024,
    }


def test_case_33_a_retry_horizon_beyond_the_outcomes_life_is_refused() -> None:
    with pytest.raises(ValueError, match=r"retry_horizon.*longer than result_ttl"):
        FenceConfig(result_ttl=3600, retry_horizon=86400)
    assert FenceConfig(result_ttl=3600, retry_horizon=3600)
    assert FenceConfig(result_ttl=None, retry_horizon=10**9)


async def test_case_33_a_shorter_life_of_one_request_is_refused_too() -> None:
    fence = EffectFence(FenceConfig(result_ttl=86400, retry_horizon=3600))
    with pytest.raises(ValueError, match="retry_horizon"):
        await fence.prepare(asked(result_ttl=60))
    with pytest.raises(ValueError, match="retry_horizon"):
        fence.fenced("x:{n}", result_ttl=60)
    assert await claimed(fence, result_ttl=3600)


def test_stats_start_at_nothing() -> None:
    stats = FenceStats()
    assert (stats.total, stats.prevented) == (0, 0)
    assert stats.log_line() == (
        "effectfence since boot: admitted=0 replayed=0 refused(stale=0 race=0 in-flight=0 "
        "unknown=0 conflict=0 causal=0) total=0 prevented=0"
    )


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"a": {"b": [1, {2}]}}, r"args\.a\.b\[1\]"),
        ({"a": b"x"}, r"args\.a"),
        ({"a": float("inf")}, r"args\.a"),
        ({"a": object()}, r"args\.a"),
    ],
)
def test_arguments_that_cannot_be_encoded_are_refused_by_path(args: Any, path: str) -> None:
    with pytest.raises(ValueError, match=path):
        asked(args=args)


async def test_too_large_a_request_is_refused_before_anything_else() -> None:
    fence = EffectFence(FenceConfig(max_record_bytes=500))
    with pytest.raises(ValueError, match="max_record_bytes"):
        await fence.prepare(asked(args={"x": "y" * 500}))
    assert await fence.intent_count() == 0


async def test_a_smaller_limit_elsewhere_never_loses_an_outcome() -> None:
    """Prepared where the limit is large, committed by a process where it is small."""
    fence = EffectFence()
    small = EffectFence(FenceConfig(max_record_bytes=500), store=fence._shared.store)
    ticket = await claimed(fence, args={"x": "y" * 500})
    travelled = PreparedEffect.model_validate(ticket.model_dump(mode="json"))
    assert (await small.commit(travelled, 1)).verify()


async def test_what_is_ignored_is_neither_compared_nor_stored() -> None:
    fence = EffectFence()
    first = asked(
        args={"amount": 1, "auth": {"token": "t1", "user": "u"}}, ignore=("auth.token", "no.where")
    )
    cert = await fence.commit(await claimed(fence, first), None)
    assert cert.args == {"amount": 1, "auth": {"user": "u"}}
    second = asked(args={"amount": 1, "auth": {"token": "t2", "user": "u"}}, ignore=("auth.token",))
    assert await fence.prepare(second) == effectfence.Replay(cert)
    assert first.args["auth"]["token"] == "t1", "the caller's own arguments stay whole"


async def test_a_certificate_that_was_edited_does_not_verify() -> None:
    fence = EffectFence()
    cert = await fence.commit(await claimed(fence), {"ok": True})
    for field, value in {
        "intent": "x",
        "parent": "0" * 64,
        "domain": "x",
        "seq": 9,
        "tool": "x",
        "args": {},
        "result": None,
        "vector_clock": VectorClock(),
        "read_set": (ReadSetEntry(domain="x", seq=0),),
        "agent": "x",
        "hash": "0" * 64,
    }.items():
        assert not cert.model_copy(update={field: value}).verify(), field
    assert EffectCert.model_validate(cert.model_dump()).verify()


def test_a_request_copied_with_an_update_is_validated_anew() -> None:
    request = asked()
    changed = request.model_copy(update={"args": {"amount": 1}})
    assert changed != request
    assert changed == asked(args={"amount": 1})
    with pytest.raises(ValueError, match="args"):
        request.model_copy(update={"args": {"amount": object()}})
    assert isinstance(copy.copy(request), EffectRequest)
