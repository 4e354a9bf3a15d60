"""What a worker's batching decides, as data. Pure.

The program turns each effect into a message or a transfer call; a simulator turns the same into future events.
After anything but Refused, exactly one Released ends an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.attempt import AttemptKey, FailureKind, RefusalReason
from pdserve.core.types import FinishReason, TokenOut

RETRY_AFTER_S: Final = 0.05  # that a refusal says: about the time in which a batch ends

# -- both roles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The attempt is not taken and nothing is held for it."""

    key: AttemptKey
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The attempt is over; its memory follows in Released."""

    key: AttemptKey
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLost:
    """The attempt is over because its KV cannot arrive; its memory follows in Released.

    `is_cancelled`: the other worker gave the transfer up since its attempt is over. Nothing went wrong.
    """

    key: AttemptKey
    error: str
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCancelled:
    """The attempt was given up before its KV was needed, and nobody moves it any more; for statistics."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Every block of the attempt is back in the allocator or in the prefix cache."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Logprobs of the prompt's tokens from `first_position` on. Comes before the attempt's first token."""

    key: AttemptKey
    first_position: int
    tokens: tuple[TokenOut, ...]


# -- prefill -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStarted:
    """Computing begins; the pair may connect meanwhile. Blocks will come in up to `groups` groups of layers."""

    key: AttemptKey
    plan: str  # end, chunk or layers, for metrics
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksDone:
    """(grant index, source block) of blocks whose contents are final.

    Of each block the layer groups first_group .. end_group - 1 of `groups` equal ones; the groups before went already.
    """

    key: AttemptKey
    blocks: tuple[tuple[int, int], ...]
    is_last: bool
    first_group: int = 0
    end_group: int = 1
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAborted:
    """Stop reading the source blocks; they stay held until the sender says that it has."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDrawn:
    key: AttemptKey
    token: TokenOut
    queue_s: float
    prefill_s: float
    cached_tokens: int
    finish: FinishReason | None


# -- decode ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingHeld:
    """Blocks are held for KV that a prefill worker will send, in prompt order after `held_blocks` present ones."""

    key: AttemptKey
    blocks: tuple[int, ...]
    held_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatHeld:
    """The worker will read the prompt itself."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveAborted:
    """Nobody may write any more; the blocks stay held until the receiver says that nobody does."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommitted:
    key: AttemptKey
    transfer_s: float  # first byte to verification
    busy_s: float  # of it, with chunks on their way
    num_bytes: int
    held_blocks: int  # leading blocks that were here and did not travel


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMistaken:
    """A block did not hold what the attempt's text says; what was drawn from it is dropped, and it is recomputed."""

    key: AttemptKey
    error: str


# Not frozen, which doubles the time to make one: there is one for each row and step.
@dataclass(slots=True, kw_only=True)
class Drawn:
    """One token of one step. Durations and counts come with the row that knows them, else 0."""

    key: AttemptKey
    output_index: int
    token: TokenOut
    finish: FinishReason | None = None
    decode_s: float = 0.0  # decoding since what was told before: with the last row, and after a preemption
    decode_queue_s: float = 0.0  # with a remote attempt's first row: KV and first token were there, no step was free
    preempted_s: float = 0.0  # with the first row after a preemption; its decode_s is what was before
    preemptions: int = 0
    queue_s: float = 0.0  # with a local attempt's first row, as the next two
    prefill_s: float = 0.0
    cached_tokens: int = 0

    @property
    def tells_more(self) -> bool:
        """Whether anything is said beside the token."""
        durations_s = self.decode_s or self.decode_queue_s or self.preempted_s or self.queue_s or self.prefill_s
        return bool(self.finish is not None or durations_s or self.preemptions or self.cached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDrawn:
    """One token each of sequences that go on and have nothing else to report. The lists have equal lengths."""

    keys: list[AttemptKey]
    output_indexes: list[int]
    token_ids: list[int]


PrefillEffect = (
    Refused | Failed | TransferLost | Released | PromptScored | SendStarted | BlocksDone | SendAborted | FirstDrawn
)
DecodeEffect = (
    Refused
    | Failed
    | TransferLost
    | TransferCancelled
    | Released
    | PromptScored
    | LandingHeld
    | SeatHeld
    | ReceiveAborted
    | KvCommitted
    | KvMistaken
    | Drawn
    | PlainDrawn
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """What a step computed, in the terms of the cost model."""

    decode_rows: int = 0
    context_tokens: int = 0  # of the decode rows
    prefill_tokens: int = 0
    prefill_token_context: float = 0.0  # sum over prefill rows of tokens * (cached + tokens / 2)
    draft_tokens: int = 0  # guesses beside the decode rows' own tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A worker's own account of itself."""

    free_blocks: int
    evictable_blocks: int
    running: int
    waiting: int
    context_tokens: int
    pending_prefill_tokens: int
