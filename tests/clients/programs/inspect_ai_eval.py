"""inspect-ai against a scripted server: URL MODEL. Prints what it got as JSON."""

import json
import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

os.environ["OPENAI_API_KEY"] = "none"
called = []


class Result(BaseModel):
    total: int


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One number.
            b: Another number.
        """
        called.append([a, b])
        return a + b

    return execute


url, name = sys.argv[1:]
found = {}
for uses_responses in (True, False):
    for effort in (None, "low"):
        called.clear()
        config = GenerateConfig(
            response_schema=ResponseSchema(name="result", json_schema=json_schema(Result)),
            reasoning_effort=effort if uses_responses else None,
            reasoning_summary="auto" if uses_responses and effort else None,
        )
        model = get_model(
            f"openai/{name}", base_url=url, api_key="none", responses_api=uses_responses, config=config, memoize=False
        )
        task = Task(
            dataset=[Sample(input="2 + 3?", target="5")], solver=[use_tools(add()), generate()], scorer=includes()
        )
        [log] = eval(task, model=model, display="none", log_dir="logs", log_samples=True)
        error = log.error.message if log.error else None
        score = log.results.scores[0].metrics["accuracy"].value if log.results else None
        found[f"{'responses' if uses_responses else 'chat'} {effort}"] = [log.status, score, called[:], error]
print(json.dumps(found))
