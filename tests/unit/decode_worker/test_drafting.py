"""Drafts are used only if they raise the rate of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from decode_worker.speculation import FIRST_PROBE_STEPS, REFERENCE_STEPS, DraftRule
from pdserve.core.cost.latency import CostPrior
from pdserve.core.effects import StepAccount


def rule(per_draft_s: float, base_s: float = 0.01, *, most: int = 8, most_together: int = 64) -> DraftRule:
    """A plain step takes 10 ms and 1 ms per row."""
    prior = CostPrior(
        prefill_base_s=base_s,
        prefill_per_token_s=per_draft_s,
        decode_base_s=0.01,
        decode_per_row_s=0.001,
        decode_per_context_token_s=0.0,
    )
    return DraftRule(prior, most=most, most_together=most_together)


def test_a_certain_copy_gets_all_drafts() -> None:
    assert rule(0.0001).counts([[0.99] * 8], context_tokens=9, tpot_s=None) == [8]


def test_without_a_match_the_step_is_plain() -> None:
    assert rule(0.0001).counts([[], []], context_tokens=9, tpot_s=None) is None


def test_likely_drafts_come_first() -> None:
    counts = rule(0.0005).counts([[0.9, 0.8, 0.01], [0.02], []], context_tokens=9, tpot_s=None)
    assert counts == [2, 0, 0]


def test_an_expensive_step_needs_enough_drafts() -> None:
    dear = rule(0.0, base_s=0.02)
    assert dear.counts([[0.5]], context_tokens=9, tpot_s=None) is None
    assert dear.counts([[0.9, 0.8, 0.7]], context_tokens=9, tpot_s=None) == [3]


def test_a_gain_within_the_margin_is_ignored() -> None:
    assert rule(0.0).counts([[0.04]], context_tokens=9, tpot_s=None) is None
    assert rule(0.0).counts([[0.06]], context_tokens=9, tpot_s=None) == [1]


def test_all_rows_together_have_a_limit() -> None:
    counts = rule(0.0, most_together=5).counts([[0.9] * 4, [0.8] * 4], context_tokens=9, tpot_s=None)
    assert counts == [4, 1]


def test_the_strictest_tpot_target_bounds_the_step() -> None:
    one = rule(0.001)
    assert one.counts([[0.99] * 8], context_tokens=9, tpot_s=0.0189) == [4]  # 0.8 * 18.9 ms leaves 4.1 ms for drafts.
    assert one.counts([[0.99] * 8], context_tokens=9, tpot_s=0.01) is None


def test_measured_steps_teach_what_drafts_cost() -> None:
    one = rule(0.0001)
    assert one.counts([[0.6]], context_tokens=9, tpot_s=None) == [1]
    for _ in range(20):
        one.observe(step(1), 0.03)
        one.observe(step(0), 0.011)
    assert one.counts([[0.6]], context_tokens=9, tpot_s=None) is None
    assert one.least_probability(1) == pytest.approx(0.02)  # There must still be drafts to probe with.


def test_a_uniformly_slower_machine_changes_nothing() -> None:
    one = rule(0.0001)
    for _ in range(60):
        one.observe(step(1), 0.12)
        one.observe(step(0), 0.11)
    assert one.counts([[0.6]], context_tokens=9, tpot_s=None) == [1]


def test_one_stall_changes_no_decision() -> None:
    one = rule(0.0001)
    one.observe(step(1), 9.0)
    assert one.counts([[0.9, 0.9, 0.9]], context_tokens=9, tpot_s=None) is not None


def test_each_batch_size_has_its_own_price() -> None:
    one = rule(0.0001)
    for _ in range(20):
        one.observe(step(1), 0.5)
    assert one.counts([[0.9]], context_tokens=9, tpot_s=None) is None
    assert one.counts([[0.9]] * 4, context_tokens=9, tpot_s=None) == [1] * 4


def test_a_high_price_is_probed_less_and_less_often() -> None:
    one = rule(0.1)
    probes = []
    for number in range(40 * FIRST_PROBE_STEPS):
        counts = one.counts([[0.9, 0.8]], context_tokens=9, tpot_s=None)
        one.observe(step(sum(counts or ())), 0.2 if counts else 0.011)
        if counts:
            probes.append(number)
    gaps = [after - before for before, after in pairwise([-1, *probes])]
    assert gaps == [FIRST_PROBE_STEPS * 2**index + 1 for index in range(len(gaps))]
    assert len(gaps) == 5
    for _ in range(4):
        one.observe(step(2), 0.0115)
    assert one.counts([[0.9, 0.8]], context_tokens=9, tpot_s=None) is not None


def test_unlikely_drafts_are_never_tried() -> None:
    one = rule(0.1)
    assert {str(one.counts([[0.3]], context_tokens=9, tpot_s=None)) for _ in range(500)} == {"None"}


def test_occasional_plain_steps_keep_the_price_current() -> None:
    one = rule(0.0001)
    taken = []
    for _ in range(3 * (REFERENCE_STEPS + 1)):
        counts = one.counts([[0.9]], context_tokens=9, tpot_s=None)
        one.observe(step(sum(counts or ())), 0.011)
        taken.append(counts is not None)
    assert taken == ([True] * REFERENCE_STEPS + [False]) * 3


def test_unlikely_drafts_are_skipped_early() -> None:
    assert rule(0.0011).least_probability(1) == pytest.approx(0.1)
    assert rule(0.0).least_probability(1) == pytest.approx(0.02)


def test_an_engine_without_a_price_gets_every_draft() -> None:
    """A calibration may find no cost at all, as with the toy engine."""
    free = DraftRule(CostPrior(**dict.fromkeys(CostPrior.__dataclass_fields__, 0.0)), most=8, most_together=64)
    assert free.counts([[0.5, 0.4], [0.3]], context_tokens=9, tpot_s=0.1) == [2, 1]


def step(drafts: int) -> StepAccount:
    return StepAccount(decode_rows=1, context_tokens=9, draft_tokens=drafts)
