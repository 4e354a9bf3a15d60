"""The best workers of each role for a request, which candidates.py then compares in detail. Pure.

Each worker is ranked with a few multiplications, because this runs for every worker and request. Formulas:
docs/scheduling.md.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from router.policy.interface import NO_READS, PolicyInput
from router.policy.pulls import WORK_WEIGHT, least_rest_s
from router.state.load import DecodeLoad
from router.state.view import WorkerView, as_views

# How many of the cheapest workers of each role are compared in detail. The others are compared by their cached sums.
PREFILLS_PAIRED: Final = 3
DECODES_PAIRED: Final = 4
LOCALS_PRICED: Final = 3

_record: Final = tuple.__new__  # makes a NamedTuple from a tuple; half the time of its constructor

StepRule = Callable[[WorkerView, DecodeLoad, float, float], float]

NOTHING_CACHED: Final[Mapping[str, int]] = {}


class Receiver(NamedTuple):
    """A decode worker with room. They are compared in the order of the fields."""

    excess: float  # of its step over the strictest TPOT target, as a share of the target; negative if that is met
    order: int  # among the workers
    step_s: float  # with this request
    view: WorkerView
    load: DecodeLoad


class LocalWorker(NamedTuple):
    """A decode worker with room that would prefill the prompt. They are compared in the order of the fields."""

    misses: bool  # a TPOT target
    cost: float
    excess: float  # this and the next as in Receiver
    order: int
    step_s: float
    view: WorkerView
    load: DecodeLoad


class RankedDecodes(NamedTuple):
    """The best decode workers with room, in order."""

    receivers: list[Receiver]  # of KV from a prefill worker; at most DECODES_PAIRED
    locals: list[LocalWorker]  # workers for a local prefill; at most LOCALS_PRICED


def tandem_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """A step after all arriving requests have arrived, when their answers and this one are half complete. Running
    requests are assumed to be in the middle of their answers, so the tokens that they add equal those that leave."""
    return load.joined_s + load.token_s * (tokens + growth * load.growing)


def reported_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """The next step, from the worker's own report."""
    base_s, row_s, token_s = view.cost.decode_coefficients
    return base_s + row_s * (view.report.running + 1) + token_s * (view.report.context_tokens + tokens)


def rank_decodes(
    request: PolicyInput,
    cached: Mapping[str, int],
    decodes: Sequence[WorkerView],
    now_s: float,
    step_of: StepRule,
) -> RankedDecodes:
    """The best decode workers among those with a free row, and blocks for the whole expected answer: the emptiest
    receivers, and the cheapest workers for a local prefill."""
    # all floats, because mixed arithmetic takes twice as long
    tokens, own_s = float(request.num_tokens), request.slo.tpot_s
    if request.is_resumed:
        own_s = request.answer_left_s / request.expected_tokens
    growth = 0.5 * request.expected_tokens
    room = tokens + request.expected_tokens
    per_second = 1.0 / request.slo.ttft_s
    per_prefill = (1.0 + WORK_WEIGHT) * per_second
    per_wait = 1.0 / (steps_of(request) * request.slo.tpot_s)
    is_tandem = step_of is tandem_step_s
    half = tokens - 0.5 * tokens
    reads = request.reads if cached else NO_READS
    # plain tuples here, which are quicker to make; those that are left become records
    receivers: list[tuple[float, int, float, WorkerView, DecodeLoad]] = []
    local_workers: list[tuple[bool, float, float, int, float, WorkerView, DecodeLoad]] = []
    # workers that rank behind these are not among the best
    most_excess = last_cost = math.inf
    last_misses = True
    for order, view in enumerate(decodes):
        load = view.cached_load or view.load
        if load.free_tokens < room + growth * load.float_rows or view.closed_until_s > now_s:
            continue
        if is_tandem:  # inlined, because this runs for every worker and request
            step_s = load.joined_s + load.token_s * (tokens + growth * load.growing)
        else:
            step_s = step_of(view, load, tokens, growth)
        limit_s = load.tightest_s
        if own_s < limit_s and load.alone_s < own_s:
            limit_s = own_s
        excess = step_s * load.sure / limit_s - 1.0
        if excess < most_excess:
            insort(receivers, (excess, order, step_s, view, load))
            if len(receivers) > DECODES_PAIRED:
                receivers.pop()
                most_excess = receivers[-1][0]
        uncached, middle = tokens, half
        if view.worker_id in cached:
            uncached = max(1.0, tokens - cached[view.worker_id])
            middle = tokens - 0.5 * uncached
        prefill_s = uncached * (load.per_token_s + load.per_token_context_s * middle) * load.prefill_slowdown
        cost = prefill_s * (per_prefill + per_wait * load.decode_stall_share)
        if view.free_at_s > now_s:
            cost += (view.free_at_s - now_s) * per_second
        if reads and view.worker_id in reads:
            cost += request.read_wait_s(view.worker_id, view.queue_s(now_s)) * per_second
        misses = excess > 0.0
        if misses < last_misses or (misses == last_misses and cost <= last_cost):
            insort(local_workers, (misses, cost, excess, order, step_s, view, load))
            if len(local_workers) > LOCALS_PRICED:
                local_workers.pop()
                last_misses, last_cost = local_workers[-1][:2]
    return RankedDecodes(
        [_record(Receiver, one) for one in receivers], [_record(LocalWorker, one) for one in local_workers]
    )


def rank_prefills(
    request: PolicyInput, tokens: float, cached: Mapping[str, int], prefills: Sequence[WorkerView], now_s: float
) -> list[tuple[WorkerView, float]]:
    """The prefill workers with the least cost of delay, and the seconds of each to compute the prompt."""
    reads = request.reads if cached else NO_READS
    starts: list[tuple[float, str, float, WorkerView]] = []  # plain tuples are quicker to make
    last_s = math.inf  # workers with a higher cost are not among the best
    most_s = math.inf
    if request.source is not None and len(prefills) > PREFILLS_PAIRED:  # any worker may pull what the source has
        most_s = least_rest_s(request, prefills[0])
    for view, work_s in zip(prefills, as_views(prefills).prefill_s(tokens, cached), strict=True):
        ranked_s = work_s if work_s < most_s else most_s
        delay_s = ranked_s + (view.free_at_s - now_s) if view.free_at_s > now_s else ranked_s
        if reads and view.worker_id in reads:
            delay_s += min(request.read_wait_s(view.worker_id, view.queue_s(now_s)), most_s)
        cost_s = delay_s + WORK_WEIGHT * ranked_s
        if cost_s <= last_s:
            insort(starts, (cost_s, view.worker_id, work_s, view))
            if len(starts) > PREFILLS_PAIRED:
                starts.pop()
                last_s = starts[-1][0]
    return [(view, work_s) for _, _, work_s, view in starts]


def steps_of(request: PolicyInput) -> float:
    """Number of tokens that count for TPOT: all but the first."""
    return request.expected_tokens - 1.0 if request.expected_tokens > 2.0 else 1.0
