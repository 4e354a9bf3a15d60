"""Which traces are kept when their request has ended (tail sampling). Pure.

A trace is kept if the caller had sampled it, if its request was rejected, failed, slow or retried, or if it belongs to
the share of all others that the operator keeps (docs/decisions/0023-one-process-records-a-trace.md).
"""

from __future__ import annotations

from pdserve.core.results import Timings
from pdserve.core.types import Slo


def is_in_share(trace_id: int, share: float) -> bool:
    """Whether a trace is one of the `share` (0 to 1) that is kept without a further reason.

    Decided by the trace id, as OpenTelemetry's TraceIdRatioBased does, so all routers choose the same traces.
    """
    return trace_id % 2**64 < round(share * 2**64)


def is_notable(timings: Timings, slo: Slo) -> bool:
    """Whether a request that ended without an error was slow, or needed a second attempt."""
    waited_s = timings.ttft_s or timings.total_s  # without a first token, it waited until its end
    return timings.attempts > 1 or waited_s > slo.ttft_s or timings.tpot_s > slo.tpot_s
