"""The one judge of safety: what callers were told, what the world saw, what the ledger says.

It shares nothing with the code under test: effects are logged by the fake tool, answers by the
callers, and certificates by whoever watches the store being written. Clauses as in FAULTS.md:

    S1  an acknowledged outcome stays, with the same certificate, for ever
    S2  at most one effect per intent (under "fence")
    S3  every effect has a durable claim written before it
    S4  at most one commit is accepted per intent
    S5  no intent is free after its effect
    S6  what nobody can decide is told as unknown: never "nothing ran", never run again
    T   no fence token is issued twice
    F   nothing is certified on facts that had moved
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

FREE = (None, "cleared")


@dataclass
class History:
    """Filled in by the scenario as it goes; `bad` is what was seen to be wrong on the spot."""

    effects: list[tuple[str, int]] = field(default_factory=list)
    """(intent, number of the ticket that fired it)"""
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    """(intent, certificate hash) that a caller received"""
    certified: list[tuple[str, str]] = field(default_factory=list)
    """(intent, certificate hash) at each write that made an intent done"""
    tokens: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    """intents whose effect went out without a claim of its ticket standing in the ledger"""
    fresh_after_effect: list[str] = field(default_factory=list)
    told_nothing_ran: list[str] = field(default_factory=list)
    """intents whose holder, its effect having fired, was told `ran=False`"""
    stale_facts: list[str] = field(default_factory=list)


def violations(
    history: History, final: Mapping[str, tuple[str | None, str | None]], *, policy: str
) -> list[str]:
    """Every broken clause; `final` maps intents to (state, certificate hash), read at the end."""
    found: list[str] = []
    fired = Counter(intent for intent, _ in history.effects)
    for intent, digest in history.acknowledged:
        if final[intent] != ("done", digest):
            found.append(f"S1 {intent}: {digest[:8]} was acknowledged, it is {final[intent]}")
    if policy == "fence":
        found += double_effects(history)
        found += [f"S3 {intent}: fired without a claim" for intent in history.unclaimed]
        found += [
            f"S6 {intent}: admitted after its effect" for intent in history.fresh_after_effect
        ]
    for intent, hashes in _hashes(history.certified).items():
        if len(hashes) > 1:
            found.append(f"S4 {intent}: {len(hashes)} commits were accepted")
    for intent in fired:
        if final[intent][0] in FREE:
            found.append(f"S5 {intent}: free after its effect")
    found += [
        f"S6 {intent}: it fired, {{ran=False}} was told" for intent in history.told_nothing_ran
    ]
    for token, count in Counter(history.tokens).items():
        if count > 1:
            found.append(f"T a token was issued {count} times: {token[-8:]}")
    found += [f"F {intent}: certified on moved facts" for intent in history.stale_facts]
    return found


def double_effects(history: History) -> list[str]:
    fired = Counter(intent for intent, _ in history.effects)
    return [f"S2 {intent}: {count} effects" for intent, count in fired.items() if count > 1]


def _hashes(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Writes that made an intent done, by intent; the same one written twice counts twice."""
    found: dict[str, list[str]] = {}
    for intent, digest in pairs:
        found.setdefault(intent, []).append(digest)
    return found
