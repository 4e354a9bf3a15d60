"""What a batch and a transfer will take, in closed form, corrected online by each finished batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPrior:
    """Coefficients of the closed forms, in seconds; measured by a worker at start, or from a profile.

    prefill_s = base + per_token * u + per_token_context * u * (cached + u / 2)
    decode_s  = base + per_row * batch + per_context_token * context
    """

    prefill_base_s: float = 1e-3
    prefill_per_token_s: float = 1e-4
    prefill_per_token_context_s: float = 1e-8
    decode_base_s: float = 1e-2
    decode_per_row_s: float = 1e-4
    decode_per_context_token_s: float = 1e-7
