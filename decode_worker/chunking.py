"""How many prompt tokens a step may read beside decode rows, so that residents keep their time per token. Pure."""

from __future__ import annotations

from typing import Final, final

from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel

SLACK_SHARE: Final = 0.8  # of the promised time per token; the rest is for what the model does not know
BLIND_SHARE: Final = 4  # of the largest chunk, where nobody said what was promised


@final
class ChunkRule:
    """Chunks between `least` (a waiting prompt must get on) and `most` tokens; `cost` learns from each step."""

    def __init__(self, cost: CostModel, *, least: int, most: int) -> None:
        self._cost = cost
        self._least = min(least, most)
        self._most = most

    def tokens(self, *, rows: int, context_tokens: int, tpot_s: float | None, cached: int) -> int:
        """For a step of `rows` decode rows over `context_tokens`; `tpot_s` is the strictest promise among them.

        `cached` is how far the prompt has been read: each of its next tokens attends to so many.
        """
        if rows == 0:
            return self._most
        if tpot_s is None:
            return max(self._least, self._most // BLIND_SHARE)
        spare_s = SLACK_SHARE * tpot_s - self._cost.decode_s(rows, context_tokens)
        if spare_s <= 0.0:
            return self._least
        coefficients = self._cost.coefficients
        per_token_s = coefficients.prefill_per_token_s + coefficients.prefill_per_token_context_s * cached
        if spare_s >= per_token_s * self._most:
            return self._most
        return max(self._least, int(spare_s / per_token_s))

    def observe(self, account: StepAccount, step_s: float) -> None:
        self._cost.observe(
            rows=account.decode_rows,
            prefill_tokens=account.prefill_tokens,
            prefill_token_context=account.prefill_token_context,
            context_tokens=account.context_tokens,
            step_s=step_s,
        )
