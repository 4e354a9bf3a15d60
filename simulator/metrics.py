"""Computes the figures of a run from its rows. Pure.

Every request that was not served completely within both targets is a miss: late, rejected, expired, failed, cancelled,
unfinished. Percentiles are by nearest rank over the requests that have the time, with their number: a policy that
rejects many has few, so compare them together with the attainment, which counts all requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pdserve.core.results import nearest_rank
from pdserve.core.types import Role
from simulator.model import RequestRow, SimResult, WorkerRow

SHARES: Final = (0.5, 0.9, 0.95, 0.99)
LATE_TOKENS: Final = "late tokens"  # the first token was on time, the mean time per token was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of `of` values; None if there are none."""

    of: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUse:
    """Means over the workers of one role."""

    workers: int
    busy_share: float  # of the time until the last request ended
    mean_rows: float  # of decode steps
    prefill_tokens: int
    decode_tokens: int
    kv_share: float  # of their blocks' capacity that was held
    stranded_share: float  # share of the held memory that is not computed, transferred or decoded
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    requests: int
    met: int
    attainment: float  # met / requests
    ttft_attainment: float  # share with the first token on time
    tpot_attainment: float
    token_attainment: float  # share of all requested tokens that came by ttft_slo + i * tpot_slo
    rate_rps: float  # that arrived
    goodput_rps: float  # requests that met both targets
    goodput_per_worker_rps: float
    tokens_per_s: float  # of answers
    outcomes: dict[str, int]
    misses: dict[str, int]  # by the missed target, or by the outcome of the request
    paths: dict[str, tuple[int, int]]  # path: requests placed on it, and how many of them met both targets
    ttft_s: Percentiles
    tpot_s: Percentiles
    queue_s: Percentiles
    transfer_s: Percentiles  # of requests whose KV was transferred
    rejection_s: Percentiles  # from arrival to rejection
    ttft_error: float | None  # median |predicted - actual| / actual
    tpot_error: float | None
    cached_share: float  # share of the prompt tokens of placed requests that were found in a cache
    pulled_share: float  # ... that were pulled from another worker; a part of `cached_share`
    preemptions: int
    span_s: float  # of arrivals
    lasted_s: float  # until the last request ended
    roles: dict[str, RoleUse]


def summarise(result: SimResult) -> Summary:
    rows = result.requests
    met = sum(row.has_met_slo for row in rows)
    lasted_s = duration_s(result)
    # A burst has no arrival rate, so its rate is computed from the time to serve it.
    span_s = result.span_s if result.span_s > 0.0 else lasted_s
    placed = [row for row in rows if row.path is not None]
    return Summary(
        requests=len(rows),
        met=met,
        attainment=_ratio(met, len(rows)),
        ttft_attainment=_ratio(sum(is_in_time_ttft(row) for row in rows), len(rows)),
        tpot_attainment=_ratio(sum(is_in_time_tpot(row) for row in rows), len(rows)),
        token_attainment=_ratio(sum(tokens_in_time(row) for row in rows), sum(row.output_tokens for row in rows)),
        rate_rps=_ratio(len(rows), span_s),
        goodput_rps=_ratio(met, span_s),
        goodput_per_worker_rps=_ratio(met, span_s * len(result.workers)),
        tokens_per_s=_ratio(sum(row.tokens for row in rows), lasted_s),
        outcomes=_counted(row.outcome for row in rows),
        misses=_counted(reason for row in rows if (reason := miss(row))),
        paths=_by_path(placed),
        ttft_s=percentiles(row.ttft_s for row in rows),
        tpot_s=percentiles(row.tpot_s for row in rows if row.tokens > 1),
        queue_s=percentiles(row.queue_s for row in placed),
        transfer_s=percentiles(row.transfer_s for row in placed if row.transfer_bytes > 0),
        rejection_s=percentiles(
            row.ended_s - row.arrival_s for row in rows if row.outcome == "rejected" and row.ended_s is not None
        ),
        ttft_error=_error((row.predicted_ttft_s, row.ttft_s) for row in rows),
        tpot_error=_error((row.predicted_tpot_s, row.tpot_s) for row in rows if row.tokens > 1),
        cached_share=_ratio(sum(row.cached_tokens for row in placed), sum(row.prompt_tokens for row in placed)),
        pulled_share=_ratio(sum(row.pulled_tokens for row in placed), sum(row.prompt_tokens for row in placed)),
        preemptions=sum(row.preemptions for row in rows),
        span_s=result.span_s,
        lasted_s=lasted_s,
        roles=_roles(result, lasted_s),
    )


def duration_s(result: SimResult) -> float:
    """From the first arrival to the last end."""
    begin_s = min((row.arrival_s for row in result.requests), default=0.0)
    ends_s = [row.ended_s for row in result.requests if row.ended_s is not None]
    return max([result.span_s, *(end_s - begin_s for end_s in ends_s)])


def is_in_time_ttft(row: RequestRow) -> bool:
    return row.ttft_s is not None and row.ttft_s <= row.slo.ttft_s


def is_in_time_tpot(row: RequestRow) -> bool:
    return row.tpot_s is not None and row.tpot_s <= row.slo.tpot_s


def miss(row: RequestRow) -> str:
    """Why the request is a miss; "" if it met both targets."""
    if row.has_met_slo:
        return ""
    if row.outcome != "late":
        return row.outcome
    if is_in_time_ttft(row):
        return LATE_TOKENS
    return "late first token" if is_in_time_tpot(row) else "both late"


def tokens_in_time(row: RequestRow) -> int:
    """Number of tokens i that came by ttft_slo + i * tpot_slo.

    Rows contain only the mean time per token, so tokens are assumed to be evenly spaced.
    """
    if row.ttft_s is None:
        return 0
    spare_s = row.slo.ttft_s - row.ttft_s
    lost_s = (row.tpot_s or 0.0) - row.slo.tpot_s  # with each further token
    if lost_s <= 0.0:  # catches up, if it was late
        late = 0 if spare_s >= 0.0 else row.tokens if lost_s == 0.0 else math.ceil(spare_s / lost_s - 1e-9)
        return max(row.tokens - late, 0)
    return min(row.tokens, math.floor(spare_s / lost_s + 1e-9) + 1) if spare_s >= 0.0 else 0


def percentiles(values: Iterable[float | None]) -> Percentiles:
    held = sorted(value for value in values if value is not None)
    if not held:
        return Percentiles(of=0)
    p50, p90, p95, p99 = (nearest_rank(held, share) for share in SHARES)
    return Percentiles(of=len(held), mean=sum(held) / len(held), p50=p50, p90=p90, p95=p95, p99=p99)


def _by_path(placed: list[RequestRow]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for row in placed:
        assert row.path is not None
        count, met = found.get(row.path.value, (0, 0))
        found[row.path.value] = (count + 1, met + row.has_met_slo)
    return dict(sorted(found.items()))


def _roles(result: SimResult, lasted_s: float) -> dict[str, RoleUse]:
    capacity = {shape.worker_id: shape.kv_capacity_tokens for shape in result.config.workers}
    uses = {}
    for role in Role:
        workers = [worker for worker in result.workers if worker.role is role]
        if workers:
            uses[role.value] = _use(workers, lasted_s, sum(capacity.get(one.worker_id, 0) for one in workers))
    return uses


def _use(workers: list[WorkerRow], lasted_s: float, capacity_tokens: int) -> RoleUse:
    def total(value: Callable[[WorkerRow], float]) -> float:
        return sum(value(one) for one in workers)

    held_token_s = total(lambda one: one.kv_token_s)
    return RoleUse(
        workers=len(workers),
        busy_share=_ratio(total(lambda one: one.busy_s), lasted_s * len(workers)),
        mean_rows=_ratio(total(lambda one: one.mean_rows * one.steps), total(lambda one: one.steps)),
        prefill_tokens=sum(one.prefill_tokens for one in workers),
        decode_tokens=sum(one.decode_tokens for one in workers),
        kv_share=_ratio(held_token_s, lasted_s * capacity_tokens),
        stranded_share=_ratio(total(lambda one: one.stranded_token_s), held_token_s),
        preemptions=sum(one.preemptions for one in workers),
    )


def _error(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    errors = [
        abs(predicted - was) / was
        for predicted, was in pairs
        if predicted is not None and was is not None and was > 0.0
    ]
    return percentiles(errors).p50


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0
