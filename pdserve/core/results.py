"""Token counts and times of a finished request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.phases import NO_PHASES, Phases
from pdserve.core.types import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole call: the prompt once, and the sampled tokens of all answers. In the router, of one
    answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int  # prompt tokens whose KV came from a prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a request went. ttft_s, tpot_s and total_s are by the router's clock.

    `phases` add up to total_s. Workers report the transfer times, which overlap the phases. Transfer times and bytes
    are sums over the attempts that reached the transfer.
    """

    ttft_s: float  # arrival at the router to the first token
    tpot_s: float  # (last token - first token) / (tokens - 1); 0 for a single token
    total_s: float
    phases: Phases = NO_PHASES
    grant_s: float = 0.0  # time that the decode worker took to grant memory; the rest of phases.reserve_s is messages
    transfer_s: float = 0.0  # from the first byte to the commit; overlaps the prefill
    transfer_busy_s: float = 0.0  # the part of transfer_s with bytes under way
    transfer_exposed_s: float = 0.0  # the part of the transfer after the prefill, which prefill did not hide
    path: Path | None = None  # path of the last attempt
    prefill_worker: str = ""  # empty on the local path
    decode_worker: str = ""
    attempts: int = 0  # placements tried; 1 when nothing went wrong
    transfer_bytes: int = 0
    transfer_saved_bytes: int = 0  # KV that the decode worker already had
    preemptions: int = 0  # how often the sequence was evicted for lack of blocks, and recomputed
