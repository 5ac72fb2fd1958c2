"""What the README tells people to put into their client's configuration, started as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mcp.conftest import CACHE, REPOSITORY
from tests.mcp.peer import Peer

pytestmark = pytest.mark.rig

README = (REPOSITORY / "README.md").read_text()


def recipes() -> Iterator[list[str]]:
    """The command lines of every `mcpServers` block and of `claude mcp add`."""
    for block in re.findall(r"^```json\n(.*?)^```$", README, re.M | re.S):
        for server in json.loads(block).get("mcpServers", {}).values():
            yield [server["command"], *server.get("args", [])]
    for line in re.findall(r"^claude mcp add \S+ -- (.*)$", README, re.M):
        yield shlex.split(line)


RECIPES = list(recipes())


def test_the_readme_has_both_kinds() -> None:
    assert ["effectfence", "wrap"] in [recipe[:2] for recipe in RECIPES]
    assert len(RECIPES) >= 2


@pytest.mark.parametrize("recipe", RECIPES, ids=" ".join)
async def test_what_the_readme_says_starts(recipe: list[str], npm: Path, tmp_path: Path) -> None:
    """With the command `effectfence` of this very tree, and npx as it comes."""
    command = tmp_path / "bin" / "effectfence"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m effectfence "$@"\n')
    command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "npm_config_cache": str(CACHE / "npx"),
    }
    async with await Peer.start(recipe, env=env, cwd=tmp_path) as peer:
        assert "serverInfo" in (await peer.hello()).result
        assert (await peer.ask("tools/list", {})).result["tools"]
    kind = "wrap" if "wrap" in recipe else "server"
    assert [path.name for path in (tmp_path / "state" / "effectfence").glob(f"{kind}*.jsonl")]
