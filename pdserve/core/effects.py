"""What a worker's batching decides, as data. Pure.

What routers are told is a message of pdserve/core/protocol.py; the rest is here. The program turns each effect into a
message or a transfer call; a simulator turns the same into future events. After anything but Refused, exactly one
Released ends an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import AttemptFailed, FirstToken, Granted, Refused, Released, TokenRow
from pdserve.core.types import TokenOut

# -- both roles --------------------------------------------------------------------------------------------------


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


# -- decode ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingHeld:
    """Blocks are held for KV that a prefill worker will send, in prompt order after `held_blocks` present ones."""

    key: AttemptKey
    blocks: tuple[int, ...]
    held_blocks: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDrawn:
    """One token each of sequences that go on and have nothing else to report. The lists have equal lengths."""

    keys: list[AttemptKey]
    output_indexes: list[int]
    token_ids: list[int]


PrefillEffect = (
    Refused
    | AttemptFailed
    | TransferLost
    | Released
    | PromptScored
    | SendStarted
    | BlocksDone
    | SendAborted
    | FirstToken
)
DecodeEffect = (
    Refused
    | AttemptFailed
    | TransferLost
    | TransferCancelled
    | Released
    | PromptScored
    | LandingHeld
    | Granted
    | ReceiveAborted
    | KvCommitted
    | KvMistaken
    | TokenRow
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
