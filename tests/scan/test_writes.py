"""A write is bound to the tool that reaches it, with its kind, its path and what repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scan.reading import JAVASCRIPT, PYTHON, javascript, named, python, read, what

KINDS = {
    "an HTTP post": (
        "http",
        "effect",
        'import requests\n@mcp.tool()\ndef pay():\n    requests.post("https://x/pay")\n',
    ),
    "an HTTP verb as a word": (
        "http",
        "same",
        'import httpx\n@mcp.tool()\ndef pay():\n    httpx.request("DELETE", "https://x/pay/1")\n',
    ),
    "an insert": (
        "sql",
        "effect",
        "import sqlite3\ndb = sqlite3.connect('x')\n@mcp.tool()\ndef pay():\n"
        '    db.execute("INSERT INTO payments VALUES (1)")\n',
    ),
    "an update that counts on": (
        "sql",
        "effect",
        "import sqlite3\ndb = sqlite3.connect('x')\n@mcp.tool()\ndef pay():\n"
        '    db.execute("UPDATE accounts SET balance = balance - 5")\n',
    ),
    "an update": (
        "sql",
        "same",
        "import sqlite3\ndb = sqlite3.connect('x')\n@mcp.tool()\ndef pay():\n"
        '    db.execute("UPDATE accounts SET name = ? WHERE id = 1", ("x",))\n',
    ),
    "a statement that the call brings": (
        "sql",
        "depends",
        "import sqlite3\n@mcp.tool()\ndef run(query: str):\n"
        "    with sqlite3.connect('x') as db:\n        db.execute(query)\n",
    ),
    "an SDK's verb": (
        "sdk",
        "effect",
        "import docker\n@mcp.tool()\ndef start():\n"
        '    docker.from_env().containers.run("alpine")\n',
    ),
    "a file": (
        "file",
        "same",
        '@mcp.tool()\ndef save(path: str):\n    with open(path, "w") as f:\n        f.write("x")\n',
    ),
    "an appended file": (
        "file",
        "effect",
        '@mcp.tool()\ndef save(path: str):\n    open(path, "a").write("x")\n',
    ),
    "a process": (
        "process",
        "effect",
        "import subprocess\n@mcp.tool()\ndef commit():\n"
        '    subprocess.run(["git", "commit", "-m", "x"])\n',
    ),
    "a command that the call brings": (
        "process",
        "depends",
        "import subprocess\n@mcp.tool()\ndef run(command: str):\n"
        "    subprocess.run(command, shell=True)\n",
    ),
    "a queue": (
        "queue",
        "effect",
        "import pika\nchannel = pika.BlockingConnection().channel()\n@mcp.tool()\ndef tell():\n"
        '    channel.basic_publish(exchange="", routing_key="q", body="x")\n',
    ),
    "a mail": (
        "mail",
        "effect",
        "import smtplib\n@mcp.tool()\ndef mail():\n    with smtplib.SMTP('x') as s:\n"
        "        s.send_message('x')\n",
    ),
    "a key-value store": (
        "key-value",
        "effect",
        "import redis\nr = redis.Redis()\n@mcp.tool()\ndef count():\n    r.incr('x')\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_is_told_with_its_kind_and_what_a_second_call_does(
    kind: str, tmp_path: Path
) -> None:
    expected, repeats, body = KINDS[kind]
    (tool,) = python(tmp_path, body).values()
    assert [(write.kind, write.repeats) for write in tool.writes] == [(expected, repeats)]


READS = {
    "a get": 'import requests\n@mcp.tool()\ndef look():\n    requests.get("https://x/pay")\n',
    "a select": "import sqlite3\n@mcp.tool()\ndef look():\n"
    '    sqlite3.connect("x").execute("SELECT * FROM inserts")\n',
    "lists and dictionaries": "@mcp.tool()\ndef look(items: list):\n    out = []\n    seen = {}\n"
    "    for item in items:\n        out.append(item)\n        seen.update(item)\n    return out\n",
    "logging": "import logging\nlog = logging.getLogger()\n@mcp.tool()\ndef look():\n"
    '    log.info("sent"); print("deleted")\n',
    "a read-only command": "import subprocess\n@mcp.tool()\ndef look():\n"
    '    subprocess.run(["git", "log"])\n',
    "a search by post": "import requests\n@mcp.tool()\ndef search_things(q: str):\n"
    '    requests.post("https://x/v1/search", json={"q": q})\n',
    "a GraphQL query": "import requests\n@mcp.tool()\ndef look():\n"
    '    requests.post("https://x/graphql", json={"query": "query { me { id } }"})\n',
    "a token": "import requests\ndef token():\n"
    '    return requests.post("https://x/oauth/token").json()["access_token"]\n'
    '@mcp.tool()\ndef look():\n    requests.get("https://x", headers={"a": token()})\n',
    "a select that is asked for": "import sqlite3\n@mcp.tool()\ndef query(sql: str):\n"
    '    if not sql.strip().upper().startswith("SELECT"):\n        raise ValueError("no")\n'
    "    return sqlite3.connect('x').execute(sql).fetchall()\n",
    "the client's own progress": "@mcp.tool()\nasync def look(ctx):\n"
    "    await ctx.report_progress(1, 2)\n    await ctx.session.send_log_message('x')\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
def test_what_only_reads_is_no_write(kind: str, tmp_path: Path) -> None:
    (tool,) = python(tmp_path, READS[kind]).values()
    assert what(tool) == []


def test_a_conditional_verb_is_a_write(tmp_path: Path) -> None:
    tools = javascript(
        tmp_path,
        """
        async function api(path, body) {
          return fetch(`https://x${path}`, { method: body ? "POST" : "GET", body });
        }
        server.tool("pay", "d", {}, async (args) => api("/pay", args));
        server.tool("look", "d", {}, async () => api("/pay"));
        """,
    )
    assert what(tools["pay"]) == ["POST https://x/pay"]
    assert what(tools["look"]) == []


def test_a_read_tool_does_not_inherit_its_neighbours_writes(tmp_path: Path) -> None:
    report = read(
        tmp_path,
        {
            "client.py": """
                import httpx
                class Client:
                    def __init__(self):
                        self.http = httpx.Client()
                    def create(self): return self._send("POST", "/things")
                    def find(self): return self._send("GET", "/things")
                    def _send(self, verb, path): return self.http.request(verb, path)
            """,
            "server.py": """
                from mcp.server import Server
                from mcp.types import Tool
                from client import Client
                server = Server("x")
                client = Client()
                async def create(arguments): return client.create()
                async def find(arguments): return client.find()
                HANDLERS = {"create": create, "find": find}
                @server.list_tools()
                async def tools():
                    return [Tool(name=name, inputSchema={}) for name in HANDLERS]
                @server.call_tool()
                async def call(name, arguments):
                    return await HANDLERS[name](arguments)
            """,
        },
    )
    tools = named(report.tools)
    assert what(tools["create"]) == ["POST /things"]
    assert what(tools["find"]) == []
    (write,) = tools["create"].writes
    assert str(write.place) == "client.py:5", "where the verb was given, not where all are sent"
    assert [step.name for step in write.path][1:] == ["call", "create", "create", "_send"]


def test_an_action_argument_is_told_apart(tmp_path: Path) -> None:
    tools = javascript(
        tmp_path,
        """
        server.tool("tasks", "d", {}, async ({ action, id }) => {
          switch (action) {
            case "create": return fetch("https://x/tasks", { method: "POST" });
            case "delete": return fetch(`https://x/tasks/${id}`, { method: "DELETE" });
            case "list": return fetch("https://x/tasks");
          }
        });
        """,
    )
    assert [(write.when, write.what) for write in tools["tasks"].writes] == [
        ("action = create", "POST https://x/tasks"),
        ("action = delete", "DELETE https://x/tasks/…"),
    ]


def test_a_factory_hands_each_tool_its_own_verb(tmp_path: Path) -> None:
    report = read(
        tmp_path,
        {
            "make.ts": JAVASCRIPT
            + """
            export function make(options: { name: string; method: string; path: string }) {
              server.tool(options.name, {}, async (args: any) => {
                switch (options.method) {
                  case "GET": return api.get(options.path);
                  case "POST": return api.post(options.path, args);
                }
              });
            }
            class Api {
              async get(path: string) { return fetch(path, { method: "GET" }); }
              async post(path: string, data: any) { return fetch(path, { method: "POST" }); }
            }
            const api = new Api();
            """,
            "tools.ts": """
            import { make } from "./make.js";
            make({ name: "list_things", method: "GET", path: "/things" });
            make({ name: "create_thing", method: "POST", path: "/things" });
            """,
        },
    )
    tools = named(report.tools)
    assert what(tools["list_things"]) == []
    assert what(tools["create_thing"]) == ["POST /things"]


def test_a_call_that_is_handed_to_a_thread_is_a_call(tmp_path: Path) -> None:
    (tool,) = python(
        tmp_path,
        """
        import asyncio, docker
        client = docker.from_env()
        @mcp.tool()
        async def start():
            await asyncio.to_thread(client.containers.run, "alpine")
        """,
    ).values()
    assert what(tool) == ["docker.from_env.containers.run()"]


def test_a_connection_that_is_opened_later_is_the_one_that_is_written_to(tmp_path: Path) -> None:
    (tool,) = javascript(
        tmp_path,
        """
        import mysql from "mysql2/promise";
        class Db {
          connection = null;
          async connect() { this.connection = await mysql.createConnection({}); }
          async run(sql) {
            if (!this.connection) await this.connect();
            return this.connection.query(sql);
          }
        }
        const db = new Db();
        server.tool("drop", "d", {}, async () => db.run("DROP TABLE x"));
        """,
    ).values()
    assert [write.kind for write in tool.writes] == ["sql"]


def test_retries_around_a_write_are_told(tmp_path: Path) -> None:
    tools = python(
        tmp_path,
        """
        import requests
        from tenacity import retry
        @retry(stop=3)
        def decorated():
            requests.post("https://x/pay")
        def looped():
            for attempt in range(3):
                try:
                    return requests.post("https://x/pay")
                except Exception:
                    continue
        @mcp.tool()
        def one(): return decorated()
        @mcp.tool()
        def two(): return looped()
        @mcp.tool()
        def three(): return requests.post("https://x/pay")
        """,
    )
    assert [r.how for w in tools["one"].writes for r in w.retries] == ["decorator"]
    assert [r.how for w in tools["two"].writes for r in w.retries] == ["loop"]
    assert [r.how for w in tools["three"].writes for r in w.retries] == []


def test_a_library_that_retries_is_told(tmp_path: Path) -> None:
    (tool,) = javascript(
        tmp_path,
        """
        import pRetry from "p-retry";
        const pay = () => fetch("https://x", { method: "POST" });
        server.tool("pay", "d", {}, async () => pRetry(pay));
        """,
    ).values()
    assert [retry.how for write in tool.writes for retry in write.retries] == ["library"]


def test_contradicted_annotations_are_told(tmp_path: Path) -> None:
    tools = python(
        tmp_path,
        """
        import requests
        from mcp.types import ToolAnnotations
        @mcp.tool(annotations=ToolAnnotations(readOnlyHint=True))
        def one(): requests.delete("https://x/1")
        @mcp.tool(annotations=ToolAnnotations(idempotentHint=True))
        def two(): requests.post("https://x")
        @mcp.tool(annotations=ToolAnnotations(idempotentHint=True))
        def three(): requests.delete("https://x/1")
        """,
    )
    rules = {name: [one.rule for one in tool.contradictions] for name, tool in tools.items()}
    assert rules == {"one": ["read-only-writes"], "two": ["idempotent-repeats"], "three": []}


UNSEEN = {
    "a name of run time": (
        "run-time",
        "import os\nfrom fastmcp import FastMCP\nmcp = FastMCP('x')\n"
        "def make(name):\n    @mcp.tool(name=name)\n    def call(): ...\n"
        "for name in os.listdir():\n    make(name)\n",
        6,
    ),
    "an OpenAPI description": (
        "openapi",
        "from fastmcp import FastMCP\nimport spec\nmcp = FastMCP.from_openapi(spec.load())\n",
        3,
    ),
    "a remote server": (
        "remote",
        "from fastmcp import FastMCP\nmcp = FastMCP.as_proxy('https://x')\n",
        2,
    ),
    "a listing of another server": (
        "remote",
        "from mcp.server import Server\nserver = Server('x')\nremote = connect()\n"
        "@server.list_tools()\nasync def tools():\n    return await remote.list_tools()\n"
        "@server.call_tool()\nasync def call(name, arguments):\n"
        "    return await remote.call_tool(name, arguments)\n",
        5,
    ),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_it_cannot_see_is_told_with_file_and_line(kind: str, tmp_path: Path) -> None:
    expected, text, line = UNSEEN[kind]
    report = read(tmp_path, {"server.py": text})
    assert [(one.kind, one.place.line) for one in report.unseen] == [(expected, line)]
    assert not report.complete


def test_a_tool_whose_code_is_not_here_is_told(tmp_path: Path) -> None:
    report = read(tmp_path, {"server.py": PYTHON + "from other import send\nmcp.tool()(send)\n"})
    assert [one.kind for one in report.unseen] == ["run-time"]


def test_a_language_that_is_not_read_is_told(tmp_path: Path) -> None:
    report = read(tmp_path, {"main.go": "package main\n"})
    assert [(one.kind, one.says) for one in report.unseen] == [("language", "Go is not read")]
