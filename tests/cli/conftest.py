"""A ledger with an intent in every state, and the command run as the shell runs it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from effectfence import EffectFence, EffectRequest
from effectfence.cli import main

ROOT = Path(__file__).parents[2]


def request(name, **more):
    given = {
        "intent": name,
        "domain": f"of:{name}",
        "tool": "pay",
        "args": {"n": 1},
        "agent": "bob",
    }
    return EffectRequest(**{**given, **more})


async def fill(path):
    """done, unknown, cleared, and one done in a scope."""
    async with EffectFence.open(path) as fence:
        await fence.run(request("done"), lambda: {"ok": True})
        for name in ("unknown", "cleared"):
            prepared = (await fence.prepare(request(name))).prepared
            await fence.abort(prepared, "the line went dead")
        await fence.clear("cleared", by="ada", reason="not in the books")
        await fence.scoped("tenant-a").run(request("done"), lambda: {"tenant": "a"})


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "effects.jsonl"
    asyncio.run(fill(path))
    return str(path)


@pytest.fixture
def effectfence(capsys, monkeypatch):
    """`effectfence("ledger", "list", …)` gives (exit code, stdout, stderr)."""
    monkeypatch.delenv("EFFECTFENCE_LEDGER", raising=False)

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return call


def start(*arguments, **more):
    """The command in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {"stdout": subprocess.PIPE, "env": os.environ, **more}
    more["env"] = {**more["env"], "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "effectfence", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )
