"""The state of one transfer on its sender and on its receiver, and the commands to a sender's connection. Pure.

The tables of both sides, `send_transfers.py` and `receive_transfers.py`, decide; here is what they decide about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from kvtransfer.protocol import frames
from kvtransfer.protocol.device import Fence
from kvtransfer.protocol.frames import Tag
from kvtransfer.protocol.plan import Chunk, Part, PartLayout
from kvtransfer.protocol.session import Session, State
from kvtransfer.protocol.transport import Received, ReceiveOutcome, SendOutcome, Sent
from pdserve.core.durations import clamped_s
from pdserve.core.kv.kv_shape import Grant, TransferKey


@dataclass(slots=True, eq=False)
class SendTransfer:
    grant: Grant
    tag: Tag
    session: Session
    deadline_at_s: float | None
    shard: int
    num_shards: int  # number of shards that fill the grant's blocks, this one included
    groups: int
    epochs: list[int]  # epochs of the source blocks when they were first pushed, by grant index
    began_at_s: float | None = None
    # chunk, layer group, device work to wait for
    pending: deque[tuple[Chunk, int, Fence | None]] = field(default_factory=deque)
    num_stamped: int = 0  # pieces whose frames were made
    num_bytes: int = 0
    early_bytes: int = 0
    last_pushed_at_s: float | None = None
    busy_s: float = 0.0
    is_announced: bool = False
    lease_at_s: float | None = None  # when it ends for lack of progress, or of the confirmation
    given_up_at_s: float | None = None  # when it was abandoned with source blocks still being read

    @property
    def is_stamped(self) -> bool:
        """Whether the frames of all pieces were made. Copies end in any order, so the chunk that was taken last may not
        be the last one sent."""
        return self.num_stamped == self.session.size

    @property
    def pieces(self) -> str:
        """Their number, for error messages."""
        return f"{self.session.size} {'blocks' if self.groups == 1 else 'parts of blocks'}"

    def sent(self, now_s: float) -> Sent:
        """The report of its end."""
        began_s = now_s if self.began_at_s is None else self.began_at_s
        pushed_s = now_s if self.last_pushed_at_s is None else self.last_pushed_at_s
        return Sent(
            key=self.grant.key,
            outcome=SendOutcome.SENT if self.session.state is State.VERIFIED else SendOutcome.FAILED,
            num_bytes=self.num_bytes,
            send_s=clamped_s(now_s - began_s),
            busy_s=self.busy_s,
            exposed_s=clamped_s(now_s - pushed_s),
            early_bytes=self.early_bytes,
            error=self.session.error,
            fault="" if self.session.fault is None else self.session.fault.value,
        )

    def at(self, index: int, group: int) -> int:
        """The index of a block's part in the session."""
        return group * len(self.grant.blocks) + index


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A chunk whose source blocks are being read, until `SendTransfers.written`."""

    transfer: SendTransfer
    chunk: Chunk
    part: Part
    after: Fence | None  # device work that may still write the source blocks

    def share(self, block_bytes: int) -> int:
        """The part's share of a block, for metrics: the shares of all groups add up to one block."""
        group, groups = self.part.group, self.part.groups
        return block_bytes * (group + 1) // groups - block_bytes * group // groups


# --- on the receiver ------------------------------------------------------------------------------------------

OUTCOMES: Final = {
    State.VERIFIED: ReceiveOutcome.VERIFIED,
    State.FAILED: ReceiveOutcome.FAILED,
    State.DRAINED: ReceiveOutcome.DRAINED,
    State.QUARANTINED: ReceiveOutcome.QUARANTINED,
}


@final
@dataclass(slots=True)
class LinkBusyTime:
    """Time during which at least one chunk was being transferred.

    A pause counts if it is no longer than the chunk before it: the sender is preparing the next chunk. A longer pause
    does not count: the sender is waiting for KV that is still being computed. A clock that goes back adds nothing: the
    total is sent, and a negative one cannot be encoded.
    """

    total_s: float = 0.0
    _num_open: int = 0
    _began_s: float = 0.0
    _ended_s: float | None = None
    _took_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if self._num_open == 0:
            if self._ended_s is not None and now_s - self._ended_s <= self._took_s:
                self.total_s += clamped_s(now_s - self._ended_s)
            self._began_s = now_s
        self._num_open += 1

    def end(self, now_s: float) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._took_s = clamped_s(now_s - self._began_s)
            self.total_s += self._took_s
            self._ended_s = now_s


@dataclass(slots=True, eq=False)
class ShardWriter:
    """The connection on which a shard arrives, and the state of the shard."""

    writer: int
    groups: int
    base: int  # index of the shard's first piece in the session
    accesses: int = 0  # number of open writes
    has_sent_last: bool = False
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class ReceiveTransfer:
    grant: Grant
    tag: Tag
    session: Session
    deadline_at_s: float | None
    content_hashes: tuple[int, ...] | None  # that the blocks must have; None: not checked
    epochs: tuple[int, ...]  # the blocks' epochs when they were granted
    after: Fence | None  # device work that may still have used the blocks then
    shards: dict[int, ShardWriter] = field(default_factory=dict)
    num_shards: int | None = None  # number of shards that fill the blocks; None before a sender has announced it
    first_byte_at_s: float | None = None
    lease_at_s: float | None = None  # if it has no deadline: when it ends for lack of progress
    given_up_at_s: float | None = None  # when it was abandoned with a write still open
    is_severed: bool = False
    num_bytes: int = 0
    busy: LinkBusyTime = field(default_factory=LinkBusyTime)
    reported: State | None = None

    def of(self, writer: int) -> list[ShardWriter]:
        """The shards that arrive on this connection."""
        return [shard for shard in self.shards.values() if shard.writer == writer]

    def shard(self, writer: int, part: Part) -> ShardWriter | None:
        """The shard that may write this part; None if this connection may not write it, or has not announced such
        parts."""
        shard = self.shards.get(part.shard)
        return shard if shard is not None and shard.writer == writer and shard.groups == part.groups else None

    def stamp_error(self, first: int, stamps: bytes, part: Part) -> str:
        """The error in the stamps of the blocks from `first` on; empty if they match."""
        content_hashes = (
            frames.content_hashes_in(stamps) if self.content_hashes is None else self.content_hashes[first:]
        )
        count = len(stamps) // frames.STAMP_BYTES
        found = frames.difference(stamps, frames.pack(content_hashes[:count], self.tag.generation, part.mask))
        return "" if found is None else f"the stamp of block {first + found[0]} of the grant has {found[1]}"

    def missing(self, shard: ShardWriter) -> int:
        """Pieces of the shard that are missing, if no chunk of it is being transferred any more; otherwise 0."""
        size = len(self.grant.blocks) * shard.groups
        claimed = self.session.claimed.count_in(shard.base, size)
        transferred = self.session.transferred.count_in(shard.base, size)
        return size - transferred if claimed == transferred else 0

    def received(self, outcome: ReceiveOutcome, now_s: float) -> Received:
        """The report of its end."""
        began_s = now_s if self.first_byte_at_s is None else self.first_byte_at_s
        return Received(
            key=self.grant.key,
            outcome=outcome,
            num_bytes=self.num_bytes,
            transfer_s=clamped_s(now_s - began_s),
            busy_s=self.busy.total_s,
            error=self.session.error,
            fault="" if self.session.fault is None else self.session.fault.value,
        )

    @property
    def progress(self) -> str:
        """What has arrived, for error messages."""
        session, num_blocks = self.session, len(self.grant.blocks)
        if session.size in (0, num_blocks):
            return f"{session.transferred.count} of {num_blocks} blocks"
        return f"{session.transferred.count} of {session.size} parts of blocks"


@dataclass(frozen=True, slots=True)
class Claim:
    """Permission to receive one chunk. Each write must still be opened with `enter`."""

    transfer: ReceiveTransfer
    first: int
    count: int
    blocks: tuple[int, ...]
    part: Part
    at: int  # index of the chunk's first piece in the session

    @property
    def shard(self) -> ShardWriter:
        return self.transfer.shards[self.part.shard]


# --- commands -------------------------------------------------------------------------------------------------
# From other threads to a sender's connection.

OnSent = Callable[[Sent], None]
# Called with the source blocks of a transfer that are no longer read.
OnRead = Callable[[TransferKey, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Start:
    grant: Grant
    on_end: OnSent
    deadline_at_s: float | None
    groups: int = 1
    layout: PartLayout | None = None  # None: blocks cannot be converted to the receiver's shape
    error: str = ""  # if not empty, it has failed already


@dataclass(frozen=True, slots=True)
class Push:
    key: TransferKey
    blocks: tuple[tuple[int, int], ...]
    epochs: tuple[int, ...]  # epochs of the source blocks when they were pushed
    is_last: bool
    groups: range | None  # groups of layers; None: all
    after: Fence | None = None  # device work that may still write the blocks


@dataclass(frozen=True, slots=True)
class Abort:
    key: TransferKey
    error: str = ""  # empty: the owner no longer needs the transfer
