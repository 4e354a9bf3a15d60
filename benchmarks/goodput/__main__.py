r"""Goodput of real clusters on this machine: our policy against round-robin and colocated, as many processes each.

    python -m benchmarks.goodput                                  # some minutes: two rates, one seed
    python -m benchmarks.goodput --only goodput,colocated --rates 4,8,12 --seeds 1,2,3 --seconds 30
    python -m benchmarks.goodput --model FOLDER --prompts 32-512 --peer-python PYTHON   # beside `vllm serve`
    python -m benchmarks.goodput --model FOLDER --prompts 32-512 --peer-python PYTHON --engine vllm   # the same engine

Open loop: Poisson arrivals, short and long prompts mixed, every prompt different. Attainment is joint: a request counts
if its whole answer came and met both its TTFT and its TPOT target on the client's clock; rejected and failed requests
are misses. Goodput is the highest rate with 90 % attainment, interpolated between two rates. For each seed, each policy
gets a fresh cluster in turn, so that other load of the machine affects all of them; the order changes with the seed.

With --engine vllm one worker of pdserve, which prefills and decodes with vLLM's model runner, stands beside `vllm
serve`: the same model and dtype, the same cores, and no prefix to find in a cache.

Error is the median of |predicted - actual| / actual over requests that came `--settle` seconds after the cluster's
first, from the router's explanations. Floor is the same error of one request that is repeated on the idle cluster,
against the median of its repeats; no prediction can be better. Simulated is the recorded run in the simulator, with the
same requests and the costs that its router learned. Client, router and workers share this machine's cores. If single
batches differ from their fitted cost by more than the bars, the machine is unpredictable. Steps that only sleep show
whether it is:

    python -m benchmarks.goodput --model toy --set worker.toy_step_s=0.012 --set worker.kv_blocks=4000 \
        --set worker.max_context_tokens=2048
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.goodput.load import MIXED, Lengths
from benchmarks.goodput.run import Cell, Contender, Course, add_simulated, attained, run
from benchmarks.goodput.vllm_server import VLLM
from benchmarks.harness import table_head, table_row
from benchmarks.openloop import percentile
from pdserve.core.cost.step_rule import LONGEST_GAP
from pdserve.core.json_text import to_json
from pdserve.core.types import Slo

CONTENDERS: Final = (
    Contender("goodput", 1, 1),
    Contender("goodput", 0, 2),
    Contender("goodput", 0, 1),
    Contender("round-robin", 1, 1),
    Contender("colocated", 0, 2),
)
COLOCATED: Final = "goodput 0P+1D"  # beside `vllm serve`
TARGET: Final = 0.9
BARS: Final = {"ttft": 0.15, "tpot": 0.10, "simulated": 0.10, "gaps": 0.001, "behind": 0.01, "share": 1.0 / 1.15}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pdserve/models/stdlib-5m")
    parser.add_argument("--rates", default="4,10", help="requests per second, rising (4,10)")
    parser.add_argument("--seeds", default="1", help="one run of everything for each (1)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each rate (15)")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds until predictions count (15)")
    parser.add_argument("--ttft", type=float, default=0.5, help="target in seconds (0.5)")
    parser.add_argument("--tpot", type=float, default=0.05, help="target in seconds (0.05)")
    parser.add_argument("--engine", choices=("own", "vllm"), default="own", help="of workers; vllm: by --peer-python")
    parser.add_argument("--only", help="contenders whose label begins so, by comma (all; --engine vllm: one worker)")
    parser.add_argument("--prompts", type=_range, metavar="A-B", help="tokens of each prompt (short and long mixed)")
    parser.add_argument("--answers", type=_range, metavar="A-B", default=(16, 64), help="tokens of each answer (16-64)")
    parser.add_argument("--peer-python", default="", help="a python with vllm, whose server is another contender")
    parser.add_argument("--peer-dtypes", help="its dtypes (float32,bfloat16; with --engine vllm one, bfloat16)")
    parser.add_argument("--set", action="append", default=[], metavar="KIND.FIELD=VALUE", help="as of `pdserve up`")
    parser.add_argument("--json", metavar="FILE", help="every request's outcome; - writes to stdout")
    parser.add_argument("--record", metavar="FOLDER", help="keep the routers' recordings there")
    flags = parser.parse_args()
    rates = _numbers(flags.rates, "--rates")
    seeds = [int(seed) for seed in _numbers(flags.seeds, "--seeds")]
    is_vllm = flags.engine == "vllm"
    dtypes = (flags.peer_dtypes or ("bfloat16" if is_vllm else "float32,bfloat16")).split(",")
    if is_vllm and not (flags.peer_python and len(dtypes) == 1):
        parser.error("--engine vllm: give --peer-python (make vllm-env), and at most one dtype")
    only = flags.only if flags.only is not None else COLOCATED if is_vllm else ""
    chosen = [one for one in CONTENDERS if one.label.startswith(tuple(only.split(",")))]
    if flags.peer_python:
        chosen += [Contender(VLLM, 0, 1, dtype) for dtype in dtypes]
    if not chosen:
        parser.error(f"--only: none of {', '.join(one.label for one in CONTENDERS)} begins so")
    course = Course(
        model=flags.model,
        rates=rates,
        seconds=flags.seconds,
        settle_s=flags.settle,
        slo=Slo(ttft_s=flags.ttft, tpot_s=flags.tpot),
        lengths=MIXED if flags.prompts is None else Lengths(prompts=flags.prompts, answers=flags.answers),
        sets=[*(vllm_workers(flags.peer_python, dtypes[0]) if is_vllm else ()), *flags.set],
        peer_python=flags.peer_python,
    )
    cells: list[Cell] = []
    progress = Progress(len(chosen) * len(seeds) * len(rates))
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(flags.record or passing)
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            for contender in chosen if number % 2 == 0 else reversed(chosen):
                progress.say(f"{contender.label}, seed {seed}: starts and warms")
                record = folder / f"{contender.label}-{seed}.jsonl".replace(" ", "-")
                ran: list[Cell] = []

                def on_cell(cell: Cell, ran: list[Cell] = ran) -> None:
                    ran.append(cell)
                    kept = cell.kept(course.slo)
                    progress.step(f"{cell.contender}, {cell.rate_rps:g} requests/s, seed {cell.seed}: {kept:.0%} kept")

                run(contender, course, seed, record, on_cell)
                if contender.policy != VLLM:
                    add_simulated(record, ran)
                cells += ran
    progress.end()
    print(report(cells, course, seeds))
    if flags.json:
        text = to_json(as_json(cells, course))
        print(text) if flags.json == "-" else Path(flags.json).write_text(text + "\n")


def vllm_workers(python: str, dtype: str) -> list[str]:
    """Settings of workers with vLLM's runner, in the dtype of the server beside them."""
    return ["worker.engine=vllm", f"worker.engine_python={python}", f"worker.dtype={dtype}"]


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected two token counts such as 32-512")
    return int(low), int(high)


def report(cells: Sequence[Cell], course: Course, seeds: Sequence[int]) -> str:
    """Markdown: attainment per rate, goodput, prediction errors, and which bars hold."""
    slo = course.slo
    lines = [
        f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, {course.seconds:g} s a rate, "
        f"seeds {', '.join(map(str, seeds))}.",
        "Joint attainment, mean over seeds (lowest .. highest):",
        "",
        table_head(["requests/s", *(f"{rate:g}" for rate in course.rates), "goodput/s", "of it simulated"]),
    ]
    goodputs: dict[str, float] = {}
    held: list[str] = []
    for label in dict.fromkeys(cell.contender for cell in cells):
        mine = [cell for cell in cells if cell.contender == label]
        texts = []
        for rate in course.rates:
            shares = [cell.kept(slo) for cell in mine if cell.rate_rps == rate]
            spread = f" ({min(shares):.0%} .. {max(shares):.0%})" if len(shares) > 1 else ""
            texts.append(f"{statistics.mean(shares):.0%}{spread}")
        live = _goodput(course.rates, mine, [cell.kept(slo) for cell in mine])
        goodputs[label] = live
        simulated = math.nan
        if all(cell.simulated for cell in mine):
            shares = [sum(cell.simulated) / len(cell.simulated) for cell in mine]
            simulated = _goodput(course.rates, mine, shares)
            if live:
                off = abs(simulated / live - 1.0)
                held.append(_bar(f"{label}: simulated goodput against live", off, BARS["simulated"]))
        lines.append(table_row([label, *texts, f"{live:.2f}", f"{simulated:.2f}"]))
    lines += ["", "Error of predictions (median), p50 and p90 of what clients saw:", ""]
    lines += [
        table_head(("", "predicted", "TTFT error (floor)", "TPOT error (floor)", "TTFT ms", "TPOT ms", "not served")),
    ]
    for label in goodputs:
        mine = [cell for cell in cells if cell.contender == label]
        ttft = [error for cell in mine for error in cell.ttft_errors]
        tpot = [error for cell in mine for error in cell.tpot_errors]
        rows = [row for cell in mine for row in cell.rows]
        served = [row for row in rows if row.outcome == "served"]
        times = [_times([row.ttft_s for row in served]), _times([row.tpot_s for row in served])]
        errors = [percentile(ttft, 0.5), percentile(tpot, 0.5)]
        spreads = [one.floor for one in mine]
        floors = [percentile([off for one in spreads for off in one.ttft], 0.5)]
        floors.append(percentile([off for one in spreads for off in one.tpot], 0.5))
        lines.append(
            f"| {label} | {len(ttft)} | {errors[0]:.1%} ({floors[0]:.1%}) | {errors[1]:.1%} ({floors[1]:.1%}) | "
            f"{times[0]} | {times[1]} | "
            f"{len(rows) - len(served)} of {len(rows)} |"
        )
        if label.startswith("goodput") and ttft:
            held.append(_bar(f"{label}: TTFT prediction", errors[0], BARS["ttft"]))
            held.append(_bar(f"{label}: TPOT prediction", errors[1], BARS["tpot"]))
    longest_s = LONGEST_GAP * slo.tpot_s
    lines += ["", f"Gaps between two messages of tokens, within {longest_s * 1e3:.0f} ms (the default of itl_s):", ""]
    lines += [table_head(("", "gaps", "within", "p99.9 ms", "longest ms"))]
    for label in goodputs:
        gaps_s = [gap_s for cell in cells if cell.contender == label for row in cell.rows for gap_s in row.gaps_s]
        if not gaps_s:
            continue
        over = sum(gap_s > longest_s for gap_s in gaps_s) / len(gaps_s)
        high_ms, most_ms = 1e3 * percentile(gaps_s, 0.999), 1e3 * max(gaps_s)
        lines.append(f"| {label} | {len(gaps_s)} | {1.0 - over:.2%} | {high_ms:.0f} | {most_ms:.0f} |")
        if label.startswith("goodput"):
            held.append(_bar(f"{label}: gaps above itl_s", over, BARS["gaps"]))
    best = max((value for label, value in goodputs.items() if label.startswith("colocated")), default=0.0)
    for label in ("goodput 1P+1D", "goodput 0P+2D"):
        if best and label in goodputs:
            held.append(_bar(f"{label}: goodput below colocated", max(0.0, 1.0 - goodputs[label] / best), 0.05))
    for label in (one for one in goodputs if one.startswith(VLLM) and goodputs.get(COLOCATED)):
        means = [_means(course.rates, cells, one, slo) for one in (COLOCATED, label)]
        behind = max(0.0, *(theirs - ours for ours, theirs in zip(*means, strict=True)))
        held.append(_bar(f"{COLOCATED}: attainment behind {label} at its worst rate", behind, BARS["behind"]))
        share = goodputs[label] / goodputs[COLOCATED]
        held.append(_bar(f"{label}: goodput as a share of that of {COLOCATED}", share, BARS["share"]))
    lines += ["", "Error of predictions by rate, TTFT and TPOT (medians); of single batches beside it, by worker:", ""]
    lines.append(table_head(["requests/s", *(f"{rate:g}" for rate in course.rates), "batches"]))
    for label in goodputs:
        mine = [cell for cell in cells if cell.contender == label]
        texts = []
        for rate in course.rates:
            there = [cell for cell in mine if cell.rate_rps == rate]
            ttft_off = percentile([error for cell in there for error in cell.ttft_errors], 0.5)
            tpot_off = percentile([error for cell in there for error in cell.tpot_errors], 0.5)
            texts.append(f"{ttft_off:.0%}, {tpot_off:.0%}")
        batches = ", ".join(f"{name} {error:.0%}" for name, error in mine[-1].batch_errors.items())
        lines.append(table_row([label, *texts, batches]))
    worst_s = max(cell.late_start_s for cell in cells)
    return "\n".join([*lines, "", *held, f"Latest send of the client: {worst_s * 1e3:.0f} ms after its time."])


def _bar(what: str, seen: float, bar: float) -> str:
    return f"- {what}: {seen:.2%}, bar {bar:.1%}: {'met' if seen <= bar + 1e-9 else 'MISSED'}"  # 1.0 - 0.99 > 0.01


def _means(rates: Sequence[float], cells: Sequence[Cell], label: str, slo: Slo) -> list[float]:
    """The attainment at each rate, over seeds."""
    mine = [cell for cell in cells if cell.contender == label]
    return [statistics.mean(cell.kept(slo) for cell in mine if cell.rate_rps == rate) for rate in rates]


def _goodput(rates: Sequence[float], cells: Sequence[Cell], shares: Sequence[float]) -> float:
    """Goodput of the means over seeds."""
    means = []
    for rate in rates:
        at_rate = [share for cell, share in zip(cells, shares, strict=True) if cell.rate_rps == rate]
        means.append(statistics.mean(at_rate))
    return attained(rates, means, TARGET)


def _times(seconds: Sequence[float]) -> str:
    return f"{percentile(seconds, 0.5) * 1e3:.0f}, {percentile(seconds, 0.9) * 1e3:.0f}"


def as_json(cells: Sequence[Cell], course: Course) -> list[dict[str, Any]]:
    return [
        {
            "contender": cell.contender,
            "rate_rps": cell.rate_rps,
            "seed": cell.seed,
            "attainment": cell.kept(course.slo),
            "simulated_attainment": sum(cell.simulated) / len(cell.simulated) if cell.simulated else None,
            "ttft_errors": cell.ttft_errors,
            "tpot_errors": cell.tpot_errors,
            "ttft_floor": cell.floor.ttft,
            "tpot_floor": cell.floor.tpot,
            "client_delay_s": cell.late_start_s,
            "requests": [
                {"outcome": row.outcome, "tokens": row.tokens, "ttft_s": row.ttft_s, "tpot_s": row.tpot_s}
                if row.outcome == "served"
                else {"outcome": row.outcome, "tokens": row.tokens}
                for row in cell.rows
            ],
        }
        for cell in cells
    ]


def _numbers(text: str, flag: str) -> list[float]:
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0.0 or sorted(found) != found:
        sys.exit(f"goodput: {flag}: got {text!r}, expected rising numbers above 0, by comma")
    return found


class Progress:
    """One line on stderr: a progress bar and the current run."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def say(self, what: str) -> None:
        full = 24 * self._done // self._total
        print(f"\r\033[K[{'#' * full}{'.' * (24 - full)}] {self._done}/{self._total} {what}", end="", file=sys.stderr)
        sys.stderr.flush()

    def step(self, what: str) -> None:
        self._done += 1
        self.say(what)

    def end(self) -> None:
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
