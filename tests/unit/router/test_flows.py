"""Each way of a request through the router, command by command."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvLost,
    NoWorkers,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from pdserve.core.types import FinishReason, Path, TokenOut
from router.commands import (
    Admit,
    Cancel,
    Command,
    DrainWorker,
    EmitTokens,
    EndCancelled,
    FailRequest,
    FinishRequest,
    Outcome,
    Prefill,
    Reserve,
)
from router.events import DrainRequested, RouterClosing, StopMatched, TimePassed, WorkerForgotten
from router.lifecycle import IllegalMove, Stage
from router.settings import RouterSettings
from tests.unit.router.given import Given, grant


def reserve(
    attempt: int = 1, worker_id: str = "d0", output: tuple[int, ...] = (), *, is_local: bool = False
) -> Reserve:
    return Reserve(worker_id=worker_id, request_id="a", attempt=attempt, is_local=is_local, output_token_ids=output)


def prefill(attempt: int = 1, worker_id: str = "p0", output: tuple[int, ...] = (), decode: str = "d0") -> Prefill:
    return Prefill(
        worker_id=worker_id,
        request_id="a",
        attempt=attempt,
        grant=grant("a", attempt, decode),
        output_token_ids=output,
    )


def cancel(worker_id: str, attempt: int = 1) -> Cancel:
    return Cancel(worker_id=worker_id, request_id="a", attempt=attempt)


def emit(index: int, *token_ids: int) -> EmitTokens:
    tokens = tuple(TokenOut(token_id=one) for one in token_ids)
    return EmitTokens(request_id="a", first_index=index, tokens=tokens)


def admit(token_id: int = 100, attempt: int = 1, worker_id: str = "d0") -> Admit:
    return Admit(worker_id=worker_id, request_id="a", attempt=attempt, first_token_id=token_id)


def only(commands: list[Command]) -> Command:
    (one,) = commands
    return one


def failure(commands: list[Command]) -> FailRequest:
    one = commands[0]
    assert isinstance(one, FailRequest), commands
    return one


# -- the remote path ---------------------------------------------------------------------------------------------


def test_a_request_goes_through_prefill_transfer_and_decode(given: Given) -> None:
    assert given.arrives() == [reserve()]
    given.now_s = 0.25
    assert given.granted() == [prefill()]
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
    assert (timings.queue_s, timings.prefill_s, timings.transfer_s, timings.decode_s) == (0.01, 0.2, 0.05, 0.7)
    assert (timings.path, timings.prefill_worker, timings.decode_worker) == (Path.REMOTE, "p0", "d0")
    assert (timings.attempts, timings.transfer_bytes) == (1, 4096)
    assert not given.state.is_empty, "memory is still held"
    given.released("p0")
    given.released("d0")
    assert given.state.is_empty


def test_the_kv_may_be_committed_before_the_first_token_is_heard_of(given: Given) -> None:
    given.prefilling()
    assert given.committed() == []
    assert given.state.stage_of("a") is Stage.LANDED
    assert given.first(100) == [emit(0, 100), admit()]
    assert given.state.stage_of("a") is Stage.DECODING


def test_a_first_token_that_is_the_last_is_never_admitted(given: Given) -> None:
    given.prefilling()
    emitted, finished, *cancels = given.first(100, finish=FinishReason.LENGTH)
    assert emitted == emit(0, 100)
    assert isinstance(finished, FinishRequest)
    assert finished.timings.tpot_s == 0.0
    assert cancels == [cancel("d0"), cancel("p0")]


def test_the_prefill_worker_may_release_before_and_after_the_commit(given: Given) -> None:
    given.moving()
    assert given.released("p0") == []
    assert given.committed() == []
    assert given.tokens(1, [101]) == [emit(1, 101)]


# -- the local path ----------------------------------------------------------------------------------------------


@pytest.fixture
def local() -> Given:
    one = Given(RouterSettings(policy="colocated", is_strict=True))
    one.connect_decode("d0")
    return one


def test_a_local_request_is_seated_and_answered_by_one_worker(local: Given) -> None:
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


def test_without_a_prefill_worker_the_decode_worker_does_everything() -> None:
    for policy in ("least-ttft", "round-robin", "colocated"):
        one = Given(RouterSettings(policy=policy, is_strict=True))
        one.connect_decode("d0")
        assert one.arrives() == [reserve(is_local=True)]


# -- stop strings, cancels, deadlines ----------------------------------------------------------------------------


def test_a_stop_string_ends_the_request_and_tells_the_workers(given: Given) -> None:
    given.decoding()
    given.tokens(1, [101, 102])
    finished, *cancels = given.hand(StopMatched(request_id="a", num_output_tokens=2))
    assert isinstance(finished, FinishRequest)
    assert finished.reason is FinishReason.STOP
    assert finished.usage.completion_tokens == 2
    assert cancels == [cancel("d0"), cancel("p0")]
    assert given.tokens(3, [103]) == [], "late tokens are dropped"
    assert given.hand(StopMatched(request_id="a", num_output_tokens=2)) == []


STAGES: dict[Stage, Callable[[Given], None]] = {
    Stage.RESERVING: Given.reserving,
    Stage.PREFILLING: Given.prefilling,
    Stage.MOVING: Given.moving,
    Stage.LANDED: Given.landed,
    Stage.DECODING: Given.decoding,
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_frees_both_workers_at_once(given: Given, stage: Stage) -> None:
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


def test_a_client_that_leaves_the_queue_costs_nothing(given: Given) -> None:
    given.lost("d0")
    given.arrives()
    assert given.state.stage_of("a") is Stage.QUEUED
    assert isinstance(only(given.leaves()), EndCancelled)
    assert given.state.is_empty


@pytest.mark.parametrize("stage", STAGES)
def test_a_deadline_ends_the_request_wherever_it_is(given: Given, stage: Stage) -> None:
    given.connect_decode("d0", incarnation="d0.2")
    original = given.arrives
    given.arrives = lambda *names, **facts: original(*names, deadline_s=2.0, **facts)  # type: ignore[method-assign]
    STAGES[stage](given)
    assert given.state.stage_of("a") is stage
    given.now_s = 2.0
    failed, *cancels = given.hand(TimePassed())
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


def test_the_deadline_is_passed_on_as_what_remains_of_it(given: Given) -> None:
    assert given.arrives(deadline_s=4.0) == [
        Reserve(worker_id="d0", request_id="a", attempt=1, is_local=False, deadline_s=4.0)
    ]
    given.now_s = 1.5
    sent = only(given.granted())
    assert isinstance(sent, Prefill)
    assert sent.deadline_s == 2.5


# -- workers die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_when_the_decode_worker_dies_the_stream_goes_on_at_the_next_token(given: Given, stage: Stage) -> None:
    given.connect_decode("d1")
    STAGES[stage](given)
    commands = given.lost("d0")
    had_token = stage in (Stage.MOVING, Stage.DECODING)
    expected: list[Command] = [] if stage is Stage.RESERVING else [cancel("p0")]
    assert commands == [*expected, reserve(2, "d1", (100,) if had_token else ())]
    index = 1 if had_token else 0
    assert given.granted(2, "d1") == [prefill(2, "p0", (100,) if had_token else (), "d1")]
    assert given.first(200, 2)[0] == emit(index, 200)


def test_tokens_emitted_before_a_death_are_never_sent_again(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    given.tokens(1, [101, 102])
    assert given.lost("d0")[-1] == reserve(2, "d1", (100, 101, 102))
    given.granted(2, "d1")
    assert given.first(103, 2) == [emit(3, 103), admit(103, 2, "d1")]
    given.committed(attempt=2, worker_id="d1")
    assert given.tokens(4, [104], 2, "d1") == [emit(4, 104)]


@pytest.mark.parametrize("stage", [Stage.RESERVING, Stage.PREFILLING, Stage.MOVING, Stage.LANDED])
def test_when_the_prefill_worker_dies_another_one_takes_over(given: Given, stage: Stage) -> None:
    given.connect_prefill("p1")
    STAGES[stage](given)
    had_token = stage is Stage.MOVING
    assert given.lost("p0") == [cancel("d0"), reserve(2, "d0", (100,) if had_token else ())]
    given.released("d0")
    assert given.granted(2) == [prefill(2, "p1", (100,) if had_token else ())]


def test_when_the_only_prefill_worker_dies_the_decode_worker_computes_itself(given: Given) -> None:
    given.prefilling()
    assert given.lost("p0") == [cancel("d0"), reserve(2, is_local=True)]


def test_a_prefill_worker_that_dies_after_the_commit_is_not_missed(given: Given) -> None:
    given.decoding()
    assert given.lost("p0") == []
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_old_messages_after_a_recovery_are_counted_and_dropped(given: Given) -> None:
    given.connect_prefill("p1")
    given.prefilling()
    given.lost("p0")
    late = given.state.counters["late"]
    assert given.committed(attempt=1) == []
    assert given.tokens(0, [100], attempt=1) == []
    assert given.granted(attempt=1) == []
    assert given.state.counters["late"] == late + 3


def test_a_worker_that_comes_back_under_its_name_starts_empty(given: Given) -> None:
    given.decoding()
    # The hello of the new stream overtakes the end of the old one.
    commands = given.connect_decode("d0", life=2)
    assert commands == [cancel("p0"), reserve(2, "d0", (100,))]


def test_a_request_that_kills_two_workers_gets_no_third(given: Given) -> None:
    given.connect_decode("d1")
    given.connect_decode("d2")
    given.prefilling()
    given.lost("d0")
    given.granted(2, "d1")
    failed = failure(given.lost("d1"))
    assert isinstance(failed.to_error(), InternalError)
    assert "2 workers died" in failed.message


def test_a_request_that_lived_well_between_two_deaths_goes_on(given: Given) -> None:
    given.connect_decode("d1")
    given.connect_decode("d2")
    given.arrives(max_tokens=100)
    given.granted()
    given.lost("d0")
    given.granted(2, "d1")
    given.first(100, 2)
    given.committed(attempt=2, worker_id="d1")
    given.tokens(1, list(range(101, 111)), 2, "d1")
    assert given.lost("d1")[-1] == reserve(3, "d2", tuple(range(100, 111)))


def test_workers_that_die_together_are_not_blamed_on_their_requests(given: Given) -> None:
    """d0 dies in mid-answer, d1 before it has granted a place, d2 before it has computed a token."""
    for index in range(1, 4):
        given.connect_decode(f"d{index}")
    given.arrives(max_tokens=100)
    given.granted()
    given.first(100, 1)
    given.committed()
    given.tokens(1, list(range(101, 111)))
    assert given.lost("d0")[-1] == reserve(2, "d1", tuple(range(100, 111)))
    assert given.lost("d1")[-1] == reserve(3, "d2", tuple(range(100, 111)))
    given.granted(3, "d2")
    assert given.lost("d2")[-1] == reserve(4, "d3", tuple(range(100, 111)))


def test_a_draining_worker_that_leaves_is_no_death(given: Given) -> None:
    for index in range(1, 4):
        given.connect_decode(f"d{index}")
    given.prefilling()
    for attempt in (1, 2, 3):
        worker_id = f"d{attempt - 1}"
        given.hand(DrainRequested(worker_id=worker_id))
        assert only(given.lost(worker_id)[-1:]) == reserve(attempt + 1, f"d{attempt}")
        given.granted(attempt + 1, f"d{attempt}")


def test_a_silent_worker_is_routed_around_and_then_given_up(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    commands: list[Command] = []
    while not commands:
        given.now_s += 1.0
        commands = given.heard("d1") + given.heard("p0")
        if given.now_s == 6.0:
            for name in ("b", "c"):
                (one,) = given.arrives(name)
                assert isinstance(one, Reserve)
                assert one.worker_id == "d1"
    assert 10.0 <= given.now_s <= 12.5
    assert commands == [cancel("d0"), cancel("p0"), reserve(2, "d1", (100,))]


def test_a_router_that_was_stopped_itself_blames_no_worker(given: Given) -> None:
    given.decoding()
    given.now_s += 3600.0
    assert given.hand(TimePassed()) == []
    assert given.tokens(1, [101]) == [emit(1, 101)]


# -- refusals and failures ---------------------------------------------------------------------------------------


def test_a_decode_worker_that_refuses_is_passed_over(given: Given) -> None:
    given.connect_decode("d1")
    given.arrives()
    assert given.refused("d0") == [reserve(2, "d1")]


def test_a_prefill_worker_that_refuses_gives_the_grant_back(given: Given) -> None:
    given.connect_prefill("p1")
    given.prefilling()
    assert given.refused("p0") == [cancel("d0"), reserve(2)]
    given.released("d0")
    assert given.granted(2) == [prefill(2, "p1")]


def test_refusals_by_everybody_are_waited_out_and_do_not_spin(given: Given) -> None:
    given.arrives()
    asked = 1
    for _ in range(200):
        attempt = asked
        if given.state.stage_of("a") is Stage.RESERVING:
            given.refused("d0", attempt)
        given.now_s += 0.01
        if reserve(asked + 1) in given.hand(TimePassed()):
            asked += 1
    assert 4 <= asked <= 21, "about one question per retry_after_s in two seconds"


def test_refusals_do_not_use_up_attempts(given: Given) -> None:
    given.arrives()
    for attempt in range(1, 10):
        given.refused("d0", attempt)
        assert given.at(given.now_s + 1.0) == [reserve(attempt + 1)]
    given.granted(10)
    given.first(100, 10)
    given.committed(attempt=10)
    _, finished = given.tokens(1, [101], 10, finish=FinishReason.STOP)
    assert isinstance(finished, FinishRequest)
    assert finished.timings.attempts == 1


def test_a_sequence_that_is_too_large_for_every_worker_is_invalid(given: Given) -> None:
    given.arrives()
    error = failure(given.refused("d0", reason=RefusalReason.TOO_LARGE)).to_error()
    assert isinstance(error, InvalidRequest)
    assert error.field == "prompt"


def test_a_prompt_beyond_every_pool_is_refused_before_anybody_is_asked(given: Given) -> None:
    error = failure(given.arrives(prompt=5000)).to_error()
    assert isinstance(error, InvalidRequest)
    assert "512" in str(error)


def test_a_failed_transfer_is_tried_again_through_another_prefill_worker(given: Given) -> None:
    given.connect_prefill("p1")
    given.moving()
    assert given.committed(is_committed=False) == [cancel("d0"), cancel("p0"), reserve(2, "d0", (100,))]
    assert given.granted(2) == [prefill(2, "p1", (100,))]


def test_a_transfer_that_fails_between_the_only_pair_ends_on_the_local_path(given: Given) -> None:
    given.moving()
    assert given.committed(is_committed=False)[-1] == reserve(2, "d0", (100,), is_local=True)


def test_the_senders_complaint_after_the_commit_is_counted_only(given: Given) -> None:
    given.decoding()
    assert given.committed(is_committed=False, worker_id="p0") == []
    assert given.failed("p0", FailureKind.TRANSFER) == []
    assert given.state.counters["sender_disagrees"] == 2
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_an_internal_error_sends_the_request_elsewhere(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    assert given.failed("d0", FailureKind.INTERNAL) == [cancel("d0"), cancel("p0"), reserve(2, "d1", (100,))]


def test_an_invalid_sequence_is_tried_nowhere_else(given: Given) -> None:
    given.connect_decode("d1")
    given.prefilling()
    failed = failure(given.failed("p0", FailureKind.INVALID, message="token 9999 is not in the vocabulary"))
    assert isinstance(failed.to_error(), InvalidRequest)
    assert "9999" in failed.message


def test_a_deadline_that_a_worker_noticed_first_ends_the_request(given: Given) -> None:
    given.prefilling()
    assert isinstance(failure(given.failed("p0", FailureKind.DEADLINE)).to_error(), DeadlineExceeded)


@pytest.mark.parametrize(
    ("kind", "error"), [(FailureKind.TRANSFER, TransferFailed), (FailureKind.INTERNAL, InternalError)]
)
def test_when_all_attempts_are_lost_the_error_says_why(given: Given, kind: FailureKind, error: type[Exception]) -> None:
    given.arrives()
    for attempt in range(1, 5):
        stage = given.state.stage_of("a")
        if stage is Stage.RESERVING:
            given.granted(attempt)
        else:
            assert stage is Stage.SEATING
            given.seated(attempt)
        commands = given.failed("d0", kind, attempt, message="again")
        given.released("d0", attempt)
        if attempt < 4:
            given.at(given.now_s + 3.0)
    failed = failure(commands)
    assert isinstance(failed.to_error(), error)
    assert "again" in failed.message
    assert failed.timings is not None
    assert failed.timings.attempts == 4


def test_deaths_in_a_row_end_as_lost_kv() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, max_attempts=2, max_worker_deaths=9))
    given.connect_prefill("p0")
    for index in range(3):
        given.connect_decode(f"d{index}")
    given.prefilling()
    given.lost("d0")
    given.granted(2, "d1")
    assert isinstance(failure(given.lost("d1")).to_error(), KvLost)


def test_memory_that_is_released_too_early_counts_as_a_failure(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    assert given.released("d0")[-1] == reserve(2, "d1", (100,))


def test_missing_tokens_are_never_skipped(given: Given) -> None:
    given.decoding()
    assert given.tokens(3, [103])[-1] == reserve(2, "d0", (100,), is_local=True)


def test_repeated_tokens_are_dropped(given: Given) -> None:
    given.decoding()
    given.tokens(1, [101, 102])
    assert given.tokens(2, [102, 103]) == [emit(3, 103)]
    assert given.state.counters["repeated_tokens"] == 1


# -- nobody there, too many --------------------------------------------------------------------------------------


def test_where_no_decode_worker_was_ever_known_the_refusal_is_immediate() -> None:
    given = Given(RouterSettings(is_strict=True))
    given.connect_prefill("p0")
    failed = failure(given.arrives())
    assert failed.outcome is Outcome.REFUSED
    error = failed.to_error()
    assert isinstance(error, NoWorkers)
    assert error.role == "decode"


def test_requests_wait_a_while_for_decode_workers_to_come_back(given: Given) -> None:
    given.lost("d0")
    assert given.arrives() == []
    assert given.at(9.9) == []
    assert given.connect_decode("d0", life=2) == [reserve()]


def test_requests_that_waited_long_enough_for_workers_are_refused(given: Given) -> None:
    given.lost("d0")
    given.arrives()
    assert isinstance(failure(given.at(60.0)).to_error(), NoWorkers)
    assert isinstance(failure(given.arrives("b")).to_error(), NoWorkers), "now everybody knows"


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, max_queue=2))
    given.connect_decode("d0", inbox_depth=1)
    given.arrives("a")
    for name in "bc":
        assert given.arrives(name) == []
    failed = failure(given.arrives("d"))
    assert failed.outcome is Outcome.REFUSED
    error = failed.to_error()
    assert isinstance(error, Overloaded)
    assert 0.0 < error.retry_after_s <= 30.0
    assert given.state.num_queued == 2


def test_a_router_that_closes_takes_nobody_new_and_serves_the_rest(given: Given) -> None:
    given.decoding()
    given.hand(RouterClosing())
    assert isinstance(failure(given.arrives("b")).to_error(), Unavailable)
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_a_drained_worker_gets_nothing_new_and_keeps_its_residents(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    assert given.hand(DrainRequested(worker_id="d0")) == [DrainWorker(worker_id="d0")]
    for name in ("b", "c"):
        one = given.arrives(name)[0]
        assert isinstance(one, Reserve)
        assert one.worker_id == "d1"
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_a_forgotten_worker_leaves_no_trace(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    commands = given.hand(WorkerForgotten(worker_id="d0"))
    assert commands[-1] == reserve(2, "d1", (100,))
    assert [worker.worker_id for worker in given.state.snapshot().workers] == ["d1", "p0"]


def test_a_worker_that_never_releases_does_not_fill_the_memory(given: Given) -> None:
    given.decoding()
    given.tokens(1, [101], finish=FinishReason.STOP)
    given.at(119.0)
    assert not given.state.is_empty
    given.at(121.0)
    assert given.state.is_empty
    assert given.state.counters["never_released"] == 2


# -- order and explanations --------------------------------------------------------------------------------------


def test_waiting_requests_go_by_priority_then_by_promised_time() -> None:
    from pdserve.core.types import Slo

    given = Given(RouterSettings(policy="least-ttft", is_strict=True))
    given.connect_decode("d0", inbox_depth=1)
    given.arrives("a")
    given.arrives("lazy", slo=Slo(ttft_s=9.0))
    given.arrives("hasty", slo=Slo(ttft_s=0.5))
    given.arrives("vip", slo=Slo(ttft_s=9.0), priority=1)
    order = []
    name = "a"
    for _ in range(3):
        given.seated(request_id=name)
        one = given.tokens(0, [1], request_id=name)[-1]
        assert isinstance(one, Reserve)
        name = one.request_id
        order.append(name)
    assert order == ["vip", "hasty", "lazy"]


def test_a_placement_is_explained_and_its_outcome_added() -> None:
    given = Given(RouterSettings(is_strict=True, explain_capacity=2))
    given.connect_prefill("p0")
    given.connect_decode("d0")
    given.decoding()
    given.now_s = 1.0
    given.tokens(1, [101], finish=FinishReason.STOP)
    explained = given.state.explain("a")
    assert explained is not None
    assert explained.decision.reason.startswith("least predicted TTFT")
    assert [(one.prefill_worker, one.decode_worker) for one in explained.decision.candidates] == [
        ("p0", "d0"),
        ("", "d0"),
    ]
    assert (explained.actual_ttft_s, explained.actual_tpot_s) == (0.0, 1.0)
    given.arrives("b")
    given.arrives("c")
    assert given.state.explain("a") is None, "only the last ones are kept"


def test_a_second_grant_for_one_attempt_is_illegal(given: Given) -> None:
    given.prefilling()
    with pytest.raises(IllegalMove, match="granted"):
        given.granted()


def test_in_production_an_illegal_message_changes_nothing() -> None:
    given = Given(RouterSettings(policy="round-robin"))
    given.connect_prefill("p0")
    given.connect_decode("d0")
    given.decoding()
    assert given.granted() == []
    assert given.first(7) == []
    assert given.state.counters["illegal"] == 2
    assert given.tokens(1, [101]) == [emit(1, 101)]
