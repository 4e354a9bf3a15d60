"""What a request could get were it alone in the cluster: what order and admission of the queue are judged by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.policy.interface import Ask, Outlook
from router.view import WorkerView

LONGEST_S: Final = 1e9
SIGMAS: Final = 2.0  # of the cost model's recent errors: what is called sure
TRUSTED_SAMPLES: Final = 16  # batches that a worker has shown before anything about it is called sure


def outlook(ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float) -> Outlook:
    """The soonest first token that any of these workers could give if nobody else were there.

    Only what is cached where changes it, and what is learnt of the workers: `now_s` is not looked at, so an answer
    may be kept until the request is placed.
    """
    tokens, cached_tokens = ask.num_tokens, ask.cached_tokens
    best_s, band_s, is_sure = LONGEST_S, 0.0, False
    for view in (*prefills, *decodes):
        cached = cached_tokens.get(view.worker_id, 0)
        if cached >= tokens:
            cached = tokens - 1
        seconds = view.cost.prefill_s(tokens - cached, cached, view.hello.max_batch_tokens)
        if seconds < best_s:
            best_s, band_s = seconds, SIGMAS * view.cost.prefill_error * seconds
            is_sure = view.cost.num_prefill_samples >= TRUSTED_SAMPLES
    first = decodes[0].cost  # a share of a batch is much the same everywhere; the base is shared by whoever is there
    _, per_row_s, per_context_token_s = first.decode_coefficients
    return Outlook(
        ttft_s=best_s,
        band_s=band_s,
        is_sure=is_sure,
        tpot_s=min(view.cost.decode_s(1, tokens) for view in decodes),
        work_s=best_s + ask.expected_tokens * (per_row_s + per_context_token_s * tokens),
    )
