"""`effectfence demo`: twelve agents, one charge: raw, then fenced."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Final

from effectfence.commands.printing import print_json, say

if TYPE_CHECKING:
    from effectfence.mcp.demo import Act, Played

_BOLD, _RED, _GREEN, _DIM = "1", "31;1", "32;1", "2"
_IDS_A_LINE: Final = 3


def add(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `effectfence demo`."""
    parser.usage = "effectfence demo [--json]"
    parser.description = (
        "Twelve identical calls charge a card: first at the built-in server as it is, then through "
        "`effectfence wrap`. Real processes, in a folder that is gone afterwards. Exit code 1 when "
        "the books do not show 12 charges, then 1."
    )
    parser.epilog = "example: effectfence demo --json"
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(verb=_demo)


def _demo(options: argparse.Namespace) -> int:
    from effectfence.mcp.client import CannotProbe, interruptible
    from effectfence.mcp.demo import play

    try:
        played = interruptible(play())
    except CannotProbe as error:
        return say(str(error), 1)
    if isinstance(played, int):
        return played
    if options.json:
        print_json(played.as_json())
    else:
        _print(played)
    return 0 if played.as_promised else 1


def _print(played: Played) -> None:
    from effectfence.mcp.demo import CALLS, ORDER, TOOL

    amount = _money(ORDER["amount_cents"])
    print(_styled(f"{CALLS} agents, one order: {TOOL} {ORDER['order_id']}, {amount}", _BOLD))
    print()
    _print_act("ACT 1", "the server as it is", played.raw)
    _print_act("ACT 2", "the same server and calls, through `effectfence wrap`", played.wrapped)
    print(f"{played.seconds:.1f} s, real processes, nothing left behind. Yours:")
    print("  effectfence probe --tool NAME --args JSON -- COMMAND   is it like act 1?")
    print("  effectfence wrap -- COMMAND                            then make it act 2")


def _print_act(name: str, what: str, act: Act) -> None:
    count = len(act.ids)
    colour = _GREEN if count == 1 else _RED
    charges = f"{count} charge{'' if count == 1 else 's'}, {_money(act.cents)}"
    replayed = f", {act.replayed} of them from the ledger" if act.replayed else ""
    print(f"{_styled(name, _BOLD)}  {what}")
    print(f"       {act.answered} calls answered{replayed}")
    print(f"       in the books: {_styled(charges, colour)}")
    for start in range(0, count, _IDS_A_LINE):
        print(_styled(f"         {'  '.join(act.ids[start : start + _IDS_A_LINE])}", _DIM))
    if act.statistics:
        print(_styled(f"       {act.statistics}", _DIM))
    print()


def _money(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


def _styled(text: str, style: str) -> str:
    """Colour on a terminal only, and not for who asked for none."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"
