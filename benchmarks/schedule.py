"""Goodput of every policy at its best split, by simulation: `python -m benchmarks.schedule --out DIR [--jobs 2]`.

Each cell of the tables is a file with one JSON line in DIR. Existing cells are not computed again, so an interrupted
run continues. `--report` prints the tables of the existing cells. `--only TEXT` computes cells whose name has TEXT.

Cells: goodput (trace x SLO target x policy: the planner chooses the split on a short window, a longer window gives the
goodput), and overload (three times that rate on that split).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import table_head, table_row
from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.results import nearest_rank
from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.metrics import summarise
from simulator.model import RequestRow, SimResult, Trace
from simulator.search.bound import upper_bound
from simulator.search.goodput import TARGET, TRICKLE, HighestRate, TraceWindow, cut
from simulator.search.plan import CHUNK_TOKENS, Question, climb, demand, measure
from simulator.traces.files import FileTrace
from simulator.traces.reshaped import Joined, Reshaped, Step, first, jittered, rate_scaled

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
LINK: Final = "ib400"  # sixteen workers are two hosts
NUM_WORKERS: Final = 16
BLOCK_TOKENS: Final = 64  # of the trace that names no blocks
SEED: Final = 0
SEARCH_REQUESTS: Final = 1000  # the split is chosen on this many requests, to 8 %
SEARCH_TOLERANCE: Final = 0.08
FINAL_REQUESTS: Final = 2000  # and its goodput is measured on this many, to 3 %
FINAL_TOLERANCE: Final = 0.03
OVERLOAD: Final = 3.0  # times the peak
OVERLOAD_REQUESTS: Final = 4000

POLICIES: Final = (
    "goodput",
    "colocated",
    "round-robin",
    "least-loaded",
    "dynamo",
    "lmetric",
    "mooncake",
    "mooncake-pd",  # as published, with both kinds of workers; "mooncake" may also be aggregated, which helps it
    "least-ttft",
)
DISAGGREGATED: Final = "-pd"
TRACES: Final = ("mooncake", "mooncake-jittered", "azure", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """SLO targets as multiples of the model's unloaded times: a prefill of the trace's p90 prompt, a decode step of
    one sequence at its mean prompt. So they mean the same for another model and another trace."""

    name: str
    ttft: float
    tpot: float
    source: str


# OPT-13B on one A100: 93 ms for a prompt of 700 tokens, 20 ms a step, and targets of 0.25 / 0.1 s. OPT-66B: 139 ms on
# four, 41 ms a step on two stages of two (132 GB at 1.6 TB/s each), and 0.4 / 0.1 s. LLaMA3-70B on eight A800: 4 s for
# 28,000 tokens, 17 ms a step, and 30 / 0.3 s. Multiples are rounded.
PAIRS: Final = (
    Pair(name="chat-66b", ttft=2.5, tpot=2.5, source="DistServe, 66B ShareGPT: 0.4 / 0.1 s"),
    Pair(name="chat-13b", ttft=2.5, tpot=5.0, source="DistServe, 13B ShareGPT: 0.25 / 0.1 s"),
    Pair(name="mooncake-70b", ttft=7.5, tpot=17.0, source="Mooncake, 70B: 30 / 0.3 s"),
)


@lru_cache
def profile() -> Profile:
    return load_profile(PROFILE)


def folder() -> Path:
    found = Path(os.environ.get("PDSERVE_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
    if not found.is_dir():
        raise ConfigError(
            "PDSERVE_TRACES", found, "the folder that holds mooncake_conversation.jsonl and azure_2023_conv.csv"
        )
    return found


@lru_cache
def published(name: str) -> FileTrace:
    return FileTrace(folder() / {"mooncake": "mooncake_conversation.jsonl", "azure": "azure_2023_conv.csv"}[name])


@lru_cache
def slo(name: str, pair: str) -> Slo:
    """From the lengths of the whole trace, not of a window."""
    prompts = sorted(one.prompt_tokens for one in published(name))
    cost, times = CostModel(profile().cost), next(one for one in PAIRS if one.name == pair)
    return Slo(
        ttft_s=round(times.ttft * cost.prefill_s(nearest_rank(prompts, 0.9), 0, CHUNK_TOKENS), 3),
        tpot_s=round(times.tpot * cost.decode_s(1, sum(prompts) / len(prompts)), 4),
    )


def promised(limits: Slo) -> Step:
    return lambda requests: (replace(one, slo=limits) for one in requests)


@lru_cache
def window(trace: str, pair: str, num_requests: int) -> TraceWindow:
    """`step`: half of the requests are Mooncake's, then half are Azure's, each part with its own promises; the second
    part comes so fast that both ask for the same share of the cluster."""
    if trace != "step":
        name = trace.removesuffix("-jittered")
        steps = [jittered(SEED, published(name).quantum_s)] if trace.endswith("-jittered") else []
        return cut(published(name), first(num_requests), *steps, promised(slo(name, pair)))
    before = window("mooncake-jittered", pair, num_requests // 2)
    after = window("azure", pair, num_requests // 2)
    needs = [one.rate_rps * _worker_s(one) for one in (before, after)]
    at_s = before.requests[-1].arrival_s
    joined: Trace = Joined(before, Reshaped(after, rate_scaled(needs[0] / needs[1])), at_s)
    return cut(joined)


def _worker_s(one: TraceWindow) -> float:
    needed = demand(Question(windows=(one,), profile=profile(), num_workers=NUM_WORKERS, slo=Slo()))
    return needed.prefill_s + needed.decode_s


def question(trace: str, pair: str, policy: str, num_requests: int, tolerance: float) -> Question:
    one = window(trace, pair, num_requests)
    return Question(
        windows=(one,),
        profile=profile(),
        num_workers=NUM_WORKERS,
        slo=Slo(),  # each request has its own targets
        router=RouterSettings(policy=policy.removesuffix(DISAGGREGATED)),
        link=LINK,
        block_size=one.block_tokens or BLOCK_TOKENS,
        seed=SEED,
        tolerance=tolerance,
    )


def highest_possible_rps(asked: Question, num_prefill: int, rate_rps: float) -> float:
    """The highest rate, to FINAL_TOLERANCE, at which some scheduler might serve the target share of the requests in
    time on this split; `rate_rps` is a rate at which a policy does."""
    [only], config = asked.windows, asked.config(num_prefill)

    def is_possible(rate_rps: float) -> bool:
        bound = upper_bound(Reshaped(only, rate_scaled(rate_rps / only.rate_rps)), config)
        return bound.most >= TARGET * bound.requests

    low, high = rate_rps, 1.1 * rate_rps
    while rate_rps and high < TRICKLE * rate_rps and is_possible(high):
        low, high = high, 1.5 * high
    while high > low * (1.0 + FINAL_TOLERANCE):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return high


# ---- Cells
OVERLOADED: Final = "chat-13b"


@dataclass(frozen=True, slots=True)
class Cell:
    table: str
    trace: str = ""
    pair: str = ""
    policy: str = "goodput"

    @property
    def name(self) -> str:
        return ".".join(part for part in (self.table, self.trace, self.pair, self.policy) if part)


def cells() -> Iterator[list[Cell]]:
    """Cells in waves: a wave needs the results of the earlier ones."""
    pairs = [one.name for one in PAIRS]
    yield [Cell("goodput", trace, pair, policy) for trace, pair, policy in itertools.product(TRACES, pairs, POLICIES)]
    yield [Cell("overload", trace, OVERLOADED, policy) for trace, policy in itertools.product(TRACES, POLICIES)]


def compute(cell: Cell, out: Path) -> dict[str, Any]:
    began_s = time.process_time()
    line = {"goodput": _goodput, "overload": _overload}[cell.table](cell, out)
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


def _read(out: Path, cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{cell.name}.json").read_text())
    return found


def _compute_and_keep(cell: Cell, out: Path) -> str:
    line = compute(cell, out)
    partial = out / f"{cell.name}.partial"
    partial.write_text(json.dumps(line) + "\n")
    partial.rename(out / f"{cell.name}.json")
    return f"{line['cpu_s']:7.1f} s  {cell.name}  {line.get('verdict', '')}"


# ---- Tables
Lines = dict[str, dict[str, Any]]  # by the cell's name


def render(lines: Lines) -> str:
    tables = (_promises, _goodput_table, _ratios, _overload_table)
    return "\n".join(line for table in tables for line in table(lines))


def _promises(lines: Lines) -> Iterator[str]:
    yield f"### Promises ({PROFILE}, {NUM_WORKERS} workers)\n"
    yield table_head(("pair", "multiples", "Mooncake TTFT / TPOT", "Azure TTFT / TPOT", "after"))
    for pair in PAIRS:
        shown = [
            f"{1e3 * one.ttft_s:.0f} / {1e3 * one.tpot_s:.1f} ms"
            for one in (slo("mooncake", pair.name), slo("azure", pair.name))
        ]
        yield f"| {pair.name} | {pair.ttft:g}x / {pair.tpot:g}x | {shown[0]} | {shown[1]} | {pair.source} |"
    yield ""


def _goodput_table(lines: Lines) -> Iterator[str]:
    yield (
        "### Goodput, requests/s per worker, at each policy's best split (prefill:decode, prompt tokens in time, share"
        " of the highest rate that is possible on it)\n"
    )
    for trace in TRACES:
        yield table_head([trace, *(pair.name for pair in PAIRS)])
        for policy in POLICIES:
            yield table_row([policy, *(_shown(lines.get(f"goodput.{trace}.{pair.name}.{policy}")) for pair in PAIRS)])
        yield ""


def _shown(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if not line["rate_rps"]:
        return "not attainable"
    split, tokens = f"{line['split']}:{line['decode']}", f"{line['token_attainment']:.0%}"
    return f"{line['rate_rps'] / NUM_WORKERS:.3g} ({split}, {tokens}, {_of_bound(line['rate_rps'], line)})"


def _of_bound(rate_rps: float, line: dict[str, Any]) -> str:
    """Share of the rate that no scheduler exceeds; empty in results that were computed without it."""
    return f"{rate_rps / line['bound_rps']:.0%} of bound" if line.get("bound_rps") else "no bound"


def _ratios(lines: Lines) -> Iterator[str]:
    yield "### The goodput policy over each baseline\n"
    baselines = [one for one in POLICIES if one != "goodput"]
    yield table_head(["trace, pair", *baselines])
    for trace in TRACES:
        for pair in PAIRS:
            ours = lines.get(f"goodput.{trace}.{pair.name}.goodput")
            if ours is None:
                continue
            row = [f"{trace}, {pair.name}"]
            for policy in baselines:
                theirs = lines.get(f"goodput.{trace}.{pair.name}.{policy}")
                row.append("" if theirs is None else _ratio(ours["rate_rps"], theirs["rate_rps"]))
            yield table_row(row)
    yield ""


def _ratio(ours: float, theirs: float) -> str:
    if not theirs:
        return "only ours" if ours else "neither"
    return f"{ours / theirs:.2f}"


def _overload_table(lines: Lines) -> Iterator[str]:
    found = [line for name, line in lines.items() if name.startswith("overload.") and line["peak_rps"]]
    if not found:
        return
    yield "### Three times the peak rate: requests/s that met both promises\n"
    columns = (
        "trace, pair|policy|at the peak|at 3x|kept|at 3x, of bound|"
        "rejected|within 10 ms|after p50 / max|retry_after_s p50 / max"
    )
    yield table_head(columns.split("|"))
    for line in found:
        _, trace, pair, policy = line["cell"].split(".")
        kept = line["met_rps"] / line["peak_rps"]
        within = f"{line['rejected_within_10ms'] / line['rejected']:.1%}" if line["rejected"] else ""
        waited, again = line["rejection_s"], line["retry_after_s"]
        row = [f"{trace}, {pair}", policy, f"{line['peak_rps']:.3g}", f"{line['met_rps']:.3g}"]
        row += [
            f"{kept:.0%}",
            _of_bound(line["met_rps"], line),
            str(line["rejected"]),
            within,
            _times(waited, 1e3, " ms"),
            _times(again, 1.0, " s"),
        ]
        yield table_row(row)
    yield ""


def _times(spread: dict[str, float], factor: float, unit: str) -> str:
    return f"{factor * spread['p50']:.3g} / {factor * spread['max']:.3g}{unit}" if spread else ""


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
        print(render({line["cell"]: line for line in lines}))
        return
    with ProcessPoolExecutor(args.jobs) as processes:
        for wave in cells():
            left = [one for one in wave if args.only in one.name and not (args.out / f"{one.name}.json").exists()]
            for line in processes.map(_compute_and_keep, left, itertools.repeat(args.out)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
