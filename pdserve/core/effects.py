"""The decisions of a worker's batching, as data. Pure.

Messages to routers are defined in pdserve/core/protocol.py; all other effects are here. The program turns each effect
into a message or a transfer call; a simulator turns the same into future events. After anything but Refused, exactly
one Released ends an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import AttemptFailed, BatchTimed, FirstToken, Granted, Refused, Released, TokenRow
from pdserve.core.types import TokenOut

# -- both roles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLost:
    """The attempt is over because its KV cannot arrive; its memory follows in Released.

    `is_cancelled`: the other worker abandoned the transfer because its attempt has ended. This is not a failure.
    """

    key: AttemptKey
    error: str
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCancelled:
    """The attempt was abandoned before its KV was needed, and its transfer has ended; for statistics."""

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
    """Computation begins; the pair may connect in the meantime. Blocks will come in up to `groups` groups of layers."""

    key: AttemptKey
    plan: str  # end, chunk or layers, for metrics
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksDone:
    """(grant index, source block) of blocks whose contents are final.

    Of each block, the layer groups first_group .. end_group - 1 of `groups` equal ones; earlier groups were pushed
    before.
    """

    key: AttemptKey
    blocks: tuple[tuple[int, int], ...]
    is_last: bool
    first_group: int = 0
    end_group: int = 1
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAborted:
    """Stop reading the source blocks; they stay reserved until the sender reports that it has stopped."""

    key: AttemptKey


# -- decode ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReserved:
    """Blocks are reserved for KV that a prefill worker will send; in prompt order, after `num_cached_blocks` others."""

    key: AttemptKey
    blocks: tuple[int, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveAborted:
    """Writing must end; the blocks stay reserved until the receiver reports that it has ended."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommitted:
    key: AttemptKey
    transfer_s: float  # first byte to verification
    busy_s: float  # the part of it with chunks in transfer
    num_bytes: int
    num_cached_blocks: int  # leading blocks that were cached, so not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMistaken:
    """A block did not match the attempt's text. Tokens that were sampled from it are dropped, and it is recomputed."""

    key: AttemptKey
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSampled:
    """One token each of sequences that continue and have nothing else to report. The lists have equal lengths."""

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
    | BlocksReserved
    | Granted
    | ReceiveAborted
    | KvCommitted
    | KvMistaken
    | TokenRow
    | PlainSampled
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """The work of a step, in terms of the cost model."""

    decode_rows: int = 0
    context_tokens: int = 0  # of the decode rows
    prefill_tokens: int = 0
    prefill_token_context: float = 0.0  # sum over prefill rows of tokens * (cached + tokens / 2)
    draft_tokens: int = 0  # drafts in addition to the decode rows' own tokens

    def timed(self, step_s: float, worker_id: str = "") -> BatchTimed:
        """The report of a step that took `step_s`."""
        return BatchTimed(
            worker_id=worker_id,
            rows=self.decode_rows,
            prefill_tokens=self.prefill_tokens,
            prefill_token_context=self.prefill_token_context,
            context_tokens=self.context_tokens,
            step_s=step_s,
        )
