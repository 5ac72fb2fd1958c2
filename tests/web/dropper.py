"""A TCP proxy that loses answers: what was asked arrives, what was answered does not."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tests.web.serving import until


class Dropper:
    """In front of one port. `drop_answers`: so many connections are reset when an answer comes.
    `drop_when`: the next one is reset when this holds, whatever was answered."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.port = int(self._listening.getsockname()[1])
        self.drop_answers = 0
        self.drop_when: Callable[[], object] | None = None
        self.requests = 0

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                self._start(self._carry, client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while True:
                speaking, _, _ = select.select([client, server], [], [])
                if server in speaking and not self._answer(client, server):
                    return
                if client in speaking and not self._ask(client, server):
                    return

    def _ask(self, client: socket.socket, server: socket.socket) -> bool:
        asked = client.recv(1 << 16)
        self.requests += asked.startswith(b"POST")
        server.sendall(asked)
        if asked and (due := self.drop_when) is not None:
            self.drop_when = None

            def is_due() -> object:
                if select.select([client], [], [], 0)[0]:  # a body may come after its headers
                    server.sendall(client.recv(1 << 16))
                return due()

            until(is_due)
            return _reset(client)
        return bool(asked)

    def _answer(self, client: socket.socket, server: socket.socket) -> bool:
        answer = server.recv(1 << 16)
        if answer and self.drop_answers:
            self.drop_answers -= 1
            return _reset(client)
        client.sendall(answer)
        return bool(answer)


def _reset(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False
