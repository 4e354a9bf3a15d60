"""The memory and work that one attempt needs on one worker, and the sums over a worker's attempts. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Booking:
    """The memory and work of one attempt of one request on one worker.

    It begins with the decision, so that the next decision takes it into account. It ends when the worker reports
    Released or Refused, or is lost. If the attempt was never sent to the worker (`is_sent`), the booking ends with the
    attempt.
    """

    request_id: str
    attempt: int
    tokens: int  # tokens whose KV is, or will be, on this worker
    blocks: int
    prefill_tokens: int = 0  # still to be computed on this worker
    prefill_s: float = 0.0  # predicted time to compute them
    tpot_s: float | None = None  # TPOT target; None if the attempt has no row in a decode batch here
    itl_s: float | None = None  # ITL target, as in Slo
    prompt_tokens: int = 0  # the part of `tokens` that is prompt
    due_at_s: float = math.inf  # when its first token is due; infinite for an answer that was interrupted
    first_token_s: float | None = None  # when the client got the first token; None until the sequence decodes here
    is_sent: bool = False
    is_arriving: bool = True  # the worker has not begun to compute the request (decode: it is not in the batch yet)
    is_landing: bool = False  # the KV comes from a prefill worker and has not arrived yet
    is_cancelled: bool = False


@dataclass(slots=True)
class Totals:
    """Sums over a worker's bookings."""

    blocks: int = 0
    tokens: int = 0  # tokens of the bookings with a row
    rows: int = 0  # in the decode batch, now or later
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    prefills: int = 0
    arriving: int = 0
    landing_tokens: int = 0  # tokens of the bookings with `is_landing`

    def copy(self) -> Totals:
        """Like copy.copy, which takes ten times as long. Every report of a worker needs a copy."""
        return Totals(
            self.blocks,
            self.tokens,
            self.rows,
            self.prefill_tokens,
            self.prefill_s,
            self.prefills,
            self.arriving,
            self.landing_tokens,
        )

    def check(self, bookings: Collection[Booking]) -> None:
        rows = [one for one in bookings if one.tpot_s is not None]
        assert self.blocks == sum(one.blocks for one in bookings), "blocks"
        assert self.rows == len(rows), "rows"
        assert self.tokens == sum(one.tokens for one in rows), "tokens"
        assert self.prefill_tokens == sum(one.prefill_tokens for one in bookings), "prefill tokens"
        assert self.prefills == sum(one.prefill_tokens > 0 for one in bookings), "prefills"
        assert abs(self.prefill_s - sum(one.prefill_s for one in bookings)) < 1e-6, "prefill seconds"
        assert self.arriving == sum(one.is_arriving for one in bookings), "arriving"
        assert self.landing_tokens == sum(one.tokens for one in bookings if one.is_landing), "landing tokens"
