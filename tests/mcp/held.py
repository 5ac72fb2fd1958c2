"""A real server, and a word on what reaches it: `python -I -S held.py FOLDER COMMAND …`.

Every `tools/call` that comes is appended to FOLDER/calls, and every answer to one to FOLDER/answers
when the server has given it. While FOLDER/hold is there, such answers wait: what they tell of has
happened, and nobody has heard of it. All other bytes pass as they are.
"""

import json
import os
import subprocess
import sys
import threading
import time

folder, *command = sys.argv[1:]
server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert server.stdin is not None
assert server.stdout is not None
calls = set()


def note(name: str, line: bytes) -> None:
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.rstrip(b"\n") + b"\n")
    os.close(file)


def forward() -> None:
    assert server.stdin is not None
    for line in sys.stdin.buffer:
        said = json.loads(line)
        if said.get("method") == "tools/call":
            calls.add(json.dumps(said["id"]))
            note("calls", line)
        server.stdin.write(line)
        server.stdin.flush()
    server.stdin.close()


threading.Thread(target=forward, daemon=True).start()
for line in server.stdout:
    said = json.loads(line)
    if "method" not in said and json.dumps(said.get("id")) in calls:
        note("answers", line)
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.001)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
os._exit(server.wait())
