"""The worker's side of the step rule: its cost model, which learns from each step, and the sizes of chunks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from pdserve.core.effects import StepAccount
from pdserve.core.latency import CostModel
from pdserve.core.step_rule import LEAST_CHUNK, Allowance, chunk_tokens, is_worth_waiting, step_limit


@final
class ChunkRule:
    """Chooses chunks of `least` to `most` tokens. `cost` learns from each step."""

    def __init__(self, cost: CostModel, *, most: int, least: int = LEAST_CHUNK) -> None:
        self.cost = cost
        self._least = min(least, most)
        self._most = most

    def longest(
        self, *, rows: int, context_tokens: int, allowed_s: float | None, held_share: float = 0.0
    ) -> Callable[[int], int]:
        """For a step with `rows` decode rows over `context_tokens`: a function that gives the most tokens of one
        prompt, of which so many tokens are already computed. See pdserve.core.step_rule."""
        cost, most = self.cost, self._most
        if rows == 0:
            return lambda _: most
        limit = step_limit(
            cost,
            decode_s=cost.decode_s(rows, context_tokens),
            allowed_s=allowed_s,
            held_share=held_share,
            least=self._least,
            most=most,
        )
        return lambda cached: chunk_tokens(
            cost, limit, rows=rows, context_tokens=context_tokens, cached=cached, most=most
        )

    def is_worth_waiting(
        self, allowance: Allowance, *, rows: int, context_tokens: int, wanted: int, held_share: float = 0.0
    ) -> bool:
        """Whether the next step should have no prompt tokens; see pdserve.core.step_rule."""
        decode_s = self.cost.decode_s(rows, context_tokens)
        return rows > 0 and is_worth_waiting(
            self.cost, allowance, decode_s=decode_s, held_share=held_share, wanted=wanted, most=self._most
        )

    def observe(self, account: StepAccount, step_s: float) -> None:
        self.cost.observe_batch(account.timed(step_s))
