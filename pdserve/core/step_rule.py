"""How many prompt tokens a step may prefill beside decode rows. Pure.

Decode workers apply this rule, and the router and the simulator predict by it. A step is as long as the decode rows
allow, but not longer than is worth their memory (pdserve.core.memory_price).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from pdserve.core.fit import WIDEST_BAND
from pdserve.core.latency import CostModel
from pdserve.core.memory_price import longest_step_s

DUE_SHARE: Final = 0.95  # of the TPOT target between due times of tokens: a reserve for what comes later
LONGEST_GAP: Final = 4.0  # TPOT targets, or decode steps if these are longer, between two tokens
TARGET_SHARE: Final = 0.9  # of the time that the rows allow; the rest is for the time between steps
FREE_SHARE: Final = 0.02  # of a step: what a chunk may add if the rows allow nothing
BLIND_SHARE: Final = 4  # of the largest chunk, if no row has a target
LEAST_CHUNK: Final = 16  # tokens; a waiting prompt must make progress
FIXED_SHARE: Final = 0.2  # of a chunk's arithmetic: what a step with prompt tokens may cost in addition
MAX_WAITS: Final = 8.0  # decode steps until there is slack for a chunk
ROUNDING: Final = 1e-6  # tokens or seconds; what fits exactly is not prevented by rounding


class StepLimit(NamedTuple):
    """The longest step with prompt chunks, and the fewest prompt tokens of one."""

    step_s: float
    least_tokens: int


def step_limit(
    cost: CostModel, *, decode_s: float, allowed_s: float | None, held_share: float, most: int, least: int = LEAST_CHUNK
) -> StepLimit:
    """For a step whose decode rows alone take `decode_s`.

    `allowed_s` is the longest step that the TPOT targets of the rows allow; None if no row has a target. `held_share`
    is the share of the KV memory that the rows hold: a larger share makes shorter steps better. A chunk has `least` to
    `most` tokens.
    """
    # Arithmetic that fits into the time for reading the weights is almost free, whatever the targets.
    free_s = (1.0 + FREE_SHARE) * decode_s
    if allowed_s is None:
        return StepLimit(free_s, max(least, most // BLIND_SHARE))
    target_s = allowed_s * _share(cost)
    weights_s = cost.decode_coefficients[0]
    worth_s = longest_step_s(weights_s, held_share) + decode_s - weights_s
    step_s = target_s if target_s < worth_s else worth_s
    return StepLimit(free_s if free_s > step_s else step_s, least if least < most else most)


class Allowance(NamedTuple):
    """What the decode rows allow of the next step."""

    step_s: float | None  # its longest time; None if no row has a target
    longest_s: float = math.inf  # that of any step: the longest gap between two tokens
    gain_s: float = 0.0  # by how much a step of the rows alone increases `step_s`, up to `longest_s`


def is_worth_waiting(
    cost: CostModel, allowance: Allowance, *, decode_s: float, held_share: float, wanted: int, most: int
) -> bool:
    """Whether prompts of `wanted` tokens should wait for a longer step than the rows allow now.

    On some processors a step with some prompt tokens takes longer than reading the weights, however few they are:
    matrix products of few rows are fast by other means. A few long chunks, with steps of decode rows alone between
    them, then compute more prompt tokens in the same time than a short chunk in each step.
    """
    base_s, per_token_s, _ = cost.prefill_coefficients
    fixed_s = base_s - cost.decode_coefficients[0]
    if fixed_s <= 0.0 or per_token_s <= 0.0 or allowance.step_s is None:
        return False
    longest = step_limit(cost, decode_s=decode_s, allowed_s=allowance.longest_s, held_share=held_share, most=most)
    room_s = longest.step_s - decode_s - fixed_s
    work_s = min(room_s, fixed_s / FIXED_SHARE, wanted * per_token_s, most * per_token_s)
    missing_s = (decode_s + fixed_s + work_s) / _share(cost) - allowance.step_s
    return work_s > 0.0 and ROUNDING < missing_s <= MAX_WAITS * allowance.gain_s


def _share(cost: CostModel) -> float:
    """The share of the allowed time that a step may take by the cost model."""
    error = cost.step_error
    share = 1.0 / (1.0 + (error if error < WIDEST_BAND else WIDEST_BAND))
    return share if share < TARGET_SHARE else TARGET_SHARE


def chunk_tokens(
    cost: CostModel, limit: StepLimit, *, rows: int, context_tokens: float, cached: float, most: int
) -> int:
    """Prompt tokens of a step beside `rows` decode rows over `context_tokens`, after `cached` tokens of the prompt."""
    tokens = cost.chunk_tokens(limit.step_s, rows, context_tokens, cached) + ROUNDING
    if tokens >= most:
        return most
    length = int(tokens)
    return length if length > limit.least_tokens else limit.least_tokens
