"""The longest step that TPOT targets allow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.decode_sequence import DecodeSequence, DecodeStage
from decode_worker.planning import HORIZON, PACE, step_allowance
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.cost.step_rule import DUE_SHARE, LONGEST_GAP, Allowance
from pdserve.core.types import Sampling

TPOT_S = 0.05
DUE_S = DUE_SHARE * TPOT_S  # Time between due times.
DECODE_S = 0.042  # Decode steps are too long to catch up after a late step.
FAST_S = 0.01  # PACE of these steps fit between due times.


def sequence(
    *,
    output: int = 10,
    left: int = 100,
    first_s: float = 0.0,
    tpot_s: float | None = TPOT_S,
    itl_s: float | None = None,
) -> DecodeSequence:
    """A sequence with `output` output tokens, the first of which was sampled at `first_s`, and at most `left` more."""
    key = AttemptKey(1, "a", 1)
    attempt = Attempt(
        key=key, prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=output + left), tpot_s=tpot_s, itl_s=itl_s
    )
    one = DecodeSequence(
        attempt=attempt,
        key=key,
        prompt_len=3,
        ends_at=3 + output + left,
        order=0,
        is_local=True,
        stage=DecodeStage.RUNNING,
        tokens=[1, 2, 3, 4],
        end_ids=frozenset(),
        hashes=[],
    )
    one.began_output(first_s)
    one.tokens += [5] * (output - 1)
    return one


def allowed_step_s(decoding: Sequence[DecodeSequence], now_s: float, decode_s: float) -> float | None:
    return step_allowance(decoding, now_s, decode_s).step_s


def test_a_sequence_on_time_allows_one_target() -> None:
    on_time_s = 9 * DUE_S  # Its tenth token came exactly when due.
    assert allowed_step_s([sequence()], on_time_s, DECODE_S) == pytest.approx(DUE_S)


def test_slack_lengthens_the_step() -> None:
    now_s = 9 * DUE_S - 0.06  # 60 ms ahead.
    assert allowed_step_s([sequence()], now_s, DECODE_S) == pytest.approx(DUE_S + 0.06)


def test_the_gap_between_two_tokens_is_limited() -> None:
    assert allowed_step_s([sequence(output=1000)], 0.0, DECODE_S) == pytest.approx(LONGEST_GAP * TPOT_S)


def test_a_request_may_set_its_longest_gap() -> None:
    assert allowed_step_s([sequence(output=1000, itl_s=0.07)], 0.0, DECODE_S) == pytest.approx(0.07)
    assert allowed_step_s([sequence(output=1000, itl_s=9.0)], 0.0, DECODE_S) == pytest.approx(9.0)
    assert allowed_step_s([sequence(itl_s=9.0)], 9 * DUE_S, DECODE_S) == pytest.approx(DUE_S)


def test_a_late_sequence_shortens_the_step() -> None:
    now_s = 9 * TPOT_S + 0.05  # 50 ms late with 10 tokens left: 5 ms for each.
    assert allowed_step_s([sequence(left=10)], now_s, DECODE_S) == pytest.approx(TPOT_S - 0.005)


def test_a_step_may_end_late_if_later_steps_catch_up() -> None:
    on_time_s, gained_s = 9 * DUE_S, (HORIZON - 1) * (DUE_S - PACE * 0.035)
    assert gained_s < (LONGEST_GAP - 1) * TPOT_S
    assert allowed_step_s([sequence()], on_time_s, 0.035) == pytest.approx(DUE_S + gained_s)
    assert allowed_step_s([sequence()], on_time_s, FAST_S) == pytest.approx(LONGEST_GAP * TPOT_S)


def test_few_tokens_allow_little_delay() -> None:
    on_time_s = 9 * DUE_S
    assert allowed_step_s([sequence(left=3)], on_time_s, FAST_S) == pytest.approx(DUE_S + 2 * (DUE_S - PACE * FAST_S))
    assert allowed_step_s([sequence(left=1)], on_time_s, FAST_S) == pytest.approx(DUE_S)


def test_a_sequence_late_within_its_reserve_keeps_its_rate() -> None:
    assert allowed_step_s([sequence(left=10)], 9 * TPOT_S, DECODE_S) == pytest.approx(DUE_S)


def test_the_time_before_an_interruption_counts() -> None:
    one = sequence(output=1, left=19)
    one.attempt = replace(one.attempt, output_ids=(4,) * 9, begun_at_s=0.0)
    one.tokens += [5] * 9
    one.began_output(0.3)
    assert allowed_step_s([one], 9 * TPOT_S + 0.05, DECODE_S) == pytest.approx(TPOT_S - 0.005)


def test_a_sequence_that_cannot_recover_limits_only_the_gap() -> None:
    hopeless, on_time = sequence(left=2, first_s=-9.0), sequence()
    now_s = 9 * DUE_S
    assert allowed_step_s([hopeless], now_s, DECODE_S) == pytest.approx(LONGEST_GAP * TPOT_S)
    assert allowed_step_s([hopeless, on_time], now_s, DECODE_S) == pytest.approx(DUE_S)


def test_the_least_slack_decides() -> None:
    now_s = 9 * DUE_S - 0.08
    ahead, behind = sequence(), sequence(first_s=-0.05)
    assert allowed_step_s([ahead, behind], now_s, DECODE_S) == pytest.approx(DUE_S + 0.03)


def test_sequences_without_a_target_allow_anything() -> None:
    assert allowed_step_s([sequence(tpot_s=None)], 3.0, DECODE_S) is None
    assert allowed_step_s([sequence(tpot_s=None), sequence()], 9 * DUE_S, DECODE_S) == pytest.approx(DUE_S)
    assert allowed_step_s([], 0.0, DECODE_S) is None


@given(st.integers(2, 60), st.integers(0, 2**32), st.floats(0.2, 0.95))
def test_steps_within_the_limit_meet_the_target(left: int, seed: int, load: float) -> None:
    """For any steps within the limit, the mean over the answer is within the target."""
    rng, decode_s = random.Random(seed), load * TPOT_S
    one, now_s = sequence(output=1, left=left), 0.0
    for _ in range(left):
        allowed_s = allowed_step_s([one], now_s, decode_s)
        assert allowed_s is not None
        step_s = rng.uniform(min(decode_s, allowed_s), allowed_s)
        assert step_s <= LONGEST_GAP * TPOT_S
        now_s += step_s
        one.tokens.append(5)
    assert now_s / left <= TPOT_S * (1.0 + 1e-9)


def test_a_target_below_a_step_does_not_bind() -> None:
    strict = sequence(tpot_s=0.001)
    assert allowed_step_s([strict], 1.0, DECODE_S) == pytest.approx(LONGEST_GAP * DECODE_S)


def test_short_decode_steps_gain_slack() -> None:
    behind, ahead = sequence(), sequence(output=1000, tpot_s=0.03, itl_s=0.2)
    found = step_allowance([behind, ahead], 9 * DUE_S, DECODE_S)
    assert found == Allowance(pytest.approx(DUE_S), pytest.approx(0.2), pytest.approx(DUE_SHARE * 0.03 - DECODE_S))
    assert step_allowance([sequence(tpot_s=None)], 3.0, DECODE_S) == Allowance(None)


def test_a_sequence_that_cannot_recover_gains_nothing() -> None:
    hopeless = sequence(left=10)
    assert step_allowance([hopeless], 9 * TPOT_S + 5.0, DECODE_S).gain_s == 0.0
