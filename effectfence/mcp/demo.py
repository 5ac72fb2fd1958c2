"""`effectfence demo`: twelve agents, one charge: raw, then fenced. With the real programs.

Act 1 starts the built-in server (`charge_server.py`) and sends it twelve identical calls at once.
Act 2 sends the same twelve to `effectfence wrap -- <the same server>`.

Invariants:

1. What is told was read from the books, the file to which the server appends its charges; nothing
   of it is written down here.
2. Everything lives in a folder of its own, which is gone at the end, and so are the processes. The
   user's ledgers, policies and settings have no part in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from effectfence.mcp.client import CannotProbe, Server
from effectfence.mcp.evidence import Kind
from effectfence.mcp.probe import Plan, fire

CALLS: Final = 12
TOOL: Final = "charge_card"
ORDER: Final[dict[str, Any]] = {"order_id": "order-1042", "amount_cents": 4200}
PROVIDER_SECONDS: Final = 0.05
"""How long a charge takes, so that all twelve calls are there while the first one runs."""

_OURS: Final = "EFFECTFENCE_"
_CORE: Final = "EFFECTFENCE_CORE"


@dataclass(frozen=True, slots=True)
class Act:
    """What one act's server did."""

    answered: int
    replayed: int
    charges: list[dict[str, Any]]
    statistics: str
    """What wrap says on its standard error when it ends."""

    @property
    def cents(self) -> int:
        return sum(charge["amount_cents"] for charge in self.charges)

    @property
    def ids(self) -> list[str]:
        return sorted({charge["charge_id"] for charge in self.charges})

    def as_json(self) -> dict[str, Any]:
        return {
            "answered": self.answered,
            "replayed": self.replayed,
            "charges": len(self.ids),
            "charged_cents": self.cents,
        }


@dataclass(frozen=True, slots=True)
class Played:
    """Both acts, and how long they took."""

    raw: Act
    wrapped: Act
    seconds: float

    @property
    def as_promised(self) -> bool:
        """Twelve charges, then one, and everybody was answered."""
        return (
            (len(self.raw.ids), len(self.raw.charges)) == (CALLS, CALLS)
            and (len(self.wrapped.ids), len(self.wrapped.charges)) == (1, 1)
            and self.wrapped.replayed == CALLS - 1
            and self.raw.answered == self.wrapped.answered == CALLS
        )

    def as_json(self) -> dict[str, Any]:
        """`calls`; `raw` and `wrapped`: `{answered, replayed, charges, charged_cents}`; `seconds`;
        `as_promised`."""
        return {
            "calls": CALLS,
            "raw": self.raw.as_json(),
            "wrapped": self.wrapped.as_json(),
            "seconds": round(self.seconds, 3),
            "as_promised": self.as_promised,
        }


async def play() -> Played:
    """Both acts, one after the other. Raises `CannotProbe` when one can't begin; cancelled, it
    leaves nothing behind either."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="effectfence-demo-") as folder:
        acts = [Path(folder, name) for name in ("raw", "wrapped")]
        for act in acts:
            os.mkdir(act)
        raw = await _act(acts[0], [])
        ledger = os.path.join(folder, "ledger.jsonl")
        wrap = [sys.executable, "-m", "effectfence", "wrap", "--ledger", ledger, "--"]
        wrapped = await _act(acts[1], wrap)
    return Played(raw, wrapped, time.monotonic() - began)


async def _act(folder: Path, before: Sequence[str]) -> Act:
    books, said = folder / "charges.jsonl", folder / "said"
    server = [sys.executable, "-m", "effectfence.mcp.charge_server", str(books)]
    plan = Plan(
        command=[*_SAYS_INTO, str(said), *before, *server, str(PROVIDER_SECONDS)],
        tool=TOOL,
        arguments=ORDER,
        calls=CALLS,
    )
    try:
        async with Server(
            plan.command, start_seconds=plan.start_seconds, env=_environment(folder)
        ) as running:
            outcomes = await fire(running, plan)
    except CannotProbe as error:
        raise CannotProbe(f"{error}: {_last_line(said)}") from None
    return Act(
        answered=sum(each.kind is Kind.SUCCEEDED for each in outcomes),
        replayed=sum(each.replay for each in outcomes),
        charges=[json.loads(line) for line in _text(books).splitlines()],
        statistics=_last_line(said),
    )


_SAYS_INTO: Final = ("sh", "-c", 'exec "$@" 2>"$0"')
"""Its standard error goes into the file that is named next; the process stays the same one."""


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def _last_line(path: Path) -> str:
    return (_text(path).splitlines() or [""])[-1]


def _environment(folder: Path) -> dict[str, str]:
    """Ours, without what the user chose for their own ledgers."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    if _CORE in os.environ:
        env[_CORE] = os.environ[_CORE]
    return {**env, "XDG_STATE_HOME": str(folder)}
