"""Choices of each policy, from views built by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.core.cost.latency import CostPrior, LinkModel
from pdserve.core.errors import ConfigError
from pdserve.core.protocol import Load
from pdserve.core.types import Role, Slo
from router.policy import POLICIES, make_policy
from router.policy.interface import Choice, Decision, Obstacle, PolicyInput
from router.policy.policies.least_ttft import LeastTtft
from router.state.interface import RouterSettings
from router.state.load import Reservation
from router.state.view import WorkerView
from tests.unit.router.router_events import hello

# 1 ms per prompt token; a step of 10 ms and 1 ms per row.
COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-3,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=1e-3,
    decode_per_context_token_s=0.0,
)


def view(worker_id: str, **facts: Any) -> WorkerView:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    return WorkerView(hello(worker_id, role, **{"cost": COST, "num_blocks": 1024, "max_batch": 64, **facts}), 0.0)


def ask(tokens: int = 100, **facts: Any) -> PolicyInput:
    return PolicyInput(
        **{"request_id": "a", "num_tokens": tokens, "max_new_tokens": 8, "slo": Slo(), "waited_s": 0.0, **facts}
    )


def busy(one: WorkerView, prefill_s: float = 0.0, rows: int = 0, tpot_s: float = 0.2) -> WorkerView:
    if prefill_s:
        tokens = round(prefill_s * 1000)
        one.reserve(
            Reservation(request_id="x", attempt=1, tokens=0, blocks=0, prefill_tokens=tokens, prefill_s=prefill_s), 0
        )
    for index in range(rows):
        reservation = Reservation(request_id=f"row{index}", attempt=1, tokens=16, blocks=1, tpot_s=tpot_s)
        one.reserve(reservation, 0.0)
        one.arrived(reservation)
    return one


def least(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    request: PolicyInput,
    links: Any = None,
    local: int = 16,
) -> Decision:
    return LeastTtft(local, links or (lambda p, d: LinkModel()))(request, prefills, decodes, 0.0)


def place(decision: Decision) -> tuple[Choice, str, str]:
    return decision.choice, decision.prefill_worker, decision.decode_worker


# -- least-ttft --------------------------------------------------------------------------------------------------


def test_the_prefill_worker_with_the_shortest_queue_is_chosen() -> None:
    decision = least([busy(view("p0"), 0.1), view("p1")], [view("d0")], ask())
    assert place(decision) == (Choice.REMOTE, "p1", "d0")


def test_a_cached_prefix_is_worth_the_time_that_it_saves() -> None:
    prefills = [view("p0"), busy(view("p1"), 0.05)]
    cached = ask(100, cached_tokens={"p1": 96})
    assert place(least(prefills, [view("d0")], cached)) == (Choice.REMOTE, "p1", "d0")
    assert place(least(prefills, [view("d0")], ask(100, cached_tokens={"p1": 32}))) == (Choice.REMOTE, "p0", "d0")


def test_the_predicted_ttft_is_queue_and_prefill() -> None:
    decision = least([busy(view("p0"), 0.1)], [view("d0")], ask(200))
    remote = next(one for one in decision.candidates if one.prefill_worker)
    assert remote.ttft_s == pytest.approx(0.1 + 0.2)
    assert remote.tpot_s == pytest.approx(0.011)
    assert remote.slack == pytest.approx(min((2.0 - 0.3) / 2.0, (0.2 - 0.011) / 0.2))


def test_equal_prefills_go_to_the_decode_worker_with_the_shortest_step() -> None:
    decision = least([view("p0")], [busy(view("d0"), rows=4), view("d1")], ask())
    assert place(decision) == (Choice.REMOTE, "p0", "d1")


def test_a_running_request_keeps_its_tpot_target() -> None:
    # d0 grants sooner, but its running request has a target of 12 ms and would take 13.
    crowded, slow = busy(view("d0"), rows=2, tpot_s=0.012), view("d1")
    slow.grant_wait_s = 0.02
    assert place(least([view("p0")], [crowded, slow], ask())) == (Choice.REMOTE, "p0", "d1")


def test_a_request_is_served_if_every_target_is_missed() -> None:
    decision = least([view("p0")], [view("d0")], ask(slo=Slo(ttft_s=0.001, tpot_s=0.001)))
    assert place(decision) == (Choice.REMOTE, "p0", "d0")
    assert not any(one.is_feasible for one in decision.candidates)
    assert "no decode worker meets" in decision.reason


def test_arriving_requests_count_in_tpot() -> None:
    d0 = view("d0")
    d0.reserve(Reservation(request_id="x", attempt=1, tokens=500, blocks=32, tpot_s=0.2), 0.0)
    (candidate, *_) = least([view("p0")], [d0], ask()).candidates
    assert candidate.tpot_s == pytest.approx(0.01 + 2 * 1e-3)


def test_a_slow_link_is_avoided_when_the_prefill_does_not_hide_it() -> None:
    def links(prefill: str, decode: str) -> LinkModel:
        return LinkModel(bandwidth_bytes_s=1e4 if decode == "d0" else 1e9)

    decodes = [view("d0"), busy(view("d1"), rows=1)]
    assert place(least([view("p0")], decodes, ask(), links)) == (Choice.REMOTE, "p0", "d1")


@pytest.mark.parametrize(("uncached", "choice"), [(16, Choice.LOCAL), (17, Choice.REMOTE)])
def test_short_uncached_prompts_stay_on_the_decode_worker(uncached: int, choice: Choice) -> None:
    assert least([view("p0")], [view("d0")], ask(uncached)).choice is choice
    assert least([view("p0")], [view("d0")], ask(uncached + 160, cached_tokens={"d0": 160, "p0": 160})).choice is choice


def test_a_prefix_on_the_decode_worker_favours_local() -> None:
    request = ask(400, cached_tokens={"d1": 320})
    assert place(least([view("p0")], [view("d0"), view("d1")], request)) == (Choice.LOCAL, "", "d1")


def test_a_long_prefill_queue_favours_local() -> None:
    request = ask(100)
    queue = [busy(view("p0"), 1.0)]
    assert place(least(queue, [view("d0")], request)) == (Choice.LOCAL, "", "d0")


def test_local_prefill_gets_only_the_time_that_running_rows_allow() -> None:
    # Steps take 18 ms and the target is 20: a tenth of the time is free, so 100 tokens need a second here, 0.35 s
    # there.
    queue = [busy(view("p0"), 0.25, 0)]
    strict = busy(view("d0"), rows=8, tpot_s=0.020)
    lazy = busy(view("d0"), rows=8, tpot_s=1.0)
    assert least(queue, [strict], ask()).choice is Choice.WAIT
    assert least(queue, [lazy], ask()).choice is Choice.LOCAL


def test_a_request_waits_for_a_prefill_worker_that_is_soon_free() -> None:
    decision = least([busy(view("p0"), 0.25)], [view("d0")], ask(400))
    assert (decision.choice, decision.obstacle) == (Choice.WAIT, Obstacle.PREFILL)
    assert decision.retry_in_s == pytest.approx(0.25 - 0.128)


def test_the_next_request_is_sent_one_batch_early() -> None:
    assert least([busy(view("p0"), 0.12)], [view("d0")], ask(400)).choice is Choice.REMOTE


def test_a_request_waits_while_no_decode_worker_has_memory() -> None:
    full = busy(view("d0", num_blocks=8), rows=4)
    full.reported(Load(worker_id="d0", steps=1, free_blocks=5, running=4), 0.0)
    decision = least([view("p0")], [full], ask(100))
    assert (decision.choice, decision.obstacle) == (Choice.WAIT, Obstacle.DECODE)


def test_a_request_waits_while_every_row_is_taken() -> None:
    assert least([view("p0")], [busy(view("d0", max_batch=2), rows=2)], ask()).choice is Choice.WAIT


def test_a_worker_that_declined_is_skipped_until_its_retry_time() -> None:
    one = view("d0")
    one.closed_until_s = 0.1
    decision = least([view("p0")], [one], ask())
    assert decision.choice is Choice.WAIT
    assert decision.retry_in_s == pytest.approx(0.1)


def test_a_worker_that_failed_the_request_is_the_last_choice() -> None:
    request = ask(avoid_workers=frozenset({"p0", "d0"}))
    assert place(least([view("p0"), view("p1")], [view("d0"), view("d1")], request)) == (Choice.REMOTE, "p1", "d1")
    assert place(least([view("p0")], [view("d0")], request)) == (Choice.REMOTE, "p0", "d0")


def test_a_pair_that_failed_is_not_tried_again() -> None:
    request = ask(avoid_pairs=frozenset({("p0", "d0")}))
    assert place(least([view("p0"), busy(view("p1"), 0.1)], [view("d0")], request)) == (Choice.REMOTE, "p1", "d0")
    assert place(least([view("p0")], [view("d0")], request)) == (Choice.LOCAL, "", "d0")


def trained(one: WorkerView) -> WorkerView:
    for _ in range(50):
        one.cost.observe(rows=0, prefill_tokens=100, prefill_token_context=5000, context_tokens=0, step_s=0.1)
    return one


def test_only_an_impossible_deadline_is_rejected() -> None:
    hopeless = ask(10_000, deadline_left_s=1.0)
    untrained = least([view("p0")], [view("d0")], hopeless)
    assert untrained.choice is Choice.REMOTE
    prefills, decodes = [trained(view("p0"))], [trained(view("d0"))]
    rejected = least(prefills, decodes, hopeless)
    assert rejected.choice is Choice.REJECT
    assert rejected.retry_in_s
    assert "deadline" in rejected.reason
    assert least(prefills, decodes, ask(10_000, deadline_left_s=60.0)).choice is Choice.REMOTE
    resumed = ask(10_000, deadline_left_s=1.0, is_resumed=True)
    assert least(prefills, decodes, resumed).choice is Choice.REMOTE, "who was begun is not refused"


# -- the registry ----------------------------------------------------------------------------------------------


def test_an_unknown_policy_is_rejected_with_the_known_names() -> None:
    names = ", ".join(sorted(POLICIES))
    with pytest.raises(ConfigError, match=names):
        make_policy(RouterSettings(policy="magic"), lambda p, d: LinkModel())


def test_the_published_baselines_are_registered() -> None:
    assert set(POLICIES) >= {"colocated", "round-robin", "least-loaded", "dynamo", "lmetric", "mooncake"}


# -- views -------------------------------------------------------------------------------------------------------


def test_reservations_since_a_report_correct_it() -> None:
    one = view("d0", num_blocks=64)
    before = Reservation(request_id="a", attempt=1, tokens=160, blocks=10, tpot_s=0.1)
    one.reserve(before, 0.0)
    # Another router holds 20 blocks and two rows.
    load = Load(worker_id="d0", steps=1, free_blocks=30, evictable_blocks=4, running=3, context_tokens=500)
    one.reported(load, 0.0)
    assert one.estimated_load() == (3, 1, 500, 34)
    one.reserve(Reservation(request_id="b", attempt=1, tokens=80, blocks=5, tpot_s=0.1), 0.0)
    assert one.estimated_load() == (4, 2, 580, 29)
    one.unreserve(before, 0.0)
    assert one.estimated_load() == (3, 1, 420, 39)
    one.check()


def test_a_sequence_that_grows_takes_its_next_block_in_time() -> None:
    one = view("d0")
    reservation = Reservation(request_id="a", attempt=1, tokens=31, blocks=2, tpot_s=0.1)
    one.reserve(reservation, 0.0)
    one.grew(reservation, 1)
    assert reservation.blocks == 2
    one.grew(reservation, 1)
    assert reservation.blocks == 3
    one.check()


def test_first_tokens_correct_the_predicted_prefill_queue() -> None:
    one = view("p0")
    first = Reservation(request_id="a", attempt=1, tokens=500, blocks=32, prefill_tokens=500, prefill_s=0.5)
    second = Reservation(request_id="b", attempt=1, tokens=300, blocks=19, prefill_tokens=300, prefill_s=0.3)
    one.reserve(first, 0.0)
    one.reserve(second, 0.0)
    assert one.queue_s(0.2) == pytest.approx(0.6)
    one.computed(first, 0.9)  # slower than predicted
    assert one.queue_s(0.9) == pytest.approx(0.3)
    one.computed(second, 1.0)
    assert one.queue_s(1.0) == 0.0


def test_reports_show_prefills_of_other_routers() -> None:
    one = view("p0")
    one.reported(Load(worker_id="p0", steps=1, free_blocks=64, pending_prefill_tokens=700), 1.0)
    assert one.queue_s(1.0) == pytest.approx(0.7)
