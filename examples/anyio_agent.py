"""An agent loop of one's own, on anyio: its tool charges once, whatever its model does.

    python -m examples.anyio_agent

The loop runs all calls of a message at the same time, starts a run over when the model fails, and
resumes in a new process what waited for a human. The tool is a plain function behind a decorator.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from effectfence import EffectFence
from examples.agent_story import ModelDown, Shop, asked_to_resume, in_a_new_process, shop

Call = dict[str, Any]
Message = list[Call] | Exception | str
"""What a model says: calls, or a failure, or its last word."""


def call(call_id: str, order: str) -> Call:
    return {"id": call_id, "tool": "charge", "arguments": {"order": order, "cents": 4900}}


# What the model is going to say, run by run.
REPLANNED: list[Message] = [[call("c1", "replanned")], [call("c2", "replanned")], "charged"]
NINE: list[Message] = [[call(f"c{n}", "nine at once") for n in range(9)], "charged"]
FAILING: list[Message] = [[call("c1", "run again")], ModelDown("502 from the provider")]
INTERRUPTED: list[Message] = [[call("c1", "interrupted")]]
RESUMED: list[Message] = [[call("c7", "interrupted")], "approved, and charged"]


class Agent:
    """A loop around a model's messages."""

    def __init__(self, tools: dict[str, Callable[..., Awaitable[Any]]]) -> None:
        self._tools = tools

    async def run(self, script: list[Message]) -> list[Any]:
        """The results of all its calls, in their order."""
        results: list[Any] = []
        for message in script:
            if isinstance(message, Exception):
                raise message
            if isinstance(message, list):
                results += await self._call_all(message)
        return results

    async def _call_all(self, calls: list[Call]) -> list[Any]:
        results: list[Any] = [None] * len(calls)

        async def one(place: int, call: Call) -> None:
            results[place] = await self._tools[call["tool"]](**call["arguments"])

        async with anyio.create_task_group() as group:
            for place, each in enumerate(calls):
                group.start_soon(one, place, each)
        return results


def agent(shop: Shop, fence: EffectFence) -> Agent:
    @fence.fenced(intent="charge:{order}")
    async def charge(order: str, cents: int) -> dict[str, str]:
        """Charge an order."""
        return shop.charge(order, cents)

    return Agent({"charge": charge})


async def story(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        running = agent(shop, fence)

        results = await running.run(REPLANNED)
        assert results == [results[0]] * 2
        shop.say("replanned", 2)

        results = await running.run(NINE)
        assert results == [results[0]] * 9
        shop.say("nine at once", 9)

        for script in (FAILING, FAILING, [*FAILING[:1], "charged"]):
            try:
                await running.run(script)
            except ModelDown as error:
                print(f"  the model failed: {error}; the run is started again")
        shop.say("run again", 3)
        print(f"  replays so far: {fence.stats().replayed}, charges {fence.stats().admitted}")

        results = await running.run(INTERRUPTED)
        shop.saved.write_text(json.dumps(results))  # and a human is asked

    before = await shop.certificate("interrupted")
    in_a_new_process("examples.anyio_agent", shop)
    shop.say("interrupted", 2)
    assert await shop.certificate("interrupted") == before


async def resume(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        results = await agent(shop, fence).run(RESUMED)
        assert results == json.loads(shop.saved.read_text())
        print(f"  resumed in a new process: replays {fence.stats().replayed}, the same receipt")


if __name__ == "__main__":
    found = asked_to_resume()
    if found is not None:
        anyio.run(resume, found)
    else:
        with shop() as new:
            anyio.run(story, new)
