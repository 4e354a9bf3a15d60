"""What a request could get were it alone in the cluster: what order and admission of the queue are judged by. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pdserve.core.fit import LONGEST_S
from router.policy.interface import Ask, Outlook
from router.view import WorkerView

SIGMAS: Final = 2.0  # of the cost model's recent errors: what is called sure
TRUSTED_SAMPLES: Final = 16  # batches that a worker has shown before anything about it is called sure


def outlook(ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float) -> Outlook:
    """The soonest first token that any of these workers could give if nobody else were there.

    Only what is cached where changes it, and what is learnt of the workers: `now_s` is not looked at, so an answer
    may be kept until the request is placed.
    """
    tokens, cached_tokens = ask.num_tokens, ask.cached_tokens
    best_s, best = math.inf, None
    split_tokens = split_chunk = chunks = rest = 0  # the first two are what the others are of
    tpot_s = LONGEST_S
    for views in (prefills, decodes):
        tpot_s = LONGEST_S  # of decode workers in the end
        for view in views:
            uncached, cached, chunk = tokens, 0, view.hello.max_batch_tokens
            if view.worker_id in cached_tokens:
                cached = min(cached_tokens[view.worker_id], tokens - 1)
                uncached = tokens - cached
            # CostModel.prefill_s and decode_s, written out: every worker is asked for every request, and calls would
            # cost more than what they compute.
            cost = view.cost
            weights_s, row_s, token_s = cost.decode_coefficients
            alone_s = weights_s + row_s + token_s * tokens
            if alone_s < tpot_s:
                tpot_s = alone_s
            base_s, per_token_s, per_token_context_s = cost.prefill_coefficients
            if per_token_s * uncached > best_s:
                continue  # its arithmetic alone takes longer
            if uncached != split_tokens or chunk != split_chunk:
                split_tokens, split_chunk = uncached, chunk
                chunks, rest = divmod(uncached, chunk)
            seconds = per_token_context_s * uncached * (cached + 0.5 * uncached)
            if chunks:
                chunk_s = base_s + per_token_s * chunk
                seconds += chunks * (chunk_s if chunk_s > weights_s else weights_s)
            if rest:
                rest_s = base_s + per_token_s * rest
                seconds += rest_s if rest_s > weights_s else weights_s
            if seconds < best_s:
                best_s, best = seconds, cost
    best_s = min(best_s, LONGEST_S)
    first = decodes[0].cost  # a share of a batch is much the same everywhere; the base is shared by whoever is there
    _, per_row_s, per_context_token_s = first.decode_coefficients
    return Outlook(
        ttft_s=best_s,
        band_s=SIGMAS * best.prefill_error * best_s if best is not None else 0.0,
        is_sure=best is not None and best.num_prefill_samples >= TRUSTED_SAMPLES,
        tpot_s=tpot_s,
        work_s=best_s + ask.expected_tokens * (per_row_s + per_context_token_s * tokens),
    )
