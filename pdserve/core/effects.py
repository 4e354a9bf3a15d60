"""The decisions of a worker's scheduler, as data. Pure.

Messages to routers are defined in pdserve/core/protocol.py, all other effects here. The worker's program turns each
effect into a message or a transfer call, and the simulator turns it into future events. An attempt ends with Refused,
or with exactly one Released.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.attempt import AttemptKey
from pdserve.core.cost.latency import CostModel
from pdserve.core.kv.fetch import FetchEffect
from pdserve.core.protocol import AttemptFailed, BatchTimed, FirstToken, Granted, Refused, Released, TokenRow
from pdserve.core.types import TokenOut

# -- both roles --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLost:
    """The attempt is over because its KV cannot arrive. Released follows when its memory is free.

    `is_cancelled`: the other worker abandoned the transfer because its attempt has ended. This is not a failure.
    """

    key: AttemptKey
    error: str
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Logprobs of the prompt's tokens from `first_position` on. Comes before the attempt's first token."""

    key: AttemptKey
    first_position: int
    tokens: tuple[TokenOut, ...]


# -- a worker that sends KV --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStarted:
    """Computation begins, and the two workers may connect meanwhile. Blocks will be sent in up to `groups` groups of
    layers."""

    key: AttemptKey
    plan: str  # end, chunk, layers or (on a decode worker) cached; for metrics
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksDone:
    """(grant index, source block) of blocks whose contents are final.

    Layers are divided into `groups` equal groups. The contents are final in groups first_group .. end_group - 1;
    earlier groups were pushed before.
    """

    key: AttemptKey
    blocks: tuple[tuple[int, int], ...]
    is_last: bool
    first_group: int = 0
    end_group: int = 1
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAborted:
    """The sender must stop reading the source blocks. They stay reserved until it reports that it has stopped."""

    key: AttemptKey


# -- decode ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCancelled:
    """The attempt was abandoned before its KV was needed, and its transfer has ended. For statistics only."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReserved:
    """Blocks are reserved for KV from another worker. They are in prompt order, after `num_cached_blocks` cached
    ones."""

    key: AttemptKey
    blocks: tuple[int, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveAborted:
    """The receiver must stop writing. The blocks stay reserved until it reports that it has stopped."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommitted:
    key: AttemptKey
    transfer_s: float  # from the first byte to verification
    busy_s: float  # the part of transfer_s with chunks under way
    num_bytes: int
    num_cached_blocks: int  # leading blocks that were cached, and therefore not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMistaken:
    """A block did not match the attempt's text. Tokens that were sampled from it are dropped, and the text is
    recomputed."""

    key: AttemptKey
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTokens:
    """One token for each sequence that continues and reports nothing else. The lists have equal lengths."""

    keys: list[AttemptKey]
    output_indexes: list[int]
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSampled:
    """The tokens of a step, which share one message per router."""

    rows: list[TokenRow]
    plain: PlainTokens | None = None


#: Of both roles.
CommonEffect = Refused | AttemptFailed | TransferLost | Released | PromptScored | FetchEffect
#: Of an attempt whose KV is sent. A decode worker has such attempts too: answers that leave it.
SendEffect = SendStarted | BlocksDone | SendAborted | FirstToken
PrefillEffect = CommonEffect | SendEffect
DecodeEffect = (
    CommonEffect
    | SendEffect
    | TransferCancelled
    | BlocksReserved
    | Granted
    | ReceiveAborted
    | KvCommitted
    | KvMistaken
    | TokensSampled
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """The work of a step, in the features of the cost model."""

    decode_rows: int = 0
    context_tokens: int = 0  # total context of the decode rows
    prefill_tokens: int = 0
    prefill_token_context: float = 0.0  # sum over prefill rows of tokens * (cached + tokens / 2)
    draft_tokens: int = 0  # drafts in addition to the decode rows' own tokens

    def predicted_s(self, cost: CostModel) -> float:
        """Seconds of this step by the cost model."""
        return cost.step_s(self.decode_rows, self.context_tokens, self.prefill_tokens, self.prefill_token_context)

    def timed(self, step_s: float, worker_id: str = "") -> BatchTimed:
        """The report of this step, which took `step_s`."""
        return BatchTimed(
            worker_id=worker_id,
            rows=self.decode_rows,
            prefill_tokens=self.prefill_tokens,
            prefill_token_context=self.prefill_token_context,
            context_tokens=self.context_tokens,
            step_s=step_s,
        )
