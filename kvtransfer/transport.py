"""What a transport must offer, and what it must prove. Pure.

D grants, P pushes. A Receiver lives in each decode worker, a Sender in each prefill worker. Both are
thread-safe, never block their caller on the network, and report through callbacks that may come from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvtransfer.shape import KvShape
from kvtransfer.stats import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Names one try to move one sequence's KV. Late messages carry an old key and are counted, never obeyed."""

    transfer_id: str
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class Link:
    """How KV travels to one decode worker."""

    worker_id: str
    endpoint: str
    transport: str
    reason: str  # for this transport, as both ends see it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a worker's KV is: of two workers that exchange blocks all must be equal but the shape."""

    protocol: int
    model: str
    engine: str  # names the weights
    shape: KvShape

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A decode worker's promise of a landing place.

    `blocks` are the receiver's block numbers in prompt order, after `held_blocks` leading blocks that it already has;
    both count blocks of the receiver's size.
    """

    key: TransferKey
    endpoint: str  # HOST:PORT of the granting worker's gRPC server
    worker_id: str
    incarnation: str
    fingerprint: Fingerprint
    blocks: tuple[int, ...]
    held_blocks: int
    hash_seed: bytes = b""  # of the receiver's names of blocks
    rank_endpoints: tuple[str, ...] = ()  # as `endpoint`, of the worker's ranks 1, 2, ..; each has the blocks' heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What a sender of another shape knows of the sequence: its length, and the names of what lies in its blocks.

    `own` are the sender's, from the first block that holds a token to send; `theirs` the receiver's, of the granted
    blocks (`Attempt.chains`).
    """

    num_tokens: int
    own: tuple[int, ...]
    theirs: tuple[int, ...]


#: Faults of a transfer that an owner gave up, on this side or the other, since nobody needed it: no failures.
CANCELLED: Final = ("aborted", "cancelled")


class ReceiveOutcome(Enum):
    VERIFIED = "verified"  # every granted block arrived and its checksum matched
    FAILED = "failed"  # coverage or integrity is not to be had; the memory is safe to free
    DRAINED = "drained"  # after abort: nobody writes any more; the memory is safe to free
    QUARANTINED = "quarantined"  # after abort: a writer may live; a DRAINED follows when it is provably gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    key: TransferKey
    outcome: ReceiveOutcome
    num_bytes: int = 0
    transfer_s: float = 0.0  # first byte to verification, on this host's monotonic clock
    busy_s: float = 0.0  # of it, with chunks on their way
    error: str = ""
    fault: str = ""  # the kind of error, of few: session.Event

    @property
    def is_cancelled(self) -> bool:
        return self.fault in CANCELLED


class SendOutcome(Enum):
    SENT = "sent"  # the receiver has acknowledged every block; the source blocks may be reused
    FAILED = "failed"  # the source blocks may be reused


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    key: TransferKey
    outcome: SendOutcome
    num_bytes: int = 0
    send_s: float = 0.0
    busy_s: float = 0.0  # Received.busy_s
    exposed_s: float = 0.0  # from the last push to the receiver's word: what no computing hid
    early_bytes: int = 0  # that the receiver's host had acknowledged at the last push
    error: str = ""
    fault: str = ""  # the kind of error, of few: session.Event
    wire_dtype: str = ""  # as which the values travelled; empty: as they are stored

    @property
    def is_cancelled(self) -> bool:
        return self.fault in CANCELLED


OnOpen = Callable[[], None]


class Receiver(Protocol):
    """The decode side. Owns no blocks: it writes only into blocks of an open grant."""

    @property
    def is_healthy(self) -> bool:
        """False once it can receive nothing any more; the worker then ends."""
        ...

    @property
    def stats(self) -> TransferStats: ...

    @property
    def rank_endpoints(self) -> tuple[str, ...]:
        """Of the worker's ranks 1, 2, .. (`Grant.rank_endpoints`)."""
        ...

    def expect(
        self,
        grant: Grant,
        on_end: Callable[[Received], None],
        deadline_s: float | None = None,
        chains: Sequence[int] | None = None,
        on_open: OnOpen | None = None,
    ) -> bool:
        """Opens the grant for writing. `on_end` is called once with VERIFIED or FAILED, or through abort().

        `chains` are the names of what each granted block is to hold (`Attempt.chains`); None checks no name. True: a
        sender may hear of the grant. False: not yet, since other ranks must open it too. `on_open` is called when they
        have, never from inside, and not where the transfer has ended before.
        """
        ...

    def abort(self, key: TransferKey) -> None:
        """Ends the transfer; on_end is called with DRAINED, or QUARANTINED then DRAINED. Idempotent."""
        ...

    def close(self) -> None: ...


class RankReceiver(Receiver, Protocol):
    """A Receiver of one rank, whose transfers are parts of others."""

    def fail(self, key: TransferKey, error: str) -> None:
        """Ends the transfer since another part has failed; on_end is called with FAILED. Idempotent."""
        ...


class Sender(Protocol):
    """The prefill side. Reads source blocks until Sent is reported; the caller keeps them referenced till then."""

    @property
    def stats(self) -> TransferStats: ...

    @property
    def links(self) -> Sequence[Link]:
        """The decode workers that are connected, and how."""
        ...

    @property
    def divides_blocks(self) -> bool:
        """Whether `start` may ask for more than one group of layers."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Payload that has left since the beginning; only grows. For who asks what it costs a step beside it."""
        ...

    def start(
        self,
        grant: Grant,
        on_end: Callable[[Sent], None],
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        """Announces a transfer, whose blocks come in so many groups of layers; connects when the pair is new.

        `text` is needed where the receiver's shape is another than the sender's.
        """
        ...

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        """Queues finished blocks, whose contents must not change any more: (index, source block).

        The index counts the sender's blocks from the first that holds a token to send; where shapes are equal, it is
        the grant's.

        `groups` of layers are finished, None: all. Blocks are marked with their names before (`BlockStamps.mark`).
        """
        ...

    def abort(self, key: TransferKey) -> None:
        """Stops; on_end is called with FAILED once no source block is read any more. Idempotent."""
        ...

    def close(self) -> None: ...


class RankSender(Sender, Protocol):
    """A Sender of one rank, whose transfers are parts of others."""

    def fail(self, key: TransferKey, error: str) -> None:
        """As `abort`, since another part has failed: the receiver hears of a failure."""
        ...
