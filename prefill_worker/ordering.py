"""Which prompts a step computes first, and how many tokens it may have. Pure: time is passed as `now_s`.

Prompts that can meet their TTFT target come first, and the shortest remaining work among them, which keeps the mean
TTFT low. A prompt that would be late in this order moves forward; prompts that moved forward are ordered by due time,
the order that meets all targets if any order does. A prompt that will be late in any order, or that has no target,
waits for the others. The first such prompt gets a share of each step, so it is never starved.

A step is short relative to the strictest TTFT target, because a new prompt waits for its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel
from pdserve.core.step_rule import LEAST_CHUNK

STEP_SHARE: Final = 0.25  # of the strictest TTFT target: the longest step
WEIGHTS: Final = 4.0  # times the time of reading the weights: shorter steps would spend too much time on it
LATE_SHARE: Final = 8  # one of so many tokens of a step is for prompts that are late or have no target
RECENT: Final = 64  # prompts whose TTFT targets may arrive again


class Pending(NamedTuple):
    """A prompt that is not completely computed."""

    number: int  # names it
    remaining_s: float  # compute time that remains, alone
    due_at_s: float | None  # when its first token is due; None: no target


class Order(NamedTuple):
    """Numbers of prompts in the order of service."""

    on_time: list[int]
    others: list[int]  # will be late, or have no target; in the given order


def order(prompts: Sequence[Pending], now_s: float) -> Order:
    """`prompts` are in the order of arrival."""
    on_time, others = [], []
    for one in prompts:
        if one.due_at_s is not None and now_s + one.remaining_s <= one.due_at_s:
            on_time.append(one)
        else:
            others.append(one.number)
    waiting = sorted(on_time, key=lambda one: one.remaining_s)
    urgent: list[Pending] = []
    while (late := _first_late(urgent, waiting, now_s)) is not None:
        waiting.remove(late)
        urgent = sorted([*urgent, late], key=lambda one: _due(one))
    return Order([one.number for one in (*urgent, *waiting)], others)


def _first_late(urgent: Sequence[Pending], waiting: Sequence[Pending], now_s: float) -> Pending | None:
    """The first of `waiting` that will be late after `urgent` and those before it."""
    at_s = now_s + sum(one.remaining_s for one in urgent)
    for one in waiting:
        at_s += one.remaining_s
        if at_s > _due(one):
            return one
    return None


def _due(one: Pending) -> float:
    return math.inf if one.due_at_s is None else one.due_at_s


@final
class PromptOrder:
    """The rule for one worker; `cost` learns from each step."""

    def __init__(self, cost: CostModel, *, most: int, least: int = LEAST_CHUNK) -> None:
        """A step has `least` to `most` tokens."""
        self.cost = cost
        self._least, self._most = min(least, most), most
        self._targets_s: deque[float] = deque(maxlen=RECENT)

    def arrived(self, ttft_s: float | None) -> None:
        """A prompt with this TTFT target has arrived."""
        if ttft_s is not None:
            self._targets_s.append(ttft_s)

    def step_tokens(self, cached: int) -> int:
        """The most tokens of the next step, if its first prompt has `cached` tokens already."""
        if not self._targets_s:
            return self._most
        longest_s = max(STEP_SHARE * min(self._targets_s), WEIGHTS * self.cost.decode_coefficients[0])
        tokens = self.cost.chunk_tokens(longest_s, 0, 0, cached)
        return self._most if tokens >= self._most else max(self._least, int(tokens))

    def remaining_s(self, tokens: int, computed: int) -> float:
        """Compute time of `tokens` after the first `computed`."""
        return self.cost.prefill_s(tokens, computed, self._most)

    def observe(self, account: StepAccount, step_s: float) -> None:
        self.cost.observe(
            rows=0,
            prefill_tokens=account.prefill_tokens,
            prefill_token_context=account.prefill_token_context,
            context_tokens=0,
            step_s=step_s,
        )


def late_tokens(budget: int, least: int) -> int:
    """How much of a step's `budget` is kept for the prompts that are not on time; at least `least` tokens."""
    return min(max(budget // LATE_SHARE, least), budget)
