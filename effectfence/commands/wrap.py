"""`effectfence wrap`: parse, start the server, and only then load what stands in front of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Final

from effectfence.commands.printing import WrongUse, say

_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence wrap`."""
    parser.usage = "effectfence wrap [OPTION ...] -- COMMAND [ARGUMENT ...]"
    parser.description = (
        "Start an MCP server and stand in front of it: a tool call that was made before is "
        "answered from the ledger instead of running again. Everything else passes as it is. "
        "All processes that wrap the same command share one ledger."
    )
    parser.epilog = "example: effectfence wrap -- npx -y @modelcontextprotocol/server-memory"
    parser.add_argument(
        "--ledger",
        metavar="LEDGER",
        help="a path, or memory: (default: EFFECTFENCE_LEDGER, else one of this command's own "
        "in $XDG_STATE_HOME or ~/.local/state)",
    )
    parser.add_argument("--policy", metavar="FILE", help="what each tool's calls mean, in TOML")
    parser.add_argument(
        "--scope", metavar="NAME", help="keep apart from others on a ledger that was named"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="of the server's environment, and a part of what makes it another server",
    )
    parser.add_argument(
        "--wait-seconds",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long a duplicate waits for the one that runs (30)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long calls in flight may go on when the client has left (60)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="a tool's error answer leaves its outcome unknown: it may have come after the effect",
    )
    parser.add_argument(
        "--fence-all", action="store_true", help="also the tools that say they only read"
    )
    parser.add_argument(
        "--observe",
        action="store_true",
        help="stop nothing; report what would have been stopped, and near-duplicates",
    )
    parser.set_defaults(verb=_wrap)


def _wrap(options: argparse.Namespace) -> int:
    _open_what_is_closed()
    if not options.command:
        raise WrongUse(
            "no server: put its command after `--`, as in `effectfence wrap -- node s.js`"
        )
    from effectfence.mcp.policy import Policy, ToolPolicy

    defaults = ToolPolicy(
        wait_seconds=options.wait_seconds, on_error="unknown" if options.strict else "release"
    )
    policy = Policy.load(options.policy or os.environ.get("EFFECTFENCE_POLICY"), defaults)
    lease = _from_environment("EFFECTFENCE_LEASE_SECS", 60.0)
    lifetime = _from_environment("EFFECTFENCE_RESULT_TTL_SECS", 86400.0)
    ledger, scope = _ledger(options)

    import asyncio

    from effectfence.mcp.child import Child, environment

    # Until it can be answered. Not SIG_IGN, which the server would inherit.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        child = Child(options.command, environment(options.env))
    except (OSError, ValueError) as error:
        return _not_started(options.command[0], error)
    from effectfence.mcp.wrap import Settings, Wrap

    settings = Settings(
        ledger=ledger,
        scope=scope,
        policy=policy,
        lease_seconds=lease,
        result_ttl_seconds=lifetime,
        drain_seconds=options.drain_seconds,
        fence_all=options.fence_all,
        observe=options.observe,
    )

    async def run() -> int:
        return await Wrap(child, settings).run()

    return asyncio.run(run())


def _open_what_is_closed() -> None:
    """A pipe to the server, or the ledger, must not become our own input, output or error."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _not_started(name: str, error: Exception) -> int:
    import asyncio

    from effectfence.mcp.wrap import refuse_everything

    reason = getattr(error, "strerror", None) or str(error)
    say(f"the wrapped server {name} could not be started: {reason}", 1)
    asyncio.run(refuse_everything(name, reason))
    return _NOT_EXECUTABLE if isinstance(error, PermissionError) else _NOT_FOUND


def _ledger(options: argparse.Namespace) -> tuple[str, str | None]:
    """Where it is, and the scope in it: a ledger of this command's own needs none."""
    identity = _identity(options)
    named = options.ledger or os.environ.get("EFFECTFENCE_LEDGER")
    if named and not options.observe:
        return named, options.scope or identity
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    kind = "observe" if options.observe else "wrap"
    path = folder / "effectfence" / f"{kind}-{identity}.jsonl"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(path), options.scope


def _identity(options: argparse.Namespace) -> str:
    """What makes it the same server: the command, where it runs, and what was chosen for it. As a
    hash, since any of them may hold a secret."""
    chosen = {}
    for choice in options.env:
        name, given, value = choice.partition("=")
        chosen[name] = value if given else os.environ.get(name)
    made_of = json.dumps([options.command, os.getcwd(), sorted(chosen.items())])
    return hashlib.sha256(made_of.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, 0 or more")
    return seconds


def _from_environment(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise WrongUse(f"{name} is {text!r}; a number of seconds above 0 is wanted")
    return seconds
