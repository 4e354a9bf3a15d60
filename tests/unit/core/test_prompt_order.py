"""The order of prompts, and the length of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.cost.step_rule import INTERRUPTED, PER_LATE_TOKEN, Pending, PromptOrder, divide, order
from pdserve.core.effects import StepAccount

COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=0.001,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.005,
    decode_per_row_s=0.0,
    decode_per_context_token_s=0.0,
)


@dataclass(frozen=True)
class Text:
    number: int
    remaining: int = 100


def pending(*prompts: tuple[float, float | None]) -> list[Pending[Text]]:
    """Pending prompts, given as (remaining compute time, due time)."""
    return [
        Pending(Text(number), remaining_s, math.inf if due_at_s is None else due_at_s)
        for number, (remaining_s, due_at_s) in enumerate(prompts)
    ]


def ordered(prompts: list[Pending[Text]]) -> tuple[list[int], list[int]]:
    """Numbers of the prompts that are on time, and of the others."""
    on_time, others = order(prompts, 0.0)
    return [one.number for one in on_time], [one.number for one in others]


def test_the_shortest_comes_first_if_all_are_on_time() -> None:
    assert ordered(pending((0.5, 9.0), (0.1, 9.0), (0.3, 9.0))) == ([1, 2, 0], [])


def test_a_prompt_that_would_be_late_moves_forward() -> None:
    # After the two short prompts, prompt 0 would end at 0.9, but is due at 0.8.
    assert ordered(pending((0.5, 0.8), (0.1, 9.0), (0.3, 9.0)))[0] == [0, 1, 2]


def test_urgent_prompts_are_ordered_by_due_time() -> None:
    prompts = pending((0.5, 0.9), (0.4, 0.5), (0.1, 9.0))
    assert ordered(prompts)[0] == [1, 0, 2]


def test_late_prompts_and_those_without_a_target_keep_their_order() -> None:
    prompts = pending((0.5, 0.4), (0.2, 1.0), (0.1, None), (0.3, -1.0))
    assert ordered(prompts) == ([1], [0, 2, 3])


def test_interrupted_answers_come_first_in_their_order() -> None:
    prompts = pending((0.1, 9.0), (0.9, INTERRUPTED), (0.2, INTERRUPTED), (0.5, 0.4))
    assert ordered(prompts) == ([1, 2, 0], [3])


def test_no_prompts_have_an_empty_order() -> None:
    assert ordered([]) == ([], [])


def late(prompts: list[Pending[Text]], numbers: list[int]) -> int:
    at_s, count = 0.0, 0
    for number in numbers:
        at_s += prompts[number].remaining_s
        count += at_s > prompts[number].due_at_s + 1e-9
    return count


WORK = st.integers(1, 10).map(lambda one: one / 10)


@given(st.lists(st.tuples(WORK, st.integers(1, 40).map(lambda one: one / 10)), max_size=5))
def test_every_target_is_met_if_any_order_meets_all(work: list[tuple[float, float]]) -> None:
    prompts = pending(*work)
    on_time, others = ordered(prompts)
    assert sorted([*on_time, *others]) == list(range(len(prompts)))
    if any(late(prompts, list(one)) == 0 for one in permutations(range(len(prompts)))):
        assert others == []
        assert late(prompts, on_time) == 0


@given(st.lists(st.tuples(WORK, st.integers(1, 40).map(lambda one: one / 10)), max_size=6), st.integers(0, 5))
def test_a_prompt_overtakes_only_within_the_slack_of_others(work: list[tuple[float, float]], seed: int) -> None:
    """If first come, first served meets all targets, so does this order."""
    prompts = pending(*work)
    if late(prompts, list(range(len(prompts)))) == 0:
        assert late(prompts, ordered(prompts)[0]) == 0


def rule(**prior: float) -> PromptOrder:
    fields = {name: getattr(COST, name) for name in CostPrior.__dataclass_fields__}
    return PromptOrder(CostModel(CostPrior(**{**fields, **prior})), least=16, most=512)


def test_a_step_is_a_share_of_the_strictest_ttft_target() -> None:
    one = rule()
    assert one.step_tokens(0) == 512  # No targets yet.
    one.arrived(None)
    one.arrived(2.0)
    assert one.step_tokens(0) == 500
    one.arrived(0.4)
    one.arrived(2.0)
    assert one.step_tokens(0) == 100


def test_an_old_target_is_forgotten() -> None:
    one = rule()
    one.arrived(0.4)
    for _ in range(64):
        one.arrived(2.0)
    assert one.step_tokens(0) == 500


def test_a_step_is_not_spent_on_reading_the_weights() -> None:
    one = rule(decode_base_s=0.1)
    one.arrived(0.001)
    assert one.step_tokens(0) == 400
    slow = rule(prefill_per_token_s=1.0)
    slow.arrived(0.001)
    assert slow.step_tokens(0) == 16


def test_the_context_shortens_a_step() -> None:
    one = rule(prefill_per_token_context_s=1e-6)
    one.arrived(0.4)
    assert one.step_tokens(4096) < one.step_tokens(0) < 100


def test_the_rule_learns_the_speed_of_the_worker() -> None:
    one = rule()
    one.arrived(0.4)
    for _ in range(200):
        one.observe(StepAccount(prefill_tokens=100, prefill_token_context=5000.0), 0.2)
    assert 40 <= one.step_tokens(0) <= 60  # 0.1 s at 2 ms per token.
    assert one.remaining_s(100, 0) == pytest.approx(0.2, rel=0.05)


def test_late_prompts_get_a_share_of_each_step() -> None:
    prompts = pending((0.5, 9.0), (0.5, 0.1), (0.5, None))
    shares = divide(prompts, 0.0, lambda _: 64, lambda _: True)
    assert [(one.number, count) for one, count in shares] == [(0, 64 - 64 // PER_LATE_TOKEN), (1, 64 // PER_LATE_TOKEN)]


def test_late_prompts_get_unused_tokens() -> None:
    prompts = pending((0.5, 9.0), (0.5, 0.1), (0.5, None))
    shares = divide(prompts, 0.0, lambda _: 512, lambda _: True)
    assert [(one.number, count) for one, count in shares] == [(0, 100), (1, 100), (2, 100)]


def test_a_prompt_that_cannot_start_gets_no_tokens() -> None:
    prompts = pending((0.1, 9.0), (0.5, 9.0))
    shares = divide(prompts, 0.0, lambda _: 64, lambda one: one.number == 1)
    assert [(one.number, count) for one, count in shares] == [(1, 64)]
    assert divide([], 0.0, lambda _: 64, lambda _: True) == []


def test_prompts_share_a_step_by_time() -> None:
    """A whole step has 60 tokens of the first prompt, or 20 of the second: half of it has 30, the rest 10."""
    prompts = [Pending(Text(0, remaining=30), 0.1, 9.0), Pending(Text(1), 0.5, 9.0)]
    shares = divide(prompts, 0.0, lambda one: (60, 20)[one.number], lambda _: True)
    assert [(one.number, count) for one, count in shares] == [(0, 30), (1, 10)]


def test_a_step_is_never_empty() -> None:
    shares = divide(pending((0.1, 9.0), (0.5, None)), 0.0, lambda _: 1, lambda _: True)
    assert [(one.number, count) for one, count in shares] == [(0, 1)]
