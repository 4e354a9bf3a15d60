"""The interface of KV transfer to workers: Sender, Receiver, how transfers end, and counters. Pure.

A decode worker grants blocks to its Receiver; a prefill worker pushes blocks to its Sender. Both are thread-safe and
never block their caller on the network. Their callbacks may come from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final, Protocol

from kvtransfer.protocol.session import Event, Session, State
from pdserve.core.kv.kv_shape import Grant, TransferKey

# --- counters of an endpoint ----------------------------------------------------------------------------------
# Named for use in metrics.


@dataclass(slots=True)
class TransferStats:
    transfers: int = 0  # opened: expected (receiver) or started (sender)
    verified: int = 0  # ended with every block verified (receiver) or acknowledged (sender)
    failed: int = 0
    cancelled: int = 0  # abandoned by an owner on either side, because it was no longer needed
    expired: int = 0  # failed because they were past their deadline
    cut: int = 0  # failed because the connection was lost
    quarantined: int = 0  # cancelled, and a write was still open after the grace time
    bytes: int = 0  # payload of verified (receiver) or acknowledged (sender) transfers
    moved_bytes: int = 0  # sender: payload that is no longer read, with any outcome of its transfer
    chunks: int = 0  # accepted (receiver) or sent (sender)
    late_messages: int = 0  # for transfers that are unknown, replaced or ended
    duplicate_chunks: int = 0  # dropped because they overlap blocks that have arrived or are arriving
    silent: int = 0  # connections that ended because the peer was silent
    severed: int = 0  # connections that were closed to end a write in quarantine
    checksum_mismatches: int = 0
    stamp_mismatches: int = 0  # stamps of another prompt, grant or layer group
    stale_source: int = 0  # transfers that failed because a source block was reassigned while it was needed
    stale_target: int = 0  # transfers that failed because a granted block was reassigned
    refused_opens: int = 0  # rejected handshakes
    refused_connections: int = 0  # no greeting of this version, no valid ticket, or too many
    unproven: int = 0  # peers that did not prove that they know the cluster's secret
    protocol_errors: int = 0  # connections that were closed because of what they sent


EVENTS: Final = (  # counters for operators; throughput is measured where it is used
    "cancelled",
    "expired",
    "cut",
    "quarantined",
    "late_messages",
    "duplicate_chunks",
    "silent",
    "severed",
    "checksum_mismatches",
    "stamp_mismatches",
    "stale_source",
    "stale_target",
    "refused_opens",
    "refused_connections",
    "unproven",
    "protocol_errors",
)


def events(stats: TransferStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in EVENTS}


def total(parts: Iterable[TransferStats]) -> TransferStats:
    listed = list(parts)
    return TransferStats(**{one.name: sum(getattr(part, one.name) for part in listed) for one in fields(TransferStats)})


def count_end(stats: TransferStats, session: Session) -> None:
    """Counts a session that has just ended or, on the receiver, was quarantined."""
    stats.verified += session.state is State.VERIFIED
    stats.failed += session.state is State.FAILED and not session.is_cancelled
    stats.cancelled += session.state in (State.DRAINED, State.FAILED) and session.is_cancelled
    stats.expired += session.state is State.FAILED and session.fault is Event.EXPIRED
    stats.cut += session.state is State.FAILED and session.fault is Event.CUT
    stats.quarantined += session.state is State.QUARANTINED


# --- sender and receiver --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """How KV is sent to one decode worker."""

    worker_id: str
    endpoint: str
    transport: str
    reason: str  # why this transport was chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The data for converting a sequence to another shape: its length, and the content hashes of its blocks.

    `own`: of the sender's blocks, from the first that contains a token to send. `theirs`: of the granted blocks
    (`Attempt.content_hashes`).
    """

    num_tokens: int
    own: tuple[int, ...]
    theirs: tuple[int, ...]


#: Faults of transfers that an owner on either side abandoned because they were not needed. These are no failures.
CANCELLED: Final = ("aborted", "cancelled")


class ReceiveOutcome(Enum):
    VERIFIED = "verified"  # every granted block arrived and its checksum matched
    FAILED = "failed"  # incomplete or damaged; the memory is safe to free
    DRAINED = "drained"  # after an abort: no writer is active; the memory is safe to free
    QUARANTINED = "quarantined"  # after an abort: a writer may be active; DRAINED follows once it has provably ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    key: TransferKey
    outcome: ReceiveOutcome
    num_bytes: int = 0
    transfer_s: float = 0.0  # first byte to verification, on this host's monotonic clock
    busy_s: float = 0.0  # the part of it with chunks in transfer
    error: str = ""
    fault: str = ""  # the kind of error: session.Event

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
    exposed_s: float = 0.0  # from the last push to the receiver's confirmation: the part that prefill did not hide
    early_bytes: int = 0  # bytes that the receiver's host had acknowledged at the last push
    error: str = ""
    fault: str = ""  # the kind of error: session.Event
    wire_dtype: str = ""  # dtype in which the values were sent; empty: as they are stored

    @property
    def is_cancelled(self) -> bool:
        return self.fault in CANCELLED


OnOpen = Callable[[], None]


class Receiver(Protocol):
    """The decode side. It owns no blocks, and writes only into blocks of an open grant."""

    @property
    def is_healthy(self) -> bool:
        """False if it cannot receive any more; the worker then exits."""
        ...

    @property
    def stats(self) -> TransferStats: ...

    @property
    def rank_endpoints(self) -> tuple[str, ...]:
        """Endpoints of the worker's ranks 1, 2, .. (`Grant.rank_endpoints`)."""
        ...

    def expect(
        self,
        grant: Grant,
        on_end: Callable[[Received], None],
        deadline_s: float | None = None,
        content_hashes: Sequence[int] | None = None,
        on_open: OnOpen | None = None,
    ) -> bool:
        """Opens the grant for writing. `on_end` is called once with VERIFIED or FAILED, or through abort().

        `content_hashes` are those that the granted blocks must have (`Attempt.content_hashes`); None: not checked.

        True: the grant may be sent to a sender. False: not yet, because other ranks must open it too. `on_open` is
        called when they have, never from inside this call, and not if the transfer has ended before.
        """
        ...

    def abort(self, key: TransferKey) -> None:
        """Ends the transfer; on_end is called with DRAINED, or QUARANTINED then DRAINED. Idempotent."""
        ...

    def close(self) -> None: ...


class RankReceiver(Receiver, Protocol):
    """The Receiver of one rank, whose transfers are parts of a worker's transfers."""

    def fail(self, key: TransferKey, error: str) -> None:
        """Ends the transfer because another part has failed; on_end is called with FAILED. Idempotent."""
        ...


class Sender(Protocol):
    """The prefill side. Reads source blocks until Sent is reported; the caller must keep them referenced until then."""

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
        """Total payload sent so far. Used to measure how much sending slows down a concurrent step."""
        ...

    def start(
        self,
        grant: Grant,
        on_end: Callable[[Sent], None],
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        """Announces a transfer whose blocks are sent in `groups` groups of layers. Connects if the pair is new.

        `text` is required if the receiver's shape differs from the sender's.
        """
        ...

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        """Queues finished blocks: (index, source block). Their contents must not change any more, and they must have
        been marked with their content hashes (`BlockStamps.mark`).

        The index counts the sender's blocks from the first that contains a token to send. If the shapes are equal, it
        is the grant index. `groups`: the layer groups that are finished; None: all.
        """
        ...

    def abort(self, key: TransferKey) -> None:
        """Stops the transfer; on_end is called with FAILED once no source block is read any more. Idempotent."""
        ...

    def close(self) -> None: ...


class TransferSender(Protocol):
    """What a Sender does with a transfer that it has started."""

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None: ...

    def abort(self, key: TransferKey) -> None: ...


class RankSender(Sender, Protocol):
    """The Sender of one rank, whose transfers are parts of a worker's transfers."""

    def sender_of(self, key: TransferKey) -> TransferSender:
        """The sender that has the transfer: this one, or one inside it."""
        ...

    def fail(self, key: TransferKey, error: str) -> None:
        """Like `abort`, but because another part has failed. The receiver then reports a failure."""
        ...
