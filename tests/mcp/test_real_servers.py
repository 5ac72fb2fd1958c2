"""`effectfence wrap` in front of servers that other people wrote, from npm and PyPI.

A session is the same with it and without, message by message; twelve equal writes at once are one
execution, counted where it happened; a new proxy replays; a proxy or a server that is killed during
a call leaves "unknown" behind, and no second execution.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.conftest import Odd
from tests.mcp.peer import Gone, Peer, until

pytestmark = pytest.mark.rig

TWELVE = 12


@dataclass
class Server:
    """What is known of one of them."""

    command: Callable[[Path, dict[str, Path], Path], list[str]]
    """From npm's folder, PyPI's and the place that it works on."""
    session: Callable[[str], list[tuple[str, Any]]]
    """Requests of every kind that it answers."""
    write: tuple[str, Callable[[str], Any]] | None = None
    """A tool that changes something, and its arguments."""
    executions: Callable[[Path], int] = lambda place: 0
    """How often the write was carried out, as the place itself shows."""
    varies: list[str] = field(default_factory=list)
    """What differs from one session to the next, as patterns."""
    once: bool = False
    """Whether it keeps executions apart by itself."""


def script(name: str) -> Callable[[Path, dict[str, Path], Path], list[str]]:
    def command(npm: Path, pypi: dict[str, Path], place: Path) -> list[str]:
        at = npm / "@modelcontextprotocol" / f"server-{name}" / "dist" / "index.js"
        return ["node", str(at), *([str(place)] if name == "filesystem" else [])]

    return command


def program(name: str, command_name: str, *options: str) -> Any:
    def command(npm: Path, pypi: dict[str, Path], place: Path) -> list[str]:
        return [str(pypi[name] / command_name), *(o.format(place=place) for o in options)]

    return command


def call(tool: str, **arguments: Any) -> tuple[str, Any]:
    return "tools/call", {"name": tool, "arguments": arguments}


def observations(place: Path) -> int:
    """The server drops an observation that it has, unless two calls overlap."""
    lines = [json.loads(line) for line in (place / "memory.json").read_text().splitlines()]
    (ada,) = [each for each in lines if each.get("name") == "ada"]
    return int(ada["observations"].count("writes tests"))


def commits(place: Path) -> int:
    count = subprocess.run(
        ["git", "-C", place, "rev-list", "--count", "HEAD"], capture_output=True, check=True
    )
    return int(count.stdout) - 1


SERVERS = {
    "memory": Server(
        script("memory"),
        lambda place: [
            call("create_entities", entities=[entity("ada", "likes tea"), entity("bob")]),
            call("create_relations", relations=[{"from": "ada", "to": "bob", "relationType": "x"}]),
            call("read_graph"),
            call("search_nodes", query="tea"),
            call("open_nodes", names=["ada", "é"]),
            call("delete_entities", entityNames=["bob"]),
            call("read_graph"),
            call("add_observations", observations=[{"entityName": "nobody", "contents": ["x"]}]),
            call("create_entities", entities="not a list"),
            call("no_such_tool"),
            ("resources/list", {}),
            ("no/such/method", {}),
        ],
        write=("add_observations", lambda place: {
            "observations": [{"entityName": "ada", "contents": ["writes tests"]}]
        }),
        executions=observations,
    ),
    "filesystem": Server(
        script("filesystem"),
        lambda place: [
            call("write_file", path=f"{place}/new", content="é\n"),
            call("read_text_file", path=f"{place}/new"),
            call("list_directory", path=place),
            call("create_directory", path=f"{place}/folder"),
            call("move_file", source=f"{place}/new", destination=f"{place}/folder/new"),
            call("directory_tree", path=place),
            call("read_text_file", path=f"{place}/none"),
            call("read_text_file", path="/etc/passwd"),
            call("list_allowed_directories"),
        ],
        write=("edit_file", lambda place: {
            "path": f"{place}/text", "edits": [{"oldText": "a", "newText": "aa"}]
        }),
        executions=lambda place: (place / "text").read_text().count("a") - 1,
    ),
    "everything": Server(
        script("everything"),
        lambda place: [
            call("echo", message="é 😀"),
            call("get-sum", a=0.1, b=1e2),
            call("get-env"),
            call("get-annotated-message", messageType="error", includeImage=True),
            call("get-structured-content", location="Chicago"),
            call("get-resource-links", count=2),
            call("get-resource-reference", resourceType="Text", resourceId=1),
            call("get-tiny-image"),
            call("trigger-sampling-request", prompt="hello", maxTokens=5),
            call("trigger-elicitation-request"),
            call("get-roots-list"),
            ("tools/call", {
                "name": "trigger-long-running-operation",
                "arguments": {"duration": 0.1, "steps": 2},
                "_meta": {"progressToken": "p"},
            }),
            call("gzip-file-as-resource", name="x.gz", data="data:text/plain,hello"),
            ("resources/list", {}),
            ("resources/templates/list", {}),
            ("resources/read", {"uri": "demo://resource/dynamic/text/1"}),
            ("resources/subscribe", {"uri": "demo://resource/dynamic/text/1"}),
            ("resources/unsubscribe", {"uri": "demo://resource/dynamic/text/1"}),
            ("prompts/list", {}),
            ("prompts/get", {"name": "args-prompt", "arguments": {"city": "Paris"}}),
            ("completion/complete", {
                "ref": {"type": "ref/prompt", "name": "completable-prompt"},
                "argument": {"name": "department", "value": "E"},
            }),
            ("logging/setLevel", {"level": "debug"}),
            ("tasks/list", {}),
            ("ping", None),
        ],
        write=("toggle-simulated-logging", lambda place: {}),
        varies=[r"\d{1,2}:\d\d:\d\d( [AP]M)?"],
    ),
    "git": Server(
        program("git", "mcp-server-git", "--repository", "{place}"),
        lambda place: [
            call("git_status", repo_path=place),
            call("git_diff_unstaged", repo_path=place),
            call("git_add", repo_path=place, files=["text"]),
            call("git_diff_staged", repo_path=place),
            call("git_commit", repo_path=place, message="a message"),
            call("git_log", repo_path=place, max_count=5),
            call("git_create_branch", repo_path=place, branch_name="b"),
            call("git_branch", repo_path=place, branch_type="local"),
            call("git_show", repo_path=place, revision="HEAD~9"),
            call("git_show", repo_path=place),
            call("no_such_tool"),
            ("resources/list", {}),
        ],
        write=("git_commit", lambda place: {"repo_path": place, "message": "one change"}),
        executions=commits,
    ),
    "time": Server(
        program("time", "mcp-server-time", "--local-timezone", "UTC"),
        lambda place: [
            call(
                "convert_time",
                source_timezone="Europe/Paris", time="12:30", target_timezone="Asia/Tokyo",
            ),
            call("get_current_time", timezone="Nowhere/Land"),
            call("get_current_time", timezone="Asia/Tokyo"),
            call("convert_time", time="25:99"),
        ],
        varies=[r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", r"Nowhere"],
    ),
    "once": Server(
        program("once", "once-mcp"),
        lambda place: [
            call("once_begin", key="k", payload={"n": 1.0}, wait=False),
            call("once_begin", key="k", payload={"n": 2}, wait=False),
            call("once_complete", key="k", fence_token="forged", result={}),
            call("once_begin", payload={}),
        ],
        write=("once_begin", lambda place: {
            "key": "pay:o1", "payload": {"cents": 10}, "wait": False
        }),
        varies=[r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32,64}", r"\d{10}\.\d+"],
        once=True,
    ),
}  # fmt: skip
WRITING = [name for name, server in SERVERS.items() if server.write]


def entity(name: str, *words: str) -> dict[str, Any]:
    return {"name": name, "entityType": "person", "observations": list(words)}


class Real:
    """One of the servers, at a place of its own that can be made as new."""

    def __init__(self, server: Server, odd: Odd, npm: Path, pypi: dict[str, Path]) -> None:
        self.server = server
        self.odd = odd
        self.place = odd.folder / "place"
        self.notes = odd.folder / "notes"
        self.notes.mkdir()
        odd.env |= {
            "MEMORY_FILE_PATH": str(self.place / "memory.json"),
            "HOME": str(odd.folder),
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
               (("NAME", "ada"), ("EMAIL", "ada@example.org"), ("DATE", "1767225600 +0000"))},
        }  # fmt: skip
        self.command = server.command(npm, pypi, self.place)
        self.as_new()

    def as_new(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        (self.place / "text").write_text("a\n")
        for each in (["init", "-q", "-b", "main"], ["add", "text"], ["commit", "-qm", "first"]):
            subprocess.run(["git", *each], cwd=self.place, env=self.odd.env, check=True)
        with (self.place / "text").open("a") as file:
            file.write("b\n")
        (self.place / "memory.json").write_text(
            json.dumps({"type": "entity", **entity("ada", "likes tea")})
        )

    @property
    def held(self) -> list[str]:
        shim = [sys.executable, "-I", "-S", str(Path(__file__).with_name("held.py"))]
        return [*shim, str(self.notes), *self.command]

    async def raw(self) -> Peer:
        return await self._greeted(await self.odd.start(self.command, greet=False))

    async def wrapped(self, command: list[str] | None = None) -> Peer:
        peer = await self.odd.wrapped(command=command or self.held, greet=False)
        return await self._greeted(peer)

    async def _greeted(self, peer: Peer) -> Peer:
        for method, body in RESPONDERS.items():
            peer.responders[method] = lambda request, body=body: json.dumps(  # type: ignore[misc]
                {"jsonrpc": "2.0", "id": request["id"], "result": body}
            ).encode()
        await peer.hello()
        return peer

    def noted(self, name: str) -> int:
        path = self.notes / name
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def write(self) -> tuple[str, Any]:
        assert self.server.write is not None
        subprocess.run(["git", "add", "text"], cwd=self.place, env=self.odd.env, check=True)
        tool, arguments = self.server.write
        return tool, arguments(str(self.place))


RESPONDERS: dict[str, Any] = {
    "sampling/createMessage": {
        "role": "assistant", "content": {"type": "text", "text": "hi"}, "model": "m",
    },
    "elicitation/create": {"action": "decline"},
    "roots/list": {"roots": []},
}  # fmt: skip


@pytest.fixture
def real(request: pytest.FixtureRequest, odd: Odd) -> Real:
    name = request.param
    npm, pypi = Path(), {}
    if name in ("memory", "filesystem", "everything"):
        npm = request.getfixturevalue("npm")
    else:
        pypi = request.getfixturevalue("environments")
    return Real(SERVERS[name], odd, npm, pypi)


async def spoken(real: Real, peer: Peer) -> tuple[list[str], list[str]]:
    """What came in such a session: answers and requests in their order, notifications sorted."""
    for method, params in real.server.session(str(real.place)):
        await peer.ask(method, params)
    await peer.close()
    lines = []
    for line in peer.received:
        text = line.decode()
        for pattern in real.server.varies:
            text = re.sub(pattern, "…", text)
        lines.append(text)
    notices = [text for text in lines if "method" in (m := json.loads(text)) and "id" not in m]
    return [text for text in lines if text not in notices], sorted(notices)


@pytest.mark.parametrize("real", SERVERS, indirect=True)
async def test_a_session_is_the_same_with_the_fence_and_without(real: Real) -> None:
    raw = await spoken(real, await real.raw())
    real.as_new()
    wrapped = await spoken(real, await real.wrapped(real.command))
    assert raw == wrapped
    assert len(raw[0]) >= 4


@pytest.mark.parametrize("real", WRITING, indirect=True)
async def test_twelve_equal_writes_at_once_are_one_execution(real: Real) -> None:
    """Counted at what was written; twelve equal answers; and a new proxy, with a new server,
    replays without asking it."""
    tool, arguments = real.write()
    peer = await real.wrapped()
    answers = await asyncio.gather(*(peer.call(tool, arguments) for _ in range(TWELVE)))
    assert not any(answer.is_error for answer in answers), answers[0].line
    assert len([answer for answer in answers if answer.replay is None]) == 1
    assert len({json.dumps(answer.result["content"]) for answer in answers}) == 1
    assert real.noted("calls") == 1
    if tool != "toggle-simulated-logging" and not real.server.once:
        assert real.server.executions(real.place) == 1
    await peer.close()
    again = await real.wrapped()
    replay = await again.call(tool, arguments)
    assert replay.replay
    assert replay.result["content"] == answers[0].result["content"]
    assert real.noted("calls") == 1
    await again.close()


@pytest.mark.parametrize("real", ["filesystem"], indirect=True)
async def test_without_the_fence_they_are_twelve(real: Real) -> None:
    """What is counted above can be seen to be more than one."""
    tool, arguments = real.write()
    peer = await real.raw()
    for _ in range(TWELVE):
        await peer.call(tool, arguments)
    await peer.close()
    assert real.server.executions(real.place) == TWELVE


@pytest.mark.parametrize("victim", ["the proxy", "the server"])
@pytest.mark.parametrize("real", WRITING, indirect=True)
async def test_a_kill_during_a_write_leaves_it_unknown_and_done_once(
    real: Real, victim: str
) -> None:
    """It was carried out, and nobody was told so."""
    tool, arguments = real.write()
    (real.notes / "hold").touch()
    peer = await real.wrapped()
    first = peer.call(tool, arguments)
    await until(lambda: real.noted("answers"))
    if victim == "the proxy":
        await peer.kill()
        with pytest.raises(Gone):
            await first
    else:
        others = [pid for pid in real.odd.alive() if pid != peer.pid]
        for pid in others:  # the older one hands the answer on
            os.kill(pid, signal.SIGKILL)
        told = await first
        assert told.code == "outcome_unknown"
        assert told.refused["ran"] is None
        assert await peer.ended() == 128 + signal.SIGKILL
    (real.notes / "hold").unlink()
    again = await real.wrapped()
    for _ in range(3):
        told = await again.call(tool, arguments)
        assert told.code == "outcome_unknown"
    assert real.noted("calls") == 1
    if tool != "toggle-simulated-logging" and not real.server.once:
        assert real.server.executions(real.place) == 1
    await again.close()


@pytest.mark.parametrize("real", ["time"], indirect=True)
async def test_the_time_is_never_a_replay(real: Real) -> None:
    """All of this server's tools only read."""
    peer = await real.wrapped()
    for _ in range(3):
        answer = await peer.call("get_current_time", {"timezone": "UTC"})
        assert answer.replay is None
    assert real.noted("calls") == 3
    await peer.close()
