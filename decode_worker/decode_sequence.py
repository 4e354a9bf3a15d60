"""The state of one attempt on a decode worker (stage, blocks, row in a step), and the state machine of its stages.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from decode_worker.speculation import NgramProposer
from pdserve.core.attempt import Attempt, AttemptKey, blocks_for, shareable_blocks
from pdserve.core.kv.cache import LastFound
from pdserve.engine.interface import Row

# --- stages of an attempt -------------------------------------------------------------------------------------
# MOVES is the specification. An event that it does not allow at a stage is a defect of this worker. DecodeSequence.move
# applies it, and docs/reference/lifecycles.md is drawn from it.


class DecodeStage(Enum):
    RECEIVING = "receiving"  # blocks are held; the KV or the first token has not arrived
    WAITING = "waiting"  # will prefill its tokens; has no blocks
    RUNNING = "running"  # steps compute its tokens
    SENDING = "sending"  # its only token is sampled; a transfer may read its blocks
    ENDING = "ending"  # abandoned, but a transfer may still write to its blocks or read them
    RELEASED = "released"  # holds nothing


class DecodeMove(Enum):
    JOINED = "KV and first token arrived"
    STARTED = "started, with blocks"
    PREEMPTED = "preempted"  # its tokens are recomputed later, without changing
    SAMPLED = "its only token sampled"
    ABANDONED = "abandoned while its KV arrives or is sent"
    RELEASED = "released"


STARTS: Final = {DecodeStage.RECEIVING: "remote", DecodeStage.WAITING: "local, or its KV is sent"}
MOVES: Final[dict[tuple[DecodeStage, DecodeMove], DecodeStage]] = {
    (DecodeStage.RECEIVING, DecodeMove.JOINED): DecodeStage.RUNNING,
    (DecodeStage.WAITING, DecodeMove.STARTED): DecodeStage.RUNNING,
    (DecodeStage.RUNNING, DecodeMove.PREEMPTED): DecodeStage.WAITING,
    (DecodeStage.RUNNING, DecodeMove.SAMPLED): DecodeStage.SENDING,
    (DecodeStage.RECEIVING, DecodeMove.ABANDONED): DecodeStage.ENDING,
    (DecodeStage.RUNNING, DecodeMove.ABANDONED): DecodeStage.ENDING,
    (DecodeStage.SENDING, DecodeMove.ABANDONED): DecodeStage.ENDING,
    (DecodeStage.RECEIVING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.WAITING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.RUNNING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.SENDING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.ENDING, DecodeMove.RELEASED): DecodeStage.RELEASED,
}


# --- one attempt ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeSequence:
    attempt: Attempt
    key: AttemptKey
    prompt_len: int
    ends_at: int  # maximum length of the text, prompt and output together
    order: int  # order of arrival; the largest is the youngest
    is_local: bool
    stage: DecodeStage
    tokens: list[int]  # prompt and output, including the last sampled token
    end_ids: frozenset[int]  # tokens that may end its text
    hashes: list[bytes]  # content hashes of the leading full blocks, computed as needed
    last_found: LastFound = field(default_factory=LastFound)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading positions whose KV is in `blocks`
    cached: int = 0  # how many of these the prefix cache had when the sequence last started
    first_token: int | None = None  # sampled by the prefill worker
    has_received: bool = False
    preemptions: int = 0
    unreported_preemptions: int = 0  # since the last row that reported preemptions
    started_s: float | None = None  # when computation first began
    ready_s: float = 0.0  # remote: when KV and first token had both arrived
    first_token_at_s: float = 0.0  # time of the answer's first token; valid once the sequence decodes
    decoding_since_s: float | None = (
        None  # start of the decode time that is not reported yet; None before the first token
    )
    preempted_at_s: float | None = None  # set from a preemption until the next token
    #: Below this length, the next token neither fills a block nor reaches the maximum length, and reports nothing else.
    plain_until: int = 0
    epochs: tuple[int, ...] = ()  # epochs of `blocks` when they were allocated, if kv_check is on
    proposer: NgramProposer | None = None  # if the worker speculates
    #: Its KV is sent to another decode worker, which has this many leading blocks completely, in this worker's block
    #: size. Its next token is its last one here, and nothing else may use its blocks until the transfer has ended.
    sends_after: int | None = None

    @property
    def remaining(self) -> int:
        """Number of positions to compute before a token can be sampled: 1 during decode."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_sending(self) -> bool:
        """Whether its KV is sent, in any stage."""
        return self.sends_after is not None

    @property
    def is_scored(self) -> bool:
        """Whether prompt logprobs are needed. The prompt is then computed completely, because a cache has no
        logprobs."""
        return self.is_local and self.num_output == 0 and self.attempt.num_top_of_prompt is not None

    def num_reusable(self, block_size: int) -> int:
        """How many leading blocks need not be computed if the cache has them."""
        return 0 if self.is_scored else min(shareable_blocks(len(self.tokens), block_size), len(self.hashes))

    def reusable(self, block_size: int) -> Sequence[bytes]:
        """The hashes of these blocks."""
        return self.hashes[: self.num_reusable(block_size)]

    def move(self, move: DecodeMove) -> None:
        """Changes the stage. Raises KeyError if the lifecycle has no such move."""
        self.stage = MOVES[self.stage, move]

    def began_output(self, now_s: float) -> None:
        """The attempt's first token was sampled at `now_s`. Due times of an interrupted answer continue as before."""
        self.first_token_at_s = self.attempt.begun_at_s if self.attempt.output_ids else now_s

    def row(self, count: int, block_size: int, drafts: Sequence[int] = ()) -> Row:
        """A row with the next `count` positions. It samples if none remain after it, and may then have drafts."""
        if count == 1 == self.remaining:  # the most frequent case, without copies
            return Row(
                tokens=self.tokens[-1:],
                start=self.computed,
                blocks=self.blocks,
                sample=self.attempt.sampling,
                history=self.tokens,
                prompt_len=self.prompt_len,
                drafts=drafts,
                adapter=self.attempt.adapter,
            )
        end = self.computed + count
        is_last = end == len(self.tokens)
        return Row(
            tokens=self.tokens[self.computed : end],
            start=self.computed,
            blocks=self.blocks[: blocks_for(end, block_size)],
            sample=self.attempt.sampling if is_last else None,
            history=self.tokens if is_last else (),
            prompt_len=self.prompt_len,
            targets=self.attempt.targets(self.computed, end) if self.is_scored else (),
            num_top=self.attempt.num_top_of_prompt or 0,
            adapter=self.attempt.adapter,
        )
