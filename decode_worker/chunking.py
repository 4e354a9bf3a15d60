"""How many prompt tokens a step may prefill beside decode rows, so that the rows meet their TPOT targets and a longer
step is worth the memory. Pure."""

from __future__ import annotations

from typing import Final, final

from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel
from pdserve.core.memory_price import longest_step_s

SLACK_SHARE: Final = 0.9  # of the TPOT target; the rest is for the time between steps
FREE_SHARE: Final = 0.02  # of a step: what a chunk may add if the target is missed without it
BLIND_SHARE: Final = 4  # of the largest chunk, if no row has a target


@final
class ChunkRule:
    """Chunks of `least` (a waiting prompt must make progress) to `most` tokens; `cost` learns from each step."""

    def __init__(self, cost: CostModel, *, least: int, most: int) -> None:
        self.cost = cost
        self._least = min(least, most)
        self._most = most

    def tokens(
        self, *, rows: int, context_tokens: int, tpot_s: float | None, cached: int, held_share: float = 0.0
    ) -> int:
        """For a step of `rows` decode rows over `context_tokens`; `tpot_s` is their strictest TPOT target.

        `cached` is the number of prompt tokens computed so far, to which each next token attends. `held_share` is the
        share of the KV memory that these rows hold: a larger share makes shorter steps better
        (pdserve.core.memory_price).
        """
        if rows == 0:
            return self._most
        cost = self.cost
        # Arithmetic that fits into the time for reading the weights is almost free, whatever the targets.
        decode_s = cost.decode_s(rows, context_tokens)
        free_s = (1.0 + FREE_SHARE) * decode_s
        least = self._least
        if tpot_s is None:
            within_s, least = free_s, max(least, self._most // BLIND_SHARE)
        else:
            target_s = tpot_s * min(SLACK_SHARE, 1.0 / (1.0 + cost.step_error))
            weights_s = cost.decode_coefficients[0]
            worth_s = longest_step_s(weights_s, held_share) + decode_s - weights_s
            within_s = max(free_s, min(target_s, worth_s))
        return max(least, int(min(self._most, cost.chunk_tokens(within_s, rows, context_tokens, cached))))

    def observe(self, account: StepAccount, step_s: float) -> None:
        self.cost.observe(
            rows=account.decode_rows,
            prefill_tokens=account.prefill_tokens,
            prefill_token_context=account.prefill_token_context,
            context_tokens=account.context_tokens,
            step_s=step_s,
        )
