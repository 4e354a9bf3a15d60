"""openai-agents against a scripted server: URL MODEL. Prints what it got as JSON."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

called = []


class Result(BaseModel):
    total: int


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    called.append([a, b])
    return a + b


async def main() -> None:
    url, model = sys.argv[1:]
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none")
    found = {}
    settings = {
        "OpenAIResponsesModel": ModelSettings(
            reasoning=Reasoning(effort="low", summary="auto"),
            verbosity="low",
            response_include=["reasoning.encrypted_content"],
            store=False,
        ),
        "OpenAIChatCompletionsModel": ModelSettings(include_usage=True),
    }
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        called.clear()
        agent = Agent(
            name="adder",
            instructions="Add.",
            model=kind(model, client),
            tools=[add],
            output_type=Result,
            model_settings=settings[kind.__name__],
        )
        done = await Runner.run(agent, "2 + 3?")
        again = await Runner.run(agent, [*done.to_input_list(), {"role": "user", "content": "And again?"}])
        stream = Runner.run_streamed(agent, "2 + 3?")
        async for _ in stream.stream_events():
            pass
        found[kind.__name__] = [done.final_output.total, again.final_output.total, stream.final_output.total, called[:]]
    print(json.dumps(found))


asyncio.run(main())
