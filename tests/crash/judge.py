"""From notes and bytes to a verdict: `tests.checker` over what is left after a crash.

What callers were told and what the world saw comes from the notes of the processes (`worker`), what
was written from the ledger's own lines, read here without the library; only then is the ledger
opened with it and asked, as the next process would.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effectfence import (
    EffectFence,
    FenceConfig,
    IntentInFlight,
    LedgerCorrupt,
    LedgerUnavailable,
    OutcomeUnknown,
    Replay,
    records,
)
from effectfence.stores.file import FileStore, verify
from effectfence.stores.machine import Machine
from tests.checker import FREE, History, violations
from tests.crash.worker import request_of

Final = dict[str, tuple[str | None, str | None]]
"""Of each intent: its state, and the hash of its certificate."""


@dataclass
class Notes:
    """What the processes on one ledger left, in the order in which it was written."""

    words: list[dict[str, Any]] = field(default_factory=list)
    effects: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Notes:
        return cls(_lines(folder / "words"), _lines(folder / "effects"))

    def intents(self) -> list[str]:
        names = [note["intent"] for note in (*self.words, *self.effects)]
        return list(dict.fromkeys(name for name in names if name))

    def told(self, word: str) -> Iterator[dict[str, Any]]:
        return (note for note in self.words if note["word"] == word)


def _lines(path: Path) -> list[dict[str, Any]]:
    return said(path.read_bytes()) if path.exists() else []


def said(data: bytes) -> list[dict[str, Any]]:
    """The whole words in what was written; a kill may have cut one."""
    return [json.loads(line) for line in data.split(b"\n") if line.endswith(b"}")]


async def judged(
    ledger: Path,
    notes: Notes,
    *,
    machine: Machine | None = None,
    policy: str = "fence",
    again: bool = False,
) -> list[str]:
    """Every clause that is broken. With `again`, the ledger is appended to, closed, opened again
    and judged once more."""
    try:
        found = await _judged(ledger, notes, machine, policy, probing=again)
        if again and not found:
            verify(str(ledger), records.check_body)
            found = await _judged(ledger, notes, machine, policy, probing=False)
    except (LedgerCorrupt, LedgerUnavailable) as error:
        return [f"it does not open: {error}"]
    return found


async def _judged(
    ledger: Path, notes: Notes, machine: Machine | None, policy: str, *, probing: bool
) -> list[str]:
    store = await FileStore.open(ledger, machine=machine, check_body=records.check_body)
    data = ledger.read_bytes()  # noqa: ASYNC240 - nobody else is on this loop
    fence = EffectFence(FenceConfig(), store=store)
    try:
        history = _history(notes, data)
        final = await _final(fence, notes.intents())
        found = violations(history, final, policy=policy) + _unkept(notes, final)
        await store.purge(0)  # under the lock: takes up what a dead process wrote last
        final = await _final(fence, notes.intents())
        found += violations(history, final, policy=policy) + _unkept(notes, final)
        if probing:
            found += [await _probed(fence, intent, *final[intent]) for intent in final]
        return [clause for clause in found if clause]
    finally:
        await fence.aclose(drain_seconds=0)


async def _final(fence: EffectFence, intents: Iterable[str]) -> Final:
    final: Final = {}
    for intent in intents:
        record = await fence.lookup(intent)
        if record is None:
            final[intent] = (None, None)
        else:
            final[intent] = (record.state, record.cert.hash if record.cert else None)
    return final


def _history(notes: Notes, data: bytes) -> History:
    history = History(
        effects=[(effect["intent"], effect["seq"]) for effect in notes.effects],
        acknowledged=[(word["intent"], word["cert"]) for word in notes.told("done")],
        tokens=[word["token"] for word in notes.told("fresh")],
    )
    claims = set()
    for body in bodies(data):
        said = body.get("request") or body["cert"]
        claims.add((said["intent"], body["idempotency_key"]))
        if "cert" in body:
            history.certified.append((said["intent"], body["hash"]))
    fired: dict[str, str] = {}
    for effect in notes.effects:
        if (effect["intent"], effect["key"]) not in claims:
            history.unclaimed.append(effect["intent"])
        fired.setdefault(effect["intent"], effect["key"])
    held: set[str] = set()
    for word in notes.told("fresh"):
        if word["intent"] in held:
            history.fresh_after_effect.append(word["intent"])
        if fired.get(word["intent"]) == word["key"]:
            held.add(word["intent"])
    for word in notes.told("failed"):
        if word["at"] in ("commit", "commit twice", "abort") and word["ran"] is False:
            history.told_nothing_ran.append(word["intent"])
    for word in notes.told("unknown"):
        if word["ran"] is not None:
            history.told_nothing_ran.append(word["intent"])
    return history


def bodies(data: bytes) -> Iterator[dict[str, Any]]:
    """The body of every intent's record that was ever written, straight from the lines."""
    for line in data.split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except ValueError:  # torn, or what was set aside later
            continue
        puts = value.get("puts", value.get("kept", ()))
        with_body = [put for put in puts if "size" in put]
        for put, body in zip(with_body, value.get("bodies", ()), strict=True):
            if put["key"].startswith("intent/"):
                yield body


def _unkept(notes: Notes, final: Final) -> list[str]:
    """Tickets that left no record, and words other than "done" that were not kept."""
    found = []
    released = {word["key"] for word in notes.told("releases")}
    for word in notes.told("fresh"):
        intent = word["intent"]
        if word["key"] not in released and final[intent][0] in FREE:
            found.append(f"S3 {intent}: a ticket was handed out, and nothing is recorded")
    for word in notes.told("unknown"):
        if final[word["intent"]][0] != "unknown":
            found.append(f"S6 {word['intent']}: told as unknown, it is {final[word['intent']]}")
    live = {word["intent"] for word in notes.told("fresh") if word["key"] not in released}
    for word in notes.told("released"):
        intent = word["intent"]
        if intent not in live and final[intent][0] == "done":
            found.append(f"S1 {intent}: it was released, and is done")
    return found


async def _probed(
    fence: EffectFence, intent: str, state: str | None, digest: str | None
) -> str | None:
    """What the next caller is told: the certificate, that nobody knows, or a ticket; no more."""
    try:
        admission = await fence.prepare(request_of(intent))
    except OutcomeUnknown as error:
        if state in ("unknown", "in_flight", "expired") and error.ran is None:
            return None
        return f"S6 {intent}: it is {state}, and told as unknown, ran={error.ran}"
    except IntentInFlight:
        return f"S6 {intent}: it is {state}, and told to be in flight though its process is dead"
    if isinstance(admission, Replay):
        if (state, digest) == ("done", admission.cert.hash) and admission.cert.verify():
            return None
        return f"S1 {intent}: it is {state}, and another certificate is replayed"
    await fence.release(admission.prepared, "only asked")
    return None if state in FREE else f"S6 {intent}: it is {state}, and would be run again"
