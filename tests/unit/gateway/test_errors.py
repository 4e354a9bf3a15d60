"""Errors as OpenAI's client sees them: exception, status, code and retry time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from pdserve.core import errors as core
from pdserve.core.errors import (
    Cancelled,
    ChangeFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvLost,
    LoadShed,
    NotFound,
    NoWorkers,
    Overloaded,
    PdserveError,
    PermissionDenied,
    QuotaExceeded,
    ShuttingDown,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    UnknownMethod,
    UnknownModel,
)
from pdserve.gateway.api.errors import ROWS, BodyTooLarge, UnknownField, UnsupportedField, reply
from pdserve.testing import Cluster
from pdserve.v1 import inference_pb2
from tests.unit.client.conftest import Script, delta, fail, started
from tests.unit.client.conftest import script as script
from tests.unit.client.conftest import target as target
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, serve

STATUS = [
    (InvalidRequest("top_p", 2, "a number"), 400, "invalid_value", "top_p"),
    (core.ContextLengthExceeded("text", "9 tokens", "at most 7"), 400, "context_length_exceeded", "prompt"),
    (UnknownField("foo", "x", "y"), 400, "unknown_parameter", "foo"),
    (UnsupportedField("tools", "x", "y"), 400, "unsupported_parameter", "tools"),
    (BodyTooLarge("body", 9, "at most 8"), 413, "body_too_large", "body"),
    (Unauthenticated("no"), 401, "invalid_api_key", None),
    (core.IdInUse("a"), 409, "id_in_use", None),
    (NotFound("worker", "p0"), 404, "not_found", None),
    (UnknownModel("a", ["b"]), 404, "model_not_found", None),
    (UnknownMethod("/x"), 501, "unknown_method", None),
    (DeadlineExceeded("queued"), 408, "deadline", None),
    (Overloaded("full", 1.5), 429, "overloaded", None),
    (LoadShed("front", 1.5), 429, "load_shed", None),
    (QuotaExceeded("max_concurrent", "full", 1.5), 429, "rate_limit_exceeded", None),
    (PermissionDenied("no"), 403, "permission_denied", None),
    (Cancelled("gone"), 499, "cancelled", None),
    (Unavailable("away"), 503, "unavailable", None),
    (NoWorkers("decode"), 503, "no_workers", None),
    (ShuttingDown(), 503, "shutting_down", None),
    (ChangeFailed("x"), 500, "change_failed", None),
    (TransferFailed("x"), 500, "transfer_failed", None),
    (KvLost("x"), 500, "kv_lost", None),
    (InternalError("x"), 500, "internal", None),
    (core.ModelError("chat_template", "x", "y"), 500, "model", None),
]


@pytest.mark.parametrize(("error", "status", "code", "param"), STATUS)
def test_each_error_has_its_status_and_code(error: PdserveError, status: int, code: str, param: str | None) -> None:
    found = reply(error)
    assert found.status == status
    body = found.body["error"]
    assert (body["code"], body["param"], body["message"]) == (code, param, error.message)


def test_every_error_of_pdserve_is_in_the_test_above() -> None:
    kinds = {one for one in vars(core).values() if isinstance(one, type) and issubclass(one, PdserveError)}
    tried = {type(error) for error, *_ in STATUS} | {PdserveError, core.ConfigError}
    assert kinds | set(ROWS) <= tried


def test_a_retry_time_is_given_in_milliseconds_and_seconds() -> None:
    assert reply(Overloaded("full", 1.2345)).headers == (("retry-after-ms", "1235"), ("retry-after", "2"))
    assert reply(NoWorkers("decode", 0.5)).headers == (("retry-after-ms", "500"), ("retry-after", "1"))
    assert reply(Overloaded("full", 0.0)).headers == reply(Unavailable("away")).headers == ()


def test_the_type_of_a_quota_error_is_its_unit_as_in_openai_s_api() -> None:
    kinds = [reply(QuotaExceeded(quota, "full", 1.5)).body["error"]["type"] for quota in ("tokens_per_minute", "x")]
    assert kinds == ["tokens", "requests"]


def test_a_field_has_openai_s_name() -> None:
    assert reply(InvalidRequest("chat.messages", "x", "y")).body["error"]["param"] == "messages"


def test_an_overloaded_router_s_prediction_reaches_the_client() -> None:
    """A request for 16 answers on a router whose queue holds one."""
    with serve(prefill=0, router={"max_queue": 1}, worker={"kv_blocks": 12, "toy_step_s": 0.02}) as served:
        with pytest.raises(openai.RateLimitError) as caught:
            served.openai.completions.create(model="toy", prompt="hello " * 10, n=16, max_tokens=50)
        assert caught.value.code == "overloaded"
        retry_ms = int(caught.value.response.headers["retry-after-ms"])
        assert 0 < retry_ms <= int(caught.value.response.headers["retry-after"]) * 1000


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_that_is_too_long_names_the_context_length(bundled: Served, is_streamed: bool) -> None:
    """In the words by which litellm and others recognize the error, beside OpenAI's code of it."""
    most = bundled.sdk.model().max_context_tokens
    prompt = "x = 1\n" * most
    common: dict[str, Any] = {"model": bundled.model, "stream": is_streamed}
    found = []
    for call, given in (
        (bundled.openai.completions.create, {"prompt": prompt}),
        (bundled.openai.completions.create, {"prompt": [1] * most}),
        (bundled.openai.chat.completions.create, {"messages": [{"role": "user", "content": prompt}]}),
        (bundled.openai.responses.create, {"input": prompt}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call(**common, **given)
        found.append((caught.value.code, caught.value.type, caught.value.param))
        assert f"prompt is too long, because this model's maximum context length is {most} tokens" in str(caught.value)
    kind = ("context_length_exceeded", "invalid_request_error")
    assert found == [(*kind, name) for name in ("prompt", "prompt", "messages", "input")]


@pytest.fixture
def client(script: Script, target: str) -> Iterator[openai.OpenAI]:
    """A client in front of a router that plays a script."""
    with (
        gateway(target) as host,
        openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoWorkers("decode"), openai.InternalServerError),
        (DeadlineExceeded("queued"), openai.APIStatusError),
        (InvalidRequest("top_p", 2, "a number"), openai.BadRequestError),
        (Overloaded("full", 0.25), openai.RateLimitError),
        (KvLost("x"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_before_the_first_token_has_its_status(
    client: openai.OpenAI, script: Script, error: PdserveError, kind: type[openai.APIStatusError], is_streamed: bool
) -> None:
    script.fails(error, started())
    with pytest.raises(kind) as caught:
        client.completions.create(model="m", prompt="hi", stream=is_streamed)
    assert caught.value.status_code == reply(error).status
    assert caught.value.body == reply(error).body["error"]


def test_an_error_after_the_first_token_ends_the_stream_with_its_frame(client: openai.OpenAI, script: Script) -> None:
    script.fails(KvLost("a worker crashed"), started(), delta("a", 1), delta("b", 2))
    stream = client.completions.create(model="m", prompt="hi", stream=True)
    assert [next(stream).choices[0].text for _ in range(2)] == ["a", "b"]
    with pytest.raises(openai.APIError, match="a worker crashed"):
        next(stream)


def test_an_error_of_one_of_several_prompts_ends_all(client: openai.OpenAI, script: Script) -> None:
    hangs = threading.Event()

    def hang(_: object, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        context.add_callback(script.cancelled.set)
        hangs.set()
        yield started()
        script.cancelled.wait(WAIT_S)

    def crash(_: object, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        yield started()
        hangs.wait(WAIT_S)
        fail(context, KvLost("a worker crashed"))

    script.plays = [crash, hang]
    with pytest.raises(openai.InternalServerError, match="a worker crashed"):
        client.completions.create(model="m", prompt=["one", "two"])
    assert script.cancelled.wait(WAIT_S)


def test_an_error_of_one_of_many_prompts_ends_all(client: openai.OpenAI, script: Script) -> None:
    script.fails(KvLost("a worker crashed"))
    for _ in range(127):
        script.hangs(started())
    with pytest.raises(openai.InternalServerError, match="a worker crashed"):
        client.completions.create(model="m", prompt=["a prompt"] * 128, timeout=WAIT_S)


def test_a_missing_router_is_unavailable() -> None:
    with Cluster() as cluster:
        address = cluster.address
    with (
        gateway(address) as host,
        openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="toy", prompt="hi")
        assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        with pytest.raises(openai.InternalServerError) as ill:
            client.with_options(base_url=f"http://{host.address}").get("/health", cast_to=object)
        assert ill.value.status_code == 503


def test_the_token_the_targets_and_the_trace_reach_the_router(client: openai.OpenAI, script: Script) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    script.says(started(), delta("a", 1))
    with pytest.raises(openai.InternalServerError, match="without a finish reason"):
        client.completions.create(
            model="m",
            prompt="hi",
            extra_headers={
                "traceparent": trace,
                "x-request-id": "r7",
                "x-session-id": "s1",
                "x-slo-tpot-ms": "50",
                "authorization": "Bearer mine",
            },
        )
    [request] = script.requests
    assert (request.request_id, request.session_id, request.slo.tpot_s) == ("r7", "s1", 0.05)
    assert not request.slo.HasField("ttft_s")
    assert script.metadata[-1]["traceparent"] == trace
    assert {one["authorization"] for one in script.metadata} == {"Bearer mine"}


def test_an_id_in_use_is_a_conflict() -> None:
    """OpenAI's clients retry a conflict, and its error names the id."""
    slow = {"toy_step_s": 0.02}
    with serve(router={"max_new_tokens": 8000}, worker=slow) as served, contextlib.ExitStack() as stack:
        ask = {"model": "toy", "prompt": "x", "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
        for _ in range(16):  # each takes more than two minutes
            given = {"x-request-id": "same"}
            stream = stack.enter_context(served.openai.completions.create(**ask, stream=True, extra_headers=given))
            next(iter(stream))
        with pytest.raises(openai.ConflictError, match="the request_id 'same' is in use") as caught:
            served.openai.completions.create(**ask, extra_headers={"x-request-id": "same"})
        assert caught.value.code == "id_in_use"
        with pytest.raises(core.IdInUse) as raised:
            served.sdk.generate("x", request_id="same")
        assert raised.value.name == "same"
