"""The remote and the local path of a request through the router, command by command."""

from __future__ import annotations

import pytest

from pdserve.core.types import FinishReason, Path
from router.state.interface import FinishRequest, RouterSettings
from router.state.lifecycle import Stage
from tests.unit.router.expected import admit, cancel, emit, prefill, reserve
from tests.unit.router.given import Given


def test_a_request_goes_through_prefill_transfer_and_decode(given: Given) -> None:
    assert given.arrives() == [reserve()]
    given.now_s = 0.25
    assert given.granted() == [prefill(waited_s=0.25)]
    given.now_s = 0.5
    assert given.first(100) == [emit(0, 100), admit()]
    assert given.committed() == []
    given.now_s = 1.0
    assert given.tokens(1, [101]) == [emit(1, 101)]
    given.now_s = 1.5
    emitted, finished = given.tokens(2, [102, 103], finish=FinishReason.STOP)
    assert emitted == emit(2, 102, 103)
    assert isinstance(finished, FinishRequest)
    assert finished.reason is FinishReason.STOP
    assert finished.usage.prompt_tokens == 100
    assert finished.usage.completion_tokens == 4
    assert finished.usage.cached_prompt_tokens == 16
    timings = finished.timings
    assert (timings.ttft_s, timings.tpot_s, timings.total_s) == (0.5, pytest.approx(1.0 / 3), 1.5)
    assert timings.transfer_s == 0.05
    assert timings.phases.total_s == pytest.approx(timings.total_s)
    assert (timings.path, timings.prefill_worker, timings.decode_worker) == (Path.REMOTE, "p0", "d0")
    assert (timings.attempts, timings.transfer_bytes) == (1, 4096)
    assert not given.state.is_empty, "memory is still held"
    given.released("p0")
    given.released("d0")
    assert given.state.is_empty


def test_kv_may_be_committed_before_the_first_token_arrives(given: Given) -> None:
    given.prefilling()
    assert given.committed() == []
    assert given.state.stage_of("a") is Stage.LANDED
    assert given.first(100) == [emit(0, 100), admit()]
    assert given.state.stage_of("a") is Stage.DECODING


def test_an_answer_of_one_token_is_never_admitted(given: Given) -> None:
    given.prefilling()
    emitted, finished, *cancels = given.first(100, finish=FinishReason.LENGTH)
    assert emitted == emit(0, 100)
    assert isinstance(finished, FinishRequest)
    assert finished.timings.tpot_s == 0.0
    assert cancels == [cancel("d0")]  # The prefill worker frees its memory without a command.
    given.released("p0")
    given.released("d0")
    assert given.state.is_empty


def test_the_prefill_worker_may_release_before_and_after_the_commit(given: Given) -> None:
    given.moving()
    assert given.released("p0") == []
    assert given.committed() == []
    assert given.tokens(1, [101]) == [emit(1, 101)]


@pytest.fixture
def local() -> Given:
    one = Given(RouterSettings(policy="colocated", is_strict=True))
    one.connect_decode("d0")
    return one


def test_one_worker_serves_a_local_request(local: Given) -> None:
    assert local.arrives() == [reserve(is_local=True)]
    assert local.seated() == []
    assert local.tokens(0, [100]) == [emit(0, 100)]
    emitted, finished = local.tokens(1, [101], finish=FinishReason.LENGTH)
    assert emitted == emit(1, 101)
    assert isinstance(finished, FinishRequest)
    assert finished.timings.path is Path.LOCAL
    assert finished.timings.prefill_worker == ""
    local.released("d0")
    assert local.state.is_empty


def test_without_prefill_workers_all_work_is_local() -> None:
    for policy in ("least-ttft", "round-robin", "colocated"):
        one = Given(RouterSettings(policy=policy, is_strict=True))
        one.connect_decode("d0")
        assert one.arrives() == [reserve(is_local=True)]
