"""`pdserve simulate`: what a cluster would do with a trace, by the router's and the workers' own decision code.

Without a trace it runs a built-in workload; alone it compares three policies at rising rates. A recording brings its
own cluster. Several policies or rates are a run each. Equal arguments give equal output.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdserve.cli.disturb import add_disturbance_flags
from pdserve.cli.progress import Progress
from pdserve.cli.scene import DEFAULT_PROFILE, DEFAULT_SLO, DEFAULT_WORKERS, make_scene
from pdserve.core.errors import ConfigError
from router.policy import POLICIES
from router.policy.rules import RULES
from simulator.comparison import Run, as_json, highest_held, rows_of
from simulator.metrics import summarise
from simulator.model import RequestRow, SimConfig, Trace
from simulator.report import page
from simulator.reshape import Reshaped, rate_scaled
from simulator.tables import render
from simulator.traces import FORMATS
from simulator.world import simulate

HELP = "run a trace through a simulated cluster"


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what arrives")
    what.add_argument("--trace", metavar="FILE", help=f"{', '.join(one.name for one in FORMATS)} (a built-in one)")
    what.add_argument("--limit", type=int, metavar="N", help="only its first N requests")
    what.add_argument(
        "--jitter", type=int, metavar="SEED", help="spread arrivals that a trace rounded (Mooncake's 3 s)"
    )
    rate = what.add_mutually_exclusive_group()
    rate.add_argument("--rate-scale", type=float, metavar="X", help="X times its arrivals per second (1)")
    rate.add_argument("--rates", type=_floats, metavar="X,Y,..", help="a run for each of several rate scales")
    where = parser.add_argument_group("where it arrives")
    where.add_argument("--profile", metavar="NAME", help=f"of each worker, or a file ({DEFAULT_PROFILE})")
    where.add_argument("--prefill", type=int, metavar="N", help=f"prefill workers ({DEFAULT_WORKERS})")
    where.add_argument("--decode", type=int, metavar="M", help=f"decode workers ({DEFAULT_WORKERS})")
    where.add_argument("--link", metavar="NAME", help="between them; one of the profile's (its first)")
    where.add_argument("--routers", type=int, default=1, metavar="K", help="each sees the others' work late (1)")
    add_disturbance_flags(parser)
    slo = DEFAULT_SLO
    how = parser.add_argument_group("how it is placed and judged")
    how.add_argument("--policy", metavar="NAME[,..]", help=f"one or several of {', '.join(POLICIES)} (goodput)")
    how.add_argument("--rules-off", default="", metavar="A,B", help=f"goodput without {', '.join(RULES)}")
    how.add_argument("--slo-ttft", type=float, metavar="S", help=f"promised time to first token ({slo.ttft_s:g})")
    how.add_argument("--slo-tpot", type=float, metavar="S", help=f"promised time per token ({slo.tpot_s:g})")
    how.add_argument("--noise", type=float, default=0.0, metavar="X", help="relative spread of a step's time (0)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (0)")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print one object")
    shown.add_argument("--rows", metavar="FILE", help="write a line for each request: CSV if so named, else JSON lines")
    shown.add_argument("--html", metavar="FILE", help="write a page with plots; it needs no network")


def run(args: argparse.Namespace) -> int:
    scene = make_scene(args)
    for path in (args.rows, args.html):
        _check_writable(path)
    span_s = _span_s(scene.trace)
    runs = []
    for scale in scene.rate_scales:
        trace = Reshaped(scene.trace, rate_scaled(scale))
        runs += [_run(policy, scale, trace, scene.config(policy), span_s / scale) for policy in scene.policies]
    if args.rows:
        _write_rows(args.rows, runs)
    if args.html:
        Path(args.html).write_text(page(runs, cluster=scene.cluster), encoding="utf-8")
    print(json.dumps(_object(runs, scene.cluster)) if args.json else render(runs, scene.cluster))
    return 0


def _run(policy: str, scale: float, trace: Trace, config: SimConfig, span_s: float) -> Run:
    progress = Progress(f"{policy} x{scale:g}", span_s)

    def on_ended(row: RequestRow) -> bool:
        progress.at(row.arrival_s)
        return True

    begin_s = time.monotonic()
    try:
        result = simulate(trace, config, on_ended)
    finally:
        progress.close()
    result = dataclasses.replace(result, trace=trace.name, wall_s=time.monotonic() - begin_s)
    return Run(policy=policy, rate_scale=scale, result=result, summary=summarise(result))


def _span_s(trace: Trace) -> float:
    """Until the last arrival. Reads the whole trace, so that a wrong row is told before anything runs for long."""
    last_s = 0.0
    for one in trace:
        last_s = one.arrival_s
    return last_s


def _object(runs: Sequence[Run], cluster: str) -> dict[str, object]:
    """The first run's figures; and where there are others, all runs' beside them."""
    found = {"cluster": cluster} | as_json(runs[0])
    if len(runs) > 1:
        found |= {"highest_held_rps": highest_held(runs), "runs": [as_json(run) for run in runs]}
    return found


def _write_rows(path: str, runs: Sequence[Run]) -> None:
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        rows: Iterator[dict[str, object]] = rows_of(runs)
        if path.lower().endswith(".csv"):
            writer: csv.DictWriter[str] | None = None
            for row in rows:
                if writer is None:
                    writer = csv.DictWriter(file, list(row), lineterminator="\n")
                    writer.writeheader()
                writer.writerow(row)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _check_writable(path: str | None) -> None:
    if path:
        try:
            Path(path).open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError("file", path, f"a file that can be written ({error.strerror})") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _floats(text: str) -> list[float]:
    return sorted({float(one) for one in text.split(",")})
