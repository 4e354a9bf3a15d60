"""Workers that decline or fail, and invalid messages."""

from __future__ import annotations

import pytest

from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvLost,
    TransferFailed,
)
from pdserve.core.types import FinishReason
from router.state.interface import FinishRequest, RouterSettings, TimePassed
from router.state.lifecycle import IllegalMove, Stage
from tests.unit.router.expected import cancel, emit, failure, prefill, reserve
from tests.unit.router.given import Given


def test_a_declining_decode_worker_is_skipped(given: Given) -> None:
    given.connect_decode("d1")
    given.arrives()
    assert given.refused("d0") == [reserve(2, "d1")]


def test_a_declining_prefill_worker_releases_the_grant(given: Given) -> None:
    given.connect_prefill("p1")
    given.prefilling()
    assert given.refused("p0") == [cancel("d0"), reserve(2)]
    given.released("d0")
    assert given.granted(2) == [prefill(2, "p1")]


def test_if_all_workers_decline_the_request_backs_off(given: Given) -> None:
    given.arrives()
    asked = 1
    for _ in range(200):
        attempt = asked
        if given.state.stage_of("a") is Stage.RESERVING:
            given.refused("d0", attempt)
        given.now_s += 0.01
        if reserve(asked + 1, waited_s=given.now_s) in given.submit(TimePassed()):
            asked += 1
    assert 4 <= asked <= 21, "about one question per retry_after_s in two seconds"


def test_declined_attempts_do_not_count(given: Given) -> None:
    given.arrives()
    for attempt in range(1, 10):
        given.refused("d0", attempt)
        assert given.at(given.now_s + 1.0) == [reserve(attempt + 1, waited_s=given.now_s)]
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


def test_a_prompt_larger_than_every_pool_is_rejected(given: Given) -> None:
    error = failure(given.arrives(prompt=5000)).to_error()
    assert isinstance(error, InvalidRequest)
    assert "512" in str(error)


def test_a_failed_transfer_is_retried_on_another_pair(given: Given) -> None:
    given.connect_prefill("p1")
    given.moving()
    assert given.committed(is_committed=False) == [cancel("d0"), cancel("p0"), reserve(2, "d0", (100,))]
    assert given.granted(2) == [prefill(2, "p1", (100,))]


def test_after_a_failed_transfer_the_only_pair_falls_back_to_local(given: Given) -> None:
    given.moving()
    assert given.committed(is_committed=False)[-1] == reserve(2, "d0", (100,), is_local=True)


def test_a_sender_error_after_the_commit_is_only_counted(given: Given) -> None:
    given.decoding()
    assert given.committed(is_committed=False, worker_id="p0") == []
    assert given.failed("p0", FailureKind.TRANSFER) == []
    assert given.state.counters["sender_disagrees"] == 2
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_an_internal_error_moves_the_request(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    assert given.failed("d0", FailureKind.INTERNAL) == [cancel("d0"), cancel("p0"), reserve(2, "d1", (100,))]


def test_an_invalid_sequence_is_not_retried(given: Given) -> None:
    given.connect_decode("d1")
    given.prefilling()
    failed = failure(given.failed("p0", FailureKind.INVALID, message="token 9999 is not in the vocabulary"))
    assert isinstance(failed.to_error(), InvalidRequest)
    assert "9999" in failed.message


@pytest.mark.parametrize(
    ("message", "field", "seen", "expected"),
    [
        ("json_schema: stuck after 3 tokens", "json_schema", "stuck after 3 tokens", "compiles"),
        ("grammar: 0.7 s for a mask", "grammar", "0.7 s for a mask", "compiles"),
        ("prompt_token_ids: none", "request", "prompt_token_ids: none", "a worker can run"),
    ],
)
def test_a_failed_grammar_names_its_field(given: Given, message: str, field: str, seen: str, expected: str) -> None:
    given.prefilling()
    error = failure(given.failed("p0", FailureKind.INVALID, message=message)).to_error()
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.seen) == (field, seen)
    assert expected in str(error)


def test_a_deadline_noticed_by_a_worker_ends_the_request(given: Given) -> None:
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
            assert stage is Stage.RESERVING_LOCAL
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


def test_repeated_worker_losses_end_as_kv_lost() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, max_attempts=2, max_worker_deaths=9))
    for index in range(3):
        given.connect_prefill(f"p{index}")
    given.connect_decode("d0")
    given.prefilling()
    given.lost("p0")
    given.granted(2)
    assert isinstance(failure(given.lost("p1")).to_error(), KvLost)


def test_memory_that_is_released_too_early_counts_as_a_failure(given: Given) -> None:
    given.connect_decode("d1")
    given.decoding()
    assert given.released("d0")[-1] == reserve(2, "d1", (100,))


def test_missing_tokens_fail_the_attempt(given: Given) -> None:
    given.decoding()
    assert given.tokens(3, [103])[-1] == reserve(2, "d0", (100,), is_local=True)


def test_repeated_tokens_are_dropped(given: Given) -> None:
    given.decoding()
    given.tokens(1, [101, 102])
    assert given.tokens(2, [102, 103]) == [emit(3, 103)]
    assert given.state.counters["repeated_tokens"] == 1


def test_a_second_grant_for_one_attempt_is_illegal(given: Given) -> None:
    given.prefilling()
    with pytest.raises(IllegalMove, match="granted"):
        given.granted()


def test_without_strict_mode_an_illegal_message_is_dropped() -> None:
    given = Given(RouterSettings(policy="round-robin"))
    given.connect_prefill("p0")
    given.connect_decode("d0")
    given.decoding()
    assert given.granted() == []
    assert given.first(7) == []
    assert given.state.counters["illegal"] == 2
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_a_request_may_be_declined_thousands_of_times(given: Given) -> None:
    """The backoff was a power of two of their number, which overflowed at 1,024."""
    given.arrives()
    for attempt in range(1, 1_100):
        given.refused("d0", attempt)
        given.at(given.now_s + 1.0)
    assert given.state.stage_of("a") is Stage.RESERVING


def test_an_attempt_may_be_lost_thousands_of_times() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, max_attempts=2_000))
    given.connect_decode("d0")
    given.arrives()
    for attempt in range(1, 1_100):
        given.failed("d0", FailureKind.INTERNAL, attempt)
        given.released("d0", attempt)
        given.at(given.now_s + 3.0)
    assert given.state.stage_of("a") is not None
