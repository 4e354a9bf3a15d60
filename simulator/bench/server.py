"""The interface between the load generator and a server under test, and the measurements of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pdserve.core.types import Slo

# --- measurements of one request ------------------------------------------------------------------------------
# All times are seconds of the generator's clock since its turn began.


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
    task: int | None = None  # number of the first turn of its session; None: it has none
    reusable_tokens: int = 0  # of its prompt, that an earlier prompt or answer of the turn had; only of sessions

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


# --- server under test ----------------------------------------------------------------------------------------

MAX_CHUNKS_PER_TOKEN = 4  # a stream with more parts per token does not come from a language model
SPARE_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that all requests of a benchmark share."""

    temperature: float = 1.0
    ignore_eos: bool = True
    slo_ttft_s: float | None = None  # part of the request, for servers that schedule by targets
    slo_tpot_s: float | None = None
    slo_task_s: float | None = None  # of a session
    has_sessions: bool = False  # answers are asked for their token ids, which the next prompts repeat


@dataclass(slots=True, kw_only=True)
class ServerReply:
    """The answer to one request, filled in while it arrives. Times are those of time.perf_counter()."""

    outcome: BenchOutcome = BenchOutcome.FAILED
    chunk_s: list[float]
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)  # as far as the server names them
    error: str = ""
    detail: str = ""
    server_ttft_s: float | None = None
    server_tpot_s: float | None = None
    request_id: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""

    def fail(self, error: str, detail: str = "") -> None:
        self.outcome, self.error, self.detail = BenchOutcome.FAILED, error, detail

    def reject(self, detail: str = "") -> None:
        self.outcome, self.error, self.detail = BenchOutcome.REJECTED, "rejected", detail

    def complete(self) -> None:
        """The stream has ended as the protocol says."""
        if not self.chunk_s:
            self.fail("an answer without tokens")
            return
        self.outcome = BenchOutcome.COMPLETED


class BenchServer(Protocol):
    name: str  # in tables and reports
    address: str

    async def connect(self) -> str:
        """The name of the model. Raises PdserveError if no server answers there, or it has another model."""
        ...

    def prepare(self, token_ids: Sequence[int], max_tokens: int, session_id: str = "") -> Any:
        """The request in the form in which it is sent. Called before it is due."""
        ...

    async def send(self, prepared: Any, reply: ServerReply) -> None:
        """Sends it and fills in the reply. Raises nothing but CancelledError."""
        ...

    async def end_session(self, session_id: str) -> str:
        """Says that no request of it follows. Returns why that could not be said; empty: it was. Raises nothing but
        CancelledError."""
        ...

    async def with_predictions(self, answers: Sequence[BenchAnswer]) -> Sequence[BenchAnswer]:
        """The same answers, with the times that the server predicted, if it reports them. Raises nothing but
        CancelledError."""
        ...

    async def close(self) -> None: ...


def most_chunks(max_tokens: int) -> int:
    return MAX_CHUNKS_PER_TOKEN * max_tokens + SPARE_CHUNKS
