"""`effectfence serve`: the fence as an MCP server, on stdio or over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import stat
import sys
from collections.abc import Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from effectfence.commands.printing import WrongUse, printable
from effectfence.fence import EffectFence
from effectfence.models import FenceConfig
from effectfence.stores.address import shown

if TYPE_CHECKING:
    from effectfence.mcp.http import Address, Keys

_EXTRA: Final = ("mcp", "mcp_types", "uvicorn", "starlette")
_TOKEN: Final = "EFFECTFENCE_HTTP_TOKEN"
_MAX_REQUEST_BYTES: Final = 4 << 20


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence serve`."""
    parser.usage = "effectfence serve [--ledger LEDGER] [--http HOST:PORT [OPTION ...]]"
    parser.description = (
        "The fence as an MCP server: agents ask it before they act. On stdio for one client; with "
        "--http for several, each with a bearer token: EFFECTFENCE_HTTP_TOKEN names one, "
        "EFFECTFENCE_HTTP_TOKENS=name=token,… one per tenant, whose intents stay apart. Without "
        "either, a token is made and printed once."
    )
    parser.epilog = "example: effectfence serve --http 127.0.0.1:7777"
    parser.add_argument(
        "--ledger",
        metavar="LEDGER",
        help="a path, or memory: (default: EFFECTFENCE_LEDGER, else effectfence/server.jsonl in "
        "$XDG_STATE_HOME or ~/.local/state)",
    )
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="listen there; a port alone is 127.0.0.1's, 0 any free"
    )
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        default=_TOKEN,
        help="the environment variable with the token (EFFECTFENCE_HTTP_TOKEN)",
    )
    parser.add_argument(
        "--tokens", metavar="FILE", help="tenants, name=token a line, in a file of yours alone"
    )
    parser.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another name under which clients reach this server",
    )
    parser.add_argument(
        "--max-request-bytes",
        metavar="N",
        type=_count,
        default=_MAX_REQUEST_BYTES,
        help="larger requests are refused (4 MiB)",
    )
    parser.set_defaults(verb=_serve)


def _serve(options: argparse.Namespace) -> Coroutine[Any, Any, int]:
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise WrongUse(
            f"the MCP server needs {missing[0]}, which is not installed: "
            "pip install 'effectfence-asyncio[mcp]'"
        )
    config = FenceConfig(
        lease_ttl=_seconds("EFFECTFENCE_LEASE_SECS", 60.0),
        result_ttl=_seconds("EFFECTFENCE_RESULT_TTL_SECS", 86400.0),
    )
    ledger = options.ledger or os.environ.get("EFFECTFENCE_LEDGER") or _own_ledger()
    if options.http is None:
        return _on_stdio(ledger, config)
    return _on_http(ledger, config, options)


async def _on_stdio(ledger: str, config: FenceConfig) -> int:
    from effectfence.mcp.server import serve_stdio

    stop = _stop_on_a_signal()
    return _end(await serve_stdio(await EffectFence.open(ledger, config), stop))


async def _on_http(ledger: str, config: FenceConfig, options: argparse.Namespace) -> int:
    from effectfence.mcp.http import PATH, Address, listen, security, serve_http

    address = Address.parse(options.http)
    keys, made = _keys(options, address)
    stop = _stop_on_a_signal()
    fence = await EffectFence.open(ledger, config)
    try:
        listening, address = listen(address)
    except OSError:
        await fence.aclose()
        raise
    if made is not None:
        _tell(f"bearer token, made for this run and not shown again: {made}")
    _tell(f"serving http://{address}{PATH} on the ledger {shown(ledger)}")
    settings = security(address, options.allow_host)
    most = options.max_request_bytes
    return _end(await serve_http(fence, listening, keys, settings, stop, most))


def _end(in_time: bool) -> int:
    if not in_time:
        # Somebody holds the ledger's lock, its disk is stuck, or a client does not read: waiting
        # has had its time, and the ledger says what becomes of what a dead process held.
        _tell("not everything ended in time; what the ledger did not take is unknown there")
        os._exit(1)
    return 0


def _stop_on_a_signal() -> asyncio.Event:
    """Set by SIGTERM and SIGHUP: an orderly end. (SIGINT ends the process at once.)"""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _keys(options: argparse.Namespace, address: Address) -> tuple[Keys, str | None]:
    """What was given, else a token of our own, which goes nowhere but this machine."""
    from effectfence.mcp.http import Keys

    given = list(_given(options))
    if given:
        return Keys(given), None
    if not address.is_loopback:
        raise WrongUse(
            f"{address} can be reached from other machines: give the token in "
            f"{options.token_env}, or one per tenant in EFFECTFENCE_HTTP_TOKENS or --tokens"
        )
    return Keys.generated()


def _given(options: argparse.Namespace) -> Iterator[tuple[str | None, str]]:
    from effectfence.mcp.http import Keys

    token = os.environ.get(options.token_env)
    if token is not None:
        yield None, token
    elif options.token_env != _TOKEN:
        raise WrongUse(f"{options.token_env}, which is to hold the token, is not set")
    if tenants := os.environ.get("EFFECTFENCE_HTTP_TOKENS"):
        yield from Keys.tenants(tenants.split(","))
    if options.tokens is not None:
        yield from Keys.tenants(_lines(Path(options.tokens)))


def _lines(path: Path) -> Iterator[str]:
    """Of a file that nobody else may read; empty ones and comments left out."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise WrongUse(f"others may read {path}, which holds tokens: chmod 600 {path}")
        text = path.read_text("utf-8")
    except OSError as error:
        raise WrongUse(f"can't read {path}: {error.strerror}") from None
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def _own_ledger() -> str:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return str(Path(state) / "effectfence" / "server.jsonl")


def _seconds(name: str, default: float) -> float:
    """Of the environment; zero, negative and NaN are told from left out."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise WrongUse(f"{name} is {text!r}; seconds are wanted, more than zero")
    return seconds


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes")
    return int(text)


def _tell(sentence: str) -> None:
    print(f"effectfence: {printable(sentence)}", file=sys.stderr, flush=True)
