"""The transfer table of a sender's connection: decides what to send next, and what to report. Pure.

One thread owns it. Transfers take turns by chunks, so a long prompt does not delay a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.protocol import frames
from kvtransfer.protocol.device import Fence
from kvtransfer.protocol.frames import Tag, tag_of
from kvtransfer.protocol.plan import Part, chunks_of
from kvtransfer.protocol.session import SENDER_MOVES, Event, Session, State
from kvtransfer.protocol.transfers import Job, SendTransfer
from kvtransfer.protocol.transport import Sent, TransferStats, count_end
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps


@dataclass(frozen=True, slots=True)
class ReportSent:
    """Report the end to the owner."""

    sent: Sent


@dataclass(frozen=True, slots=True)
class Announce:
    """Announce to the receiver that this transfer uses this connection."""

    tag: Tag
    shard: int = 0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Retract:
    """Send the receiver the message that no more chunks will come."""

    tag: Tag
    error: str
    is_cancelled: bool = False  # the owner no longer needs the transfer; nothing failed


Action = ReportSent | Announce | Retract

_OWN_FAULTS = (Event.ABORTED, Event.INCOMPLETE, Event.STALE)  # the receiver cannot detect these


class StaleSource(Exception):
    """A source block was reassigned before its bytes were sent."""


@dataclass(slots=True)
class SendTransfers:
    block_bytes: int
    stamps: BlockStamps  # of the pool
    stats: TransferStats = field(default_factory=TransferStats)
    stall_s: float = 60.0  # a transfer without a deadline ends after this time without progress
    unconfirmed_s: float = 10.0  # time limit for the confirmation, from the last byte that was sent
    grace_s: float = 0.5  # source blocks may be read for this long after their transfer was abandoned
    is_linked: bool = False
    is_stuck: bool = False  # source blocks are being read long after the end: the connection must be closed
    _open: dict[Tag, SendTransfer] = field(default_factory=dict)
    _ready: deque[Tag] = field(default_factory=deque)
    _unsent: list[Retract] = field(default_factory=list)  # for transfers abandoned before the pair was connected

    @property
    def keys(self) -> list[TransferKey]:
        return [transfer.grant.key for transfer in self._open.values()]

    @property
    def needs_link(self) -> bool:
        return not self.is_linked and (bool(self._unsent) or any(one.grant.blocks for one in self._open.values()))

    @property
    def next_alarm_s(self) -> float | None:
        alarms: list[float] = []
        for one in self._open.values():
            alarms += [at_s for at_s in (one.deadline_at_s, one.lease_at_s) if at_s is not None]
            if one.given_up_at_s is not None:
                alarms.append(one.given_up_at_s + self.grace_s)
        return min(alarms, default=None)

    def start(
        self,
        grant: Grant,
        now_s: float,
        deadline_at_s: float | None,
        error: str = "",
        *,
        shard: int = 0,
        num_shards: int = 1,
        groups: int = 1,
    ) -> list[Action]:
        """Opens the transfer. If `error` is given, it has failed already, and is only reported to the owner.

        This sender fills one of the grant's shards, in `groups` groups of layers.
        """
        tag = tag_of(grant.key)
        assert tag not in self._open, "the sender has refused a key that is in use"
        self.stats.transfers += 1
        size = len(grant.blocks)
        session = Session(SENDER_MOVES, size * groups)
        transfer = SendTransfer(grant, tag, session, deadline_at_s, shard, num_shards, groups, [0] * size)
        self._open[tag] = transfer
        if deadline_at_s is None:
            transfer.lease_at_s = now_s + self.stall_s
        if error:
            transfer.session.handle(Event.REFUSED, error)
        return self._after(transfer, now_s) + self._announce(transfer)

    def push(
        self,
        key: TransferKey,
        blocks: Sequence[tuple[int, int]],
        is_last: bool,
        now_s: float,
        unacknowledged_bytes: int = 0,
        epochs: Sequence[int] | None = None,
        groups: range | None = None,
        after: Fence | None = None,
    ) -> list[Action]:
        """Queues blocks: (grant index, source block). A block that was pushed before fails the transfer, and so does a
        last push that leaves a gap.

        `unacknowledged_bytes`: bytes written to this connection that have not reached the receiver's host. `epochs`: of
        the blocks when they were pushed; None: the current ones. `groups`: groups of layers; None: all. `after` is
        passed to the transport that reads the blocks on a device.
        """
        transfer = self._open.get(tag_of(key))
        if transfer is None or not transfer.session.is_open:
            self.stats.late_messages += 1
            return []
        session = transfer.session
        self._progress(transfer, now_s)
        pushed = self.stamps.epochs([source for _, source in blocks]) if epochs is None else epochs
        for (index, _), epoch in zip(blocks, pushed, strict=True):
            if groups is None or groups.start == 0:
                transfer.epochs[index] = epoch  # for a block in parts, the epoch when the first part was pushed
        if is_last:
            transfer.last_pushed_at_s = now_s
            transfer.early_bytes = max(0, transfer.num_bytes - unacknowledged_bytes)
        num_blocks = len(transfer.grant.blocks)
        for group in range(transfer.groups) if groups is None else groups:
            for chunk in chunks_of(blocks, max(1, num_blocks)):
                if group >= transfer.groups or not session.claim(transfer.at(chunk.first, group), chunk.count):
                    error = f"blocks {chunk.first}..{chunk.first + chunk.count - 1} of {num_blocks} were pushed twice"
                    session.handle(Event.INCOMPLETE, error)
                    return self._after(transfer, now_s)
                transfer.pending.append((chunk, group, after))
        if transfer.pending and transfer.tag not in self._ready:
            self._ready.append(transfer.tag)
        if is_last and not session.claimed.is_full:
            missing = session.size - session.claimed.count
            session.handle(Event.INCOMPLETE, f"the last push leaves {missing} of {transfer.pieces} out")
        elif is_last and session.size == 0:
            session.handle(Event.COVERED)
            session.handle(Event.CHECKED)
        return self._after(transfer, now_s)

    def linked(self) -> list[Action]:
        """The pair is connected."""
        self.is_linked = True
        actions: list[Action] = [*self._unsent]
        self._unsent.clear()
        for transfer in list(self._open.values()):
            actions += self._announce(transfer)
        return actions

    def take(self, limit_blocks: int, now_s: float) -> Job | None:
        """The next chunk to send; its source blocks are being read until `written`."""
        while self._ready:
            tag = self._ready.popleft()
            transfer = self._open.get(tag)
            if transfer is None or not transfer.pending or not transfer.session.enter():
                continue
            waiting, group, after = transfer.pending.popleft()
            chunk, rest = waiting.split(limit_blocks * transfer.groups)
            if rest is not None:
                transfer.pending.appendleft((rest, group, after))
            if transfer.pending:
                self._ready.append(tag)
            if transfer.began_at_s is None:
                transfer.began_at_s = now_s
            part = Part(transfer.shard, group, transfer.groups)
            return Job(transfer, chunk, part, after)
        return None

    def stamp(self, job: Job) -> bytes:
        """The stamps of a chunk. Raises StaleSource if one of its blocks was reassigned.

        Call it once for each chunk, in the order of their frames, after the bytes were copied or their checksum was
        computed. A block that was reassigned before is detected here by its epoch. A block that is reassigned later is
        detected by the checksum.
        """
        content_hashes = self.stamps.content_hashes(job.chunk.sources)
        if stale := self._reused(job):
            raise StaleSource(stale)
        job.transfer.num_stamped += job.chunk.count
        return frames.pack(content_hashes, job.transfer.tag.generation, job.part.mask)

    def stale(self, job: Job, error: str, now_s: float) -> list[Action]:
        """The chunk was not sent, because `stamp` raised. It is no longer read."""
        self.stats.stale_source += 1
        job.transfer.session.handle(Event.STALE, error)
        job.transfer.session.leave()
        return self._after(job.transfer, now_s)

    def written(self, job: Job, now_s: float) -> list[Action]:
        """The chunk's source blocks are no longer read."""
        transfer, session = job.transfer, job.transfer.session
        if session.is_open and (stale := self._reused(job)):
            self.stats.stale_source += 1
            session.handle(Event.STALE, stale)
        num_bytes = job.chunk.count * job.share(self.block_bytes)
        transfer.num_bytes += num_bytes
        self.stats.moved_bytes += num_bytes
        self.stats.chunks += 1
        self._progress(transfer, now_s)
        session.leave()
        if session.is_open:
            session.mark_transferred(transfer.at(job.chunk.first, job.part.group), job.chunk.count)
        if session.state is State.SENT and transfer.num_shards == 1:  # with several shards, each waits for the slowest
            transfer.lease_at_s = now_s + self.unconfirmed_s
        return self._after(transfer, now_s)

    def done(self, tag: Tag, now_s: float, busy_s: float = 0.0) -> list[Action]:
        """The receiver has verified every block. The link was busy for `busy_s`."""
        transfer = self._open.get(tag)
        if transfer is not None:
            transfer.busy_s = busy_s
        if transfer is None or not transfer.session.handle(Event.CHECKED):
            self.stats.late_messages += 1
            return []
        return self._after(transfer, now_s)

    def refused(self, tag: Tag, error: str, now_s: float, *, is_cancelled: bool = False) -> list[Action]:
        """The receiver has abandoned this transfer; with `is_cancelled`, because it is no longer needed."""
        transfer = self._open.get(tag)
        if transfer is None or not transfer.session.is_open:
            self.stats.late_messages += 1
            return []
        transfer.is_announced = False  # the receiver knows
        event = Event.CANCELLED if is_cancelled else Event.REFUSED
        transfer.session.handle(event, f"the receiver refused: {error}")
        return self._after(transfer, now_s)

    def abort(self, key: TransferKey, now_s: float) -> list[Action]:
        transfer = self._open.get(tag_of(key))
        if transfer is None:
            return []
        transfer.session.handle(Event.ABORTED, "aborted by the sender")
        return self._after(transfer, now_s)

    def fail(self, key: TransferKey, error: str, now_s: float) -> list[Action]:
        """The owner cannot complete the transfer, for example because another part has failed. No-op if it has
        ended."""
        transfer = self._open.get(tag_of(key))
        if transfer is None:
            return []
        # INCOMPLETE is retracted at the receiver even if the transfer was not announced to it
        transfer.session.handle(Event.INCOMPLETE, error)
        return self._after(transfer, now_s)

    def cut(self, error: str, now_s: float) -> list[Action]:
        """The connection has ended, and no source block is read for it any more."""
        self.is_linked = False
        self._unsent.clear()
        actions: list[Action] = []
        for transfer in list(self._open.values()):
            transfer.is_announced = False
            transfer.session.handle(Event.CUT, error)
            transfer.session.writer_gone()
            actions += self._after(transfer, now_s)
        return actions

    def expire(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for transfer in list(self._open.values()):
            if transfer.given_up_at_s is not None and transfer.given_up_at_s + self.grace_s <= now_s:
                transfer.given_up_at_s = None
                self.is_stuck = True
            if transfer.deadline_at_s is not None and transfer.deadline_at_s <= now_s:
                seen = f"{transfer.session.transferred.count} of {transfer.pieces} were sent"
                transfer.session.handle(Event.EXPIRED, f"the deadline passed when {seen}")
                transfer.deadline_at_s = None
                actions += self._after(transfer, now_s)
            elif transfer.lease_at_s is not None and transfer.lease_at_s <= now_s:
                if transfer.session.state is State.SENT:
                    why = f"the receiver did not confirm it within {self.unconfirmed_s:g} s of its last block"
                else:
                    why = f"nothing was pushed or taken for {self.stall_s:g} s"
                transfer.session.handle(Event.EXPIRED, why)
                transfer.lease_at_s = None
                actions += self._after(transfer, now_s)
        return actions

    def _progress(self, transfer: SendTransfer, now_s: float) -> None:
        if transfer.lease_at_s is not None and transfer.session.state is not State.SENT:
            transfer.lease_at_s = now_s + self.stall_s

    def _reused(self, job: Job) -> str:
        """The error if a source block was reassigned since it was pushed; otherwise empty."""
        sources, first = job.chunk.sources, job.chunk.first
        index = self.stamps.first_reused(sources, job.transfer.epochs[first : first + len(sources)])
        return "" if index is None else f"source block {sources[index]} was reassigned while it was being sent"

    def _announce(self, transfer: SendTransfer) -> list[Action]:
        if not self.is_linked or not transfer.grant.blocks or not transfer.session.handle(Event.ANNOUNCED):
            return []
        transfer.is_announced = True
        return [Announce(transfer.tag, transfer.shard, transfer.groups)]

    def _after(self, transfer: SendTransfer, now_s: float) -> list[Action]:
        actions: list[Action] = []
        session = transfer.session
        if not session.is_open:
            transfer.pending.clear()
            transfer.lease_at_s = None
            if transfer.given_up_at_s is None and not self.is_stuck:
                transfer.given_up_at_s = now_s
        if transfer.is_announced and not session.is_open and session.state is not State.VERIFIED:
            transfer.is_announced = False
            actions.append(Retract(transfer.tag, session.error, session.is_cancelled))
        elif session.fault in _OWN_FAULTS and not self.is_linked and session.has_ended and transfer.grant.blocks:
            self._unsent.append(Retract(transfer.tag, session.error, session.is_cancelled))
        if session.has_ended and self._open.pop(transfer.tag, None) is not None:
            count_end(self.stats, session)
            if session.state is State.VERIFIED:
                self.stats.bytes += transfer.num_bytes
            actions.append(ReportSent(transfer.sent(now_s)))
        return actions
