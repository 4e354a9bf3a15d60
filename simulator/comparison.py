"""Runs for comparison: their settings and results as plain data. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.core.types import Role
from simulator.bound import Bound
from simulator.metrics import Summary
from simulator.misses import why
from simulator.model import RequestRow, SimResult
from simulator.sufficiency import TARGET as TARGET
from simulator.sufficiency import Shortage, shortage


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    policy: str
    rate_scale: float
    result: SimResult
    summary: Summary
    bound: Bound | None = None  # of the same trace and workers

    @property
    def split(self) -> str:
        """Prefill workers : decode workers."""
        roles = [shape.role for shape in self.result.config.workers]
        return f"{roles.count(Role.PREFILL)}:{roles.count(Role.DECODE)}"

    @property
    def shortage(self) -> Shortage | None:
        """What it lacks for a verdict that its rate can be sustained; None: nothing."""
        ended = [row.ended_s - row.arrival_s for row in self.result.requests if row.ended_s is not None]
        return shortage(
            requests=self.summary.requests,
            rate_rps=self.summary.rate_rps,
            stay_s=sum(ended) / len(ended) if ended else 0.0,
            slo_ttft_s=self.result.config.slo.ttft_s,
        )


def as_json(run: PolicyRun) -> dict[str, Any]:
    """Equal runs give equal objects, because they contain no real time."""
    config, summary = run.result.config, run.summary
    prefill, decode = run.split.split(":")
    head = {
        "trace": run.result.trace,
        "policy": run.policy,
        "rules_off": list(config.router.rules_off),
        "seed": config.seed,
        "rate_scale": run.rate_scale,
        "prefill": int(prefill),
        "decode": int(decode),
        "routers": config.num_routers,
        "slo": {"ttft_s": config.slo.ttft_s, "tpot_s": config.slo.tpot_s},
        "is_long_enough": run.shortage is None,
        "refused": summary.outcomes.get("rejected", 0),
    }
    body = dataclasses.asdict(summary)
    if run.bound is not None:
        body["bound"] = {"requests": run.bound.most, "limit": run.bound.limit, "share": run.bound.share(summary.met)}
    body["paths"] = {path: {"requests": count, "met": met} for path, (count, met) in summary.paths.items()}
    return head | body | {"counters": dict(sorted(run.result.counters.items()))}


def as_row(run: PolicyRun, row: RequestRow) -> dict[str, Any]:
    """One request, flat, for a line of JSON or CSV."""
    flat = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "slo"}
    flat["path"] = row.path.value if row.path is not None else ""
    slo = {"slo_ttft_s": row.slo.ttft_s, "slo_tpot_s": row.slo.tpot_s}
    return {"policy": run.policy, "rate_scale": run.rate_scale} | flat | slo | {"why": why(row)}


def rows_of(runs: Iterable[PolicyRun]) -> Iterator[dict[str, Any]]:
    return (as_row(run, row) for run in runs for row in run.result.requests)


def highest_sustained(runs: Iterable[PolicyRun]) -> dict[str, float | None]:
    """By policy: the highest tried rate that met the target, as did all lower ones; 0 if none did.

    None: that run is too short for a verdict.
    """
    held: dict[str, float | None] = {}
    broken: set[str] = set()
    for run in sorted(runs, key=lambda one: one.rate_scale):
        held.setdefault(run.policy, 0.0)
        if run.summary.attainment < TARGET:
            broken.add(run.policy)
        elif run.policy not in broken:
            held[run.policy] = run.summary.rate_rps if run.shortage is None else None
    return held
