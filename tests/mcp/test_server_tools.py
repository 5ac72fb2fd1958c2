"""The six tools: what they take, what they say, and that the schemas say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from mcp.client.client import Client

from effectfence import EffectCert, EffectFence, EffectRequest, FenceConfig, PreparedEffect
from effectfence.mcp.server import Desk, instructions, tools
from tests.conftest import OpenFence
from tests.mcp.serving import asking

TOOLS = {tool.name: tool for tool in tools(60.0)}
PAGE = {
    "fence_prepare": "intent domain tool args agent read_set? parent? known_clock?",
    "fence_commit": "prepared result",
    "fence_abort": "prepared reason",
    "fence_release": "prepared reason",
    "fence_heartbeat": "prepared",
    "fence_stats": "",
}
SCHEMAS = [
    pytest.param(schema, id=f"{tool.name}-{way}")
    for tool in TOOLS.values()
    for way, schema in (("takes", tool.input_schema), ("says", tool.output_schema))
]


def below(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside this one that stands for a value."""
    for name, found in schema.get("properties", {}).items():
        yield f"{path}.{name}", found
        yield from below(found, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(found := schema.get(name), dict):
            yield f"{path}[{name}]", found
            yield from below(found, f"{path}[{name}]")


# --- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_property_of_every_schema_declares_its_type(schema: dict[str, Any]) -> None:
    assert schema["type"] == "object"
    assert [path for path, found in below(schema) if "type" not in found] == []


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_stands_for_itself(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    assert "$ref" not in text
    assert "$defs" not in text
    assert "pydantic" not in text
    assert not [path for path, found in below(schema) if "anyOf" in found]


def test_the_tools_are_those_of_the_page_and_take_what_it_says() -> None:
    assert list(TOOLS) == list(PAGE)
    for name, tool in TOOLS.items():
        schema = tool.input_schema
        marked = [
            field if field in schema["required"] else f"{field}?" for field in schema["properties"]
        ]
        assert " ".join(marked) == PAGE[name]
        assert schema["additionalProperties"] is False


def test_schemas_have_the_fields_of_the_models() -> None:
    takes = TOOLS["fence_commit"].input_schema["properties"]
    answers = (TOOLS["fence_prepare"].output_schema or {})["properties"]
    ticket = takes["prepared"]["properties"]
    assert set(ticket) == set(PreparedEffect.model_fields)
    assert set(ticket["request"]["properties"]) == set(EffectRequest.model_fields)
    assert set(answers["cert"]["properties"]) == set(EffectCert.model_fields)
    assert takes["prepared"] == answers["prepared"]


def test_any_json_is_said_by_all_the_types() -> None:
    result = TOOLS["fence_commit"].input_schema["properties"]["result"]
    assert set(result["type"]) == {"object", "array", "string", "number", "boolean", "null"}


def test_annotations_say_what_a_repeat_does() -> None:
    said = {
        name: (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint)
        for name, tool in TOOLS.items()
        if (hints := tool.annotations) is not None
    }
    assert said == {
        "fence_prepare": (None, False, False),  # a second one is refused while the first runs
        "fence_commit": (None, False, True),
        "fence_abort": (None, False, True),
        "fence_release": (None, True, True),  # what it says wrongly lets an action run twice
        "fence_heartbeat": (None, False, False),
        "fence_stats": (True, None, None),
    }
    assert all(t.annotations and t.annotations.open_world_hint is False for t in TOOLS.values())


def test_the_instructions_are_five_lines_that_name_every_move() -> None:
    lines = instructions(60.0).splitlines()
    assert len(lines) == 5
    for word in ("fence_prepare", "fresh", "fence_commit", "already_done", "error", "30 s"):
        assert word in instructions(60.0)
    assert "fence_release" in lines[4]
    assert "fence_abort" in lines[4]


# --- answers --------------------------------------------------------------------------------------


class Agent:
    """Calls tools in this process; holds every answer to its tool's schema, errors too."""

    def __init__(self, fence: EffectFence) -> None:
        self.server = Desk(fence).server()

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        async with Client(self.server) as client:
            return await client.call_tool(tool, arguments)

    async def __call__(self, tool: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        result = await self.call(tool, arguments or {})
        assert not result.is_error, result.content
        said = self._held_to_schema(tool, result)
        assert json.loads(result.content[0].text) == said
        return said

    async def refused(self, tool: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
        result = await self.call(tool, arguments)
        assert result.is_error
        text = result.content[0].text
        assert "Traceback" not in text
        assert "pydantic" not in text
        assert "://" not in text
        return self._held_to_schema(tool, result), text

    def _held_to_schema(self, tool: str, result: Any) -> dict[str, Any]:
        schema = TOOLS[tool].output_schema
        assert schema is not None
        Draft202012Validator(schema).validate(result.structured_content)
        said: dict[str, Any] = result.structured_content
        return said

    async def prepare(self, *arguments: Any, **fields: Any) -> dict[str, Any]:
        said = await self("fence_prepare", asking(*arguments, **fields))
        assert said["status"] == "fresh"
        ticket: dict[str, Any] = json.loads(json.dumps(said["prepared"]))
        Draft202012Validator(TOOLS["fence_commit"].input_schema["properties"]["prepared"]).validate(
            ticket
        )
        return ticket


@pytest.fixture
def agent(fence: EffectFence) -> Agent:
    return Agent(fence)


async def test_fresh_then_committed_then_already_done(agent: Agent) -> None:
    prepared = await agent.prepare()
    done = await agent("fence_commit", {"prepared": prepared, "result": {"id": "ch_1"}})
    assert done["status"] == "committed"
    assert EffectCert.model_validate(done["cert"]).verify()
    again = await agent("fence_prepare", asking())
    assert again == {"status": "already_done", "cert": done["cert"]}


async def test_a_commit_may_be_repeated_and_another_result_is_a_conflict(agent: Agent) -> None:
    prepared = await agent.prepare()
    first = await agent("fence_commit", {"prepared": prepared, "result": None})
    assert await agent("fence_commit", {"prepared": prepared, "result": None}) == first
    said, text = await agent.refused("fence_commit", {"prepared": prepared, "result": 2})
    assert (said["code"], said["ran"], said["cert"]) == ("commit_conflict", True, first["cert"])
    assert "already committed with another result" in text


async def test_released_is_free_again_and_aborted_is_not(agent: Agent) -> None:
    prepared = await agent.prepare()
    said = await agent("fence_release", {"prepared": prepared, "reason": "connection refused"})
    assert said == {"status": "released", "intent": "charge:o1"}
    prepared = await agent.prepare()
    said = await agent("fence_abort", {"prepared": prepared, "reason": "timed out"})
    assert said == {"status": "aborted", "intent": "charge:o1"}
    said, text = await agent.refused("fence_prepare", asking())
    assert (said["code"], said["ran"], said["reason"]) == ("outcome_unknown", None, "timed out")
    assert text.startswith("nobody knows whether 'charge:o1' ran")


async def test_a_heartbeat_says_when_the_lease_ends(agent: Agent) -> None:
    prepared = await agent.prepare()
    said = await agent("fence_heartbeat", {"prepared": prepared})
    assert said["status"] == "extended"
    assert said["lease_expires_at"] > prepared["started_ms"] / 1000


async def test_stats_count_every_attempt(agent: Agent) -> None:
    await agent.prepare()
    await agent.refused("fence_prepare", asking())
    await agent.refused("fence_prepare", asking(args={"cents": 1}))
    stale = [{"domain": "metrics", "seq": 7}]
    await agent.refused("fence_prepare", asking("other", read_set=stale))
    said = await agent("fence_stats")
    assert (said["admitted"], said["replayed"], said["total_attempts"]) == (1, 0, 4)
    assert said["prevented"] == 3
    assert said["refused"] == {
        "stale_read_set": 1,
        "domain_race": 0,
        "in_flight": 1,
        "unknown_outcome": 0,
        "conflict": 1,
        "causal": 0,
    }
    assert said["log_line"].startswith("effectfence since boot: admitted=1 ")


async def test_a_refusal_carries_its_facts(agent: Agent) -> None:
    await agent.prepare()
    said, _ = await agent.refused("fence_prepare", asking(args={}))
    assert said == {
        "code": "intent_conflict",
        "ran": False,
        "intent": "charge:o1",
        "differs": ["args"],
    }
    said, _ = await agent.refused("fence_prepare", asking())
    assert (said["code"], said["ran"], said["agent"]) == ("intent_in_flight", False, "billing")


async def test_a_certificate_names_its_parent_and_what_was_known(agent: Agent) -> None:
    prepared = await agent.prepare()
    first = await agent("fence_commit", {"prepared": prepared, "result": 1})
    prepared = await agent.prepare(
        "mail:o1",
        parent=first["cert"]["hash"],
        known_clock=first["cert"]["vector_clock"],
        read_set=[{"domain": "of:charge:o1", "seq": 1}],
    )
    said = await agent("fence_commit", {"prepared": prepared, "result": 2})
    assert said["cert"]["parent"] == first["cert"]["hash"]
    assert said["cert"]["vector_clock"] == {"billing": 2}


async def test_a_result_too_large_is_done_and_never_handed_out_as_a_marker(
    open_fence: OpenFence,
) -> None:
    fence = await open_fence(max_record_bytes=1000)
    agent = Agent(fence)
    prepared = await agent.prepare()
    said = await agent("fence_commit", {"prepared": prepared, "result": "x" * 2000})
    assert said["status"] == "committed"
    said, text = await agent.refused("fence_prepare", asking())
    assert (said["code"], said["ran"]) == ("result_not_recorded", True)
    assert "was not run again" in text


async def test_a_ticket_of_one_ledger_is_none_of_another(agent: Agent) -> None:
    foreign = await Agent(EffectFence()).prepare()
    said, text = await agent.refused("fence_commit", {"prepared": foreign, "result": 1})
    assert (said["code"], said["ran"]) == ("invalid_ticket", True)
    assert "of another ledger" in text


# --- what is refused ------------------------------------------------------------------------------

BAD = {
    "missing": ("fence_prepare", asking(), {"agent"}, "`agent` is missing"),
    "not a field": ("fence_prepare", asking(on_lease_expiry="takeover"), (), "not one of its fiel"),
    "wrong type": ("fence_prepare", asking(tool=5), (), "`tool`: should be a valid string"),
    "args no object": ("fence_prepare", asking(args=[1]), (), "`args`: should be a valid object"),
    "empty name": ("fence_prepare", asking(""), (), "`intent`: String should have at least 1"),
    "NUL": ("fence_prepare", asking("a\0b"), (), "`intent`"),
    "long name": ("fence_prepare", asking("é" * 600), (), "intent takes 1200 bytes"),
    "no hash": ("fence_prepare", asking(parent="x"), (), "`parent`"),
    "read set": ("fence_prepare", asking(read_set=[{"domain": "d"}]), (), "`read_set.0.seq` is mi"),
    "doubled domain": (
        "fence_prepare",
        asking(read_set=[{"domain": "d", "seq": 1}] * 2),
        (),
        "read_set names 'd' twice",
    ),
    "long read set": (
        "fence_prepare",
        asking(read_set=[{"domain": f"d{n}", "seq": 1} for n in range(65)]),
        (),
        "at most 64",
    ),
    "clock": ("fence_prepare", asking(known_clock={"a": -1}), (), "`known_clock`"),
    "deep": ("fence_prepare", asking(args=json.loads('{"a":' * 65 + "1" + "}" * 65)), (), "deeper"),
    "surrogate": ("fence_prepare", asking(args={"s": "\ud800"}), (), "args.s holds a lone surr"),
    "large": ("fence_prepare", asking(args={"s": "x" * 2**20}), (), "at most 1048576"),
    "no ticket": ("fence_commit", {"result": 1}, (), "`prepared` is missing"),
    "text ticket": ("fence_commit", {"prepared": "{}", "result": 1}, (), "the object that fence_p"),
    "half ticket": ("fence_abort", {"prepared": {}, "reason": ""}, (), "`prepared.request` is mis"),
    "no result": ("fence_commit", {"prepared": {}}, (), "`result` is missing"),
    "no reason": ("fence_release", {"prepared": {}, "reason": None}, (), "`prepared.request` is"),
    "stats": ("fence_stats", {"since": 1}, (), "`since` is not one of its fields"),
}


@pytest.mark.parametrize("ledger", ["memory"])
@pytest.mark.parametrize(("tool", "arguments", "without", "says"), BAD.values(), ids=BAD)
async def test_bad_input_is_told_what_to_mend_and_leaves_nothing_behind(
    agent: Agent, fence: EffectFence, tool: str, arguments: Any, without: Any, says: str
) -> None:
    given = {name: value for name, value in arguments.items() if name not in without}
    said, text = await agent.refused(tool, given)
    assert said["code"] == "invalid_arguments"
    assert says in text
    assert text.endswith("Nothing was recorded: mend it and call again.")
    assert fence.stats().total == 0
    assert (await fence.intent_count(), await fence.domain_count()) == (0, 0)


FORGERIES: dict[str, Any] = {
    "token": "0" * 64,
    "attempt": 2,
    "seq": 2,
    "idempotency_key": "mine",
    "started_ms": 5,
    "vector_clock": {"billing": 9},
    "request.args": {"cents": 1},
    "request.agent": "mallory",
    "request.domain": "of:another",
    "request.on_lease_expiry": "takeover",
}


@pytest.mark.parametrize(("path", "value"), FORGERIES.items(), ids=FORGERIES)
async def test_an_altered_ticket_speaks_for_nobody(agent: Agent, path: str, value: Any) -> None:
    prepared = await agent.prepare()
    forged = json.loads(json.dumps(prepared))
    inner, _, name = path.rpartition(".")
    (forged[inner] if inner else forged)[name] = value
    said, _ = await agent.refused("fence_commit", {"prepared": forged, "result": 1})
    assert said["code"] in ("invalid_ticket", "lease_lost")
    said = await agent("fence_commit", {"prepared": prepared, "result": 1})
    assert said["status"] == "committed"


async def test_values_are_never_shown(agent: Agent) -> None:
    secret = "hunter2"
    _, text = await agent.refused("fence_prepare", asking(tool=[secret], args=secret))
    assert secret not in text


def test_the_lease_in_the_descriptions_is_the_one_that_is_configured() -> None:
    desk = Desk(EffectFence(FenceConfig(lease_ttl=7.0)))
    assert "Its lease lasts 7 s." in (desk.tools[0].description or "")
    assert "3.5 s" in (desk.server().instructions or "")
