"""`effectfence demo` and its server: real processes, numbers from the books, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from effectfence.mcp.demo import CALLS, ORDER, Act, Played
from tests.mcp.peer import Peer, alive, end_all

REPOSITORY = Path(__file__).parents[2]
CORES = ["python", *(["c"] if find_spec("effectfence._core") else [])]


class Stage:
    """A folder for temporary files, and a user's home with settings that must not matter."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.home = folder / "home"
        self.temporary.mkdir()
        self.home.mkdir()
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("EFFECTFENCE_", "XDG_"))},
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.temporary),
            "HOME": str(self.home),
            "STAGE_MARK": self.mark,
            "EFFECTFENCE_LEDGER": str(self.home / "mine.jsonl"),
            "EFFECTFENCE_POLICY": str(self.home / "no such policy.toml"),
        }

    def start(self, *options: str, python: tuple[str, ...] = (), **env: str):
        return subprocess.Popen(
            [sys.executable, *python, "-m", "effectfence", "demo", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.env, **env},
            cwd=self.home,
        )

    def play(self, *options: str, **how):
        with self.start(*options, **how) as demo:
            out, err = demo.communicate(timeout=60)
        return demo.returncode, out, err

    def is_empty(self) -> bool:
        return not [*self.temporary.iterdir(), *self.home.iterdir(), *alive(self.mark)]


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    end_all(alive(stage.mark))


@pytest.mark.parametrize("core", CORES)
def test_twelve_charges_then_one_and_nothing_is_left(stage, core):
    code, out, err = stage.play("--json", EFFECTFENCE_CORE=core)
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said.pop("seconds") < 10
    assert said == {
        "calls": 12,
        "raw": {"answered": 12, "replayed": 0, "charges": 12, "charged_cents": 12 * 4200},
        "wrapped": {"answered": 12, "replayed": 11, "charges": 1, "charged_cents": 4200},
        "as_promised": True,
    }
    assert stage.is_empty()


def test_people_see_both_acts_and_no_colour_outside_of_a_terminal(stage):
    code, out, err = stage.play()
    assert (code, err) == (0, "")
    raw, wrapped = out.split("ACT 2")
    assert "12 charges, $504.00" in raw
    assert "1 charge, $42.00" in wrapped
    assert "12 calls answered, 11 of them from the ledger" in wrapped
    assert "admitted=1 replayed=11" in wrapped
    ids = re.findall(r"\bch_[0-9a-f]{16}\b", raw)
    assert len(set(ids)) == len(ids) == 12
    assert len(re.findall(r"\bch_[0-9a-f]{16}\b", wrapped)) == 1
    assert "\x1b" not in out


@pytest.mark.parametrize(("asked", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_colour_unless_it_asked_for_none(stage, asked, coloured):
    pty = pytest.importorskip("pty")
    person, terminal = pty.openpty()
    env = {k: v for k, v in stage.env.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | asked
    command = [sys.executable, "-m", "effectfence", "demo"]
    with subprocess.Popen(command, stdout=terminal, env=env, cwd=stage.home) as demo:
        os.close(terminal)
        shown = b""
        try:
            while data := os.read(person, 1 << 16):
                shown += data
        except OSError:
            pass  # so ends a terminal whose other side is closed
    os.close(person)
    assert demo.returncode == 0
    assert (b"\x1b[" in shown) is coloured


def test_it_works_without_what_the_extras_install(stage):
    """`mcp` and the extension can't be imported in any of its processes."""
    blocked = stage.home.parent / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import sys\nsys.modules['mcp'] = sys.modules['effectfence._core'] = None\n"
    )
    path = os.pathsep.join([str(blocked), str(REPOSITORY)])
    code, out, err = stage.play("--json", PYTHONPATH=path)
    assert (code, err) == (0, "")
    assert json.loads(out)["as_promised"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_interrupted_it_leaves_nothing_behind_either(stage, number):
    with stage.start() as demo:
        while not list(stage.temporary.glob("*/*/charges.jsonl")):
            assert demo.poll() is None
            time.sleep(0.005)
        demo.send_signal(number)
        out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out, err) == (128 + number, "", "")
    assert stage.is_empty()


def test_a_server_that_can_not_start_is_told_in_a_sentence_with_its_own_words(stage):
    broken = stage.home.parent / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif 'charge_server' in str(sys.orig_argv): raise SystemExit('out of order')\n"
    )
    path = os.pathsep.join([str(broken), str(REPOSITORY)])
    code, out, err = stage.play(PYTHONPATH=path)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("effectfence: ")
    assert stage.is_empty()


@pytest.mark.parametrize(
    ("raw", "wrapped"),
    [
        (12, 2),
        (11, 1),
        (12, 0),
        (1, 1),
    ],
)
def test_other_books_are_not_what_was_promised(raw, wrapped):
    def act(count: int, replayed: int) -> Act:
        books = [{"charge_id": f"ch_{n}", **ORDER} for n in range(count)]
        return Act(CALLS, replayed, books, "")

    assert Played(act(12, 0), act(1, 11), 1.0).as_promised
    assert not Played(act(raw, 0), act(wrapped, 11), 1.0).as_promised
    assert not Played(act(12, 0), act(1, 10), 1.0).as_promised


# --- the server it plays with ---------------------------------------------------------------------


@pytest.fixture
async def server(tmp_path):
    command = [sys.executable, "-m", "effectfence.mcp.charge_server", str(tmp_path / "books")]
    peer = await Peer.start(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    peer.books = tmp_path / "books"
    yield peer
    assert await peer.close() == 0
    assert peer.complaint() == ""


async def test_a_charge_is_one_line_and_an_id_that_no_other_has(server):
    await server.hello()
    answers = [await server.call("charge_card", ORDER) for _ in range(3)]
    books = [json.loads(line) for line in server.books.read_text().splitlines()]
    assert [answer.result["structuredContent"] for answer in answers] == books
    assert len({charge["charge_id"] for charge in books}) == 3
    listed = await server.call("list_charges")
    assert listed.result["structuredContent"] == {"charges": books}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        [],
        {"order_id": "", "amount_cents": 1},
        {"order_id": 7, "amount_cents": 1},
        {"order_id": "o", "amount_cents": 0},
        {"order_id": "o", "amount_cents": True},
        {"order_id": "o", "amount_cents": 1.5},
        {"order_id": "o", "amount_cents": 1, "memo": 7},
        {"order_id": "o", "amount_cents": 1, "mmo": "x"},
    ],
    ids=str,
)
async def test_arguments_that_are_wrong_charge_nothing(server, arguments):
    params = {"name": "charge_card", "arguments": arguments}
    answer = await server.ask("tools/call", params)
    assert answer.is_error
    assert answer.text.startswith("nothing was charged: ")
    assert not server.books.exists()


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_each_version_with_a_handshake_is_spoken(server, version):
    assert (await server.hello(version)).result["protocolVersion"] == version


async def test_odd_messages_get_the_protocols_errors(server):
    assert (await server.hello("1999-01-01")).result["protocolVersion"] == "2025-11-25"
    assert (await server.ask("no/such", {})).error["code"] == -32601
    assert (await server.call("charge_cart")).error["code"] == -32602
    assert (await server.ask("ping", {}, id="0")).result == {}
    modern = {"_meta": {"io.modelcontextprotocol/protocolVersion": "2027-01-01"}}
    refused = await server.ask("server/discover", modern)
    assert refused.error["code"] == -32022
    assert refused.error["data"] == {"supported": ["2026-07-28"], "requested": "2027-01-01"}
    for line in (b"{", b"7", b'{"id":5}', b'[{"jsonrpc":"2.0","method":"ping","id":6}]'):
        server.line(line)
    await server.until(lambda: b'[{"jsonrpc": "2.0", "id": 6, "result": {}}]' in server.received)
    await server.until(lambda: sum(b'"id": null' in line for line in server.received) == 3)


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_the_official_client_speaks_with_it_in_each_era(tmp_path, mode):
    pytest.importorskip("mcp")
    from mcp import StdioServerParameters, stdio_client
    from mcp.client import Client

    books = tmp_path / "books"
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "effectfence.mcp.charge_server", str(books)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    async with Client(stdio_client(parameters), mode=mode) as client:
        assert client.protocol_version == ("2025-11-25" if mode == "legacy" else "2026-07-28")
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["charge_card"].annotations.read_only_hint is False
        assert tools["list_charges"].annotations.read_only_hint is True
        charged = await client.call_tool("charge_card", ORDER)
    assert [charged.structured_content] == [json.loads(books.read_text())]
