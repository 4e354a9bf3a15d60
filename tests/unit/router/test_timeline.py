"""Every moment of a request belongs to exactly one phase, however the request ends."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import FirstToken, Granted, TokenRow, TokensArrived
from pdserve.core.results import MEANING, MEASURED_BY, Phase, Phases
from pdserve.core.types import FinishReason, TokenOut
from router.state.interface import ClientLeft, EndCancelled, FailRequest, FinishRequest, RouterSettings, StopMatched
from router.state.lifecycle import LIVE, Move, Stage
from router.state.request import MAX_SLICES, STANDS_FOR, Timeline
from scripts.drawn_pages import COMMAND, DOCS, with_section
from tests.unit.router.given import Given

Make = Callable[[], Given]
End = FinishRequest | FailRequest | EndCancelled


def ended(commands: list[object]) -> End:
    [end] = [one for one in commands if isinstance(one, FinishRequest | FailRequest | EndCancelled)]
    return end


def adds_up(end: End) -> Phases:
    """Checks that the phases add up, and that their slices cover the request's time without a gap."""
    timings = end.timings
    assert timings is not None
    assert timings.phases.total_s == pytest.approx(timings.total_s, abs=1e-9)
    at_s = 0.0
    for one in end.slices:
        assert one.begin_s == pytest.approx(at_s, abs=1e-9)
        assert one.seconds > 0.0
        at_s += one.seconds
    assert at_s == pytest.approx(timings.total_s, abs=1e-9)
    return timings.phases


@pytest.fixture
def given() -> Given:
    return Given(RouterSettings(policy="round-robin", is_strict=True))


def later(given: Given, seconds: float) -> None:
    given.now_s += seconds


def first_token(given: Given, *, queue_s: float, prefill_s: float, finish: FinishReason | None = None) -> list[object]:
    event = FirstToken(
        key=AttemptKey("p0", "a", 1), token=TokenOut(token_id=100), queue_s=queue_s, prefill_s=prefill_s, finish=finish
    )
    return list(given.submit(event))


def row(given: Given, index: int, *, attempt: int = 1, worker_id: str = "d0", **facts: object) -> list[object]:
    one = TokenRow(
        key=AttemptKey(worker_id, "a", attempt), output_index=index, tokens=(TokenOut(token_id=100 + index),), **facts
    )
    return list(given.submit(TokensArrived(worker_id=worker_id, rows=(one,))))


@pytest.fixture
def remote(given: Given) -> Given:
    """A request that spent 0.25 s before its arrival, is placed at once, and is granted blocks after 0.5 s."""
    given.connect_prefill("p0")
    given.connect_decode("d0")
    given.arrives("a", spent_s=0.25, lookup_s=0.05)
    later(given, 0.5)
    given.granted()
    return given


def test_every_phase_has_a_meaning_an_owner_and_a_field() -> None:
    assert set(MEANING) == set(MEASURED_BY) == set(Phase)
    assert Phases.of(dict.fromkeys(Phase, 1.0)).total_s == len(Phase)
    assert set(STANDS_FOR) == set(LIVE)


def test_worker_reports_divide_a_remote_request(remote: Given) -> None:
    later(remote, 1.0)
    first_token(remote, queue_s=0.25, prefill_s=0.5)
    later(remote, 0.125)
    remote.committed()
    later(remote, 0.25)
    row(remote, 1, decode_queue_s=0.0625)
    later(remote, 0.5)
    end = ended(row(remote, 2, decode_s=0.5, finish=FinishReason.STOP))
    assert adds_up(end) == Phases(
        prepare_s=pytest.approx(0.2),  # type: ignore[arg-type]
        prefix_lookup_s=pytest.approx(0.05),  # type: ignore[arg-type]
        reserve_s=0.5,
        prefill_queue_s=0.25,
        prefill_s=0.5,
        transfer_wait_s=0.125,
        decode_queue_s=0.0625,
        decode_s=0.5,
        messages_s=0.25 + 0.1875,
    )
    assert end.timings is not None
    assert end.timings.ttft_s == 1.75


def test_kv_that_lands_before_the_first_token_exposes_no_transfer(remote: Given) -> None:
    later(remote, 0.5)
    remote.committed()
    later(remote, 0.25)
    first_token(remote, queue_s=0.0, prefill_s=0.5)
    later(remote, 0.25)
    phases = adds_up(ended(row(remote, 1, decode_s=0.25, finish=FinishReason.STOP)))
    assert (phases.prefill_s, phases.messages_s, phases.transfer_wait_s, phases.decode_s) == (0.5, 0.25, 0.0, 0.25)


def test_a_request_of_one_token_has_no_decode(remote: Given) -> None:
    later(remote, 1.0)
    phases = adds_up(ended(first_token(remote, queue_s=0.25, prefill_s=0.5, finish=FinishReason.LENGTH)))
    assert (phases.prefill_queue_s, phases.prefill_s, phases.messages_s) == (0.25, 0.5, 0.25)
    assert phases.decode_s == phases.transfer_wait_s == 0.0


def test_worker_reports_divide_a_local_request(given: Given) -> None:
    given.connect_decode("d0")
    given.arrives("a")
    later(given, 0.5)
    given.seated()
    later(given, 1.0)
    row(given, 0, queue_s=0.125, prefill_s=0.5)
    later(given, 1.0)
    phases = adds_up(ended(row(given, 1, decode_s=0.75, finish=FinishReason.STOP)))
    assert phases == Phases(reserve_s=0.5, prefill_queue_s=0.125, prefill_s=0.5, decode_s=0.75, messages_s=0.375 + 0.25)


@pytest.mark.parametrize("late_s", [0.25, 0.75, 1.0])
def test_a_grant_that_is_read_late_does_not_cost_a_local_request_its_reports(given: Given, late_s: float) -> None:
    """The worker computes the prompt without waiting until the router has read its grant."""
    given.connect_decode("d0")
    given.arrives("a")
    later(given, late_s)
    given.seated()
    later(given, 1.0 - late_s)
    row(given, 0, queue_s=0.125, prefill_s=0.5)
    later(given, 1.0)
    phases = adds_up(ended(row(given, 1, decode_s=0.75, finish=FinishReason.STOP)))
    assert (phases.prefill_queue_s, phases.prefill_s, phases.decode_s) == (0.125, 0.5, 0.75)
    assert phases.reserve_s == min(late_s, 1.0 - 0.625)


@pytest.mark.parametrize("late_s", [0.5, 1.0])
def test_a_local_request_waits_for_blocks_as_long_as_its_worker_reports(given: Given, late_s: float) -> None:
    """The worker counts the wait of the prompt from the arrival of Reserve, so it includes the grant."""
    given.connect_decode("d0")
    given.arrives("a")
    later(given, late_s)
    given.submit(Granted(key=AttemptKey("d0", "a", 1), grant_s=0.125))
    later(given, 1.0 - late_s)
    phases = adds_up(ended(row(given, 0, queue_s=0.25, prefill_s=0.5, finish=FinishReason.LENGTH)))
    assert phases == Phases(reserve_s=0.125, prefill_queue_s=0.125, prefill_s=0.5, messages_s=0.25)


def test_a_remote_request_waits_for_blocks_as_long_as_its_worker_reports(given: Given) -> None:
    given.connect_prefill("p0")
    given.connect_decode("d0")
    given.arrives("a")
    later(given, 0.5)
    given.submit(Granted(key=AttemptKey("d0", "a", 1), grant=b"grant", grant_s=0.125))
    later(given, 0.5)
    phases = adds_up(ended(first_token(given, queue_s=0.25, prefill_s=0.25, finish=FinishReason.LENGTH)))
    assert phases == Phases(reserve_s=0.125, prefill_queue_s=0.25, prefill_s=0.25, messages_s=0.375)


def test_tokens_that_arrive_together_do_not_cost_a_local_request_its_decode_report(given: Given) -> None:
    given.connect_decode("d0")
    given.arrives("a")
    given.seated()
    later(given, 2.0)
    row(given, 0, queue_s=0.125, prefill_s=0.5)
    phases = adds_up(ended(row(given, 1, decode_s=0.75, finish=FinishReason.STOP)))
    assert phases == Phases(prefill_queue_s=0.125, prefill_s=0.5, decode_s=0.75, messages_s=0.625)


def test_a_commit_that_is_read_late_does_not_cost_a_remote_request_its_decode_report(remote: Given) -> None:
    first_token(remote, queue_s=0.0, prefill_s=0.0)
    later(remote, 1.0)
    remote.committed()
    later(remote, 0.25)
    row(remote, 1, decode_queue_s=0.125)
    phases = adds_up(ended(row(remote, 2, decode_s=0.5, finish=FinishReason.STOP)))
    assert (phases.transfer_wait_s, phases.decode_queue_s, phases.decode_s) == (0.625, 0.125, 0.5)


def test_a_report_shortens_only_the_wait_just_before_it(given: Given) -> None:
    given.connect_decode("d0")
    given.arrives("a", spent_s=0.25)
    later(given, 0.5)
    given.seated()
    phases = adds_up(ended(row(given, 0, queue_s=0.0, prefill_s=9.0, finish=FinishReason.LENGTH)))
    assert phases == Phases(prepare_s=0.25, prefill_s=0.5)


def test_a_running_request_is_shown_as_if_it_ended_now() -> None:
    timeline = Timeline(0.0)
    timeline.moved(Stage.RESERVING_LOCAL, Move.GRANTED, 1.0, 1, None)
    timeline.report(Phase.PREFILL, 0.75, "d0")
    shown = [(one.phase, one.begin_s, one.seconds) for one in timeline.so_far(Stage.LOCAL, None, 1.5)]
    assert shown == [(Phase.RESERVE, 0.0, 0.75), (Phase.PREFILL, 0.75, 0.75)]
    assert [(one.phase, one.seconds) for one in timeline.slices] == [(Phase.RESERVE, 1.0)]


def test_preemption_is_a_phase_of_its_own(remote: Given) -> None:
    first_token(remote, queue_s=0.0, prefill_s=0.0)
    remote.committed()
    later(remote, 0.5)
    row(remote, 1)
    later(remote, 2.0)
    row(remote, 2, decode_s=0.75, preempted_s=1.5, preemptions=2)
    later(remote, 0.5)
    done = ended(row(remote, 3, decode_s=0.5, preemptions=1, finish=FinishReason.STOP))
    assert done.timings.preemptions == 3
    phases = adds_up(done)
    assert (phases.decode_s, phases.preempted_s, phases.messages_s) == (1.25, 1.5, 0.25)


def test_time_of_a_failed_attempt_is_lost(remote: Given) -> None:
    remote.connect_decode("d1")
    first_token(remote, queue_s=0.0, prefill_s=0.0)
    remote.committed()
    later(remote, 0.5)
    row(remote, 1)
    later(remote, 2.0)
    remote.lost("d0")  # The worker died long after its last token.
    later(remote, 0.25)
    remote.granted(2, "d1")
    later(remote, 1.0)
    [finished] = [
        one
        for one in [
            *remote.first(102, attempt=2),
            *remote.committed(attempt=2, worker_id="d1"),
            *row(remote, 3, attempt=2, worker_id="d1", decode_s=0.0, finish=FinishReason.STOP),
        ]
        if isinstance(one, FinishRequest)
    ]
    phases = adds_up(finished)
    assert (phases.decode_s, phases.lost_s, phases.reserve_s) == (0.5, 2.0, 0.75)
    assert [one.attempt for one in finished.slices] == sorted(one.attempt for one in finished.slices)


def test_an_attempt_lost_in_prefill_is_all_lost_time(remote: Given) -> None:
    remote.connect_prefill("p1")
    later(remote, 1.5)
    remote.lost("p0")
    later(remote, 0.5)
    phases = adds_up(ended(list(remote.submit(ClientLeft(request_id="a")))))
    assert (phases.lost_s, phases.prefill_s, phases.reserve_s) == (1.5, 0.0, 1.0)


def test_a_declined_attempt_costs_its_time(remote: Given) -> None:
    later(remote, 0.5)
    remote.refused("p0")
    assert adds_up(ended(list(remote.submit(ClientLeft(request_id="a"))))).lost_s == 0.5


def test_a_rejected_request_has_only_waited(given: Given) -> None:
    given.connect_decode("d0")
    given.lost("d0")
    given.arrives("a", spent_s=0.25)
    [failed] = [one for one in given.at(given.now_s + 60.0) if isinstance(one, FailRequest)]
    assert failed.timings is not None
    phases = adds_up(failed)
    assert phases == Phases(prepare_s=0.25, queue_s=phases.queue_s)
    assert phases.queue_s > 0.0


def test_an_unplaced_request_has_only_waited(given: Given) -> None:
    [failed] = [one for one in given.arrives("a", spent_s=0.25) if isinstance(one, FailRequest)]
    assert failed.timings is not None
    assert adds_up(failed) == Phases(prepare_s=0.25)


def test_after_a_stop_string_the_rest_belongs_to_decode(remote: Given) -> None:
    first_token(remote, queue_s=0.0, prefill_s=0.0)
    later(remote, 0.25)
    remote.committed()
    later(remote, 0.5)
    row(remote, 1, decode_queue_s=0.125)
    finished = ended(list(remote.submit(StopMatched(request_id="a", num_output_tokens=2))))
    phases = adds_up(finished)
    assert (phases.transfer_wait_s, phases.decode_queue_s, phases.decode_s) == (0.25, 0.125, 0.375)
    # Its worker was not asked, so the router has measured its decoding.
    assert [(one.phase, one.worker_id) for one in finished.slices if one.worker_id] == [(Phase.DECODE_QUEUE, "d0")]


def test_reports_longer_than_the_interval_are_clipped(remote: Given) -> None:
    """Two processes measure, and the router's interval may be shorter by the time of a message."""
    later(remote, 0.25)
    phases = adds_up(ended(first_token(remote, queue_s=0.125, prefill_s=9.0, finish=FinishReason.LENGTH)))
    assert (phases.prefill_queue_s, phases.prefill_s, phases.messages_s) == (0.125, 0.125, 0.0)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_an_invalid_duration_is_ignored(remote: Given, seconds: float) -> None:
    later(remote, 0.25)
    phases = adds_up(ended(first_token(remote, queue_s=seconds, prefill_s=seconds, finish=FinishReason.LENGTH)))
    assert phases.messages_s == 0.25


def test_slices_are_bounded_and_still_add_up() -> None:
    rng, timeline, now_s = random.Random(3), Timeline(5.0), 5.0
    for attempt in range(3 * MAX_SLICES):
        now_s += rng.random()
        timeline.report(Phase.PREFILL, 0.25, "p0")
        timeline.moved(Stage.PREFILLING, Move.LOST, now_s, attempt, None)
    assert len(timeline.slices) <= MAX_SLICES + len(Phase)
    assert sum(one.seconds for one in timeline.slices) == pytest.approx(now_s - 5.0)
    assert timeline.phases.total_s == pytest.approx(now_s - 5.0)


def test_late_messages_leave_no_gap_and_add_up() -> None:
    """Any order of stages, with reports of any length."""
    rng = random.Random(5)
    for _ in range(200):
        timeline, now_s = Timeline(5.0), 5.0
        for attempt in range(rng.randint(1, MAX_SLICES)):
            for _ in range(rng.randint(0, 3)):
                timeline.report(rng.choice(list(Phase)), rng.choice([0.25, 1.0, 9.0]), "d0")
            timeline.is_accounted = rng.random() < 0.5
            now_s += rng.choice([0.0, 0.125, 0.5])
            timeline.moved(
                rng.choice(sorted(LIVE, key=lambda stage: stage.value)), rng.choice(list(Move)), now_s, attempt, None
            )
        timeline.close(Phase.MESSAGES, now_s, 0)
        assert timeline.phases.total_s == pytest.approx(now_s - 5.0)
        if len(timeline.slices) < MAX_SLICES:
            ends_s = 0.0
            for one in timeline.slices:
                assert one.begin_s == pytest.approx(ends_s)
                assert one.seconds > 0.0
                ends_s = one.begin_s + one.seconds
            assert ends_s == pytest.approx(now_s - 5.0)


def test_reported_times_are_summed_over_attempts(given: Given) -> None:
    """The grant time and the transferred bytes of each attempt."""
    for prefill in ("p0", "p1"):  # The pair that failed is avoided.
        given.connect_prefill(prefill)
    given.connect_decode("d0")
    given.arrives("a")
    given.submit(Granted(key=AttemptKey("d0", "a", 1), grant=b"first", grant_s=0.25))
    given.committed(is_committed=False)
    later(given, 1.0)
    given.submit(Granted(key=AttemptKey("d0", "a", 2), grant=b"second", grant_s=0.5))
    given.committed(attempt=2)
    given.first(100, attempt=2, worker_id="p1")
    end = ended(given.tokens(1, [101], finish=FinishReason.STOP, attempt=2))
    assert end.timings is not None
    assert (end.timings.grant_s, end.timings.attempts) == (0.75, 2)
    assert (end.timings.transfer_s, end.timings.transfer_busy_s, end.timings.transfer_bytes) == (0.05, 0.04, 4096)


# --- table of phases in the docs ------------------------------------------------------------------------------


def test_the_generated_phase_table_is_current() -> None:
    text = (DOCS / "telemetry.md").read_text()
    assert with_section("telemetry.md", text) == text, f"run {COMMAND}"
