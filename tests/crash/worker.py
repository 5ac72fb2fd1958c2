"""What a child that is to be killed does, and the notes that it leaves.

`words` holds what its callers were told, each written after the call returned; `effects` holds what
the fake tool did to the outside world. Both are written with `writev`, which nothing else in the
process uses, so that a tracer can count the ledger's own calls; both outlive the process. A kill
may cut even such a write: hence a newline on both sides, and half a word is no word.
"""

# ruff: noqa: ASYNC230 - nobody else is on these loops

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

from effectfence import (
    CommitStale,
    EffectFence,
    EffectRequest,
    FenceConfig,
    FenceError,
    Fresh,
    IntentInFlight,
    LedgerCorrupt,
    LedgerUnavailable,
    OutcomeUnknown,
    PreparedEffect,
    Replay,
    records,
)
from effectfence.stores.file import FileStore
from effectfence.stores.machine import Machine

ENDS = ("commit", "commit twice", "release", "abort")


def request_of(intent: str, **more: Any) -> EffectRequest:
    """The one request that everybody makes for this intent."""
    return EffectRequest(
        intent=intent, domain=f"d{len(intent)}", tool="charge", args={"of": intent}, agent="a",
        **more,
    )  # fmt: skip


def result_of(intent: str) -> dict[str, str]:
    return {"charged": intent}


def end_of(intent: str) -> str:
    """Fixed by the intent, so that whoever runs it does the same: commits, mostly."""
    return ENDS[int(intent[1:]) % 6 % 4]


class World:
    """The notes of one process."""

    def __init__(self, notes: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._words = os.open(notes / "words", flags, 0o600)
        self._effects = os.open(notes / "effects", flags, 0o600)

    def tell(self, word: str, intent: str = "", **facts: Any) -> None:
        """What the caller of `intent` has just been told."""
        line = json.dumps({"word": word, "intent": intent, **facts})
        os.writev(self._words, [b"\n" + line.encode() + b"\n"])

    def fire(self, prepared: PreparedEffect) -> None:
        """The effect."""
        line = json.dumps(
            {
                "intent": prepared.intent,
                "key": prepared.idempotency_key,
                "attempt": prepared.attempt,
                "seq": prepared.seq,
            }
        )
        os.writev(self._effects, [b"\n" + line.encode() + b"\n"])


async def handle(fence: EffectFence, world: World, intent: str, **more: Any) -> bool:
    """One caller from its question to its last word; whether the ledger still served it."""
    try:
        admission = await fence.prepare(request_of(intent, **more))
    except (LedgerUnavailable, LedgerCorrupt) as error:
        world.tell("failed", intent, at="prepare", ran=error.ran, error=str(error))
        return False
    except OutcomeUnknown as error:
        world.tell("unknown", intent, ran=error.ran)
        return True
    except FenceError as error:
        world.tell("refused", intent, code=error.code, ran=error.ran)
        return True
    if isinstance(admission, Replay):
        world.tell("done", intent, cert=admission.cert.hash)
        return True
    prepared = admission.prepared
    world.tell("fresh", intent, token=prepared.token, key=prepared.idempotency_key)
    return await report(fence, world, prepared, end_of(intent))


async def report(fence: EffectFence, world: World, prepared: PreparedEffect, end: str) -> bool:
    intent = prepared.intent
    try:
        if end == "release":
            world.tell("releases", intent, key=prepared.idempotency_key)
            await fence.release(prepared, "it refused")
            world.tell("released", intent, key=prepared.idempotency_key)
            return True
        world.fire(prepared)
        if end == "abort":
            await fence.abort(prepared, "who knows")
            world.tell("unknown", intent, ran=None)
            return True
        for _ in range(2 if end == "commit twice" else 1):
            cert = await fence.commit(prepared, result_of(intent))
            world.tell("done", intent, cert=cert.hash)
    except (LedgerUnavailable, LedgerCorrupt) as error:
        kept = getattr(error, "prepared", None) is prepared
        kept &= getattr(error, "result", None) == result_of(intent)
        world.tell("failed", intent, at=end, ran=error.ran, kept=kept, error=str(error))
        return False
    except (OutcomeUnknown, CommitStale) as error:
        world.tell("unknown", intent, ran=error.ran)
    except FenceError as error:
        world.tell("refused", intent, code=error.code, ran=error.ran)
    return True


async def opened(spec: dict[str, Any], machine: Machine | None = None) -> EffectFence:
    store = await FileStore.open(spec["ledger"], machine=machine, check_body=records.check_body)
    return EffectFence(FenceConfig(**spec.get("config", {})), store=store)


# Jobs ---------------------------------------------------------------------------------------------


async def small(spec: dict[str, Any], world: World) -> None:
    """A few of everything, always the same: `intents` one by one, then three at once."""
    try:
        fence = await opened(spec)
    except (LedgerUnavailable, LedgerCorrupt) as error:
        world.tell("failed", at="open", ran=error.ran)
        return
    first, last = spec.get("intents", (0, 6))
    half = (first + last) // 2
    for i in range(first, half):
        await handle(fence, world, f"i{i}")
    if spec.get("compact", True):
        with contextlib.suppress(LedgerUnavailable, LedgerCorrupt):
            await fence._shared.store.compact()  # type: ignore[attr-defined]
    await asyncio.gather(*(handle(fence, world, f"i{i}") for i in range(half, last)))
    await handle(fence, world, f"i{first}")
    await fence.aclose(drain_seconds=0)


async def endless(spec: dict[str, Any], world: World) -> None:
    """Old and new intents, some at once, until it is killed."""
    random_ = random.Random(spec["seed"])
    fence = await opened(spec)
    world.tell("opened")
    now = spec["first"]

    async def caller() -> None:
        nonlocal now
        while True:
            i = random_.randrange(max(0, now - 20), now + 1)
            now += i == now
            if not await handle(fence, world, f"i{i}"):
                raise AssertionError("the ledger failed, though no disk did; see the words")

    async def compacting() -> None:
        while True:
            await asyncio.sleep(random_.random() * spec.get("compact_within", 0.03))
            await fence._shared.store.compact()  # type: ignore[attr-defined]

    await asyncio.gather(*(caller() for _ in range(spec["callers"])), compacting())


async def die_at(spec: dict[str, Any], world: World) -> None:
    """Many callers at once reach one point, and the process dies there."""

    class Mortal(Machine):
        doomed = False

        def sync_data(self, descriptor: int) -> None:
            super().sync_data(descriptor)
            if self.doomed:
                os.kill(os.getpid(), signal.SIGKILL)

    machine = Mortal()
    fence = await opened(spec, machine)
    intents = [f"i{i}" for i in range(*spec["intents"])]
    admitted = await asyncio.gather(*(fence.prepare(request_of(i)) for i in intents))
    tickets = [a.prepared for a in admitted if isinstance(a, Fresh)]
    if spec["point"] != "before the effect":
        for ticket in tickets:
            world.fire(ticket)
    if spec["point"] == "after the commit's sync":
        machine.doomed = True
        await asyncio.gather(*(fence.commit(t, result_of(t.intent)) for t in tickets))
    os.kill(os.getpid(), signal.SIGKILL)


async def hold(spec: dict[str, Any], world: World) -> None:
    """Claim, fire, and commit only after having been stopped for a while."""
    fence = await opened(spec)
    tickets = []
    intents = [f"i{i}" for i in range(*spec["intents"])]
    for admission in await asyncio.gather(*(fence.prepare(request_of(i)) for i in intents)):
        assert isinstance(admission, Fresh)
        tickets.append(admission.prepared)
        world.fire(admission.prepared)
    world.tell("holds")
    os.kill(os.getpid(), signal.SIGSTOP)
    for start in range(0, len(tickets), 20):
        late = tickets[start : start + 20]
        await asyncio.gather(*(report_late(fence, world, ticket) for ticket in late))
    world.tell("late", count=fence.stats().late_commits)
    await fence.aclose(drain_seconds=0)


async def race(spec: dict[str, Any], world: World) -> None:
    """Round after round: with another process at the barrier, open a new ledger, want the same."""
    with open(spec["barrier"], "r+b") as file:
        rounds = mmap.mmap(file.fileno(), 0)
    mine, count = spec["mine"], spec["count"]
    for round_ in range(1, count + 1):
        _meet(rounds, mine, round_)
        folder = Path(spec["ledger"]).parent / f"{round_}"
        fence = await opened({**spec, "ledger": folder / "effects.jsonl"})
        await handle(fence, world, f"i{6 * round_}")
        _meet(rounds, mine + 16, round_)  # nobody leaves while another still asks
        await fence.aclose(drain_seconds=0)


def _meet(rounds: mmap.mmap, mine: int, round_: int) -> None:
    theirs = mine ^ 8
    rounds[mine : mine + 8] = round_.to_bytes(8, "big")
    while int.from_bytes(rounds[theirs : theirs + 8], "big") < round_:
        time.sleep(0)


async def jump(spec: dict[str, Any], world: World) -> None:
    """One intent held, one done, and a wall clock that is set before each question."""
    fence = await opened(spec)
    other = await opened(spec)
    held = await fence.prepare(request_of("i0"))
    assert isinstance(held, Fresh)
    await handle(fence, world, "i6")
    random_ = random.Random(1)
    told = {"in_flight": 0, "replayed": 0}
    walls = []
    for _ in range(spec["count"]):
        with open(spec["offset"], "w") as file:
            file.write(random_.choice(("-3600", "+1d", "+2h", "-2h", "-2d", "+0", "+40d")))
        walls.append(time.time())
        try:
            await other.prepare(request_of("i0"))
        except IntentInFlight:
            told["in_flight"] += 1
        told["replayed"] += isinstance(await other.prepare(request_of("i6")), Replay)
        await fence.heartbeat(held.prepared)
    world.tell("jumped", widest=max(walls) - min(walls), **told)
    await report(fence, world, held.prepared, "commit")
    await other.aclose(drain_seconds=0)
    await fence.aclose(drain_seconds=0)


async def fill(spec: dict[str, Any], world: World) -> None:
    """No file may grow beyond a limit that stops a batch at any of its bytes; then it may."""
    fence = await opened(spec)
    before = os.stat(spec["ledger"]).st_size
    tickets = []
    for i in range(*spec["intents"]):
        admission = await fence.prepare(request_of(f"i{i}"))
        assert isinstance(admission, Fresh)
        tickets.append(admission.prepared)
    size = os.stat(spec["ledger"]).st_size
    unlimited = resource.RLIM_INFINITY
    limit = size + (size - before) * spec["percent"] // 100
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    owed = []
    for ticket in tickets:
        world.fire(ticket)
        try:
            cert = await fence.commit(ticket, result_of(ticket.intent))
            world.tell("done", ticket.intent, cert=cert.hash)
        except LedgerUnavailable as error:
            owed.append((error.prepared, error.result))
            break  # each waits a second
    refused = False
    for i in range(1000, 1010):
        refused |= not await handle(fence, world, f"i{i}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    for ticket, result in owed:
        cert = await fence.commit(ticket, result)
        world.tell("done", ticket.intent, cert=cert.hash)
    assert await handle(fence, world, "i2000"), "there is room again"
    world.tell("filled", owed=len(owed), refused=refused)
    await fence.aclose(drain_seconds=0)


async def report_late(fence: EffectFence, world: World, ticket: PreparedEffect) -> None:
    """The commit of one whose effect has fired already."""
    try:
        cert = await fence.commit(ticket, {"late": ticket.intent})
        world.tell("done", ticket.intent, cert=cert.hash)
    except FenceError as error:
        world.tell("refused", ticket.intent, code=error.code, ran=error.ran)


JOBS = {job.__name__: job for job in (small, endless, die_at, hold, fill, race, jump)}


def warm_up() -> None:
    """What Python would load at the first use, loaded before the first fork."""
    asyncio.run(asyncio.sleep(0))
    Machine().boot()
    Machine().wall()


def do(spec: dict[str, Any]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    asyncio.run(JOBS[spec["job"]](spec, World(Path(spec["notes"]))))
