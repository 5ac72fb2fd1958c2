"""`effectfence ledger`: the operator's hands, safe on a ledger in use."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from effectfence import records
from effectfence.canonical import strict_decode
from effectfence.commands import ledger_init
from effectfence.commands.printing import WrongUse, print_facts, print_json, printable, say
from effectfence.errors import LedgerUnavailable
from effectfence.fence import EffectFence
from effectfence.models import EffectCert, IntentRecord
from effectfence.stores.address import shown
from effectfence.stores.file import FileStore, verify

_STATES: Final = ("in_flight", "expired", "unknown", "done", "cleared")
_MAX_RESULT_BYTES: Final = 1 << 20

Verb = Callable[[argparse.Namespace], Coroutine[Any, Any, int] | int]


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence ledger`."""
    parser.description = (
        "Look into a ledger, and say what only a person can know. Safe while other "
        "processes use it. The ledger is a path, or what EFFECTFENCE_LEDGER names."
    )
    parser.epilog = "example: effectfence ledger verify effects.jsonl"
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_looking(verbs)
    _add_saying(verbs)
    ledger_init.add(verbs)


def _verify(options: argparse.Namespace) -> int:
    path = _existing(_names(options))
    summary = verify(path, records.check_body)
    if options.json:
        print_json({"whole": True, **{name: getattr(summary, name) for name in _SUMMARY}})
        return 0
    print(
        f"{printable(path)} is whole: {summary.lines:,} lines, {summary.changes:,} changes "
        f"since it was made, {summary.records:,} records, {summary.bytes:,} bytes"
    )
    if summary.torn_bytes:
        print(f"{summary.torn_bytes:,} bytes at its end were never acknowledged to anybody")
    return 0


_SUMMARY: Final = ("path", "epoch", "lines", "changes", "records", "bytes", "torn_bytes")


async def _list(options: argparse.Namespace) -> int:
    async with _open(_names(options), options) as fence:
        async for record in fence.intents(options.state):
            if options.json:
                print_json(record.model_dump(mode="json"))
            else:
                print(_line(record))
    return 0


async def _show(options: argparse.Namespace) -> int:
    ledger, intent = _names(options, "INTENT")
    async with _open(ledger, options) as fence:
        record = await fence.lookup(intent)
    if record is None:
        return say(f"nothing is recorded for {intent!r} in {shown(ledger)}", 1)
    if options.json:
        print_json(record.model_dump(mode="json"))
    else:
        print_facts(_facts(record))
        if record.state in ("unknown", "expired"):
            print(_what_to_do(ledger, intent))
    return 0


async def _stats(options: argparse.Namespace) -> int:
    ledger = _names(options)
    states: Counter[str] = Counter(dict.fromkeys(_STATES, 0))
    async with _open(ledger, options) as fence:
        async for record in fence.intents():
            states[record.state] += 1
        counted = {"intents": await fence.intent_count(), "domains": await fence.domain_count()}
    counted |= {"scoped_elsewhere": counted["intents"] - states.total(), **states}
    counted["bytes"] = _size(ledger)
    if options.json:
        print_json({"path": shown(ledger), **counted})
    else:
        print_facts({name.replace("_", " "): f"{count:,}" for name, count in counted.items()})
    return 0


async def _settle(options: argparse.Namespace) -> int:
    ledger, intent = _names(options, "INTENT")
    result = strict_decode(options.result.encode(), max_bytes=_MAX_RESULT_BYTES)
    async with _open(ledger, options) as fence:
        cert = await fence.settle(
            intent, result, reason=options.reason, by=options.by, force=options.force
        )
    if options.json:
        print_json(cert.model_dump(mode="json"))
    else:
        print(f"settled: {printable(intent)} ran, certificate {cert.hash}")
    return 0


async def _clear(options: argparse.Namespace) -> int:
    ledger, intent = _names(options, "INTENT")
    async with _open(ledger, options) as fence:
        cleared = await fence.clear(
            intent, reason=options.reason, by=options.by, force=options.force
        )
    if not cleared:
        return say(f"nothing is recorded for {intent!r} in {shown(ledger)}; nothing changed", 1)
    print(f"cleared: {printable(intent)} did not run, and may be run again")
    return 0


async def _compact(options: argparse.Namespace) -> int:
    path = _existing(_names(options))
    store = await FileStore.open(path, check_body=records.check_body)
    before = _size(path)
    try:
        await store.compact()
    finally:
        await store.aclose()
    print(f"{printable(path)}: {before:,} bytes before, {_size(path):,} bytes now")
    return 0


def _names(options: argparse.Namespace, *wanted: str) -> Any:
    """The ledger, and what else is wanted; the ledger may come from the environment."""
    given: list[str] = list(options.names)
    if len(given) == len(wanted):
        given.insert(0, os.environ.get("EFFECTFENCE_LEDGER", ""))
    if len(given) != len(wanted) + 1:
        options.parser.error(f"expected [LEDGER] {' '.join(wanted)}".rstrip())
    if not given[0]:
        options.parser.error("no ledger: name its path, or set EFFECTFENCE_LEDGER")
    return given if wanted else given[0]


def _existing(ledger: str) -> str:
    """The path, if there is something; looking never makes a ledger."""
    if ledger in ("memory", "memory:"):
        raise WrongUse("a ledger in memory can only be seen from inside its process")
    if "://" not in ledger and not os.path.lexists(ledger):
        raise WrongUse(f"there is no ledger at {ledger}")
    if os.path.exists(ledger) and not os.path.isfile(ledger):
        raise LedgerUnavailable(ledger=ledger, reason="it is not a regular file")
    return ledger


def _size(path: str) -> int:
    return 0 if "://" in path else os.path.getsize(path)


def _open(ledger: str, options: argparse.Namespace) -> _Opened:
    return _Opened(_existing(ledger), options.scope)


class _Opened:
    """A ledger's fence, in the scope that was asked for, closed on leaving."""

    def __init__(self, ledger: str, scopes: list[str]) -> None:
        self._opening = EffectFence.open(ledger)
        self._scopes = scopes

    async def __aenter__(self) -> EffectFence:
        fence = await self._opening.__aenter__()
        for scope in self._scopes:
            fence = fence.scoped(scope)
        return fence

    async def __aexit__(self, *exc: Any) -> None:
        await self._opening.__aexit__(*exc)


def _line(record: IntentRecord) -> str:
    reason = f": {record.reason}" if record.reason else ""
    return printable(
        f"{record.state:<9}  {record.intent}  {record.tool} by {record.agent}, "
        f"attempt {record.attempt}, seq {record.seq} of {record.domain}, "
        f"{_ago(record.age_seconds)}{reason}"
    )


def _facts(record: IntentRecord) -> dict[str, str]:
    facts = {
        "intent": record.intent,
        "state": record.state,
        "reason": record.reason or "",
        "domain": f"{record.domain}, seq {record.seq}",
        "tool": record.tool,
        "args": json.dumps(record.args, ensure_ascii=False),
        "agent": record.agent,
        "attempt": str(record.attempt),
        "started": _instant(record.started_at),
        "changed": _ago(record.age_seconds),
        "lease": _lease(record.lease_seconds_left),
        "idempotency key": record.idempotency_key,
        **_cert_facts(record.cert),
    }
    return {name: value for name, value in facts.items() if value}


def _cert_facts(cert: EffectCert | None) -> dict[str, str]:
    if cert is None:
        return {}
    return {
        "result": json.dumps(cert.result, ensure_ascii=False),
        "certificate": f"{cert.hash}{'' if cert.verify() else '  DOES NOT VERIFY'}",
        "follows": cert.parent or "",
        "clock": str(cert.vector_clock),
    }


def _what_to_do(ledger: str, intent: str) -> str:
    rest = f"{printable(shown(ledger))} {printable(intent)!r}"
    return (
        "\nLook at the tool's own records. If it ran:\n"
        f"  effectfence ledger settle {rest} --result JSON --by YOU --reason HOW_YOU_KNOW\n"
        "If it did not:\n"
        f"  effectfence ledger clear {rest} --by YOU --reason HOW_YOU_KNOW"
    )


def _instant(unix_seconds: float) -> str:
    try:
        then = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds} s after 1970, says the holder's clock"
    return then.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


def _lease(seconds_left: float | None) -> str:
    if seconds_left is None:
        return ""
    if seconds_left > 0:
        return f"ends in {seconds_left:.1f} s unless renewed"
    return f"ended {_ago(-seconds_left)}"


def _ago(seconds: float) -> str:
    for length, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


# --- the parsers ---------------------------------------------------------------------------------


def _add_looking(verbs: Any) -> None:
    example = "effectfence ledger {} effects.jsonl{}".format
    verified = _add(
        verbs,
        "verify",
        _verify,
        "read all of it, strictly: every line, number and hash",
        "[LEDGER] [--json]",
        example("verify", ""),
    )
    _json_flag(verified, "one JSON object")
    listed = _add(
        verbs,
        "list",
        _list,
        "every intent, one a line",
        "[LEDGER] [--state STATE] [--scope NAME] [--json]",
        example("list", " --state unknown"),
    )
    listed.add_argument("--state", choices=_STATES, help="only these")
    _json_flag(listed, "one JSON object a line")
    shown = _add(
        verbs,
        "show",
        _show,
        "all that is recorded of one intent",
        "[LEDGER] INTENT [--scope NAME] [--json]",
        example("show", " charge:order-123"),
    )
    _json_flag(shown, "one JSON object")
    counted = _add(
        verbs,
        "stats",
        _stats,
        "how many intents in which state",
        "[LEDGER] [--scope NAME] [--json]",
        example("stats", ""),
    )
    _json_flag(counted, "one JSON object")
    for looking in (listed, shown, counted):
        _scope_flag(looking)


def _add_saying(verbs: Any) -> None:
    settled = _add(
        verbs,
        "settle",
        _settle,
        "it did run, with this result",
        "[LEDGER] INTENT --result JSON --by NAME --reason TEXT [--force] [--scope NAME] [--json]",
        "effectfence ledger settle effects.jsonl charge:order-123 "
        """--result '{"charge_id": "ch_9"}' --by ada --reason 'seen in the dashboard'""",
    )
    settled.add_argument("--result", required=True, metavar="JSON", help="what the tool answered")
    _json_flag(settled, "print the certificate as JSON")
    cleared = _add(
        verbs,
        "clear",
        _clear,
        "it did not run: it may be run again",
        "[LEDGER] INTENT --by NAME --reason TEXT [--force] [--scope NAME]",
        "effectfence ledger clear effects.jsonl charge:order-123 "
        "--by ada --reason 'not in the dashboard'",
    )
    for said in (settled, cleared):
        said.add_argument("--by", required=True, metavar="NAME", help="who says so")
        said.add_argument("--reason", required=True, metavar="TEXT", help="how they know")
        said.add_argument(
            "--force",
            action="store_true",
            help="although its holder may be alive, or it is done: a second effect is then yours",
        )
        _scope_flag(said)
    _add(
        verbs,
        "compact",
        _compact,
        "drop what has expired from the file",
        "[LEDGER]",
        "effectfence ledger compact effects.jsonl",
    )


def _add(
    verbs: Any, name: str, verb: Verb, promise: str, usage: str, example: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=promise,
        description=f"{promise[0].upper()}{promise[1:]}.",
        usage=f"effectfence ledger {name} {usage}",
        epilog=f"example: {example}",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar=usage.split(" -")[0].split(" [-")[0],
        help="LEDGER: a path; left out, what EFFECTFENCE_LEDGER names",
    )
    parser.set_defaults(verb=verb, parser=parser)
    return parser


def _json_flag(parser: argparse.ArgumentParser, says: str) -> None:
    parser.add_argument("--json", action="store_true", help=says)


def _scope_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scope",
        action="append",
        default=[],
        metavar="NAME",
        help="the intents of `fence.scoped(NAME)`; again for one inside it",
    )
