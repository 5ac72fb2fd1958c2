"""An odd MCP server, of the standard library alone: it says everything that a server may say.

    python -I -S odd_server.py [--effects FILE] [--heard FILE] [--gates FOLDER] [FLAG ...]

`--effects`: a line for every execution, written before the answer. `--heard`: every line that
came, byte for byte. A tool whose `gate` is named waits until the file of that name is in `--gates`
(or one called `all`). Each tool call runs in a thread. Its own words are written by hand: the
digits and the spaces are the point.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

NUMBERS = (
    '{"one":1.0,"hundred":1e2,"dime":0.10,"big":123456789012345678901234567890,'
    '"id":9007199254740993,"nought":-0.0,"tiny":1E-7}'
)
READS = ("look", "peek")
WRITES = (
    "charge", "slow", "declined", "broken", "invalid", "missing", "die", "big", "progress",
    "sample", "elicit", "roots", "ask", "task", "grow", "noise", "batched", "hold_output", "seen",
    "fickle",
)  # fmt: skip
MODERN = "io.modelcontextprotocol/protocolVersion"


class Digits(str):
    """A number as it was written."""


class Server:
    def __init__(self, options: dict[str, str], flags: set[str]) -> None:
        self.options = options
        self.flags = flags
        self.lock = threading.Lock()
        self.effects = 0
        self.answers: dict[str, queue.Queue[str]] = {}
        self.asked = 0
        self.reads = 0
        self.grown = False
        self.cancelled: list[Any] = []

    # --- in and out -------------------------------------------------------------------------------

    def run(self) -> None:
        if "early-noise" in self.flags:
            self.write("starting up, please wait")
        for line in sys.stdin.buffer:
            self.note("--heard", line.removesuffix(b"\n"))
            text = line.decode(errors="replace")  # as lenient as they come
            try:
                value = json.loads(text.removeprefix("\ufeff"), parse_float=Digits)
            except (ValueError, RecursionError):
                self.write('{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"what?"}}')
                continue
            if isinstance(value, list):
                answers = [
                    self.handle(each, json.dumps(each)) for each in value if isinstance(each, dict)
                ]
                said = [each for each in answers if each]
                if said:
                    self.write("[" + ",".join(said) + "]")
            elif not isinstance(value, dict):
                continue
            elif value.get("method") == "tools/call":
                threading.Thread(target=self.answer, args=(value, text), daemon=True).start()
            else:
                self.answer(value, text)
        if "ignores-end" in self.flags:
            while True:
                time.sleep(3600)
        sys.exit(int(self.options.get("--exit", "0")))

    def write(self, line: str) -> None:
        data = line.encode() + b"\n"
        with self.lock:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

    def note(self, option: str, line: bytes) -> None:
        if option in self.options:
            file = os.open(self.options[option], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(file, line + b"\n")
            os.close(file)

    def effect(self, tool: str, arguments: Any) -> int:
        with self.lock:
            self.effects += 1
            count = self.effects
        self.note("--effects", json.dumps({"tool": tool, "args": arguments}).encode())
        return count

    def wait_for(self, gate: str) -> None:
        folder = self.options["--gates"]
        while not any(os.path.exists(os.path.join(folder, name)) for name in (gate, "all")):
            time.sleep(0.001)

    # --- messages ---------------------------------------------------------------------------------

    def answer(self, message: Any, text: str) -> None:
        if answer := self.handle(message, text):
            self.write(answer)

    def handle(self, message: Any, text: str) -> str:
        if "method" not in message:
            self.answers[str(message.get("id"))].put(text.strip())
            return ""
        params = message.get("params") or {}
        method = message["method"].replace("/", "_").replace("notifications_", "on_")
        handler = getattr(self, method, None)
        if "id" not in message:
            if handler is not None:
                handler(params)
            return ""
        if method == "tools_call":
            body = self.call(params, message["id"])
        elif handler is not None:
            body = '"result":' + handler(params)
        elif message["method"].startswith("odd/"):
            body = '"result":{"heard":' + json.dumps(text.strip()) + ',"numbers":' + NUMBERS + "}"
        else:
            body = '"error":{"code":-32601,"message":"no such method","data":{"odd":[1.0,1e2]}}'
        if not body:
            return ""
        return '{"jsonrpc":"2.0", "id" :' + id_text(message["id"]) + "," + body + ',"odd":0.10}'

    def request(self, method: str, params: str) -> str:
        """Ask the client; its answer, as it came."""
        with self.lock:
            self.asked += 1
            id = f"odd-{self.asked}"
        self.answers[id] = queue.Queue()
        self.write(f'{{"jsonrpc":"2.0","id":"{id}","method":"{method}","params":{params}}}')
        return self.answers[id].get()

    def say(self, method: str, params: str) -> None:
        self.write(f'{{"jsonrpc":"2.0","method":"{method}","params":{params}}}')

    # --- everything but tools ---------------------------------------------------------------------

    def initialize(self, params: Any) -> str:
        if "dies-in-handshake" in self.flags:
            os._exit(3)
        return (
            '{"protocolVersion":' + json.dumps(params.get("protocolVersion"))
            + ',"capabilities":{"tools":{"listChanged":true},"resources":{"subscribe":true},'
            '"prompts":{},"completions":{},"logging":{},"tasks":{"list":{}},'
            '"experimental":{"odd/warp":{"factor":9.0}}},'
            '"serverInfo":{"name":"odd","version":"1","hue":"violet"},"instructions":"Be odd."}'
        )  # fmt: skip

    def server_discover(self, params: Any) -> str:
        return (
            '{"resultType":"complete","supportedVersions":["2026-07-28"],'
            '"capabilities":{"tools":{}},"serverInfo":{"name":"odd","version":"1"}}'
        )

    def ping(self, params: Any) -> str:
        return "{}"

    def tools_list(self, params: Any) -> str:
        """On two pages, when asked to."""
        names = (*READS, *WRITES)
        cursor = ""
        if "pages" in self.flags:
            page = params.get("cursor")
            names = names[len(READS) :] if page is None else READS
            cursor = ',"nextCursor":"second"' if page is None else ""
        kind = '"resultType":"complete",' if MODERN in (params.get("_meta") or {}) else ""
        return "{" + kind + '"tools":[' + ",".join(map(self.tool, names)) + "]" + cursor + "}"

    def tool(self, name: str) -> str:
        reads = name in READS and not (name == "peek" and self.grown)
        hint = "true" if reads else "false"
        return (
            f'{{"name":"{name}","inputSchema":{{"type":"object"}},"odd":1.50,'
            f'"annotations":{{"readOnlyHint":{hint}}}}}'
        )

    def resources_list(self, params: Any) -> str:
        return '{"resources":[{"uri":"odd://a","name":"a","size":1.0}],"nextCursor":"p2"}'

    def resources_templates_list(self, params: Any) -> str:
        return '{"resourceTemplates":[{"uriTemplate":"odd://{x}","name":"x"}]}'

    def resources_read(self, params: Any) -> str:
        return '{"contents":[{"uri":"odd://a","blob":"AAE=","mimeType":"x/odd"}]}'

    def resources_subscribe(self, params: Any) -> str:
        self.say("notifications/resources/updated", '{"uri":"odd://a"}')
        self.say("notifications/resources/list_changed", "{}")
        return "{}"

    def prompts_list(self, params: Any) -> str:
        self.say("notifications/prompts/list_changed", "{}")
        return '{"prompts":[{"name":"p","arguments":[{"name":"a","required":true}]}]}'

    def prompts_get(self, params: Any) -> str:
        return '{"messages":[{"role":"user","content":{"type":"text","text":"\\u00e9é"}}]}'

    def completion_complete(self, params: Any) -> str:
        return '{"completion":{"values":["a","b"],"total":2,"hasMore":false}}'

    def logging_setLevel(self, params: Any) -> str:
        self.say("notifications/message", '{"level":"info","logger":"odd","data":' + NUMBERS + "}")
        return "{}"

    def tasks_list(self, params: Any) -> str:
        return '{"tasks":[]}'

    def on_cancelled(self, params: Any) -> None:
        self.cancelled.append(params.get("requestId"))

    def on_odd_ping(self, params: Any) -> None:
        self.say("notifications/odd/pong", json.dumps(params))

    # --- tools ------------------------------------------------------------------------------------

    def call(self, params: Any, id: Any) -> str:
        tool = params.get("name")
        arguments = params.get("arguments") or {}
        if not isinstance(tool, str) or tool not in (*READS, *WRITES):
            return '"error":{"code":-32602,"message":"unknown tool","data":{"tool":1.0}}'
        if "gate" in arguments and tool != "slow":
            self.wait_for(arguments["gate"])
        handler = getattr(self, f"tool_{tool}")
        return str(handler(tool, arguments, params))

    def charged(self, tool: str, arguments: Any, params: Any) -> str:
        count = self.effect(tool, arguments)
        return done(f"receipt {count}", f',"structuredContent":{NUMBERS},"odd":{{"x":1e0}}', params)

    def tool_charge(self, tool: str, arguments: Any, params: Any) -> str:
        return self.charged(tool, arguments, params)

    def tool_slow(self, tool: str, arguments: Any, params: Any) -> str:
        """The effect comes first, the answer when the gate is open."""
        count = self.effect(tool, arguments)
        self.wait_for(arguments["gate"])
        how = arguments.get("then")
        if how == "declined":
            return result('{"isError":true,"content":[{"type":"text","text":"late: timeout"}]}')
        if how == "broken":
            return '"error":{"code":-32000,"message":"late"}'
        return done(f"receipt {count}", "", params)

    def tool_declined(self, tool: str, arguments: Any, params: Any) -> str:
        count = self.effect(tool, arguments)
        return result(
            f'{{"isError":true,"content":[{{"type":"text","text":"declined {count}"}}],"x":1.0}}'
        )

    def tool_broken(self, tool: str, arguments: Any, params: Any) -> str:
        count = self.effect(tool, arguments)
        return f'"error":{{"code":-32000,"message":"broken {count}"}}'

    def tool_invalid(self, tool: str, arguments: Any, params: Any) -> str:
        count = self.effect(tool, arguments)
        return f'"error":{{"code":-32602,"message":"invalid {count}"}}'

    def tool_missing(self, tool: str, arguments: Any, params: Any) -> str:
        count = self.effect(tool, arguments)
        return f'"error":{{"code":-32601,"message":"missing {count}"}}'

    def tool_fickle(self, tool: str, arguments: Any, params: Any) -> str:
        """Declines once, then does it."""
        if self.effect(tool, arguments) == 1:
            return result('{"isError":true,"content":[{"type":"text","text":"not now"}]}')
        return done("receipt", "", params)

    def tool_die(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        if arguments.get("how") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(int(arguments.get("code", 7)))

    def tool_big(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        return done("x" * int(arguments["bytes"]), "", params)

    def tool_look(self, tool: str, arguments: Any, params: Any) -> str:
        self.reads += 1
        return done(f"look {self.reads}", "", params)

    def tool_peek(self, tool: str, arguments: Any, params: Any) -> str:
        return self.tool_look(tool, arguments, params)

    def tool_progress(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        token = json.dumps((params.get("_meta") or {}).get("progressToken"))
        for step in range(3):
            self.say(
                "notifications/progress",
                f'{{"progressToken":{token},"progress":{step}.50,"total":3.0,'
                f'"_meta":{{"odd":{step}}}}}',
            )
        return done("progressed", "", params)

    def asks(self, method: str, question: str) -> str:
        heard = self.request(method, question)
        return result('{"content":[{"type":"text","text":' + json.dumps(heard) + "}]}")

    def tool_sample(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        return self.asks("sampling/createMessage", '{"messages":[],"maxTokens":10,"t":0.70}')

    def tool_elicit(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        return self.asks("elicitation/create", '{"message":"sure?","requestedSchema":{}}')

    def tool_roots(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        return self.asks("roots/list", "{}")

    def tool_ask(self, tool: str, arguments: Any, params: Any) -> str:
        """Of 2026-07-28: more input is required, until it is there."""
        if "inputResponses" not in params:
            return result(
                '{"resultType":"input_required","requestState":"state-1","inputRequests":'
                '{"sure":{"method":"elicitation/create","params":{"message":"sure?"}}}}'
            )
        count = self.effect(tool, [arguments, params["inputResponses"]])
        return done(f"receipt {count}", "", params)

    def tool_task(self, tool: str, arguments: Any, params: Any) -> str:
        """Goes on elsewhere."""
        self.effect(tool, arguments)
        return result('{"resultType":"task","task":{"taskId":"t1","status":"working"}}')

    def tool_grow(self, tool: str, arguments: Any, params: Any) -> str:
        """From now on `peek` writes."""
        self.grown = True
        self.say("notifications/tools/list_changed", "{}")
        return done("grown", "", params)

    def tool_noise(self, tool: str, arguments: Any, params: Any) -> str:
        self.effect(tool, arguments)
        for line in ("npm notice: hello", "", "[not json", "12", '"text"', "nul\0byte"):
            self.write(line)
        sys.stderr.write("a warning\n")
        sys.stderr.flush()
        return done("noisy", "", params)

    def tool_batched(self, tool: str, arguments: Any, params: Any) -> str:
        """Its answer comes in a batch of its own writing."""
        count = self.effect(tool, arguments)
        word = '{"jsonrpc":"2.0","method":"notifications/odd","params":{"x":1.0}}'
        body = f'{{"content":[{{"type":"text","text":"receipt {count}"}}]}}'
        answer = f'{{"jsonrpc":"2.0","id":{id_text(arguments["id"])},"result":{body}}}'
        self.write(f"[{word}, {answer}]")
        return ""

    def tool_seen(self, tool: str, arguments: Any, params: Any) -> str:
        """What was cancelled by now."""
        return done(json.dumps(self.cancelled), "", params)

    def tool_hold_output(self, tool: str, arguments: Any, params: Any) -> str:
        """A grandchild that holds the output open, and ends neither by itself nor when asked to."""
        script = "import os,signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        script += "os.write(2, b'!')\nwhile True: time.sleep(3600)"
        ready, says_so = os.pipe()
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script],
            stdin=subprocess.DEVNULL,
            stderr=says_so,
            start_new_session=arguments.get("apart", False),
        )
        os.read(ready, 1)
        return done(str(started.pid), "", params)


def id_text(id: Any) -> str:
    return str(id) if isinstance(id, Digits) else json.dumps(id, ensure_ascii=False)


def result(text: str) -> str:
    return '"result":' + text


def done(text: str, more: str, params: Any) -> str:
    kind = '"resultType":"complete",' if MODERN in (params.get("_meta") or {}) else ""
    return result(
        "{ " + kind + '"content":[{"type":"text","text":' + json.dumps(text) + "}]" + more
        + ',"_meta":{"odd/trace":"é\\u00e9"} }'
    )  # fmt: skip


def main() -> None:
    options: dict[str, str] = {}
    flags: set[str] = set()
    words = iter(sys.argv[1:])
    for word in words:
        if word.startswith("--"):
            options[word] = next(words)
        else:
            flags.add(word)
    if "ignores-term" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Server(options, flags).run()


main()
