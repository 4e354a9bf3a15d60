"""What one attempt takes of one worker, and the sums over all attempts. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Booking:
    """The memory and work of one attempt of one request on one worker.

    Booked when the placement is decided, so that the next decision includes it; `is_sent` once the worker was told. It
    ends with Released, Refused or the loss of the worker; a booking that was never sent ends directly.
    """

    request_id: str
    attempt: int
    tokens: int  # in KV, or to be
    blocks: int
    prefill_tokens: int = 0  # yet to be computed here
    prefill_s: float = 0.0  # predicted time of that
    tpot_s: float | None = None  # TPOT target; set while it has or will have a row in the decode batch
    itl_s: float | None = None  # as in Slo
    prompt_tokens: int = 0  # of `tokens`
    first_token_s: float | None = None  # when its client got the first token; it decodes since then
    is_sent: bool = False
    is_arriving: bool = True  # not computing yet (decode: not in the batch yet)
    is_landing: bool = False  # its KV comes from a prefill worker and has not arrived
    is_cancelled: bool = False


@dataclass(slots=True)
class Totals:
    """Sums over a worker's bookings."""

    blocks: int = 0
    tokens: int = 0  # of rows
    rows: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    prefills: int = 0
    arriving: int = 0
    landing_tokens: int = 0  # of remote prompts whose KV has not arrived

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
