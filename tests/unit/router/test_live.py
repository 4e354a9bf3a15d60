"""Frames of the live view: complete, bounded, and equal to the values that the client receives."""

from __future__ import annotations

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.live import LiveFrame, LiveRequest
from pdserve.core.protocol import TokenRow, TokensArrived
from pdserve.core.results import Phase
from pdserve.core.types import FinishReason, Slo, TokenOut
from router.state.cluster_state import MAX_IN_PROGRESS
from router.state.history import MAX_ENDED, LiveLog
from router.state.interface import Outcome, RouterSettings
from router.state.request import Request
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival


@pytest.fixture
def given() -> Given:
    one = Given(RouterSettings(is_strict=True))
    one.connect_prefill("p0")
    one.connect_decode("d0")
    return one


def frame(given: Given, after: int = 0) -> LiveFrame:
    return given.state.live_frame(given.now_s, after)


def only(given: Given, after: int = 0) -> LiveRequest:
    [row] = frame(given, after).requests
    return row


def phases(row: LiveRequest) -> dict[str, float]:
    """Seconds of the phases, after a check that they cover the time without a gap."""
    at_s = 0.0
    for one in row.phases:
        assert one.begin_s == pytest.approx(at_s, abs=1e-9)
        at_s += one.seconds
    return {one.phase: round(one.seconds, 6) for one in row.phases}


def test_a_request_is_shown_from_its_arrival_to_its_end(given: Given) -> None:
    given.arrives(slo=Slo(ttft_s=3.0, tpot_s=0.3), tenant="blue", priority=2)
    given.now_s = 0.125
    row = only(given)
    assert (row.stage, row.tenant, row.priority) == ("reserving", "blue", 2)
    assert (row.prompt_tokens, row.output_tokens) == (100, 0)
    assert (row.slo_ttft_s, row.slo_tpot_s, row.ended_s, row.outcome, row.ttft_s) == (3.0, 0.3, None, "", None)
    assert (row.prefill_worker, row.decode_worker, row.attempt) == ("p0", "d0", 1)
    assert row.predicted_ttft_s is not None
    assert phases(row) == {"reserve": 0.125}
    given.granted()
    given.now_s = 0.25
    assert phases(only(given)) == {"reserve": 0.125, "prefill": 0.125}
    given.first(100)
    given.now_s = 0.375
    assert phases(only(given))["transfer_wait"] == 0.125
    given.committed()
    given.now_s = 0.75
    given.tokens(1, [101, 102])
    given.now_s = 0.875
    row = only(given)
    assert (row.stage, row.output_tokens, row.ttft_s, row.tpot_s) == ("decoding", 3, 0.25, 0.25)
    reported = {"prefill_queue": 0.01, "prefill": 0.115}
    assert phases(row) == {"reserve": 0.125, **reported, "transfer_wait": 0.125, "decode": 0.5}
    given.now_s = 1.0
    given.tokens(3, [103], finish=FinishReason.STOP)
    row = only(given)
    assert (row.stage, row.outcome, row.ended_s, row.output_tokens) == ("ended", "served", 1.0, 4)
    assert sum(phases(row).values()) == pytest.approx(1.0)
    assert (row.ttft_s, row.tpot_s) == (0.25, 0.25)
    totals = frame(given).totals
    assert (totals.arrived, totals.served, totals.output_tokens) == (1, 1, 4)


def test_reading_a_frame_changes_no_state(given: Given) -> None:
    given.arrives()
    given.granted()
    given.now_s = 0.5
    assert frame(given) == frame(given)
    given.state.check()


def test_a_local_request_decodes_from_its_first_token_on() -> None:
    alone = Given(RouterSettings(is_strict=True))
    alone.connect_decode("d0")
    alone.arrives()
    alone.seated()
    alone.now_s = 0.25
    assert only(alone).stage == "local"
    assert phases(only(alone)) == {Phase.PREFILL.value: 0.25}
    key = AttemptKey("d0", "a", 1)
    row = TokenRow(key=key, output_index=0, tokens=(TokenOut(token_id=100),), queue_s=0.05, prefill_s=0.15)
    alone.submit(TokensArrived(worker_id="d0", rows=(row,)))
    alone.now_s = 1.25
    shown = phases(only(alone))
    assert shown == {"prefill_queue": 0.05, "prefill": 0.15, "messages": 0.05, "decode": 1.0}


def test_each_ended_request_is_in_one_frame_of_a_viewer(given: Given) -> None:
    for name in ("a", "b"):
        given.arrives(name)
        given.leaves(name)
    assert [row.request_id for row in frame(given).requests] == ["a", "b"]
    seen = given.state.num_ended
    assert frame(given, seen).requests == ()
    given.arrives("c")
    given.leaves("c")
    assert [(row.request_id, row.outcome) for row in frame(given, seen).requests] == [("c", "cancelled")]
    assert frame(given, seen).totals.cancelled == 3


def test_a_rejection_has_its_reason_and_the_time_to_retry() -> None:
    nobody = Given(RouterSettings(is_strict=True, workers_grace_s=0.0))
    nobody.arrives()
    row = only(nobody)
    assert (row.stage, row.outcome, row.prefill_worker, row.decode_worker) == ("ended", "rejected", "", "")
    assert row.why


def test_a_frame_is_bounded_and_shows_requests_on_workers_first() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True))
    given.connect_prefill("p0")
    given.connect_decode("d0", max_batch=1)
    for number in range(MAX_IN_PROGRESS + 5):
        given.arrives(f"r{number}")
    shown = frame(given)
    assert len(shown.requests) == MAX_IN_PROGRESS
    assert shown.omitted == 5
    assert shown.queued + shown.running == MAX_IN_PROGRESS + 5
    assert shown.requests[0].stage != "queued"


def test_the_log_of_ended_requests_is_bounded_and_counts_all() -> None:
    log = LiveLog()
    for number in range(MAX_ENDED + 3):
        one = Request(facts=arrival(f"r{number}"), arrived_s=1.0, deadline_at_s=None, serial=number)
        log.ended(one, Outcome.SERVED, None, 2.0)
    kept = [row.request_id for row in log.after(0)]
    assert kept == [f"r{number}" for number in range(3, MAX_ENDED + 3)]
    assert [row.request_id for row in log.after(MAX_ENDED + 1)] == [f"r{MAX_ENDED + 1}", f"r{MAX_ENDED + 2}"]
    assert log.counts["served"] == log.num_ended == MAX_ENDED + 3
