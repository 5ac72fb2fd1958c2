"""The server over HTTP, as real processes: who comes in, races, hang-ups, tenants, the end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from effectfence.mcp.http import Address, Keys, security
from tests.mcp.peer import until
from tests.mcp.serving import (
    LEGACY,
    META,
    MODERN,
    Place,
    Web,
    asking,
    calling,
    waits_for_a_lock,
)

TOKEN = "a-token-of-this-test"
TENANTS = "acme=token-of-acme,globex=token-of-globex"


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    yield place
    await place.close()


@pytest.fixture
async def web(place: Place) -> Web:
    return await place.http(EFFECTFENCE_HTTP_TOKEN=TOKEN)


async def prepared(web: Web, intent: str = "charge:o1", **how: Any) -> dict[str, Any]:
    said = (await web.call("fence_prepare", asking(intent), **how)).says
    assert said["status"] == "fresh"
    ticket: dict[str, Any] = said["prepared"]
    return ticket


# --- the protocol ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto", MODERN])
async def test_the_sdks_own_client_in_every_mode(web: Web, mode: str) -> None:
    async with web.client(mode) as client:
        assert len((await client.list_tools()).tools) == 6
        fresh = await client.call_tool("fence_prepare", asking(args={"n": 2**70}))
        ticket = fresh.structured_content["prepared"]
        done = await client.call_tool("fence_commit", {"prepared": ticket, "result": [2**70]})
        assert done.structured_content["cert"]["result"] == [2**70]
        refused = await client.call_tool("fence_commit", {"prepared": ticket, "result": 2})
        assert refused.is_error
        assert refused.structured_content["code"] == "commit_conflict"


@pytest.mark.parametrize("version", LEGACY)
async def test_every_older_version_is_spoken_without_a_session(web: Web, version: str) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 0,
        "method": "initialize",
        "params": {
            "protocolVersion": version,
            "capabilities": {},
            "clientInfo": {"name": "raw", "version": "1"},
        },
    }
    greeted = await web.ask(hello)
    assert greeted.json["result"]["protocolVersion"] == version
    assert "mcp-session-id" not in greeted.headers
    said = (await web.call("fence_prepare", asking(), mcp_protocol_version=version)).says
    assert said["status"] == "fresh"


async def test_the_version_without_a_handshake_is_spoken(web: Web) -> None:
    called = calling("fence_prepare", asking(args={"n": 2**64 + 1}), _meta=META)
    headers = {
        "mcp_protocol_version": MODERN,
        "mcp_method": "tools/call",
        "mcp_name": "fence_prepare",
    }
    reply = await web.ask(called, **headers)
    assert reply.says["prepared"]["request"]["args"] == {"n": 2**64 + 1}
    bad = json.dumps(calling("fence_prepare", "HERE", _meta=META)).replace('"HERE"', "[NaN]")
    reply = await web.ask(bad.encode(), **headers)
    assert reply.json["result"]["isError"] is True
    assert reply.json["result"]["resultType"] == "complete"


async def test_twelve_agents_at_once_and_one_may_run(web: Web) -> None:
    answers = await asyncio.gather(*(web.call("fence_prepare", asking()) for _ in range(12)))
    said = [answer.says for answer in answers]
    fresh = [one["prepared"] for one in said if one.get("status") == "fresh"]
    assert len(fresh) == 1
    assert [one["code"] for one in said if "code" in one] == ["intent_in_flight"] * 11
    await web.call("fence_commit", {"prepared": fresh[0], "result": "ch_1"})
    answers = await asyncio.gather(*(web.call("fence_prepare", asking()) for _ in range(12)))
    assert {answer.says["cert"]["result"] for answer in answers} == {"ch_1"}
    stats = (await web.call("fence_stats", {})).says
    assert (stats["admitted"], stats["total_attempts"]) == (1, 24)


async def test_clients_of_both_eras_race_for_one_intent(web: Web) -> None:
    async def ask(mode: str) -> Any:
        async with web.client(mode) as client:
            return (await client.call_tool("fence_prepare", asking())).structured_content

    said = await asyncio.gather(*(ask(mode) for mode in ("legacy", MODERN) * 3))
    assert sum(one.get("status") == "fresh" for one in said) == 1


# --- who comes in ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "no token": (401, {"authorization": None}),
    "another token": (401, {"authorization": "Bearer nonsense"}),
    "a token's beginning": (401, {"authorization": f"Bearer {TOKEN[:-1]}"}),
    "another scheme": (401, {"authorization": f"Basic {TOKEN}"}),
    "two tokens": (401, {"authorization": f"Bearer {TOKEN}\r\nauthorization: Bearer x"}),
    "another host": (421, {"host": "evil.example"}),
    "a host that begins alike": (421, {"host": "127.0.0.1.evil.example:80"}),
    "no host": (400, {"host": None}),
    "another origin": (403, {"origin": "http://evil.example"}),
    "an origin that begins alike": (403, {"origin": "http://localhost.evil.example"}),
    "an opaque origin": (403, {"origin": "null"}),
    "another path": (404, {"path": "/"}),
    "GET": (405, {"method": "GET"}),
    "DELETE": (405, {"method": "DELETE"}),
    "another content": (400, {"content_type": "text/plain"}),
    "no content type": (400, {"content_type": None}),
}


async def test_whoever_may_not_come_in_is_refused_and_leaves_nothing(
    place: Place, web: Web
) -> None:
    for what, (status, how) in REFUSED.items():
        reply = await web.ask(calling("fence_prepare", asking()), **how)
        assert reply.status == status, what
        assert TOKEN.encode() not in reply.body
    assert (await place.said("stats"))["intents"] == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:1234", "[::1]:99"])
async def test_its_own_names_and_origins_are_let_in(web: Web, host: str) -> None:
    reply = await web.call("fence_stats", {}, host=host, origin=f"http://{host}")
    assert reply.says["total_attempts"] == 0


async def test_a_scheme_in_any_case_is_a_scheme(web: Web) -> None:
    assert (await web.call("fence_stats", {}, authorization=f"bearer {TOKEN}")).status == 200


async def test_health_says_ok_without_a_token_and_nothing_else(web: Web) -> None:
    reply = await web.ask(path="/health", method="GET", authorization=None, host="anywhere")
    assert (reply.status, reply.body) == (200, b"ok\n")
    assert (await web.ask(path="/health", method="POST", authorization=None)).status == 405


async def test_a_token_is_made_and_told_once(place: Place) -> None:
    web = await place.http()
    assert len(web.token) >= 43
    assert web.peer.complaint().count(web.token) == 1
    assert (await web.call("fence_stats", {})).status == 200
    assert (await web.call("fence_stats", {}, authorization=None)).status == 401
    another = await place.http()
    assert another.token != web.token


async def test_another_name_can_be_allowed(place: Place) -> None:
    web = await place.http("--allow-host", "fence.example", EFFECTFENCE_HTTP_TOKEN=TOKEN)
    assert (await web.call("fence_stats", {}, host="fence.example:8443")).status == 200
    assert (await web.call("fence_stats", {}, host="other.example")).status == 421


# --- bodies ---------------------------------------------------------------------------------------


async def test_a_body_too_large_is_refused_whether_it_says_so_or_not(place: Place) -> None:
    options = ("--max-request-bytes", "1000")
    web = await place.http(*options, EFFECTFENCE_HTTP_TOKEN=TOKEN)
    body = json.dumps(calling("fence_prepare", asking(args={"s": "x" * 1000}))).encode()
    assert (await web.ask(body)).status == 413
    assert (await web.ask(b"", content_length="99999999999")).status == 413
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:600], body[600:]))
    unsaid = {"content_length": None, "transfer_encoding": "chunked"}
    assert (await web.ask(chunked + b"0\r\n\r\n", **unsaid)).status == 413
    whole = json.dumps(calling("fence_stats", {})).encode()
    reply = await web.ask(b"%x\r\n%b\r\n0\r\n\r\n" % (len(whole), whole), **unsaid)
    assert reply.says["total_attempts"] == 0


async def test_four_mebibytes_are_the_most(web: Web) -> None:
    room = (4 << 20) - len(json.dumps(calling("fence_commit", {"result": ""})))
    for more, status in ((0, 200), (1, 413)):
        reply = await web.call("fence_commit", {"result": "x" * (room + more)})
        assert reply.status == status


BODIES = {
    b"nonsense": (-32700, None),
    b"": (-32700, None),
    b"\xff": (-32700, None),
    b"[" * 10_000: (-32700, None),
    b"[]": (-32600, None),
    b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":1,"a":2}}': (-32600, 7),
    b'{"jsonrpc":"2.0","id":"7","method":"ping","params":[]}': (-32602, "7"),
}


async def test_a_body_that_is_no_message_gets_a_json_rpc_error(web: Web) -> None:
    for body, (code, id) in BODIES.items():
        reply = await web.ask(body)
        assert (reply.status, reply.json["error"]["code"], reply.json["id"]) == (400, code, id)


async def test_arguments_that_are_not_strict_json_get_a_tool_error(web: Web, place: Place) -> None:
    for args, reason in {
        "NaN": "args is not a finite number",
        '{"n":1e999}': "args.n is not a finite number",
        '{"s":"\\ud800"}': "args.s holds a lone surrogate",
        '{"n":1,"n":2}': "an object has one key twice",
        "[" * 100_000 + "]" * 100_000: "nested too deep",
    }.items():
        body = json.dumps(calling("fence_prepare", asking(args="HERE"))).replace('"HERE"', args)
        result = (await web.ask(body.encode())).json["result"]
        assert result["isError"] is True
        assert reason in result["content"][0]["text"]
        assert result["structuredContent"] == {"code": "invalid_arguments", "ran": False}
    assert (await place.said("stats"))["intents"] == 0


# --- tenants --------------------------------------------------------------------------------------


async def test_equal_intents_of_two_tenants_stay_apart(place: Place) -> None:
    web = await place.http(EFFECTFENCE_HTTP_TOKEN=TOKEN, EFFECTFENCE_HTTP_TOKENS=TENANTS)
    acme, globex = ({"authorization": f"Bearer token-of-{name}"} for name in ("acme", "globex"))
    tickets = [await prepared(web, **how) for how in (acme, globex, {})]
    for ticket, how in zip(tickets, (globex, {}, acme), strict=True):
        stolen = (await web.call("fence_commit", {"prepared": ticket, "result": 0}, **how)).says
        assert stolen["code"] in ("invalid_ticket", "lease_lost")
    for ticket, how in zip(tickets, (acme, globex, {}), strict=True):
        done = {"prepared": ticket, "result": how.get("authorization")}
        assert (await web.call("fence_commit", done, **how)).says["status"] == "committed"
    again = (await web.call("fence_prepare", asking(), **globex)).says
    assert again["cert"]["result"] == "Bearer token-of-globex"
    assert await place.state("charge:o1", scope="acme") == "done"
    assert (await place.said("stats"))["scoped_elsewhere"] == 2


async def test_tenants_may_stand_in_a_file_of_ones_own(place: Place) -> None:
    tokens = place.folder / "tokens"
    tokens.write_text("# who may\n\nacme = one-token\nacme=its-next-one\n")
    tokens.chmod(0o600)
    web = await place.http("--tokens", str(tokens), EFFECTFENCE_HTTP_TOKEN=TOKEN)
    ticket = await prepared(web, authorization="Bearer one-token")
    done = {"prepared": ticket, "result": 1}
    reply = await web.call("fence_commit", done, authorization="Bearer its-next-one")
    assert reply.says["status"] == "committed"


# --- hang-ups -------------------------------------------------------------------------------------


async def hang_up_in_the_middle(place: Place, web: Web, body: Any, **how: Any) -> None:
    """Send it, wait until it waits for the ledger, hang up, and wait until that was noticed."""
    before = web.connections()
    with place.paused():
        _, writer = await asyncio.open_connection("127.0.0.1", web.port)
        writer.write(web.request(body, **how))
        await waits_for_a_lock(web.peer.pid)
        assert web.connections() == before + 1
        writer.transport.abort()
        await until(lambda: web.connections() == before)


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
async def test_a_commit_is_recorded_though_its_client_hangs_up(
    place: Place, web: Web, version: str
) -> None:
    ticket = await prepared(web)
    meta = {"_meta": META} if version == MODERN else {}
    body = calling("fence_commit", {"prepared": ticket, "result": 7}, **meta)
    headers = {"mcp_method": "tools/call", "mcp_name": "fence_commit"} if meta else {}
    await hang_up_in_the_middle(place, web, body, mcp_protocol_version=version, **headers)
    again = (await web.call("fence_commit", {"prepared": ticket, "result": 7})).says
    assert again["status"] == "committed"
    assert (await web.call("fence_prepare", asking())).says["cert"]["result"] == 7


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
async def test_a_ticket_that_nobody_waits_for_is_released(
    place: Place, web: Web, version: str
) -> None:
    await prepared(web, "another")
    meta = {"_meta": META} if version == MODERN else {}
    headers = {"mcp_method": "tools/call", "mcp_name": "fence_prepare"} if meta else {}
    body = calling("fence_prepare", asking(), **meta)
    await hang_up_in_the_middle(place, web, body, mcp_protocol_version=version, **headers)
    web.peer.signal(signal.SIGTERM)
    assert await web.peer.ended() == 0
    assert await place.state("charge:o1") is None


# --- the end --------------------------------------------------------------------------------------


async def test_a_restart_is_invisible_to_who_holds_a_ticket(place: Place) -> None:
    web = await place.http(EFFECTFENCE_HTTP_TOKEN=TOKEN)
    ticket = await prepared(web)
    web.peer.signal(signal.SIGTERM)
    assert await web.peer.ended() == 0
    assert await place.state("charge:o1") == "unknown"
    web = await place.http(EFFECTFENCE_HTTP_TOKEN=TOKEN)
    said = (await web.call("fence_commit", {"prepared": ticket, "result": 1})).says
    assert said["status"] == "committed"


async def test_what_is_in_flight_at_the_end_is_answered_and_recorded(
    place: Place, web: Web
) -> None:
    ticket = await prepared(web)
    with place.paused():
        call = asyncio.ensure_future(web.call("fence_commit", {"prepared": ticket, "result": 7}))
        await waits_for_a_lock(web.peer.pid)
        web.peer.signal(signal.SIGTERM)
        await until(lambda: refuses_connections(web.port))
    assert (await call).says["status"] == "committed"
    assert await web.peer.ended() == 0
    assert await place.state("charge:o1") == "done"


def refuses_connections(port: int) -> bool:
    with socket.socket() as connecting:
        return connecting.connect_ex(("127.0.0.1", port)) != 0


async def test_idle_connections_do_not_hold_up_the_end(place: Place, web: Web) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(web.request(calling("fence_stats", {}), connection="keep-alive"))
    assert b"200 OK" in await reader.readline()
    _, half = await asyncio.open_connection("127.0.0.1", web.port)
    half.write(web.request(calling("fence_stats", {}))[:-5])
    web.peer.signal(signal.SIGTERM)
    assert await web.peer.ended() == 0
    for each in (writer, half):
        each.close()


# --- addresses and tokens -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("7777", "127.0.0.1", 7777, True),
        (":0", "127.0.0.1", 0, True),
        ("localhost:1", "localhost", 1, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("[::1]:65535", "::1", 65535, True),
        ("0.0.0.0:1", "0.0.0.0", 1, False),
        ("[::]:1", "::", 1, False),
        ("localhost.example:1", "localhost.example", 1, False),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "a:b", "1:65536", "::1:80", "[::1:80", "http://x:1", "a:-1", "a:\uff11"],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"wanted|brackets"):
        Address.parse(text)


def test_a_token_opens_its_own_scope_and_no_other() -> None:
    keys = Keys([(None, "x"), ("acme", "y"), ("acme", "z")])
    assert keys.scope("Bearer x") == (True, None)
    assert keys.scope("Bearer y") == keys.scope("BEARER z") == (True, "acme")
    for nothing in (None, "", "Bearer", "Bearer ", "x", "Bearer xy", "Bearer \udcff"):
        assert keys.scope(nothing) == (False, None)
    assert Keys([]).scope("Bearer ") == (False, None)


@pytest.mark.parametrize("token", ["", "a b", "é", "a\n"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Keys([("acme", token)])


def test_two_names_never_share_a_token() -> None:
    with pytest.raises(ValueError, match="two names have one token"):
        Keys([("acme", "x"), ("globex", "x")])


def test_a_server_of_all_interfaces_goes_by_the_machines_name_too() -> None:
    hosts = security(Address("0.0.0.0", 1), ["fence.example"]).allowed_hosts
    assert {"0.0.0.0:*", "localhost:*", socket.gethostname(), "fence.example"} <= set(hosts)
