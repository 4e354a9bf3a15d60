"""`pdserve up --http`: OpenAI's client against a whole cluster, compared with the SDK, token for token."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from pdserve import AsyncClient, Completion
from pdserve.gateway.api.request_models import Tool
from pdserve.gateway.tools.grammars import calls_schema
from tests.cluster.cluster import Cluster
from tests.support.slow import slow_except
from tests.support.tooled_model import make_tooled_model

pytestmark = pytest.mark.timeout(400)

AT_A_TIME = 8
TEXTS = ("def fib(n):", "import os\n", "class Queue:\n    def ", "# naïve café 你好\n", "x = [")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "person", "parameters": SCHEMA}}
#: Fields of the HTTP request, and the SDK's options for them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {"temperature": 0.0}),
    "seeded": ({"temperature": 0.9}, {"temperature": 0.9}),
    "several": ({"temperature": 1.0, "n": 3}, {"temperature": 1.0, "n": 3}),
    "stop": ({"temperature": 0.7, "stop": ["e", "\n"]}, {"temperature": 0.7, "stop": ["e", "\n"]}),
    "penalties": (
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"40": 3}},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {40: 3.0}},
    ),
    "truncated": ({"top_p": 0.8, "extra": {"top_k": 20}}, {"top_p": 0.8, "top_k": 20}),
    "json": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ),
    "tools": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL], "json_schema": calls_schema([Tool.model_validate(TOOL)], 1)},
    ),
    "choice": ({"extra": {"structured_outputs": {"choice": ["yes", "no"]}}}, {"choice": ["yes", "no"]}),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its worker also prefills, because the gateway cannot see where a prompt is computed."""
    model = str(make_tooled_model(tmp_path_factory.mktemp("models")))
    with Cluster("--http", "0", "--model", model, "--prefill", "0", "--set", "worker.deterministic=on") as cluster:
        yield cluster


def url(cluster: Cluster) -> str:
    return cluster.running.http_url


def facts(done: Completion) -> list[tuple[Any, ...]]:
    return [
        (one.index, one.text, one.token_ids, one.finish_reason.value, [round(p.logprob, 5) for p in one.logprobs])
        for one in done.choices
    ]


def as_call(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The facts of an answer that is an array with one call, as the HTTP answer has them."""
    index, text, ids, reason, logprobs = answer
    if reason != "stop":
        return answer
    arguments = text.partition('"arguments":')[2].strip()
    [call] = json.loads(text)
    depth_end = next(end for end in range(len(arguments), 0, -1) if _is_json(arguments[:end], call["arguments"]))
    return index, arguments[:depth_end], ids, "tool_calls", logprobs


def _is_json(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value and text == text.strip())
    except ValueError:
        return False


async def over_http(client: openai.AsyncOpenAI, prompt: Any, fields: dict[str, Any], is_streamed: bool) -> list[Any]:
    """Index, text, token ids, finish reason and logprobs of each answer."""
    given = {**fields, "model": "tooled", "stream": is_streamed}
    extra = {"return_token_ids": True, **given.pop("extra", {})}
    is_chat = not isinstance(prompt, str)
    if is_chat:
        found: Any = await client.chat.completions.create(
            messages=prompt, logprobs=True, top_logprobs=1, extra_body=extra, **given
        )
    else:
        if "response_format" in given:  # not a field of OpenAI's text completions
            extra["response_format"] = given.pop("response_format")
        found = await client.completions.create(prompt=prompt, logprobs=1, extra_body=extra, **given)
    answers: dict[int, list[Any]] = {}

    def take(choice: Any) -> None:
        one = answers.setdefault(choice.index, [choice.index, "", (), None, []])
        said = (choice.delta if is_streamed else choice.message) if is_chat else choice
        one[1] += (said.content if is_chat else said.text) or ""
        for call in getattr(said, "tool_calls", None) or ():
            one[1] += call.function.arguments
        one[2] += tuple(getattr(choice, "token_ids", None) or ())
        one[3] = choice.finish_reason or one[3]
        if choice.logprobs is not None:
            scored = [p.logprob for p in choice.logprobs.content] if is_chat else choice.logprobs.token_logprobs
            one[4] += [round(p, 5) for p in scored]

    if is_streamed:
        async for chunk in found:
            for choice in chunk.choices:
                take(choice)
    else:
        for choice in found.choices:
            take(choice)
    return [tuple(answers[index]) for index in sorted(answers)]


@pytest.mark.parametrize("num_requests", slow_except([60, 200], 60))
def test_mixed_requests_get_the_sdks_answers(cluster: Cluster, num_requests: int) -> None:
    draw = random.Random(11)
    wrong: list[str] = []
    called: list[str] = []  # finish reasons of requests with tools

    async def one(http: openai.AsyncOpenAI, sdk: AsyncClient, number: int) -> None:
        kind = draw.choice(list(KINDS))
        text, is_streamed, seed = draw.choice(TEXTS), draw.random() < 0.5, draw.randrange(2**63)
        prompt: Any = [{"role": "user", "content": text}] if draw.random() < 0.5 or kind == "tools" else text
        fields, options = KINDS[kind]
        most = 120 if kind in ("json", "tools") else draw.randrange(1, 24)
        common = {"max_tokens": most, "seed": seed}
        expected = facts(await sdk.generate(prompt, logprobs=1, **{**common, **options}))  # type: ignore[arg-type]
        if kind == "tools":
            expected = [as_call(one) for one in expected]
            called.extend(reason for _, _, _, reason, _ in expected)
        found = await over_http(http, prompt, {**common, **fields}, is_streamed)
        if found != expected:
            wrong.append(f"request {number}, {kind}, streamed {is_streamed}: {found} instead of {expected}")

    async def run() -> None:
        room = asyncio.Semaphore(AT_A_TIME)

        async def limited(http: openai.AsyncOpenAI, sdk: AsyncClient, number: int) -> None:
            async with room:
                await one(http, sdk, number)

        async with (
            openai.AsyncOpenAI(base_url=url(cluster), api_key="none", max_retries=0) as http,
            AsyncClient(cluster.target) as sdk,
        ):
            await asyncio.gather(*(limited(http, sdk, number) for number in range(num_requests)))

    asyncio.run(run())
    assert wrong == []
    assert "tool_calls" in called
    cluster.wait_until_idle()


def test_the_ready_line_names_the_gateway_url(cluster: Cluster) -> None:
    assert f"grpc {cluster.target} http http://127.0.0.1:" in cluster.running.ready_line
    with openai.OpenAI(base_url=url(cluster), api_key="none") as client:
        assert [one.id for one in client.models.list()] == ["tooled"]


def test_the_gateway_is_in_the_routers_process(cluster: Cluster) -> None:
    assert "gateway" not in cluster.running.pids()
    port = int(url(cluster).rpartition(":")[2].removesuffix("/v1"))
    router = psutil.Process(cluster.running.pid("router"))
    assert port in {one.laddr.port for one in router.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("name", ["router", "gateway"])
def test_the_process_of_the_http_port(name: str) -> None:
    """It takes the operator's token alone, is restarted on its port, and ends its streams before the cluster ends."""
    form = ("--http-process",) if name == "gateway" else ()
    flags = ("--model", "toy", "--set", "worker.toy_step_s=0.01", *form)
    with Cluster("--http", "0", *flags, env={"PDSERVE_TOKEN": "right"}) as cluster:
        wrong = openai.OpenAI(base_url=url(cluster), api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.completions.create(model="toy", prompt="x", max_tokens=1)
        with openai.OpenAI(base_url=url(cluster), api_key="right", max_retries=0) as client:
            assert client.completions.create(model="toy", prompt="x", max_tokens=1).choices
        pid = cluster.running.pid(name)
        os.kill(pid, signal.SIGKILL)
        cluster.running.wait_restarted(name, pid)
        with openai.OpenAI(base_url=url(cluster), api_key="right") as client:  # its retries wait for the workers
            stream = client.completions.create(
                model="toy", prompt="hello", max_tokens=100, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            stopping = threading.Thread(target=cluster.running.stop)
            stopping.start()
            assert [one.choices[0].finish_reason for one in stream][-1] == "length"
            stopping.join(60.0)
            assert cluster.process.returncode == 0
