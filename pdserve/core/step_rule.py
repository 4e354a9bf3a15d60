"""How many prompt tokens a decode worker's step may prefill in addition to its decode rows. Pure.

Decode workers apply this rule, and the router and the simulator use it for predictions. A step is as long as the decode
rows allow, but not longer than is worth their memory (pdserve.core.memory_price).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from pdserve.core.fit import WIDEST_BAND
from pdserve.core.latency import CostModel
from pdserve.core.memory_price import longest_step_s

DUE_SHARE: Final = 0.95  # time between due times of tokens, as a share of the TPOT target; the rest is a reserve
LONGEST_GAP: Final = 4.0  # longest time between two tokens, in TPOT targets, or in decode steps if these are longer
TARGET_SHARE: Final = 0.9  # share of the allowed time that a step uses; the rest is for the time between steps
FREE_SHARE: Final = 0.02  # a chunk may always add this share of a step, even if the rows allow nothing
BLIND_SHARE: Final = 4  # without any target, a chunk is the largest one divided by this
LEAST_CHUNK: Final = 16  # tokens of the smallest chunk; a waiting prompt must make progress
FIXED_SHARE: Final = 0.2  # if a step's fixed cost of prompt tokens is above this share of a chunk's arithmetic, wait
MAX_WAITS: Final = 8.0  # longest wait for slack, in decode steps
ROUNDING: Final = 1e-6  # tolerance in tokens or seconds, so that an exact fit is not lost by rounding


class StepLimit(NamedTuple):
    """The longest step with prompt chunks, and the fewest prompt tokens in such a step."""

    step_s: float
    least_tokens: int


def step_limit(
    cost: CostModel, *, decode_s: float, allowed_s: float | None, held_share: float, most: int, least: int = LEAST_CHUNK
) -> StepLimit:
    """The limit of a step whose decode rows alone take `decode_s`.

    `allowed_s` is the longest step that the TPOT targets of the rows allow, or None if no row has a target.
    `held_share` is the share of the KV memory that the rows hold. The larger it is, the shorter is the best step. A
    chunk has `least` to `most` tokens.
    """
    # Arithmetic that fits into the time for reading the weights is almost free, whatever the targets are.
    free_s = (1.0 + FREE_SHARE) * decode_s
    if allowed_s is None:
        return StepLimit(free_s, max(least, most // BLIND_SHARE))
    target_s = allowed_s * _share(cost)
    weights_s = cost.decode_coefficients[0]
    worth_s = longest_step_s(weights_s, held_share) + decode_s - weights_s
    step_s = target_s if target_s < worth_s else worth_s
    return StepLimit(free_s if free_s > step_s else step_s, least if least < most else most)


class Allowance(NamedTuple):
    """How long the decode rows allow the next step to take."""

    step_s: float | None  # the longest allowed time; None if no row has a target
    longest_s: float = math.inf  # the longest time of any step: the longest gap between two tokens
    gain_s: float = 0.0  # by how much a step without prompts increases `step_s`, up to `longest_s`


def is_worth_waiting(
    cost: CostModel, allowance: Allowance, *, decode_s: float, held_share: float, wanted: int, most: int
) -> bool:
    """Whether prompts of `wanted` tokens should wait for a longer step than the rows allow now.

    On some processors even a few prompt tokens make a step longer than reading the weights, because matrix products
    of few rows use a faster kernel. A few long chunks, with decode steps between them, then compute more prompt tokens
    in the same time than a short chunk in each step.
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
    """Prompt tokens of a step with `rows` decode rows over `context_tokens`, after `cached` tokens of the prompt."""
    tokens = cost.chunk_tokens(limit.step_s, rows, context_tokens, cached) + ROUNDING
    if tokens >= most:
        return most
    length = int(tokens)
    return length if length > limit.least_tokens else limit.least_tokens
