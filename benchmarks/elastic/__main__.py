"""Attainment and worker-seconds of controllers of a cluster's size, simulated: `python -m benchmarks.elastic`.

    python -m benchmarks.elastic [--azure FILE] [--only TEXT] [--seconds 600] [--seed 0] [--fast] [--out DIR]

Sixteen H100s with Llama 3.1 8B at most. Each cell is one run; with --out, a file with one JSON line, which is not
computed again. --fast takes the closed form of approximate.py instead of the simulated router.
The bound is `clairvoyant`: the same controller, given the true arrivals of the next ten minutes.
docs/benchmarks/scaling.md has the figures and the bars.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.elastic.approximate import Approximation
from benchmarks.elastic.baselines import Fixed, Predictive, RoleRule, Threshold
from benchmarks.elastic.workloads import Repeated, shift, sine, spike, step
from benchmarks.harness import table_head, table_row
from pdserve.core.types import Role, Slo
from pdserve.profiles import load_profile
from router.scaling.controller import Controller
from router.scaling.interface import Decision, ScalingController, ScalingSettings, Size
from router.state.interface import RouterSettings
from simulator.cluster.elastic import Elastic, TrueArrivals
from simulator.cluster.world import World
from simulator.model import NetworkLink, SimConfig, Trace, WorkerShape
from simulator.traces.files import FileTrace

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
LINK: Final = "ib400"
MOST: Final = 16
START_S: Final = 40.0  # 16 GB of weights, a process, warm-up: an assumption, not a measurement
SLO: Final = Slo(ttft_s=3.0, tpot_s=0.025)
AZURE_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.025)
AZURE_COPIES: Final = 24
CLAIRVOYANT: Final = "clairvoyant"
OURS: Final = "pdserve"

Make = Callable[[Size], ScalingController]
#: A controller, and the size that it begins with; None: what the workload says.
CONTROLLERS: Final[Mapping[str, tuple[Make, Size | None]]] = {
    CLAIRVOYANT: (lambda first: Controller(settings(), starts_overlap=True), None),
    OURS: (lambda first: Controller(settings(), starts_overlap=True), None),
    "fixed, all": (lambda first: Fixed(), Size(6, 10)),
    "fixed, 2:14": (lambda first: Fixed(), Size(2, 14)),
    "fixed, half": (lambda first: Fixed(), Size(3, 5)),
    "threshold": (lambda first: Threshold(MOST, Size(1, 1)), None),
    "predictive": (lambda first: Predictive(MOST, Size(1, 1)), None),
    "role rule": (lambda first: RoleRule(), Size(4, 8)),
}


def settings() -> ScalingSettings:
    return ScalingSettings(min_workers=2, max_workers=MOST, start_s=START_S, drain_s=20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    trace: Trace
    slo: Slo
    first: Size  # workers at the beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    load: str
    controller: str
    requests: int
    attainment: float
    worker_s: float
    changes: int
    unfinished: int
    failed: int
    cpu_s: float


def loads(seconds: float, azure: Path | None, scale: float = 1.0, seed: int = 0) -> dict[str, Load]:
    found = {
        "sine": Load(trace=sine(seconds, min(600.0, seconds), scale, seed), slo=SLO, first=Size(3, 6)),
        "quick sine": Load(trace=sine(seconds, min(300.0, seconds), scale, seed), slo=SLO, first=Size(3, 6)),
        "step": Load(trace=step(seconds, scale, seed), slo=SLO, first=Size(2, 4)),
        "spike": Load(trace=spike(seconds, scale, seed), slo=SLO, first=Size(2, 4)),
        "shift": Load(trace=shift(seconds, scale, seed), slo=SLO, first=Size(4, 4)),
    }
    if azure is not None:
        trace = Repeated(trace=FileTrace(azure), copies=AZURE_COPIES, until_s=seconds)
        found["azure"] = Load(trace=trace, slo=AZURE_SLO, first=Size(2, 4))
    return found


def shape(role: Role) -> WorkerShape:
    profile = load_profile(PROFILE)
    latency_s, bytes_per_s = profile.links[LINK]
    return WorkerShape(
        worker_id=role.value,
        role=role,
        cost=profile.cost,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        link=NetworkLink(latency_s=latency_s, bytes_per_s=bytes_per_s),
    )


def run_fast(load: Load, name: str, controller: str) -> tuple[Cell, list[Decision]]:
    make, size = CONTROLLERS[controller]
    first = size or load.first
    foresight = TrueArrivals(load.trace, load.slo, block_tokens=0) if controller == CLAIRVOYANT else None
    began_s = time.process_time()
    found = Approximation(
        load.trace, load.slo, make(first), first, shape(Role.DECODE), start_s=START_S, foresight=foresight
    ).run()
    cell = Cell(
        load=name,
        controller=controller,
        requests=found.requests,
        attainment=found.met / max(found.requests, 1),
        worker_s=found.worker_s,
        changes=sum(bool(one.changes) for one in found.decisions),
        unfinished=0,
        failed=0,
        cpu_s=time.process_time() - began_s,
    )
    return cell, found.decisions


def run(load: Load, name: str, controller: str) -> tuple[Cell, list[Decision]]:
    make, size = CONTROLLERS[controller]
    first = size or load.first
    templates = {role: shape(role) for role in Role}
    workers = [
        replace(templates[role], worker_id=f"{role.value}{number}", pulls_kv=False)
        for role, count in zip(Role, first, strict=True)
        for number in range(count)
    ]
    config = SimConfig(workers=tuple(workers), slo=load.slo, router=RouterSettings(), noise=0.03, report_s=2.5)
    foresight = TrueArrivals(load.trace, load.slo, block_tokens=0) if controller == CLAIRVOYANT else None
    elastic = Elastic(
        controller=make(first),
        prefill=templates[Role.PREFILL],
        decode=templates[Role.DECODE],
        start_s=START_S,
        foresight=foresight,
    )
    began_s = time.process_time()
    world = World(load.trace, config, elastic=elastic)
    result = world.run()
    assert world.scaler is not None
    cell = Cell(
        load=name,
        controller=controller,
        requests=len(result.requests),
        attainment=result.attainment,
        worker_s=world.scaler.worker_s(world.agenda.now_s),
        changes=sum(bool(one.changes) for one in world.scaler.decisions),
        unfinished=sum(one.outcome == "unfinished" for one in result.requests),
        failed=sum(one.outcome == "failed" for one in result.requests),
        cpu_s=time.process_time() - began_s,
    )
    return cell, world.scaler.decisions


# --- report ---------------------------------------------------------------------------------------------------

LEAST_ATTAINMENT: Final = 0.90
MOST_RATIO: Final = 1.15
AHEAD_POINTS: Final = 0.10
AHEAD_WORKERS: Final = 0.15
SLIGHTLY: Final = 0.01


def is_ahead(ours: Cell, other: Cell) -> bool:
    """By ten points of attainment, or by 15 % of worker-seconds with at most one point of attainment less."""
    more, less = ours.attainment - other.attainment, 1.0 - ours.worker_s / other.worker_s
    return more >= AHEAD_POINTS or (less >= AHEAD_WORKERS and more >= -SLIGHTLY)


def report(cells: list[Cell]) -> str:
    columns = ["load", "controller", "requests", "attainment", "worker-s", "over the clairvoyant's", "changes", "bar"]
    lines = [table_head(columns)]
    by_name = {(one.load, one.controller): one for one in cells}
    for one in cells:
        bound, ours = by_name.get((one.load, CLAIRVOYANT)), by_name.get((one.load, OURS))
        ratio = one.worker_s / bound.worker_s if bound is not None else None
        bar = ""
        if one.controller == OURS and ratio is not None:
            is_met = one.attainment >= LEAST_ATTAINMENT and ratio <= MOST_RATIO
            bar = "met" if is_met else "**missed**"
        elif one.controller not in (OURS, CLAIRVOYANT) and ours is not None:
            bar = "ahead of it" if is_ahead(ours, one) else "**not ahead of it**"
        lines.append(
            table_row(
                [
                    one.load,
                    one.controller,
                    one.requests,
                    f"{100 * one.attainment:.1f} %",
                    f"{one.worker_s:.0f}",
                    f"{ratio:.2f}" if ratio is not None else "",
                    one.changes,
                    bar,
                ]
            )
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=Path, help="Azure's published trace of conversations, as a CSV file")
    parser.add_argument("--only", default="", help="cells whose name (load, controller) contains this")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="approximate, in about a second for each cell")
    parser.add_argument("--out", type=Path, help="folder for the cells' results")
    parser.add_argument("--decisions", action="store_true", help="print each decision that changes something")
    arguments = parser.parse_args()
    if not 60.0 <= arguments.seconds <= 86_400.0:
        parser.error(f"--seconds: got {arguments.seconds:g}, expected 60 to 86400")
    cells = []
    for name, load in loads(arguments.seconds, arguments.azure, seed=arguments.seed).items():
        for controller in CONTROLLERS:
            if arguments.only not in f"{name} {controller}":
                continue
            path = None
            if arguments.out is not None:
                kept = f"{name}.{controller}.{arguments.seconds:g}s.seed{arguments.seed}{'.fast' * arguments.fast}.json"
                path = arguments.out / kept.translate({ord(" "): "_", ord(","): None, ord(":"): "-"})
            compute = run_fast if arguments.fast else run
            cells.append(cell_of(load, name, controller, path, compute, shows=arguments.decisions))
    print(report(cells))


Run = Callable[[Load, str, str], tuple[Cell, list[Decision]]]


def cell_of(load: Load, name: str, controller: str, path: Path | None, compute: Run, *, shows: bool) -> Cell:
    if path is not None and path.exists():
        return Cell(**json.loads(path.read_text()))
    cell, decisions = compute(load, name, controller)
    if shows:
        for one in decisions:
            if one.changes:
                print(f"{one.at_s:7.0f} s  {one.size}  {', '.join(map(str, one.changes))}: {one.reason}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(cell)) + "\n")
    return cell


if __name__ == "__main__":
    main()
