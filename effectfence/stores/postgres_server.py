"""What the store asks of a PostgreSQL server beside its records: a connection, a schema, a promise.

1. A connection is used only after the server on it was looked at: a primary, with this ledger's
   epoch and this version's definitions, that writes to its disk before it says so. After a failover
   the next connection may lead to another server than the one before.
2. Definitions are made under one lock, in one transaction, by whoever comes first; older ones are
   brought up to date the same way, newer ones are refused.
3. A query is never cancelled: cancelled while it waits for a standby, a commit would be shown
   without being there. Whoever can't wait any longer hangs up.
4. No error holds a credential.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

import asyncpg

from effectfence.errors import LedgerUnavailable
from effectfence.stores.address import scrubbed, shown

_log = logging.getLogger("effectfence")

STEPS: Final = ("schema.sql", "swap.sql")
"""What was added by each version, from the first on. A step that was published is never changed."""
VERSION: Final = len(STEPS)

OLDEST_SERVER: Final = 120000
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_SESSION: Final = {
    # Plans are made once, before there are statistics, and must be right for a table that grows.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "default_transaction_isolation": "read committed",
}
DRIVER_ERRORS: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""What a connection, an answer or the lack of one can raise; the last where a connection ends while
the driver is between two of its own steps."""


@dataclass(frozen=True)
class Address:
    """A ledger's URL, taken apart: what is ours, and what goes to the driver."""

    url: str = field(repr=False)
    dsn: str = field(repr=False)
    name: str
    schema: str = "effectfence"
    pool: int = 4
    """Connections of one event loop, at most; one more listens while somebody waits."""
    timeout: float = 10.0
    """Seconds after which an ask that was not answered is given up."""
    pooled: bool = False
    """Whether a pooler that hands out connections by the transaction is between."""

    @property
    def is_one_of_several(self) -> bool:
        """Whether it names several servers, of which one is the primary."""
        return "," in self.name.partition("?")[0] and "target_session_attrs" not in self.dsn

    @property
    def channel(self) -> str:
        return f"effectfence_{self.schema}"

    def unavailable(self, reason: str, ran: bool | None = False) -> LedgerUnavailable:
        return LedgerUnavailable(ledger=self.name, reason=scrubbed(reason, self.url), ran=ran)


def parse(url: str) -> Address:
    """Raises `ValueError` for options that mean nothing."""
    place, _, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    ours = {name: value for name, value in options if name in _OURS}
    others = [(name, value) for name, value in options if name not in _OURS]
    dsn = place + (f"?{urlencode(others)}" if others else "")
    if not _NAME.fullmatch(ours.get("schema", "effectfence")):
        raise ValueError(
            f"schema={ours['schema']!r} is no name for a schema: 1 to 40 of a-z, 0-9 and _"
        )
    try:
        given = {name: _OURS[name](value) for name, value in ours.items()}
    except ValueError:
        raise ValueError(f"one of {', '.join(_OURS)} has no such value in {shown(url)}") from None
    if "pgbouncer" in given:
        given["pooled"] = given.pop("pgbouncer")
    return Address(url, dsn, shown(url), **given)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    return int(_positive(text))


def _flag(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False, "": True}[text.lower()]


_OURS: Final[Mapping[str, Any]] = {
    "schema": str,
    "pool": _count,
    "timeout": _positive,
    "pgbouncer": _flag,
}


# --- connections ----------------------------------------------------------------------------------


class Link:
    """One connection: hangs up when it can't wait, and knows whether what it heard is certain."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._statements: dict[str, Any] = {}
        self.doubtful = False
        """Whether the last answer came without its wait for the standbys."""
        connection.add_log_listener(self._noticed)

    @property
    def is_closed(self) -> bool:
        closed: bool = self._connection.is_closed()
        return closed

    async def fetch(self, seconds: float, statement: str, *values: Any) -> list[Any]:
        """The rows. Never cancelled on the server: at the end of its time it hangs up."""
        self.doubtful = False
        alarm = asyncio.get_running_loop().call_later(seconds, self.hang_up)
        try:
            prepared = self._statements.get(statement)
            if prepared is None:
                rows: list[Any] = await self._connection.fetch(statement, *values)
            else:
                rows = await prepared.fetch(*values)
            return rows
        except asyncio.CancelledError:
            self.hang_up()
            raise
        finally:
            alarm.cancel()

    async def prepare(self, *statements: str) -> None:
        for statement in statements:
            self._statements[statement] = await self._connection.prepare(statement)

    async def run(self, seconds: float, script: str) -> None:
        """Statements without values."""
        alarm = asyncio.get_running_loop().call_later(seconds, self.hang_up)
        try:
            await self._connection.execute(script)
        finally:
            alarm.cancel()

    async def listen(self, channel: str, heard: Any, ended: Callable[[], None]) -> None:
        self._connection.add_termination_listener(lambda _: ended())
        await self._connection.add_listener(channel, heard)

    def hang_up(self) -> None:
        if not self._connection.is_closed():
            self._connection.terminate()

    def _noticed(self, _connection: Any, message: Any) -> None:
        """A commit that no longer waits for its standbys succeeds, with a warning. That has no code
        of its own; but nothing else that is asked here comes with one."""
        severity = getattr(message, "severity_en", None) or message.severity
        if severity == "WARNING":
            self.doubtful = True


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # it has no types
    """What the driver does when the one who waits for an answer is cancelled."""

    def _cancel_current_command(self, *_: Any) -> None:
        self.terminate()


async def connect(address: Address, seconds: float, *, application: str = "effectfence") -> Link:
    """A connection, not looked at yet. Raises what the driver raises, and `OSError`."""
    settings = {"application_name": application}
    if not address.pooled:
        settings |= _SESSION
    async with asyncio.timeout(seconds):
        connection = await asyncpg.connect(
            address.dsn,
            timeout=seconds,
            connection_class=_Connection,
            server_settings=settings,
            **({"statement_cache_size": 0} if address.pooled else {}),
            **({"target_session_attrs": "primary"} if address.is_one_of_several else {}),
        )
    return Link(connection)


def why(error: BaseException) -> str:
    """What the driver said, in one line, with the code that people can look up."""
    said = " ".join(str(error).split()) or type(error).__name__
    state = getattr(error, "sqlstate", None)
    if state in _POOLED or "startup parameter" in said:
        said += "; behind a pooler that hands out transactions, such as PgBouncer, ask it by "
        said += "?pgbouncer=true"
    return f"{said} ({state})" if state else said


_POOLED: Final = ("42P05", "26000")
"""A prepared statement that is there already, or is not: another connection's."""


def is_certain(error: BaseException) -> bool:
    """Whether the server itself said that the statement failed, and lives: nothing was written."""
    return (
        isinstance(error, asyncpg.PostgresError)
        and (getattr(error, "severity_en", None) or getattr(error, "severity", None)) == "ERROR"
    )


# --- the server -----------------------------------------------------------------------------------

_LOOK: Final = """
SELECT pg_is_in_recovery() AS standby,
       current_setting('server_version_num')::int AS server,
       current_setting('server_encoding') AS encoding,
       current_setting('fsync') AS fsync,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('synchronous_standby_names') AS synchronous_standby_names,
       current_setting('data_sync_retry', true) AS data_sync_retry,
       current_setting('default_transaction_isolation') AS default_transaction_isolation,
"""
# Of the tables, not of what this session knows: a name that was missing is remembered as missing.
_MADE: Final = (
    "EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = $1 AND c.relname = 'meta') AS made"
)
_LOOK_FIRST: Final = _LOOK + _MADE
_LOOK_KNOWN: Final = _LOOK + "m.version AS schema_version, m.epoch FROM {}.meta AS m"


@dataclass(frozen=True)
class Server:
    """What a server says of itself, and what follows from it."""

    settings: Mapping[str, str]
    standby: bool
    version: int
    schema_version: int = 0
    """Of the definitions; 0 if there are none."""
    epoch: str = ""

    @property
    def waits_for_standbys(self) -> bool:
        return bool(self.settings["synchronous_standby_names"]) and (
            self.settings["synchronous_commit"] not in ("off", "local")
        )

    def refused(self, *, pooled: bool = False) -> Iterator[str]:
        """Why a fence can't rely on it, each with the setting and its value."""
        settings = self.settings
        if self.standby:
            yield "it is a standby, which only follows; name the primary"
        if self.version < OLDEST_SERVER:
            yield f"it is PostgreSQL {self.version // 10000}; 12 or newer is needed"
        if settings["encoding"] != "UTF8":
            yield f"its database has encoding {settings['encoding']}; UTF8 is needed"
        for name in ("fsync", "full_page_writes", "synchronous_commit"):
            if settings[name] == "off":
                yield f"{name}=off: it says that it wrote what a crash can still take away"
        isolation = settings["default_transaction_isolation"]
        if pooled and isolation != "read committed":
            yield (
                f"default_transaction_isolation={isolation}, and a pooler is between: "
                "ALTER ROLE … SET default_transaction_isolation = 'read committed'"
            )

    def weak(self) -> Iterator[str]:
        """What it does not promise: said loudly, and refused under `require_durable`."""
        settings = self.settings
        level = settings["synchronous_commit"]
        if settings["data_sync_retry"] == "on":
            yield "data_sync_retry=on: after a failed sync it may take for written what is not"
        if settings["synchronous_standby_names"] and level in ("local", "remote_write"):
            yield (
                f"synchronous_commit={level}: a failover to a synchronous standby may lose what "
                "was acknowledged"
            )


async def look(link: Link, address: Address, seconds: float, *, known: bool = False) -> Server:
    """`known`: the schema is taken to be there, and its definitions must be ours."""
    if not known:
        first = (await link.fetch(seconds, _LOOK_FIRST, address.schema))[0]
        if not first["made"]:
            return _server(first)
    row = (await link.fetch(seconds, _LOOK_KNOWN.format(address.schema)))[0]
    version = row["schema_version"]
    if version > VERSION or (known and version < VERSION):
        newer = version > VERSION
        raise address.unavailable(
            f"the schema {address.schema} has version {version}, this library has {VERSION}: "
            + ("update the library" if newer else "open it anew with a role that may change it")
        )
    return _server(row, version, row["epoch"])


def _server(row: Any, version: int = 0, epoch: str = "") -> Server:
    settings = {
        name: str(row[name] or "")
        for name in (
            *("encoding", "fsync", "full_page_writes", "synchronous_commit"),
            *("synchronous_standby_names", "data_sync_retry", "default_transaction_isolation"),
        )
    }
    return Server(settings, row["standby"], row["server"], version, epoch)


def schema_sql(schema: str = "effectfence", *, above: int = 0) -> str:
    """The statements that make the schema, or bring one of version `above` up to date."""
    if not _NAME.fullmatch(schema):
        raise ValueError(f"{schema!r} is no name for a schema: 1 to 40 of a-z, 0-9 and _")
    texts = (
        resources.files("effectfence.stores").joinpath(step).read_text("utf-8")
        for step in STEPS[above:]
    )
    return "\n".join(
        text.replace("{schema_text}", f"'{schema}'")
        .replace("{channel}", f"'effectfence_{schema}'")
        .replace("{schema}", schema)
        for text in texts
    )


async def make(link: Link, address: Address, seconds: float) -> None:
    """Make the schema, or bring it up to date; whoever else does so meanwhile has done it."""
    schema = address.schema
    try:
        await link.run(seconds, "BEGIN ISOLATION LEVEL READ COMMITTED")
        await link.fetch(seconds, "SELECT pg_advisory_xact_lock(hashtext($1))", f"make {schema}")
        version = 0
        if (await link.fetch(seconds, f"SELECT {_MADE}", schema))[0][0]:
            version = (await link.fetch(seconds, f"SELECT version FROM {schema}.meta"))[0][0]
        if version < VERSION:
            await link.run(seconds, schema_sql(schema, above=version))
        await link.run(seconds, "COMMIT")
    except asyncpg.InsufficientPrivilegeError as error:
        raise address.unavailable(
            f"the schema {schema} is not there, and this role may not make it ({why(error)}); let "
            f"one who may run what `effectfence ledger init --print-sql --schema {schema}` prints"
        ) from None
