"""`effectfence ledger`: the operator's hands, safe on a ledger in use.

`opened` finds the ledger that is meant, `looking` shows what is recorded, `following` shows it as
it happens, `saying` takes an operator's word, `checking` verifies and exports certificates,
`preparing` makes a database's schema.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from typing import Any

from effectfence.commands.ledger import checking, following, looking, preparing, saying
from effectfence.commands.ledger.opened import Verb


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence ledger`."""
    parser.description = (
        "Look into a ledger, and say what only a person can know. Safe while other processes use "
        "it. The ledger is a path, the address of a database, or what EFFECTFENCE_LEDGER names."
    )
    parser.epilog = "example: effectfence ledger list effects.jsonl --state unknown"
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, does: Verb, promise: str, usage: str, example: str) -> Any:
        return _add(verbs, name, does, promise, usage, example)

    looking.add(verb)
    following.add(verb)
    saying.add(verb)
    checking.add(verb)
    preparing.add(verb)


AddVerb = Callable[[str, Callable[..., Coroutine[Any, Any, int] | int], str, str, str], Any]


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
        help="LEDGER: a path, or a database's address; left out, what EFFECTFENCE_LEDGER names",
    )
    parser.set_defaults(verb=verb, parser=parser)
    return parser
