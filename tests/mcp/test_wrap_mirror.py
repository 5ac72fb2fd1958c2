"""`effectfence wrap` is a mirror: what the server and the client say to each other is the same,
byte for byte, with the fence between them and without, but for the calls that the fence answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.mcp.conftest import Odd
from tests.mcp.peer import Peer

pytestmark = pytest.mark.rig

PLAIN = [
    b'{"jsonrpc":"2.0","id":1,"method":"ping"}',
    b'{"jsonrpc":"2.0","id":2,"method":"resources/list","params":{"cursor":"p1","x":1.0}}',
    b'{"jsonrpc":"2.0","id":3,"method":"resources/templates/list"}',
    b'{"jsonrpc":"2.0","id":4,"method":"resources/read","params":{"uri":"odd://a"}}',
    b'{"jsonrpc":"2.0","id":5,"method":"resources/subscribe","params":{"uri":"odd://a"}}',
    b'{"jsonrpc":"2.0","id":6,"method":"prompts/list"}',
    b'{"jsonrpc":"2.0","id":7,"method":"prompts/get","params":{"name":"p","arguments":{"a":"1"}}}',
    b'{"jsonrpc":"2.0","id":8,"method":"completion/complete","params":{"ref":{"type":"ref/prompt"}}}',
    b'{"jsonrpc":"2.0","id":9,"method":"logging/setLevel","params":{"level":"debug"}}',
    b'{"jsonrpc":"2.0","id":10,"method":"tasks/list"}',
    b'{"jsonrpc":"2.0","id":11,"method":"server/discover","params":{"_meta":{"a/b":1e2}}}',
    b'{"jsonrpc":"2.0","id":12,"method":"odd/custom","params":{"n":[1.0,1e2,0.10,-0.0,12345678901234567890]}}',
    b' { "jsonrpc" : "2.0" , "extra" : 1.50, "id" : 13 , "method" : "odd/spaced" , "params":[1]} ',
    b'{"jsonrpc":"2.0","id":14,"method":"no/such/method","params":{}}',
    b'{"jsonrpc":"2.0","id":15,"method":"tools/call","params":{"name":"nobody","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":16,"method":"tools/call","params":{"name":7,"arguments":{}}}',
    b'{"jsonrpc":"2.0","id":17,"method":"tools/call","params":{"name":"charge","arguments":[1]}}',
    b'{"jsonrpc":"2.0","id":18,"method":"odd/escapes","params":{"a":"\\u00e9\xc3\xa9\\/\\ud83d\\ude00","a":2}}',
    b'{"jsonrpc":"2.0","id":19,"method":"odd/surrogate","params":"\\ud800"}',
]
"""One by one, each waits for its answer."""

CALLS = [
    b'{"jsonrpc":"2.0","id":30,"method":"tools/call","params":{"name":"charge","arguments":{"n":[1.0,1e2,0.10,9007199254740993]},"odd":1.0,"_meta":{"x/y":0.50}}}',
    b'{"jsonrpc":"2.0","id":31,"method":"tools/call","params":{"name":"look","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":32,"method":"tools/call","params":{"name":"look","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":33,"method":"tools/call","params":{"name":"declined","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":34,"method":"tools/call","params":{"name":"declined","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":35,"method":"tools/call","params":{"name":"broken","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":36,"method":"tools/call","params":{"name":"invalid","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":37,"method":"tools/call","params":{"name":"progress","arguments":{},"_meta":{"progressToken":0}}}',
    b'{"jsonrpc":"2.0","id":38,"method":"tools/call","params":{"name":"progress","arguments":{"a":1},"_meta":{"progressToken":"0"}}}',
    b'{"jsonrpc":"2.0","id":39,"method":"tools/call","params":{"name":"sample","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":40,"method":"tools/call","params":{"name":"elicit","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":41,"method":"tools/call","params":{"name":"roots","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":42,"method":"tools/call","params":{"name":"ask","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":43,"method":"tools/call","params":{"name":"ask","arguments":{},"requestState":"state-1","inputResponses":{"sure":{"action":"accept"}}}}',
    b'{"jsonrpc":"2.0","id":44,"method":"tools/call","params":{"name":"charge","arguments":null}}',
    b'{"jsonrpc":"2.0","id":0,"method":"tools/call","params":{"name":"charge","arguments":{"id":0}}}',
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"charge","arguments":{"id":1}}}',
    b'{"jsonrpc":"2.0","id":"1","method":"tools/call","params":{"name":"charge","arguments":{"id":2}}}',
    b'{"jsonrpc":"2.0","id":"","method":"tools/call","params":{"name":"charge","arguments":{"id":3}}}',
    b'{"jsonrpc":"2.0","id":9007199254740993,"method":"tools/call","params":{"name":"charge","arguments":{"id":4}}}',
    b'{"jsonrpc":"2.0","id":-1,"method":"tools/call","params":{"name":"charge","arguments":{"id":5}}}',
    b'{"jsonrpc":"2.0","id":1.5,"method":"tools/call","params":{"name":"charge","arguments":{"id":6}}}',
    b'{"jsonrpc":"2.0","id":"\xc3\xa9\xf0\x9f\x98\x80","method":"tools/call","params":{"name":"charge","arguments":{"id":7}}}',
    b'{"jsonrpc":"2.0","id":46,"method":"tools/call","params":{"name":"grow","arguments":{}}}',
    b'{"jsonrpc":"2.0","id":47,"method":"tools/list","params":{}}',
]
"""Calls of which none is a duplicate, but for those that a server may answer twice."""

RESPONDERS = {
    "sampling/createMessage": b'"result":{"role":"assistant","content":[],"model":"m","t":0.70}',
    "elicitation/create": b'"result":{"action":"accept","content":{"n":1.0}}',
    "roots/list": b'"error":{"code":-1,"message":"no roots","data":1e2}',
}


def responds(peer: Peer) -> None:
    for method, body in RESPONDERS.items():
        peer.responders[method] = lambda request, body=body: (
            b'{ "jsonrpc":"2.0","id":' + json.dumps(request["id"]).encode() + b"," + body + b"}"
        )


async def spoken(odd: Odd, peer: Peer, lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """A session of these lines: what came to the client, and what came to the server."""
    responds(peer)
    await peer.hello()
    for line in lines:
        await peer.ask_line(line)
    peer.notify("notifications/roots/list_changed")
    peer.notify("notifications/cancelled", {"requestId": 47, "reason": "bored"})
    peer.line(b'{"jsonrpc":"2.0","method":"notifications/odd/ping","params":{"x":1.0}}')
    await peer.until(lambda: peer.messages("notifications/odd/pong"))
    code = await peer.close()
    assert code == 0
    heard = odd.heard()
    (odd.folder / "heard").unlink()
    return peer.received, heard


@pytest.mark.parametrize("options", [(), ("--observe",), ("--strict",)], ids=" ".join)
async def test_both_sides_get_what_the_other_said_byte_for_byte(
    odd: Odd, options: tuple[str, ...]
) -> None:
    """Handshake, tools, resources, prompts, completion, logging, progress, sampling, elicitation,
    roots, changes, cancellation, methods and members that nobody knows, ids and numbers."""
    lines = PLAIN + [line for line in CALLS if "--strict" not in options or b":34," not in line]
    raw, heard_raw = await spoken(odd, await odd.raw(greet=False), lines)
    wrapped, heard = await spoken(odd, await odd.wrapped(*options, greet=False), lines)
    assert heard_raw == heard
    assert raw == wrapped
    assert {0, 1, "1", ""} <= {each["id"] for each in map(json.loads, wrapped) if "id" in each}


async def test_the_era_without_a_handshake_is_passed_on_too(odd: Odd) -> None:
    """2026-07-28: the first message may be a call; wrap asks for the tools itself, as a request of
    the same era."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "peer", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    raw = await odd.raw(greet=False)
    peer = await odd.wrapped(greet=False)
    at_once = await peer.call("charge", {"n": 1}, _meta=meta, id=1)
    assert at_once.line == (await raw.call("charge", {"n": 1}, _meta=meta, id=1)).line
    asked, *_ = (json.loads(line) for line in odd.heard() if b"tools/list" in line)
    assert asked["params"]["_meta"] == meta
    assert not [each for each in peer.messages() if each.get("id") == asked["id"]]
    again = await peer.call("charge", {"n": 1}, _meta=meta, id=2)
    assert again.replay
    assert again.result["resultType"] == "complete"


async def test_ids_that_look_alike_are_told_apart_in_flight(odd: Odd) -> None:
    peer = await odd.wrapped()
    ids = [0, "0", 1, "1", 2**53 + 1, 1.5, "1.5", "", -7]
    answers = [peer.call("slow", {"gate": "go", "n": n}, id=id) for n, id in enumerate(ids)]
    await odd.running(len(ids))
    odd.open_gate("go")
    for id, answer in zip(ids, await asyncio.gather(*answers), strict=True):
        assert (type(answer.value["id"]), answer.value["id"]) == (type(id), id)
    assert len(odd.effects()) == len(ids)


@pytest.mark.parametrize("tool", ["charge", "declined", "broken", "look"])
async def test_an_answer_keeps_every_digit(odd: Odd, tool: str) -> None:
    raw, peer = await odd.raw(), await odd.wrapped()
    assert (await raw.call(tool, id=5)).line == (await peer.call(tool, id=5)).line


async def test_a_replay_keeps_every_digit_and_every_unknown_member(odd: Odd) -> None:
    peer = await odd.wrapped()
    fresh = await peer.call("charge", {"n": 1})
    replay = await peer.call("charge", {"n": 1})
    assert replay.replay
    for digits in (b'"one":1.0', b'"hundred":1e2', b'"dime":0.10', b'"nought":-0.0', b"1E-7"):
        assert digits in replay.line
    assert b"123456789012345678901234567890" in replay.line
    meta = dict(replay.result["_meta"])
    del meta["effectfence/replay"]
    assert {**replay.result, "_meta": meta} == fresh.result


async def test_a_result_of_twenty_megabytes_passes(odd: Odd) -> None:
    size = 20_000_000
    peer = await odd.wrapped()
    answer = await peer.call("big", {"bytes": size})
    assert len(answer.text) == size
    again = await peer.call("big", {"bytes": size})
    assert again.code == "result_not_recorded"
    assert again.refused["ran"] is True
    assert len(odd.effects("big")) == 1


async def test_arguments_of_megabytes_pass_and_are_told_apart(odd: Odd) -> None:
    size = 5_000_000
    peer = await odd.wrapped()
    first = await peer.call("charge", {"blob": "a" * size})
    assert not first.is_error
    assert (await peer.call("charge", {"blob": "a" * size})).replay
    other = await peer.call("charge", {"blob": "a" * (size - 1) + "b"})
    assert other.replay is None
    assert len(odd.effects()) == 2


async def test_large_messages_pass_both_ways_at_once(odd: Odd) -> None:
    """Neither side waits for the other to read first."""
    peer = await odd.wrapped()
    size = 4_000_000
    answers = [
        peer.call("big", {"bytes": size, "n": n, "blob": "b" * size}, id=n) for n in range(6)
    ]
    assert {len(answer.text) for answer in await asyncio.gather(*answers)} == {size}


async def test_what_is_not_json_goes_to_standard_error(odd: Odd) -> None:
    peer = await odd.wrapped(flags=["early-noise"])
    await peer.call("noise")
    for line in peer.received:
        assert isinstance(json.loads(line), dict), line
    for noise in ("starting up, please wait", "npm notice: hello", "[not json", "a warning"):
        await peer.says(noise)


@pytest.mark.parametrize(
    "line",
    [b"this is not JSON", b'{"jsonrpc":"2.0","id":1', b"[]", b"12", b'"x"', b"null", b"\x00"],
)
async def test_what_a_client_says_wrong_is_for_the_server_to_judge(odd: Odd, line: bytes) -> None:
    peer = await odd.wrapped()
    peer.line(line)
    await peer.ask("ping")
    assert line in odd.heard()


async def test_a_batch_without_calls_passes_as_it_is(odd: Odd) -> None:
    batch = (
        b'[ {"jsonrpc":"2.0","id":1,"method":"ping"},'
        b'{"jsonrpc":"2.0","id":"1","method":"odd/x","params":1.0} ]'
    )
    raw, peer = await odd.raw(), await odd.wrapped()
    for each in (raw, peer):
        answers = [each.expect(1), each.expect("1")]
        each.line(batch)
        await asyncio.gather(*answers)
    assert raw.received[-1] == peer.received[-1]
    assert odd.heard().count(batch) == 2


async def test_a_batch_with_calls_is_answered_as_a_batch(odd: Odd) -> None:
    peer = await odd.wrapped()
    expected = [peer.expect(id) for id in (1, 2, "2")]
    peer.send(
        [
            {"jsonrpc": "2.0", "id": 1, "method": "ping"},
            {"jsonrpc": "2.0", "method": "notifications/odd/ping", "params": {"n": 1}},
            called("charge", {"n": 1}, id=2),
            called("look", {}, id="2"),
        ]
    )
    await asyncio.gather(*expected)
    batch = json.loads(peer.received[-1])
    assert sorted(str(each["id"]) for each in batch) == ["1", "2", "2"]
    assert len(odd.effects("charge")) == 1


async def test_a_server_that_answers_in_a_batch_of_its_own_is_understood(odd: Odd) -> None:
    raw, peer = await odd.raw(), await odd.wrapped()
    for each in (raw, peer):
        await each.call("batched", {"id": 5}, id=5)
        await each.until(lambda each=each: each.messages("notifications/odd"))
    assert (await peer.call("batched", {"id": 5}, id=6)).replay
    assert len(odd.effects("batched")) == 2


async def test_a_call_without_an_id_never_reaches_a_fenced_tool(odd: Odd) -> None:
    """Its outcome could be told to nobody."""
    peer = await odd.wrapped()
    peer.notify("tools/call", {"name": "charge", "arguments": {}})
    await peer.ask("ping")
    await peer.says("without an id")
    assert odd.effects() == []


async def test_the_servers_requests_and_notifications_pass_while_a_call_is_in_flight(
    odd: Odd,
) -> None:
    peer = await odd.wrapped()
    slow = peer.call("slow", {"gate": "go"})
    await odd.running()
    responds(peer)
    sampled = await peer.call("sample")
    assert json.loads(sampled.text)["result"]["t"] == 0.7
    assert not slow.done()
    odd.open_gate("go")
    assert (await slow).text == "receipt 1"


async def test_answers_come_as_they_are_ready_not_in_turn(odd: Odd) -> None:
    peer = await odd.wrapped()
    slow = [peer.call("slow", {"gate": f"go-{n}"}) for n in range(3)]
    await odd.running(3)
    for n in (2, 0, 1):
        odd.open_gate(f"go-{n}")
        await slow[n]
    assert [answer.done() for answer in slow] == [True] * 3


async def test_cancelling_what_is_not_fenced_is_passed_on(odd: Odd) -> None:
    peer = await odd.wrapped()
    peer.call("look", {"gate": "never"}, id="reading")
    peer.notify("notifications/cancelled", {"requestId": "reading", "reason": "x", "odd": 1.0})
    seen = await peer.call("seen")
    assert json.loads(seen.text) == ["reading"]


async def test_a_servers_words_are_never_answered_by_the_fence(odd: Odd) -> None:
    """A request of the server's may have the id of a call in flight: they are of two directions."""
    peer = await odd.wrapped()
    slow = peer.call("slow", {"gate": "go"}, id="odd-1")
    await odd.running()
    responds(peer)
    assert json.loads((await peer.call("elicit")).text)["id"] == "odd-1"
    assert not slow.done()
    odd.open_gate("go")
    assert (await slow).text == "receipt 1"


async def test_many_messages_keep_their_order(odd: Odd) -> None:
    peer = await odd.wrapped()
    answers = [peer.ask("odd/n", {"n": n}) for n in range(2000)]
    await asyncio.gather(*answers)
    heard = [json.loads(line) for line in odd.heard() if b"odd/n" in line]
    assert [each["params"]["n"] for each in heard] == list(range(2000))
    came = [each["id"] for each in peer.messages() if "heard" in each.get("result", {})]
    assert came == sorted(came)


async def test_two_requests_with_one_id_do_not_become_two_effects(odd: Odd) -> None:
    peer = await odd.wrapped()
    peer.send(called("slow", {"gate": "go"}, id=1))
    await odd.running()
    peer.send(called("charge", {"n": 2}, id=1))
    await peer.ask("ping")
    odd.open_gate("go")
    await peer.until(lambda: len([e for e in peer.messages() if e.get("id") == 1]) == 2)
    assert len(odd.effects()) == 1


def called(tool: str, arguments: Any, *, id: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


CALL = (
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"charge",'
    b'"arguments":{"s":"\xff"}}}'
)


@pytest.mark.parametrize(
    "line",
    [
        CALL,
        CALL.replace(b'"\xff"', b"[" * 100_000 + b"]" * 100_000),
        b"[1," + CALL.replace(b"\xff", b"x") + b"]",
        b"[[" + CALL.replace(b"\xff", b"x") + b"]]",
        b"\xef\xbb\xbf" + CALL.replace(b"\xff", b"x"),
    ],
    ids=["not UTF-8", "too deep", "an odd batch", "a batch in a batch", "a byte order mark"],
)
async def test_no_call_slips_past_unread(odd: Odd, line: bytes) -> None:
    """What the fence can't read, a more lenient server may: its call must not reach it."""
    peer = await odd.wrapped()
    peer.line(line)
    await peer.ask("ping")
    reached = line in odd.heard()
    assert not reached
    await peer.call("charge", {"n": 1})
    assert odd.effects() in ([{"n": 1}], [{"s": "x"}, {"n": 1}])
