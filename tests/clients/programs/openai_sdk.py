"""OpenAI's client, sync and async: prints what it received as one JSON object. Runs in the client's own environment."""

import asyncio
import json
import sys

import openai

URL, MODEL = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "add two numbers"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
SEEDED = {"model": MODEL, "max_tokens": 16, "temperature": 0.7, "seed": 5}


def joined(chunks: list) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def sync() -> dict:
    found = {}
    with openai.OpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        found["models"] = [one.id for one in client.models.list()]
        whole = client.chat.completions.create(messages=MESSAGES, **SEEDED)
        found["chat"] = whole.choices[0].message.content
        stream = client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SEEDED
        )
        chunks = list(stream)
        found["streamed"] = joined(chunks)
        found["usage"] = [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens]
        text = client.completions.create(prompt="def", **SEEDED)
        found["text"] = text.choices[0].text
        found["text_streamed"] = "".join(
            one.choices[0].text for one in client.completions.create(prompt="def", stream=True, **SEEDED)
        )
        called = client.chat.completions.create(
            messages=MESSAGES, tools=[TOOL], tool_choice="required", model=MODEL, max_tokens=120, temperature=0
        )
        [call, *_] = called.choices[0].message.tool_calls
        found["tool"] = [call.function.name, json.loads(call.function.arguments)]
        response = client.responses.create(
            model=MODEL, input="add two numbers", max_output_tokens=16, temperature=0, store=False
        )
        found["response"] = [response.object, response.status, response.output_text]
        events = list(
            client.responses.create(
                model=MODEL, input="add two numbers", max_output_tokens=16, temperature=0, store=False, stream=True
            )
        )
        found["response_streamed"] = [
            "".join(one.delta for one in events if one.type == "response.output_text.delta"),
            events[0].type,
            events[-1].type,
        ]
        try:
            client.chat.completions.create(model="other", messages=MESSAGES)
        except openai.NotFoundError as error:
            found["error"] = [error.code, error.status_code]
        try:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x = 1\n" * 10_000}])
        except openai.BadRequestError as error:
            found["too_long"] = [error.code, error.status_code, error.param]
    return found


async def asynchronous() -> dict:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        whole, stream = await asyncio.gather(
            client.chat.completions.create(messages=MESSAGES, **SEEDED),
            client.chat.completions.create(messages=MESSAGES, stream=True, **SEEDED),
        )
        streamed = joined([chunk async for chunk in stream])
    return {"chat": whole.choices[0].message.content, "streamed": streamed}


print(json.dumps({"version": openai.__version__, "sync": sync(), "async": asyncio.run(asynchronous())}))
