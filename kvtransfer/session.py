"""Life of one transfer, as each side sees it. Pure: no clock, socket or thread.

RECEIVER_MOVES and SENDER_MOVES are the specification; an (state, event) pair that is not in them changes
nothing. The rule that both tables keep: memory is handed back (VERIFIED, FAILED, DRAINED) only when no
access to it is open, where an access is the stretch between `enter` and `leave` of whoever moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtransfer.plan import Coverage


class State(Enum):
    GRANTED = "granted"  # opened; the other side has not been heard of
    SENDING = "sending"  # blocks are on their way
    SENT = "sent"  # every block has landed (receiver) or is on the wire (sender)
    VERIFIED = "verified"  # every checksum matched; the receiver's owner may commit
    ABORTING = "aborting"  # the owner gave up; an access may still be open
    QUARANTINED = "quarantined"  # the same, for longer than the grace time
    DRAINED = "drained"  # aborted, and no access is open
    FAILING = "failing"  # cannot complete; an access may still be open
    FAILED = "failed"  # cannot complete, and no access is open


class Event(Enum):
    ANNOUNCED = "announced"  # the pair is connected and speaks of this transfer
    COVERED = "covered"  # the last block landed (receiver) or was written (sender)
    CHECKED = "checked"  # the last checksum matched (receiver) or the receiver says so (sender)
    ABORTED = "aborted"  # by the owner on this side
    REFUSED = "refused"  # by the other side
    CANCELLED = "cancelled"  # by the other side's owner, since nobody needs the transfer any more
    CORRUPT = "corrupt"  # a checksum differs
    MISTAKEN = "mistaken"  # a stamp differs: these are the bytes of another block
    STALE = "stale"  # a block of ours was handed out again meanwhile
    INCOMPLETE = "incomplete"  # the sender's last word, and blocks are missing
    CUT = "cut"  # the connection is gone
    EXPIRED = "expired"  # past the deadline
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
    (State.GRANTED, Event.COVERED): State.SENT,  # a grant of nothing
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

# The sender's owner hears FAILED after its own abort too: all it asks is when it may reuse the source blocks.
SENDER_MOVES: Final[Moves] = {
    **_PROGRESS,
    **{(state, Event.ABORTED): State.FAILING for state in OPEN},
}


@dataclass(slots=True)
class Session:
    """One transfer's state, coverage and open accesses.

    It covers `size` pieces, each a block of one part. A receiver learns from each lane's sender how many pieces that
    lane has; until then it `awaits` lanes, and nothing is complete. `claimed` pieces belong to a chunk that is being
    moved or has been; `landed` ones are in memory (receiver) or on the wire (sender); `checked` ones have a matching
    checksum.
    """

    moves: Moves
    size: int
    awaits: int = 0
    state: State = State.GRANTED
    accesses: int = 0
    error: str = ""
    fault: Event | None = None  # the first thing that went wrong
    claimed: Coverage = field(init=False)
    landed: Coverage = field(init=False)
    checked: Coverage = field(init=False)

    def __post_init__(self) -> None:
        self.claimed, self.landed, self.checked = Coverage(self.size), Coverage(self.size), Coverage(self.size)

    def extend(self, count: int) -> int:
        """An awaited lane has `count` pieces; the number of its first."""
        first = self.size
        self.size += count
        self.awaits -= 1
        for coverage in (self.claimed, self.landed, self.checked):
            coverage.size = self.size
        return first

    @property
    def is_covered(self) -> bool:
        return self.awaits == 0 and self.landed.is_full

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_cancelled(self) -> bool:
        """An owner gave it up before anything went wrong: that is no failure of the transfer."""
        return self.fault in (Event.ABORTED, Event.CANCELLED)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def handle(self, event: Event, error: str = "") -> bool:
        """Takes the event; True where the state changed, a following QUIET included."""
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
        """Reserves blocks for one chunk; False where the chunk must not touch memory."""
        is_inside = first >= 0 and count > 0 and first + count <= self.size
        if not self.is_open or not is_inside or self.claimed.overlaps(first, count):
            return False
        self.claimed.add(first, count)
        return True

    def enter(self) -> bool:
        """Opens an access to memory; False where nothing may be touched (any more)."""
        if self.state is not State.SENDING:
            return False
        self.accesses += 1
        return True

    def leave(self) -> bool:
        """Closes an access; True where this changed the state."""
        self.accesses = max(0, self.accesses - 1)
        return self._settle()

    def writer_gone(self, accesses: int | None = None) -> bool:
        """The process, device or thread that held so many accesses, or all, has ended: they are not open."""
        self.accesses -= self.accesses if accesses is None else accesses
        return self._settle()

    def land(self, first: int, count: int) -> None:
        """The whole chunk is in memory, or on the wire."""
        self.landed.add(first, count)
        if self.is_covered:
            self.handle(Event.COVERED)
            self._settle()

    def check(self, first: int, count: int, matches: bool) -> None:
        """The chunk's checksum was compared. The transfer is verified when all have landed and all match."""
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
