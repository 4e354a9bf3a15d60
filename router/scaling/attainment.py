"""The share of requests that a cluster of a given size would serve within both targets. Pure.

Work is in seconds of a worker. With the router's cost model, a step of a decode worker that carries `k` prompt tokens
takes max(decode_base, prefill_base + per_token * k) + work of its rows. At the TPOT target t, it may take t, so of each
second

    work of rows                   <= D * (1 - decode_base / t)
    work of rows + work of prompts <= P + D * (1 - prefill_base / t)
    rows                           <= D * (rows that its memory and its batch hold)

The load is the largest ratio of both sides: 1 is the limit. Requests come at random, and the forecast has an error, so
the load of the next seconds is a random variable. The router rejects what does not fit, hence

    attainment = E[min(1, 1 / load)]

The window in which random arrivals even out is as long as a request may wait or takes.
"""

from __future__ import annotations

import math
from typing import Final, final

from pdserve.core.cost.latency import CostPrior
from router.scaling.interface import Demand, Observed, Size

MEMORY_SHARE: Final = 0.9  # of a worker's blocks that running requests fill
LEAST_SHARE: Final = 0.02  # of a step, where the weights alone take longer than the TPOT target
ANSWER_SPREAD: Final = 2.0  # mean of the squared lengths of answers over their squared mean; 2: exponential
#: Points and weights of a normal distribution (Gauss-Hermite, 7 points).
NORMAL: Final = (
    (-3.7504397, 0.00054827),
    (-2.3667594, 0.03075712),
    (-1.1544054, 0.24012318),
    (0.0, 0.45714286),
    (1.1544054, 0.24012318),
    (2.3667594, 0.03075712),
    (3.7504397, 0.00054827),
)


def expected_attainment(load: float, deviation: float) -> float:
    """E[min(1, 1 / x)] of a normal x with mean `load` and standard deviation `deviation`."""
    if load + NORMAL[-1][0] * deviation <= 1.0:
        return 1.0
    total = 0.0
    for at, weight in NORMAL:
        x = load + at * deviation
        total += weight if x <= 1.0 else weight / x
    return total


@final
class LoadModel:
    """The load of every size under one demand."""

    __slots__ = ("_decode_share", "_prompt_s", "_relative", "_row_s", "_rows", "_rows_held", "_total_share", "work_s")

    def __init__(self, demand: Demand, observed: Observed, capacity_share: float) -> None:
        cost, rate = observed.cost, demand.rate_rps
        step_s = max(demand.tpot_s, 1e-6)
        context = demand.prompt_tokens + 0.5 * demand.output_tokens
        prompt_s = _prompt_s(cost, demand, observed.max_batch_tokens)
        row_s = demand.output_tokens * (cost.decode_per_row_s + cost.decode_per_context_token_s * context)
        self._prompt_s, self._row_s = rate * prompt_s / capacity_share, rate * row_s / capacity_share
        self._decode_share = max(1.0 - cost.decode_base_s / step_s, LEAST_SHARE)
        self._total_share = max(1.0 - cost.prefill_base_s / step_s, LEAST_SHARE)
        self._rows = rate * demand.output_tokens * step_s / capacity_share
        self._rows_held = min(float(observed.max_batch), MEMORY_SHARE * observed.kv_tokens / max(context, 1.0))
        #: Work of a request, with its part of the steps' fixed cost: what an average worker spends on it. Where memory
        #: or batch are the limit, its share of them.
        held_s = demand.output_tokens * step_s / self._rows_held
        self.work_s = max(prompt_s + row_s / self._decode_share, held_s)
        shared = prompt_s / max(prompt_s + row_s, 1e-12)
        squared = shared * shared * demand.prompt_spread
        squared += (1.0 - shared) ** 2 * ANSWER_SPREAD + 2.0 * shared * (1.0 - shared)
        window_s = demand.ttft_s + (1.0 - shared) * demand.output_tokens * step_s
        variance = demand.dispersion * squared / max(rate * window_s, 1e-9)
        self._relative = math.sqrt(variance + demand.error * demand.error)

    def load(self, size: Size) -> float:
        if size.decode <= 0:
            return math.inf
        rows = self._row_s / (size.decode * self._decode_share)
        total = (self._row_s + self._prompt_s) / (size.prefill + size.decode * self._total_share)
        memory = self._rows / (size.decode * self._rows_held)
        return max(rows, total, memory)

    def attainment(self, size: Size) -> float:
        load = self.load(size)
        return 0.0 if load == math.inf else expected_attainment(load, load * self._relative)


def _prompt_s(cost: CostPrior, demand: Demand, max_batch_tokens: int) -> float:
    """Seconds to compute the mean prompt in full batches."""
    full_s = max(cost.decode_base_s, cost.prefill_base_s + cost.prefill_per_token_s * max_batch_tokens)
    return demand.uncached_tokens * full_s / max_batch_tokens + cost.prefill_per_token_context_s * demand.token_context
