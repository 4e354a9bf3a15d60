"""The worst requests, with the reasons in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pdserve.core.types import Path
from simulator.metrics import is_in_time_tpot, is_in_time_ttft
from simulator.model import RequestRow


def worst(rows: Iterable[RequestRow], count: int) -> list[RequestRow]:
    """Requests that missed a target: failed ones first, then late ones by how late, then rejected and cancelled
    ones."""
    missed = [row for row in rows if not row.has_met_slo]
    return sorted(missed, key=_badness, reverse=True)[:count]


def lateness(row: RequestRow) -> float:
    """The larger ratio of time to target; above 1 is late. Infinite without a first token."""
    if row.ttft_s is None:
        return math.inf
    return max(row.ttft_s / row.slo.ttft_s, (row.tpot_s or 0.0) / row.slo.tpot_s)


def why(row: RequestRow) -> str:
    """One sentence."""
    if row.outcome == "rejected":
        after_s = (row.ended_s or row.arrival_s) - row.arrival_s
        again = f"; told to retry after {_time(row.retry_after_s)}" if row.retry_after_s is not None else ""
        return f"rejected {_time(after_s)} after its arrival{again}"
    if row.outcome not in ("late", "served"):
        lived = "" if row.ended_s is None else f" {_time(row.ended_s - row.arrival_s)} after its arrival"
        return f"{row.outcome}{lived}, with {row.tokens} of {row.output_tokens} tokens"
    parts = []
    if not is_in_time_ttft(row) and row.ttft_s is not None:
        parts.append(f"first token {_time(row.ttft_s - row.slo.ttft_s)} late, {_share_of_ttft(row)}")
    if not is_in_time_tpot(row) and row.tpot_s is not None:
        parts.append(f"{row.tpot_s / row.slo.tpot_s:.2g} times the target time per token")
    if row.preemptions:
        parts.append(f"preempted {_times(row.preemptions)}")
    if row.attempts > 1:
        parts.append(f"placed {_times(row.attempts)}")
    return "; ".join(parts) or "met both targets"


def _share_of_ttft(row: RequestRow) -> str:
    assert row.ttft_s is not None
    # A transfer overlaps its prefill, so only their sum can be separated from the queue.
    work = "prefill and transfer" if row.path is Path.REMOTE else "prefill"
    spent = {"queue": min(row.queue_s, row.ttft_s), work: max(row.ttft_s - row.queue_s, 0.0)}
    name, longest_s = max(spent.items(), key=lambda item: item[1])
    return f"mostly {name} ({_time(longest_s)} of {_time(row.ttft_s)})"


def _badness(row: RequestRow) -> tuple[int, float, int]:
    order = {"cancelled": 0, "rejected": 1, "late": 2}.get(row.outcome, 3)
    return order, min(lateness(row), 1e9), -row.number


def _time(seconds: float) -> str:
    return f"{1000.0 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"
