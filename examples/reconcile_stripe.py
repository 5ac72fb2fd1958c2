"""Two charges whose process died, and code that asks Stripe what became of them.

    pip install effectfence-asyncio stripe
    python -m examples.reconcile_stripe

Two workers are killed (SIGKILL): one after Stripe took its charge and before that was recorded, one
before its request left. After the restart nobody knows, and nothing runs again, until a reconciler
looks for each charge by the idempotency key that its effect had. What is there is settled, and the
next caller gets it; what is not there after the grace is cleared, and the next caller charges.

"Stripe" is a local server that keeps charges, searches them, and honours Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import stripe

from effectfence import (
    DidNotHappen,
    EffectFence,
    EffectRequest,
    Happened,
    OutcomeUnknown,
    UnknownEffect,
    current_effect,
)

GRACE_SECONDS = 1.0
"""So that the example ends soon. Against the real one: longer than a request can be under way and a
charge can take to be found; the default is 15 minutes."""


def order(number: int) -> EffectRequest:
    return EffectRequest(
        intent=f"charge:order-{number}",
        domain=f"order:{number}",
        tool="charge_card",
        args={"cents": 4900},
        agent="billing",
    )


class Bank:
    """What the service does with Stripe: charge, and look a charge up."""

    def __init__(self, url: str) -> None:
        self._http = stripe.RequestsClient()
        self._stripe = stripe.StripeClient(
            "sk_test_123", base_addresses={"api": url}, http_client=self._http
        )

    def charge(self, cents: int) -> dict[str, Any]:
        """The effect: the key goes out twice, for Stripe to deduplicate by and for us to find."""
        key = current_effect().idempotency_key
        made = self._stripe.v1.charges.create(
            {
                "amount": cents,
                "currency": "eur",
                "source": "tok_visa",
                "metadata": {"effect": key},
            },
            {"idempotency_key": key},
        )
        return {"charge": made.id, "cents": made.amount}

    async def find(self, effect: UnknownEffect) -> Happened | DidNotHappen:
        """The reconciler: is there a charge that bears the key of this effect?"""
        query = f"metadata['effect']:'{effect.idempotency_key}'"
        found = await asyncio.to_thread(self._stripe.v1.charges.search, {"query": query})
        for made in found.data:
            return Happened({"charge": made.id, "cents": made.amount}, f"found {made.id}")
        return DidNotHappen("no charge bears its key")

    def close(self) -> None:
        self._http.close()


async def work(ledger: Path, bank: Bank, number: int, dies: str) -> None:
    """A worker that dies before its request leaves, or after it was answered."""

    def charge() -> dict[str, Any]:
        if dies == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        bank.charge(4900)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")

    async with EffectFence.open(ledger) as fence:
        await fence.run(order(number), charge)


async def restarted(ledger: Path, bank: Bank) -> None:
    """The service. It asks here and there; `async with fence.reconciling():` asks by itself."""
    async with EffectFence.open(ledger) as fence:
        fence.reconciler("charge_card", name="stripe", grace_seconds=GRACE_SECONDS)(bank.find)

        for number in (1, 2):
            try:
                await fence.run(order(number), bank.charge, 4900)
            except OutcomeUnknown as unknown:
                print(f"order {number}: refused, {unknown.reason}")

        report = await fence.reconcile()
        print(f"asked: settled={report.settled} too early to say no={report.too_early}")
        while report.left:
            await asyncio.sleep(0.05)
            report = await fence.reconcile()
        print(f"asked after the grace: cleared={report.cleared}")

        for number in (1, 2):
            cert = await fence.run(order(number), bank.charge, 4900)
            print(f"order {number}: {cert.result}")


# --- a server of Stripe's shape -------------------------------------------------------------------


class Stripe(BaseHTTPRequestHandler):
    charges: dict[str, dict[str, Any]]
    """By idempotency key."""

    def do_POST(self) -> None:
        """POST /v1/charges"""
        form = self.rfile.read(int(self.headers["content-length"])).decode()
        asked = dict(urllib.parse.parse_qsl(form))
        made = {
            "id": f"ch_{len(self.charges) + 1}",
            "object": "charge",
            "amount": int(asked["amount"]),
            "metadata": {"effect": asked["metadata[effect]"]},
        }
        self._answer(self.charges.setdefault(self.headers["idempotency-key"], made))

    def do_GET(self) -> None:
        """GET /v1/charges/search?query=metadata['effect']:'…'"""
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        key = asked["query"][0].split("'")[3]
        found = [made for made in self.charges.values() if made["metadata"]["effect"] == key]
        self._answer({"object": "search_result", "data": found, "has_more": False})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def serving() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    Stripe.charges = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Stripe) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", Stripe.charges
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serving() as (url, charges):
        os.environ["NO_PROXY"] = "127.0.0.1"
        os.environ["XDG_CONFIG_HOME"] = folder  # where Stripe's library leaves a file
        ledger = Path(folder) / "effects.jsonl"
        for number, dies in ((1, "after"), (2, "before")):
            command = [sys.executable, __file__, url, str(ledger), str(number), dies]
            ended = subprocess.run(command, env=_env(), check=False)
            assert ended.returncode == -signal.SIGKILL, f"the worker ended: {ended.returncode}"
        print(f"two workers were killed; charges at Stripe: {len(charges)}")
        with closing(Bank(url)) as bank:
            asyncio.run(restarted(ledger, bank))
        print(f"charges at Stripe: {len(charges)}")
        assert len(charges) == 2


def _env() -> dict[str, str]:
    """The child finds what this process finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


if __name__ == "__main__":
    if len(sys.argv) == 5:
        _, stripe_url, ledger_path, order_number, moment = sys.argv
        asyncio.run(work(Path(ledger_path), Bank(stripe_url), int(order_number), moment))
    else:
        main()
