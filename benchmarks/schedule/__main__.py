"""Goodput of every policy at its best split, by simulation: `python -m benchmarks.schedule --out DIR [--jobs 2]`.

Each cell of the tables is a file with one JSON line in DIR. Existing cells are not computed again, so an interrupted
run continues. `--report` prints the tables of the existing cells. `--only TEXT` computes cells whose name has TEXT.

Cells: goodput (trace x SLO target x policy: the planner chooses the split on a short window, a longer window gives the
goodput), overload (three times that rate on that split), ablation (each rule of the goodput policy off alone, on
its own best split), mixed (rules that need tenants, classes or deadlines), speed (the whole Mooncake trace).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.schedule import report
from benchmarks.schedule.work import (
    DISAGGREGATED,
    FINAL_REQUESTS,
    FINAL_TOLERANCE,
    OVERLOAD,
    OVERLOAD_REQUESTS,
    PAIRS,
    POLICIES,
    SEARCH_REQUESTS,
    SEARCH_TOLERANCE,
    SEED,
    TRACES,
    folder,
    highest_possible_rps,
    mixed,
    published,
    question,
    slo,
)
from router.policy.interface import RULES
from simulator.cluster.world import simulate
from simulator.metrics import summarise
from simulator.model import RequestRow, SimResult
from simulator.search.bound import upper_bound
from simulator.search.goodput import HighestRate
from simulator.search.plan import climb, demand, measure
from simulator.traces.workloads import Reshaped, jittered, rate_scaled

ABLATED: Final = (("mooncake-jittered", "chat-13b"), ("azure", "chat-13b"))
OVERLOADED: Final = "chat-13b"
IN_A_CROWD: Final = 1.5  # times the peak, so that rules about the order of requests matter
LONG_ANSWER_TOKENS: Final = 1000
NEEDS_A_CROWD: Final = ("fairness", "priority", "deadline-drop")


@dataclass(frozen=True, slots=True)
class Cell:
    table: str
    trace: str = ""
    pair: str = ""
    policy: str = "goodput"
    rule: str = ""

    @property
    def name(self) -> str:
        return ".".join(part for part in (self.table, self.trace, self.pair, self.policy, self.rule) if part)


def cells() -> Iterator[list[Cell]]:
    """Cells in waves: a wave needs the results of the earlier ones."""
    pairs = [one.name for one in PAIRS]
    yield [Cell("goodput", trace, pair, policy) for trace, pair, policy in itertools.product(TRACES, pairs, POLICIES)]
    wave = [Cell("overload", trace, OVERLOADED, policy) for trace, policy in itertools.product(TRACES, POLICIES)]
    for trace, pair in ABLATED:
        wave += [Cell("ablation", trace, pair, rule=rule) for rule in RULES if rule not in NEEDS_A_CROWD]
    wave += [Cell("mixed", "mooncake-jittered", "chat-13b", rule=rule) for rule in ("", *NEEDS_A_CROWD)]
    yield [*wave, Cell("speed")]


def compute(cell: Cell, out: Path) -> dict[str, Any]:
    began_s = time.process_time()
    line = globals()[f"_{cell.table}"](cell, out)
    return {"cell": cell.name, "cpu_s": round(time.process_time() - began_s, 1), **line}


def _goodput(cell: Cell, out: Path) -> dict[str, Any]:
    short = question(cell.trace, cell.pair, cell.policy, SEARCH_REQUESTS, SEARCH_TOLERANCE)
    begin = round(demand(short).prefill_share * short.num_workers)
    plan = climb(
        short.num_workers,
        range(1, short.num_workers) if cell.policy.endswith(DISAGGREGATED) else short.splits,
        begin,
        lambda splits, floor: [measure(short, one, simulate, floor=floor) for one in splits],
    )
    chosen = plan.curve[plan.best]
    line = {"split": plan.best, "decode": short.num_workers - plan.best, "searched": _curve(plan.curve)}
    if not chosen.scale:
        return line | _result(chosen)
    full = question(cell.trace, cell.pair, cell.policy, FINAL_REQUESTS, FINAL_TOLERANCE)
    # The longer window has another rate; the capacity of a cluster is a rate, not a scale.
    first = chosen.rate_rps / full.windows[0].rate_rps
    found = measure(full, plan.best, simulate, first=first)
    return line | _result(found) | {"bound_rps": highest_possible_rps(full, plan.best, found.rate_rps)}


def _result(found: HighestRate) -> dict[str, Any]:
    missed, held = found.missed, found.held
    return {
        "met_rps": held.rate_rps * held.attainment if held is not None else 0.0,
        "token_attainment": held.token_attainment if held is not None else 0.0,
        "scale": found.scale,
        "rate_rps": found.rate_rps,
        "limit": found.limit,
        "misses": dict(+missed.misses) if missed is not None else {},
        "verdict": found.verdict,
        "probes": len(found.probes),
    }


def _curve(curve: dict[int, HighestRate]) -> dict[str, Any]:
    return {
        str(split): round(one.rate_rps, 3) if one.missed is None or not one.is_bound else f"<{one.missed.rate_rps:.3f}"
        for split, one in sorted(curve.items())
    }


def _overload(cell: Cell, out: Path) -> dict[str, Any]:
    peak = _read(out, Cell("goodput", cell.trace, cell.pair, cell.policy))
    if not peak["scale"]:
        return {"peak_rps": 0.0}
    wild, bound = _run_at(cell, peak, OVERLOAD)
    rejected = [row for row in wild.requests if row.outcome == "rejected" and row.ended_s is not None]
    waits_s = sorted((row.ended_s or 0.0) - row.arrival_s for row in rejected)
    seen = summarise(wild)
    return {
        "peak_rps": peak["met_rps"],
        "met_rps": _met(wild.requests) / wild.span_s,
        "bound_rps": bound / wild.span_s,
        "attainment": seen.attainment,
        "outcomes": seen.outcomes,
        "rejected": len(rejected),
        "rejected_within_10ms": sum(one <= 0.010 for one in waits_s),
        "rejection_s": _spread(waits_s),
        "retry_after_s": _spread(sorted(row.retry_after_s for row in rejected if row.retry_after_s is not None)),
    }


def _run_at(cell: Cell, peak: dict[str, Any], times: float) -> tuple[SimResult, int]:
    """The run, and the number of requests that any scheduler could serve in time."""
    asked = question(cell.trace, cell.pair, cell.policy, OVERLOAD_REQUESTS, FINAL_TOLERANCE)
    trace = Reshaped(asked.windows[0], rate_scaled(times * peak["rate_rps"] / asked.windows[0].rate_rps))
    config = asked.config(peak["split"])
    return simulate(trace, config), upper_bound(trace, config).most


def _met(rows: list[RequestRow]) -> int:
    return sum(row.has_met_slo for row in rows)


def _spread(ordered: list[float]) -> dict[str, float]:
    if not ordered:
        return {}
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * len(ordered))], "max": ordered[-1]}


def _ablation(cell: Cell, out: Path) -> dict[str, Any]:
    peak = _read(out, Cell("goodput", cell.trace, cell.pair))
    asked = question(cell.trace, cell.pair, "goodput", FINAL_REQUESTS, FINAL_TOLERANCE, (cell.rule,))
    return {"split": peak["split"], "with_rps": peak["rate_rps"]} | _result(
        measure(asked, peak["split"], simulate, first=peak["scale"])
    )


def _mixed(cell: Cell, out: Path) -> dict[str, Any]:
    """Above the peak, with a small tenant beside a big one, two classes, and clients that leave: after twice the
    promised first token and a thousand more at the promised pace."""
    peak = _read(out, Cell("goodput", cell.trace, cell.pair))
    off = (cell.rule,) if cell.rule else ()
    asked = question(cell.trace, cell.pair, "goodput", FINAL_REQUESTS, FINAL_TOLERANCE, off)
    promised = slo("mooncake", cell.pair)
    deadline_s = 2.0 * promised.ttft_s + LONG_ANSWER_TOKENS * promised.tpot_s
    config = replace(asked.config(peak["split"]), deadline_s=deadline_s)
    trace = Reshaped(asked.windows[0], mixed(SEED), rate_scaled(IN_A_CROWD * peak["scale"]))
    result = simulate(trace, config)
    numbers = list(trace)

    def share(rows: list[RequestRow]) -> float:
        return _met(rows) / max(1, len(rows))

    return {
        "attainment": share(result.requests),
        "small_tenant": share([row for row in result.requests if row.tenant == "small"]),
        "big_tenant": share([row for row in result.requests if row.tenant == "big"]),
        "higher_class": share([row for row in result.requests if numbers[row.number].priority]),
        "lower_class": share([row for row in result.requests if not numbers[row.number].priority]),
        "outcomes": summarise(result).outcomes,
    }


def _speed(cell: Cell, out: Path) -> dict[str, Any]:
    whole = published("mooncake")
    asked = question("mooncake-jittered", "chat-13b", "goodput", FINAL_REQUESTS, FINAL_TOLERANCE)
    config = replace(asked.config(8), slo=slo("mooncake", "chat-13b"))
    began_s = time.process_time()
    result = simulate(Reshaped(whole, jittered(SEED, whole.quantum_s)), config)
    return {"requests": len(result.requests), "run_cpu_s": time.process_time() - began_s}


# -- the folder ------------------------------------------------------------------------------------------------------


def _read(out: Path, cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{cell.name}.json").read_text())
    return found


def _compute_and_keep(cell: Cell, out: Path) -> str:
    line = compute(cell, out)
    partial = out / f"{cell.name}.partial"
    partial.write_text(json.dumps(line) + "\n")
    partial.rename(out / f"{cell.name}.json")
    return f"{line['cpu_s']:7.1f} s  {cell.name}  {line.get('verdict', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--only", default="", help="only cells whose name has this text")
    parser.add_argument("--report", action="store_true", help="print the tables of what is there")
    args = parser.parse_args()
    folder()  # raises where there are no traces
    args.out.mkdir(parents=True, exist_ok=True)
    if args.report:
        lines = [json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]
        print(report.render({line["cell"]: line for line in lines}))
        return
    with ProcessPoolExecutor(args.jobs) as processes:
        for wave in cells():
            left = [one for one in wave if args.only in one.name and not (args.out / f"{one.name}.json").exists()]
            for line in processes.map(_compute_and_keep, left, itertools.repeat(args.out)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
