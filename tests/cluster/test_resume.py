"""Routers get SIGKILL in the middle of answers: the SDK and the gateway continue at the exact next token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from pdserve import Client, Completion
from pdserve.client.sync import Stream
from pdserve.gateway.api.request_models import Tool
from pdserve.gateway.tools.grammars import calls_schema
from tests.cluster.cluster import Cluster
from tests.cluster.test_http import TOOL
from tests.support.tooled_model import make_tooled_model

pytestmark = pytest.mark.timeout(400)

CODE = "import json\n\n\ndef load(path):\n"
CHAT = [{"role": "user", "content": "Who is the tallest person?"}]
PEOPLE = {
    "type": "array",
    "minItems": 12,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
CALLS = calls_schema([Tool.model_validate(TOOL)], 4)
LONG = {"max_tokens": 160, "ignore_eos": True}
#: Prompt and options of each kind of call. Each takes long enough to be interrupted, or is sent again.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (CODE, {**LONG, "temperature": 0.0}),
    "seeded": (CODE, {**LONG, "temperature": 0.9, "top_p": 0.95, "seed": 5}),
    "unseeded": (CODE, {**LONG, "temperature": 1.1}),
    "penalties": (CODE, {**LONG, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.6, "min_tokens": 100}),
    "grammar": (CODE, {"max_tokens": 300, "json_schema": PEOPLE, "seed": 6}),
    "several": (CODE, {**LONG, "n": 3, "seed": 7, "temperature": 1.0}),
    "stop": (CODE, {**LONG, "temperature": 0.0, "stop": ["\n\n\n\n", "qqq"], "include_stop_in_output": True}),
    "logprobs": (CODE, {**LONG, "temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1}),
    "tools": (CHAT, {"max_tokens": 300, "tools": [TOOL], "seed": 8, "json_schema": CALLS}),
}
MUST_BE_INTERRUPTED = frozenset(KINDS) - {"tools", "grammar"}  # whose answers may be short
MOST_TURNS = 4
#: The one worker also prefills.
EXACT = ("--prefill", "0", "--set", "worker.deterministic=on", "--set", "worker.dtype=float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tooled_model(tmp_path_factory.mktemp("models")))


def facts(done: Completion) -> list[Any]:
    return [
        (one.index, one.text, one.token_ids, one.finish_reason, one.stop, len(one.logprobs)) for one in done.choices
    ]


def interrupted(client: Client, kill: Any) -> dict[str, Stream]:
    """Starts each kind of call, kills when all have begun, and reads them to their ends."""
    streams = {kind: client.stream(prompt, **options) for kind, (prompt, options) in KINDS.items()}
    for stream in streams.values():
        next(stream)
    kill()
    with ThreadPoolExecutor(len(streams)) as threads:
        for pieces in threads.map(lambda stream: sum(1 for _ in stream), streams.values()):
            assert pieces
    return streams


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest, model: str) -> Iterator[Cluster]:
    with Cluster("--model", model, "--routers", str(request.param), *EXACT) as cluster:
        yield cluster


def test_calls_of_the_sdk_continue_on_the_other_or_the_restarted_router(cluster: Cluster) -> None:
    resumed: set[str] = set()
    for _ in range(MOST_TURNS):
        with Client(cluster.target) as client:
            name = client.topology().router_id
            process = name if name in cluster.running.pids() else "router"
            seen = interrupted(client, lambda process=process: os.kill(cluster.running.pid(process), signal.SIGKILL))
            resumed |= {kind for kind, stream in seen.items() if stream.is_resumed}
        with Client(cluster.target) as client:
            calm_streams = {
                kind: client.stream(
                    prompt, **{**options, "seed": seen[kind].seed} if options.get("temperature") != 0.0 else options
                )
                for kind, (prompt, options) in KINDS.items()
            }  # all at once, because steps of many rows are cheaper
            for kind, stream in calm_streams.items():
                for _ in stream:
                    pass
                calm, found = stream.completion, seen[kind].completion
                assert facts(found) == facts(calm), kind
                for one, other in zip(found.choices, calm.choices, strict=True):
                    assert [p.logprob for p in one.logprobs] == pytest.approx(
                        [p.logprob for p in other.logprobs], abs=1e-3
                    )
                assert found.usage.completion_tokens == calm.usage.completion_tokens
                assert len(found.prompt_logprobs) == len(calm.prompt_logprobs)
        if resumed >= MUST_BE_INTERRUPTED:
            break
    assert resumed >= MUST_BE_INTERRUPTED
    cluster.wait_until_idle(60.0)


# --- HTTP -----------------------------------------------------------------------------------------------------

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Name people."}], "model": "tooled", "seed": 3}
OF_HTTP: dict[str, dict[str, Any]] = {
    "several": {"n": 3, "max_tokens": 400, "extra_body": {"ignore_eos": True}},
    "logprobs": {"logprobs": True, "temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}},
    "tools": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200},
}

LONG = ("several", "logprobs")
NUM_ANSWERS = 5  # more than the long streams have, so whole answers run too; the tool's call may have ended


def text_of(chunks: Any) -> dict[int, list[Any]]:
    """Text, arguments of calls and finish reason of each answer."""
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, ["", "", None])
            one[0] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                one[1] += call.function.arguments or ""
            one[2] = choice.finish_reason or one[2]
    return found


def test_http_clients_of_a_gateway_see_no_break(model: str) -> None:
    with Cluster("--model", model, "--http", "0", "--http-process", *EXACT) as cluster:
        client = openai.OpenAI(base_url=cluster.running.http_url, api_key="none", max_retries=8, timeout=120.0)

        def ask(kind: str, *, stream: bool) -> Any:
            return client.chat.completions.create(**QUESTION, **OF_HTTP[kind], stream=stream)

        calm_streams = {kind: ask(kind, stream=True) for kind in OF_HTTP}
        calm = {kind: text_of(stream) for kind, stream in calm_streams.items()}
        with ThreadPoolExecutor(len(OF_HTTP)) as threads:
            streams = {kind: ask(kind, stream=True) for kind in OF_HTTP}
            first = {kind: next(iter(stream)) for kind, stream in streams.items()}
            whole = {kind: threads.submit(ask, kind, stream=False) for kind in OF_HTTP}
            while cluster.client.topology().running_requests < NUM_ANSWERS:
                assert not any(whole[kind].done() for kind in LONG), "they ended before the kill"
                time.sleep(0.01)
            os.kill(cluster.running.pid("router"), signal.SIGKILL)
            for kind, stream in streams.items():
                assert text_of([first[kind], *stream]) == calm[kind], kind
            for kind, answer in whole.items():
                for choice in answer.result().choices:
                    calls = choice.message.tool_calls or ()
                    found = [choice.message.content or "", "".join(one.function.arguments for one in calls)]
                    assert [*found, choice.finish_reason] == calm[kind][choice.index], kind
        client.close()
        cluster.wait_until_idle(60.0)


@pytest.mark.slow  # tests/cluster/test_shutdown.py ends such a router too
def test_http_streams_end_with_a_router_that_has_the_gateway(model: str) -> None:
    """What docs/faults.md says that OpenAI's client does."""
    with Cluster("--model", model, "--http", "0", *EXACT) as cluster:
        client = openai.OpenAI(base_url=cluster.running.http_url, api_key="none", timeout=120.0)
        stream = client.chat.completions.create(
            **QUESTION, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        os.kill(cluster.running.pid("router"), signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            for _ in stream:
                pass
        client.close()
