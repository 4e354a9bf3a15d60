"""Estimates what a request would get on an unloaded cluster, for the order of the queue and for admission. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.core.fit import LONGEST_S
from router.load import TRUSTED_SAMPLES
from router.policy.interface import UnloadedEstimate
from router.view import WorkerView

SIGMAS: Final = 2.0  # standard errors that count as certain


def unloaded_estimate(
    tokens: float,
    expected_tokens: float,
    cached_tokens: Mapping[str, int],
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
) -> UnloadedEstimate:
    """The earliest first token on any of these workers, without other requests, for a prompt of `tokens` and an answer
    of `expected_tokens`. `cached_tokens` are the prompt tokens that each worker has cached.

    The result depends only on the caches and the learned costs, so it may be kept until the request is placed.
    """
    tokens = float(tokens)  # float like all other operands: mixed arithmetic takes twice as long
    # CostModel.decode_s and prefill_s are inlined, because this runs for every worker and request, and calls would cost
    # more than the arithmetic.
    tpot_s, best_s, best, half = LONGEST_S, math.inf, None, 0.5 * tokens
    split_tokens = split_chunk = chunks = rest = 0.0  # the last two are computed from the first two
    for views in (prefills, decodes):
        for view in views:
            uncached, context, cost = tokens, half, view.cost
            weights_s, row_s, token_s = cost.decode_coefficients
            if views is decodes:
                alone_s = weights_s + row_s + token_s * tokens
                if alone_s < tpot_s:
                    tpot_s = alone_s
            if view.worker_id in cached_tokens:
                cached = min(float(cached_tokens[view.worker_id]), tokens - 1.0)
                uncached = tokens - cached
                context = cached + 0.5 * uncached
            base_s, per_token_s, per_token_context_s = cost.prefill_coefficients
            attention_s = per_token_context_s * uncached * context
            if attention_s + (base_s + per_token_s * uncached) >= best_s:
                continue  # in one chunk it would take longer than the best so far
            chunk = view.hello.max_batch_tokens
            if uncached != split_tokens or chunk != split_chunk:
                split_tokens, split_chunk = uncached, chunk
                chunks, rest = divmod(uncached, chunk)
            seconds = attention_s
            if chunks:
                chunk_s = base_s + per_token_s * chunk
                seconds += chunks * (chunk_s if chunk_s > weights_s else weights_s)
            if rest:
                rest_s = base_s + per_token_s * rest
                seconds += rest_s if rest_s > weights_s else weights_s
            if seconds < best_s:
                best_s, best = seconds, cost
    best_s = min(best_s, LONGEST_S)
    first = decodes[0].cost  # the share of a batch is similar on all workers; the base is shared by all rows
    _, per_row_s, per_context_token_s = first.decode_coefficients
    return UnloadedEstimate(
        ttft_s=best_s,
        band_s=SIGMAS * best.prefill_error * best_s if best is not None else 0.0,
        is_sure=best is not None and best.num_prefill_samples >= TRUSTED_SAMPLES,
        tpot_s=tpot_s,
        work_s=best_s + expected_tokens * (per_row_s + per_context_token_s * tokens),
    )
