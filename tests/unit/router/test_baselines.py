"""The published baselines choose according to their formulas, with numbers computed by hand.

Blocks have 16 tokens; a prompt token costs 1 ms; a decode step 10 ms and 1 ms per row (test_policy.COST).
"""

from __future__ import annotations

import pytest

from pdserve.core.cost.latency import CostPrior, LinkModel
from pdserve.core.protocol import Load
from pdserve.core.types import Slo
from router.policy import make_policy
from router.policy.interface import Choice, Decision, Obstacle, Policy
from router.policy.policies import dynamo, lmetric
from router.policy.policies.colocated import colocated
from router.policy.policies.mooncake import Mooncake
from router.policy.policies.round_robin import RoundRobin
from router.policy.two_stage import TwoStage, prompt_cost
from router.state.interface import RouterSettings
from router.state.load import Reservation
from router.state.view import WorkerView
from tests.unit.router.test_policy import ask, busy, place, view

LATER = (Choice.WAIT, Obstacle.PREFILL)


def prefilling(one: WorkerView, tokens: int, request_id: str = "x") -> WorkerView:
    """Reserves a prompt of so many tokens on the worker, at one millisecond each."""
    one.reserve(
        Reservation(
            request_id=request_id, attempt=1, tokens=tokens, blocks=0, prefill_tokens=tokens, prefill_s=tokens / 1e3
        ),
        0.0,
    )
    return one


def decoding(one: WorkerView, tokens: int, request_id: str = "y") -> WorkerView:
    reservation = Reservation(
        request_id=request_id, attempt=1, tokens=tokens, blocks=one.blocks_for(tokens), tpot_s=0.2
    )
    one.reserve(reservation, 0.0)
    one.arrived(reservation)
    return one


def in_line(one: WorkerView, tokens: int, request_id: str = "z") -> WorkerView:
    one.queue.join(request_id, tokens, tokens / 1e3, (1, 0, len(one.queue)))
    return one


def named(policy: str) -> Policy:
    return make_policy(RouterSettings(policy=policy), lambda p, d: LinkModel())


def later(decision: Decision) -> tuple[Choice, Obstacle]:
    return decision.choice, decision.obstacle


# -- two stages --------------------------------------------------------------------------------------------------


def stages() -> TwoStage:
    """The cost of a worker is its number."""
    return TwoStage(
        prefill=lambda ask, view, now_s: int(view.worker_id[1:]),
        decode=lambda ask, view, now_s: int(view.worker_id[1:]),
        together=lambda ask, view, now_s: -int(view.worker_id[1:]),
        reason="by number",
    )


def test_each_stage_takes_its_cheapest_worker() -> None:
    decision = stages()(ask(), [view("p2"), view("p1")], [view("d3"), view("d2")], 0.0)
    assert place(decision) == (Choice.REMOTE, "p1", "d2")


def test_without_prefill_workers_the_combined_cost_decides() -> None:
    assert place(stages()(ask(), [], [view("d3"), view("d2")], 0.0)) == (Choice.LOCAL, "", "d3")


def test_a_request_waits_for_the_cheapest_prefill_worker() -> None:
    decision = stages()(ask(), [prefilling(view("p1"), 300), view("p2")], [view("d1")], 0.0)
    assert later(decision) == LATER
    assert decision.bound_to == "p1"
    # 300 ms are reserved; a batch is 128 tokens.
    assert decision.retry_in_s == pytest.approx(0.300 - 0.128)


def test_no_request_overtakes_a_queue() -> None:
    decision = stages()(ask(), [in_line(view("p1"), 100), view("p2")], [view("d1")], 0.0)
    assert (later(decision), decision.bound_to) == (LATER, "p1")


def test_a_bound_request_starts_on_its_worker() -> None:
    bound = ask(bound_to="p2")
    prefills = [view("p1"), in_line(view("p2"), 100, "a")]
    assert place(stages()(bound, prefills, [view("d1")], 0.0)) == (Choice.REMOTE, "p2", "d1")
    decision = stages()(bound, [view("p1"), prefilling(view("p2"), 300)], [view("d1")], 0.0)
    assert (later(decision), decision.bound_to) == (LATER, "p2")


def test_a_request_bound_to_a_lost_worker_is_bound_again() -> None:
    decision = stages()(ask(bound_to="p9"), [view("p1")], [view("d1")], 0.0)
    assert place(decision) == (Choice.REMOTE, "p1", "d1")


def test_a_bound_request_waits_for_decode_room_at_the_head() -> None:
    full = busy(view("d1", max_batch=1), rows=1)
    decision = stages()(ask(), [view("p1")], [full], 0.0)
    assert (later(decision), decision.bound_to) == (LATER, "p1")
    decision = stages()(ask(bound_to="p1"), [view("p1")], [full], 0.0)
    assert later(decision) == (Choice.WAIT, Obstacle.DECODE)
    assert stages()(ask(), [], [full], 0.0).obstacle is Obstacle.DECODE


def test_a_pair_that_failed_is_not_tried_again() -> None:
    failed = frozenset({("p1", "d1")})
    prefills, decodes = [view("p1"), view("p2")], [view("d1"), view("d2")]
    assert place(stages()(ask(avoid_pairs=failed), prefills, decodes, 0.0)) == (Choice.REMOTE, "p1", "d2")
    assert place(stages()(ask(avoid_pairs=failed), prefills, decodes[:1], 0.0)) == (Choice.REMOTE, "p2", "d1")
    assert place(stages()(ask(avoid_pairs=failed), prefills[:1], decodes[:1], 0.0)) == (Choice.LOCAL, "", "d1")


def test_predictions_are_shown_for_the_cheapest_workers() -> None:
    waiting = in_line(prefilling(view("p1"), 50), 30)
    decision = stages()(ask(200), [waiting, view("p2")], [busy(view("d1"), rows=4)], 0.0)
    first, second = decision.candidates
    assert (first.prefill_worker, first.decode_worker) == ("p1", "d1")
    assert first.ttft_s == pytest.approx(0.050 + 0.030 + 0.200)
    assert second.ttft_s == pytest.approx(0.200)
    assert first.tpot_s == pytest.approx(0.010 + 5 * 0.001)
    assert first.slack == pytest.approx(min((2.0 - 0.280) / 2.0, (0.2 - 0.015) / 0.2))


def test_a_local_prediction_includes_running_rows() -> None:
    (idle,) = stages()(ask(200), [], [view("d1")], 0.0).candidates
    assert idle.ttft_s == pytest.approx(0.200)
    # Running requests have a TPOT target of 20 ms, so a step of 18 ms prefills 16 tokens with two rows. The last reads
    # 8, while the weights are read.
    crowded = busy(view("d1"), rows=2, tpot_s=0.020)
    (beside,) = stages()(ask(200), [], [crowded], 0.0).candidates
    assert beside.ttft_s == pytest.approx(12 * 0.018 + 0.012)


# -- round-robin, colocated, least-loaded ------------------------------------------------------------------------


def test_round_robin_takes_each_role_in_turn() -> None:
    policy = RoundRobin()
    prefills, decodes = [view("p0"), view("p1")], [view("d0"), view("d1"), view("d2")]
    placed = [place(policy(ask(), prefills, decodes, 0.0))[1:] for _ in range(6)]
    assert placed == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0"), ("p0", "d1"), ("p1", "d2")]


def test_round_robin_counts_a_bound_request_once() -> None:
    policy = RoundRobin()
    full, free = prefilling(view("p0"), 300), view("p1")
    assert policy(ask(), [full, free], [view("d0")], 0.0).bound_to == "p0"
    assert place(policy(ask(bound_to="p0"), [view("p0"), free], [view("d0")], 0.0))[1] == "p0"
    assert place(policy(ask(), [full, free], [view("d0")], 0.0))[1] == "p1"


def test_round_robin_sends_even_short_prompts_to_prefill_workers() -> None:
    assert RoundRobin()(ask(1), [view("p0")], [view("d0")], 0.0).choice is Choice.REMOTE


def test_colocated_balances_sequences_over_decode_workers() -> None:
    decision = colocated(ask(), [view("p0")], [busy(view("d0"), rows=1), view("d1")], 0.0)
    assert place(decision) == (Choice.LOCAL, "", "d1")


def test_least_loaded_counts_requests_and_not_tokens() -> None:
    long = prefilling(view("p0"), 120)
    short = in_line(prefilling(view("p1"), 1), 1)
    decodes = [decoding(decoding(view("d0"), 16, "e"), 16, "f"), decoding(view("d1"), 400)]
    assert place(named("least-loaded")(ask(), [long, short], decodes, 0.0)) == (Choice.REMOTE, "p0", "d1")


def test_least_loaded_counts_requests_of_other_routers() -> None:
    theirs = view("p0")
    theirs.reported(Load(worker_id="p0", steps=1, free_blocks=1024, waiting=2), 0.0)
    assert place(named("least-loaded")(ask(), [theirs, prefilling(view("p1"), 1)], [view("d0")], 0.0))[1] == "p1"


# -- dynamo ------------------------------------------------------------------------------------------------------


def test_dynamo_counts_active_and_prompt_blocks_less_the_overlap() -> None:
    one = in_line(prefilling(view("p0"), 64), 32)
    # (64 + 32) / 16 active, 100 tokens are 7 blocks, 50 cached ones are 3 whole blocks.
    assert prompt_cost(ask(100, cached_tokens={"p0": 50}), one, 0.0) == 6 + 7 - 3


def test_dynamos_prefill_cost_is_never_negative() -> None:
    assert prompt_cost(ask(16, cached_tokens={"p0": 4096}), view("p0"), 0.0) == 1.0, "a token is always computed"


def test_dynamo_counts_load_of_other_routers_once() -> None:
    one = prefilling(view("p0"), 64)
    one.reported(Load(worker_id="p0", steps=1, free_blocks=1024, pending_prefill_tokens=160), 0.0)
    assert prompt_cost(ask(16), one, 0.0) == 10 + 1, "64 of the 160 are ours"
    prefilling(one, 32, "later")
    assert prompt_cost(ask(16), one, 0.0) == 12 + 1


def test_dynamo_weighs_overlap_against_queue() -> None:
    request = ask(160, cached_tokens={"p1": 80})
    five, six = prefilling(view("p1"), 64), prefilling(view("p1"), 96)
    # p0: 10 blocks. p1: 10 - 5 and four blocks of queue, or six.
    assert place(named("dynamo")(request, [view("p0"), five], [view("d0")], 0.0))[1] == "p1"
    assert place(named("dynamo")(request, [view("p0"), six], [view("d0")], 0.0))[1] == "p0"


def test_dynamos_decode_stage_ignores_overlap() -> None:
    many_rows = decoding(decoding(view("d0"), 16, "e"), 16, "f")  # two blocks
    one_row = decoding(view("d1"), 48)  # three blocks
    request = ask(160, cached_tokens={"d1": 160})
    assert place(named("dynamo")(request, [view("p0")], [one_row, many_rows], 0.0)) == (Choice.REMOTE, "p0", "d0")


def test_aggregated_dynamo_adds_prefill_and_decode_blocks() -> None:
    request = ask(160, cached_tokens={"d0": 80})
    warm, cold = decoding(view("d0"), 160), view("d1")
    assert dynamo.cost(request, warm, 0.0) == (10 - 5) + 10
    assert dynamo.cost(request, cold, 0.0) == 10
    assert place(named("dynamo")(request, [], [warm, cold], 0.0)) == (Choice.LOCAL, "", "d1")


# -- lmetric -----------------------------------------------------------------------------------------------------


def test_lmetric_multiplies_the_costs_that_dynamo_adds() -> None:
    # d0: 5 + 10 = 15 against 5 * 11 = 55. d1: 14 + 2 = 16 against 14 * 3 = 42.
    request = ask(160, cached_tokens={"d0": 80})
    warm, other = decoding(view("d0"), 160), decoding(prefilling(view("d1"), 64), 32)
    assert [dynamo.cost(request, one, 0.0) for one in (warm, other)] == [15, 16]
    assert [lmetric.product(request, one, 0.0) for one in (warm, other)] == [55, 42]
    assert place(named("dynamo")(request, [], [warm, other], 0.0))[2] == "d0"
    assert place(named("lmetric")(request, [], [warm, other], 0.0))[2] == "d1"


# -- mooncake ----------------------------------------------------------------------------------------------------


def test_mooncake_weighs_a_prefix_against_a_queue_in_seconds() -> None:
    request = ask(400, cached_tokens={"p1": 320})
    # p0: 0.4 s. p1: 0.08 s after 0.1 s of reserved prefills, or after 0.1 s and 0.3 s in its queue.
    assert place(Mooncake()(request, [view("p0"), prefilling(view("p1"), 100)], [view("d0")], 0.0))[1] == "p1"
    crowded = in_line(prefilling(view("p1"), 100), 300)
    assert place(Mooncake()(request, [view("p0"), crowded], [view("d0")], 0.0))[1] == "p0"


def test_mooncake_rejects_a_request_that_would_miss_its_ttft() -> None:
    tight = Slo(ttft_s=0.5, tpot_s=1.0)
    prefills = [prefilling(view("p0"), 250)]
    decision = Mooncake()(ask(300, slo=tight), prefills, [view("d0")], 0.0)
    assert decision.choice is Choice.REJECT
    assert decision.retry_in_s == pytest.approx(0.250 + 0.300 - 0.5)
    assert Mooncake()(ask(250, slo=tight), prefills, [view("d0")], 0.0).choice is Choice.WAIT
    assert Mooncake()(ask(250, slo=tight, waited_s=0.01), prefills, [view("d0")], 0.0).choice is Choice.REJECT


def test_mooncake_rejects_if_no_decode_worker_meets_the_tbt() -> None:
    slo = Slo(ttft_s=2.0, tpot_s=0.0125)
    # 10 ms and 1 ms per row: with two running requests, the third row makes 13 ms.
    crowded, better = busy(view("d0"), rows=2, tpot_s=1.0), busy(view("d1"), rows=1, tpot_s=1.0)
    assert Mooncake()(ask(slo=slo), [view("p0")], [crowded], 0.0).choice is Choice.REJECT
    assert place(Mooncake()(ask(slo=slo), [view("p0")], [crowded, better], 0.0)) == (Choice.REMOTE, "p0", "d1")
    at_head = ask(slo=slo, bound_to="p0")
    assert Mooncake()(at_head, [view("p0")], [crowded], 0.0).choice is Choice.REJECT


def test_mooncake_does_not_reject_accepted_or_started_requests() -> None:
    tight = Slo(ttft_s=0.1, tpot_s=1.0)
    assert Mooncake()(ask(300, slo=tight, bound_to="p0"), [view("p0")], [view("d0")], 0.0).choice is Choice.REMOTE
    assert Mooncake()(ask(300, slo=tight, is_resumed=True), [view("p0")], [view("d0")], 0.0).choice is Choice.REMOTE


def test_aggregated_mooncake_minimises_ttft() -> None:
    request = ask(400, cached_tokens={"d0": 320})
    decodes = [prefilling(view("d0"), 100), view("d1")]
    assert place(Mooncake()(request, [], decodes, 0.0)) == (Choice.LOCAL, "", "d0")


def test_each_worker_is_priced_by_its_own_cost_model() -> None:
    slow = view("p0", cost=CostPrior(prefill_base_s=0.0, prefill_per_token_s=1e-2, prefill_per_token_context_s=0.0))
    assert place(Mooncake()(ask(100), [slow, view("p1")], [view("d0")], 0.0))[1] == "p1"
