"""One attempt on a decode worker: where it stands, what it holds, its row of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from decode_worker.speculation import Guesser
from pdserve.core.attempt import Attempt, AttemptKey, blocks_for
from pdserve.engine.interface import Row


class Stage(Enum):
    LANDING = "landing"  # blocks are held; KV or the first token is on its way
    WAITING = "waiting"  # to read its own tokens; holds nothing
    RUNNING = "running"  # every step may compute some of it
    ENDING = "ending"  # given up, but somebody may still write into its blocks


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    attempt: Attempt
    key: AttemptKey  # the attempt's
    prompt_len: int
    ends_at: int  # tokens, prompt and output, at which its text ends if nothing ended it before
    order: int  # of arrival; the largest is the youngest
    is_local: bool
    stage: Stage
    tokens: list[int]  # prompt and output, the last drawn token included
    end_ids: frozenset[int]  # tokens that may end its text
    hashes: list[bytes]  # of the leading full blocks, as far as anybody needed them
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading positions whose KV is in `blocks`
    cached: int = 0  # of them, found in the prefix cache when it last started
    first_token: int | None = None  # drawn by the prefill worker
    has_landed: bool = False
    preemptions: int = 0
    started_s: float | None = None  # when computing first began
    ready_s: float = 0.0  # remote: when KV and first token were both there
    decoding_since_s: float | None = None  # since when it decodes, as far as that is not told; None: not yet
    preempted_at_s: float | None = None  # while no token was drawn since
    #: While it has fewer tokens, its next one fills no block, cannot be its last by number, and reports nothing else.
    plain_until: int = 0
    lives: tuple[int, ...] = ()  # of `blocks` when they were taken, where kv_check is on
    guesser: Guesser | None = None  # where the worker speculates

    @property
    def remaining(self) -> int:
        """Positions to compute before a token can be drawn; 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def is_scored(self) -> bool:
        """It reads its prompt for the prompt's logprobs too, from the beginning: a cache holds none."""
        return self.is_local and self.num_output == 0 and self.attempt.num_top_of_prompt is not None

    def row(self, count: int, block_size: int, drafts: Sequence[int] = ()) -> Row:
        """Its next `count` positions; the row draws if no more remain, and may then have drafts."""
        if count == 1 == self.remaining:  # nearly every row of a decode worker's life: no copies
            return Row(
                tokens=self.tokens[-1:],
                start=self.computed,
                blocks=self.blocks,
                sample=self.attempt.sampling,
                history=self.tokens,
                prompt_len=self.prompt_len,
                drafts=drafts,
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
        )
