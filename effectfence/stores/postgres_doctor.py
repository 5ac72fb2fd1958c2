"""What `effectfence doctor postgresql://…` tells: the settings that decide, and what they promise.

Looks, and changes nothing; not even the schema is made.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from effectfence.errors import LedgerUnavailable
from effectfence.stores.postgres_server import (
    DRIVER_ERRORS,
    VERSION,
    Address,
    Link,
    Server,
    connect,
    look,
    parse,
    why,
)

_MENDS: Final = {
    "fsync": "ALTER SYSTEM RESET fsync; SELECT pg_reload_conf();",
    "full_page_writes": "ALTER SYSTEM RESET full_page_writes; SELECT pg_reload_conf();",
    "synchronous_commit": "ALTER ROLE … SET synchronous_commit = 'on'",
    "data_sync_retry": "ALTER SYSTEM RESET data_sync_retry, and restart",
    "default_transaction_isolation": "ALTER ROLE … RESET default_transaction_isolation",
}


class Word(NamedTuple):
    """One thing that is not as it should be."""

    says: str
    mend: str
    broken: bool


async def examine(url: str) -> tuple[dict[str, str], list[Word]]:
    """Facts by name, and what is amiss. `ValueError` for an address that means nothing."""
    address = parse(url)
    facts = {"ledger": address.name}
    link: Link | None = None
    try:
        link = await connect(address, address.timeout, application="effectfence doctor")
        server = await look(link, address, address.timeout)
        facts |= _facts(server, address)
        facts["clock"] = await _clock(link, address)
        facts["rights"], unfit = await _rights(link, address, server)
    except LedgerUnavailable as error:
        return facts, [Word(error.reason, f"effectfence doctor '{address.name}'", True)]
    except DRIVER_ERRORS as error:
        says = address.unavailable(why(error)).reason
        return facts, [Word(f"it can't be reached: {says}", f"psql '{address.name}'", True)]
    finally:
        if link is not None:
            link.hang_up()
    return facts, [*_words(server, address), *unfit]


def _facts(server: Server, address: Address) -> dict[str, str]:
    settings = server.settings
    standbys = settings["synchronous_standby_names"]
    return {
        "promise": _promise(server),
        "server": f"PostgreSQL {server.version // 10000}.{server.version % 10000}"
        + (", a standby" if server.standby else ""),
        **{name: settings[name] for name in ("fsync", "full_page_writes", "synchronous_commit")},
        "synchronous standbys": standbys or "none",
        "schema": f"{address.schema}, version {server.schema_version} (epoch {server.epoch[:8]}…)"
        if server.schema_version
        else f"{address.schema}, not there yet; made when it is first opened",
    }


def _promise(server: Server) -> str:
    among = "one effect per intent among all processes that use this database, over their crashes"
    if server.waits_for_standbys and server.settings["synchronous_commit"] != "remote_write":
        return f"{among}, the server's, and a failover to a synchronous standby"
    return (
        f"{among} and the server's; a failover to a standby may forget what was acknowledged last"
    )


async def _clock(link: Link, address: Address) -> str:
    asked = time.time()
    rows = await link.fetch(
        address.timeout, "SELECT extract(epoch FROM clock_timestamp())::double precision"
    )
    apart = rows[0][0] - (asked + time.time()) / 2
    return (
        f"the server's alone counts; it is {abs(apart):.1f} s "
        f"{'ahead of' if apart > 0 else 'behind'} this machine's. Set forward, it ends leases early"
    )


async def _rights(link: Link, address: Address, server: Server) -> tuple[str, list[Word]]:
    """Whether this role may do what a fence does."""
    if not server.schema_version:
        rows = await link.fetch(
            address.timeout,
            "SELECT current_user, has_database_privilege(current_database(), 'CREATE')",
        )
        role, may = rows[0]
        init = f"effectfence ledger init --print-sql --schema {address.schema}"
        words = [] if may else [Word(f"the role {role} may not make a schema", init, True)]
        return f"{role} {'may' if may else 'may not'} make the schema", words
    schema = address.schema
    rows = await link.fetch(
        address.timeout,
        "SELECT current_user, bool_and(has_table_privilege(t, p)) FROM unnest($1::text[]) AS t, "
        "unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p",
        [f"{schema}.records"],
    )
    role, may = rows[0]
    grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}"
    words = [] if may else [Word(f"the role {role} may not write the records", grant, True)]
    return f"{role} {'may' if may else 'may not'} read and write the records", words


def _words(server: Server, address: Address) -> list[Word]:
    found = [Word(says, _mend(says), True) for says in server.refused(pooled=address.pooled)]
    found += [Word(says, _mend(says), False) for says in server.weak()]
    if 0 < server.schema_version < VERSION:
        says = f"the schema has version {server.schema_version}; {VERSION} is made at the next open"
        found.append(Word(says, "open it once with a role that may change it", False))
    return found


def _mend(says: str) -> str:
    name = says.partition("=")[0]
    return _MENDS.get(name, "name another server in the address")
