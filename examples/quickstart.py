"""One charge per order: over a retry, a thousand duplicates, and a restart of the program.

python -m examples.quickstart
"""

import asyncio
import tempfile
from pathlib import Path

from effectfence import EffectFence, current_effect

charges = []  # what the card really saw


async def pay(ledger: Path, order_id: str, cents: int) -> list[dict[str, str]]:
    async with EffectFence.open(ledger) as fence:

        @fence.fenced(intent="charge:{order_id}", domain="order:{order_id}")
        async def charge_card(order_id: str, cents: int) -> dict[str, str]:
            key = current_effect().idempotency_key  # for a provider that takes one
            charges.append((order_id, cents, key))
            return {"charge_id": f"ch_{len(charges)}"}

        return await asyncio.gather(*(charge_card(order_id, cents) for _ in range(1000)))


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "effects.jsonl"
        receipts = await pay(ledger, "order-123", 4900)
        receipts += await pay(ledger, "order-123", 4900)  # the program restarts, and tries again

    print(f"asked {len(receipts)} times, charged {len(charges)} time(s)")
    assert len(charges) == 1
    assert all(receipt == {"charge_id": "ch_1"} for receipt in receipts)


if __name__ == "__main__":
    asyncio.run(main())
