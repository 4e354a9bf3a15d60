"""The load generator's measurements of one request. Pure data.

All times are seconds of the generator's clock since its turn began.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.core.types import Slo


class BenchOutcome(Enum):
    COMPLETED = "completed"  # the stream ended as the protocol says
    REJECTED = "rejected"  # overload: HTTP 429, or gRPC RESOURCE_EXHAUSTED
    FAILED = "failed"  # any other error; `error` names it
    INTERRUPTED = "interrupted"  # the user ended the benchmark first; not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchAnswer:
    """One request. `chunk_s` has the arrival times of those parts of the answer that contained tokens."""

    number: int
    due_s: float  # its arrival time; in a closed loop the time at which it was sent
    sent_s: float
    ended_s: float
    outcome: BenchOutcome
    prompt_tokens: int  # as the server counts them, or as requested where it does not
    output_tokens: int
    cached_tokens: int = 0  # prompt tokens that the server found in a prefix cache; 0 if it does not say
    chunk_s: tuple[float, ...] = ()
    error: str = ""  # short, and the same for equal causes
    detail: str = ""  # the server's own words
    server_ttft_s: float | None = None  # by the router's clock; only over gRPC
    server_tpot_s: float | None = None
    request_id: str = ""  # the router's; only over gRPC, like the fields below
    prefill_worker: str = ""  # empty if the decode worker prefilled
    decode_worker: str = ""
    predicted_ttft_s: float | None = None  # at placement; only if the benchmark read it afterwards
    predicted_tpot_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """From send to the first token. Only for a completed request."""
        return self.chunk_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From send to the last token, as in vLLM's benchmark. Only for a completed request."""
        return self.chunk_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Time between parts of the answer. A part may hold several tokens."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def lag_s(self) -> float:
        """How late the generator sent the request."""
        return max(self.sent_s - self.due_s, 0.0)

    def has_met(self, slo: Slo) -> bool:
        """Whether it completed within both targets; a single token has no TPOT and meets any."""
        if self.outcome is not BenchOutcome.COMPLETED:
            return False
        tpot_s = self.tpot_s
        return self.ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)
