"""`effectfence probe`: N identical calls at one named tool of a running server. Did it fire twice?

    race         all at once, over one connection: a client that dispatches a call twice
    lost-answer  one; its answer is thrown away and the connection ended; then asked again over a
                 new one, of a new process: a client that gave up, the classic double charge
    crash        one; the server is killed by SIGKILL while it works on it; then started and asked
                 again. The kill comes at the moment that `--observe` sees the effect, else when the
                 answer begins to arrive or `kill_after_seconds` have passed, whichever is first

What the outcomes prove is decided in `evidence.py`.

Invariants:

1. Only the named tool is called, and only after the server listed it; until then nothing fires.
2. The observing command runs once right before the first call, and after the last server of the run
   has ended, so that what a server writes at its end is counted; in between only to time a crash.
3. A call that times out, or dies with its server, is a transport failure: nobody knows whether it
   fired. A crash's own victim is one too.
4. At most one server runs at a time, and none when this ends, whichever way it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from effectfence.mcp import evidence
from effectfence.mcp.client import CannotProbe, Gone, Server
from effectfence.mcp.evidence import Kind, Names, Observed, Outcome, Verdict

Mode = Literal["race", "lost-answer", "crash"]

_POLL_SECONDS: Final = 0.01
"""Between two looks at what the observing command prints, while a crash is timed."""
_SHOWN: Final = 5
"""Different words of failed calls in a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to fire, and how."""

    command: Sequence[str]
    tool: str
    arguments: dict[str, Any]
    mode: Mode = "race"
    calls: int = 12
    call_seconds: float = 30.0
    start_seconds: float = 60.0
    kill_after_seconds: float = 1.0
    observe: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What happened, and what it proves."""

    plan: Plan
    server: str
    protocol: str
    outcomes: list[Outcome]
    named: Names
    observed: Observed | None
    stray_lines: int
    verdict: Verdict

    def count(self, kind: Kind) -> int:
        return sum(each.kind is kind for each in self.outcomes)

    @property
    def fresh(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.fresh]

    @property
    def replays(self) -> int:
        return sum(each.replay for each in self.outcomes)

    @property
    def refused(self) -> int:
        return sum(each.refused for each in self.outcomes)

    @property
    def effects(self) -> int | None:
        """As they were counted, else as the answers name them; `None` where nobody can say."""
        return self.named.effects if self.observed is None else self.observed.effects

    @property
    def failures(self) -> list[str]:
        """The words of failed calls, each once."""
        return list(dict.fromkeys(each.says for each in self.outcomes if each.says))[:_SHOWN]

    def as_json(self) -> dict[str, Any]:
        """The shape of `--json`:

        `tool, mode, calls, server, protocol`; `succeeded` (of which `replays`), `tool_errors` (of
        which `refused` by the fence), `json_rpc_errors`, `transport_failures`: numbers, which add
        up to `calls`; `distinct_answers` among fresh successes; `distinct_effects` (null: can't be
        counted); `difference`: null, or where two answers name two effects; `observed`: null, or
        `{before, after, effects, how}`; `failures`: their words; `stray_lines`; `verdict`,
        `because`, `exit_code`.
        """
        counted = self.observed
        return {
            "tool": self.plan.tool,
            "mode": self.plan.mode,
            "calls": len(self.outcomes),
            "server": self.server,
            "protocol": self.protocol,
            "succeeded": self.count(Kind.SUCCEEDED),
            "replays": self.replays,
            "tool_errors": self.count(Kind.TOOL_ERROR),
            "refused": self.refused,
            "json_rpc_errors": self.count(Kind.RPC_ERROR),
            "transport_failures": self.count(Kind.TRANSPORT),
            "distinct_answers": evidence.distinct([each.answer for each in self.fresh]),
            "distinct_effects": self.effects,
            "difference": self.named.difference,
            "observed": counted
            and {
                "before": counted.before,
                "after": counted.after,
                "effects": counted.effects,
                "how": counted.how,
            },
            "failures": self.failures,
            "stray_lines": self.stray_lines,
            "verdict": self.verdict.name,
            "because": self.verdict.because,
            "exit_code": self.verdict.exit_code,
        }


async def probe(plan: Plan, *, about_to_fire: Callable[[], None] = lambda: None) -> Report:
    """Carry the plan out. Raises `CannotProbe` when nothing was fired; cancelled, it ends the
    server that runs."""
    run = _Run(plan, about_to_fire)
    outcomes = await _MODES[plan.mode](run)
    observed = None
    if plan.observe is not None:
        observed = await _count(plan.observe, run.before, plan.call_seconds)
    answers = [each.answer for each in outcomes if each.fresh]
    named = evidence.names(answers, now=time.time())
    return Report(
        plan=plan,
        server=run.name,
        protocol=run.protocol,
        outcomes=outcomes,
        named=named,
        observed=observed,
        stray_lines=run.stray_lines,
        verdict=evidence.judge(outcomes, named, observed, read_only=run.read_only),
    )


async def fire(server: Server, plan: Plan) -> list[Outcome]:
    """All calls of a plan at once, over one connection."""
    calls = [server.call(plan.tool, plan.arguments) for _ in range(plan.calls)]
    return await asyncio.gather(*(_outcome(call, plan.call_seconds) for call in calls))


@dataclass(slots=True)
class _Run:
    """What is known of the server so far."""

    plan: Plan
    about_to_fire: Callable[[], None]
    name: str = ""
    before: str = ""
    protocol: str = ""
    read_only: bool = False
    stray_lines: int = 0
    fired: bool = field(default=False)

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Server]:
        """A process of it that is ready to be called."""
        plan = self.plan
        async with Server(plan.command, start_seconds=plan.start_seconds) as server:
            if not self.fired:
                await self._look(server)
            yield server
        self.stray_lines += server.stray_lines

    async def _look(self, server: Server) -> None:
        plan = self.plan
        tools = await server.tools()
        if plan.tool not in tools:
            there = ", ".join(sorted(tools)) if tools else "none"
            raise CannotProbe(f"{server.name} has no tool {plan.tool!r}; it has: {there}")
        annotations = tools[plan.tool].get("annotations")
        self.read_only = isinstance(annotations, dict) and annotations.get("readOnlyHint") is True
        self.name, self.protocol = server.name, server.version
        if plan.observe is not None:
            self.before, complaint = await _look_at(plan.observe, plan.call_seconds)
            if complaint:
                raise CannotProbe(f"the --observe command failed, nothing was fired: {complaint}")
        self.about_to_fire()
        self.fired = True


async def _race(run: _Run) -> list[Outcome]:
    async with run.server() as server:
        return await fire(server, run.plan)


async def _lost_answer(run: _Run) -> list[Outcome]:
    """Each answer is read to its end and its connection ended: nobody told the client of it."""
    return [await _ask(run), *[await _ask_again(run) for _ in range(run.plan.calls - 1)]]


async def _crash(run: _Run) -> list[Outcome]:
    plan = run.plan
    async with run.server() as server:
        call = server.call(plan.tool, plan.arguments)
        await _until_it_works(run, server, call)
        await server.kill()
        killed = await _outcome(call, plan.call_seconds)
    return [killed, *[await _ask_again(run) for _ in range(plan.calls - 1)]]


_MODES: Final = {"race": _race, "lost-answer": _lost_answer, "crash": _crash}


async def _ask(run: _Run) -> Outcome:
    async with run.server() as server:
        call = server.call(run.plan.tool, run.plan.arguments)
        return await _outcome(call, run.plan.call_seconds)


async def _ask_again(run: _Run) -> Outcome:
    """A server that does not come back after the first call is a finding, not a wrong use."""
    try:
        return await _ask(run)
    except CannotProbe as error:
        return Outcome(Kind.TRANSPORT, says=str(error))


async def _until_it_works(run: _Run, server: Server, call: asyncio.Future[Any]) -> None:
    """Until the killing is due."""
    plan = run.plan
    with suppress(TimeoutError):
        if plan.observe is None:
            async with asyncio.timeout(plan.call_seconds):
                await server.has_read_everything()
            async with asyncio.timeout(plan.kill_after_seconds):
                await asyncio.wait([call])
            return
        async with asyncio.timeout(plan.call_seconds):
            while not call.done():
                if (await _look_at(plan.observe, plan.call_seconds))[0] != run.before:
                    return
                await asyncio.wait([call], timeout=_POLL_SECONDS)


async def _outcome(call: asyncio.Future[dict[str, Any]], seconds: float) -> Outcome:
    try:
        async with asyncio.timeout(seconds):
            return evidence.outcome_of(await call)
    except TimeoutError:
        return Outcome(Kind.TRANSPORT, says=f"no answer within {seconds:g} s")
    except Gone as gone:
        return Outcome(Kind.TRANSPORT, says=str(gone))


# --- the observing command ------------------------------------------------------------------------


async def _count(command: str, before: str, seconds: float) -> Observed:
    after, complaint = await _look_at(command, seconds)
    if complaint:
        return Observed(None, None, f"it failed after the calls: {complaint}")
    return evidence.counted(before, after)


async def _look_at(command: str, seconds: float) -> tuple[str, str]:
    """What it prints, and why it failed. An exit code alone is no failure: `grep` has one for
    nothing found."""
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            out, complaint = await process.communicate()
    except TimeoutError:
        return "", f"it did not end within {seconds:g} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    words = complaint.decode(errors="replace").strip().splitlines()
    if process.returncode and words:
        return "", words[-1]
    if process.returncode and process.returncode < 0:
        return "", f"it was killed by signal {-process.returncode}"
    return out.decode(errors="replace"), ""
