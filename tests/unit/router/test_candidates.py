"""Costs of candidates, compared with the formulas of docs/scheduling.md for one pair of workers at a time."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pdserve.core.cost.latency import WIDEST_BAND, LinkModel
from pdserve.core.cost.overlap import exposed_s
from pdserve.core.cost.step_rule import TARGET_SHARE
from pdserve.core.types import Slo
from router.policy.availability import can_start, opens_in_s
from router.policy.candidates import (
    EARLY_SHARE,
    WORK_WEIGHT,
    WORTH_WAITING,
    PlacementOption,
    local_options,
    remote_options,
)
from router.policy.interface import PolicyInput
from router.policy.ranking import (
    DECODES_PAIRED,
    LOCALS_PRICED,
    PREFILLS_PAIRED,
    rank_decodes,
    reported_step_s,
    tandem_step_s,
)
from router.state.load import DecodeLoad
from router.state.view import WorkerView
from tests.unit.router.test_goodput import FAST, SLOW, ask, view, with_queue, with_rows

SIZE, CHUNK, BLOCK_BYTES = 16, 2048, 2**21  # The cost model of every worker here.
NOW_S = 0.25


def scene(rng: random.Random, num_prefills: int = 2, num_decodes: int = 2) -> tuple[PolicyInput, list[Any], list[Any]]:
    prefills = [view(f"p{i}") for i in range(num_prefills)]
    decodes = [view(f"d{i}") for i in range(num_decodes)]
    for one in (*prefills, *decodes):
        if rng.random() < 0.5:
            with_queue(one, rng.uniform(0.3, 0.6))
        if rng.random() < 0.5:  # The cost model has enough samples for an error.
            for _ in range(20):
                step_s = one.cost.step_s(0, 0, 512, 512 * 256) * rng.choice((0.9, 1.15))
                one.cost.observe(
                    rows=0, prefill_tokens=512, prefill_token_context=512 * 256, context_tokens=0, step_s=step_s
                )
                step_s = one.cost.decode_s(8, 60_000) * rng.choice((0.95, 1.1))
                one.cost.observe(
                    rows=8, prefill_tokens=0, prefill_token_context=0, context_tokens=60_000, step_s=step_s
                )
    for one in prefills:
        for _ in range(3):
            one.replies.observe(rng.uniform(0.0, 0.01))
    for one in decodes:
        with_rows(
            one, rng.randint(0, 12), 16 * rng.randint(1, 500), rng.choice([0.012, 0.02, 0.05]), rng.random() < 0.7
        )
        one.grants.observe(rng.uniform(0.0, 0.004))
        one.first_tokens.observe(rng.uniform(0.0, 0.004))
    tokens = 16 * rng.randint(1, 700)
    names = [one.worker_id for one in (*prefills, *decodes)]
    return (
        ask(
            tokens,
            slo=Slo(ttft_s=rng.choice([0.5, 2.0]), tpot_s=rng.choice([0.013, 0.05])),
            waited_s=rng.choice([0.0, 0.3]),
            expected_tokens=rng.choice([1.0, 2.0, 2.5, 40.0, 300.0]),
            cached_tokens={name: 16 * rng.randint(0, tokens // 16 + 2) for name in names if rng.random() < 0.6},
        ),
        prefills,
        decodes,
    )


def steps(request: PolicyInput) -> float:
    return max(request.expected_tokens - 1.0, 1.0)


def link_of(prefill: str, decode: str) -> LinkModel:
    return SLOW if prefill[1:] == decode[1:] else FAST


def tightest(request: PolicyInput, load: DecodeLoad) -> float:
    """The strictest TPOT target that this worker can meet, including this request's."""
    return min(load.tightest_s, request.slo.tpot_s if request.slo.tpot_s > load.alone_s else math.inf)


def step_of(request: PolicyInput, load: DecodeLoad) -> float:
    """step(d) of the docs."""
    growth = request.expected_tokens / 2 * (1 + load.arriving)
    return load.step_s + load.row_s + load.token_s * (request.num_tokens + growth)


def slacks(request: PolicyInput, option: PlacementOption, residents_s: float, error: float) -> tuple[float, float]:
    """(of its TTFT, of the strictest TPOT), as shares of the targets."""
    load, slo = option.decode.load, request.slo
    sure = 1.0 + load.band
    ttft_slack = (slo.ttft_s - request.waited_s - option.ttft_s * (1.0 + min(error, WIDEST_BAND))) / slo.ttft_s
    own = (slo.tpot_s - option.tpot_s * sure) / slo.tpot_s
    theirs = (load.tightest_s - residents_s * sure) / load.tightest_s if load.tightest_s < math.inf else 1.0
    return ttft_slack, min(own, theirs)


def check_slack(request: PolicyInput, option: PlacementOption, residents_s: float, error: float) -> None:
    ttft_slack, tpot_slack = slacks(request, option, residents_s, error)
    assert (option.ttft_slack, option.tpot_slack) == (pytest.approx(ttft_slack), pytest.approx(tpot_slack))
    assert option.slack == min(option.ttft_slack, option.tpot_slack)
    load = option.decode.load
    assert option.harms == (load.tightest_s < math.inf and residents_s * (1.0 + load.band) > load.tightest_s)


def late_of(request: PolicyInput, prefill: WorkerView, decode: WorkerView, work_s: float, held: float) -> float:
    """Computed part by part: when each chunk is ready, and which of its blocks the decode worker lacks."""
    tokens = request.num_tokens
    lacked_from = tokens - max(1, tokens - request.cached_tokens.get(decode.worker_id, 0))
    # Blocks in the prefill worker's cache are ready at once.
    ends = [held, *range(held + CHUNK, tokens, CHUNK), tokens]
    parts, at = [], lacked_from
    for end in ends:
        if end > at:
            num_blocks = math.ceil((tokens - at) / SIZE) - math.ceil((tokens - end) / SIZE)
            parts.append((prefill.cost.prefill_s(end - held, held, CHUNK), num_blocks * BLOCK_BYTES))
            at = end
    return exposed_s(parts, link_of(prefill.worker_id, decode.worker_id))


@pytest.mark.parametrize("seed", range(40))
def test_remote_costs_match_the_documented_formula(seed: int) -> None:
    rng = random.Random(seed)
    request, prefills, decodes = scene(rng)
    cached = request.cached_tokens
    receivers, _ = rank_decodes(request, cached, decodes, NOW_S, tandem_step_s)
    options = remote_options(request, cached, prefills, receivers, NOW_S, link_of)
    assert {(option.prefill.worker_id, option.decode.worker_id) for option in options if option.prefill} == {
        (prefill.worker_id, receiver[3].worker_id) for prefill in prefills for receiver in receivers
    }
    for option in options:
        prefill, decode, slo = option.prefill, option.decode, request.slo
        assert prefill is not None
        held = min(cached.get(prefill.worker_id, 0), request.num_tokens - 1)
        work_s = prefill.cost.prefill_s(request.num_tokens - held, held, CHUNK)
        delay_s = prefill.queue_s(NOW_S) + work_s
        rest_s = decode.rest_of_step_s(NOW_S)
        ttft_s = delay_s + rest_s + decode.grants.typical_s + prefill.replies.typical_s
        assert option.ttft_s == pytest.approx(ttft_s)
        step_s = step_of(request, decode.load)
        latency_s, per_byte_s = link_of(prefill.worker_id, decode.worker_id).coefficients
        lacking = max(1, request.num_tokens - cached.get(decode.worker_id, 0))
        before_bytes = max(prefill.totals.blocks * BLOCK_BYTES, decode.totals.landing_tokens // SIZE * BLOCK_BYTES)
        queued_s = latency_s + per_byte_s * (before_bytes + math.ceil(lacking / SIZE) * BLOCK_BYTES) - delay_s
        late_s = max(late_of(request, prefill, decode, work_s, held), queued_s)
        assert option.tpot_s == pytest.approx(step_s + (late_s + 0.5 * step_s) / steps(request), rel=1e-4)
        cost = (ttft_s - rest_s + WORK_WEIGHT * work_s) / slo.ttft_s + late_s / (steps(request) * slo.tpot_s)
        assert option.cost == pytest.approx(cost, rel=1e-4)
        check_slack(request, option, step_s, prefill.cost.prefill_error)
        is_open = can_start(prefill, request.num_tokens, NOW_S)
        assert option.opens_in_s == (0.0 if is_open else opens_in_s(prefill, NOW_S))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_only", [True, False])
@pytest.mark.parametrize("short", [16.0, math.inf])
def test_local_costs_match_the_documented_formula(seed: int, is_only: bool, short: float) -> None:
    request, _, decodes = scene(random.Random(seed), num_decodes=3)
    cached, slo = request.cached_tokens, request.slo
    _, readers = rank_decodes(request, cached, decodes, NOW_S, tandem_step_s)
    for option in local_options(request, cached, readers, NOW_S, short, lambda p, d: LinkModel(), is_only=is_only):
        decode, load = option.decode, option.decode.load
        held = min(cached.get(decode.worker_id, 0), request.num_tokens - 1)
        uncached = request.num_tokens - held
        read_s, queue_s = decode.prefill_time_s(uncached, held), decode.queue_s(NOW_S)
        ttft_s = max(queue_s, decode.rest_of_step_s(NOW_S)) + read_s + decode.first_tokens.typical_s
        assert option.ttft_s == pytest.approx(ttft_s)
        step_s = step_of(request, load)
        assert option.tpot_s == pytest.approx(step_s)
        residents_s = max(
            step_s, min(load.step_s + (queue_s + read_s) * load.decode_stall_share / steps(request), load.reads_s)
        )
        if not is_only:
            left = 1.0 - decode.prefill_s(uncached, held) / max(1e-9, slo.ttft_s - request.waited_s - queue_s)
            residents_s = max(residents_s, step_s / (TARGET_SHARE * left) if left > 0.0 else math.inf)
        cost = (ttft_s + WORK_WEIGHT * read_s) / slo.ttft_s + read_s * load.decode_stall_share / (
            steps(request) * slo.tpot_s
        )
        if short < math.inf:
            cost += WORTH_WAITING if uncached > short else -WORTH_WAITING
        assert option.preference == (0.0 if short == math.inf else math.copysign(WORTH_WAITING, uncached - short - 0.5))
        assert option.cost == pytest.approx(cost)
        check_slack(request, option, residents_s, decode.cost.step_error)
        early_s = min(load.batch_s, EARLY_SHARE * slo.ttft_s)
        goes_first = decode.totals.prefills <= 1 and read_s < queue_s and slo.ttft_s < queue_s
        assert option.opens_in_s == pytest.approx(0.0 if queue_s <= early_s or goes_first else queue_s - early_s)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_tandem", [True, False])
def test_the_best_decode_workers_are_kept_in_order(seed: int, is_tandem: bool) -> None:
    rng = random.Random(seed)
    request, _, decodes = scene(rng, num_decodes=9)
    for one in decodes:
        if rng.random() < 0.2:
            one.closed_until_s = rng.choice([NOW_S - 0.1, NOW_S + 0.1])
    cached, slo, tokens = request.cached_tokens, request.slo, request.num_tokens
    receivers, local_workers = [], []
    for order, decode in enumerate(decodes):
        load, report = decode.load, decode.report
        needed = tokens + request.expected_tokens + request.expected_tokens / 2 * load.rows
        if decode.closed_until_s > NOW_S or load.free_tokens < needed:
            continue
        step_s = step_of(request, load)
        if not is_tandem:
            step_s = decode.cost.decode_s(report.running + 1, report.context_tokens + tokens)
        spare = 1.0 - step_s * (1.0 + load.band) / tightest(request, load)
        if tightest(request, load) == math.inf:
            spare = 1.0 - step_s * (1.0 + load.band) / load.tightest_s
        receivers.append((-spare, order))
        uncached = max(1.0, tokens - cached.get(decode.worker_id, 0))
        per_token_s = load.per_token_s + load.per_token_context_s * (tokens - uncached / 2)
        read_s = uncached * per_token_s * load.prefill_slowdown
        cost = read_s * ((1.0 + WORK_WEIGHT) / slo.ttft_s + load.decode_stall_share / (steps(request) * slo.tpot_s))
        local_workers.append((spare < 0.0, cost + decode.queue_s(NOW_S) / slo.ttft_s, order))
    rule = tandem_step_s if is_tandem else reported_step_s
    found = rank_decodes(request, cached, decodes, NOW_S, rule)
    expected = sorted(receivers)[:DECODES_PAIRED]
    assert [one[1] for one in found.receivers] == [one[1] for one in expected]
    assert [one[0] for one in found.receivers] == [pytest.approx(excess) for excess, _ in expected]
    nearest = sorted(local_workers)[:LOCALS_PRICED]
    assert [one[3] for one in found.locals] == [order for _, _, order in nearest]
    assert [one[1] for one in found.locals] == [pytest.approx(cost) for _, cost, _ in nearest]


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_prefill_workers_are_paired(seed: int) -> None:
    request, prefills, decodes = scene(random.Random(seed), num_prefills=8, num_decodes=1)
    cached = request.cached_tokens
    costs = {}
    for one in prefills:
        held = min(cached.get(one.worker_id, 0), request.num_tokens - 1)
        work_s = one.cost.prefill_s(request.num_tokens - held, held, CHUNK)
        costs[one.worker_id] = one.queue_s(NOW_S) + (1.0 + WORK_WEIGHT) * work_s
    receivers, _ = rank_decodes(request, cached, decodes, NOW_S, tandem_step_s)
    options = remote_options(request, cached, prefills, receivers, NOW_S, lambda p, d: FAST)
    cheapest = sorted(costs, key=lambda name: (costs[name], name))[:PREFILLS_PAIRED]
    assert {option.prefill.worker_id for option in options if option.prefill} == (set(cheapest) if receivers else set())


@pytest.mark.parametrize("seed", range(10))
def test_step_predictions_match_the_documented_formula(seed: int) -> None:
    request, _, decodes = scene(random.Random(seed))
    for one in decodes:
        load, growth = one.load, request.expected_tokens / 2
        assert tandem_step_s(one, load, request.num_tokens, growth) == pytest.approx(step_of(request, load))


def test_a_pair_that_misses_a_target_ranks_last() -> None:
    full, roomy = with_rows(view("d0"), 12, tokens=30_000, tpot_s=0.012), with_rows(view("d1"), 1)
    request = ask(8_000)
    receivers, _ = rank_decodes(request, {}, [full, roomy], 0.0, tandem_step_s)
    assert {one[3].worker_id: one[0] > 0.0 for one in receivers} == {"d0": True, "d1": False}
    options = remote_options(request, {}, [view("p0")], receivers, 0.0, lambda p, d: FAST if d == "d0" else SLOW)
    assert [option.decode.worker_id for option in options] == ["d1", "d0"]
    assert [option.harms for option in options] == [False, True]


def test_pricing_stops_if_the_best_pair_can_start() -> None:
    decodes = [view(f"d{i}") for i in range(DECODES_PAIRED)]
    receivers, _ = rank_decodes(ask(8_000), {}, decodes, 0.0, tandem_step_s)
    options = remote_options(ask(8_000), {}, [view("p0"), view("p1")], receivers, 0.0, lambda p, d: FAST)
    assert len(options) == DECODES_PAIRED


def test_a_pair_that_can_start_now_is_kept_behind_busy_ones() -> None:
    request = ask(8_000, cached_tokens={"p0": 7_984})
    busy, free = with_queue(view("p0"), 0.2), with_queue(view("p1"), 0.0)
    decodes = [view(f"d{i}") for i in range(DECODES_PAIRED)]
    receivers, _ = rank_decodes(request, request.cached_tokens, decodes, 0.0, tandem_step_s)
    options = remote_options(request, request.cached_tokens, [busy, free], receivers, 0.0, lambda p, d: FAST)
    names = [option.prefill.worker_id for option in options if option.prefill]
    assert names == ["p0"] * DECODES_PAIRED + ["p1"]
    assert [option.opens_in_s == 0.0 for option in options] == [False] * DECODES_PAIRED + [True]
