"""The least work of each request of a trace, when it can be done, and the most work that the workers can do. Pure.

A step of a worker (pdserve.core.cost.latency) with `rows` decode rows and `u` prompt tokens takes

    max(D, B + a * u) + r * rows + c * context + q * attention      D: reading the weights

for at most T prompt tokens. So each prompt token takes at least a + B / T, and at least D / T, of a prefill worker. On
a decode worker, arithmetic can be hidden behind the reading of the weights. For any `hidden` from 0 to 1,

    max(D, B + a * u) >= hidden * D + (1 - hidden) * (B + a * u)

Prompt: only the tokens of blocks that no earlier request of the trace contains. Some request computes each of them
between the arrival and the latest time of the first token. The attention of the positions from b to e is
(e^2 - b^2) / 2. A decode worker may compute the last token of a prompt as a decode row, so the last token of each block
is not counted.

Answer: of n tokens, n - 1 take a decode row each; the first one is sampled with the prompt. The rows attend to N,
N + 1, .. tokens. The rows of a step also share `hidden` * D (section *shares of a decode step*).

An answer that is preempted, or that continues on another worker, samples one token with its recomputed prompt instead
of a decode row. A fault ends at most two attempts of an answer: a transfer, and the one on the worker itself. For each
fault, so many rows are not counted. An answer moves from a drained worker at most once for each INNOCENT_TOKENS tokens,
and once more. A preemption is assumed to save no work: its recomputed tokens take as long as a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Final, final

from pdserve.core.cost.latency import CostModel
from router.state.attempts import INNOCENT_TOKENS
from simulator.cluster.speed import LEAST_FACTOR
from simulator.model import SimConfig, TraceRequest, WorkerFault, WorkerFaultKind, WorkerShape

ATTEMPTS_OF_FAULT: Final = 2  # of one answer, which a fault may end

# --- capacity of the workers ----------------------------------------------------------------------------------
# The work that the workers of a cluster can do in a period, at most. It is counted in seconds of a worker of slowness
# 1, so a worker of slowness s does 1 / s per second. Faults reduce it:
#
#     DIE     nothing until the successor connects
#     STALL   nothing; a step that has begun goes on, for at most the longest step
#     SLOW    1 / factor; steps that have begun keep their speed, for at most the longest step
#     DRAIN   not reduced, because the worker still computes what it has

NOISE_SIGMAS: Final = 6.0  # a normal value is further below its mean with a probability of 1e-9


@final
class CumulativeCapacity:
    """The work that some workers can do by a time, from time 0 on."""

    def __init__(self, workers: Iterable[Sequence[tuple[float, float]]]) -> None:
        """`workers`: for each its work per second from each time on, as (time, work per second)."""
        changes: dict[float, float] = {0.0: 0.0}
        for steps in workers:
            before = 0.0
            for at_s, rate in steps:
                changes[at_s] = changes.get(at_s, 0.0) + rate - before
                before = rate
        self._times = sorted(changes)
        self._rates = [max(0.0, rate) for rate in accumulate(changes[at_s] for at_s in self._times)]
        lasts = zip(self._times, self._times[1:], self._rates, strict=False)
        self._done = [0.0, *accumulate((end_s - at_s) * rate for at_s, end_s, rate in lasts)]

    def until(self, at_s: float) -> float:
        """The work between 0 and `at_s`."""
        index = max(0, bisect_right(self._times, at_s) - 1)
        return self._done[index] + max(0.0, at_s - self._times[index]) * self._rates[index]


def capacity(config: SimConfig, shapes: Iterable[WorkerShape], longest_step: float) -> CumulativeCapacity:
    """Of these workers. `longest_step`: the work of the longest possible step."""
    return CumulativeCapacity(_rates(config, shape, longest_step) for shape in shapes)


def least_slowness(config: SimConfig, shape: WorkerShape) -> float:
    """The least real time per unit of work that this worker ever takes."""
    slowness = shape.slowness * noise_factor(config)
    for one in _of(config, shape, WorkerFaultKind.SLOW):
        slowness *= min(1.0, one.factor)
    return slowness


def noise_factor(config: SimConfig) -> float:
    """The smallest factor by which noise changes a step's time, NOISE_SIGMAS below the mean."""
    return max(LEAST_FACTOR, 1.0 - NOISE_SIGMAS * config.noise) if config.noise else 1.0


def _rates(config: SimConfig, shape: WorkerShape, longest_step: float) -> list[tuple[float, float]]:
    slows = _of(config, shape, WorkerFaultKind.SLOW)
    deaths = _deaths(config, shape)
    jitter = 1.0 + NOISE_SIGMAS * config.noise
    longest_s = longest_step * shape.slowness * jitter * math.prod(max(1.0, one.factor) for one in slows)
    stops = deaths + [
        (one.at_s + longest_s, min([one.at_s + one.for_s, *(at_s for at_s, _ in deaths if at_s >= one.at_s)]))
        for one in _of(config, shape, WorkerFaultKind.STALL)
        if not any(begin_s <= one.at_s <= end_s for begin_s, end_s in deaths)
    ]
    # Steps that began before the fault are not slowed; steps that began during it are, even if they end after it.
    factors = [
        (one.at_s + longest_s / one.factor, one.at_s + one.for_s)
        if one.factor >= 1.0
        else (one.at_s, one.at_s + one.for_s + longest_s)
        for one in slows
    ]
    times = sorted({0.0, *(at_s for pair in (*stops, *factors) for at_s in pair if at_s < math.inf)})
    rates = []
    for at_s in times:
        rate = 1.0 / (shape.slowness * noise_factor(config))
        for one, (begin_s, end_s) in zip(slows, factors, strict=True):
            if begin_s <= at_s < end_s:
                rate /= one.factor
        rates.append((at_s, 0.0 if any(begin_s <= at_s < end_s for begin_s, end_s in stops) else rate))
    return rates


def _deaths(config: SimConfig, shape: WorkerShape) -> list[tuple[float, float]]:
    """The periods without a worker. A dead worker does not die again."""
    periods: list[tuple[float, float]] = []
    for one in _of(config, shape, WorkerFaultKind.DIE):
        if not periods or one.at_s > periods[-1][1]:
            periods.append((one.at_s, one.at_s + one.for_s))
    return periods


def _of(config: SimConfig, shape: WorkerShape, kind: WorkerFaultKind) -> list[WorkerFault]:
    found = [one for one in config.faults if one.worker_id == shape.worker_id and one.kind is kind]
    return sorted(found, key=lambda one: one.at_s)


# --- work of the requests -------------------------------------------------------------------------------------

ROUNDING: Final = 1e-9  # relative
ROUNDING_S: Final = 1e-6  # the clock of a run is the sum of many steps


@dataclass(frozen=True, slots=True)
class PromptWork:
    """`tokens` of its `length` must be computed; `last` of them may be decode rows."""

    length: int
    tokens: int
    attention: float
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The least cost of each kind of work on any worker of one role, in seconds at slowness 1."""

    base: float
    per_token: float
    per_token_context: float
    weights: float
    per_row: float
    per_context_token: float
    max_tokens: int  # of one step
    max_rows: int
    kv_tokens: int
    max_context: int  # the largest of any worker
    least_context: int  # the smallest
    slowness: float  # the least

    def prompt_s(self, prompt: PromptWork) -> float:
        """The least work between the begin and the end of its computation, one step after the other."""
        steps = -(-max(1, prompt.tokens) // self.max_tokens)
        tokens = max(0, prompt.tokens - prompt.last)
        chunks = -(-tokens // self.max_tokens)
        compute = chunks * self.base + self.per_token * tokens
        return max(steps * self.weights, compute) + self._attention(prompt)

    def prompt_work(self, prompt: PromptWork, hidden: float = 0.0, *, can_decode: bool = True) -> float:
        """The least work of its tokens, in the largest steps."""
        token = self.per_token + self.base / self.max_tokens
        if not can_decode:
            token = max(token, self.weights / self.max_tokens)
        return (1.0 - hidden) * token * max(0, prompt.tokens - prompt.last) + self._attention(prompt)

    def _attention(self, prompt: PromptWork) -> float:
        return self.per_token_context * max(0.0, prompt.attention - prompt.last * prompt.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request that an idle cluster would serve in time. Times are those of its workers."""

    release_s: float
    first_due_s: float
    last_due_s: float
    prompt: PromptWork
    rows: int  # of its decode steps
    context: float  # the sum over its rows
    decode_s: float  # the most time between its first and its last token; 0 for one token
    tpot_s: float
    held: float  # its share of the KV memory, in tokens; the sum over its rows


def costs(config: SimConfig, shapes: Sequence[WorkerShape]) -> Costs:
    """Each cost is the lowest of any of these workers."""
    models = [CostModel(shape.cost) for shape in shapes]
    prefill = [model.prefill_coefficients for model in models]
    decode = [model.decode_coefficients for model in models]
    kv_tokens = [shape.kv_capacity_tokens // config.block_size * config.block_size for shape in shapes]
    context = [min(held, shape.max_context_tokens) for held, shape in zip(kv_tokens, shapes, strict=True)]
    return Costs(
        base=min(one[0] for one in prefill),
        per_token=min(one[1] for one in prefill),
        per_token_context=min(one[2] for one in prefill),
        weights=min(one[0] for one in decode),
        per_row=min(one[1] for one in decode),
        per_context_token=min(one[2] for one in decode),
        max_tokens=max(shape.max_batch_tokens for shape in shapes),
        max_rows=max(shape.max_batch for shape in shapes),
        kv_tokens=max(kv_tokens),
        max_context=max(context),
        least_context=min(context),
        slowness=min(least_slowness(config, shape) for shape in shapes),
    )


def least_work(
    trace: Iterable[TraceRequest], block_tokens: int, config: SimConfig, prefill: Costs | None, decode: Costs
) -> list[Work]:
    """Of the requests that an idle cluster could serve in time. `prefill`: None without prefill workers."""
    found: list[Work] = []
    requests: list[TraceRequest] = []
    seen: dict[int, int] = {}
    for request in trace:
        prompt = _prompt(request, block_tokens, config.block_size, seen)
        work = _work(request, prompt, config, [decode] if prefill is None else [prefill, decode], decode)
        if work is not None:
            found.append(work)
            requests.append(request)
    return _with_memory(found, requests, block_tokens, config.block_size)


def _prompt(request: TraceRequest, block_tokens: int, block_size: int, seen: dict[int, int]) -> PromptWork:
    """`seen`: of each id, the number of its full blocks that earlier prompts contain; updated."""
    tokens, attention, last, end = 0, 0.0, 1, 0
    for begin, name, count in _ids(request, block_tokens, block_size):
        known = min(seen.get(name, 0), count)
        fresh, end = begin + known * block_size, begin + count * block_size
        tokens += end - fresh
        attention += (end * end - fresh * fresh) / 2
        last += count - known
        seen[name] = max(count, seen.get(name, 0))
    length = request.prompt_tokens
    tokens += length - end
    attention += (length * length - end * end) / 2
    return PromptWork(length, tokens, attention, last)


def _ids(request: TraceRequest, block_tokens: int, block_size: int) -> Iterable[tuple[int, int, int]]:
    """(first position, id, full blocks) of each id of the prompt."""
    if not block_tokens:
        return
    for index, name in enumerate(request.block_ids):
        begin = index * block_tokens
        count = (min(request.prompt_tokens, begin + block_tokens) - begin) // block_size
        if count <= 0:
            return
        yield begin, name, count


def _work(
    request: TraceRequest, prompt: PromptWork, config: SimConfig, roles: Sequence[Costs], decode: Costs
) -> Work | None:
    slo = request.slo or config.slo
    if prompt.length > max(one.kv_tokens for one in roles):
        return None
    fewest = min(request.output_tokens, min(one.least_context for one in roles) - prompt.length)
    resumptions = ATTEMPTS_OF_FAULT * sum(one.kind is not WorkerFaultKind.DRAIN for one in config.faults)
    if any(one.kind is WorkerFaultKind.DRAIN for one in config.faults):
        resumptions += 1 + fewest // INNOCENT_TOKENS
    rows = max(0, fewest - 1 - resumptions)
    most = max(1, min(request.output_tokens, decode.max_context - prompt.length))
    decode_s = (most - 1) * slo.tpot_s
    messages_s = 2.0 * config.message_s
    ends_s = min(
        slo.ttft_s + decode_s,
        math.inf if request.cancel_after_s is None else request.cancel_after_s,
        math.inf if config.deadline_s is None else config.deadline_s,
    )
    slack_s = ROUNDING_S + ROUNDING * (request.arrival_s + ends_s)
    first_s, last_s = min(slo.ttft_s, ends_s) - messages_s + slack_s, ends_s - messages_s + slack_s
    context = rows * prompt.length + rows * (rows - 1) / 2
    prompt_s = min(one.slowness * one.prompt_s(prompt) for one in roles)
    rows_s = decode.slowness * (rows * (decode.weights + decode.per_row) + decode.per_context_token * context)
    if prompt_s > first_s or rows_s > decode_s + slack_s or prompt_s + rows_s > last_s:
        return None
    release_s = request.arrival_s + config.message_s
    return Work(
        release_s=release_s,
        first_due_s=release_s + first_s,
        last_due_s=release_s + last_s,
        prompt=prompt,
        rows=rows,
        context=context,
        decode_s=decode_s + slack_s,
        tpot_s=slo.tpot_s,
        held=0.0,
    )


def _with_memory(
    works: Sequence[Work], requests: Sequence[TraceRequest], block_tokens: int, block_size: int
) -> list[Work]:
    """Requests that hold a block at the same time share its memory. Each counts for 1 / k of it if it may be in the
    cluster at the same time as k - 1 others with that block: at any time, the shares of those that hold it are at
    most 1."""
    sharers: dict[int, list[int]] = defaultdict(list)
    parts = [list(_ids(request, block_tokens, block_size)) for request in requests]
    for index, ids in enumerate(parts):
        for _, name, _ in ids:
            sharers[name].append(index)
    alone = [float(request.prompt_tokens) for request in requests]
    for name, group in sharers.items():
        if len(group) == 1:
            continue
        begins = [works[index].release_s for index in group]  # in order, as the trace
        ends = sorted(works[index].last_due_s for index in group)
        for index in group:
            one = works[index]
            together = bisect_right(begins, one.last_due_s) - bisect_left(ends, one.release_s)
            if together > 1:
                count = next(count for _, held, count in parts[index] if held == name)
                alone[index] -= count * block_size * (1.0 - 1.0 / together)
    return [
        replace(one, held=one.rows * tokens + one.rows * (one.rows + 1) / 2)
        for one, tokens in zip(works, alone, strict=True)
    ]


# --- shares of a decode step ----------------------------------------------------------------------------------
# A lower bound on the decode workers' time that each answer takes.
#
# A step with decode rows takes hidden * D for the weights, and e = r + c * context for each row. The rows share
# hidden * D. Three limits on the number of rows give a lower bound on each row's share:
#
#     ROWS    a step has at most R rows:                                    hidden * D / R
#     MEMORY  the rows of a step hold at most K tokens of KV:               hidden * D * held / K
#     TPOT    a step with more rows takes longer, and an answer has (n - 1) * P for the n - 1 steps in which it takes
#             part
#
# TPOT in formulas, with D for hidden * D. Let step s take d_s = D + E_s with E_s = sum of e over its rows. For any m_i
# >= 0, sum over the steps of i of d_s <= (n_i - 1) * P_i gives
#
#     sum d_s >= sum over s of d_s * (1 + sum over rows of m_i) - sum over i of m_i * (n_i - 1) * P_i
#
# Let m_i = k * f_i, where f_i is the mean e of answer i, and F_s the sum of f over the rows. The first term is
#
#     (D + E_s) * (1 + k * F_s) >= E_s + k * D * F_s + 2 * sqrt(k * D * E_s * F_s)
#
# by the inequality of the means, and sqrt(E_s * F_s) >= sum of sqrt(e * f) by that of Cauchy and Schwarz. So each row
# takes
#
#     e + k * D * f + 2 * sqrt(k * D * e * f) - k * f * P       which is e * P / (P - D), if e = f and k = D / (P - D)^2
#
# and e at least (m_i = 0). That is the time of a step of length P, shared by the (P - D) / e rows that fit into it.
# This is a Lagrangian relaxation (A. Geoffrion, Mathematical Programming Study 2, 1974), valid for any k; one k serves
# targets that differ. The same holds if steps have prompt tokens too, and within any period that contains all steps of
# the answers that are counted. The sum of sqrt(e) over the rows of an answer is at least their number times the mean of
# the first and the last one, because the root is concave.


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
