"""LangGraph: a tool that charges once, whatever the model and the graph around it do.

    pip install langgraph langgraph-checkpoint-sqlite
    python -m examples.langgraph_charge

`@tool` above, `@fence.fenced` below. The model is a script: no key, no network. A node that is
interrupted runs again *from its beginning* when the graph is resumed, with all that it did before:
here it charges before it asks a human, and is resumed in a new process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

from effectfence import EffectFence
from examples.agent_story import ModelDown, Shop, asked_to_resume, in_a_new_process, shop

THREAD: Any = {"configurable": {"thread_id": "order"}}


def charge_tool(shop: Shop, fence: EffectFence) -> BaseTool:
    @tool
    @fence.fenced(intent="charge:{order}")
    async def charge(order: str, cents: int) -> dict[str, str]:
        """Charge an order."""
        return shop.charge(order, cents)

    return charge


def agent(charge: BaseTool, *script: AIMessage | Exception) -> Any:
    """The usual loop: the model, its tools, the model again."""
    graph = StateGraph(MessagesState)
    graph.add_node("model", scripted(iter(script)))
    graph.add_node("tools", ToolNode([charge], handle_tool_errors=False))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def scripted(script: Iterator[AIMessage | Exception]) -> Callable[[MessagesState], Any]:
    def model(state: MessagesState) -> dict[str, list[AIMessage]]:
        message = next(script)
        if isinstance(message, Exception):
            raise message
        return {"messages": [message]}

    return model


def clerk(charge: BaseTool, saver: AsyncSqliteSaver) -> Any:
    """A graph whose one node charges, and then asks a human."""

    async def fulfil(state: MessagesState) -> dict[str, list[AnyMessage]]:
        receipt = await charge.ainvoke({"order": "interrupted", "cents": 4900})
        said = interrupt({"charged": receipt, "question": "ship it?"})
        return {"messages": [AIMessage(f"{said}: {receipt}")]}

    graph = StateGraph(MessagesState)
    graph.add_node("fulfil", fulfil)
    graph.add_edge(START, "fulfil")
    graph.add_edge("fulfil", END)
    return graph.compile(checkpointer=saver)


def charging(order: str, *call_ids: str) -> AIMessage:
    """One message of the model's, with a call under each of these ids."""
    arguments = {"order": order, "cents": 4900}
    return AIMessage(
        "", tool_calls=[{"name": "charge", "args": arguments, "id": each} for each in call_ids]
    )


DONE = AIMessage("charged")
FAILS = ModelDown("502 from the provider")
TASK: Any = {"messages": [("user", "charge it")]}


async def story(shop: Shop) -> None:
    async with EffectFence.open(shop.ledger) as fence:
        charge = charge_tool(shop, fence)

        replanning = charging("replanned", "c1"), charging("replanned", "c2"), DONE
        state = await agent(charge, *replanning).ainvoke(TASK)
        assert len(set(receipts(state))) == 1
        shop.say("replanned", len(receipts(state)))

        nine = charging("nine at once", *(f"c{n}" for n in range(9)))
        state = await agent(charge, nine, DONE).ainvoke(TASK)
        assert len(set(receipts(state))) == 1
        shop.say("nine at once", len(receipts(state)))

        for last in (FAILS, FAILS, DONE):
            try:
                await agent(charge, charging("run again", "c1"), last).ainvoke(TASK)
            except ModelDown as error:
                print(f"  the model failed: {error}; the run is started again")
        shop.say("run again", 3)
        print(f"  replays so far: {fence.stats().replayed}, charges {fence.stats().admitted}")

        async with AsyncSqliteSaver.from_conn_string(str(shop.saved)) as saver:
            state = await clerk(charge, saver).ainvoke(TASK, THREAD)
        assert [each.value["question"] for each in state["__interrupt__"]] == ["ship it?"]

    before = await shop.certificate("interrupted")
    in_a_new_process("examples.langgraph_charge", shop)
    shop.say("interrupted", 2)
    assert await shop.certificate("interrupted") == before


async def resume(shop: Shop) -> None:
    async with (
        EffectFence.open(shop.ledger) as fence,
        AsyncSqliteSaver.from_conn_string(str(shop.saved)) as saver,
    ):
        graph = clerk(charge_tool(shop, fence), saver)
        asked = (await graph.aget_state(THREAD)).interrupts[0].value
        state = await graph.ainvoke(Command(resume="shipped"), THREAD)
        assert state["messages"][-1].content == f"shipped: {asked['charged']}"
        print(f"  resumed in a new process: replays {fence.stats().replayed}, the same receipt")


def receipts(state: dict[str, list[AnyMessage]]) -> list[str]:
    """What the tool answered to each call of the run."""
    return [str(each.content) for each in state["messages"] if isinstance(each, ToolMessage)]


if __name__ == "__main__":
    found = asked_to_resume()
    if found is not None:
        asyncio.run(resume(found))
    else:
        with shop() as new:
            asyncio.run(story(new))
