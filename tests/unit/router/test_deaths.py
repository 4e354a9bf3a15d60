"""Workers die, fall silent and leave while they hold requests."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InternalError, KvLost
from pdserve.core.protocol import Reserve
from router.state.attempts import CRASH_WINDOW_S, INNOCENT_TOKENS
from router.state.endings import MOST_CRASHES
from router.state.interface import Command, DrainRequested, TimePassed
from router.state.lifecycle import Stage
from tests.unit.router.expected import admit, cancel, emit, failure, only, prefill, reserve
from tests.unit.router.given import STAGES, Given


@pytest.mark.parametrize("stage", STAGES)
def test_a_stream_continues_after_its_decode_worker_dies(given: Given, stage: Stage) -> None:
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
def test_another_prefill_worker_replaces_a_dead_one(given: Given, stage: Stage) -> None:
    given.connect_prefill("p1")
    STAGES[stage](given)
    had_token = stage is Stage.MOVING
    assert given.lost("p0") == [cancel("d0"), reserve(2, "d0", (100,) if had_token else ())]
    given.released("d0")
    assert given.granted(2) == [prefill(2, "p1", (100,) if had_token else ())]


def test_without_a_prefill_worker_left_prefill_is_local(given: Given) -> None:
    given.prefilling()
    assert given.lost("p0") == [cancel("d0"), reserve(2, is_local=True)]


def test_losing_the_prefill_worker_after_the_commit_has_no_effect(given: Given) -> None:
    given.decoding()
    assert given.lost("p0") == []
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_messages_of_an_old_attempt_are_dropped(given: Given) -> None:
    given.connect_prefill("p1")
    given.prefilling()
    given.lost("p0")
    late = given.state.counters["late"]
    assert given.committed(attempt=1) == []
    assert given.tokens(0, [100], attempt=1) == []
    assert given.granted(attempt=1) == []
    assert given.state.counters["late"] == late + 3


def test_a_reconnected_worker_starts_empty(given: Given) -> None:
    given.decoding()
    # The hello of the new stream overtakes the end of the old one.
    commands = given.connect_decode("d0", generation=2)
    assert commands == [cancel("p0"), reserve(2, "d0", (100,))]


def crashing(given: Given, attempts: int, *, at_s: float = 2 * CRASH_WINDOW_S) -> list[Command]:
    """The last commands after so many prefill workers have crashed, each while it computed the request."""
    for index in range(1, attempts + 1):
        given.connect_prefill(f"p{index}")
    given.at(at_s)
    given.arrives()
    for attempt in range(1, attempts + 1):
        given.granted(attempt)
        commands = given.lost(f"p{attempt - 1}")
        given.released("d0", attempt)
    return commands


def test_a_request_that_two_crashed_workers_computed_fails(given: Given) -> None:
    failed = failure(crashing(given, 2))
    assert isinstance(failed.to_error(), InternalError)
    assert failed.message == "2 workers crashed while they computed this request"


def test_a_request_that_computes_after_its_token_fails_too(given: Given) -> None:
    """The prompt is no problem for it, but a step of its decoding ends the worker."""
    given.connect_decode("d1")
    given.at(2 * CRASH_WINDOW_S)
    given.decoding()
    given.tokens(1, [101, 102])
    given.lost("d0")
    given.granted(2, "d1")
    given.first(103, 2)
    given.committed(attempt=2, worker_id="d1")
    assert isinstance(failure(given.lost("d1")).to_error(), InternalError)


def test_a_worker_that_waits_for_the_other_is_not_ended_by_the_request(given: Given) -> None:
    count = given.state.settings.max_attempts + 2
    for index in range(1, count + 1):
        given.connect_decode(f"d{index}")
    given.at(2 * CRASH_WINDOW_S)
    given.prefilling()
    for attempt in range(1, count + 1):
        assert given.lost(f"d{attempt - 1}")[-1] == reserve(attempt + 1, f"d{attempt}", waited_s=0.0)
        given.released("p0", attempt)
        given.granted(attempt + 1, f"d{attempt}")


def test_a_request_is_not_blamed_while_other_workers_crash_too(given: Given) -> None:
    given.at(2 * CRASH_WINDOW_S)
    for _ in range(2):
        given.connect_decode("d9")
        given.lost("d9")
    last = crashing(given, 2, at_s=given.now_s)[-1]
    assert isinstance(last, Reserve)
    assert last.key.attempt == 3


def test_crashes_of_long_ago_do_not_excuse_a_request(given: Given) -> None:
    for _ in range(2):
        given.connect_decode("d9")
        given.lost("d9")
    assert isinstance(failure(crashing(given, 2)).to_error(), InternalError)


def test_a_router_that_has_just_started_blames_no_request_before_its_last_attempt(given: Given) -> None:
    assert isinstance(crashing(given, 3, at_s=1.0)[-1], Reserve)
    given.granted(4)
    assert isinstance(failure(given.lost("p3")).to_error(), KvLost)


def test_an_answer_with_progress_on_any_worker_has_all_attempts(given: Given) -> None:
    given.at(2 * CRASH_WINDOW_S)
    given.arrives(max_tokens=100)
    given.granted()
    given.first(100)
    given.committed()
    given.tokens(1, list(range(101, 100 + INNOCENT_TOKENS)))
    given.lost("d0")
    for attempt in range(2, 6):
        worker_id = f"d{attempt}"
        given.connect_decode(worker_id)
        given.granted(attempt, worker_id)
        given.first(100 + attempt, attempt)
        given.committed(attempt=attempt, worker_id=worker_id)
        commands = given.lost(worker_id)
    assert isinstance(failure(commands).to_error(), KvLost), "four attempts without progress"


def test_a_resumed_answer_with_progress_has_all_attempts(given: Given) -> None:
    given.at(2 * CRASH_WINDOW_S)
    held = tuple(range(INNOCENT_TOKENS))
    given.arrives(output_ids=held, max_tokens=100)
    for attempt in (1, 2):
        given.granted(attempt, f"d{attempt - 1}")
        given.first(100 + attempt, attempt)
        given.committed(attempt=attempt, worker_id=f"d{attempt - 1}")
        given.released("p0", attempt)
        given.connect_decode(f"d{attempt}")
        last = given.lost(f"d{attempt - 1}")[-1]
        assert isinstance(last, Reserve)
        assert last.worker_id == f"d{attempt}"


def test_progress_gives_an_answer_all_of_its_attempts_again(given: Given) -> None:
    """Many workers are lost in the time of a long answer."""
    given.at(2 * CRASH_WINDOW_S)
    given.arrives(max_tokens=1000)
    index = 0
    for attempt in range(1, 13):
        worker_id = f"d{attempt - 1}"
        given.granted(attempt, worker_id)
        given.first(index, attempt)
        given.committed(attempt=attempt, worker_id=worker_id)
        given.released("p0", attempt)
        index += 1
        if attempt % 3 == 1:
            given.tokens(index, list(range(INNOCENT_TOKENS)), attempt, worker_id)
            index += INNOCENT_TOKENS
        given.connect_decode(f"d{attempt}")
        last = given.lost(worker_id)[-1]
        assert isinstance(last, Reserve)
        assert last.key.attempt == attempt + 1


def test_a_request_with_progress_between_deaths_continues(given: Given) -> None:
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


def test_requests_are_not_blamed_if_a_host_dies(given: Given) -> None:
    """d0 dies during an answer, d1 before it has granted blocks, d2 before it has computed a token."""
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


def test_a_drained_worker_that_leaves_does_not_count_as_a_death(given: Given) -> None:
    for index in range(1, 4):
        given.connect_decode(f"d{index}")
    given.prefilling()
    for attempt in (1, 2, 3):
        worker_id = f"d{attempt - 1}"
        given.submit(DrainRequested(worker_id=worker_id))
        assert only(given.lost(worker_id)[-1:]) == reserve(attempt + 1, f"d{attempt}")
        given.granted(attempt + 1, f"d{attempt}")


def test_a_silent_worker_loses_new_work_then_its_attempts(given: Given) -> None:
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
    assert commands == [cancel("d0"), cancel("p0"), reserve(2, "d1", (100,), waited_s=given.now_s)]


def test_a_suspended_router_does_not_count_silence(given: Given) -> None:
    given.decoding()
    given.now_s += 3600.0
    assert given.submit(TimePassed()) == []
    assert given.tokens(1, [101]) == [emit(1, 101)]


def test_no_request_ends_workers_without_bound(given: Given) -> None:
    """Each worker crashes while it only reserves memory for the request, which is then never suspect."""
    for index in range(1, MOST_CRASHES + 1):
        given.connect_decode(f"d{index}")
    commands = given.arrives()
    for attempt in range(1, MOST_CRASHES):
        [reserved] = [one for one in commands if isinstance(one, Reserve)]
        assert reserved.key.attempt == attempt
        commands = given.lost(reserved.key.worker_id)
    [reserved] = [one for one in commands if isinstance(one, Reserve)]
    assert (
        failure(given.lost(reserved.key.worker_id)).message
        == f"{MOST_CRASHES} workers crashed while they had this request"
    )
