"""The storm: a thousand attempts to charge one order, and one charge.

    python -m bench.storm
    python -m bench.storm --ledger storm.jsonl --processes 4
    python -m bench.storm --ledger postgresql://… --processes 8 --mode distinct

Forty waves of 25 racers, each wave let go behind a barrier, all with the same intent. The charges
are counted by an effect log that the fake payment provider writes (`EffectLog`), never by the
fence. Exit 0: one charge. 1: any other number, or a worker died. 2: wrong use.

With `--mode distinct` every attempt is another action on the same order: all of them are to run,
nobody is refused for his neighbours, and the order's numbers have no gap.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Protocol

from bench._effect_log import EffectLog
from effectfence import (
    EffectFence,
    EffectRequest,
    FenceError,
    Fresh,
    PreparedEffect,
    Refused,
    Replay,
)
from effectfence.stores.address import shown

INTENT: Final = "charge:order-777"
CENTS: Final = 4_900
MEMORY: Final = "memory:"
_WAVE_SECONDS: Final = 120.0  # a wave that takes longer has lost a worker


class StormBroken(Exception):
    """The storm could not be run to its end: nothing is proven."""


class AlreadyCharged(Exception):
    """The ledger knows the order's charge from before."""


class Barrier(Protocol):
    """What `threading` and `multiprocessing` call a Barrier."""

    def wait(self, timeout: float | None = None) -> int: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    racers: int = 25
    waves: int = 40
    ledger: str = MEMORY
    processes: int = 1
    threads: int = 1
    """In each process; each with an event loop of its own."""
    distinct: str = ""
    """What the intents of this run begin with where each attempt is an action of its own."""

    @property
    def attempts(self) -> int:
        return self.racers * self.waves

    @property
    def workers(self) -> int:
        return self.processes * self.threads


@dataclass
class Tally:
    """What the racers of one worker were told. Times are seconds of the machine's clock."""

    winners: int = 0
    served: int = 0
    stood_down: int = 0
    hashes: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Result:
    attempts: int
    executions: int
    """Lines in the effect log."""
    served: int
    stood_down: int
    certificates: int
    """Different certificates seen; one, if all is well."""
    elapsed_seconds: float
    distinct: bool = False
    gaps: int = 0
    """Numbers of the order that nobody got, between the first and the last."""

    @property
    def held(self) -> bool:
        if self.distinct:
            ran = self.executions == self.certificates == self.attempts
            return ran and not (self.served or self.stood_down or self.gaps)
        told = self.executions + self.served + self.stood_down
        return self.executions == 1 and self.certificates == 1 and told == self.attempts

    @property
    def prevented_cents(self) -> int:
        return (self.attempts - self.executions) * CENTS


# --- one racer ------------------------------------------------------------------------------------


def charge_request(agent: str, intent: str = INTENT) -> EffectRequest:
    return EffectRequest(
        intent=intent,
        domain="order:777",
        tool="charge_card",
        args={"order": 777, "amount_cents": CENTS},
        agent=agent,
    )


async def charge_card(prepared: PreparedEffect, log: EffectLog) -> dict[str, str]:
    """The fake payment provider: charges whenever it is asked to."""
    log.append(f"charged order 777 for {prepared.agent}, {prepared.idempotency_key}")
    await asyncio.sleep(0)  # a real one takes a while; the others meet it in flight
    return {"charge_id": "ch_storm_1"}


async def race(
    fence: EffectFence,
    agent: str,
    go: asyncio.Event,
    log: EffectLog,
    tally: Tally,
    intent: str = INTENT,
) -> None:
    request = charge_request(agent, intent)
    await go.wait()
    try:
        admission = await fence.prepare(request)
    except Refused:
        tally.stood_down += 1
        return
    match admission:
        case Fresh(prepared):
            cert = await fence.commit(prepared, await charge_card(prepared, log))
            tally.winners += 1
            tally.numbers.append(cert.seq)
        case Replay(cert):
            tally.served += 1
    if not cert.verify():
        raise StormBroken(f"a certificate that does not verify: {cert.hash}")
    if cert.hash not in tally.hashes:
        tally.hashes.append(cert.hash)


# --- waves ----------------------------------------------------------------------------------------


async def ride(
    plan: Plan, fence: EffectFence, worker: int, log: EffectLog, barrier: Barrier | None
) -> Tally:
    """This worker's racers of every wave, on this event loop."""
    tally = Tally()
    mine = range(worker, plan.racers, plan.workers)
    progress = Progress(plan.waves) if worker == 0 else None
    if barrier is not None:
        await asyncio.to_thread(barrier.wait, _WAVE_SECONDS)
    tally.started = time.monotonic()
    for wave in range(plan.waves):
        go = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for racer in mine:
                intent = f"{plan.distinct}{wave}-{racer}" if plan.distinct else INTENT
                group.create_task(race(fence, f"agent-{racer}", go, log, tally, intent))
            await asyncio.sleep(0)  # every racer stands at the barrier
            if barrier is not None:
                await asyncio.to_thread(barrier.wait, _WAVE_SECONDS)
            go.set()
        if progress is not None:
            progress.show(wave + 1)
    tally.ended = time.monotonic()
    if progress is not None:
        progress.clear()
    return tally


async def run_process(
    plan: Plan, process: int, log_path: str, barrier: Barrier | None
) -> list[Tally]:
    """One process's part: one fence, shared by its threads."""
    log = EffectLog(log_path)
    first = process * plan.threads
    try:
        async with EffectFence.open(plan.ledger) as fence:
            if plan.threads == 1:
                return [await ride(plan, fence, first, log, barrier)]
            return await _ride_in_threads(plan, fence, first, log, barrier)
    finally:
        log.close()


async def _ride_in_threads(
    plan: Plan, fence: EffectFence, first: int, log: EffectLog, barrier: Barrier | None
) -> list[Tally]:
    barrier = barrier or threading.Barrier(plan.threads)
    assert barrier is not None

    def in_thread(worker: int) -> Tally:
        with _aborting(barrier):
            return asyncio.run(ride(plan, fence, worker, log, barrier))

    with ThreadPoolExecutor(plan.threads, thread_name_prefix="storm") as pool:
        loop = asyncio.get_running_loop()
        workers = range(first, first + plan.threads)
        rides: list[Awaitable[Tally]] = [loop.run_in_executor(pool, in_thread, w) for w in workers]
        return list(await asyncio.gather(*rides))


@contextmanager
def _aborting(barrier: Barrier) -> Iterator[None]:
    """Whoever fails lets go of those who wait for it."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


# --- processes ------------------------------------------------------------------------------------


def run_storm(plan: Plan) -> Result:
    """Run it. Raises `AlreadyCharged`, `StormBroken`, or what the ledger raises at opening."""
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        log_path = os.path.join(folder, "charges.log")
        known = "://" in plan.ledger or os.path.exists(plan.ledger)
        if plan.ledger != MEMORY and known and not plan.distinct:
            asyncio.run(_check_uncharged(plan.ledger))
        if plan.processes == 1:
            tallies = asyncio.run(run_process(plan, 0, log_path, None))
        else:
            tallies = _run_processes(plan, log_path)
        log = EffectLog(log_path)
        executions = len(log.lines())
        log.close()
    return _sum(plan, tallies, executions)


async def _check_uncharged(ledger: str) -> None:
    async with EffectFence.open(ledger) as fence:
        known = await fence.lookup(INTENT)
    if known is not None:
        raise AlreadyCharged(
            f"{shown(ledger)} already knows {INTENT!r} ({known.state}), so the fence would let "
            "nobody charge it: name a ledger that does not exist yet"
        )


def _sum(plan: Plan, tallies: list[Tally], executions: int) -> Result:
    return Result(
        attempts=plan.attempts,
        executions=executions,
        served=sum(tally.served for tally in tallies),
        stood_down=sum(tally.stood_down for tally in tallies),
        certificates=len({one for tally in tallies for one in tally.hashes}),
        elapsed_seconds=max(t.ended for t in tallies) - min(t.started for t in tallies),
        distinct=bool(plan.distinct),
        gaps=_gaps([number for tally in tallies for number in tally.numbers]),
    )


def _gaps(numbers: list[int]) -> int:
    """Numbers between the first and the last that nobody got, or that several got."""
    return max(numbers) - min(numbers) + 1 - len(set(numbers)) if numbers else 0


def _run_processes(plan: Plan, log_path: str) -> list[Tally]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(plan.workers)
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for number in range(plan.processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_process_main, args=(plan, number, log_path, barrier, sender)
            )
            process.start()
            sender.close()
            started.append((process, receiver))
        return _collect(started)
    finally:
        for ended, receiver in started:
            ended.terminate()
            ended.join()
            receiver.close()


def _process_main(plan: Plan, number: int, log_path: str, barrier: Any, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    try:
        with _aborting(barrier):
            sender.send(asyncio.run(run_process(plan, number, log_path, barrier)))
    except BaseException as error:
        cause = _first(error)
        let_go = isinstance(cause, threading.BrokenBarrierError)
        sender.send(None if let_go else f"{type(cause).__name__}: {cause}")


def _collect(started: list[tuple[BaseProcess, Connection]]) -> list[Tally]:
    """Every worker's tallies; the first that fails or dies ends the storm."""
    tallies: list[Tally] = []
    waiting = {receiver: process for process, receiver in started}
    let_go = False
    while waiting:
        for ready in wait(list(waiting)):
            assert isinstance(ready, Connection)
            said = _received(waiting.pop(ready), ready)
            let_go |= said is None
            tallies += said or []
    if let_go:
        raise StormBroken("a wave did not come together in time")
    return tallies


def _received(process: BaseProcess, receiver: Connection) -> list[Tally] | None:
    """What one worker has to say; `None`: it was let go because another one failed."""
    try:
        said: list[Tally] | str | None = receiver.recv()
    except EOFError:
        process.join()
        raise StormBroken(
            f"worker {process.pid} died ({_how(process.exitcode)}) before it could report"
        ) from None
    if isinstance(said, str):
        raise StormBroken(f"worker {process.pid} failed: {said}")
    return said


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit {exit_code}"


# --- telling --------------------------------------------------------------------------------------


class Progress:
    """One line on a terminal's stderr, once it lasts longer than half a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown = False
        self._next = time.monotonic() + 0.5
        self._silent = not sys.stderr.isatty()

    def show(self, done: int) -> None:
        if self._silent or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.1
        self._shown = True
        print(f"\r  wave {done:,} of {self._total:,} ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def style(stream: Any) -> Callable[[str, str], str]:
    """`paint(text, codes)`; colour only on a terminal that wants it."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return (lambda text, _: text) if plain else (lambda text, codes: f"\x1b[{codes}m{text}\x1b[0m")


def tell(plan: Plan, result: Result) -> str:
    paint = style(sys.stdout)
    good = "1;32" if result.held else "1;31"
    lines = [
        "",
        f"  {paint('⚡ effectfence — THE STORM', '1')}",
        f"  {plan.attempts:,} attempts to charge order #777 (${CENTS / 100:.2f}): {_where(plan)}",
        "",
        f"  attempts              : {result.attempts:>6,}",
        f"  ACTUAL EXECUTIONS     : {paint(f'{result.executions:>6,}', good)}   ← the whole point",
        f"  served sealed receipt : {result.served:>6,}",
        f"  told to stand down    : {result.stood_down:>6,}",
        f"  elapsed               : {_duration(result.elapsed_seconds):>6}",
        "",
        _told_last(result),
        f"  {paint(_verdict(result), good)}",
        "",
    ]
    return "\n".join(lines)


def _told_last(result: Result) -> str:
    if result.distinct:
        return f"  numbers of order #777 that are missing: {result.gaps}"
    return f"  💰 double-charges prevented this run: ${result.prevented_cents / 100:,.2f}"


def _where(plan: Plan) -> str:
    ledger = "in memory" if plan.ledger == MEMORY else f"on {shown(plan.ledger)}"
    workers = [f"{plan.waves:,} waves of {plan.racers:,} racers"]
    if plan.processes > 1:
        workers.append(f"{plan.processes} processes")
    if plan.threads > 1:
        workers.append(f"{plan.threads} threads" + (" each" if plan.processes > 1 else ""))
    return f"{', '.join(workers)}, {ledger}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _verdict(result: Result) -> str:
    if result.distinct and result.held:
        return "✅ EVERY action ran, once; nobody was refused; no number is missing."
    if result.distinct:
        return f"❌ FENCE FAILURE ({result.executions} executions, {result.gaps} gaps)."
    if result.held:
        return "✅ ONE execution. Every other attempt was fenced, replayed, or refused."
    if result.executions == 1:
        return "❌ FENCE FAILURE (one execution, but not one answer for everybody)."
    return f"❌ FENCE FAILURE ({result.executions} executions): report it with this output."


def tell_json(plan: Plan, result: Result) -> str:
    return json.dumps(
        {
            **asdict(result),
            "prevented_cents": result.prevented_cents,
            "held": result.held,
            **asdict(replace(plan, ledger=shown(plan.ledger))),
        }
    )


# --- command line ---------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    plan = _plan(parser, options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ⚡ is no failure
    try:
        result = run_storm(plan)
    except AlreadyCharged as error:
        return _failed(str(error), 2)
    except (StormBroken, FenceError, OSError) as error:
        return _failed(f"{error}; nothing is proven", 1)
    except BaseExceptionGroup as group:
        return _failed(f"{_first(group)}; nothing is proven", 1)
    except KeyboardInterrupt:
        return 130
    print(tell_json(plan, result) if options.json else tell(plan, result))
    return 0 if result.held else 1


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _failed(sentence: str, code: int) -> int:
    print(f"bench.storm: {sentence}", file=sys.stderr)
    return code


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan:
    ledger = MEMORY if options.ledger in ("memory", MEMORY) else options.ledger
    plan = Plan(options.racers, options.waves, ledger, options.processes, options.threads)
    if options.mode == "distinct":
        plan = replace(plan, distinct=f"charge:{os.urandom(6).hex()}-")
    if plan.ledger == MEMORY and plan.processes > 1:
        parser.error("several processes need a ledger they can share: --ledger PATH or URL")
    if plan.racers < plan.workers:
        parser.error(f"{plan.racers} racers can't be shared out among {plan.workers} workers")
    return plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.storm",
        description="A thousand attempts to charge one order. One charge.",
        epilog="example: python -m bench.storm --ledger storm.jsonl --processes 4",
    )
    parser.add_argument("--racers", type=_count, default=25, help="per wave (25)")
    parser.add_argument("--waves", type=_count, default=40, help="one after the other (40)")
    parser.add_argument(
        "--ledger", default="memory", metavar="memory|PATH|URL", help="where it remembers (memory)"
    )
    parser.add_argument(
        "--mode",
        choices=("one", "distinct"),
        default="one",
        help="all attempts are one action, or each is one of its own on the same order (one)",
    )
    parser.add_argument(
        "--processes", type=_count, default=1, metavar="N", help="that share the ledger (1)"
    )
    parser.add_argument(
        "--threads", type=_count, default=1, metavar="N", help="event loops per process (1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
