"""The state of one prompt on a prefill worker (stage, blocks, rows in a step), and the state machine of its stages.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Final

from pdserve.core.attempt import Attempt, AttemptKey, blocks_for, shareable_blocks
from pdserve.core.effects import StepAccount
from pdserve.core.kv.cache import LastFound
from pdserve.engine.interface import Row
from prefill_worker.pushing import BY_CHUNK, PushPlan

# --- stages of a prompt ---------------------------------------------------------------------------------------
# MOVES is the specification. An event that it does not allow at a stage is a defect of this worker.
# PrefillSequence.move applies it, and docs/reference/lifecycles.md is drawn from it.


class PrefillStage(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    SENDING = "sending"  # completely computed; the sender may still read
    ENDING = "ending"  # abandoned, but the sender may still read
    RELEASED = "released"  # holds nothing


class PrefillMove(Enum):
    STARTED = "started, with blocks"
    COMPUTED = "first token sampled"
    ABANDONED = "abandoned while its KV may be read"
    RELEASED = "released"


STARTS: Final = {PrefillStage.WAITING: ""}
MOVES: Final[dict[tuple[PrefillStage, PrefillMove], PrefillStage]] = {
    (PrefillStage.WAITING, PrefillMove.STARTED): PrefillStage.COMPUTING,
    (PrefillStage.COMPUTING, PrefillMove.COMPUTED): PrefillStage.SENDING,
    (PrefillStage.COMPUTING, PrefillMove.ABANDONED): PrefillStage.ENDING,
    (PrefillStage.SENDING, PrefillMove.ABANDONED): PrefillStage.ENDING,
    (PrefillStage.WAITING, PrefillMove.RELEASED): PrefillStage.RELEASED,
    # Its first token is its last, so its KV is not sent; or the transfer failed.
    (PrefillStage.COMPUTING, PrefillMove.RELEASED): PrefillStage.RELEASED,
    (PrefillStage.SENDING, PrefillMove.RELEASED): PrefillStage.RELEASED,
    (PrefillStage.ENDING, PrefillMove.RELEASED): PrefillStage.RELEASED,
}


# --- one prompt -----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillSequence:
    """The state of one attempt."""

    attempt: Attempt
    receiver: str  # the decode worker
    may_divide: bool  # whether the receiver accepts blocks in groups of layers
    is_moved: bool  # False: the first token is the last one, so no decode worker needs the KV
    receiver_cached_blocks: int  # leading blocks that the receiver has completely, in this worker's block size
    stage: PrefillStage = PrefillStage.WAITING
    tokens: tuple[int, ...]
    hashes: list[bytes]
    last_found: LastFound = field(default_factory=LastFound)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading positions whose KV is in `blocks`
    cached: int = 0  # how many of these were found in the prefix cache
    push: PushPlan = BY_CHUNK
    pushed: int = 0  # leading blocks that were passed to the sender, or that the receiver has
    pushed_groups: int = 0  # number of layers of the following blocks that were passed to the sender
    started_s: float = 0.0

    def move(self, move: PrefillMove) -> None:
        """Changes the stage. Raises KeyError if the lifecycle has no such move."""
        self.stage = MOVES[self.stage, move]

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def num_reusable(self, block_size: int) -> int:
        """How many leading blocks need not be computed if the cache has them. With prompt logprobs, a prompt is
        computed completely, because a cache has no logprobs."""
        return 0 if self.attempt.num_top_of_prompt is not None else shareable_blocks(len(self.tokens), block_size)

    def reusable(self, block_size: int) -> Sequence[bytes]:
        """The hashes of these blocks."""
        return self.hashes[: self.num_reusable(block_size)]

    def content_hashes(self, block_size: int) -> tuple[int, ...]:
        """The content hashes of the prompt's blocks."""
        return self.attempt.content_hashes(self.hashes, self.tokens, block_size)

    def row(self, count: int, block_size: int) -> Row:
        """A row with the next `count` positions. It samples if none remain after it."""
        end = self.computed + count
        is_last = end == len(self.tokens)
        attempt = self.attempt
        return Row(
            tokens=self.tokens[self.computed : end],
            start=self.computed,
            blocks=self.blocks[: blocks_for(end, block_size)],
            sample=attempt.sampling if is_last else None,
            history=self.tokens if is_last else (),
            prompt_len=len(attempt.prompt_ids) if is_last else 0,
            targets=attempt.targets(self.computed, end),
            num_top=attempt.num_top_of_prompt or 0,
            adapter=attempt.adapter,
        )


@dataclass(kw_only=True)  # no slots, because of cached_property
class PrefillStep:
    """The tokens to compute for each prompt. The engine's rows are created on demand."""

    shares: list[tuple[PrefillSequence, int]]
    account: StepAccount
    block_size: int

    @property
    def is_empty(self) -> bool:
        return not self.shares

    @property
    def keys(self) -> list[AttemptKey]:
        return [prompt.attempt.key for prompt, _ in self.shares]

    @cached_property
    def rows(self) -> list[Row]:
        """The engine's rows. They are built at the first access, which must come before any change of the sequences."""
        return [prompt.row(count, self.block_size) for prompt, count in self.shares]
