"""Time limits on silent connections and stalled transfers, and a connection's heartbeat. Pure: time is passed as
`now_s`.

Each side of a connection sends heartbeats. If a side sends nothing for `silence_s`, it is assumed dead, and every
transfer of the connection ends before its deadline. A transfer without a deadline has a lease that its own progress
extends, so memory is also freed if the peer is alive but does nothing. A transfer that was sent completely is confirmed
soon or never, and ends early so that a new attempt still has time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    beat_s: float = 0.5  # between two heartbeats of an idle connection
    silence_s: float = 5.0  # without a byte from the peer, after which it is assumed dead
    unconfirmed_s: float = 10.0  # after its last byte was sent, before an unconfirmed transfer ends
    stall_s: float = 60.0  # without a block, after which a transfer that has no deadline ends
    unclaimed_s: float = 120.0  # without a sender, after which a grant that has no deadline ends
    grace_s: float = 0.5  # for which a write may stay open after its transfer was abandoned
    quarantine_s: float = 4.0  # after that, before the connection is closed so that the write must end

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) <= DAY_S:
                raise ConfigError(f"lease.{name}", getattr(self, name), "more than 0 s and at most a day")
        if self.silence_s < 2 * self.beat_s:
            raise ConfigError("lease.silence_s", self.silence_s, f"at least {2 * self.beat_s}, two beats")


DEFAULT_LEASE: Final = Lease()


@final
class Heartbeat:
    """One side of one connection."""

    def __init__(self, lease: Lease, now_s: float) -> None:
        self._beat_s, self.silence_s = lease.beat_s, lease.silence_s
        self._heard_s = self._beaten_s = now_s

    def heard(self, now_s: float) -> None:
        """Bytes have arrived."""
        self._heard_s = now_s

    def is_silent(self, now_s: float) -> bool:
        return now_s - self._heard_s >= self.silence_s

    def is_due(self, now_s: float) -> bool:
        """Whether a heartbeat is due. True counts as sent."""
        if now_s - self._beaten_s < self._beat_s:
            return False
        self._beaten_s = now_s
        return True

    def left_s(self, now_s: float) -> float:
        """Until `is_silent` or `is_due` may change."""
        return max(0.0, min(self._heard_s + self.silence_s, self._beaten_s + self._beat_s) - now_s)
