"""Time limits on silent connections and stalled transfers, and a connection's heartbeat. Pure: time is passed as
`now_s`.

- Each side of a connection sends heartbeats. A peer that sends nothing for `silence_s` is assumed dead, and all
  transfers of the connection end, without waiting for their deadlines.
- A transfer without a deadline has a lease. Each block that arrives renews it, so memory is freed even if the peer is
  alive but sends nothing.
- The receiver confirms a transfer soon after its last block. If the confirmation does not come within `unconfirmed_s`,
  the transfer ends, which leaves time for another attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    beat_s: float = 0.5  # interval of heartbeats on an idle connection
    silence_s: float = 5.0  # a peer is assumed dead if no byte comes from it for this long
    unconfirmed_s: float = 10.0  # time limit for the confirmation, from the last byte that was sent
    stall_s: float = 60.0  # a transfer without a deadline ends if no block comes for this long
    unclaimed_s: float = 120.0  # a grant without a deadline ends if no sender announces it for this long
    grace_s: float = 0.5  # a write may stay open for this long after its transfer was abandoned
    quarantine_s: float = 4.0  # after grace_s, until the connection is closed, which ends the write

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) <= DAY_S:
                raise ConfigError(f"lease.{name}", getattr(self, name), "more than 0 s and at most a day")
        if self.silence_s < 2 * self.beat_s:
            raise ConfigError("lease.silence_s", self.silence_s, f"at least {2 * self.beat_s}, two beats")


DEFAULT_LEASE: Final = Lease()


@final
class Heartbeat:
    """When one side of a connection must send a heartbeat, and when it has heard nothing for too long."""

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
        """The time until `is_silent` or `is_due` may change."""
        return max(0.0, min(self._heard_s + self.silence_s, self._beaten_s + self._beat_s) - now_s)
