"""What an endpoint counts. Pure. Names are fit for metrics; all only grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final


@dataclass(slots=True)
class TransferStats:
    transfers: int = 0  # opened: expected (receiver) or started (sender)
    verified: int = 0  # ended with every block verified (receiver) or acknowledged (sender)
    failed: int = 0
    cancelled: int = 0  # given up by an owner, on either side, since nobody needed it any more
    expired: int = 0  # of the failed: past their deadline
    cut: int = 0  # of the failed: the connection was lost
    quarantined: int = 0  # cancelled, and a write was still open after the grace time
    bytes: int = 0  # payload of verified (receiver) or acknowledged (sender) transfers
    moved_bytes: int = 0  # sender: payload that nobody reads here any more, whatever became of its transfer
    chunks: int = 0  # accepted (receiver) or sent (sender)
    late_messages: int = 0  # for transfers that are unknown, replaced or over
    duplicate_chunks: int = 0  # overlapping what is already there or coming; dropped
    silent: int = 0  # connections that ended since the peer showed no sign of life
    severed: int = 0  # connections that were closed so that a write in quarantine must end
    checksum_mismatches: int = 0
    stamp_mismatches: int = 0  # a block of another text, grant or layer group
    stale_source: int = 0  # transfers that failed since a source block was handed out again while it was needed
    stale_landing: int = 0  # the same of a granted block
    refused_opens: int = 0  # handshakes that were turned away
    refused_connections: int = 0  # no greeting of this version, no valid ticket, or too many
    unproven: int = 0  # a peer had a ticket, or asked for one, and did not prove that it knows the cluster's secret
    protocol_errors: int = 0  # connections that were closed because of what they sent


EVENTS: Final = (  # what an operator should see; the rest is throughput, and measured where it is used
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
    "stale_landing",
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
