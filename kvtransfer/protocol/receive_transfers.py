"""The transfer table of a receiver: decides which connection may write where, and what to report. Pure: time is passed
as `now_s`.

Methods change the table and return the actions to execute, in order. The caller holds one lock during each call. A
`writer` is the caller's number of a connection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtransfer.protocol import frames
from kvtransfer.protocol.device import Fence
from kvtransfer.protocol.frames import Tag, tag_of
from kvtransfer.protocol.plan import WHOLE, Part
from kvtransfer.protocol.session import RECEIVER_MOVES, Event, Session, State
from kvtransfer.protocol.transfers import OUTCOMES, Claim, ReceiveTransfer, ShardWriter
from kvtransfer.protocol.transport import Received, TransferStats, count_end
from pdserve.core.durations import Alarms
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps

REMEMBERED: Final = 4096  # ended transfers whose outcome is kept for late senders


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """Report the end, or the quarantine, to the owner."""

    received: Received


@dataclass(frozen=True, slots=True)
class ReplyToSender:
    """Send the sender the outcome of its transfer."""

    writer: int
    tag: Tag
    is_verified: bool
    error: str = ""
    busy_s: float = 0.0
    is_cancelled: bool = False  # the owner no longer needs the transfer; nothing failed


@dataclass(frozen=True, slots=True)
class Sever:
    """Close this connection, because nothing else can end a write that it has open."""

    writer: int


Action = ReportReceived | ReplyToSender | Sever


@dataclass(slots=True)
class ReceiveTransfers:
    """A write may stay open for `grace_s` after an abort; then QUARANTINED is reported to the owner.

    `quarantine_s` later the write's connection is closed, which ends the write. After a failure the connection is
    closed as soon as `grace_s` is over. A transfer without a deadline ends `unclaimed_s` after its grant if no sender
    announces it, and otherwise `stall_s` after its last block.
    """

    stamps: BlockStamps  # of the pool
    stats: TransferStats = field(default_factory=TransferStats)
    grace_s: float = 0.5
    quarantine_s: float = 4.0
    stall_s: float = 60.0
    unclaimed_s: float = 120.0
    _open: dict[Tag, ReceiveTransfer] = field(default_factory=dict)
    #: is_verified, error and is_cancelled of ended transfers, for late senders.
    _ended: OrderedDict[Tag, tuple[bool, str, bool]] = field(default_factory=OrderedDict)
    _alarms: Alarms[Tag] = field(default_factory=Alarms)  # of open transfers: when the next timeout is due

    @property
    def keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        return [transfer.grant.key for transfer in self._open.values()]

    @property
    def next_alarm_s(self) -> float | None:
        """When `expire` has something to do next."""
        return self._alarms.next_at_s

    def expect(
        self,
        grant: Grant,
        now_s: float,
        deadline_at_s: float | None,
        content_hashes: Sequence[int] | None = None,
        after: Fence | None = None,
    ) -> list[Action]:
        """Opens the grant. Raises InvalidRequest if the key is open already, which is an error of the owner.

        `after` is passed to the transport that writes the blocks on a device.
        """
        tag, size = tag_of(grant.key), len(grant.blocks)
        if content_hashes is not None and len(content_hashes) != size:
            seen = f"{len(content_hashes)} hashes"
            raise InvalidRequest("content_hashes", seen, f"{size}, one for each granted block")
        if tag in self._open:
            raise InvalidRequest("grant.key", grant.key, "one that is not expected already")
        self._ended.pop(tag, None)
        transfer = ReceiveTransfer(
            grant,
            tag,
            Session(RECEIVER_MOVES, 0, awaits=1 if size else 0),
            deadline_at_s,
            None if content_hashes is None else tuple(content_hashes),
            self.stamps.epochs(grant.blocks),
            after,
        )
        self._open[tag] = transfer
        self.stats.transfers += 1
        if deadline_at_s is None:
            transfer.lease_at_s = now_s + self.unclaimed_s
        self._alarms.set(tag, now_s + self.unclaimed_s if deadline_at_s is None else deadline_at_s)
        if not grant.blocks:
            transfer.session.handle(Event.COVERED)
            transfer.session.writer_gone()
        return self._after(transfer, now_s)

    def announce(
        self, tag: Tag, writer: int, shard: int = 0, groups: int = 1, now_s: float = 0.0, num_shards: int = 1
    ) -> list[Action]:
        """A sender announces that it will write a shard, in `groups` groups of layers. The transfer ends with the
        sender's connection.

        `num_shards` of the sender's ranks fill the blocks. The first announcement sets this number. A shard has one
        writer; a second one is rejected.
        """
        transfer = self._open.get(tag)
        if transfer is None and tag in self._ended:
            is_verified, error, is_cancelled = self._ended[tag]
            return [ReplyToSender(writer, tag, is_verified, error, is_cancelled=is_cancelled)]
        if transfer is None or not transfer.session.is_open:
            self.stats.late_messages += 1
            return [ReplyToSender(writer, tag, False, "the receiver does not expect this transfer")]
        known = transfer.shards.get(shard)
        if known is not None and (known.writer, known.groups) == (writer, groups):
            return []
        expected = transfer.num_shards or num_shards
        if known is not None or num_shards != expected or not 0 <= shard < expected:
            self.stats.late_messages += 1
            why = "has its writer" if known is not None else f"is not of {expected}"
            return [
                ReplyToSender(writer, tag, False, f"the receiver does not expect this transfer: shard {shard} {why}")
            ]
        if transfer.num_shards is None:
            transfer.num_shards = transfer.session.awaits = num_shards
        base = transfer.session.extend(len(transfer.grant.blocks) * groups)
        transfer.shards[shard] = ShardWriter(writer, groups, base)
        transfer.session.handle(Event.ANNOUNCED)
        self._progress(transfer, now_s)
        return []

    def claim(self, tag: Tag, writer: int, first: int, stamps: bytes, now_s: float, part: Part = WHOLE) -> Claim | None:
        """A claim if a chunk with these stamps may be written. None: discard the payload, then call `review`."""
        count = len(stamps) // frames.STAMP_BYTES
        transfer = self._open.get(tag)
        shard = None if transfer is None else transfer.shard(writer, part)
        if transfer is None or shard is None or not transfer.session.is_open:
            self.stats.late_messages += 1
            return None
        num_blocks = len(transfer.grant.blocks)
        at = shard.base + part.group * num_blocks + first
        if first + count > num_blocks or not transfer.session.claim(at, count):
            self.stats.duplicate_chunks += 1
            return None
        if wrong := transfer.stamp_error(first, stamps, part):
            self.stats.stamp_mismatches += 1
            transfer.session.handle(Event.MISTAKEN, wrong)
            return None
        if transfer.first_byte_at_s is None:
            transfer.first_byte_at_s = now_s
        self.stats.chunks += 1
        transfer.busy.begin(now_s)
        return Claim(transfer, first, count, transfer.grant.blocks[first : first + count], part, at)

    def enter(self, claim: Claim) -> bool:
        """Opens one write. False: the transfer has ended, and no byte may be written; then call `review`."""
        if self._is_reused(claim) or not claim.transfer.session.enter():
            return False
        claim.shard.accesses += 1
        return True

    def review(self, tag: Tag, now_s: float) -> list[Action]:
        """The actions after `claim` or `enter` was refused."""
        transfer = self._open.get(tag)
        return [] if transfer is None else self._after(transfer, now_s)

    def leave(self, claim: Claim, now_s: float) -> list[Action]:
        """Closes the write."""
        claim.shard.accesses -= 1
        claim.transfer.session.leave()
        return self._after(claim.transfer, now_s)

    def settle(self, claim: Claim, num_bytes: int, matches: bool, is_last: bool, now_s: float) -> list[Action]:
        """The chunk is in memory, and its checksum was compared. `is_last`: the sender will send no more chunks."""
        session = claim.transfer.session
        if not session.is_open:
            return []
        if self._is_reused(claim):
            return self._after(claim.transfer, now_s)
        claim.transfer.num_bytes += num_bytes
        claim.transfer.busy.end(now_s)
        self._progress(claim.transfer, now_s)
        session.mark_transferred(claim.at, claim.count)
        session.check(claim.at, claim.count, matches)
        self.stats.checksum_mismatches += not matches
        claim.shard.has_sent_last |= is_last
        missing = claim.transfer.missing(claim.shard) if claim.shard.has_sent_last else 0
        if missing:
            pieces = "blocks" if claim.part.groups == 1 else "parts of blocks"
            size = len(claim.transfer.grant.blocks) * claim.part.groups
            session.handle(Event.INCOMPLETE, f"{missing} of {size} {pieces} did not arrive")
        return self._after(claim.transfer, now_s)

    def retract(self, tag: Tag, writer: int, error: str, now_s: float, *, is_cancelled: bool = False) -> list[Action]:
        """The sender abandons the transfer; with `is_cancelled`, because it is no longer needed."""
        transfer = self._open.get(tag)
        shards = [] if transfer is None else transfer.of(writer)
        # A sender may retract a grant without having announced it, as long as no other sender has.
        if transfer is None or (transfer.shards and not shards):
            self.stats.late_messages += 1
            return []
        for shard in shards:
            shard.is_answered = True
        event = Event.CANCELLED if is_cancelled else Event.REFUSED
        transfer.session.handle(event, f"the sender gave up: {error}")
        return self._after(transfer, now_s)

    def abort(self, key: TransferKey, now_s: float) -> list[Action]:
        """The owner aborts. No-op if the transfer has ended or was never expected."""
        transfer = self._open.get(tag_of(key))
        if transfer is None or not transfer.session.handle(Event.ABORTED, "aborted by the receiver"):
            return []
        return self._after(transfer, now_s)

    def fail(self, key: TransferKey, error: str, now_s: float) -> list[Action]:
        """Another rank's part of the transfer has failed. No-op if this part has ended."""
        transfer = self._open.get(tag_of(key))
        if transfer is None or not transfer.session.handle(Event.REFUSED, error):
            return []
        return self._after(transfer, now_s)

    def cut(self, writer: int, error: str, now_s: float) -> list[Action]:
        """The connection has ended, and its thread no longer writes."""
        actions: list[Action] = []
        for transfer in [one for one in self._open.values() if one.of(writer)]:
            transfer.session.handle(Event.CUT, error)
            for shard in transfer.of(writer):
                shard.is_answered = True  # there is no sender to answer
                transfer.session.writer_gone(shard.accesses)
                shard.accesses = 0
            actions += self._after(transfer, now_s)
        return actions

    def fail_all(self, error: str, now_s: float) -> list[Action]:
        """This side cannot receive any more. Transfers with open writes end when these are closed."""
        actions: list[Action] = []
        for transfer in list(self._open.values()):
            transfer.session.handle(Event.CUT, error)
            actions += self._after(transfer, now_s)
        return actions

    def expire(self, now_s: float) -> list[Action]:
        """Ends transfers that are past their deadline or lease, and quarantines aborted ones whose writes stay open."""
        actions: list[Action] = []
        while (tag := self._alarms.pop_due(now_s)) is not None:
            transfer = self._open[tag]
            if transfer.deadline_at_s is not None and transfer.deadline_at_s <= now_s:
                transfer.session.handle(Event.EXPIRED, f"the deadline passed when {transfer.progress} had arrived")
            if transfer.lease_at_s is not None and transfer.lease_at_s <= now_s:
                why = "no sender announced it" if not transfer.shards else f"no block came for {self.stall_s:g} s"
                transfer.session.handle(Event.EXPIRED, f"{why}; {transfer.progress} had arrived")
            actions += self._after(transfer, now_s)
            actions += self._end_writes(transfer, now_s)
            if transfer.lease_at_s is not None and transfer.session.is_open:
                self._alarms.set(tag, transfer.lease_at_s)
        return actions

    def _progress(self, transfer: ReceiveTransfer, now_s: float) -> None:
        if transfer.lease_at_s is not None:
            transfer.lease_at_s = max(transfer.lease_at_s, now_s + self.stall_s)

    def _end_writes(self, transfer: ReceiveTransfer, now_s: float) -> list[Action]:
        """Quarantine and then closed connections, if writes stay open after their transfer was abandoned."""
        if transfer.given_up_at_s is None or transfer.session.has_ended:
            return []
        overdue_at_s = transfer.given_up_at_s + self.grace_s
        if overdue_at_s > now_s:
            return []
        actions: list[Action] = []
        if transfer.session.handle(Event.OVERDUE):
            self._alarms.set(transfer.tag, overdue_at_s + self.quarantine_s)
            actions += self._after(transfer, now_s)
        is_waiting = transfer.session.state is State.QUARANTINED and overdue_at_s + self.quarantine_s > now_s
        if not is_waiting and not transfer.is_severed:
            transfer.is_severed = True
            writers = {shard.writer for shard in transfer.shards.values() if shard.accesses}
            self.stats.severed += len(writers)
            actions += [Sever(writer) for writer in sorted(writers)]
        return actions

    def _is_reused(self, claim: Claim) -> bool:
        """Whether a block of the claim was reassigned. This is an error of the owner, and ends the transfer."""
        transfer = claim.transfer
        index = self.stamps.first_reused(claim.blocks, transfer.epochs[claim.first : claim.first + claim.count])
        if index is None:
            return False
        error = f"block {claim.blocks[index]} was reassigned while it was granted"
        if transfer.session.handle(Event.STALE, error):
            self.stats.stale_target += 1
        return True

    def _after(self, transfer: ReceiveTransfer, now_s: float) -> list[Action]:
        """The actions after a change of state. Each is returned once."""
        actions: list[Action] = []
        session = transfer.session
        is_verified, busy_s = session.state is State.VERIFIED, transfer.busy.total_s
        for shard in () if session.is_open else transfer.shards.values():
            if not shard.is_answered:
                shard.is_answered = True
                answer = ReplyToSender(
                    shard.writer, transfer.tag, is_verified, session.error, busy_s, session.is_cancelled
                )
                actions.append(answer)
        if not session.is_open and not session.has_ended and transfer.given_up_at_s is None:
            transfer.given_up_at_s = now_s
            self._alarms.set(transfer.tag, now_s + self.grace_s)
        outcome = OUTCOMES.get(session.state)
        if outcome is None or transfer.reported is session.state:
            return actions
        transfer.reported = session.state
        count_end(self.stats, session)
        if session.has_ended:
            del self._open[transfer.tag]
            self._alarms.clear(transfer.tag)
            # A grant is used once: a second announcement is an error, unless the grant is empty.
            is_spent = is_verified and bool(transfer.grant.blocks)
            error = "the transfer was verified before" if is_spent else session.error
            self._ended[transfer.tag] = (is_verified and not is_spent, error, session.is_cancelled)
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        if is_verified:
            self.stats.bytes += transfer.num_bytes
        actions.append(ReportReceived(transfer.received(outcome, now_s)))
        return actions
