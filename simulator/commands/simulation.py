"""Runs `pdserve simulate`: makes the input from the flags, runs the simulations, and prints and writes the
results."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from pdserve.core.errors import ConfigError
from pdserve.core.json_text import to_json
from pdserve.core.types import Role, Slo
from pdserve.plot.drawing import figure_svg
from pdserve.plot_flag import check_plot, origin, write_plot
from pdserve.profiles import load_profile
from pdserve.progress import ProgressLine
from router.policy import find_policy
from router.policy.interface import check_rules
from router.recording.recording import RecordFile
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.commands import flags
from simulator.commands.flags import faults
from simulator.metrics import summarise
from simulator.model import RequestRow, SimConfig, Trace, WorkerShape
from simulator.report.comparison import PolicyRun, as_json, highest_sustained, render, rows_of
from simulator.report.figures import figure, page
from simulator.search.bound import Bound, upper_bound
from simulator.search.layouts import make_workers
from simulator.traces.files import FileTrace
from simulator.traces.recorded import RecordedCluster
from simulator.traces.reshaped import Reshaped, Step, first, jittered, rate_scaled
from simulator.traces.workloads import Agents, make_workload

# --- input ----------------------------------------------------------------------------------------------------
# The trace, the cluster and its settings. A recording contains its cluster, policy and targets. A flag about the
# cluster replaces all recorded workers.

_COMPARED: Final = "goodput,round-robin,colocated"  # goodput also without prefill workers
_COMPARED_AT: Final = (1.0, 1.5, 2.0, 2.5)  # multiples of the built-in workload's rate, from low load to overload
_BLOCK_TOKENS: Final = 64  # for traces without block ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInput:
    trace: Trace
    cluster: str  # name for display
    policies: tuple[str, ...]
    rate_scales: tuple[float, ...]
    base: SimConfig
    is_demonstration: bool = False
    rules_off: tuple[str, ...] = ()  # of the goodput policy; other policies ignore them

    @property
    def variants(self) -> tuple[tuple[str, bool], ...]:
        """Policies, and whether one that can use prefill workers runs without them."""
        plain = [(policy, False) for policy in self.policies]
        has_split = any(one.role is Role.PREFILL for one in self.base.workers)
        return (*plain[:1], (self.policies[0], True), *plain[1:]) if self.is_demonstration and has_split else (*plain,)

    def config(self, policy: str, is_whole: bool = False) -> SimConfig:
        """With a policy that uses no prefill workers, or if `is_whole`, each of the same machines prefills and
        decodes."""
        entry, workers = find_policy(policy), self.base.workers
        if is_whole or not entry.uses_prefill:
            # A recording does not contain the decode speed of a prefill worker.
            both = next(one for one in workers if one.role is Role.DECODE)
            workers = tuple(dataclasses.replace(both, worker_id=one.worker_id) for one in workers)
        router = dataclasses.replace(
            self.base.router, policy=policy, rules_off=self.rules_off if entry.obeys_rules_off else ()
        )
        return dataclasses.replace(self.base, workers=workers, router=router)


def make_input(args: argparse.Namespace, on_read: Callable[[int, int], None]) -> SimulationInput:
    """`on_read` is FileTrace's. Raises ConfigError or InvalidRequest with the name of the flag."""
    rules_off = _names(args.rules_off)
    check_rules(rules_off)
    file = FileTrace(args.trace, on_read) if args.trace else None
    recorded = file.cluster() if file is not None else None
    slo = recorded.slo if recorded is not None else Slo(ttft_s=flags.SLO_TTFT_S, tpot_s=flags.SLO_TPOT_S)
    slo = Slo(
        ttft_s=slo.ttft_s if args.slo_ttft is None else args.slo_ttft,
        tpot_s=slo.tpot_s if args.slo_tpot is None else args.slo_tpot,
    )
    policies, rate_scales, is_demonstration = _compared(args, file, recorded)
    common = {"slo": slo, "num_routers": args.routers, "seed": args.seed, "noise": args.noise}
    if file is not None:
        for flag, value in (("workload", args.workload), ("duration", args.duration)):
            if value is not None:
                raise ConfigError(flag, value, "no --trace beside it: a trace replaces the workload")
    built_in = make_workload(args.workload or "chat", duration_s=args.duration, seed=args.seed)
    if args.ended_sessions is not None:
        if file is not None or not isinstance(built_in, Agents):
            raise ConfigError("ended-sessions", args.ended_sessions, "--workload agents beside it")
        built_in = dataclasses.replace(built_in, ended_share=args.ended_sessions)
    trace = Reshaped(file or built_in, *_steps(args, file))
    tiers = _tiers(args)
    cluster_flags = (args.profile, args.prefill, args.decode, args.link)
    if recorded is not None and not tiers and all(flag is None for flag in cluster_flags):
        broken = recorded.faults + faults(args, [one.worker_id for one in recorded.workers])
        rules_off = rules_off or recorded.router.rules_off
        base, cluster = recorded.config(**common, faults=broken), "the recorded cluster"
    else:
        profile = load_profile(args.profile or flags.PROFILE)
        counts = (flags.WORKERS if count is None else count for count in (args.prefill, args.decode))
        workers = tuple(
            dataclasses.replace(one, **tiers) for one in make_workers(profile, *counts, link=args.link or "")
        )
        base = SimConfig(
            workers=workers,
            router=RouterSettings(),
            block_size=trace.block_tokens or _BLOCK_TOKENS,
            faults=faults(args, [one.worker_id for one in workers]),
            **common,
        )
        cluster = profile.name
    if args.no_kv_pull:
        workers = tuple(dataclasses.replace(one, pulls_kv=False) for one in base.workers)
        base = dataclasses.replace(base, workers=workers)
    return SimulationInput(
        trace=trace,
        cluster=cluster,
        policies=policies,
        rate_scales=rate_scales,
        base=base,
        is_demonstration=is_demonstration,
        rules_off=rules_off,
    )


def _tiers(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of each worker's shape that flags give."""
    found: dict[str, Any] = {}
    for flag, value, field, unit in (
        ("host-gib", args.host_gib, "host_bytes", 2**30),
        ("host-gb-per-s", args.host_gb_per_s, "host_bytes_per_s", 1e9),
        ("disk-gib", args.disk_gib, "disk_bytes", 2**30),
        ("disk-gb-per-s", args.disk_gb_per_s, "disk_bytes_per_s", 1e9),
    ):
        if value is not None:
            if not 0.0 <= value < math.inf:
                raise ConfigError(flag, value, "a finite number, at least 0")
            found[field] = int(value * unit) if unit == 2**30 else value * unit
    return found


def _compared(
    args: argparse.Namespace, file: FileTrace | None, recorded: RecordedCluster | None
) -> tuple[tuple[str, ...], tuple[float, ...], bool]:
    """The policies and the rates to simulate: several of each, for a demonstration (True), if no flag chooses a trace,
    a policy or a rate."""
    choices = (file, args.workload, args.policy, args.rates, args.rate_scale)
    is_default = all(one is None for one in choices)
    policy = args.policy or (_COMPARED if is_default else recorded.router.policy if recorded else "goodput")
    policies = _names(policy)
    for name in policies or (policy,):
        find_policy(name)  # raises ConfigError
    one_rate = (1.0 if args.rate_scale is None else args.rate_scale,)
    return policies, tuple(args.rates) if args.rates else _COMPARED_AT if is_default else one_rate, is_default


def _steps(args: argparse.Namespace, file: FileTrace | None) -> Sequence[Step]:
    steps: list[Step] = []
    if args.limit is not None:
        steps.append(first(args.limit))
    if args.jitter is not None:
        if file is None or not file.quantum_s:
            of = f"{file.format.name}'s" if file is not None else "the built-in one's"
            raise ConfigError("jitter", args.jitter, f"a trace whose timestamps are rounded; {of} are not")
        steps.append(jittered(args.jitter, file.quantum_s))
    return steps


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


# --- runs and results -----------------------------------------------------------------------------------------

MAX_RECORDED_BYTES: Final = 2**30


def run(args: argparse.Namespace) -> None:
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
            for policy, is_whole in given.variants:
                config = given.config(policy, is_whole)
                if config.workers not in bounds:
                    bounds[config.workers] = _bound(trace, config, progress)
                reading.is_shown = False
                number, of = len(runs) + 1, len(given.rate_scales) * len(given.variants)
                progress.begin(f"{policy} x{scale:g}" + (f", run {number} of {of}" if of > 1 else ""), span_s / scale)
                run = _run(policy, scale, trace, config, progress, bounds[config.workers], args.record)
                runs.append(dataclasses.replace(run, is_whole=is_whole))
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
