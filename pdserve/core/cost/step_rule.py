"""How many prompt tokens a decode worker's step may prefill in addition to its decode rows, and in which order prompts
are computed. Pure.

Workers apply these rules, and the router and the simulator use them for predictions. A step of a decode worker is as
long as its decode rows allow, but not longer than is worth their memory (`longest_step_s`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, final

from pdserve.core.attempt import Attempt
from pdserve.core.cost.latency import WIDEST_BAND, CostModel
from pdserve.core.effects import StepAccount

# --- longest step that is worth its memory --------------------------------------------------------------------
# It limits steps with prompt chunks, whatever the latency targets are.
#
# A step reads the weights once, so longer steps compute more prompt tokens per second. But an answer of n tokens holds
# its KV for n steps, and that memory cannot cache prefixes for later requests. Let a step take s seconds, of which w
# are for reading the weights, and a share r is for decode rows (work that does not depend on the length of steps). Let
# decode rows hold the share h of the memory. The throughput of a worker is proportional to
#
#     (1 - r - w / s) * (1 - h) ** MEMORY_WORTH        with h in proportion to s
#
# It has its maximum where a small increase of s gains as much in the first factor as it loses in the second:
#
#     w / ((1 - r) s - w) = MEMORY_WORTH * h / (1 - h)        (1 - r) s = w * (1 + (1 - h) / (MEMORY_WORTH * h))
#
# If the rows hold a tenth of the memory, a step may take 37 times as long as reading the weights. If they hold half of
# it, 5 times. If they hold almost all, a step may take no longer than reading the weights.

# The value of a share of the memory, relative to the same share of compute. Let the cache, in proportion to its memory,
# have a share y of the prompt tokens. Compute then serves 1 / (1 - y) times as many prompts, so memory is worth y / (1
# - y). This value is for y = 0.2, which is low for conversations. The measured hit rate cannot replace it: long steps
# reduce the hit rate, and memory would then seem worthless.
MEMORY_WORTH: Final = 0.25


def longest_step_s(weights_s: float, held_share: float) -> float:
    """The longest step that is worth its memory, without the time of decode rows. Decode rows hold `held_share` of the
    memory."""
    if held_share <= 0.0:
        return math.inf
    return weights_s * (1.0 + max(1.0 - held_share, 0.0) / (MEMORY_WORTH * held_share))


def held_share(context_tokens: float, rows: int, num_blocks: int, block_size: int) -> float:
    """Share of a worker's KV memory that its decode rows hold. It includes one free block for the growth of each
    row."""
    return (context_tokens / block_size + rows) / num_blocks


# --- prompt tokens of a step ----------------------------------------------------------------------------------

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


# --- order of prompts -----------------------------------------------------------------------------------------
# The order in which a step computes prompts, and how many tokens it may have.
#
# 1. Interrupted answers come first, in order of arrival, because their clients wait for the next token.
# 2. Prompts that can meet their TTFT target come next. The shortest remaining work goes first, which keeps the mean
#    TTFT low. A prompt that would be late in this order moves forward. Prompts that moved forward are ordered by due
#    time: that order meets all targets if any order does.
# 3. Prompts that will be late in any order, or have no target, wait for the others. The first of them gets a share of
#    each step, so it never starves.
#
# Steps are short relative to the strictest TTFT target, because a new prompt waits for the end of the current step.

STEP_SHARE: Final = 0.25  # longest step, as a share of the strictest TTFT target
WEIGHTS: Final = 4.0  # a step may always take this multiple of the time for reading the weights
PER_LATE_TOKEN: Final = 8  # one in this many tokens of a step is for prompts that are late or have no target
INTERRUPTED: Final = -math.inf
RECENT: Final = 64  # recent prompts whose TTFT targets are expected again


class Prompt(Protocol):
    @property
    def remaining(self) -> int:
        """Tokens that remain to be computed."""


P = TypeVar("P", bound=Prompt)


class Pending(NamedTuple, Generic[P]):
    """A prompt that is not yet completely computed."""

    prompt: P
    remaining_s: float  # remaining compute time, without other prompts
    due_at_s: float  # when the first token is due; infinite without a target, INTERRUPTED after the first token


def due_at_s(attempt: Attempt, num_output: int) -> float:
    """The due time of an attempt whose client has `num_output` tokens."""
    if num_output:
        return INTERRUPTED
    return math.inf if attempt.ttft_s is None else attempt.begun_at_s + attempt.ttft_s


def order(pending: Sequence[Pending[P]], now_s: float) -> tuple[list[P], list[P]]:
    """Two lists: the prompts that can meet their target, in the order of service, and the others, in the given order.

    `pending` is in the order of arrival.
    """
    interrupted: list[P] = []
    on_time: list[Pending[P]] = []
    others: list[P] = []
    for one in pending:
        if one.due_at_s == INTERRUPTED:
            interrupted.append(one.prompt)
        elif now_s + one.remaining_s <= one.due_at_s < math.inf:
            on_time.append(one)
        else:
            others.append(one.prompt)
    waiting = sorted(on_time, key=lambda one: one.remaining_s)
    urgent: list[Pending[P]] = []
    while (late := _first_late(urgent, waiting, now_s)) is not None:
        waiting.remove(late)
        urgent = sorted([*urgent, late], key=lambda one: one.due_at_s)
    return [*interrupted, *(one.prompt for one in (*urgent, *waiting))], others


def divide(
    pending: Sequence[Pending[P]], now_s: float, longest: Callable[[P], int], start: Callable[[P], bool]
) -> list[tuple[P, int]]:
    """The prompts of the next step, with the number of tokens for each.

    `longest` gives the tokens of a step that computes one prompt alone. It differs between prompts, because a token
    with a longer context takes more time. A prompt that gets a part of these tokens uses the same part of the step.
    `start` is called for a prompt before it gets tokens, and returns False if the prompt cannot be computed now. One
    PER_LATE_TOKEN-th of the step is reserved for prompts that are late or have no target.
    """
    on_time, others = order(pending, now_s)
    kept = 1.0 / PER_LATE_TOKEN if on_time and others else 0.0
    shares: list[tuple[P, int]] = []
    left = 1.0 - kept
    for group, more in ((on_time, kept), (others, 0.0)):
        for prompt in group:
            if left <= 0.0:
                break
            if not start(prompt):
                continue
            most, least = longest(prompt), 0 if shares else 1  # `start` may have found some of its tokens in the cache
            count = min(prompt.remaining, max(least, int(left * most + ROUNDING)))
            if count:
                shares.append((prompt, count))
            left = left - count / most if count == prompt.remaining else 0.0
        left += more
    return shares


def _first_late(urgent: Sequence[Pending[P]], waiting: Sequence[Pending[P]], now_s: float) -> Pending[P] | None:
    """The first prompt of `waiting` that would be late after `urgent` and the prompts before it."""
    at_s = now_s + sum(one.remaining_s for one in urgent)
    for one in waiting:
        at_s += one.remaining_s
        if at_s > one.due_at_s:
            return one
    return None


@final
class PromptOrder:
    """Applies the rule on one worker. `cost` learns from each step."""

    def __init__(self, cost: CostModel, *, most: int, least: int = LEAST_CHUNK) -> None:
        """A step may have `least` to `most` prompt tokens."""
        self.cost = cost
        self._least, self._most = min(least, most), most
        self._targets_s: deque[float] = deque(maxlen=RECENT)

    def arrived(self, ttft_s: float | None) -> None:
        """A prompt with this TTFT target has arrived."""
        if ttft_s is not None:
            self._targets_s.append(ttft_s)

    def step_tokens(self, cached: int) -> int:
        """The maximum tokens of a step that computes one prompt, of which `cached` tokens are already computed."""
        if not self._targets_s:
            return self._most
        longest_s = max(STEP_SHARE * min(self._targets_s), WEIGHTS * self.cost.decode_coefficients[0])
        tokens = self.cost.chunk_tokens(longest_s, 0, 0, cached)
        return self._most if tokens >= self._most else max(self._least, int(tokens))

    def remaining_s(self, tokens: int, computed: int) -> float:
        """Compute time of `tokens` after the first `computed` ones."""
        return self.cost.prefill_s(tokens, computed, self._most)

    def observe(self, account: StepAccount, step_s: float) -> None:
        self.cost.observe_batch(account.timed(step_s))
