"""`ledger settle|clear`: an operator's word, kept in the ledger with who said it and why."""

from __future__ import annotations

import argparse
from typing import Any, Final

from effectfence.canonical import strict_decode
from effectfence.commands.ledger.looking import count
from effectfence.commands.ledger.opened import (
    AddVerb,
    json_flag,
    names,
    not_there,
    opened,
    scope_flag,
)
from effectfence.commands.printing import print_json, printable
from effectfence.errors import NoSuchIntent

_MAX_RESULT_BYTES: Final = 1 << 20
_WORD: Final = "--by NAME --reason TEXT [--attempt N] [--force] [--scope NAME] [--json]"


async def _settle(options: argparse.Namespace) -> int:
    ledger, intent = names(options, "INTENT")
    result = strict_decode(options.result.encode(), max_bytes=_MAX_RESULT_BYTES)
    async with opened(ledger, options) as fence:
        try:
            cert = await fence.settle(intent, result, **_word(options))
        except NoSuchIntent:
            return await not_there(fence, ledger, intent, "; nothing changed")
    if options.json:
        print_json(cert.model_dump(mode="json"))
    else:
        print(f"settled: {printable(intent)} ran, certificate {cert.hash}")
    return 0


async def _clear(options: argparse.Namespace) -> int:
    ledger, intent = names(options, "INTENT")
    async with opened(ledger, options) as fence:
        if not await fence.clear(intent, **_word(options)):
            return await not_there(fence, ledger, intent, "; nothing changed")
    if options.json:
        print_json({"cleared": intent})
    else:
        print(f"cleared: {printable(intent)} did not run, and may be run again")
    return 0


def _word(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("reason", "by", "force", "attempt")}


def add(verb: AddVerb) -> None:
    settled = verb(
        "settle",
        _settle,
        "it did run, with this result",
        f"[LEDGER] INTENT --result JSON {_WORD}",
        "effectfence ledger settle effects.jsonl charge:order-123 "
        """--result '{"charge_id": "ch_9"}' --by ada --reason 'seen in the dashboard'""",
    )
    settled.add_argument("--result", required=True, metavar="JSON", help="what the tool answered")
    json_flag(settled, "print the certificate as JSON")
    cleared = verb(
        "clear",
        _clear,
        "it did not run: it may be run again",
        f"[LEDGER] INTENT {_WORD}",
        "effectfence ledger clear effects.jsonl charge:order-123 "
        "--by ada --reason 'not in the dashboard'",
    )
    json_flag(cleared, "one JSON object")
    for said in (settled, cleared):
        said.add_argument("--by", required=True, metavar="NAME", help="who says so")
        said.add_argument("--reason", required=True, metavar="TEXT", help="how they know")
        said.add_argument(
            "--attempt",
            type=count,
            metavar="N",
            help="the one that was looked at: refused if another has begun since",
        )
        said.add_argument(
            "--force",
            action="store_true",
            help="although its holder may be alive, or it is done: a second effect is then yours",
        )
        scope_flag(said, "the intents of")
