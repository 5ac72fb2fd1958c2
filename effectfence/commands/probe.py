"""`effectfence probe`: does this MCP server fire twice?"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

from effectfence.commands.printing import WrongUse, print_json, printable, say

if TYPE_CHECKING:
    from effectfence.mcp.probe import Plan, Report

_MODES: Final = ("race", "lost-answer", "crash")
_CALLS: Final = {"race": 12, "lost-answer": 2, "crash": 2}
_MOST_CALLS: Final = 1000
_DEMO: Final = "effectfence.mcp.charge_server"


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence probe`."""
    parser.usage = "effectfence probe --tool NAME [--args JSON] [OPTION ...] -- COMMAND [ARG ...]"
    parser.description = (
        "Start an MCP server, call one of its tools several times with the same arguments, and "
        "say how many effects that had. The calls are real: use a test account. Exit code 0: one "
        "effect. 1: double-fire proven. 3: inconclusive. 2: nothing was fired."
    )
    parser.epilog = (
        "example: effectfence probe --tool charge_card "
        '--args \'{"order_id": "o-1", "amount_cents": 4200}\' '
        "--observe 'cat charges.jsonl | wc -l' -- "
        "python -m effectfence.mcp.charge_server charges.jsonl"
    )
    parser.add_argument("--tool", metavar="NAME", required=True, help="the one tool to call")
    parser.add_argument("--args", metavar="JSON", default="{}", help="its arguments, an object")
    parser.add_argument(
        "--mode",
        choices=_MODES,
        default="race",
        help="race: all at once (default). lost-answer: the answer is thrown away, then asked "
        "again over a new connection. crash: the server is killed at work, then asked again",
    )
    parser.add_argument(
        "--calls",
        type=int,
        metavar="N",
        help="how many calls (12; 2 in the other modes, one after the other)",
    )
    parser.add_argument(
        "--observe",
        metavar="COMMAND",
        help="run by the shell before and after. One line with a number, or a number and a name: "
        "that counts the effects; otherwise its lines that are not blank do",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="for each call (30)"
    )
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for the handshake, and for the tools listing (60)",
    )
    parser.add_argument(
        "--kill-after",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="with --mode crash and no --observe: how long it may work before SIGKILL (1)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(verb=_probe)


def _probe(options: argparse.Namespace) -> int:
    plan = _plan(options)
    from effectfence.mcp.client import CannotProbe, interruptible
    from effectfence.mcp.probe import probe

    def about_to_fire() -> None:
        if _DEMO not in plan.command:
            say(
                f"about to call {plan.tool} {plan.calls} times, for real: use a test account, "
                "or arguments that harm nobody",
                0,
            )

    try:
        report = interruptible(probe(plan, about_to_fire=about_to_fire))
    except CannotProbe as error:
        raise WrongUse(str(error)) from None
    if isinstance(report, int):
        return report
    if options.json:
        print_json(report.as_json())
    else:
        _print(report)
    return report.verdict.exit_code


def _plan(options: argparse.Namespace) -> Plan:
    if not options.command:
        raise WrongUse(
            "no server: put its command after `--`, as in "
            "`effectfence probe --tool NAME -- node server.js`"
        )
    calls = _CALLS[options.mode] if options.calls is None else options.calls
    if not 2 <= calls <= _MOST_CALLS:
        raise WrongUse(f"--calls is {calls}; 2 to {_MOST_CALLS:,} calls can show something")
    arguments = _arguments(options.args)
    from effectfence.mcp.probe import Plan

    return Plan(
        command=options.command,
        tool=options.tool,
        arguments=arguments,
        mode=options.mode,
        calls=calls,
        call_seconds=options.timeout,
        start_seconds=options.start_timeout,
        kill_after_seconds=options.kill_after,
        observe=options.observe,
    )


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise WrongUse(f"--args is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WrongUse('--args is not a JSON object, as in {"order_id": "o-1"}')
    return value


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"there is no {name} in JSON")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _print(report: Report) -> None:
    shown = report.as_json()
    how = {
        "race": "identical calls at once",
        "lost-answer": "identical calls, each answer thrown away and the connection ended",
        "crash": "identical calls, the server killed during the first",
    }[report.plan.mode]
    print(f"{printable(report.plan.tool)} of {printable(report.server)}: {shown['calls']} {how}")
    print()
    rows = [
        ("succeeded", shown["succeeded"], f"{report.replays} replayed" if report.replays else ""),
        ("tool errors", shown["tool_errors"], _refusals(report)),
        ("JSON-RPC errors", shown["json_rpc_errors"], ""),
        ("transport failures", shown["transport_failures"], ""),
        ("DISTINCT effects", "?" if report.effects is None else report.effects, _evidence(report)),
    ]
    for name, count, remark in rows:
        print(f"  {name:<18}  {count:>4}{'   ' if remark else ''}{printable(remark)}")
    for words in report.failures:
        print(f"  one said: {printable(words[:200])}")
    if report.stray_lines:
        print(f"  its output held {report.stray_lines} lines that are not JSON-RPC")
    print()
    print(f"{report.verdict.name}: {printable(report.verdict.because)}")
    if report.verdict.exit_code == 1 and "wrap" not in report.plan.command:
        print("mend it: put `effectfence wrap --` before the server's command, and probe that")


def _refusals(report: Report) -> str:
    return f"{report.refused} refused by the fence" if report.refused else ""


def _evidence(report: Report) -> str:
    if report.observed is not None:
        before, after, how = report.observed.before, report.observed.after, report.observed.how
        return how if before is None else f"--observe: {before} before, {after} after ({how})"
    if report.named.difference:
        return f"by the answers: {report.named.difference}"
    return "that the answers tell apart" if len(report.fresh) > 1 else ""
