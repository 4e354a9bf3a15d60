"""The state machine of one transfer on each side. Pure: no clock, socket or thread.

RECEIVER_MOVES and SENDER_MOVES are the specification. A (state, event) pair that is not in them changes nothing. Both
tables ensure that memory is freed (VERIFIED, FAILED, DRAINED) only when no access to it is open. An access is the time
between `enter` and `leave`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtransfer.protocol.plan import Coverage


class State(Enum):
    GRANTED = "granted"  # opened; nothing has arrived from the other side
    SENDING = "sending"  # blocks are being sent
    SENT = "sent"  # every block has arrived (receiver) or was sent (sender)
    VERIFIED = "verified"  # every checksum matched; the receiver's owner may commit
    ABORTING = "aborting"  # the owner aborted; an access may still be open
    QUARANTINED = "quarantined"  # the same, for longer than the grace time
    DRAINED = "drained"  # aborted, and no access is open
    FAILING = "failing"  # cannot complete; an access may still be open
    FAILED = "failed"  # cannot complete, and no access is open


class Event(Enum):
    ANNOUNCED = "announced"  # the sender has announced this transfer on a connection
    COVERED = "covered"  # the last block arrived (receiver) or was written (sender)
    CHECKED = "checked"  # the last checksum matched (receiver), or the receiver reported it (sender)
    ABORTED = "aborted"  # by the owner on this side
    REFUSED = "refused"  # by the other side
    CANCELLED = "cancelled"  # by the other side's owner, because the transfer is no longer needed
    CORRUPT = "corrupt"  # a checksum differs
    MISTAKEN = "mistaken"  # a stamp differs: the bytes are those of another block
    STALE = "stale"  # a block of this side was reassigned in the meantime
    INCOMPLETE = "incomplete"  # the sender has sent its last chunk, but blocks are missing
    CUT = "cut"  # the connection has ended
    EXPIRED = "expired"  # past its deadline or lease
    OVERDUE = "overdue"  # an access stayed open longer than the grace time after an abort
    QUIET = "quiet"  # no access is open


OPEN: Final = (State.GRANTED, State.SENDING, State.SENT)
ENDED: Final = (State.VERIFIED, State.FAILED, State.DRAINED)
FAULTS: Final = (
    Event.REFUSED,
    Event.CANCELLED,
    Event.CORRUPT,
    Event.MISTAKEN,
    Event.STALE,
    Event.INCOMPLETE,
    Event.CUT,
    Event.EXPIRED,
)

Moves = dict[tuple[State, Event], State]

_PROGRESS: Final[Moves] = {
    (State.GRANTED, Event.ANNOUNCED): State.SENDING,
    (State.GRANTED, Event.COVERED): State.SENT,  # a grant without blocks
    (State.SENDING, Event.COVERED): State.SENT,
    (State.SENT, Event.CHECKED): State.VERIFIED,
    **{(state, fault): State.FAILING for state in OPEN for fault in FAULTS},
    (State.FAILING, Event.QUIET): State.FAILED,
}

RECEIVER_MOVES: Final[Moves] = {
    **_PROGRESS,
    **{(state, Event.ABORTED): State.ABORTING for state in (*OPEN, State.FAILING)},
    (State.ABORTING, Event.QUIET): State.DRAINED,
    (State.ABORTING, Event.OVERDUE): State.QUARANTINED,
    (State.QUARANTINED, Event.QUIET): State.DRAINED,
}

# After its own abort, too, the sender's owner gets FAILED: it only needs to know when it may reuse the source blocks.
SENDER_MOVES: Final[Moves] = {
    **_PROGRESS,
    **{(state, Event.ABORTED): State.FAILING for state in OPEN},
}


@dataclass(slots=True)
class Session:
    """One transfer's state, coverage and open accesses.

    It covers `size` pieces; a piece is one block of one part. The sender of each shard announces how many pieces the
    shard has; until then the session `awaits` shards and cannot be complete.

    - `claimed` pieces belong to a chunk that is being transferred or was transferred.
    - `transferred` pieces are in memory (receiver) or were sent (sender).
    - `checked` pieces have a matching checksum.
    """

    moves: Moves
    size: int
    awaits: int = 0
    state: State = State.GRANTED
    accesses: int = 0
    error: str = ""
    fault: Event | None = None  # the first error
    claimed: Coverage = field(init=False)
    transferred: Coverage = field(init=False)
    checked: Coverage = field(init=False)

    def __post_init__(self) -> None:
        self.claimed, self.transferred, self.checked = Coverage(self.size), Coverage(self.size), Coverage(self.size)

    def extend(self, count: int) -> int:
        """Sets the number of pieces of an awaited shard. Returns the number of its first piece."""
        first = self.size
        self.size += count
        self.awaits -= 1
        for coverage in (self.claimed, self.transferred, self.checked):
            coverage.size = self.size
        return first

    @property
    def is_covered(self) -> bool:
        return self.awaits == 0 and self.transferred.is_full

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_cancelled(self) -> bool:
        """Whether an owner abandoned it before any error occurred. This does not count as a failure."""
        return self.fault in (Event.ABORTED, Event.CANCELLED)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def handle(self, event: Event, error: str = "") -> bool:
        """Applies the event, and a QUIET that may follow from it. True if the state changed."""
        after = self.moves.get((self.state, event))
        if after is None:
            return False
        if self.fault is None and (event in FAULTS or event is Event.ABORTED):
            self.fault, self.error = event, error
        self.state = after
        if self.accesses == 0 and event is not Event.QUIET:
            self.handle(Event.QUIET)
        return True

    def claim(self, first: int, count: int) -> bool:
        """Reserves blocks for one chunk. False: the chunk must not access memory."""
        is_inside = first >= 0 and count > 0 and first + count <= self.size
        if not self.is_open or not is_inside or self.claimed.overlaps(first, count):
            return False
        self.claimed.add(first, count)
        return True

    def enter(self) -> bool:
        """Opens an access to memory. False: no access is allowed (any more)."""
        if self.state is not State.SENDING:
            return False
        self.accesses += 1
        return True

    def leave(self) -> bool:
        """Closes an access. True if this changed the state."""
        self.accesses = max(0, self.accesses - 1)
        return self._settle()

    def writer_gone(self, accesses: int | None = None) -> bool:
        """Closes accesses (None: all) whose process, device or thread has ended."""
        self.accesses -= self.accesses if accesses is None else accesses
        return self._settle()

    def mark_transferred(self, first: int, count: int) -> None:
        """The whole chunk is in memory (receiver) or was sent (sender)."""
        self.transferred.add(first, count)
        if self.is_covered:
            self.handle(Event.COVERED)
            self._settle()

    def check(self, first: int, count: int, matches: bool) -> None:
        """The chunk's checksum was compared. The transfer is verified when all pieces are transferred and match."""
        if not matches:
            self.handle(Event.CORRUPT, f"checksum mismatch in blocks {first}..{first + count - 1} of the grant")
            return
        self.checked.add(first, count)
        self._settle()

    def _settle(self) -> bool:
        if self.accesses > 0:
            return False
        if self.state is State.SENT and self.checked.is_full and self.is_covered:
            return self.handle(Event.CHECKED)
        return self.handle(Event.QUIET)
