"""`effectfence ledger init`: makes a database's schema, or prints the statements that do."""

from __future__ import annotations

import argparse
import asyncio
import os

from effectfence.commands.ledger.opened import AddVerb
from effectfence.commands.printing import WrongUse, printable
from effectfence.fence import EffectFence


def add(verb: AddVerb) -> None:
    prepared = verb(
        "init",
        _init,
        "make a database's schema, or bring an older one up to date, or print the SQL that does; "
        "a fence does so itself when it opens, this is for people whose migrations are their own",
        "[LEDGER] [--print-sql [--schema NAME]]",
        "effectfence ledger init --print-sql --schema effectfence",
    )
    prepared.add_argument(
        "--print-sql", action="store_true", help="print the statements, connect to nothing"
    )
    prepared.add_argument(
        "--schema", default=None, metavar="NAME", help="its name in the SQL (effectfence)"
    )


def _init(options: argparse.Namespace) -> int:
    if options.print_sql:
        return _print_sql(options)
    ledger = options.names[0] if options.names else os.environ.get("EFFECTFENCE_LEDGER", "")
    if len(options.names) > 1 or options.schema or not ledger:
        options.parser.error("expected a LEDGER, or --print-sql [--schema NAME]")
    if not ledger.lower().startswith(("postgresql://", "postgres://")):
        raise WrongUse(
            "only a PostgreSQL ledger is made ahead; the others are when they are opened"
        )
    return asyncio.run(_open_once(ledger))


def _print_sql(options: argparse.Namespace) -> int:
    try:
        from effectfence.stores.postgres_server import schema_sql
    except ModuleNotFoundError:
        raise WrongUse(
            "asyncpg is not installed: pip install 'effectfence-asyncio[postgres]'"
        ) from None
    print(schema_sql(options.schema or "effectfence"))
    return 0


async def _open_once(ledger: str) -> int:
    async with EffectFence.open(ledger) as fence:
        print(f"ready: {printable(fence._shared.store.name)}")
    return 0
