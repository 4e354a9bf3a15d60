"""The order in which a step computes prompts, and how many tokens it may have. Pure: time is passed as `now_s`.

1. Interrupted answers come first, in order of arrival, because their clients wait for the next token.
2. Prompts that can meet their TTFT target come next. The shortest remaining work goes first, which keeps the mean TTFT
   low. A prompt that would be late in this order moves forward. Prompts that moved forward are ordered by due time:
   that order meets all targets if any order does.
3. Prompts that will be late in any order, or have no target, wait for the others. The first of them gets a share of
each
   step, so it never starves.

Steps are short relative to the strictest TTFT target, because a new prompt waits for the end of the current step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, final

from pdserve.core.attempt import Attempt
from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel
from pdserve.core.step_rule import LEAST_CHUNK, ROUNDING

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
