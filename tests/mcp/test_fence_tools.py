"""`fence_tools`: the tools of a server in its own process, on the official SDK in both eras."""

# ruff: noqa: ASYNC221, ASYNC240 - a test may keep its own loop waiting

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError

from effectfence import EffectFence
from effectfence.mcp import ToolPolicy, fence_tools
from tests.mcp.peer import until

ROOT = Path(__file__).parents[2]
REPLAY, REFUSED = "effectfence/replay", "effectfence/refused"


class Shop:
    """A server whose effects are counted where they happen."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.began = asyncio.Event()
        self.server = server = MCPServer("shop")

        @server.tool()
        async def charge(order: str, cents: int, token: str = "") -> dict[str, Any]:
            """Charge an order."""
            self.ran[f"charge {order}"] += 1
            return {"number": self.ran[f"charge {order}"], "cents": cents}

        @server.tool(annotations=types.ToolAnnotations(read_only_hint=True))
        async def look(order: str) -> str:
            self.ran["look"] += 1
            return f"{order} {self.ran['look']}"

        @server.tool()
        async def slow(order: str) -> str:
            self.ran["slow"] += 1
            self.began.set()
            await self.gate.wait()
            return "done"

        @server.tool()
        async def fails(order: str) -> str:
            self.ran["fails"] += 1
            self.began.set()
            await self.gate.wait()
            raise TimeoutError("no answer from the bank")


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
async def fence(tmp_path: Path) -> AsyncIterator[EffectFence]:
    async with EffectFence.open(tmp_path / "effects.jsonl") as fence:
        yield fence


@pytest.fixture(params=["legacy", "2026-07-28"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def session(server: Any, mode: str = "auto") -> AsyncIterator[Client]:
    async with Client(server, mode=mode) as client:
        yield client


def marks(result: Any, key: str) -> Any:
    return (result.meta or {}).get(key)


async def test_a_duplicate_call_gets_the_recorded_result_marked_as_a_replay(
    shop: Shop, fence: EffectFence, mode: str
) -> None:
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client:
        first = await client.call_tool("charge", {"order": "o1", "cents": 2**60 + 1})
        again = await client.call_tool("charge", {"cents": 2**60 + 1, "order": "o1"})
        other = await client.call_tool("charge", {"order": "o1", "cents": 2**60 + 2})
    assert first.structured_content == again.structured_content
    assert again.content == first.content
    assert marks(first, REPLAY) is None
    assert set(marks(again, REPLAY)) == {"intent", "certificate"}
    assert other.structured_content == {"number": 2, "cents": 2**60 + 2}
    assert shop.ran["charge o1"] == 2


async def test_an_unfenced_server_shows_that_the_test_can_fail(shop: Shop, mode: str) -> None:
    async with session(shop.server, mode) as client:
        for _ in range(2):
            await client.call_tool("charge", {"order": "o1", "cents": 1})
    assert shop.ran["charge o1"] == 2


async def test_tools_are_listed_as_before(shop: Shop, fence: EffectFence, mode: str) -> None:
    async with session(shop.server, mode) as client:
        before = await client.list_tools()
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client:
        assert await client.list_tools() == before


@pytest.mark.parametrize("listed", [False, True])
async def test_what_only_reads_passes(
    shop: Shop, fence: EffectFence, mode: str, listed: bool
) -> None:
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client:
        if listed:
            await client.list_tools()
        texts = [await client.call_tool("look", {"order": "o1"}) for _ in range(2)]
    assert [each.content[0].text for each in texts] == ["o1 1", "o1 2"]  # type: ignore[union-attr]
    assert await fence.intent_count() == 0


async def test_all_can_be_fenced_and_one_can_be_let_through(shop: Shop, fence: EffectFence) -> None:
    fence_tools(shop.server, fence, fence_all=True, policy={"charge": ToolPolicy(fence=False)})
    async with session(shop.server) as client:
        for _ in range(2):
            await client.call_tool("look", {"order": "o1"})
            await client.call_tool("charge", {"order": "o1", "cents": 1})
    assert (shop.ran["look"], shop.ran["charge o1"]) == (1, 2)


async def test_nine_identical_calls_at_once_run_once(
    shop: Shop, fence: EffectFence, mode: str
) -> None:
    """CASES 13 and 14."""
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client, asyncio.TaskGroup() as group:
        calls = [group.create_task(client.call_tool("slow", {"order": "o1"})) for _ in range(9)]
        await shop.began.wait()
        shop.gate.set()
    assert {each.result().content[0].text for each in calls} == {"done"}
    assert shop.ran["slow"] == 1


async def test_a_call_whose_client_left_runs_on_and_is_replayed(
    shop: Shop, fence: EffectFence, mode: str
) -> None:
    """CASES 11 and 12."""
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client:
        call = asyncio.ensure_future(client.call_tool("slow", {"order": "o1"}))
        await shop.began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    shop.gate.set()
    async with session(shop.server, mode) as client:
        again = await client.call_tool("slow", {"order": "o1"})
    assert again.content[0].text == "done"  # type: ignore[union-attr]
    assert shop.ran["slow"] == 1


async def test_closing_the_fence_waits_for_what_its_client_left(shop: Shop, tmp_path: Path) -> None:
    fence = await EffectFence.open(tmp_path / "effects.jsonl")
    fence_tools(shop.server, fence)
    async with session(shop.server, "legacy") as client:
        call = asyncio.ensure_future(client.call_tool("slow", {"order": "o1"}))
        await shop.began.wait()
        call.cancel()
        await asyncio.wait((call,))
    closing = asyncio.ensure_future(fence.aclose(drain_seconds=60))
    shop.gate.set()
    await closing
    async with EffectFence.open(tmp_path / "effects.jsonl") as again:
        (record,) = [record async for record in again.intents()]
    assert (record.state, record.tool, record.agent) == ("done", "slow", "shop")


async def test_an_error_answer_releases_and_the_duplicates_that_wait_share_it(
    shop: Shop, fence: EffectFence, mode: str
) -> None:
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client:
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(client.call_tool("fails", {"order": "o1"})) for _ in range(3)
            ]
            await shop.began.wait()
            shop.gate.set()
        assert [each.result().is_error for each in calls] == [True] * 3
        assert shop.ran["fails"] == 1
        assert (await client.call_tool("fails", {"order": "o1"})).is_error
    assert shop.ran["fails"] == 2


@pytest.mark.parametrize("by_policy", [False, True])
async def test_strictly_an_error_answer_is_unknown(
    shop: Shop, fence: EffectFence, mode: str, by_policy: bool
) -> None:
    """CASES 18."""
    shop.gate.set()
    policy = {"fails": ToolPolicy(on_error="unknown")} if by_policy else None
    fence_tools(shop.server, fence, strict=not by_policy, policy=policy)
    async with session(shop.server, mode) as client:
        await client.call_tool("fails", {"order": "o1"})
        again = await client.call_tool("fails", {"order": "o1"})
    assert marks(again, REFUSED)["code"] == "outcome_unknown"
    assert "effectfence ledger settle" in again.content[0].text  # type: ignore[union-attr]
    assert shop.ran["fails"] == 1


async def test_ignored_arguments_do_not_tell_calls_apart_and_are_not_stored(
    shop: Shop, fence: EffectFence, tmp_path: Path
) -> None:
    """CASES 2."""
    fence_tools(shop.server, fence, policy={"charge": ToolPolicy(secret=("token",))})
    async with session(shop.server) as client:
        for token in ("s3cret-1", "s3cret-2"):
            await client.call_tool("charge", {"order": "o1", "cents": 1, "token": token})
    assert shop.ran["charge o1"] == 1
    assert "s3cret" not in (tmp_path / "effects.jsonl").read_text()


async def test_principals_are_kept_apart(shop: Shop, fence: EffectFence) -> None:
    """CASES 7."""
    who = ["ada"]
    fence_tools(shop.server, fence, scope=lambda context: who[0])
    async with session(shop.server) as client:
        for name in ("ada", "bob", "ada"):
            who[0] = name
            await client.call_tool("charge", {"order": "o1", "cents": 1})
    assert shop.ran["charge o1"] == 2
    assert {record.scope async for record in fence.intents(nested=True)} == {("ada",), ("bob",)}


async def test_arguments_the_sdk_refuses_leave_nothing_fenced(
    shop: Shop, fence: EffectFence, mode: str
) -> None:
    fence_tools(shop.server, fence)
    async with session(shop.server, mode) as client:
        for _ in range(2):
            refused = await client.call_tool("charge", {"order": "o1"})
            assert refused.is_error
            assert marks(refused, REFUSED) is None
        await client.call_tool("charge", {"order": "o1", "cents": 1})
    assert [record.state async for record in fence.intents()] == ["done"]


# --- the low-level server -------------------------------------------------------------------------


def low_level(ran: list[str], error: Exception | None, *, lists: bool = True) -> Server[Any]:
    """`lists`: at the first time, too."""
    asked: list[None] = []

    async def call(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        ran.append(params.name)
        if error is not None:
            raise error
        return types.CallToolResult(content=[types.TextContent(text="ok")])

    async def tools(context: Any, params: Any) -> types.ListToolsResult:
        asked.append(None)
        if not lists and len(asked) == 1:
            raise MCPError(-32603, "not yet")
        return types.ListToolsResult(
            tools=[types.Tool(name="pay", input_schema={"type": "object"})]
        )

    return Server("low", on_call_tool=call, on_list_tools=tools)


@pytest.mark.parametrize("lists", [True, False])
async def test_a_low_level_server_is_fenced_also_while_it_cannot_say_what_it_has(
    fence: EffectFence, mode: str, lists: bool
) -> None:
    ran: list[str] = []
    server = low_level(ran, None, lists=lists)
    fence_tools(server, fence)
    async with session(server, mode) as client:
        results = [await client.call_tool("pay", {"order": "o1"}) for _ in range(2)]
    assert [each.content[0].text for each in results] == ["ok", "ok"]  # type: ignore[union-attr]
    assert ran == ["pay"]


async def test_an_exception_after_the_handler_began_is_unknown(
    fence: EffectFence, mode: str
) -> None:
    ran: list[str] = []
    server = low_level(ran, TimeoutError("no answer"))
    fence_tools(server, fence)
    async with session(server, mode) as client:
        for _ in range(2):
            said = await client.call_tool("pay", {"order": "o1"})
            assert marks(said, REFUSED)["code"] == "outcome_unknown"
            assert marks(said, REFUSED)["ran"] is None
    assert ran == ["pay"]


async def test_an_error_that_is_an_answer_is_handed_on_and_releases(
    fence: EffectFence, mode: str
) -> None:
    ran: list[str] = []
    server = low_level(ran, MCPError(-32050, "closed on Sundays", {"day": 7}))
    fence_tools(server, fence)
    async with session(server, mode) as client:
        for _ in range(2):
            with pytest.raises(MCPError, match="closed on Sundays") as caught:
                await client.call_tool("pay", {"order": "o1"})
            assert (caught.value.code, caught.value.data) == (-32050, {"day": 7})
    assert ran == ["pay", "pay"]


# --- what is no such server -----------------------------------------------------------------------


async def test_what_is_no_server_is_refused_by_name(fence: EffectFence) -> None:
    with pytest.raises(TypeError, match=r"MCPServer or Server .*, not for builtins\.dict"):
        fence_tools({}, fence)


async def test_tools_are_fenced_once(shop: Shop, fence: EffectFence) -> None:
    fence_tools(shop.server, fence)
    with pytest.raises(ValueError, match="fenced already"):
        fence_tools(shop.server, fence)


@pytest.mark.parametrize("policy", [{"charge": {"fence": True}}, "no/such/file.toml"])
async def test_a_wrong_policy_is_refused(shop: Shop, fence: EffectFence, policy: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="policy"):
        fence_tools(shop.server, fence, policy=policy)


# --- processes ------------------------------------------------------------------------------------

SERVER = """
    import asyncio, os, sys
    from effectfence import EffectFence
    from effectfence.mcp import fence_tools
    from mcp.server.mcpserver import MCPServer
    server = MCPServer("shop")
    @server.tool()
    async def charge(order: str) -> str:
        with open(sys.argv[2], "a") as log:
            log.write(f"charged {order}\\n")
        while os.path.exists(sys.argv[3]):
            await asyncio.sleep(0.01)
        return f"receipt of {os.getpid()}"
    async def main():
        async with EffectFence.open(sys.argv[1]) as fence:
            fence_tools(server, fence)
            await server.run_stdio_async()
    asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The server's command line; while the last file is there, its tool does not return."""
    code = tmp_path / "server.py"
    code.write_text(textwrap.dedent(SERVER))
    places = (tmp_path / "effects.jsonl", tmp_path / "log", tmp_path / "hold")
    return [str(code), *map(str, places)]


def stdio(program: list[str]) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable, args=program, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.rig
async def test_several_processes_on_one_ledger_run_a_call_once(program: list[str]) -> None:
    async def ask() -> str:
        async with Client(stdio(program)) as client:
            result = await client.call_tool("charge", {"order": "o1"})
            return str(result.content[0].text)  # type: ignore[union-attr]

    answers = await asyncio.gather(*(ask() for _ in range(4)))
    assert len(set(answers)) == 1
    assert Path(program[2]).read_text() == "charged o1\n"


@pytest.mark.rig
async def test_a_killed_servers_call_is_unknown_and_not_run_again(program: list[str]) -> None:
    hold, log = Path(program[3]), Path(program[2])
    hold.touch()
    async with Client(stdio(program)) as client:
        call = asyncio.ensure_future(client.call_tool("charge", {"order": "o1"}))
        await until(lambda: log.exists() and log.read_text() != "")
        found = subprocess.run(
            ["pgrep", "-f", program[0]], capture_output=True, text=True, check=True
        )
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        await asyncio.wait((call,))
        assert call.exception() is not None
    hold.unlink()
    async with Client(stdio(program)) as client:
        said = await client.call_tool("charge", {"order": "o1"})
    assert marks(said, REFUSED)["code"] == "outcome_unknown"
    assert log.read_text() == "charged o1\n"
