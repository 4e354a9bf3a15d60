"""Decides whether and when a failed call is retried. Pure: the random number is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.durations import DAY_S, backoff_s
from pdserve.core.errors import ConfigError, Overloaded, PdserveError, Unavailable

MAX_RETRIES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Retries after the first attempt. A call that has yielded a token is never retried.

    If the server names a retry time (RetryInfo), the wait is that time plus some jitter, so that callers do not return
    together. If it is more than `longest_wait_s`, there is no retry.
    """

    limit: int = 2
    first_backoff_s: float = 0.5
    longest_backoff_s: float = 8.0
    longest_wait_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= MAX_RETRIES:
            raise ConfigError("retries.limit", self.limit, f"between 0 and {MAX_RETRIES}")
        for name in ("first_backoff_s", "longest_backoff_s", "longest_wait_s"):
            if not 0.0 <= getattr(self, name) <= DAY_S:
                raise ConfigError(f"retries.{name}", getattr(self, name), f"between 0 and {DAY_S:g} seconds")

    def delay_s(self, error: PdserveError, tries: int, remaining_s: float, noise: float) -> float | None:
        """Seconds to wait before the next attempt; None: raise `error`.

        `tries` is the number of failed attempts, including this one; `remaining_s` is the rest of the call's timeout;
        `noise` is uniform in [0, 1).
        """
        if tries > self.limit or not isinstance(error, Overloaded | Unavailable):
            return None
        asked_s = error.retry_after_s
        if not asked_s or asked_s < 0.0:  # absent, or without a retry time
            ceiling_s = backoff_s(self.first_backoff_s, self.longest_backoff_s, tries - 1)
            delay_s = ceiling_s * (0.5 + 0.5 * noise)
        elif asked_s > self.longest_wait_s:
            return None
        else:
            delay_s = asked_s * (1.0 + 0.25 * noise)
        return delay_s if delay_s < remaining_s else None
