"""CrewAI: a tool that charges once, whatever its model and its crew do.

    pip install crewai
    python -m examples.crewai_charge

`@tool` above, `@fence.fenced` of the blocking fence below: CrewAI calls plain functions, in threads
of its own. The model is a script: no key, no network. A crew that ended in the middle is started
again, in a new process too, with all its tasks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai import Agent, BaseLLM, Crew, Task
from crewai.tools import tool
from crewai.tools.tool_failure import ToolExecutionFailedError
from pydantic import PrivateAttr

from effectfence import blocking
from effectfence.blocking import BlockingFence
from examples.agent_story import ModelDown, Shop, asked_to_resume, in_a_new_process, shop


class Scripted(BaseLLM):
    """A model that says what it is told to; what the tools answered is kept."""

    _script: Iterator[Any] = PrivateAttr()
    _seen: list[str] = PrivateAttr(default_factory=list)

    def follow(self, *script: Any) -> Scripted:
        self._script = iter(script)
        return self

    def call(self, messages: Any, *_: Any, **__: Any) -> Any:
        self._seen = [str(each["content"]) for each in messages if each["role"] == "tool"]
        message = next(self._script)
        if isinstance(message, Exception):
            raise message
        return message

    def supports_function_calling(self) -> bool:
        return True

    @property
    def receipts(self) -> list[str]:
        """What the tool answered to each call of the run."""
        return self._seen


def run(shop: Shop, fence: BlockingFence, *script: Any) -> list[str]:
    @tool
    @fence.fenced(intent="charge:{order}")
    def charge(order: str, cents: int) -> dict[str, str]:
        """Charge an order."""
        return shop.charge(order, cents)

    model = Scripted(model="scripted", provider="scripted").follow(*script)
    clerk = Agent(role="clerk", goal="charge", backstory="-", llm=model, tools=[charge])
    task = Task(description="charge it", expected_output="charged", agent=clerk)
    # CrewAI's own cache of tools' answers, which ends with the crew, would hide the fence.
    Crew(agents=[clerk], tasks=[task], cache=False).kickoff()
    return model.receipts


def charging(order: str, *call_ids: str) -> list[Any]:
    """One message of the model's, with a call under each of these ids."""
    arguments = f'{{"order": "{order}", "cents": 4900}}'
    function = {"name": "charge", "arguments": arguments}
    return [{"id": each, "type": "function", "function": function} for each in call_ids]


DONE = "charged"
FAILS = ModelDown("502 from the provider")


def story(shop: Shop) -> None:
    with blocking.open(shop.ledger) as fence:
        receipts = run(shop, fence, charging("replanned", "c1"), charging("replanned", "c2"), DONE)
        assert len(set(receipts)) == 1
        shop.say("replanned", len(receipts))

        nine = charging("nine at once", *(f"c{n}" for n in range(9)))
        try:
            run(shop, fence, nine, DONE)
        except ToolExecutionFailedError:  # of CrewAI's own, which came after the tools
            print("  CrewAI ends a run at the fifth equal answer: what is charged by then, once")
        shop.say("nine at once", 9)

        again = charging("run again", "c1")
        receipts = run(shop, fence, again, FAILS, again, FAILS, again, DONE)  # CrewAI's own retries
        assert len(receipts) == 1  # of the last one
        shop.say("run again", 3)
        print(f"  replays so far: {fence.stats().replayed}, charges {fence.stats().admitted}")

        receipts = run(shop, fence, charging("interrupted", "c1"), DONE)
        shop.saved.write_text(receipts[0])  # and a human is asked

    before = asyncio.run(shop.certificate("interrupted"))
    in_a_new_process("examples.crewai_charge", shop)
    shop.say("interrupted", 2)
    assert asyncio.run(shop.certificate("interrupted")) == before


def resume(shop: Shop) -> None:
    with blocking.open(shop.ledger) as fence:
        receipts = run(shop, fence, charging("interrupted", "c7"), DONE)
        assert receipts == [shop.saved.read_text()]
        print(f"  resumed in a new process: replays {fence.stats().replayed}, the same receipt")


if __name__ == "__main__":
    found = asked_to_resume()
    if found is not None:
        resume(found)
    else:
        with shop() as new:
            story(new)
