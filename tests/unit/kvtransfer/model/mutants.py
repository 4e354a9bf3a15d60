"""Seeded errors in the product's transfer tables. The checker must find each of them, with a trace.

A guard is not listed if the checker does not notice its removal: it is unnecessary, or it is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from kvtransfer.protocol import frames, receive_transfers, send_transfers, session
from kvtransfer.protocol.frames import Tag
from kvtransfer.protocol.plan import Coverage
from kvtransfer.protocol.receive_transfers import ReceiveTransfers
from kvtransfer.protocol.send_transfers import SendTransfers
from kvtransfer.protocol.session import RECEIVER_MOVES, SENDER_MOVES, Event, Session, State
from kvtransfer.protocol.transfers import Claim
from tests.unit.kvtransfer.model.scenarios import scenario
from tests.unit.kvtransfer.model.wire import Scenario

Apply = Callable[[pytest.MonkeyPatch], None]
ONE: Final = scenario(transfers=1, faults=1)
LEASED: Final = scenario(transfers=1, faults=1, deadline_s=None)
SMALL: Final = scenario(faults=1)
TWO_CONNECTIONS: Final = scenario(faults=2, kinds=frozenset(("cut", "duplicates")))
TWO_BLOCKS: Final = scenario(blocks=2, transfers=1, faults=1)


@dataclass(frozen=True, slots=True)
class Mutant:
    """`invariant` is the one whose violation has the shortest trail."""

    name: str
    invariant: str
    apply: Apply
    scenario: Scenario = ONE


def _move(table: session.Moves, at: State, event: Event, to: State | None) -> Apply:
    def apply(patch: pytest.MonkeyPatch) -> None:
        if to is None:
            patch.delitem(table, (at, event))
        else:
            patch.setitem(table, (at, event), to)

    return apply


def _without_generation(patch: pytest.MonkeyPatch) -> None:
    whole = frames.tag_of
    for module in (receive_transfers, send_transfers):
        patch.setattr(module, "tag_of", lambda key: whole(key)._replace(generation=0))


def _enter_in_any_state(patch: pytest.MonkeyPatch) -> None:
    def enter(self: Session) -> bool:
        self.accesses += 1
        return True

    patch.setattr(Session, "enter", enter)


def _uncounted_access(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "enter", lambda self: self.state is State.SENDING)


def _quiet_at_once(patch: pytest.MonkeyPatch) -> None:
    handle = Session.handle

    def hasty(self: Session, event: Event, error: str = "") -> bool:
        has_changed = handle(self, event, error)
        if self.state is State.ABORTING:
            handle(self, Event.QUIET)
        return has_changed

    patch.setattr(Session, "handle", hasty)


def _all_checksums_match(patch: pytest.MonkeyPatch) -> None:
    check = Session.check
    patch.setattr(Session, "check", lambda self, first, count, matches: check(self, first, count, True))


def _one_block_is_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coverage, "is_full", property(lambda self: self.count >= min(1, self.size)))


def _any_writer(patch: pytest.MonkeyPatch) -> None:
    claim = ReceiveTransfers.claim

    def careless(
        self: ReceiveTransfers, tag: Tag, writer: int, first: int, stamps: bytes, now_s: float
    ) -> Claim | None:
        transfer = self._open.get(tag)
        known = writer if transfer is None or not transfer.shards else transfer.shards[0].writer
        return claim(self, tag, known, first, stamps, now_s)

    patch.setattr(ReceiveTransfers, "claim", careless)


def _cut_hits_everybody(patch: pytest.MonkeyPatch) -> None:
    cut = ReceiveTransfers.cut

    def wide(self: ReceiveTransfers, writer: int, error: str, now_s: float) -> list[receive_transfers.Action]:
        for transfer in self._open.values():
            for shard in transfer.shards.values():
                shard.writer = writer
        return cut(self, writer, error, now_s)

    patch.setattr(ReceiveTransfers, "cut", wide)


def _cut_leaves_accesses_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "writer_gone", lambda self, accesses=None: False)


def _deaf_to_deadlines(patch: pytest.MonkeyPatch) -> None:
    def expire(self: SendTransfers, now_s: float) -> list[send_transfers.Action]:
        for transfer in self._open.values():
            transfer.deadline_at_s = None
        return []

    patch.setattr(SendTransfers, "expire", expire)


def _ended_is_an_error(patch: pytest.MonkeyPatch) -> None:
    """A late chunk fails an assertion instead of being counted."""
    claim = ReceiveTransfers.claim

    def strict(self: ReceiveTransfers, tag: Tag, writer: int, first: int, stamps: bytes, now_s: float) -> Claim | None:
        assert tag in self._open, "a chunk of a transfer that has ended"
        return claim(self, tag, writer, first, stamps, now_s)

    patch.setattr(ReceiveTransfers, "claim", strict)


def _never_forgotten(patch: pytest.MonkeyPatch) -> None:
    after = SendTransfers._after

    def keeping(self: SendTransfers, transfer: Any, now_s: float) -> list[send_transfers.Action]:
        actions = after(self, transfer, now_s)
        self._open[transfer.tag] = transfer
        return actions

    patch.setattr(SendTransfers, "_after", keeping)


def _without(table: session.Moves, event: Event) -> Apply:
    def apply(patch: pytest.MonkeyPatch) -> None:
        for at in session.OPEN:
            patch.delitem(table, (at, event))

    return apply


SENDING_LATE: Final = State.SENDING, Event.EXPIRED
OVERDUE: Final = State.ABORTING, Event.OVERDUE
R, S = RECEIVER_MOVES, SENDER_MOVES
MUTANTS: Final = (
    Mutant("the generation is not part of a tag", "sent means verified", _without_generation, SMALL),
    Mutant("a write may begin in any state", "no old writer", _enter_in_any_state),
    Mutant("drained is reported with an access open", "no old writer", _quiet_at_once),
    Mutant(
        "a failure is reported with an access open",
        "no old writer",
        _move(R, State.SENDING, Event.EXPIRED, State.FAILED),
    ),
    Mutant(
        "an overdue access is taken for none", "no old writer", _move(R, State.ABORTING, Event.OVERDUE, State.DRAINED)
    ),
    Mutant("the end of a connection closes the accesses of others", "no old writer", _cut_hits_everybody, SMALL),
    Mutant("any connection may bring a chunk", "no old writer", _any_writer, TWO_CONNECTIONS),
    Mutant("all checksums match", "only whole and right", _all_checksums_match),
    Mutant("one block is all blocks", "only whole and right", _one_block_is_all, TWO_BLOCKS),
    Mutant("a quarantine has no end", "freed in time", _move(R, State.QUARANTINED, Event.QUIET, None)),
    Mutant("the receiver knows no deadline", "freed in time", _without(R, Event.EXPIRED)),
    Mutant("the sender knows no lease", "freed in time", _without(S, Event.EXPIRED), LEASED),
    Mutant("the sender knows no deadline", "freed in time", _without(S, Event.EXPIRED)),
    Mutant("the sender's clock is deaf", "freed in time", _deaf_to_deadlines),
    Mutant("a cut leaves the sender's access open", "freed in time", _cut_leaves_accesses_open),
    Mutant("the sender reads without an access", "sources kept", _uncounted_access),
    Mutant("the sender fails while it reads", "sources kept", _move(S, *SENDING_LATE, State.FAILED)),
    Mutant("an ended transfer stays in the sender's table", "one end", _never_forgotten),
    Mutant("sent when written", "sent means verified", _move(S, State.SENDING, Event.COVERED, State.VERIFIED)),
    Mutant("a late chunk is asserted on", "no crash", _ended_is_an_error),
)
