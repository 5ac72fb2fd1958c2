"""The server on stdio, as real processes: every protocol version, bad lines, restarts, the end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from effectfence import EffectCert
from tests.mcp.peer import Gone, Peer
from tests.mcp.serving import (
    EFFECTFENCE,
    LEGACY,
    META,
    MODERN,
    Place,
    asking,
    calling,
    says,
    waits_for_a_lock,
)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    yield place
    await place.close()


async def prepared(peer: Peer, intent: str = "charge:o1", **fields: Any) -> dict[str, Any]:
    """A ticket, as an agent has it: JSON."""
    said = says(await peer.call("fence_prepare", asking(intent, **fields)))
    assert said["status"] == "fresh"
    ticket: dict[str, Any] = json.loads(json.dumps(said["prepared"]))
    return ticket


async def committed(peer: Peer, ticket: dict[str, Any], result: Any = 1) -> EffectCert:
    said = says(await peer.call("fence_commit", {"prepared": ticket, "result": result}))
    assert said["status"] == "committed"
    return EffectCert.model_validate(said["cert"])


# --- every protocol version -----------------------------------------------------------------------


@pytest.mark.parametrize("version", LEGACY)
async def test_every_older_version_prepares_commits_and_replays(place: Place, version: str) -> None:
    peer = await place.start()
    greeting = (await peer.hello(version, listing=False)).result
    assert greeting["protocolVersion"] == version
    assert len(greeting["instructions"].splitlines()) == 5
    assert greeting["serverInfo"]["name"] == "effectfence"
    listed = (await peer.ask("tools/list", {})).result["tools"]
    assert len(listed) == 6
    assert all(tool["inputSchema"]["type"] == "object" for tool in listed)
    cert = await committed(peer, await prepared(peer), {"id": "ch_1"})
    again = await peer.call("fence_prepare", asking())
    assert json.loads(again.text) == says(again)  # who knows no structured content reads the text
    assert says(again)["cert"]["hash"] == cert.hash
    assert await peer.close() == 0
    assert peer.complaint() == ""


async def test_the_version_without_a_handshake_is_discovered_and_served(place: Place) -> None:
    peer = await place.start()
    found = (await peer.ask("server/discover", {"_meta": META})).result
    assert MODERN in found["supportedVersions"]
    assert len(found["instructions"].splitlines()) == 5
    listed = (await peer.ask("tools/list", {"_meta": META})).result["tools"]
    assert len(listed) == 6
    answer = await peer.call("fence_prepare", asking(), _meta=META)
    assert answer.result["resultType"] == "complete"
    done = {"prepared": says(answer)["prepared"], "result": 1}
    assert says(await peer.call("fence_commit", done, _meta=META))["status"] == "committed"
    bad = await peer.call("fence_commit", [1], _meta=META)
    assert bad.is_error
    assert bad.result["resultType"] == "complete"
    assert await peer.close() == 0


@pytest.mark.parametrize("mode", ["legacy", "auto", MODERN])
async def test_the_sdks_own_client_in_every_mode(place: Place, mode: str) -> None:
    command, *arguments = EFFECTFENCE
    server = StdioServerParameters(command=command, args=arguments, env=place.env)
    async with Client(server, mode=mode) as client:
        assert len((await client.list_tools()).tools) == 6
        fresh = await client.call_tool("fence_prepare", asking(args={"n": 2**70}))
        ticket = fresh.structured_content["prepared"]
        done = await client.call_tool("fence_commit", {"prepared": ticket, "result": [2**70]})
        assert done.structured_content["cert"]["result"] == [2**70]
        refused = await client.call_tool("fence_commit", {"prepared": ticket, "result": 2})
        assert refused.is_error
        assert refused.structured_content["code"] == "commit_conflict"


async def test_an_unknown_tool_is_a_protocol_error(place: Place) -> None:
    peer = await place.stdio()
    error = (await peer.call("fence_settle", {})).error
    assert error == {"code": -32602, "message": "there is no tool 'fence_settle'"}


# --- what is no message, and arguments that are no arguments --------------------------------------

LINES = {
    b"nonsense": (None, -32700),
    b"{": (None, -32700),
    b"\xff\xfe": (None, -32700),
    b"[" * 100_000: (None, -32700),
    b'"just text"': (None, -32600),
    b"[]": (None, -32600),
    b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]': (None, -32600),
    b'{"jsonrpc":"2.0"}': (None, -32600),
    b'{"jsonrpc":"1.0","id":91,"method":"ping"}': (91, -32600),
    b'{"jsonrpc":"2.0","id":92,"method":"ping","params":[]}': (92, -32602),
    b'{"jsonrpc":"2.0","id":93,"method":"ping","params":{"a":1,"a":2}}': (93, -32600),
    b'{"jsonrpc":"2.0","id":true,"method":"ping"}': (None, -32600),
    b'{"jsonrpc":"2.0","id":null,"method":"ping"}': (None, -32600),
    b'{"jsonrpc":"2.0","id":94,"method":5}': (94, -32600),
}


async def test_what_is_no_message_gets_an_error_and_the_session_goes_on(place: Place) -> None:
    peer = await place.stdio()
    for line, (id, code) in LINES.items():
        answer = peer.expect(id)
        peer.line(line)
        assert (await answer).error["code"] == code, line
        assert (await peer.ask("ping")).result == {}
    peer.line(b"")
    peer.line(b"  \r")
    assert (await peer.ask("ping")).result == {}
    assert await peer.close() == 0
    assert peer.complaint() == ""


def raw(arguments: str, id: int) -> bytes:
    """A call of fence_prepare with these very arguments."""
    return (
        f'{{"jsonrpc":"2.0","id":{id},"method":"tools/call",'
        f'"params":{{"name":"fence_prepare","arguments":{arguments}}}}}'
    ).encode()


def with_args(args: str) -> str:
    return json.dumps(asking(args="HERE")).replace('"HERE"', args)


ARGUMENTS = {
    "[1]": "arguments must be an object, not an array",
    '"{}"': "arguments must be an object, not a string",
    "7": "arguments must be an object, not a number",
    "null": "`intent` is missing",
    "{}": "`intent` is missing",
    with_args("NaN"): "args is not a finite number",
    with_args('{"n":NaN}'): "args.n is not a finite number",
    with_args('{"n":[-Infinity]}'): "args.n[0] is not a finite number",
    with_args('{"n":1e400}'): "args.n is not a finite number",
    with_args('{"s":"\\ud800"}'): "args.s holds a lone surrogate",
    with_args('{"\\udfff":1}'): "a key with a lone surrogate",
    with_args('{"n":1,"n":2}'): "an object has one key twice",
    with_args('{"n":' + "1" * 4301 + "}"): "more than 4300 digits",
    with_args('{"n":' + "[" * 64 + "]" * 64 + "}"): "nested deeper than 64 levels",
    with_args('{"n":' + "[" * 500 + "]" * 500 + "}"): "nested too deep",
    with_args('{"n":' + "[" * 200_000 + "]" * 200_000 + "}"): "nested too deep",
    with_args('{"n":' * 200_000 + "1" + "}" * 200_000): "nested too deep",
}


async def test_arguments_that_are_not_strict_json_get_a_tool_error_and_leave_nothing(
    place: Place,
) -> None:
    peer = await place.stdio()
    for id, (arguments, reason) in enumerate(ARGUMENTS.items()):
        answering = peer.expect(id)
        peer.line(raw(arguments, id))
        answer = await answering
        assert answer.is_error, arguments[:80]
        assert reason in answer.text
        assert answer.text.endswith("Nothing was recorded: mend it and call again.")
        assert says(answer) == {"code": "invalid_arguments", "ran": False}
        assert "Traceback" not in answer.text
        assert "://" not in answer.text
    assert says(await peer.call("fence_stats"))["total_attempts"] == 0
    assert await peer.close() == 0
    assert peer.complaint() == ""
    assert (await place.said("stats"))["intents"] == 0


async def test_a_result_that_is_not_strict_json_is_told_and_the_ticket_stays_good(
    place: Place,
) -> None:
    peer = await place.stdio()
    ticket = await prepared(peer)
    line = json.dumps(calling("fence_commit", {"prepared": ticket, "result": "HERE"}, 5))
    answer = await peer.ask_line(line.replace('"HERE"', "NaN").encode())
    assert answer.is_error
    assert "arguments.result is not a finite number" in answer.text
    assert says(answer)["ran"] is True
    assert (await committed(peer, ticket)).result == 1


# --- numbers --------------------------------------------------------------------------------------

INTEGERS = [2**53 + 1, 2**53 + 2, -(2**63) - 1, 2**64 + 1, 10**4299 + 7]


@pytest.mark.parametrize("version", ["2024-11-05", MODERN])
async def test_integers_of_any_size_survive_in_arguments_and_results(
    place: Place, version: str
) -> None:
    peer = await place.start()
    meta = {"_meta": META} if version == MODERN else {}
    if version != MODERN:
        await peer.hello(version, listing=False)
    asked = asking(args={"n": INTEGERS})
    fresh = await peer.call("fence_prepare", asked, **meta)
    assert says(fresh)["prepared"]["request"]["args"] == {"n": INTEGERS}
    done = {"prepared": says(fresh)["prepared"], "result": INTEGERS}
    cert = says(await peer.call("fence_commit", done, **meta))["cert"]
    assert (cert["args"], cert["result"]) == ({"n": INTEGERS}, INTEGERS)
    assert EffectCert.model_validate(cert).verify()
    assert await peer.close() == 0
    shown = await place.said("show", "charge:o1")
    assert (shown["args"], shown["cert"]["result"]) == ({"n": INTEGERS}, INTEGERS)


async def test_neighbours_beyond_a_doubles_reach_are_two_actions(place: Place) -> None:
    peer = await place.stdio()
    await prepared(peer, args={"n": 2**53 + 1})
    refused = await peer.call("fence_prepare", asking(args={"n": 2**53}))
    assert says(refused)["code"] == "intent_conflict"


# --- restarts -------------------------------------------------------------------------------------


async def test_the_holders_word_is_taken_after_its_server_was_killed(place: Place) -> None:
    peer = await place.stdio()
    ticket = await prepared(peer)
    await peer.kill()
    peer = await place.stdio()
    refused = await peer.call("fence_prepare", asking())
    assert (says(refused)["code"], says(refused)["ran"]) == ("outcome_unknown", None)
    for tool, more in (("fence_heartbeat", {}), ("fence_abort", {"reason": "unsure"})):
        assert says(await peer.call(tool, {"prepared": ticket, **more}))["code"] == (
            "outcome_unknown"
        )
    cert = await committed(peer, ticket, {"id": "ch_1"})
    assert cert.verify()
    assert says(await peer.call("fence_prepare", asking()))["cert"]["hash"] == cert.hash


async def test_a_held_ticket_never_holds_up_the_end_and_its_holder_may_come_back(
    place: Place,
) -> None:
    peer = await place.stdio()
    ran, did_not_run = await prepared(peer), await prepared(peer, "mail:o1")
    assert await peer.close() == 0
    assert [await place.state(intent) for intent in ("charge:o1", "mail:o1")] == ["unknown"] * 2
    peer = await place.stdio()
    await committed(peer, ran)
    said = {"prepared": did_not_run, "reason": "connection refused"}
    assert says(await peer.call("fence_release", said))["status"] == "released"
    await prepared(peer, "mail:o1")


async def test_two_servers_on_one_ledger_admit_one(place: Place) -> None:
    peers = [await place.stdio() for _ in range(2)]
    answers = [await peer.call("fence_prepare", asking()) for peer in peers]
    assert [says(answer).get("status", says(answer).get("code")) for answer in answers] == [
        "fresh",
        "intent_in_flight",
    ]
    await committed(peers[1], says(answers[0])["prepared"])  # a ticket belongs to no process
    assert says(await peers[0].call("fence_prepare", asking()))["status"] == "already_done"


# --- cancellation and the end ---------------------------------------------------------------------


async def test_what_came_before_the_end_of_the_input_is_answered(place: Place) -> None:
    peer = await place.stdio()
    answers = [peer.call("fence_prepare", asking(f"charge:{n}")) for n in range(50)]
    peer.end_input()
    assert {says(await answer)["status"] for answer in answers} == {"fresh"}
    assert await peer.ended() == 0


async def test_a_cancelled_commit_is_recorded_and_not_answered(place: Place) -> None:
    peer = await place.stdio()
    ticket = await prepared(peer)
    with place.paused():
        answer = peer.call("fence_commit", {"prepared": ticket, "result": 7}, id=77)
        await waits_for_a_lock(peer.pid)
        peer.notify("notifications/cancelled", {"requestId": 77})
        await peer.ask("ping")
    assert (await committed(peer, ticket, 7)).result == 7
    assert says(await peer.call("fence_prepare", asking()))["cert"]["result"] == 7
    assert not answer.done()
    assert await peer.close() == 0


async def test_a_cancelled_prepare_leaves_its_intent_free(place: Place) -> None:
    peer = await place.stdio()
    await prepared(peer, "another")
    with place.paused():
        answer = peer.call("fence_prepare", asking(), id=77)
        await waits_for_a_lock(peer.pid)
        peer.notify("notifications/cancelled", {"requestId": 77})
        await peer.ask("ping")
    assert await peer.close() == 0
    assert not answer.done() or isinstance(answer.exception(), Gone)
    assert await place.state("charge:o1") is None


async def test_a_commit_is_recorded_though_the_input_ended_under_it(place: Place) -> None:
    peer = await place.stdio()
    ticket = await prepared(peer)
    with place.paused():
        answer = peer.call("fence_commit", {"prepared": ticket, "result": 7})
        await waits_for_a_lock(peer.pid)
        peer.end_input()
    assert says(await answer)["status"] == "committed"
    assert await peer.ended() == 0
    assert await place.state("charge:o1") == "done"


async def test_a_commit_is_recorded_though_a_signal_ends_the_server_under_it(place: Place) -> None:
    peer = await place.stdio()
    ticket = await prepared(peer)
    with place.paused():
        answer = peer.call("fence_commit", {"prepared": ticket, "result": 7})
        await waits_for_a_lock(peer.pid)
        peer.signal(signal.SIGTERM)
    assert says(await answer)["status"] == "committed"
    assert await peer.ended() == 0
    assert await place.state("charge:o1") == "done"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it_in_order(place: Place, number: int) -> None:
    peer = await place.stdio()
    await prepared(peer)
    peer.signal(number)
    assert await peer.ended() == 0
    assert peer.complaint() == ""
    assert await place.state("charge:o1") == "unknown"


def test_a_client_that_does_not_read_never_holds_up_the_end(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    server = [*EFFECTFENCE, "serve", "--ledger", "memory:"]
    with subprocess.Popen(
        server, stdin=pipe, stdout=pipe, stderr=pipe, env=Place(tmp_path).env, text=True
    ) as process:
        assert process.stdin
        assert process.stderr
        lines = [{"jsonrpc": "2.0", "id": n, "method": "server/discover"} for n in range(1000)]
        for line in lines:  # the answers to all of them fill the pipe several times over
            line["params"] = {"_meta": META}
            process.stdin.write(json.dumps(line) + "\n")
        process.stdin.write("nonsense\n")
        process.stdin.close()
        assert process.wait() == 1
        assert "not everything ended in time" in process.stderr.read()


async def test_a_client_that_reads_no_more_is_no_crash(place: Place) -> None:
    peer = await place.stdio()
    ticket = await prepared(peer)
    reading = peer.process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
    reading.close()
    peer.call("fence_commit", {"prepared": ticket, "result": 7})
    peer.call("fence_stats")
    assert await peer.process.wait() == 0
    assert "Traceback" not in peer.complaint()
    assert await place.state("charge:o1") == "done"
