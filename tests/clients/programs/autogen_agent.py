"""autogen against a scripted server: URL MODEL. Prints what it got as JSON."""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

called = []


class Result(BaseModel):
    total: int


async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    called.append([a, b])
    return a + b


async def main() -> None:
    url, model = sys.argv[1:]
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=url,
        api_key="none",
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
    )
    tool = FunctionTool(add, "Adds two numbers.", strict=True)
    agent = AssistantAgent(
        "adder", client, tools=[tool], output_content_type=Result, reflect_on_tool_use=True, max_tool_iterations=3
    )
    done = await agent.run(task="2 + 3?")
    streamed = None
    async for one in agent.run_stream(task="And again?"):
        streamed = one
    plain = AssistantAgent("plain", client, tools=[add], model_client_stream=True, max_tool_iterations=3)
    async for one in plain.run_stream(task="2 + 3?"):
        last = one
    print(
        json.dumps(
            [done.messages[-1].content.total, streamed.messages[-1].content.total, last.messages[-1].content, called]
        )
    )


asyncio.run(main())
