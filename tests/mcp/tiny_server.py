"""An MCP server of one tool, started in ten milliseconds, that says what it does and waits.

    python -I -S tiny_server.py EFFECTS SAID GO

For each call it appends the call's number to EFFECTS (the effect), tells `E number pid` to SAID,
waits for a byte from GO, answers, and tells `A number pid`. SAID and GO are named pipes.
"""

import os
import sys

effects = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
said = os.open(sys.argv[2], os.O_WRONLY)
go = os.open(sys.argv[3], os.O_RDONLY)
rest = b""
while data := os.read(0, 65536):
    *lines, rest = (rest + data).split(b"\n")
    for line in lines:
        id, number = (line.partition(name)[2].split(b",")[0] for name in (b'"id":', b'"n":'))
        number = number.strip(b"} ")
        os.write(effects, number + b"\n")
        os.write(said, b"E %s %d\n" % (number, os.getpid()))
        os.read(go, 1)
        text = b'{"content":[{"type":"text","text":"receipt %s of %d"}]}' % (number, os.getpid())
        os.write(1, b'{"jsonrpc":"2.0","id":%s,"result":%s}\n' % (id, text))
        os.write(said, b"A %s %d\n" % (number, os.getpid()))
