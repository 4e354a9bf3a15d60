"""The state of one transfer on its sender. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvtransfer.protocol.device import Fence
from kvtransfer.protocol.frames import Tag
from kvtransfer.protocol.plan import Chunk, Part
from kvtransfer.protocol.session import Session, State
from kvtransfer.protocol.transport import SendOutcome, Sent
from pdserve.core.kv.kv_shape import Grant


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
            send_s=now_s - began_s,
            busy_s=self.busy_s,
            exposed_s=now_s - pushed_s,
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
