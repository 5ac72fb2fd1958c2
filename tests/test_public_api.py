"""The public surface is what API.md says: names, signatures, promises in docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import effectfence
from effectfence import EffectFence, EffectRequest, FenceConfig, FenceStats, VectorClock

PAGE = [
    "EffectFence",
    "FenceConfig",
    "FenceStats",
    "EffectRequest",
    "ReadSetEntry",
    "VectorClock",
    "Fresh",
    "Replay",
    "Admission",
    "PreparedEffect",
    "EffectCert",
    "NotExecuted",
    "current_effect",
    "FenceError",
    "Refused",
    "ReadSetStale",
    "DomainRace",
    "IntentInFlight",
    "OutcomeUnknown",
    "IntentConflict",
    "CausalConflict",
    "CommitStale",
    "LeaseLost",
    "CommitConflict",
    "ResultNotRecorded",
    "InvalidTicket",
    "HolderAlive",
    "NoSuchIntent",
    "LedgerUnavailable",
    "LedgerCorrupt",
]
ADDED = [
    "BlockingFence",
    "DidNotHappen",
    "FenceEvent",
    "Happened",
    "Head",
    "IntentFailed",
    "IntentRecord",
    "Observation",
    "Reconciled",
    "RecordedWord",
    "StillUnknown",
    "UnknownEffect",
    "lease_lost",
]

SIGNATURES = {
    "prepare": "(request, *, wait_seconds=0.0)",
    "commit": "(prepared, result)",
    "abort": "(prepared, reason)",
    "release": "(prepared, reason)",
    "heartbeat": "(prepared)",
    "effect": "(request, *, wait_seconds=30.0)",
    "run": "(request, function, /, *args, wait_seconds=30.0, not_executed=(), **kwargs)",
    "fenced": (
        "(intent, domain=None, *, tool=None, agent=None, ignore=(), not_executed=(), "
        "result_ttl=None, wait_seconds=30.0)"
    ),
    "reconciler": (
        "(*tools, name=None, grace_seconds=900.0, timeout_seconds=30.0, max_concurrent=4, "
        "max_per_round=100, retry_seconds=60.0, max_retry_seconds=3600.0)"
    ),
    "reconcile": "()",
    "reconciling": "(*, every=60.0)",
    "current": "(domain)",
    "reserve": "(domain, expected)",
    "evict_domain": "(domain)",
    "observe": "(*domains)",
    "lookup": "(intent)",
    "intents": "(state=None, *, nested=False)",
    "history": "(intent=None, *, nested=False)",
    "follow": "(*, nested=False)",
    "on_event": "(listener)",
    "off_event": "(listener)",
    "settle": "(intent, result, *, reason, by, force=False, attempt=None)",
    "clear": "(intent, *, reason, by, force=False, attempt=None)",
    "sweep": "()",
    "stats": "()",
    "intent_count": "()",
    "domain_count": "()",
    "scoped": "(scope)",
    "aclose": "(drain_seconds=5.0)",
}
FIELDS = {
    EffectRequest: (
        "intent domain tool args agent read_set parent known_clock ignore result_ttl "
        "on_lease_expiry"
    ),
    effectfence.ReadSetEntry: "domain seq",
    effectfence.EffectCert: (
        "intent parent domain seq tool args result vector_clock read_set agent hash"
    ),
    FenceConfig: (
        "lease_ttl max_hold result_ttl unknown_ttl history_ttl retry_horizon on_lease_expiry "
        "causal max_record_bytes"
    ),
    FenceStats: (
        "admitted replayed refused_stale refused_race refused_inflight refused_unknown "
        "refused_conflict refused_causal late_commits"
    ),
}


def bare(function: Any) -> str:
    """A signature without annotations and self."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def test_the_names_of_the_page_and_nothing_else() -> None:
    assert sorted(effectfence.__all__) == sorted(PAGE + ADDED)
    assert all(hasattr(effectfence, name) for name in effectfence.__all__)
    public = {
        name
        for name, value in vars(effectfence).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(effectfence.__all__)


def test_all_is_in_order_and_says_nothing_twice() -> None:
    assert effectfence.__all__ == sorted(set(effectfence.__all__))


@pytest.mark.parametrize("name", SIGNATURES)
def test_calls_take_what_the_page_says(name: str) -> None:
    assert bare(getattr(EffectFence, name)) == SIGNATURES[name]


def test_the_fence_has_no_other_public_method() -> None:
    public = {name for name in vars(EffectFence) if not name.startswith("_")}
    assert public == {*SIGNATURES, "open", "config", "blocking"}


@pytest.mark.parametrize("model", FIELDS, ids=lambda model: model.__name__)
def test_models_have_the_fields_of_the_page(model: type[BaseModel]) -> None:
    assert set(FIELDS[model].split()) <= set(model.model_fields)


def test_requests_and_configurations_can_be_built_by_keyword_alone() -> None:
    request = EffectRequest(intent="i", domain="d", tool="t", agent="a")
    assert (request.args, request.read_set, request.parent) == ({}, (), None)
    assert (request.known_clock, request.ignore) == (VectorClock(), ())
    assert (request.result_ttl, request.on_lease_expiry) == (None, None)


def test_a_vector_clock_has_the_calls_of_the_page() -> None:
    for name in ("get", "tick", "merge", "le", "concurrent", "digest", "__eq__", "__le__"):
        assert callable(getattr(VectorClock, name))


def documented() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in effectfence.__all__:
        thing = getattr(effectfence, name)
        if not inspect.isclass(thing) and not inspect.isfunction(thing):
            continue
        found.append((name, thing))
        if not inspect.isclass(thing):
            continue
        inherited = {"message", "model_post_init", "model_copy"}
        for member, value in vars(thing).items():
            if member.startswith("_") or member in inherited:
                continue
            if isinstance(value, staticmethod) or inspect.isfunction(value):
                found.append((f"{name}.{member}", value))
    return found


@pytest.mark.parametrize(("name", "thing"), documented(), ids=lambda value: value)
def test_what_is_public_has_a_docstring(name: str, thing: Any) -> None:
    text = thing.__doc__ or ""
    generated = dataclasses.is_dataclass(thing) and text.startswith(f"{thing.__name__}(")
    short = {"get", "items", "copy"}  # a mapping's own
    if name.split(".")[-1] in short and name.startswith("VectorClock"):
        return
    assert text.strip(), name
    assert not generated, name


def test_importing_starts_nothing_and_warns_about_nothing() -> None:
    program = "import threading, effectfence; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
