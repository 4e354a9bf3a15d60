"""Bad requests: each gets a status with details that name the field and its limit, and costs no worker anything."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pdserve.core.errors import DeadlineExceeded, InvalidRequest, NotFound, NoWorkers, PdserveError, Unauthenticated
from pdserve.engine.toy import answer
from pdserve.v1 import cluster_pb2, inference_pb2
from pdserve.wire import status
from tests.unit.router_io.conftest import Connect, Front, until
from tests.unit.router_io.processes import Program, Start

CONTEXT = 8192
CHAT = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])


def ids(*values: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=values)


async def refused(front: Front, **fields: Any) -> PdserveError:
    fields = {"text": "hello"} | fields if not {"token_ids", "chat", "nothing"} & fields.keys() else fields
    fields.pop("nothing", None)
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in front.stub.Generate(inference_pb2.GenerateRequest(**fields)):
            pass
    return status.from_rpc_error(caught.value)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("prompt", "text, token_ids or chat", {"nothing": True}),
    ("prompt", "at least one", {"text": ""}),
    ("prompt", "at least one", {"token_ids": ids()}),
    ("prompt", f"at most {CONTEXT - 1}", {"text": "x" * CONTEXT}),
    ("prompt", f"at most {CONTEXT - 1}", {"token_ids": ids(*[1] * 9000)}),
    ("token_ids", "below 257", {"token_ids": ids(1, 257)}),
    ("token_ids", "below 257", {"token_ids": ids(2**32 - 1)}),
    ("truncate_prompt_tokens", "between 1 and", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", "between 1 and", {"truncate_prompt_tokens": CONTEXT}),
    ("request_id", "1 to 128", {"request_id": "x" * 129}),
    ("request_id", "1 to 128", {"request_id": "two\nlines"}),
    ("n", "between 1 and 16", {"n": 0}),
    ("n", "between 1 and 16", {"n": 17}),
    ("best_of", "between n (2) and 16", {"n": 2, "best_of": 1}),
    ("best_of", "between n (1) and 16", {"best_of": 17}),
    ("n", "1 with temperature 0", {"n": 2, "sampling": inference_pb2.SamplingParams(temperature=0.0)}),
    ("best_of", "1 with temperature 0", {"best_of": 2, "sampling": inference_pb2.SamplingParams(temperature=0.0)}),
    ("slo.ttft_s", "86400 seconds", {"slo": inference_pb2.Slo(ttft_s=math.nan)}),
    ("slo.tpot_s", "86400 seconds", {"slo": inference_pb2.Slo(tpot_s=-1.0)}),
    *(
        (name, expected, {"sampling": inference_pb2.SamplingParams(**{name: value})})
        for name, expected, value in [
            ("max_tokens", "at least 1", 0),
            ("max_tokens", "at most 4096", 4097),
            ("max_tokens", f"the context of {CONTEXT} tokens", 4097),
            ("temperature", "[0, 100]", math.nan),
            ("temperature", "[0, 100]", -1.0),
            ("top_p", "(0, 1]", 0.0),
            ("top_p", "(0, 1]", 1.01),
            ("min_p", "[0, 1]", -0.1),
            ("logprobs", "between 0 and 64", 65),
            ("stop", "at most 16", ["x"] * 1000),
            ("stop", "1 to 256", ["x" * 300]),
            ("stop_token_ids", "below 257", [257]),
            ("prompt_logprobs", "between 0 and 20", 21),
            ("logit_bias", "below 257", {257: 1.0}),
            ("allowed_token_ids", "below 257", [1, 257]),
            ("bad_words", "at most 128", ["x"] * 129),
            ("bad_words", "1 to 256", [""]),
        ]
    ),
    *(
        (name, expected, {"sampling": inference_pb2.SamplingParams(**fields)})
        for name, expected, fields in [
            ("bad_words", "below 257", {"bad_token_ids": [ids(1, 257)]}),
            ("bad_words", "at least one", {"bad_token_ids": [ids()]}),
            ("allowed_token_ids", "do not ban", {"allowed_token_ids": [104], "bad_words": ["h"]}),
        ]
    ),
]


async def test_each_bad_request_names_its_field_and_limit(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    for field, expected, request in BAD:
        error = await refused(front, **request)
        assert isinstance(error, InvalidRequest), (field, request, error)
        assert error.field == field, error
        assert expected in error.expected, error
    assert front.server.runtime.state.is_empty


async def test_a_rejection_carries_bad_request_details(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    call = front.stub.Generate(inference_pb2.GenerateRequest(text=""))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = dict(await call.trailing_metadata())[status.DETAILS_KEY]
    found = error_details_pb2.BadRequest()
    assert any(one.Unpack(found) for one in status_pb2.Status.FromString(details).details if one.Is(found.DESCRIPTOR))
    assert [one.field for one in found.field_violations] == ["prompt"]


async def test_a_prompt_over_the_message_limit_names_both_sizes(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    error = await refused(front, text="x" * 5_000_000)
    assert isinstance(error, InvalidRequest)
    assert str(4 * 2**20) in error.message


async def test_without_a_decode_worker_the_role_is_named(connect: Connect, prefill: Program) -> None:
    nobody = await connect()
    error = await refused(nobody)
    assert (type(error), getattr(error, "role", "")) == (NoWorkers, "decode")
    assert getattr(error, "retry_after_s", None) is not None
    with pytest.raises(NoWorkers):
        await nobody.client.model()


async def test_a_deadline_ends_a_request_with_its_stage(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode, request_timeout_s=0.2)
    error = await refused(front, sampling=inference_pb2.SamplingParams(max_tokens=1000))
    assert isinstance(error, DeadlineExceeded)
    await until(front.all_free)


async def test_the_callers_own_deadline_counts_when_it_is_shorter(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    request = inference_pb2.GenerateRequest(text="hello", sampling=inference_pb2.SamplingParams(max_tokens=1000))
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in front.stub.Generate(request, timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(front.all_free)


async def test_draining_needs_the_operators_token(connect: Connect, decode: Program) -> None:
    front = await connect(decode, token="the operators' own")
    for call, request in (
        (front.cluster.Drain, cluster_pb2.DrainRequest(worker_id="d0")),
        (front.cluster.Undrain, cluster_pb2.UndrainRequest(worker_id="d0")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await call(request)
        assert isinstance(status.from_rpc_error(caught.value), Unauthenticated)
    assert not any(one.is_draining for one in (await front.client.topology()).workers)


async def test_any_router_can_drain_and_undrain_a_worker(connect: Connect, start: Start) -> None:
    worker = start("decode_worker", "--model=toy", "--worker-id=d7", "--heartbeat-s=0.05")
    one, other = await connect(worker, router_id="r1"), await connect(worker, router_id="r2")

    async def state(front: Front) -> tuple[bool, bool]:
        [seen] = (await front.client.topology()).workers
        return seen.is_drained, seen.is_draining

    async def is_drained_everywhere() -> bool:
        return {await state(one), await state(other)} == {(True, True)}

    async def is_back_everywhere() -> bool:
        return {await state(one), await state(other)} == {(False, False)}

    await one.client.drain("d7")
    await until(is_drained_everywhere)
    await other.client.undrain("d7")
    await until(is_back_everywhere)
    for front in (one, other):
        done = await front.client.generate("hello", max_tokens=4, temperature=0)
        assert done.text.encode() == bytes(answer(list(b"hello"), 4))


async def test_unknown_requests_and_workers_are_not_found(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    with pytest.raises(NotFound):
        await front.client.explain("never")
    with pytest.raises(grpc.RpcError) as caught:
        await front.cluster.Drain(cluster_pb2.DrainRequest(worker_id="nobody"))
    assert isinstance(status.from_rpc_error(caught.value), NotFound)
