"""pydantic-ai against a scripted server: URL MODEL. Prints what it got as JSON.

An agent with a tool and a typed result, which it asks for as a call, as a schema, and in the prompt.
"""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Result(BaseModel):
    total: int


url, model = sys.argv[1:]
provider = OpenAIProvider(base_url=url, api_key="none")
found = {}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    for form in (ToolOutput, NativeOutput, PromptedOutput):
        agent = Agent(kind(model, provider=provider), output_type=form(Result))
        called = []

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            called.append([a, b])  # noqa: B023
            return a + b

        done = agent.run_sync("2 + 3?")
        again = agent.run_sync("And again?", message_history=done.all_messages())
        with_stream = agent.run_stream_sync("2 + 3?")
        streamed = with_stream.get_output()
        found[f"{kind.__name__} {form.__name__}"] = [done.output.total, again.output.total, streamed.total, called]
print(json.dumps(found))
