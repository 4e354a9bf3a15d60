"""Explanations of placements, of waiting, running and ended requests, in bounded memory."""

from __future__ import annotations

import pytest

from pdserve.core.errors import MAX_REPEATED_CHARS
from pdserve.core.types import FinishReason, Slo
from router.policy.interface import Candidate, Choice, Decision
from router.state.history import MAX_CANDIDATES, DecisionRecord, Explanations
from router.state.interface import FailRequest, Outcome, RouterSettings
from router.state.request import Request
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival


def request(request_id: str = "a") -> Request:
    return Request(facts=arrival(request_id), arrived_s=1.0, deadline_at_s=None, serial=1)


def candidate(prefill: str = "p0", decode: str = "d0") -> Candidate:
    return Candidate(prefill_worker=prefill, decode_worker=decode, ttft_s=0.1, tpot_s=0.01, slack=0.5, is_feasible=True)


def explained(given: Given, request_id: str = "a") -> DecisionRecord:
    found = given.state.explain(request_id)
    assert found is not None
    return found


def served(**settings: object) -> Given:
    given = Given(RouterSettings(is_strict=True, **settings))  # type: ignore[arg-type]
    given.connect_prefill("p0")
    given.connect_decode("d0")
    return given


def test_a_running_request_is_explained_with_values_so_far() -> None:
    given = served()
    given.arrives(slo=Slo(ttft_s=3.0, tpot_s=0.3), tenant="blue", priority=2)
    one = explained(given)
    assert (one.stage, one.outcome, one.actual_ttft_s, one.actual_tpot_s) == ("reserving", None, None, None)
    assert (one.slo, one.tenant, one.priority, one.prompt_tokens) == (Slo(ttft_s=3.0, tpot_s=0.3), "blue", 2, 100)
    given.granted()
    given.now_s = 0.25
    given.first(100)
    given.committed()
    assert explained(given).actual_ttft_s == 0.25
    given.now_s = 0.75
    given.tokens(1, [101, 102])
    assert explained(given).actual_tpot_s == 0.25
    given.now_s = 1.0
    given.tokens(3, [103], finish=FinishReason.STOP)
    one = explained(given)
    assert (one.stage, one.outcome, one.actual_ttft_s, one.actual_tpot_s) == ("", Outcome.SERVED, 0.25, 0.25)
    assert one.ended_because == ""


def test_waiting_counts_from_arrival_to_the_decision() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True))
    given.connect_prefill("p0")
    given.connect_decode("d0", max_batch=1)
    given.decoding()
    given.now_s = 0.5
    given.arrives("b", spent_s=0.125)
    waiting = explained(given, "b")
    assert (waiting.stage, waiting.decision.choice, waiting.attempt) == ("queued", Choice.WAIT, 0)
    assert waiting.decision.reason == "queued for 0.000 s, waiting for prefill worker p0"
    given.now_s = 2.5
    given.tokens(1, [101], finish=FinishReason.STOP)
    given.released("d0")
    given.released("p0")
    placed = explained(given, "b")
    assert (placed.decision.choice, placed.attempt, placed.waited_s) == (Choice.REMOTE, 1, 2.125)


def test_without_a_decision_the_end_is_the_reason() -> None:
    given = Given(RouterSettings(is_strict=True, workers_grace_s=0.0))
    given.arrives()
    one = explained(given)
    assert (one.decision.choice, one.outcome, one.stage) == (Choice.REJECT, Outcome.REJECTED, "")
    assert one.decision.reason == one.ended_because
    assert "no decode worker" in one.decision.reason
    assert one.retry_after_s == 1.0


def test_a_disconnect_in_the_queue_is_explained() -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True))
    given.connect_prefill("p0")
    given.connect_decode("d0", max_batch=1)
    given.decoding()
    given.arrives("b")
    given.leaves("b")
    one = explained(given, "b")
    assert (one.decision.choice, one.outcome, one.ended_because) == (
        Choice.WAIT,
        Outcome.CANCELLED,
        "the client disconnected",
    )


def test_a_rejection_keeps_prediction_and_retry_time() -> None:
    given = served(policy="mooncake")
    (refusal,) = given.arrives(prompt=500, slo=Slo(ttft_s=0.001))
    assert isinstance(refusal, FailRequest)
    one = explained(given)
    assert (one.decision.choice, one.outcome, one.attempt) == (Choice.REJECT, Outcome.REJECTED, 0)
    assert one.retry_after_s == refusal.retry_after_s
    assert one.decision.candidates[0].slack < 0.0
    assert "TTFT" in one.ended_because


def test_a_reused_id_replaces_the_explanation() -> None:
    given = served(policy="round-robin")
    given.decoding()
    given.tokens(1, [101], finish=FinishReason.STOP)
    given.released("d0")
    given.released("p0")
    given.lost("d0")
    given.arrives()
    one = explained(given)
    assert (one.stage, one.outcome, one.actual_ttft_s) == ("queued", None, None)


def test_only_recent_explanations_are_kept() -> None:
    kept = Explanations(2)
    for name in "abc":
        kept.note(request(name), Decision(choice=Choice.LOCAL), 2.0)
    assert [name for name in "abc" if kept.last(name)] == ["b", "c"]
    assert len(kept) == 2


def test_with_capacity_zero_nothing_is_kept() -> None:
    kept = Explanations(0)
    kept.note(request(), Decision(choice=Choice.LOCAL), 2.0)
    kept.ended(request(), Outcome.FAILED, 3.0, why="why")
    assert len(kept) == 0


def test_an_explanation_is_bounded_and_keeps_the_chosen_candidate() -> None:
    crowd = tuple(candidate(f"p{number}") for number in range(1000))
    kept = Explanations(1)
    decision = Decision(
        choice=Choice.REMOTE, prefill_worker="p900", decode_worker="d0", reason="x" * 10_000, candidates=crowd
    )
    kept.note(request(), decision, 2.0)
    kept.ended(request(), Outcome.FAILED, 3.0, why="y" * 10_000)
    one = kept.last("a")
    assert one is not None
    assert len(one.decision.candidates) == MAX_CANDIDATES
    assert one.decision.candidates[0].prefill_worker == "p900"
    assert (len(one.decision.reason), len(one.ended_because)) == (MAX_REPEATED_CHARS, MAX_REPEATED_CHARS)


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded", "dynamo", "lmetric", "mooncake"])
def test_every_baseline_explains_its_choice(policy: str) -> None:
    given = served(policy=policy)
    given.arrives()
    one = explained(given)
    (chosen,) = [shown for shown in one.decision.candidates if shown.prefill_worker == one.decision.prefill_worker]
    assert chosen.ttft_s > 0.0
    assert chosen.tpot_s > 0.0


def test_a_placement_is_explained_and_its_outcome_added() -> None:
    given = Given(RouterSettings(is_strict=True, explain_capacity=2))
    given.connect_prefill("p0")
    given.connect_decode("d0")
    given.decoding()
    given.now_s = 1.0
    given.tokens(1, [101], finish=FinishReason.STOP)
    explained = given.state.explain("a")
    assert explained is not None
    assert explained.decision.reason.startswith("the lowest cost")
    assert [(one.prefill_worker, one.decode_worker) for one in explained.decision.candidates] == [
        ("p0", "d0"),
        ("", "d0"),
    ]
    assert (explained.actual_ttft_s, explained.actual_tpot_s) == (0.0, 1.0)
    given.arrives("b")
    given.arrives("c")
    assert given.state.explain("a") is None, "only the last ones are kept"


@pytest.mark.parametrize(("num_candidates", "reason"), [(MAX_CANDIDATES + 1, "short"), (1, "x" * 300)])
def test_each_part_of_an_explanation_is_bounded(num_candidates: int, reason: str) -> None:
    crowd = tuple(candidate(f"p{number}") for number in range(num_candidates))
    kept = Explanations(1)
    kept.note(request(), Decision(choice=Choice.REMOTE, reason=reason, candidates=crowd), 2.0)
    one = kept.last("a")
    assert one is not None
    assert len(one.decision.candidates) == min(num_candidates, MAX_CANDIDATES)
    assert one.decision.reason == (
        reason if len(reason) <= MAX_REPEATED_CHARS else "x" * (MAX_REPEATED_CHARS - 3) + "..."
    )
