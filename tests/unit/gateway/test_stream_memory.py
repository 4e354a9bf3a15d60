"""What the gateway holds for a stream with logprobs, and what it charges for it."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Piece, TokenLogprob
from pdserve.core.errors import ShuttingDown
from pdserve.core.types import MAX_DELTA_TOKENS
from pdserve.gateway.api.errors import reply
from pdserve.gateway.api.replies import Head
from pdserve.gateway.api.responses import ResponsesWriter
from pdserve.gateway.api.sdk_call import SCORE_BYTES, TOKEN_BYTES, SdkCall
from pdserve.gateway.asgi import GENERATION_PATHS
from pdserve.gateway.respond import PAUSE_BYTES, Responder, Sender
from pdserve.testing import MockTransport
from pdserve.v1 import inference_pb2
from tests.unit.gateway.test_steps import BESIDE, MODEL, READ

LONGEST_PIECE = 8192
CALL = "<tool_call>\n<function=get>\n</function>\n</tool_call>"
FUNCTION = {"name": "get", "parameters": {"type": "object", "properties": {}}}
TOP = 5  # the most likely tokens beside each one
FIELDS: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": TOP},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": TOP},
    "/v1/responses": {"include": ["message.output_text.logprobs"], "top_logprobs": TOP},
}


def scored(number: int) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TopLogprob(token_id=one, logprob=-1.0 / 3 - one) for one in range(TOP)]
    return inference_pb2.TokenLogprobs(token_id=number % TOP, logprob=-1.0 / 3, top=top)


def answer(request: Any, num_tokens: int, each: int, tail: str) -> Iterator[inference_pb2.GenerateResponse]:
    """`each` tokens in a message. `tail`: the text of the last token."""
    yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r", prompt_tokens=1))
    if request.sampling.HasField("prompt_logprobs"):
        tokens = list(map(scored, range(len(request.token_ids.ids) - 1)))
        found = inference_pb2.PromptLogprobs(first_position=1, tokens=tokens)
        yield inference_pb2.GenerateResponse(prompt_logprobs=found)
    for begin in range(0, num_tokens, each):
        tokens = list(map(scored, range(begin, min(begin + each, num_tokens))))
        ids = [one.token_id for one in tokens]
        for index in range(request.n or 1):
            text = "x" * len(ids) + (tail if begin + each >= num_tokens else "")
            delta = inference_pb2.Delta(index=index, text=text, token_ids=ids, logprobs=tokens)
            yield inference_pb2.GenerateResponse(delta=delta)
    usage = inference_pb2.Usage(prompt_tokens=1, completion_tokens=num_tokens)
    for index in range(request.n or 1):
        finished = inference_pb2.Finished(index=index, reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
        yield inference_pb2.GenerateResponse(finished=finished)


@dataclass
class Held:
    most: int = 0  # bytes at any time
    charge: int = 0
    sent: int = 0
    longest: int = 0  # of the parts that were sent


def hold(path: str, num_tokens: int, each: int = MAX_DELTA_TOKENS, tail: str = "", **fields: Any) -> Held:
    """Answers one request whose client reads each part of the answer late."""
    model = replace(MODEL, max_new_tokens=num_tokens)
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    call: SdkCall = READ[path]({**BESIDE[path], **FIELDS[path], most: num_tokens, "stream": True, **fields})
    held = Held(charge=call.answer_bytes(model))

    def handle(request: Any) -> Any:
        if isinstance(request, inference_pb2.GetTokenBytesRequest):
            return inference_pb2.GetTokenBytesResponse(token_bytes=[b"x%d" % one for one in request.token_ids])
        if isinstance(request, inference_pb2.DetokenizeRequest):
            return inference_pb2.DetokenizeResponse(text="x1" * len(request.token_ids))
        return answer(request, num_tokens, each, tail)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        buffered = b""

        async def send(message: Any) -> None:
            nonlocal buffered
            buffered = bytes(message.get("body", b""))  # of the connection, until the next part
            held.sent += len(buffered)
            held.longest = max(held.longest, len(buffered))
            await asyncio.sleep(0)

        responder = Responder()
        async with AsyncClient("localhost:1", transport=MockTransport(handle)) as client:
            gc.collect()
            tracemalloc.start()
            try:
                await responder.respond(GENERATION_PATHS[path], call, client, model, never, Sender(send, lambda: False))
                held.most = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    asyncio.run(run())
    return held


@pytest.mark.parametrize("path", FIELDS)
def test_a_stream_holds_no_more_for_a_longer_answer(path: str) -> None:
    hold(path, 4)  # fills the caches of libraries
    short, long = hold(path, 4 * MAX_DELTA_TOKENS), hold(path, 12 * MAX_DELTA_TOKENS)
    assert long.sent > 2.9 * short.sent
    for one in (short, long):
        assert one.charge / 4 < one.most <= one.charge
    more = 8 * MAX_DELTA_TOKENS * (TOKEN_BYTES + (1 + TOP) * SCORE_BYTES)
    if path == "/v1/responses":  # whose last events repeat the whole answer
        assert long.charge - short.charge == more
        assert long.most - short.most < more
    else:
        assert long.charge == short.charge
        assert long.most - short.most < more / 10


@pytest.mark.parametrize(
    ("num_tokens", "fields"),
    [
        (16, {}),
        (256, {"prompt": [[1] * 16] * 8}),
        (256, {"n": 8, "temperature": 1}),
        (4, {"prompt": [1] * 1000, "echo": True}),
        (4, {"prompt": [1] * 1000, "echo": True, "n": 4, "temperature": 1}),
        pytest.param(4, {"prompt": [[1] * 500] * 4, "echo": True}, marks=pytest.mark.slow),
    ],
    ids=["short", "prompts", "answers", "echo", "echoes", "prompts echoed"],
)
def test_a_stream_of_texts_holds_as_much_as_it_is_charged_for(num_tokens: int, fields: dict[str, Any]) -> None:
    path = "/v1/completions"
    hold(path, 4, **fields)
    # Once, objects of the tests before were counted too.
    held = min((hold(path, num_tokens, **fields) for _ in range(2)), key=lambda one: one.most)
    assert held.charge / 6 < held.most <= held.charge


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_stream_with_calls_holds_as_much_as_it_is_charged_for(path: str) -> None:
    """Each call of a response ends the message before it, whose events repeat its logprobs."""
    function = FUNCTION if path == "/v1/responses" else {"function": FUNCTION}
    fields: dict[str, Any] = {"tools": [{"type": "function", **function}]}
    hold(path, 4, tail=CALL, **fields)
    held = hold(path, 12 * MAX_DELTA_TOKENS, tail=CALL, **fields)
    assert held.most <= held.charge
    assert held.longest < PAUSE_BYTES + LONGEST_PIECE


def test_a_failed_stream_of_responses_is_written_in_parts() -> None:
    call = READ["/v1/responses"]({**BESIDE["/v1/responses"], **FIELDS["/v1/responses"]})
    writer = ResponsesWriter(Head(request_id="r", model="toy", created_s=0), call, lambda token_id: b"x")
    top = tuple((number, -1.0) for number in range(TOP))
    scored = tuple(TokenLogprob(token_id=1, logprob=-1.0, top=top) for _ in range(1000))
    begun = list(writer.pieces([Piece(text="x" * 1000, token_ids=(1,) * 1000, logprobs=scored)], 1))
    assert begun[0] == b"event: response.created\n"
    pieces = list(writer.error(reply(ShuttingDown())))
    assert max(map(len, pieces)) < LONGEST_PIECE
    name, _, data = b"".join(pieces).partition(b"\n")
    assert name == b"event: response.failed"
    [item] = json.loads(data.removeprefix(b"data: "))["response"]["output"]
    assert len(item["content"][0]["logprobs"]) == 1000
