"""Choices of the goodput policy, from views built by hand. In each test, one rule alone decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.core.cost.latency import LinkModel
from pdserve.core.protocol import Load
from pdserve.core.types import Role, Slo
from router.policy import make_policy
from router.policy.candidates import EARLY_SHARE
from router.policy.interface import Choice, Decision, Links, Obstacle, PolicyInput
from router.policy.policies.goodput import Goodput
from router.state.interface import RouterSettings
from router.state.load import Reservation
from router.state.view import WorkerView
from tests.unit.router.router_events import hello
from tests.unit.router.test_load import FACTS

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
FAST = LinkModel(5e-5, 4e10)
SLOW = LinkModel(2e-4, 1e8)


def view(worker_id: str, **facts: Any) -> WorkerView:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    return WorkerView(
        hello(worker_id, role, **{"max_context_tokens": 131_072, "block_bytes": 2**21, **FACTS, **facts}), 0.0
    )


def ask(tokens: int = 8_000, **facts: Any) -> PolicyInput:
    held = {"request_id": "a", "num_tokens": tokens, "max_new_tokens": 400, "slo": SLO, "waited_s": 0.0}
    return PolicyInput(**{**held, "expected_tokens": 300.0, **facts})


def with_queue(one: WorkerView, seconds: float) -> WorkerView:
    one.reserve(
        Reservation(
            request_id="q", attempt=1, tokens=0, blocks=0, prefill_tokens=round(seconds * 4e4), prefill_s=seconds
        ),
        0.0,
    )
    return one


def with_rows(one: WorkerView, rows: int, tokens: int = 8_000, tpot_s: float = 0.05, joined: bool = True) -> WorkerView:
    for index in range(rows):
        reservation = Reservation(
            request_id=f"row{index}", attempt=1, tokens=tokens, blocks=tokens // 16, tpot_s=tpot_s
        )
        one.reserve(reservation, 0.0)
        if joined:
            one.arrived(reservation)
    return one


def decide(
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    request: PolicyInput,
    off: tuple[str, ...] = (),
    links: Links = lambda p, d: FAST,
) -> Decision:
    return Goodput(links, off)(request, prefills, decodes, 0.0)


def place(decision: Decision) -> tuple[Choice, str, str]:
    return decision.choice, decision.prefill_worker, decision.decode_worker


# -- each rule alone ---------------------------------------------------------------------------------------------


def test_path_choice_goes_local_if_queueing_costs_more() -> None:
    prefills, decodes = [with_queue(view("p0"), 1.5)], [with_rows(view("d0"), 4)]
    assert place(decide(prefills, decodes, ask())) == (Choice.LOCAL, "", "d0")
    waits = decide(prefills, decodes, ask(), ("path-choice",))
    assert (waits.choice, waits.obstacle) == (Choice.WAIT, Obstacle.PREFILL)


def test_a_full_decode_worker_leaves_prompts_to_prefill_workers() -> None:
    # 16 rows of 8,000 tokens and this one make a step of 12 ms. That is within 13 ms, but leaves no time for prefill.
    slo = Slo(ttft_s=2.0, tpot_s=0.013)
    prefills, decodes = [with_queue(view("p0"), 0.5)], [with_rows(view("d0"), 16, tpot_s=0.013)]
    waits = decide(prefills, decodes, ask(slo=slo))
    assert (waits.choice, waits.obstacle) == (Choice.WAIT, Obstacle.PREFILL)
    assert decide([], decodes, ask(slo=slo)).choice is Choice.LOCAL


def test_the_emptiest_decode_worker_is_chosen() -> None:
    decodes = [with_rows(view("d0"), 12), with_rows(view("d1"), 2)]
    assert place(decide([view("p0")], decodes, ask(30_000), ("path-choice",))) == (Choice.REMOTE, "p0", "d1")


def test_tandem_counts_arriving_requests() -> None:
    # d0 reports less than d1, but ten long prompts are being computed for it.
    d0, d1 = view("d0"), with_rows(view("d1"), 1, tpot_s=0.02)
    d0.reported(Load(worker_id="d0", steps=1, free_blocks=25_000, running=1, context_tokens=30_000), 0.0)
    with_rows(d0, 10, tokens=30_000, tpot_s=0.02, joined=False)
    d1.reported(Load(worker_id="d1", steps=1, free_blocks=25_000, running=1, context_tokens=60_000), 0.0)
    request = ask(slo=Slo(ttft_s=2.0, tpot_s=0.02))
    off = ("path-choice", "transfer-price")  # Bytes that are queued on the link would decide instead.
    assert place(decide([view("p0")], [d0, d1], request, off))[2] == "d1"
    assert place(decide([view("p0")], [d0, d1], request, (*off, "tandem")))[2] == "d0"


def test_transfer_price_prefers_the_link_that_hides_it() -> None:
    def links(prefill: str, decode: str) -> LinkModel:
        return SLOW if decode == "d0" else FAST

    decodes = [with_rows(view("d0"), 2), with_rows(view("d1"), 8)]
    off = ("path-choice",)
    assert place(decide([view("p0")], decodes, ask(), off, links))[2] == "d1"
    assert place(decide([view("p0")], decodes, ask(), (*off, "transfer-price"), links))[2] == "d0"


def test_a_prompt_is_local_if_the_transfer_takes_longer() -> None:
    decodes = [with_rows(view("d0"), 6)]
    prefills = [view("p0")]
    assert decide(prefills, decodes, ask(), links=lambda p, d: SLOW).choice is Choice.LOCAL
    assert decide(prefills, decodes, ask(), ("transfer-price",), lambda p, d: SLOW).choice is Choice.REMOTE


def test_a_prefix_is_worth_the_seconds_that_it_saves() -> None:
    prefills, decodes = [view("p0"), with_queue(view("p1"), 0.02)], [with_rows(view("d0"), 2)]
    request = ask(cached_tokens={"p1": 7_200})
    assert place(decide(prefills, decodes, request, ("path-choice",)))[1] == "p1"
    assert place(decide(prefills, decodes, request, ("path-choice", "prefix-value")))[1] == "p0"


def test_a_hot_prefix_is_replicated_if_its_worker_is_busy() -> None:
    prefills, decodes = [view("p0"), with_queue(view("p1"), 1.0)], [with_rows(view("d0"), 2)]
    request = ask(cached_tokens={"p1": 7_200})
    assert place(decide(prefills, decodes, request, ("path-choice",)))[1] == "p0"


def test_a_prefix_on_the_decode_worker_saves_transfer_and_prefill() -> None:
    decodes = [with_rows(view("d0"), 6), with_rows(view("d1"), 6)]
    request = ask(30_000, cached_tokens={"d1": 29_600})
    assert place(decide([view("p0")], decodes, request)) == (Choice.LOCAL, "", "d1")


# -- targets -----------------------------------------------------------------------------------------------------


def test_no_placement_makes_a_running_request_miss_its_target() -> None:
    strict = with_rows(view("d0"), 6, tokens=30_000, tpot_s=0.014)  # The step already takes 13.6 ms.
    assert place(decide([view("p0")], [strict, with_rows(view("d1"), 1)], ask(30_000)))[2] == "d1"
    alone = decide([view("p0")], [strict], ask(30_000))
    assert (alone.choice, alone.obstacle) == (Choice.WAIT, Obstacle.ROOM)


def test_a_late_request_waits_for_room_for_a_limited_time() -> None:
    strict = with_rows(view("d0"), 6, tokens=30_000, tpot_s=0.014)
    assert decide([view("p0")], [strict], ask(30_000, waited_s=3.9)).choice is Choice.WAIT
    assert decide([view("p0")], [strict], ask(30_000, waited_s=4.1)).choice is not Choice.WAIT


@pytest.mark.parametrize("slo", [Slo(ttft_s=0.001, tpot_s=1.0), Slo(ttft_s=9.0, tpot_s=0.001)])
def test_an_idle_cluster_serves_a_hopeless_request_at_once(slo: Slo) -> None:
    decision = decide([view("p0")], [view("d0")], ask(slo=slo))
    assert decision.choice in (Choice.REMOTE, Choice.LOCAL)
    assert decision.candidates[0].slack < 0.0
    assert "served late" in decision.reason


def test_an_impossible_target_does_not_close_a_worker() -> None:
    hopeless = with_rows(view("d0"), 3, tpot_s=0.001)
    assert decide([view("p0")], [hopeless], ask()).choice is not Choice.WAIT


def test_a_long_answer_needs_free_memory_for_growth() -> None:
    # 20 rows will each add about 150 tokens, so 3,000 of 12,000 free tokens are reserved.
    small = view("d0", num_blocks=250 * 20 + 750)
    with_rows(small, 20, tokens=4_000)
    request = ask(10_000)
    decision = decide([view("p0")], [small], request)
    assert (decision.choice, decision.obstacle) == (Choice.WAIT, Obstacle.ROOM)  # Smaller requests may go first.
    assert decide([view("p0")], [small], ask(8_000)).choice is not Choice.WAIT
    urgent = decide([view("p0")], [small], ask(10_000, waited_s=4.1))
    assert (urgent.choice, urgent.obstacle) == (Choice.WAIT, Obstacle.DECODE)  # But not for an unlimited time.


def test_a_transfer_delay_is_spread_over_the_answer() -> None:
    decodes = [view("d0")]
    long = decide([view("p0")], decodes, ask(expected_tokens=300.0), ("path-choice",)).candidates[0].tpot_s
    short = decide([view("p0")], decodes, ask(expected_tokens=3.0), ("path-choice",)).candidates[0].tpot_s
    last_chunk_s = FAST.transfer_s(2048 / 16 * 2**21)
    assert short - long == pytest.approx((last_chunk_s + 0.5 * long) * (1 / 2 - 1 / 299), rel=0.2)


@pytest.mark.parametrize(("tokens", "choice"), [(16, Choice.LOCAL), (17, Choice.REMOTE)])
def test_a_free_prefill_worker_gets_longer_prompts(tokens: int, choice: Choice) -> None:
    assert decide([view("p0")], [with_rows(view("d0"), 2)], ask(tokens)).choice is choice
    held = {"p0": 8_000, "d0": 8_000}
    assert decide([view("p0")], [with_rows(view("d0"), 2)], ask(8_000 + tokens, cached_tokens=held)).choice is choice


# -- without prefill workers -------------------------------------------------------------------------------------


def test_without_prefill_workers_prompts_spread_by_predicted_ttft() -> None:
    decodes = [with_queue(with_rows(view("d0"), 2), 0.03), with_rows(view("d1"), 2)]
    assert place(decide([], decodes, ask())) == (Choice.LOCAL, "", "d1")
    warm = ask(cached_tokens={"d0": 7_500})
    assert place(decide([], decodes, warm)) == (Choice.LOCAL, "", "d0")


def test_a_worker_whose_rows_leave_too_little_time_is_not_chosen() -> None:
    decodes = [with_rows(view("d0"), 20), with_rows(view("d1"), 4)]
    assert place(decide([], decodes, ask())) == (Choice.LOCAL, "", "d1")


def test_late_binding_applies_to_local_placements() -> None:
    request = ask()
    early_s = min(with_rows(view("d0"), 4).load.batch_s, EARLY_SHARE * request.slo.ttft_s)
    assert decide([], [with_queue(with_rows(view("d0"), 4), 0.9 * early_s)], request).choice is Choice.LOCAL
    decision = decide([], [with_queue(with_rows(view("d0"), 4), 1.1 * early_s)], request)
    assert (decision.choice, decision.obstacle) == (Choice.WAIT, Obstacle.PREFILL)
    assert decision.retry_in_s == pytest.approx(0.1 * early_s)


def test_a_prompt_is_sent_behind_one_that_takes_longer_than_the_target() -> None:
    request = ask()
    long = with_queue(with_rows(view("d0"), 4), 1.1 * request.slo.ttft_s)
    assert decide([], [long], request).choice is Choice.LOCAL


# -- random views ------------------------------------------------------------------------------------------------


def _scene(rng: random.Random) -> tuple[PolicyInput, list[WorkerView], list[WorkerView]]:
    prefills = [view(f"p{i}") for i in range(rng.randint(0, 4))]
    decodes = [view(f"d{i}", num_blocks=rng.choice([400, 25_000])) for i in range(rng.randint(1, 6))]
    for one in prefills:
        if rng.random() < 0.6:
            with_queue(one, rng.uniform(0.001, 0.5))
    for one in decodes:
        with_rows(one, rng.randint(0, 25), rng.randint(10, 9000), rng.choice([0.001, 0.02, 0.05]), rng.random() < 0.7)
        if rng.random() < 0.3:
            with_queue(one, rng.uniform(0.001, 0.5))
        if rng.random() < 0.1:
            one.closed_until_s = 1.0
    names = [one.worker_id for one in (*prefills, *decodes)]
    pairs = [(p.worker_id, d.worker_id) for p in prefills for d in decodes]
    tokens = rng.randint(1, 40_000)
    request = ask(
        tokens,
        slo=Slo(ttft_s=rng.choice([0.01, 0.5, 5.0]), tpot_s=rng.choice([0.001, 0.02, 0.1])),
        waited_s=rng.choice([0.0, 0.3, 30.0]),
        expected_tokens=rng.choice([1.0, 10.0, 1000.0]),
        cached_tokens={name: rng.randint(0, tokens + 50) for name in rng.sample(names, rng.randint(0, len(names)))},
        avoid_workers=frozenset(rng.sample(names, rng.randint(0, 2)) if len(names) > 2 else ()),
        avoid_pairs=frozenset(rng.sample(pairs, rng.randint(0, len(pairs)))),
    )
    return request, prefills, decodes


@pytest.mark.parametrize("off", [(), ("path-choice",), ("tandem", "transfer-price", "prefix-value", "path-choice")])
def test_a_chosen_worker_is_open_and_not_avoided(off: tuple[str, ...]) -> None:
    rng, seen = random.Random(7), set()
    for _ in range(600):
        request, prefills, decodes = _scene(rng)
        decision = decide(prefills, decodes, request, off)
        seen.add(decision.choice)
        if decision.choice is Choice.WAIT:
            assert decision.obstacle in (Obstacle.PREFILL, Obstacle.ROOM, Obstacle.DECODE)
            assert decision.retry_in_s is not None
            continue
        prefill, decode = decision.prefill_worker, decision.decode_worker
        views = {one.worker_id: one for one in (*prefills, *decodes)}
        assert (prefill, decode) not in request.avoid_pairs
        for role, chosen in ((prefills, prefill), (decodes, decode)):
            if chosen in request.avoid_workers:
                assert all(one.worker_id in request.avoid_workers for one in role)
        landing = views[decode]
        assert landing.closed_until_s <= 0.0
        assert not landing.reservations or landing.load.free_tokens >= request.num_tokens
        assert (decision.choice is Choice.REMOTE) == bool(prefill)
        assert not prefill or views[prefill].queue_s(0.0) <= views[prefill].batch_s
        assert prefill or landing.totals.prefills <= 1 or landing.queue_s(0.0) <= landing.load.batch_s
        shown = decision.candidates
        assert (shown[0].prefill_worker, shown[0].decode_worker) == (prefill, decode)
        assert all(one.ttft_s > 0.0 and one.tpot_s > 0.0 for one in shown)
    assert {Choice.WAIT, Choice.LOCAL} <= seen


def test_a_decision_does_not_depend_on_the_order_of_workers() -> None:
    rng = random.Random(11)
    for _ in range(200):
        request, prefills, decodes = _scene(rng)
        first = place(decide(prefills, decodes, request))
        assert place(decide(prefills[::-1], decodes, request)) == first


def test_settings_name_the_policy_and_its_rules() -> None:
    policy = make_policy(RouterSettings(policy="goodput", rules_off=("path-choice",)), lambda p, d: FAST)
    decision = policy(ask(), [with_queue(view("p0"), 1.5)], [with_rows(view("d0"), 4)], 0.0)
    assert decision.choice is Choice.WAIT


def test_a_late_request_waits_for_the_worker_that_has_its_prefix() -> None:
    """On another worker it would take a hundred times the compute from requests that can meet their targets."""
    warm, cold = with_queue(view("p0"), 0.2), view("p1")
    late = ask(8_000, waited_s=10.0, cached_tokens={"p0": 7_920})
    assert decide([warm, cold], [view("d0")], late).choice is Choice.WAIT
    assert decide([with_queue(view("p0"), 0.01), cold], [view("d0")], late).prefill_worker == "p0"


@pytest.mark.parametrize(("left_s", "is_in_time"), [(20.0, True), (0.1, False)])
def test_a_resumed_request_is_late_by_its_answer_not_by_its_first_token(left_s: float, is_in_time: bool) -> None:
    resumed = ask(8_000, waited_s=0.1, is_resumed=True, answer_left_s=left_s)
    decision = decide([view("p0")], [view("d0")], resumed)
    assert decision.choice is not Choice.WAIT
    assert ("served late" not in decision.reason) == is_in_time
