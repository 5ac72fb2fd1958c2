"""The command `effectfence`: finds the one that was asked for, runs it, ends as it says.

Each command is a module in `commands/` with `add(parser)`, which sets `verb`; only the one that was
asked for is imported, so that `wrap` starts its child before anything heavy is loaded.

Exit 0: done. 1: the check did not hold, or the ledger said no. 2: wrong use.
Errors are one sentence on stderr. Whatever was recorded is printed with its control characters
escaped: a terminal must not obey what an agent wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from importlib import import_module
from typing import Any, Final

from effectfence.commands.printing import WrongUse, say

COMMANDS: Final = {
    "serve": "the fence as an MCP server, over stdio or streamable HTTP",
    "wrap": "the fence in front of any MCP server",
    "probe": "does this MCP server fire twice?",
    "scan": "which tools of an MCP server could fire twice, read from its source",
    "demo": "twelve agents, one charge: raw, then fenced",
    "ledger": "the operator's hands, safe on a ledger in use",
    "doctor": "what is installed, which core is active, what the ledger promises here",
}
_TAKE_A_COMMAND: Final = ("wrap", "probe")
"""What follows `--` is another program's, never ours to parse."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _interruptible():
            code = _run(typed)
            sys.stdout.flush()
        return code
    except (WrongUse, ValueError) as error:
        return say(str(error), 2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return _reader_left()
        return say(str(error), 1)
    except Exception as error:
        if _is_fence_error(error):
            return say(str(error), 1)
        raise


def _run(typed: list[str]) -> int:
    if not typed and not sys.stdin.isatty():
        typed = ["serve"]  # an MCP client has started us
    ours, others = _split(typed)
    parser = _parser(typed)
    if not typed:
        parser.print_help()
        return 0
    options, left = parser.parse_known_args(ours)
    if left and (not hasattr(options, "names") or any(word.startswith("-") for word in left)):
        options.parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        options.names += left
    options.command = others
    doing: Coroutine[Any, Any, int] | int = options.verb(options)
    if isinstance(doing, int):
        return doing
    import asyncio  # not what everybody who asks for help pays for

    return asyncio.run(doing)


def _split(typed: list[str]) -> tuple[list[str], list[str]]:
    """Our words, and the command line of another program after `--`."""
    if typed[:1] and typed[0] in _TAKE_A_COMMAND and "--" in typed:
        at = typed.index("--")
        return typed[:at], typed[at + 1 :]
    return typed, []


def _parser(typed: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="effectfence",
        description="The fence in front of the side effect: one intent runs once. "
        "Started by an MCP client, without arguments: the same as `serve`.",
        epilog="example: effectfence ledger list effects.jsonl --state unknown",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, promise in COMMANDS.items():
        command = commands.add_parser(name, help=promise)
        command.set_defaults(parser=command)
        if name in typed[:1]:
            import_module(f"effectfence.commands.{name}").add(command)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from effectfence.doctor import version

        print(f"effectfence {version()}")
        parser.exit()


def _is_fence_error(error: Exception) -> bool:
    """Without importing them: an error of ours can only be raised where they are imported."""
    errors = sys.modules.get("effectfence.errors")
    return errors is not None and isinstance(error, errors.FenceError)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once, as it ends `cat`: a ledger may be left at any instant, and
    an orderly end could wait for a lock that a stopped process holds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _reader_left() -> int:
    """`… | head` has seen enough: nothing is written any more, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
