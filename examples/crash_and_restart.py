"""The worst moment: the mail is out, and the process dies before it can say so.

    python -m examples.crash_and_restart

A child process sends a mail behind the fence and kills itself between the effect and the commit.
After the restart nobody knows whether it was sent: the fence says so, and runs nothing again.
Somebody who can know, here from the mail server's own log, settles it; from then on every retry
gets the recorded outcome.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from effectfence import EffectFence, EffectRequest, OutcomeUnknown, Replay, current_effect

INVOICE = EffectRequest(
    intent="mail:invoice-42",
    domain="customer:7",
    tool="send_mail",
    args={"to": "ada@example.org", "subject": "Invoice 42"},
    agent="billing",
)


def send_mail(server_log: Path) -> dict[str, str]:
    """The mail server: what it accepted is in its log."""
    with server_log.open("a") as log:
        log.write(f"250 accepted {current_effect().idempotency_key}\n")
    return {"status": "250 accepted"}


def was_accepted(server_log: Path, key: str) -> bool:
    return f"250 accepted {key}" in server_log.read_text()


async def send_and_die(ledger: Path, server_log: Path) -> None:
    async with EffectFence.open(ledger) as fence, fence.effect(INVOICE) as attempt:
        attempt.result = send_mail(server_log)
        os.kill(os.getpid(), signal.SIGKILL)  # before anything could be committed


async def after_restart(ledger: Path, server_log: Path) -> None:
    async with EffectFence.open(ledger) as fence:
        print("restarted; the agent tries again:")
        try:
            await fence.run(INVOICE, send_mail, server_log)
            raise AssertionError("it was run again")
        except OutcomeUnknown as unknown:
            print(f"  refused: {unknown}")

        print("what an operator sees:")
        open_ends = [record async for record in fence.intents("unknown")]
        for record in open_ends:
            print(
                f"  {record.intent}: {record.state}, {record.reason}; {record.tool} {record.args}"
            )
        assert [record.intent for record in open_ends] == [INVOICE.intent]

        key = open_ends[0].idempotency_key
        assert was_accepted(server_log, key), "else it would be `clear`"
        print("the mail server's log says that it went out, so the operator settles it:")
        print(
            f"  effectfence ledger settle {ledger.name} {INVOICE.intent} "
            """--result '{"status": "250 accepted"}' --by ada --reason 'in the server log'"""
        )
        cert = await fence.settle(
            INVOICE.intent, {"status": "250 accepted"}, by="ada", reason="in the server log"
        )

        print("the agent tries once more:")
        admission = await fence.prepare(INVOICE)
        assert isinstance(admission, Replay)
        assert admission.cert == cert
        assert cert.verify()
        print(f"  replayed: {admission.cert.result}, certificate {cert.hash[:16]}…")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger, server_log = Path(folder) / "effects.jsonl", Path(folder) / "smtp.log"
        child = subprocess.run([sys.executable, __file__, ledger, server_log], env=_env())
        assert child.returncode == -signal.SIGKILL, f"the child ended with {child.returncode}"
        print("a child sent the mail and died of SIGKILL before it could commit")
        asyncio.run(after_restart(ledger, server_log))
        sent = server_log.read_text().count("250 accepted")
    assert sent == 1
    print(f"mails sent: {sent}")


def _env() -> dict[str, str]:
    """The child finds what this process finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(send_and_die(Path(sys.argv[1]), Path(sys.argv[2])))
    else:
        main()
