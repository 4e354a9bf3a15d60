"""A lower bound on the decode workers' time that each answer takes. Pure.

A step with decode rows takes hidden * D for the weights, and e = r + c * context for each row (simulator.bound_work).
The rows share hidden * D. Three limits on the number of rows give a lower bound on each row's share:

    ROWS    a step has at most R rows:                                    hidden * D / R
    MEMORY  the rows of a step hold at most K tokens of KV:               hidden * D * held / K
    TPOT    a step with more rows takes longer, and an answer has (n - 1) * P for the n - 1 steps in which it takes part

TPOT in formulas, with D for hidden * D. Let step s take d_s = D + E_s with E_s = sum of e over its rows. For any
m_i >= 0, sum over the steps of i of d_s <= (n_i - 1) * P_i gives

    sum d_s >= sum over s of d_s * (1 + sum over rows of m_i) - sum over i of m_i * (n_i - 1) * P_i

Let m_i = k * f_i, where f_i is the mean e of answer i, and F_s the sum of f over the rows. The first term is

    (D + E_s) * (1 + k * F_s) >= E_s + k * D * F_s + 2 * sqrt(k * D * E_s * F_s)

by the inequality of the means, and sqrt(E_s * F_s) >= sum of sqrt(e * f) by that of Cauchy and Schwarz. So each row
takes

    e + k * D * f + 2 * sqrt(k * D * e * f) - k * f * P       which is e * P / (P - D), if e = f and k = D / (P - D)^2

and e at least (m_i = 0). That is the time of a step of length P, shared by the (P - D) / e rows that fit into it. This
is a Lagrangian relaxation (A. Geoffrion, Mathematical Programming Study 2, 1974), valid for any k; one k serves targets
that differ. The same holds if steps have prompt tokens too, and within any period that contains all steps of the
answers that are counted. The sum of sqrt(e) over the rows of an answer is at least their number times the mean of the
first and the last one, because the root is concave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from simulator.bound_work import Costs, Work


class Share(Enum):
    ROWS = "rows"
    MEMORY = "memory"
    TPOT = "tpot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """`hidden`: the share of D that the rows pay; the rest is for prompt tokens. `tpot_s`: the target P that decides
    k."""

    hidden: float
    share: Share = Share.ROWS
    tpot_s: float = 0.0


def limits(works: Sequence[Work], hidden: Iterable[float]) -> list[Limit]:
    targets = {one.tpot_s for one in works if one.rows}
    found = []
    for each in hidden:
        found += [Limit(hidden=each)]
        if each:
            found += [Limit(hidden=each, share=Share.MEMORY)]
            found += [
                Limit(hidden=each, share=Share.TPOT, tpot_s=one)
                for one in sorted({f(targets) for f in (min, max)} if targets else ())
            ]
    return found


def decode_work(work: Work, costs: Costs, limit: Limit) -> float:
    """Seconds of a decode worker of slowness 1."""
    weights = limit.hidden * costs.weights
    rows = work.rows * costs.per_row + work.context * costs.per_context_token
    match limit.share:
        case Share.ROWS:
            return rows + weights * work.rows / costs.max_rows
        case Share.MEMORY:
            return rows + weights * work.held / costs.kv_tokens
        case Share.TPOT:
            spare = limit.tpot_s / costs.slowness - weights
            if not spare > 0.0 or not work.rows:
                return rows
            factor = weights / spare**2
            first = costs.per_row + costs.per_context_token * work.prompt.length
            last = first + costs.per_context_token * (work.rows - 1)
            mean = 0.5 * (first + last)
            roots = 0.5 * work.rows * (math.sqrt(first) + math.sqrt(last))
            shared = mean * work.rows * factor * weights + 2.0 * math.sqrt(factor * weights * mean) * roots
            return rows + max(0.0, shared - factor * mean * work.decode_s / costs.slowness)
