"""Ends before the answer is complete: stop strings, disconnects, deadlines, no workers, a full queue."""

from __future__ import annotations

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.errors import (
    NONE_YET,
    DeadlineExceeded,
    NoWorkers,
    Overloaded,
    ShuttingDown,
)
from pdserve.core.protocol import Cancel, DrainWorker, Load, Prefill, Reserve, UndrainWorker
from pdserve.core.types import FinishReason
from router.state.interface import (
    Command,
    DrainEnded,
    DrainRequested,
    EndCancelled,
    FailRequest,
    FinishRequest,
    Outcome,
    RouterClosing,
    RouterSettings,
    StopMatched,
    TimePassed,
    UndrainRequested,
    WorkerForgotten,
)
from router.state.lifecycle import Stage
from tests.unit.router.expected import cancel, emit, failure, only, reserve
from tests.unit.router.given import STAGES, Given


def test_a_stop_string_ends_the_request_on_all_workers(given: Given) -> None:
    given.decoding()
    given.tokens(1, [101, 102])
    finished, *cancels = given.submit(StopMatched(request_id="a", num_output_tokens=2))
    assert isinstance(finished, FinishRequest)
    assert finished.reason is FinishReason.STOP
    assert finished.usage.completion_tokens == 2
    assert cancels == [cancel("d0"), cancel("p0")]
    assert given.tokens(3, [103]) == [], "late tokens are dropped"
    assert given.submit(StopMatched(request_id="a", num_output_tokens=2)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_disconnect_frees_both_workers(given: Given, stage: Stage) -> None:
    STAGES[stage](given)
    assert given.state.stage_of("a") is stage
    gone, *cancels = given.leaves()
    assert isinstance(gone, EndCancelled)
    assert cancels == ([cancel("d0")] if stage is Stage.RESERVING else [cancel("d0"), cancel("p0")])
    assert given.leaves() == []
    for one in cancels:
        assert isinstance(one, Cancel)
        assert not given.state.is_empty
        given.released(one.worker_id)
    assert given.state.is_empty


def test_a_disconnect_in_the_queue_sends_no_command(given: Given) -> None:
    given.lost("d0")
    given.arrives()
    assert given.state.stage_of("a") is Stage.QUEUED
    assert isinstance(only(given.leaves()), EndCancelled)
    assert given.state.is_empty


@pytest.mark.parametrize("stage", STAGES)
def test_a_deadline_ends_a_request_at_any_stage(given: Given, stage: Stage) -> None:
    given.connect_decode("d0", incarnation="d0.2")
    original = given.arrives
    given.arrives = lambda *names, **facts: original(*names, deadline_s=2.0, **facts)  # type: ignore[method-assign]
    STAGES[stage](given)
    assert given.state.stage_of("a") is stage
    given.now_s = 2.0
    failed, *cancels = given.submit(TimePassed())
    assert isinstance(failed, FailRequest)
    assert failed.outcome is Outcome.EXPIRED
    assert isinstance(failed.to_error(), DeadlineExceeded)
    assert str(failed.to_error()).endswith(stage.value)
    assert cancels == ([cancel("d0")] if stage is Stage.RESERVING else [cancel("d0"), cancel("p0")])


def test_a_grant_after_the_deadline_starts_no_prefill(given: Given) -> None:
    given.arrives(deadline_s=1.0)
    given.now_s = 1.5
    failed, *cancels = given.granted()
    assert isinstance(failed, FailRequest)
    assert cancels == [cancel("d0")]


def test_workers_receive_the_remaining_time(given: Given) -> None:
    assert given.arrives(deadline_s=4.0) == [Reserve(key=AttemptKey("d0", "a", 1), is_local=False, deadline_s=4.0)]
    given.now_s = 1.5
    sent = only(given.granted())
    assert isinstance(sent, Prefill)
    assert sent.deadline_s == 2.5


def test_without_any_decode_worker_a_request_is_rejected_at_once() -> None:
    given = Given(RouterSettings(is_strict=True))
    given.connect_prefill("p0")
    failed = failure(given.arrives())
    assert failed.outcome is Outcome.REJECTED
    error = failed.to_error()
    assert isinstance(error, NoWorkers)
    assert (error.role, error.states) == ("decode", NONE_YET)


def test_requests_wait_for_decode_workers_to_reconnect(given: Given) -> None:
    given.lost("d0")
    assert given.arrives() == []
    assert given.at(9.9) == []
    assert given.connect_decode("d0", generation=2) == [reserve(waited_s=9.9)]


def test_requests_are_rejected_if_no_worker_reconnects(given: Given) -> None:
    given.lost("d0")
    given.arrives()
    error = failure(given.at(60.0)).to_error()
    assert (type(error), error.message) == (NoWorkers, "no decode worker is available: 1 away")
    assert isinstance(failure(given.arrives("b")).to_error(), NoWorkers), "now everybody knows"


def test_a_full_queue_rejects_with_a_retry_time() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, max_queue=2))
    given.connect_decode("d0", inbox_depth=1)
    given.arrives("a")
    for name in "bc":
        assert given.arrives(name) == []
    failed = failure(given.arrives("d"))
    assert failed.outcome is Outcome.REJECTED
    error = failed.to_error()
    assert isinstance(error, Overloaded)
    assert 0.0 < error.retry_after_s <= 30.0
    assert given.state.num_queued == 2


def test_a_closing_router_only_finishes_its_requests(given: Given) -> None:
    given.decoding()
    given.submit(RouterClosing())
    assert isinstance(failure(given.arrives("b")).to_error(), ShuttingDown)
    assert given.tokens(1, [101]) == [emit(1, 101)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_end_of_a_drain_fails_a_request_at_any_stage(given: Given, stage: Stage) -> None:
    STAGES[stage](given)
    failed = failure(given.submit(DrainEnded()))
    assert (failed.outcome, type(failed.to_error())) == (Outcome.FAILED, ShuttingDown)
    assert given.submit(DrainEnded()) == []
    assert isinstance(failure(given.arrives("b")).to_error(), ShuttingDown)


def test_a_drained_worker_gets_no_new_requests(given: Given) -> None:
    given.connect_decode("d1")
    assert given.submit(DrainRequested(worker_id="d0")) == [DrainWorker(worker_id="d0")]
    for name in ("b", "c"):
        one = given.arrives(name)[0]
        assert isinstance(one, Reserve)
        assert one.worker_id == "d1"


def test_an_undrained_worker_gets_new_work_again(given: Given) -> None:
    given.submit(DrainRequested(worker_id="d0"))
    given.submit(drained_report("d0"))
    [d0] = [one for one in given.state.snapshot().workers if one.worker_id == "d0"]
    assert (d0.is_drained, d0.is_draining, d0.is_usable) == (True, True, False)
    assert reserved(given.arrives("waits")) == []
    assert UndrainWorker(worker_id="d0") in given.submit(UndrainRequested(worker_id="d0"))
    assert reserved(given.heard("d0")) == ["d0"]


def test_another_router_may_undo_a_drain(given: Given) -> None:
    given.submit(DrainRequested(worker_id="d0"))
    given.heard("d0")  # Reported before the worker received the drain.
    assert reserved(given.arrives("waits")) == []
    given.submit(drained_report("d0"))
    assert reserved(given.heard("d0")) == ["d0"]  # Another router has undone the drain.


def test_requests_fail_early_while_all_decode_workers_are_drained(given: Given) -> None:
    given.connect_decode("d1")
    for name in ("d0", "d1"):
        given.submit(DrainRequested(worker_id=name))
    assert given.arrives("a") == []
    given.now_s += 4.9
    assert given.submit(TimePassed()) == []
    given.now_s += 0.2
    error = failure(given.submit(TimePassed())).to_error()
    assert (type(error), error.message) == (NoWorkers, "no decode worker is available: 2 drained")
    assert isinstance(error, NoWorkers)
    assert error.retry_after_s == 1.0
    assert isinstance(failure(given.arrives("b")).to_error(), NoWorkers), "the later ones fail at once"
    given.submit(UndrainRequested(worker_id="d1"))
    given.heard("d1")
    assert reserved(given.arrives("c")) == ["d1"]


def test_requests_wait_for_a_lost_worker_beside_a_drained_one(given: Given) -> None:
    given.connect_decode("d1")
    given.submit(DrainRequested(worker_id="d0"))
    given.lost("d1")
    assert given.arrives("a") == []
    given.now_s += 6.0
    assert given.submit(TimePassed()) == []
    assert reserved(given.connect_decode("d1")) == ["d1"]


def test_a_worker_that_shuts_down_is_not_shown_as_drained(given: Given) -> None:
    given.submit(Load(worker_id="d0", steps=1, free_blocks=64, is_draining=True))
    [d0] = [one for one in given.state.snapshot().workers if one.worker_id == "d0"]
    assert (d0.is_drained, d0.is_draining) == (False, True)


def test_a_rejection_names_the_states_of_the_decode_workers(given: Given) -> None:
    given.submit(DrainRequested(worker_id="d0"))
    for name in ("d1", "d2", "d3", "d4"):
        given.connect_decode(name)
    given.lost("d1")
    given.lost("d2")
    given.submit(Load(worker_id="d3", steps=1, free_blocks=64, is_draining=True))
    given.submit(Load(worker_id="d4", steps=1, free_blocks=64))
    commands: list[Command] = []
    for second in range(70):  # only p0 reports in that time
        given.now_s += 1.0
        commands += given.heard("p0")
        if second == 6:
            assert given.arrives("a") == []
    error = failure(commands).to_error()
    assert error.message == (
        "no decode worker is available: 2 away, 1 drained, 1 draining, 1 without a recent load report"
    )
    for name in ("d0", "d1", "d2", "d3", "d4"):
        given.submit(WorkerForgotten(worker_id=name))
    assert failure(given.arrives("b")).to_error().message == "no decode worker is available: none is left"


def test_only_workers_that_could_hold_the_request_are_named() -> None:
    given = Given(RouterSettings(is_strict=True))
    given.connect_prefill("p0")
    given.connect_decode("d0", num_blocks=4)
    given.connect_decode("d1", num_blocks=4096)
    given.lost("d1")
    assert given.arrives("long", prompt=500) == []
    given.now_s += 30.0
    for name in ("p0", "d0"):
        given.heard(name)
    given.now_s += 31.0
    failed = [one for name in ("p0", "d0") for one in given.heard(name)]
    assert failure(failed).to_error().message == "no decode worker is available: 1 away"


def reserved(commands: list[Command]) -> list[str]:
    return [one.worker_id for one in commands if isinstance(one, Reserve)]


def drained_report(worker_id: str) -> Load:
    return Load(worker_id=worker_id, steps=1, free_blocks=64, is_draining=True, is_drained=True)


def test_a_forgotten_worker_leaves_no_state(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    commands = given.submit(WorkerForgotten(worker_id="d0"))
    assert commands[-1] == reserve(2, "d1", (100,))
    assert [worker.worker_id for worker in given.state.snapshot().workers] == ["d1", "p0"]


def test_requests_without_a_release_are_forgotten(given: Given) -> None:
    given.decoding()
    given.tokens(1, [101], finish=FinishReason.STOP)
    given.at(119.0)
    assert not given.state.is_empty
    given.at(121.0)
    assert given.state.is_empty
    assert given.state.counters["never_released"] == 2
