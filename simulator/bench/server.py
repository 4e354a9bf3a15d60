"""The interface between the load generator and a server under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from simulator.bench.answer import BenchAnswer, BenchOutcome

MAX_CHUNKS_PER_TOKEN = 4  # a stream with more parts per token does not come from a language model
SPARE_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that all requests of a benchmark share."""

    temperature: float = 1.0
    ignore_eos: bool = True
    slo_ttft_s: float | None = None  # part of the request, for servers that schedule by targets
    slo_tpot_s: float | None = None


@dataclass(slots=True, kw_only=True)
class ServerReply:
    """The answer to one request, filled in while it arrives. Times are those of time.perf_counter()."""

    outcome: BenchOutcome = BenchOutcome.FAILED
    chunk_s: list[float]
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
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

    def prepare(self, token_ids: Sequence[int], max_tokens: int) -> Any:
        """The request in the form in which it is sent. Called before it is due."""
        ...

    async def send(self, prepared: Any, reply: ServerReply) -> None:
        """Sends it and fills in the reply. Raises nothing but CancelledError."""
        ...

    async def with_predictions(self, answers: Sequence[BenchAnswer]) -> Sequence[BenchAnswer]:
        """The same answers, with the times that the server predicted, if it reports them. Raises nothing but
        CancelledError."""
        ...

    async def close(self) -> None: ...


def most_chunks(max_tokens: int) -> int:
    return MAX_CHUNKS_PER_TOKEN * max_tokens + SPARE_CHUNKS
