"""Which workers have room now, for all policies, and what an unloaded cluster would offer a request. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.core.cost.latency import LONGEST_S
from pdserve.core.durations import clamped_s
from pdserve.core.kv.tier_reads import TierReads
from pdserve.core.types import Slo
from router.policy.interface import NO_READS, Choice, Decision, Obstacle, PolicyInput, UnloadedEstimate
from router.state.load import TRUSTED_SAMPLES
from router.state.view import LoadEstimate, WorkerView, as_views

SHORTEST_WAIT_S = 0.002
LONGEST_WAIT_S = 0.25


def is_prefill_open(view: WorkerView, request: PolicyInput, now_s: float) -> bool:
    """Whether the worker can start within about one batch, and has room in its inbox and memory (late binding)."""
    return can_start(view, request.num_tokens, now_s)


def can_start(view: WorkerView, num_tokens: int, now_s: float, lead_s: float = 0.0) -> bool:
    """Like `is_prefill_open`, for a prompt of `num_tokens`, for which the worker reads its tiers for `lead_s`."""
    return (
        view.closed_until_s <= now_s
        and view.totals.prefills < view.hello.inbox_depth
        and (view.free_at_s <= now_s or view.free_at_s - now_s <= view.batch_s + lead_s)
        and (not view.reservations or view.free_blocks >= view.blocks_for(num_tokens))
    )


def lead_of(reads: TierReads | None, slo: Slo) -> float:
    """How much earlier a prompt is sent, so that its `reads` run while others are computed.

    This is at most the TTFT target. If reading all of a prefix would be too slow, a worker reads what arrives before
    the prompt's turn. Such a read takes as long as the queue, so without the limit the prompt would be sent at once.
    Then it could not be given up for shorter ones any more, and would hold blocks of a decode worker all the time.
    """
    return 0.0 if reads is None else min(reads.lead_s, slo.ttft_s)


def opens_in_s(view: WorkerView, now_s: float, lead_s: float = 0.0) -> float:
    """Seconds until a prefill worker should be considered again if no event makes room earlier."""
    wait_s = max(view.free_at_s - view.batch_s - lead_s, view.closed_until_s) - now_s
    # If it is not open long after its predicted time, inbox or memory are full. Only a message of the worker changes
    # that.
    return clamped_wait_s(wait_s) if wait_s > -SHORTEST_WAIT_S else LONGEST_WAIT_S


def is_decode_open(view: WorkerView, estimated_load: LoadEstimate, request: PolicyInput, now_s: float) -> bool:
    """Whether the worker has a free row, room in its inbox, and blocks for this sequence and one more for every other.

    An empty worker counts as open whatever its report says, because the report may be old; the worker decides.
    """
    if view.closed_until_s > now_s:
        return False
    rows, arriving, _, blocks = estimated_load
    hello = view.hello
    return not view.reservations or (
        rows < hello.max_batch
        and arriving < hello.inbox_depth
        and blocks - rows >= -(-request.num_tokens // hello.block_size)
    )


def not_avoided(views: Sequence[WorkerView], request: PolicyInput) -> Sequence[WorkerView]:
    """The workers on which the request has not failed before; all of them if there are no others."""
    if not request.avoid_workers:
        return views
    return [view for view in views if view.worker_id not in request.avoid_workers] or views


def wait_for_prefill(prefills: Sequence[WorkerView], now_s: float) -> Decision:
    return Decision(
        choice=Choice.WAIT,
        reason="no prefill worker can start it within a batch",
        obstacle=Obstacle.PREFILL,
        retry_in_s=min(opens_in_s(view, now_s) for view in prefills),
    )


def wait_for_decode(decodes: Sequence[WorkerView], now_s: float) -> Decision:
    closed = [view.closed_until_s - now_s for view in decodes if view.closed_until_s > now_s]
    return Decision(
        choice=Choice.WAIT,
        reason="no decode worker has a free row and free blocks",
        obstacle=Obstacle.DECODE,
        retry_in_s=clamped_wait_s(min(closed, default=LONGEST_WAIT_S)),
    )


def clamped_wait_s(wait_s: float) -> float:
    return clamped_s(wait_s, SHORTEST_WAIT_S, LONGEST_WAIT_S)


# --- estimate for an unloaded cluster -------------------------------------------------------------------------
# The order of the queue and admission use it.

SIGMAS: Final = 2.0  # standard errors that count as certain


def unloaded_estimate(
    tokens: float,
    expected_tokens: float,
    cached_tokens: Mapping[str, int],
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    reads: Mapping[str, TierReads] = NO_READS,
) -> UnloadedEstimate:
    """The earliest first token on any of these workers, without other requests, for a prompt of `tokens` and an answer
    of `expected_tokens`. `cached_tokens` are the prompt tokens that each worker does not compute, some after `reads`.

    The result depends only on the caches and the learned costs, so it may be kept until the request is placed.
    """
    tokens = float(tokens)  # float like all other operands: mixed arithmetic takes twice as long
    best_s, best = math.inf, None
    decodes = as_views(decodes)
    for views in (as_views(prefills), decodes):
        times = views.prefill_s(tokens, cached_tokens)
        if reads:
            for order, view in enumerate(views):
                if (read := reads.get(view.worker_id)) is not None:
                    times[order] += read.copy_s + read.read_s
        least_s = min(times, default=math.inf)
        if least_s < best_s:
            best_s, best = least_s, views[times.index(least_s)].cost
    best_s = min(best_s, LONGEST_S)
    first = decodes[0].cost  # the share of a batch is similar on all workers; the base is shared by all rows
    _, per_row_s, per_context_token_s = first.decode_coefficients
    return UnloadedEstimate(
        ttft_s=best_s,
        band_s=SIGMAS * best.prefill_error * best_s if best is not None else 0.0,
        is_sure=best is not None and best.num_prefill_samples >= TRUSTED_SAMPLES,
        tpot_s=min(decodes.costs.least_decode_s(tokens), LONGEST_S),
        work_s=best_s + expected_tokens * (per_row_s + per_context_token_s * tokens),
    )
