"""Pydantic AI: a tool that charges once, whatever its model and its runner do.

    pip install pydantic-ai-slim
    python -m examples.pydantic_ai_charge

`@agent.tool_plain` above, `@fence.fenced` below. The model is the framework's own `FunctionModel`:
no key, no network. What waits for a human's approval is saved, and resumed in a new process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic_ai import (
    Agent,
    DeferredToolRequests,
    DeferredToolResults,
    ModelMessagesTypeAdapter,
    models,
)
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from effectfence import EffectFence
from examples.agent_story import ModelDown, Shop, asked_to_resume, in_a_new_process, shop

models.ALLOW_MODEL_REQUESTS = False  # no provider is ever asked


def agent(shop: Shop, fence: EffectFence, *script: ModelResponse | Exception) -> Agent[None, Any]:
    agent = Agent(scripted(iter(script)), output_type=[str, DeferredToolRequests])

    @agent.tool_plain
    @fence.fenced(intent="charge:{order}")
    async def charge(order: str, cents: int) -> dict[str, str]:
        """Charge an order."""
        return shop.charge(order, cents)

    @agent.tool_plain(requires_approval=True)
    async def ship(order: str) -> str:
        """Ship an order, if a human agrees."""
        return f"shipped {order}"

    return agent


def scripted(script: Iterator[ModelResponse | Exception]) -> FunctionModel:
    def say(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        message = next(script)
        if isinstance(message, Exception):
            raise message
        return message

    return FunctionModel(say)


def charging(order: str, *call_ids: str) -> ModelResponse:
    """One message of the model's, with a call under each of these ids."""
    arguments = {"order": order, "cents": 4900}
    return ModelResponse([ToolCallPart("charge", arguments, each) for each in call_ids])


DONE = ModelResponse([TextPart("charged")])
FAILS = ModelDown("502 from the provider")


async def story(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        replanning = charging("replanned", "c1"), charging("replanned", "c2"), DONE
        result = await agent(shop, fence, *replanning).run("charge it")
        assert len(set(receipts(result))) == 1
        shop.say("replanned", len(receipts(result)))

        nine = charging("nine at once", *(f"c{n}" for n in range(9)))
        result = await agent(shop, fence, nine, DONE).run("charge it")
        assert len(set(receipts(result))) == 1
        shop.say("nine at once", len(receipts(result)))

        for last in (FAILS, FAILS, DONE):
            try:
                await agent(shop, fence, charging("run again", "c1"), last).run("charge it")
            except ModelDown as error:
                print(f"  the model failed: {error}; the run is started again")
        shop.say("run again", 3)
        print(f"  replays so far: {fence.stats().replayed}, charges {fence.stats().admitted}")

        shipping = ToolCallPart("ship", {"order": "interrupted"}, "c2")
        asking = ModelResponse([*charging("interrupted", "c1").parts, shipping])
        result = await agent(shop, fence, asking).run("charge it, and ship it")
        assert [each.tool_name for each in result.output.approvals] == ["ship"]
        shop.saved.write_bytes(result.all_messages_json())

    before = await shop.certificate("interrupted")
    in_a_new_process("examples.pydantic_ai_charge", shop)
    shop.say("interrupted", 2)
    assert await shop.certificate("interrupted") == before


async def resume(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        clerk = agent(shop, fence, charging("interrupted", "c7"), DONE)
        result = await clerk.run(
            message_history=ModelMessagesTypeAdapter.validate_json(shop.saved.read_bytes()),
            deferred_tool_results=DeferredToolResults(approvals={"c2": True}),
        )
        assert result.output == "charged"
        assert len(receipts(result)) == 2
        assert len(set(receipts(result))) == 1
        print(f"  resumed in a new process: replays {fence.stats().replayed}, the same receipt")


def receipts(result: Any) -> list[str]:
    """What the tool answered to each call of the run, saved ones included."""
    parts = (part for message in result.all_messages() for part in message.parts)
    returned = (part for part in parts if isinstance(part, ToolReturnPart))
    return [str(part.content) for part in returned if part.tool_name == "charge"]


if __name__ == "__main__":
    found = asked_to_resume()
    if found is not None:
        asyncio.run(resume(found))
    else:
        with shop() as new:
            asyncio.run(story(new))
