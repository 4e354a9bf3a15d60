"""Measures the effect of a tenant that sends at its quota on another tenant: `python -m benchmarks.tenants [--split
4:4]`.

Simulated, by the router's own code: workers of the H100 profile, and conversations of random lengths. Without
`--capacity` it first finds the cluster's capacity: the highest rate at which 90 % of the requests meet their targets.
Tenant *light* then sends `--light` of that rate. Tenant *flood* has a quota of tokens per minute that is a share of the
capacity, and sends `--flood` times its quota, so most of its calls are rejected. The requests of *light* are the same
in every row, so its p95 TTFT is compared with that of a run without *flood*.

`--unlimited` adds a flood without a quota, with and without fairness in the queue. Bar: with a quota, the p95 TTFT of
*light* is at most 5 % above that without *flood*.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.access.key_file import Tenant
from pdserve.core.results import nearest_rank
from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.service.tenants import BURST_S
from router.state.settings import RouterSettings
from simulator.cluster.world import simulate
from simulator.model import RequestRow, SimConfig, TraceRequest
from simulator.search.layouts import make_workers
from simulator.traces.workloads import Poisson, log_normal

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
SLO: Final = Slo(ttft_s=1.0, tpot_s=0.05)
PROMPTS: Final = log_normal(median=1000.0, spread=1.0, most=16_000)
OUTPUTS: Final = log_normal(median=150.0, spread=0.8, most=1_000)
MAX_TOKENS: Final = 1024
TARGET: Final = 0.9
TOLERANCE: Final = 0.1
BAR: Final = 0.05
SHARES: Final = (0.05, 0.1, 0.2, 0.4)  # of the capacity, as the quota
UNLIMITED: Final = 1.5  # times the capacity: a flood without a quota


@dataclass(frozen=True, slots=True)
class MergedTrace:
    """Two tenants' requests in order of arrival."""

    parts: tuple[tuple[str, Poisson], ...]
    name: str = "tenants"
    block_tokens: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        return heapq.merge(*(_of(tenant, part) for tenant, part in self.parts), key=lambda one: one.arrival_s)


def _of(tenant: str, part: Poisson) -> Iterator[TraceRequest]:
    for one in part:
        yield replace(one, tenant=tenant, block_ids=(), max_tokens=MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One run."""

    name: str
    light: tuple[RequestRow, ...]
    flood: tuple[RequestRow, ...]
    seconds: float

    def p(self, share: float) -> float:
        """A percentile of the TTFT of *light*. A request without a first token counts as the slowest."""
        return nearest_rank(sorted(row.ttft_s if row.ttft_s is not None else float("inf") for row in self.light), share)

    @property
    def flood_tokens_per_minute(self) -> float:
        return sum(row.prompt_tokens + row.tokens for row in self.flood if row.tokens) * 60.0 / self.seconds


class TenantBench:
    def __init__(self, args: argparse.Namespace) -> None:
        prefill, _, decode = args.split.partition(":")
        self._workers = make_workers(load_profile(PROFILE), int(prefill), int(decode))
        self._seconds, self._seed, self._light, self._flood = args.seconds, args.seed, args.light, args.flood
        self._burst_s, self._has_unlimited = args.burst, args.unlimited
        self.capacity_rps = args.capacity or self._capacity_rps(len(self._workers))
        self.tokens_per_request = self._mean_tokens()

    def _part(self, rate_rps: float, seed: int) -> Poisson:
        return Poisson(rate_rps=rate_rps, duration_s=self._seconds, prompts=PROMPTS, outputs=OUTPUTS, seed=seed)

    def _config(self, tenants: tuple[Tenant, ...] = (), rules_off: tuple[str, ...] = ()) -> SimConfig:
        return SimConfig(
            workers=self._workers,
            slo=SLO,
            router=RouterSettings(rules_off=rules_off),
            block_size=64,
            seed=self._seed,
            tenants=tenants,
            quota_burst_s=self._burst_s,
        )

    def _capacity_rps(self, num_workers: int) -> float:
        def holds(rate_rps: float) -> bool:
            trace = MergedTrace((("light", self._part(rate_rps, self._seed)),))
            rows = simulate(trace, self._config()).requests
            return sum(row.has_met_slo for row in rows) >= TARGET * len(rows)

        low, high = 0.0, 4.0 * num_workers
        while holds(high):
            low, high = high, 2.0 * high
        while high > low * (1.0 + TOLERANCE):
            middle = (low + high) / 2.0
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def _mean_tokens(self) -> float:
        rows = list(self._part(self.capacity_rps, self._seed))
        return sum(one.prompt_tokens + one.output_tokens for one in rows) / len(rows)

    def run(self, name: str, flood_rps: float, quota: int | None, rules_off: tuple[str, ...] = ()) -> TenantRow:
        parts = [("light", self._part(self._light * self.capacity_rps, self._seed + 1))]
        if flood_rps:
            parts.append(("flood", self._part(flood_rps, self._seed + 2)))
        tenants = () if quota is None else (Tenant(name="flood", tokens_per_minute=quota),)
        rows = simulate(MergedTrace(tuple(parts)), self._config(tenants, rules_off)).requests
        return TenantRow(
            name=name,
            light=tuple(row for row in rows if row.tenant == "light"),
            flood=tuple(row for row in rows if row.tenant == "flood"),
            seconds=self._seconds,
        )

    def rows(self) -> Iterator[TenantRow]:
        yield self.run("no flood", 0.0, None)
        for share in SHARES:
            quota = round(share * self.capacity_rps * self.tokens_per_request * 60.0)
            yield self.run(f"quota {share:.0%} of capacity", self._flood * share * self.capacity_rps, quota)
        if self._has_unlimited:
            yield self.run("no quota", UNLIMITED * self.capacity_rps, None)
            yield self.run("no quota, no fairness", UNLIMITED * self.capacity_rps, None, ("fairness",))


def render(rows: Sequence[TenantRow]) -> str:
    """The first row is without a flood."""
    alone_s = rows[0].p(0.95)
    lines = [
        "| flood | its calls | rejected | its tokens/min | light: TTFT p50 / p95 / p99 | p95 against no flood "
        "| light met targets | bar |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        rejected = sum(row.outcome == "rejected" for row in one.flood)
        change = one.p(0.95) / alone_s - 1.0
        met = sum(row.has_met_slo for row in one.light) / len(one.light)
        bar = ("met" if change <= BAR else "missed") if one.name.startswith("quota") else ""
        times = " / ".join(f"{1e3 * one.p(share):.0f}" for share in (0.5, 0.95, 0.99))
        lines.append(
            f"| {one.name} | {len(one.flood)} | {rejected} | {one.flood_tokens_per_minute:,.0f} | {times} ms "
            f"| {change:+.1%} | {met:.1%} | {bar} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--split", default="4:4", help="prefill:decode workers (4:4)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of simulated traffic (60)")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests/s; 0 searches for it (0)")
    parser.add_argument(
        "--burst", type=float, default=BURST_S, help=f"seconds of a quota that come at once ({BURST_S:g})"
    )
    parser.add_argument("--unlimited", action="store_true", help="also a flood without a quota")
    parser.add_argument("--light", type=float, default=0.2, help="rate of the other tenant, of the capacity (0.2)")
    parser.add_argument("--flood", type=float, default=5.0, help="rate of the flood, of its quota (5)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    bench = TenantBench(args)
    print(
        f"{args.split} workers of {PROFILE}; capacity {bench.capacity_rps:.1f} requests/s of "
        f"{bench.tokens_per_request:.0f} tokens; targets {SLO.ttft_s:g} s / {SLO.tpot_s:g} s; "
        f"bursts of {args.burst:g} s",
        flush=True,
    )
    found = []
    for one in bench.rows():
        found.append(one)
        print(f"{one.name} done", file=sys.stderr, flush=True)
    print(render(found))


if __name__ == "__main__":
    main()
