"""One `tools/call` on its way through `wrap`, and how it is told "no"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from effectfence.errors import NotExecuted
from effectfence.mcp import wire
from effectfence.mcp.policy import ToolPolicy
from effectfence.mcp.wire import Id, Message

REFUSED: Final = "effectfence/refused"
"""In a result's `_meta`: why nothing ran now; `{code, ran, intent}`."""


class NotSent(NotExecuted):
    """The server had ended before the request was written to it: nothing ran."""


class ServerEnded(Exception):
    """The server ended after the request was written to it, and before it answered."""


@dataclass(eq=False)
class Call:
    """`answer` takes the line of its answer, or nothing (`b""`) when nobody wants it any more."""

    message: Message
    tool: str
    policy: ToolPolicy
    answer: Callable[[bytes], None]
    id: Id
    cancelled: bool = False
    agent: str = "wrap"

    def reply(self, line: bytes) -> None:
        self.answer(b"" if self.cancelled else line)

    def reply_again(self, line: bytes) -> None:
        """Somebody else's answer, readdressed."""
        self.reply(wire.readdressed(line, self.message.id_bytes()))

    def reply_result(self, result: bytes) -> None:
        self.reply(wire.answer(self.message.id_bytes(), result))

    def refuse(self, code: str, ran: bool | None, intent: str | None, text: str) -> None:
        """A tool result that says why this call did not run."""
        facts = {"code": code, "ran": ran, "intent": intent}
        modern = wire.is_modern(self.message)
        self.reply_result(wire.tool_error(f"effectfence: {text}", {REFUSED: facts}, modern=modern))
