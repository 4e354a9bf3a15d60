"""Anthropic's client against a scripted server: URL MODEL. Prints what it got as JSON."""

import asyncio
import json
import sys

import anthropic

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Adds two numbers.", "input_schema": PARAMETERS}
ASKED = {"model": MODEL, "max_tokens": 400, "tools": [ADD], "system": "You add."}


def reply(messages: list, found: anthropic.types.Message, calls: list) -> bool:
    """Adds the answer and the results of its calls to the conversation; whether there are any."""
    messages.append({"role": "assistant", "content": found.content})
    results = []
    for block in found.content:
        if block.type == "tool_use":
            calls.append([block.input["a"], block.input["b"]])
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": str(sum(calls[-1]))})
    messages.append({"role": "user", "content": results})
    return found.stop_reason == "tool_use"


def shown(found: anthropic.types.Message, calls: list) -> dict:
    return {"text": found.content[0].text, "stop": found.stop_reason, "calls": calls}


def loop(ask) -> dict:
    messages, calls = [{"role": "user", "content": "2 + 3?"}], []
    while reply(messages, found := ask(messages), calls):
        pass
    return shown(found, calls)


async def async_loop() -> dict:
    messages, calls = [{"role": "user", "content": "2 + 3?"}], []
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as client:
        while reply(messages, found := await client.messages.create(messages=messages, **ASKED), calls):
            pass
    return shown(found, calls)


def error(client: anthropic.Anthropic, **fields: object) -> list:
    try:
        client.messages.create(max_tokens=4, **fields)
    except anthropic.APIStatusError as found:
        return [found.status_code, found.body["error"]["type"]]
    raise AssertionError("no error")


with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:

    def streamed(messages: list) -> anthropic.types.Message:
        with client.messages.stream(messages=messages, **ASKED) as stream:
            text = "".join(stream.text_stream)
            found = stream.get_final_message()
        assert text == "".join(one.text for one in found.content if one.type == "text")
        return found

    made: list = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        made.append([a, b])
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=400, tools=[add], messages=[{"role": "user", "content": "2 + 3?"}]
    )
    user = [{"role": "user", "content": "2 + 3?"}]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    found = {
        "create": loop(lambda messages: client.messages.create(messages=messages, **ASKED)),
        "stream": loop(streamed),
        "runner": shown(runner.until_done(), made),
        "async": asyncio.run(async_loop()),
        "models": [one.id for one in client.models.list()],
        "count": client.messages.count_tokens(model=MODEL, messages=user, tools=[ADD]).input_tokens,
        "errors": {
            "model": error(client, model="other", messages=user),
            "image": error(client, model=MODEL, messages=[{"role": "user", "content": [image]}]),
        },
    }
print(json.dumps(found))
