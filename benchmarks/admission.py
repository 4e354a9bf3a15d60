"""Measures the costs and benefits of admission control by simulation: `python -m benchmarks.admission [--jobs 2]`.

Workloads of simulator/traces/workloads.py on 2 prefill and 2 decode workers of the H100 profile, targets 2 s / 50 ms,
at rates from 0.3 to 1.5 of each workload's capacity: the highest rate at which `goodput` without the rule `rejection`
keeps 90 %. It prints the share of requests that met both targets, and the difference between `goodput` and two others:
the same policy without the rule, and the best baseline. Bar: neither difference is below -0.3 points.

`--kill` prints the same for a decode worker that crashes, which also causes an overload.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.types import Role, Slo
from pdserve.profiles import load_profile
from router.state.settings import RouterSettings
from simulator.cluster.world import simulate
from simulator.metrics import summarise
from simulator.model import SimConfig, WorkerFault, WorkerFaultKind
from simulator.search.goodput import TraceWindow, cut, find_goodput, runner
from simulator.search.layouts import make_workers
from simulator.traces.reshape import Reshaped, rate_scaled
from simulator.traces.workloads import make_workload

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
WORKERS: Final = 2  # of each role
SLO: Final = Slo(ttft_s=2.0, tpot_s=0.05)
RATE_RPS: Final = 40.0  # of the window that is scaled
WITHOUT: Final = "without the rule"
BASELINES: Final = ("least-ttft", "mooncake", "lmetric", "dynamo", "colocated")
POLICIES: Final = ("goodput", WITHOUT, *BASELINES)
SHARES: Final = (0.3, 0.6, 0.8, 1.0, 1.25, 1.5)  # of the capacity
TOLERANCE: Final = 0.1  # of the capacity
BAR: Final = -0.003
KILL: Final = WorkerFault(at_s=2.0, worker_id="d0", kind=WorkerFaultKind.DIE, for_s=1.0)
KILL_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.02)  # as `pdserve simulate` has them
KILL_RPS: Final = 64.0
KILL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    workload: str
    share: float  # of the capacity
    scale: float
    policy: str
    seconds: float
    seed: int
    is_killed: bool = False


def window(workload: str, seconds: float, seed: int) -> TraceWindow:
    return cut(make_workload(workload, rate_rps=RATE_RPS, duration_s=seconds, seed=seed))


def config(policy: str, block_tokens: int, seed: int) -> SimConfig:
    workers = make_workers(load_profile(PROFILE), WORKERS, WORKERS, link="nvlink")
    if policy == "colocated":
        both = next(one for one in workers if one.role is Role.DECODE)
        workers = tuple(replace(both, worker_id=one.worker_id) for one in workers)
    is_without = policy == WITHOUT
    router = RouterSettings(policy="goodput" if is_without else policy, rules_off=("rejection",) if is_without else ())
    return SimConfig(workers=workers, slo=SLO, router=router, block_size=block_tokens or 64, seed=seed)


def capacity(workload: str, seconds: float, seed: int) -> float:
    """As a multiple of the window's own rate."""
    one = window(workload, seconds, seed)
    run = runner([one], config(WITHOUT, one.block_tokens, seed), simulate)
    return find_goodput(run, 1.0, tolerance=TOLERANCE).scale


def kept(cell: Cell) -> float:
    if cell.is_killed:
        trace = make_workload(cell.workload, rate_rps=KILL_RPS, duration_s=KILL_SECONDS, seed=cell.seed)
        asked = config(cell.policy, trace.block_tokens, cell.seed)
        dead = replace(KILL, worker_id=asked.workers[-1].worker_id)
        return summarise(simulate(trace, replace(asked, slo=KILL_SLO, faults=(dead,)))).attainment
    one = window(cell.workload, cell.seconds, cell.seed)
    scaled = Reshaped(one, rate_scaled(cell.scale))
    return summarise(simulate(scaled, config(cell.policy, one.block_tokens, cell.seed))).attainment


def render(title: str, rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """`rows`: a label, and what each policy keeps."""
    columns = [title, *POLICIES, "rule", "best baseline", "bar"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for label, shares in rows:
        ours = shares["goodput"]
        rule, best = ours - shares[WITHOUT], ours - max(shares[one] for one in BASELINES)
        verdict = "met" if min(rule, best) >= BAR else "missed"
        shown = [f"{100 * shares[one]:.1f}" for one in POLICIES] + [f"{100 * rule:+.1f}", f"{100 * best:+.1f}", verdict]
        lines.append("| " + " | ".join([label, *shown]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="long-tail,bursts,agents", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each workload at its own rate (20)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="a decode worker dies, instead of the rates; three seeds")
    args = parser.parse_args()
    names = args.workloads.split(",")
    with ProcessPoolExecutor(args.jobs) as processes:
        if args.kill:
            points = [("chat", 1.0, 1.0, seed) for seed in range(args.seed, args.seed + 3)]
        else:
            seconds, seeds = itertools.repeat(args.seconds), itertools.repeat(args.seed)
            scales = dict(zip(names, processes.map(capacity, names, seconds, seeds), strict=True))
            for name, scale in scales.items():
                print(f"{name}: capacity {scale * RATE_RPS:.0f} requests/s", flush=True)
            points = [(name, share, share * scales[name], args.seed) for name in names for share in SHARES]
        cells = [
            Cell(
                workload=name,
                share=share,
                scale=scale,
                policy=policy,
                seconds=args.seconds,
                seed=seed,
                is_killed=args.kill,
            )
            for name, share, scale, seed in points
            for policy in POLICIES
        ]
        found = list(processes.map(kept, cells))
    rows = []
    for number, (name, share, _, seed) in enumerate(points):
        mine = found[number * len(POLICIES) : (number + 1) * len(POLICIES)]
        label = f"{name}, seed {seed}" if args.kill else f"{name}, {share:g}"
        rows.append((label, dict(zip(POLICIES, mine, strict=True))))
    print(render("a decode worker dies" if args.kill else "workload, share of capacity", rows))


if __name__ == "__main__":
    main()
