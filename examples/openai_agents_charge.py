"""The OpenAI Agents SDK: a tool that charges once, whatever its model and its runner do.

    pip install openai-agents
    python -m examples.openai_agents_charge

`@function_tool` above, `@fence.fenced` below. The model is the SDK's own scripted one: no key, no
network. The run that waits for a human's approval is saved, and resumed in a new process.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, Runner, RunState, function_tool, set_tracing_disabled
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call

from effectfence import EffectFence
from examples.agent_story import ModelDown, Shop, asked_to_resume, in_a_new_process, shop

set_tracing_disabled(True)


def agent(shop: Shop, fence: EffectFence, *script: Any) -> Agent[None]:
    @function_tool
    @fence.fenced(intent="charge:{order}")
    async def charge(order: str, cents: int) -> dict[str, str]:
        """Charge an order."""
        return shop.charge(order, cents)

    @function_tool(needs_approval=True)
    async def ship(order: str) -> str:
        """Ship an order, if a human agrees."""
        return f"shipped {order}"

    return Agent(name="clerk", tools=[charge, ship], model=ScriptedModel(script))


def charging(order: str, *call_ids: str) -> list[Any]:
    """One message of the model's, with a call under each of these ids."""
    arguments = {"order": order, "cents": 4900}
    return [function_call("charge", arguments, call_id=call_id) for call_id in call_ids]


DONE = [assistant_message("charged")]
FAILS = ModelStep.raise_error(ModelDown("502 from the provider"))


async def story(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        replanning = charging("replanned", "c1"), charging("replanned", "c2"), DONE
        result = await Runner.run(agent(shop, fence, *replanning), "charge it")
        assert len(set(outputs(result))) == 1
        shop.say("replanned", len(outputs(result)))

        nine = charging("nine at once", *(f"c{n}" for n in range(9)))
        result = await Runner.run(agent(shop, fence, nine, DONE), "charge it")
        assert len(set(outputs(result))) == 1
        shop.say("nine at once", len(outputs(result)))

        for last in (FAILS, FAILS, DONE):
            try:
                await Runner.run(agent(shop, fence, charging("run again", "c1"), last), "charge it")
            except ModelDown as error:
                print(f"  the model failed: {error}; the run is started again")
        shop.say("run again", 3)
        print(f"  replays so far: {fence.stats().replayed}, charges {fence.stats().admitted}")

        shipping = [function_call("ship", {"order": "interrupted"}, call_id="c2")]
        asking = charging("interrupted", "c1") + shipping
        result = await Runner.run(agent(shop, fence, asking), "charge it, and ship it")
        assert [each.tool_name for each in result.interruptions] == ["ship"]
        shop.saved.write_text(result.to_state().to_string())

    before = await shop.certificate("interrupted")
    in_a_new_process("examples.openai_agents_charge", shop)
    shop.say("interrupted", 2)
    assert await shop.certificate("interrupted") == before


async def resume(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        clerk = agent(shop, fence, charging("interrupted", "c7"), DONE)
        state = await RunState.from_string(clerk, shop.saved.read_text())
        for asked in state.get_interruptions():
            state.approve(asked)
        result = await Runner.run(clerk, state)
        assert result.final_output == "charged"
        receipts = [output for output in outputs(result) if "ch_" in output]
        assert len(set(receipts)) == 1
        print(f"  resumed in a new process: replays {fence.stats().replayed}, the same receipt")


def outputs(result: Any) -> list[str]:
    """What its tools answered."""
    return [str(item.output) for item in result.new_items if item.type == "tool_call_output_item"]


if __name__ == "__main__":
    found = asked_to_resume()
    if found is not None:
        asyncio.run(resume(found))
    else:
        with shop() as new:
            asyncio.run(story(new))
