"""One granted transfer as its receiver's book holds it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer import stamping
from kvtransfer.busy import Busy
from kvtransfer.device import Fence
from kvtransfer.frames import Tag
from kvtransfer.parts import Part
from kvtransfer.session import Session, State
from kvtransfer.transport import Grant


@dataclass(slots=True, eq=False)
class LaneWriter:
    """The connection that a lane comes by, and what is known of it."""

    writer: int
    groups: int
    base: int  # the session's number of the lane's first piece
    accesses: int = 0  # that it has open
    has_said_last: bool = False
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class Landing:
    grant: Grant
    tag: Tag
    session: Session
    deadline_at_s: float | None
    chains: tuple[int, ...] | None  # the names of what the blocks are to hold, where the owner knows them
    lives: tuple[int, ...]  # of the blocks when they were granted
    after: Fence | None  # what may still have touched the blocks then, where they lie on a device
    lanes: dict[int, LaneWriter] = field(default_factory=dict)
    num_lanes: int | None = None  # that fill the blocks; None: no sender has come yet
    first_byte_at_s: float | None = None
    lease_at_s: float | None = None  # when it ends for want of progress, where it has no deadline
    given_up_at_s: float | None = None  # while a write is still open
    is_severed: bool = False
    num_bytes: int = 0
    busy: Busy = field(default_factory=Busy)
    reported: State | None = None

    def of(self, writer: int) -> list[LaneWriter]:
        """The lanes that come by this connection."""
        return [lane for lane in self.lanes.values() if lane.writer == writer]

    def lane(self, writer: int, part: Part) -> LaneWriter | None:
        """Who may write this part; None where this connection may not, or has not announced such parts."""
        lane = self.lanes.get(part.lane)
        return lane if lane is not None and lane.writer == writer and lane.groups == part.groups else None

    def mistake(self, first: int, stamps: bytes, part: Part) -> str:
        """What is wrong with the stamps of the blocks from `first` on; empty where nothing is."""
        chains = stamping.chains_in(stamps) if self.chains is None else self.chains[first:]
        count = len(stamps) // stamping.STAMP_BYTES
        found = stamping.difference(stamps, stamping.pack(chains[:count], self.tag.generation, part.mask))
        return "" if found is None else f"the stamp of block {first + found[0]} of the grant has {found[1]}"

    def missing(self, lane: LaneWriter) -> int:
        """Pieces of the lane that have not landed, where no chunk of it is on its way any more; else 0."""
        size = len(self.grant.blocks) * lane.groups
        claimed = self.session.claimed.count_in(lane.base, size)
        landed = self.session.landed.count_in(lane.base, size)
        return size - landed if claimed == landed else 0

    @property
    def progress(self) -> str:
        """For people."""
        session, num_blocks = self.session, len(self.grant.blocks)
        if session.size in (0, num_blocks):
            return f"{session.landed.count} of {num_blocks} blocks"
        return f"{session.landed.count} of {session.size} parts of blocks"


@dataclass(frozen=True, slots=True)
class Claim:
    """Permission to receive one chunk, still to be confirmed by `enter` for each write."""

    landing: Landing
    first: int
    count: int
    blocks: tuple[int, ...]
    part: Part
    at: int  # the session's number of the chunk's first piece

    @property
    def lane(self) -> LaneWriter:
        return self.landing.lanes[self.part.lane]
