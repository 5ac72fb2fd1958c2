"""Tools are found in every style in which they are declared, and nothing else is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scan.reading import JAVASCRIPT, PYTHON, javascript, python, read

DECLARED = {
    "a decorator": (
        "server.py",
        PYTHON + '@mcp.tool()\nasync def send(to: str) -> str:\n    """Send."""\n',
        {"send"},
    ),
    "a bare decorator": ("server.py", PYTHON + "@mcp.tool\ndef send(to: str): ...\n", {"send"}),
    "a decorator with a name": (
        "server.py",
        PYTHON + '@mcp.tool(name="send-mail", description="x")\ndef send(to: str): ...\n',
        {"send-mail"},
    ),
    "a decorator with a positional name": (
        "server.py",
        PYTHON + '@mcp.tool("send-mail")\ndef send(to: str): ...\n',
        {"send-mail"},
    ),
    "another receiver": (
        "server.py",
        "from mcp.server import MCPServer\napp = MCPServer('x')\n"
        "@app.tool(description='x')\ndef send(): ...\n",
        {"send"},
    ),
    "a decorator inside a function": (
        "server.py",
        "def create(server):\n    @server.tool()\n    def send(): ...\n    return server\n"
        "from fastmcp import FastMCP\ncreate(FastMCP('x'))\n",
        {"send"},
    ),
    "a prefix that a caller gives": (
        "server.py",
        "from fastmcp import FastMCP\ndef create(prefix):\n    mcp = FastMCP('x')\n"
        "    @mcp.tool(name=prefix + 'send')\n    def send(): ...\ncreate('mail_')\n",
        {"mail_send"},
    ),
    "add_tool": ("server.py", PYTHON + "def send(): ...\nmcp.add_tool(send)\n", {"send"}),
    "add_tool with a name": (
        "server.py",
        PYTHON + "def send(): ...\nmcp.add_tool(send, name='post')\n",
        {"post"},
    ),
    "a decorator called by hand": (
        "server.py",
        PYTHON + "def send(): ...\nmcp.tool(name='post')(send)\n",
        {"post"},
    ),
    "a loop over functions": (
        "server.py",
        PYTHON + "def a(): ...\ndef b(): ...\nfor f in (a, b):\n    mcp.add_tool(f)\n",
        {"a", "b"},
    ),
    "a list and a dispatcher": (
        "server.py",
        """from mcp.server import Server
import mcp.types as types
server = Server("x")
@server.list_tools()
async def tools():
    return [types.Tool(name="one", inputSchema={}), types.Tool(name="two", inputSchema={})]
@server.call_tool()
async def call(name, arguments):
    if name == "one":
        return []
""",
        {"one", "two"},
    ),
    "names of an enumeration": (
        "server.py",
        """from enum import Enum
from mcp.server import Server
from mcp.types import Tool
class Names(str, Enum):
    ONE = "first-one"
server = Server("x")
TOOLS = [Tool(name=Names.ONE, inputSchema={})]
@server.list_tools()
async def tools():
    return TOOLS
@server.call_tool()
async def call(name, arguments):
    match name:
        case Names.ONE:
            return []
""",
        {"first-one"},
    ),
    "registerTool": (
        "server.js",
        JAVASCRIPT + 'server.registerTool("send", { description: "x" }, async () => {});\n',
        {"send"},
    ),
    "server.tool": (
        "server.ts",
        JAVASCRIPT + 'server.tool("send", "x", {}, async (a: string) => ({ content: [] }));\n',
        {"send"},
    ),
    "a factory": (
        "server.js",
        JAVASCRIPT
        + """const make = (options) => server.tool(options.name, {}, async () => {});
make({ name: "one" });
make({ name: "two" });
""",
        {"one", "two"},
    ),
    "a loop over a table": (
        "server.js",
        JAVASCRIPT
        + """const tools = { a: { name: "one", run: async () => 1 }, b: { name: "two", run() {} } };
for (const tool of Object.values(tools)) server.registerTool(tool.name, {}, tool.run);
""",
        {"one", "two"},
    ),
    "request handlers": (
        "server.js",
        """import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import { ListToolsRequestSchema as l, CallToolRequestSchema as CallTool }
  from "@modelcontextprotocol/sdk/types.js";
const server = new Server({ name: "package-name" }, {});
const ONE = { name: "one", inputSchema: {} };
server.setRequestHandler(l, async () => ({ tools: [ONE, { name: "two", inputSchema: {} }] }));
server.setRequestHandler(CallTool, async (request) => {
  switch (request.params.name) { case "one": return {}; case "two": return {}; }
});
""",
        {"one", "two"},
    ),
    "minified": (
        "dist/index.js",
        'import{McpServer as e}from"@modelcontextprotocol/sdk/server/mcp.js";'
        'const t=new e({name:"x"});t.registerTool("one",{},async()=>{}),'
        't.tool("two",{},async()=>{});',
        {"one", "two"},
    ),
    "CommonJS": (
        "index.cjs",
        """const mcp_js_1 = require("@modelcontextprotocol/sdk/server/mcp.js");
const server = new mcp_js_1.McpServer({ name: "x" });
function register(s) { s.tool("one", {}, async () => {}); }
exports.register = register;
register(server);
""",
        {"one"},
    ),
    "a class that is a tool": (
        "src/tools/One.ts",
        """import { MCPTool } from "mcp-framework";
export default class One extends MCPTool<{}> {
  name = "one";
  async execute(input: {}) { return 1; }
}
""",
        {"one"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("style", DECLARED)
def test_tools_are_found_as_they_are_declared(style: str, tmp_path: Path) -> None:
    file, text, expected = DECLARED[style]
    report = read(tmp_path, {file: text})
    assert {tool.name for tool in report.tools} == expected
    assert all(tool.handler for tool in report.tools) or "list" in style


NOT_TOOLS = {
    "a package manifest": ("package.py", 'MANIFEST = {"name": "my-server", "inputSchema": {}}\n'),
    "an object with a name": (
        "server.js",
        JAVASCRIPT + 'const config = { name: "x", description: "y" };\n',
    ),
    "another framework's tool": (
        "agent.py",
        "from langchain.tools import tool\nimport mcp\n@tool\ndef search(q): ...\n",
    ),
    "a tool in a comment": ("server.py", PYTHON + "# @mcp.tool()\ndef send(): ...\n"),
    "a tool in a text": ("server.py", PYTHON + 'HELP = """\n@mcp.tool()\ndef send(): ...\n"""\n'),
}


@pytest.mark.parametrize("what", NOT_TOOLS)
def test_nothing_else_is_a_tool(what: str, tmp_path: Path) -> None:
    file, text = NOT_TOOLS[what]
    assert read(tmp_path, {file: text, "package.json": '{"name": "x"}'}).tools == []


def test_constants_of_one_name_in_several_files_stay_apart(tmp_path: Path) -> None:
    part = """
        const NAME = "{0}";
        export function register(server) {{ server.tool(NAME, {{}}, async () => {{}}); }}
    """
    report = read(
        tmp_path,
        {
            "a.js": part.format("first"),
            "b.js": part.format("second"),
            "index.js": JAVASCRIPT
            + 'import { register as a } from "./a.js";\nimport { register as b } from "./b.js";\n'
            + "a(server); b(server);\n",
        },
    )
    assert {tool.name: tool.place.file for tool in report.tools} == {
        "first": "a.js",
        "second": "b.js",
    }


def test_a_build_beside_its_source_is_not_read_twice(tmp_path: Path) -> None:
    text = JAVASCRIPT + 'server.tool("one", {}, async () => {});\n'
    report = read(tmp_path, {"src/index.ts": text, "dist/index.js": text, "build/index.js": text})
    assert [str(tool.place) for tool in report.tools] == ["src/index.ts:3"]


def test_annotations_are_told_as_declared(tmp_path: Path) -> None:
    tools = python(
        tmp_path,
        """
        from mcp.types import ToolAnnotations
        @mcp.tool(annotations=ToolAnnotations(readOnlyHint=True, idempotentHint=False))
        def one(): ...
        @mcp.tool(annotations={"destructiveHint": True})
        def two(): ...
        @mcp.tool()
        def three(): ...
        """,
    )
    assert tools["one"].annotations == {"readOnlyHint": True, "idempotentHint": False}
    assert tools["two"].annotations == {"destructiveHint": True}
    assert tools["three"].annotations == {}


def test_annotations_in_javascript_too(tmp_path: Path) -> None:
    tools = javascript(
        tmp_path,
        """
        server.registerTool("one", { annotations: { readOnlyHint: true } }, async () => {});
        server.tool("two", "d", {}, { idempotentHint: !0 }, async () => {});
        """,
    )
    assert tools["one"].annotations == {"readOnlyHint": True}
    assert tools["two"].annotations == {"idempotentHint": True}
