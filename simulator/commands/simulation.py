"""Carries out `pdserve simulate`: runs the simulations, and prints and writes the results."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

from pdserve.cli.origin import origin
from pdserve.cli.plot_file import check_plot, write_plot
from pdserve.core.errors import ConfigError
from pdserve.core.json_text import to_json
from pdserve.plot.figure import figure_svg
from pdserve.progress import ProgressLine
from router.recording import RecordFile
from simulator.bound import Bound, upper_bound
from simulator.commands.simulation_input import make_input
from simulator.comparison import PolicyRun, as_json, highest_sustained, rows_of
from simulator.figures import figure
from simulator.metrics import summarise
from simulator.model import RequestRow, SimConfig, Trace, WorkerShape
from simulator.report import page
from simulator.reshape import Reshaped, rate_scaled
from simulator.tables import render
from simulator.world import simulate

MAX_RECORDED_BYTES: Final = 2**30


def carry_out(args: argparse.Namespace) -> None:
    runs: list[PolicyRun] = []
    with ProgressLine("simulating") as progress:
        reading = _Reading(progress, Path(args.trace or "").name)
        given = make_input(args, reading)
        check_writable(args.rows)
        check_plot(args)
        if args.record and (len(given.rate_scales) > 1 or len(given.policies) > 1):
            raise ConfigError("record", args.record, "a single run: one policy and one rate")
        span_s = _span_s(given.trace)
        for scale in given.rate_scales:
            trace = Reshaped(given.trace, rate_scaled(scale))
            bounds: dict[tuple[WorkerShape, ...], Bound] = {}
            for policy in given.policies:
                config = given.config(policy)
                if config.workers not in bounds:
                    bounds[config.workers] = _bound(trace, config, progress)
                reading.is_shown = False
                number, of = len(runs) + 1, len(given.rate_scales) * len(given.policies)
                progress.begin(f"{policy} x{scale:g}" + (f", run {number} of {of}" if of > 1 else ""), span_s / scale)
                runs.append(_run(policy, scale, trace, config, progress, bounds[config.workers], args.record))
                reading.is_shown = True
    if args.rows:
        _write_rows(args.rows, runs)
    lines = [origin()] if args.plot else []
    write_plot(
        args,
        svg=lambda: figure_svg(figure(runs, cluster=given.cluster, origin=lines)),
        page=lambda: page(runs, cluster=given.cluster, origin=lines),
    )
    print(to_json(_object(runs, given.cluster)) if args.json else render(runs, given.cluster))


@final
class _Reading:
    """Shows how much of a trace's file has been read. A simulation, which also reads it, shows its own progress."""

    def __init__(self, progress: ProgressLine, name: str) -> None:
        self._progress, self._name = progress, name
        self.is_shown = True

    def __call__(self, done: int, size: int) -> None:
        if not self.is_shown:
            return
        if not done:
            self._progress.begin(f"reading {self._name}", size)
        self._progress.update_bytes(done)


def _bound(trace: Trace, config: SimConfig, progress: ProgressLine) -> Bound:
    def on_share(share: float) -> None:
        if not share:
            progress.begin("upper bound", 1.0)
        progress.update(share)

    return upper_bound(trace, config, on_share)


def _run(
    policy: str, scale: float, trace: Trace, config: SimConfig, progress: ProgressLine, bound: Bound, record: str | None
) -> PolicyRun:
    def on_ended(row: RequestRow) -> bool:
        progress.update(row.arrival_s, f"{row.arrival_s:.0f} s of the trace")
        return True

    file = RecordFile(record, config.router, MAX_RECORDED_BYTES) if record else None
    begin_s = time.monotonic()
    try:
        result = simulate(trace, config, on_ended, on_step=None if file is None else file.step)
    finally:
        if file is not None:
            file.close()
    result = dataclasses.replace(result, trace=trace.name, wall_s=time.monotonic() - begin_s)
    return PolicyRun(policy=policy, rate_scale=scale, result=result, summary=summarise(result), bound=bound)


def _span_s(trace: Trace) -> float:
    """The time until the last arrival. Reads the whole trace, so that an invalid row is reported before a long run."""
    last_s = 0.0
    for one in trace:
        last_s = one.arrival_s
    return last_s


def _object(runs: Sequence[PolicyRun], cluster: str) -> dict[str, object]:
    """The first run's figures; with several runs, also a comparison of all."""
    found = {"cluster": cluster} | as_json(runs[0])
    if len(runs) > 1:
        found |= {"highest_held_rps": highest_sustained(runs), "runs": [as_json(run) for run in runs]}
    return found


def _write_rows(path: str, runs: Sequence[PolicyRun]) -> None:
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
            file.writelines(to_json(row) + "\n" for row in rows)


def check_writable(path: str | None) -> None:
    if path:
        try:
            Path(path).open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError("file", path, f"a file that can be written ({error.strerror})") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
