"""`effectfence serve` as it is started: its ledger, its settings, and the files that name it."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from tests.mcp.peer import Peer
from tests.mcp.serving import EFFECTFENCE, ROOT, Place, asking, says

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    yield place
    await place.close()


async def one_sentence(peer: Peer, code: int = 2) -> str:
    """What it says as it ends at once."""
    assert await peer.ended() == code
    assert peer.received == []
    assert peer.complaint().count("\n") == 1
    return peer.complaint()


# --- the ledger -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("serve",)])
async def test_without_a_name_the_ledger_is_the_servers_own(
    place: Place, words: tuple[str, ...]
) -> None:
    del place.env["EFFECTFENCE_LEDGER"]
    peer = await place.start(*words)
    await peer.hello(listing=False)
    assert says(await peer.call("fence_prepare", asking()))["status"] == "fresh"
    assert await peer.close() == 0
    place.ledger = place.folder / "state" / "effectfence" / "server.jsonl"
    assert stat.S_IMODE(place.ledger.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.ledger.parent.stat().st_mode) == 0o700
    assert await place.state("charge:o1") == "unknown"


async def test_the_ledger_that_is_named_comes_first(place: Place) -> None:
    named = place.folder / "named.jsonl"
    peer = await place.start("serve", "--ledger", str(named))
    await peer.hello(listing=False)
    await peer.call("fence_prepare", asking())
    assert await peer.close() == 0
    assert named.exists()
    assert not place.ledger.exists()


async def test_a_ledger_in_memory_ends_with_the_server(place: Place) -> None:
    for _ in range(2):
        peer = await place.start("serve", "--ledger", "memory:")
        await peer.hello(listing=False)
        assert says(await peer.call("fence_prepare", asking()))["status"] == "fresh"
        assert await peer.close() == 0
        assert peer.complaint() == ""


async def test_a_ledger_that_is_none_is_refused_and_left_alone(place: Place) -> None:
    place.ledger.write_text("not a ledger\n")
    said = await one_sentence(await place.start("serve"), 1)
    assert "is damaged at line 1" in said
    assert place.ledger.read_text() == "not a ledger\n"


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "", "soon"])
@pytest.mark.parametrize("name", ["EFFECTFENCE_LEASE_SECS", "EFFECTFENCE_RESULT_TTL_SECS"])
async def test_seconds_that_are_none_are_refused(place: Place, name: str, value: str) -> None:
    said = await one_sentence(await place.start("serve", **{name: value}))
    assert f"{name} is {value!r}; seconds are wanted, more than zero" in said
    assert not place.ledger.exists()


async def test_the_lease_of_the_environment_is_the_one_that_is_told(place: Place) -> None:
    peer = await place.start(EFFECTFENCE_LEASE_SECS="0.5")
    greeting = (await peer.hello(listing=False)).result
    assert "longer than 0.25 s" in greeting["instructions"]
    tools = (await peer.ask("tools/list", {})).result["tools"]
    assert "Its lease lasts 0.5 s." in tools[0]["description"]


async def test_a_ticket_is_renewed_by_its_agent_and_by_nobody_else(place: Place) -> None:
    peer = await place.stdio(EFFECTFENCE_LEASE_SECS="0.2")
    ticket = says(await peer.call("fence_prepare", asking()))["prepared"]
    code = "intent_in_flight"
    while code == "intent_in_flight":  # until the lease has lapsed
        code = says(await peer.call("fence_prepare", asking()))["code"]
    assert code == "outcome_unknown"
    done = {"prepared": ticket, "result": 1}
    assert says(await peer.call("fence_commit", done))["status"] == "committed"


WRONG: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "no port": (("--http", "localhost"), {}, "HOST:PORT is wanted"),
    "bare IPv6": (("--http", "::1:7777"), {}, "written in brackets"),
    "open to others": (("--http", "0.0.0.0:0"), {}, "can be reached from other machines"),
    "empty token": (("--http", "0"), {"EFFECTFENCE_HTTP_TOKEN": ""}, "printable ASCII"),
    "missing token": (("--http", "0", "--token-env", "MINE"), {}, "MINE, which is to hold"),
    "no tenants": (("--http", "0"), {"EFFECTFENCE_HTTP_TOKENS": "acme"}, "name=token"),
    "shared": (("--http", "0"), {"EFFECTFENCE_HTTP_TOKENS": "a=x,b=x"}, "two names have one"),
    "no file": (("--http", "0", "--tokens", "nowhere"), {}, "can't read nowhere"),
    "open file": (("--http", "0", "--tokens", "tokens"), {}, "chmod 600 tokens"),
}


@pytest.mark.parametrize(("words", "env", "says"), WRONG.values(), ids=WRONG)
async def test_what_can_not_be_served_is_one_sentence(
    place: Place, words: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    (place.folder / "tokens").write_text("acme=token\n")
    (place.folder / "tokens").chmod(0o644)
    assert says in await one_sentence(await place.start("serve", *words, **env))
    assert not place.ledger.exists()


async def test_a_port_that_is_taken_is_one_sentence(place: Place) -> None:
    web = await place.http()
    said = await one_sentence(await place.start("serve", "--http", str(web.port)), 1)
    assert f"can't listen on 127.0.0.1:{web.port}: Address already in use" in said


async def test_all_interfaces_are_served_with_a_token(place: Place) -> None:
    peer = await place.start("serve", "--http", "0.0.0.0:0", "--token-env", "MINE", MINE="token")
    await peer.says("serving http://0.0.0.0:")
    assert "token" not in peer.complaint()


async def test_without_the_extra_it_says_what_to_install(place: Place) -> None:
    """In a folder with everything that is installed but the extra."""
    for name in installed_without("mcp", "mcp_types"):
        (place.folder / "site" / name.name).parent.mkdir(exist_ok=True)
        (place.folder / "site" / name.name).symlink_to(name)
    env = {**place.env, "PYTHONPATH": f"{ROOT}{os.pathsep}{place.folder / 'site'}"}
    without = (sys.executable, "-S", "-m", "effectfence")
    for words in ((), ("serve", "--http", "0")):
        peer = await Peer.start([*without, *words], env=env, cwd=place.folder)
        said = await one_sentence(peer)
        assert "pip install 'effectfence-asyncio[mcp]'" in said
    peer = await Peer.start([*without, "doctor"], env=env, cwd=place.folder)
    await peer.ended()
    assert any(
        line.startswith(b"mcp server") and b"not installed: pip install" in line
        for line in peer.received
    )


def installed_without(*names: str) -> list[Path]:
    """The top-level entries of what is installed, but of these."""
    found = {}
    for distribution in distributions():
        for file in distribution.files or ():
            top = file.parts[0]
            path = Path(str(distribution.locate_file(top)))
            if top not in (*names, "..", "__pycache__") and path.exists():
                found[top] = path
    return list(found.values())


# --- the files that name it -----------------------------------------------------------------------


async def test_what_the_clients_file_says_starts_the_server(place: Place) -> None:
    """`.mcp.json`, with the command where `pip` puts it: on the PATH."""
    servers = json.loads((ROOT / ".mcp.json").read_text())["mcpServers"]
    (name,) = servers
    programs = place.folder / "bin"
    programs.mkdir()
    script = programs / next(iter(PROJECT["scripts"]))
    script.write_text(f'#!/bin/sh\nexec {EFFECTFENCE[0]} -m effectfence "$@"\n')
    script.chmod(0o755)
    server = servers[name]
    command = ["/usr/bin/env", server["command"], *server.get("args", [])]
    env = {**place.env, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    peer = await Peer.start(command, env=env | server.get("env", {}), cwd=place.folder)
    place.peers.append(peer)
    await peer.hello(listing=False)
    assert says(await peer.call("fence_prepare", asking()))["status"] == "fresh"


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, **more}


def an_object(required: str, **properties: Any) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "required": required.split(), "properties": properties}


def a_list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


INPUT = {
    "description": text(),
    "value": text(),
    "default": text(),
    "format": {"enum": ["string", "number", "boolean", "filepath"]},
    "isRequired": {"type": "boolean"},
    "isSecret": {"type": "boolean"},
}
ARGUMENT = {
    "oneOf": [
        an_object("type name", type={"const": "named"}, name=text(), **INPUT),
        an_object("type value", type={"const": "positional"}, **INPUT),
    ]
}
REGISTRY = an_object(
    "$schema name description version packages",
    **{
        "$schema": {
            "const": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json"
        }
    },
    name=text(pattern=r"^[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+$", minLength=3, maxLength=200),
    title=text(maxLength=100),
    description=text(maxLength=100),
    version=text(maxLength=255, pattern=r"^\d+\.\d+\.\d+$"),
    packages=a_list_of(
        an_object(
            "registryType registryBaseUrl identifier version transport",
            registryType={"const": "pypi"},
            registryBaseUrl={"const": "https://pypi.org"},
            identifier=text(),
            version=text(pattern=r"^\d+\.\d+\.\d+$"),
            runtimeHint={"const": "uvx"},
            runtimeArguments=a_list_of(ARGUMENT),
            packageArguments=a_list_of(ARGUMENT),
            transport=an_object("type", type={"const": "stdio"}),
            environmentVariables=a_list_of(an_object("name", name=text(), **INPUT)),
        )
    ),
)
"""What the registry's schema of that date wants of the members that `server.json` has, in words of
our own, and stricter: no other members."""


def test_the_registrys_file_has_the_registrys_form() -> None:
    Draft7Validator.check_schema(REGISTRY)
    Draft7Validator(REGISTRY).validate(json.loads((ROOT / "server.json").read_text()))


def test_the_registrys_file_says_what_the_project_says() -> None:
    server = json.loads((ROOT / "server.json").read_text())
    (package,) = server["packages"]
    assert server["version"] == package["version"] == PROJECT["version"]
    assert package["identifier"] == PROJECT["name"]
    assert [a["value"] for a in package["runtimeArguments"]] == PROJECT["optional-dependencies"][
        "mcp"
    ]


async def test_the_registrys_file_starts_the_server(place: Place) -> None:
    """Its arguments and its settings' defaults, handed to the command."""
    (package,) = json.loads((ROOT / "server.json").read_text())["packages"]
    words = [argument["value"] for argument in package["packageArguments"]]
    settings = package["environmentVariables"]
    env = {each["name"]: each["default"] for each in settings if "default" in each}
    peer = await place.start(*words, **env)
    await peer.hello(listing=False)
    assert says(await peer.call("fence_prepare", asking()))["status"] == "fresh"
    source = (ROOT / "effectfence" / "commands" / "serve.py").read_text()
    assert set(re.findall(r"EFFECTFENCE_(?!HTTP)\w+", source)) == {e["name"] for e in settings}
