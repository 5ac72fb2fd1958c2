"""Clients that other people wrote, through `effectfence wrap`: the SDKs for Python and TypeScript,
in the era of the handshake and in the one without."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import ElicitResult

from tests.mcp.conftest import Odd, wrap
from tests.mcp.peer import until

pytestmark = pytest.mark.rig

TOOLS = ["charge", "confirmed", "declined", "look", "slow"]


def command(odd: Odd) -> list[str]:
    server = [sys.executable, str(Path(__file__).with_name("sdk_server.py"))]
    server += [str(odd.folder / "effects"), str(odd.gates)]
    return wrap("--ledger", str(odd.ledger), command=server)


def effects(odd: Odd) -> Counter[str]:
    path = odd.folder / "effects"
    return Counter(path.read_text().split() if path.exists() else [])


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_the_python_sdk(odd: Odd, mode: str) -> None:
    asked = []
    progress = []

    async def elicited(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"sure": True})

    async def progressed(done: float, total: float | None, message: str | None) -> None:
        progress.append(done)

    program, *arguments = command(odd)
    at = StdioServerParameters(command=program, args=arguments, env=odd.env, cwd=odd.folder)
    async with Client(at, mode=mode, elicitation_callback=elicited) as client:
        assert sorted(tool.name for tool in (await client.list_tools()).tools) == TOOLS
        (content,) = (await client.read_resource("charges://all")).contents
        assert content.text == "all of them"
        prompt = await client.get_prompt("refund", {"order": "o1"})
        assert prompt.messages[0].content.text == "Refund o1, please."

        charge = {"order": "o1", "cents": 10}
        twelve = await asyncio.gather(*(client.call_tool("charge", charge) for _ in range(12)))
        assert {answer.structured_content["number"] for answer in twelve} == {1}
        assert not any(answer.is_error for answer in twelve)
        again = await client.call_tool("charge", charge)
        assert again.meta["effectfence/replay"]["intent"].startswith("charge:")
        for _ in range(2):
            assert (await client.call_tool("declined", {"order": "o1"})).is_error
        looks = [(await client.call_tool("look", {})).content[0].text for _ in range(2)]
        assert len(set(looks)) == 2
        confirmed = await client.call_tool("confirmed", {"order": "o1"})
        assert confirmed.content[0].text.endswith("True")
        assert asked == ["pay o1?"]

        slow = asyncio.ensure_future(
            client.call_tool("slow", {"order": "given-up"}, progress_callback=progressed)
        )
        await until(lambda: progress)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        retry = asyncio.ensure_future(client.call_tool("slow", {"order": "given-up"}))
        odd.open_gate("given-up")
        answer = await retry
        assert "effectfence/replay" in answer.meta
    ran = effects(odd)
    assert ran == {"charge": 1, "declined": 2, "look": 2, "confirmed": 1, "slow": 1}


@pytest.mark.parametrize(
    ("sdk", "mode"), [("1", "legacy"), ("2", "legacy"), ("2", "auto"), ("2", "modern")]
)
async def test_the_typescript_sdk(odd: Odd, npm: Path, sdk: str, mode: str) -> None:
    script = Path(__file__).with_name("client.cjs")
    process = await asyncio.create_subprocess_exec(
        *("node", str(script), str(npm), sdk, mode, str(odd.gates), *command(odd)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=odd.env,
        cwd=odd.folder,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    said = json.loads(output)
    assert said["tools"] == TOOLS
    assert said["resource"] == "all of them"
    assert said["prompt"][0]["content"]["text"] == "Refund o1, please."
    assert {answer["structuredContent"]["number"] for answer in said["charges"]} == {1}
    assert sum("effectfence/replay" in a.get("_meta", {}) for a in said["charges"]) == 11
    assert said["again"]["_meta"]["effectfence/replay"]["intent"].startswith("charge:")
    assert [answer["isError"] for answer in said["declined"]] == [True, True]
    assert said["looks"][0] != said["looks"][1]
    assert said["confirmed"]["content"][0]["text"].endswith("True")
    assert said["asked"] == 1
    assert (said["givenUp"], said["progress"]) == ("gave up", [1])
    assert "effectfence/replay" in said["retry"]["_meta"]
    ran = effects(odd)
    assert ran == {"charge": 1, "declined": 2, "look": 2, "confirmed": 1, "slow": 1}
