"""Decides whether a run is long enough for a verdict on its rate. Pure.

A run begins and ends with an empty cluster, and few requests give only a rough attainment. So a run supports a verdict
on a rate only if

    it lasts     SPANS times as long as a request stays, and as the TTFT target: otherwise overload has no time to show
    it has       ENOUGH requests after the first has left: otherwise the attainment is not known to MARGIN

ENOUGH is the number at which the 95 % confidence interval of an attainment of TARGET is MARGIN to either side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SPANS: Final = 10.0
MARGIN: Final = 0.03
TARGET: Final = 0.9  # share of all requests that must meet both targets for a rate to be sustained
_Z: Final = 1.96  # 95 %, both sides
ENOUGH: Final = math.ceil(_Z**2 * TARGET * (1.0 - TARGET) / MARGIN**2)  # 385


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a verdict on a rate requires, and what the runs have."""

    rate_rps: float
    requests: int
    lasted_s: float
    needed_requests: int
    needed_s: float

    @property
    def text(self) -> str:
        return (
            f"{self.requests} requests last {self.lasted_s:.3g} s at {self.rate_rps:.3g} requests/s; a verdict needs "
            f"about {self.needed_requests} requests and {self.needed_s:.3g} s"
        )


def shortage(*, requests: int, rate_rps: float, stay_s: float, slo_ttft_s: float, num_runs: int = 1) -> Shortage | None:
    """None: the runs suffice. `requests` is the sum over all `num_runs`, each of which ran at `rate_rps`.

    `stay_s`: mean time of a request in the cluster at that rate, from arrival to its end.
    """
    if not rate_rps > 0.0:
        return None
    each = requests / num_runs
    lasted_s = each / rate_rps
    needed_s = SPANS * max(stay_s, slo_ttft_s)
    steady = num_runs * max(0.0, each - rate_rps * stay_s)
    if lasted_s >= needed_s and steady >= ENOUGH:
        return None
    needed = num_runs * max(rate_rps * needed_s, ENOUGH / num_runs + rate_rps * stay_s)
    return Shortage(
        rate_rps=rate_rps,
        requests=requests,
        lasted_s=lasted_s,
        needed_requests=math.ceil(needed),
        needed_s=max(needed_s, needed / num_runs / rate_rps),
    )


def surely_misses(met: int, requests: int) -> bool:
    """Whether so few met their targets that chance does not explain it: the upper end of Wilson's interval is below
    TARGET. Few requests may be enough to show that a target cannot be met."""
    if not requests:
        return False
    share, z2 = met / requests, _Z**2
    middle = share + z2 / (2 * requests)
    spread = _Z * math.sqrt(share * (1.0 - share) / requests + z2 / (4 * requests**2))
    return (middle + spread) / (1.0 + z2 / requests) < TARGET
