"""The messages between routers and workers: one dataclass for each message of worker.proto. Pure.

A worker's scheduler emits them, the router's state receives them as events and returns them as commands, and the
simulator forwards them. `pdserve/wire/protocol.py` pairs each with its protobuf message. A new field is added here and
in the .proto file.

A message about an attempt names it by `key`, whose `peer` is the other end of the stream: on a worker the number of the
router's stream, on a router the worker's id. A message about a whole worker has a `worker_id`, which the receiving
router fills in. Neither is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.attempt import AttemptKey, FailureKind, PrefixSource, RefusalReason
from pdserve.core.kv.tier_reads import TierSpeed
from pdserve.core.types import FinishReason, TokenOut

RETRY_AFTER_S: Final = 0.05  # retry time after a worker declined: about the time until a batch ends


class _AboutAttempt:
    """Properties for the parts of `key`."""

    __slots__ = ()
    key: AttemptKey

    @property
    def worker_id(self) -> str:
        """The worker's id. Valid only on a router."""
        return self.key.worker_id

    @property
    def request_id(self) -> str:
        return self.key.request_id

    @property
    def attempt(self) -> int:
        return self.key.attempt


# -- from a router to a worker -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(_AboutAttempt):
    """To a decode worker: reserve blocks for KV that will arrive, or, with `is_local`, also compute the prompt.

    The encoded message contains the request's whole Sequence. The router's runtime stores and adds it.
    """

    key: AttemptKey
    is_local: bool
    output_token_ids: tuple[int, ...] = ()  # tokens that the client already has
    deadline_s: float | None = None  # remaining time
    waited_s: float = 0.0  # time since the request arrived at the router, or since its first token if there is one
    reuse_within_s: float | None = None  # as in RequestAttributes, as far as the router believes it
    source: PrefixSource | None = None  # with `is_local`: another worker with more of its KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(_AboutAttempt):
    """To a prefill worker: compute the sequence, and push its KV to the granted blocks. The runtime adds the
    Sequence."""

    key: AttemptKey
    grant: bytes
    output_token_ids: tuple[int, ...] = ()
    deadline_s: float | None = None
    waited_s: float = 0.0
    reuse_within_s: float | None = None
    source: PrefixSource | None = None  # another worker with more of its KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(_AboutAttempt):
    """To a decode worker: the prefill worker's first token, after which decode begins."""

    key: AttemptKey
    first_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(_AboutAttempt):
    """Free all memory of the attempt; Released follows. Idempotent."""

    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainWorker:
    """An operator stops new work on the worker."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainWorker:
    """Undoes DrainWorker."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndText:
    """The session of a text has ended. Its cached blocks, from the first of these on, leave first, unless other texts
    use them."""

    worker_id: str
    block_hashes: tuple[bytes, ...]  # of some of its blocks, in its order


# -- about LoRA adapters, in both directions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapter:
    """What a name of an adapter means on a worker. Of two with the same name, the one with the larger `precedence`
    counts, so workers and routers agree in whatever order they learn of them."""

    name: str
    fingerprint: str = ""  # empty: the name was unloaded
    version: int = 0  # microseconds since 1970 by the router that an operator asked; 0: of the worker's settings
    folder: str = ""  # on the worker

    @property
    def precedence(self) -> tuple[int, str]:
        return self.version, self.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Read the adapter and load it into the engine; AdapterLoaded follows. Requests can choose it only after the
    NamedAdapter of the same version."""

    name: str
    folder: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropLoad:
    """Free what LoadAdapter of this version has loaded, unless its NamedAdapter has come."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded:
    """The result of LoadAdapter: a fingerprint, or why there is none."""

    name: str
    version: int
    fingerprint: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """All adapters of a worker. `named` includes unloaded names, so that routers do not load them again."""

    named: tuple[NamedAdapter, ...] = ()
    loaded: tuple[str, ...] = ()  # fingerprints; also former ones of a name, whose sequences have not ended


AdapterCommand = LoadAdapter | DropLoad | NamedAdapter

# -- from a worker to a router -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A worker's load report, sent on every heartbeat."""

    worker_id: str = ""
    steps: int = 0
    free_blocks: int
    evictable_blocks: int = 0  # unreferenced blocks of the prefix cache
    running: int = 0
    waiting: int = 0
    context_tokens: int = 0
    pending_prefill_tokens: int = 0
    is_draining: bool = False
    is_drained: bool = False  # an operator drains the worker, and may undo that
    preemptions: int = 0  # sequences preempted for lack of KV blocks, since the worker's start
    tiers: tuple[TierSpeed, ...] = ()  # below the pool; one that hangs is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimed:
    """One finished batch, or the mean of consecutive decode batches with the same number of rows, for the cost
    model."""

    worker_id: str = ""
    rows: int  # decode rows
    prefill_tokens: int
    prefill_token_context: float  # sum over prefill rows of tokens * (cached + tokens / 2)
    context_tokens: int  # total context of the decode rows
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(_AboutAttempt):
    """The decode worker has reserved the blocks that `grant` describes. A local attempt has no grant.

    A grant is opaque to the router: an encoded Grant of transfer.proto that it passes to the prefill worker.
    """

    key: AttemptKey
    grant: bytes | None = None
    grant_s: float = 0.0  # from Reserve's arrival to this message, by the worker's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(_AboutAttempt):
    """The worker declined the attempt, and holds no memory for it. Both roles may decline."""

    key: AttemptKey
    reason: RefusalReason
    retry_after_s: float = RETRY_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(_AboutAttempt):
    """The prefill worker sampled the first token. Durations are by its own clock."""

    key: AttemptKey
    token: TokenOut
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, and of the output so far
    finish: FinishReason | None = None  # set if the first token is also the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnded(_AboutAttempt):
    """KV was verified and committed, or will not arrive. May come before FirstToken, which another stream carries.

    In a prefill worker's message, committed means that the receiver has acknowledged all KV, and `exposed_s` is the
    part of the transfer that prefill did not hide.
    """

    key: AttemptKey
    is_committed: bool
    transfer_s: float = 0.0  # from the first byte to the commit, on the receiver's clock
    busy_s: float = 0.0  # the part of transfer_s with chunks under way
    exposed_s: float = 0.0  # from the end of the prefill to the receiver's acknowledgement
    num_bytes: int = 0
    saved_bytes: int = 0  # bytes of KV that the decode worker had already
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullEnded(_AboutAttempt):
    """The worker has pulled KV from the attempt's PrefixSource, or has given it up and computes it instead."""

    key: AttemptKey
    source: str  # id of the worker from which it was pulled
    num_tokens: int  # whose KV was verified; 0: none
    num_bytes: int = 0
    busy_s: float = 0.0  # the part of pull_s with chunks under way
    pull_s: float = 0.0  # from the request to the source until the end
    error: str = ""
    is_unreachable: bool = False  # the source did not answer


# Not frozen, because that would double the time of creation.
@dataclass(slots=True, kw_only=True)
class TokenRow(_AboutAttempt):
    """Tokens of one attempt from one step. A duration or count is 0 if this row does not report it."""

    key: AttemptKey
    output_index: int  # position of tokens[0] among the request's output tokens
    tokens: tuple[TokenOut, ...]
    finish: FinishReason | None = None
    decode_s: float = 0.0  # decoding since the last report; reported with the last row, and after a preemption
    # With a remote attempt's first row: the time from the arrival of KV and first token to the next step.
    decode_queue_s: float = 0.0
    preempted_s: float = 0.0  # with the first row after a preemption; its decode_s is the time before the preemption
    preemptions: int = 0  # since the last row that reported any
    queue_s: float = 0.0  # with a local attempt's first row, like the next two fields
    prefill_s: float = 0.0
    cached_tokens: int = 0  # as in FirstToken


# As TokenRow.
@dataclass(slots=True, kw_only=True)
class TokensArrived:
    """The tokens of one decode step, for all requests of this router on a worker."""

    worker_id: str
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(_AboutAttempt):
    """The worker abandoned the attempt. Released follows when its memory is free."""

    key: AttemptKey
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(_AboutAttempt):
    """Every block of the attempt was returned to the allocator or to the prefix cache."""

    key: AttemptKey


WorkerCommand = Reserve | Prefill | Admit | Cancel | DrainWorker | UndrainWorker | EndText
AttemptMessage = Granted | Refused | FirstToken | TransferEnded | PullEnded | AttemptFailed | Released
WorkerMessage = Load | BatchTimed | TokensArrived | AttemptMessage
