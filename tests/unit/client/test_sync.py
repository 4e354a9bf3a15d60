"""The blocking client against a real server that plays scripted answers."""

from __future__ import annotations

import json
import threading
import time

import grpc
import pytest

from pdserve import Client, DeadlineExceeded, InternalError, InvalidRequest, NoWorkers, Overloaded, Retries, Unavailable
from pdserve.build import FULL_VERSION
from pdserve.core.json_text import to_json
from pdserve.core.types import FinishReason, Path, Role
from pdserve.v1 import inference_pb2

from .conftest import WAIT_S, Script, delta, fail, finished, started

QUICK = Retries(limit=2, first_backoff_s=0.01, longest_backoff_s=0.02)


def test_a_completion_has_the_whole_answer(script: Script, target: str) -> None:
    script.says(
        started("abc", 5),
        delta("Hel", 1, 2),
        delta("", 3),
        delta("lo", 4),
        finished(
            reason=inference_pb2.FINISH_REASON_STOP,
            stop="\n",
            usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=4, cached_prompt_tokens=2),
            timings=inference_pb2.Timings(ttft_s=0.5, path=inference_pb2.PATH_REMOTE, prefill_worker="p0", attempts=1),
        ),
    )
    with Client(target) as client:
        done = client.generate("hi", max_tokens=4)
    assert (done.request_id, done.text, done.token_ids) == ("abc", "Hello", (1, 2, 3, 4))
    assert (done.finish_reason, done.stop, done.stop_token_id) == ("stop", "\n", None)
    assert (done.usage.total_tokens, done.usage.cached_prompt_tokens) == (9, 2)
    assert (done.timings.ttft_s, done.timings.path, done.timings.prefill_worker) == (0.5, "remote", "p0")


def test_reasons_and_paths_are_enums(script: Script, target: str) -> None:
    timings = inference_pb2.Timings(path=inference_pb2.PATH_LOCAL)
    script.says(started(), delta("a", 1), finished(reason=inference_pb2.FINISH_REASON_LENGTH, timings=timings))
    with Client(target) as client:
        done = client.generate("hi")
        roles = [worker.role for worker in client.topology().workers]
    assert done.finish_reason is FinishReason.LENGTH
    assert done.timings.path is Path.LOCAL
    assert f"{done.finish_reason} {done.timings.path}" == "length local"
    assert json.loads(to_json(done))["finish_reason"] == json.loads(json.dumps(done.finish_reason)) == "length"
    assert roles == [Role.PREFILL] == ["prefill"]


def test_a_stream_yields_pieces_and_then_its_completion(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), delta("", 2), delta("b", 3), finished())
    with Client(target) as client:
        stream = client.stream("hi")
        assert [(piece.text, piece.token_ids) for piece in stream] == [("a", (1,)), ("", (2,)), ("b", (3,))]
        assert stream.completion.text == "ab"
        assert list(stream) == []


def test_logprobs_arrive_with_their_tokens(script: Script, target: str) -> None:
    tops = [inference_pb2.TopLogprob(token_id=9, logprob=-0.5)]
    message = delta("a", 9)
    message.delta.logprobs.add(token_id=9, logprob=-0.5, top=tops)
    script.says(started(), message, finished())
    with Client(target) as client:
        done = client.generate("hi", logprobs=1)
    assert [(one.token_id, one.logprob, one.top) for one in done.logprobs] == [(9, -0.5, ((9, -0.5),))]


def test_a_stream_that_was_not_read_to_its_end_has_no_completion(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    with Client(target) as client, client.stream("hi") as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="not read to its end"):
            _ = stream.completion


def test_a_rejection_is_retried_after_the_servers_time(script: Script, target: str) -> None:
    script.fails(Overloaded("full", retry_after_s=0.2))
    script.says(started(), delta("a", 1), finished())
    begin_s = time.monotonic()
    with Client(target) as client:
        assert client.generate("hi").text == "a"
    assert time.monotonic() - begin_s >= 0.2
    assert len(script.requests) == 2
    assert script.requests[0] == script.requests[1]


def test_a_failure_after_started_but_before_the_first_token_is_retried(script: Script, target: str) -> None:
    script.fails(Unavailable("gone"), started("first"))
    script.says(started("second"), delta("a", 1), finished())
    with Client(target, retries=QUICK) as client:
        assert client.generate("hi").request_id == "second"


def test_retries_end_with_the_original_error(script: Script, target: str) -> None:
    for _ in range(3):
        script.fails(NoWorkers("decode", 0.01))
    with Client(target, retries=QUICK) as client, pytest.raises(NoWorkers) as caught:
        client.generate("hi")
    assert caught.value.role == "decode"
    assert script.plays == []


def test_a_failure_after_the_first_token_is_not_retried_without_a_key(script: Script, target: str) -> None:
    script.fails(Unavailable("gone"), started(), delta("a", 1))
    with Client(target, retries=QUICK) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        with pytest.raises(Unavailable, match="gone"):
            next(stream)
        assert list(stream) == []
    assert len(script.requests) == 1


def test_a_bad_request_is_not_retried_and_names_its_field(script: Script, target: str) -> None:
    script.fails(InvalidRequest("sampling.top_p", 2, "a number in (0, 1]"))
    with Client(target, retries=QUICK) as client, pytest.raises(InvalidRequest) as caught:
        client.generate("hi", top_p=2.0)
    assert (caught.value.field, caught.value.expected) == ("sampling.top_p", "a number in (0, 1]")


def test_a_stream_without_a_finish_reason_is_an_error_not_a_short_answer(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1))
    with Client(target) as client, pytest.raises(InternalError, match="finish reason"):
        client.generate("hi")


def test_closing_a_stream_cancels_the_request(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    with Client(target) as client:
        stream = client.stream("hi")
        next(stream)
        stream.close()
        assert script.cancelled.wait(WAIT_S)
        assert list(stream) == []


def test_leaving_the_with_block_cancels_the_request(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    with Client(target) as client:
        with client.stream("hi") as stream:
            next(stream)
        assert script.cancelled.wait(WAIT_S)


def test_breaking_out_of_the_loop_cancels_the_request(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1), delta("b", 2))
    with Client(target) as client:
        for _ in client.stream("hi"):
            break
        assert script.cancelled.wait(WAIT_S)


def test_a_close_from_another_thread_ends_a_waiting_reader(script: Script, target: str) -> None:
    script.hangs(started(), delta("a", 1))
    with Client(target) as client:
        stream = client.stream("hi")
        next(stream)
        closer = threading.Timer(0.05, stream.close)
        closer.start()
        assert list(stream) == []
        closer.join()


def test_the_timeout_covers_the_call_and_reaches_the_server(script: Script, target: str) -> None:
    script.hangs(started())
    begin_s = time.monotonic()
    with Client(target) as client, pytest.raises(DeadlineExceeded):
        client.generate("hi", timeout_s=0.3)
    assert 0.25 < time.monotonic() - begin_s < 60.0
    assert script.timeouts_s[0] is not None
    assert script.timeouts_s[0] < 0.4  # gRPC rounds the timeout.


def test_the_default_timeout_is_ten_minutes(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), finished())
    with Client(target) as client:
        client.generate("hi")
    assert script.timeouts_s[0] == pytest.approx(600.0, abs=5.0)


def test_a_closed_port_is_unavailable_after_the_retries() -> None:
    with Client("127.0.0.1:1", retries=QUICK) as client, pytest.raises(Unavailable):
        client.generate("hi")


def test_a_server_that_starts_between_retries_is_found(script: Script, target: str) -> None:
    # The port is bound but the server is not there: the first tries meet a closed connection.
    calls: list[int] = []

    def refuse(_: object, context: grpc.ServicerContext) -> object:
        calls.append(1)
        fail(context, Unavailable("starting"))
        yield

    script.plays.append(refuse)  # type: ignore[arg-type]
    script.says(started(), delta("a", 1), finished())
    with Client(target, retries=QUICK) as client:
        assert client.generate("hi").text == "a"
    assert calls == [1]


def test_the_token_is_sent_as_a_bearer_token(script: Script, target: str) -> None:
    with Client(target, token="secret") as client:
        client.model()
    assert script.metadata[0]["authorization"] == "Bearer secret"


def test_each_call_states_the_clients_version(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), finished())
    with Client(target) as client:
        assert client.model().version == "9.8.7+abc"
        client.generate("hi")
    assert [one["pdserve-version"] for one in script.metadata] == [FULL_VERSION] * 2


def test_results_are_typed_values(script: Script, target: str) -> None:
    with Client(target) as client:
        assert (client.model().name, client.model().max_context_tokens) == ("m", 512)
        assert client.tokenize("ab") == [97, 98]
        assert (client.end_session("s"), client.end_session("t")) == (True, False)
        topology = client.topology()
        assert [worker.worker_id for worker in topology.of_role("prefill")] == ["p0"]
        explanation = client.explain("r9")
        assert (explanation.request_id, explanation.actual_ttft_s) == ("r9", None)
        assert explanation.candidates[0].is_chosen


def test_unary_calls_are_retried(script: Script, target: str) -> None:
    script.unary_errors = [Unavailable("gone"), Overloaded("full", 0.01)]
    with Client(target, retries=QUICK) as client:
        assert client.model().name == "m"


def test_a_wrong_type_never_reaches_the_server(script: Script, target: str) -> None:
    with Client(target) as client, pytest.raises(TypeError, match="max_tokens"):
        client.stream("hi", max_tokens="64")  # type: ignore[typeddict-item]
    with Client(target) as client, pytest.raises(TypeError, match="session_id"):
        client.end_session(7)  # type: ignore[arg-type]
    assert script.requests == []


def test_a_closed_client_says_so(target: str) -> None:
    client = Client(target)
    other = client.with_token("x")
    client.close()
    calls = (lambda: client.generate("hi"), client.topology, other.model, lambda: client.stream("hi"))
    for call in (*calls, lambda: next(client.watch())):
        with pytest.raises(ValueError, match=r"^this Client is closed$"):
            call()
