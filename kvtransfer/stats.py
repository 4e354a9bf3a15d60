"""Counters of an endpoint, named for use in metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

from kvtransfer.session import Event, Session, State


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
