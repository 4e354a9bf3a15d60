"""Runs for comparison: as plain data, as tables of text, and why the worst requests missed. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.core.types import Path, Role
from simulator.metrics import Summary, is_in_time_tpot, is_in_time_ttft
from simulator.model import RequestRow, SimResult
from simulator.search.bound import Bound
from simulator.search.goodput import TARGET as TARGET
from simulator.search.goodput import Shortage, shortage, surely_misses

# --- worst requests -------------------------------------------------------------------------------------------
# With the reasons in words.


def worst(rows: Iterable[RequestRow], count: int) -> list[RequestRow]:
    """Requests that missed a target: failed ones first, then late ones by how late, then rejected and cancelled
    ones."""
    missed = [row for row in rows if not row.has_met_slo]
    return sorted(missed, key=_badness, reverse=True)[:count]


def lateness(row: RequestRow) -> float:
    """The larger ratio of time to target; above 1 is late. Infinite without a first token."""
    if row.ttft_s is None:
        return math.inf
    return max(row.ttft_s / row.slo.ttft_s, (row.tpot_s or 0.0) / row.slo.tpot_s)


def why(row: RequestRow) -> str:
    """One sentence."""
    if row.outcome == "rejected":
        after_s = (row.ended_s or row.arrival_s) - row.arrival_s
        again = f"; told to retry after {_time(row.retry_after_s)}" if row.retry_after_s is not None else ""
        return f"rejected {_time(after_s)} after its arrival{again}"
    if row.outcome not in ("late", "served"):
        lived = "" if row.ended_s is None else f" {_time(row.ended_s - row.arrival_s)} after its arrival"
        return f"{row.outcome}{lived}, with {row.tokens} of {row.output_tokens} tokens"
    parts = []
    if not is_in_time_ttft(row) and row.ttft_s is not None:
        parts.append(f"first token {_time(row.ttft_s - row.slo.ttft_s)} late, {_share_of_ttft(row)}")
    if not is_in_time_tpot(row) and row.tpot_s is not None:
        parts.append(f"{row.tpot_s / row.slo.tpot_s:.2g} times the target time per token")
    if row.preemptions:
        parts.append(f"preempted {_times(row.preemptions)}")
    if row.attempts > 1:
        parts.append(f"placed {_times(row.attempts)}")
    return "; ".join(parts) or "met both targets"


def _share_of_ttft(row: RequestRow) -> str:
    assert row.ttft_s is not None
    # A transfer overlaps its prefill, so only their sum can be separated from the queue.
    work = "prefill and transfer" if row.path is Path.REMOTE else "prefill"
    spent = {"queue": min(row.queue_s, row.ttft_s), work: max(row.ttft_s - row.queue_s, 0.0)}
    name, longest_s = max(spent.items(), key=lambda item: item[1])
    return f"mostly {name} ({_time(longest_s)} of {_time(row.ttft_s)})"


def _badness(row: RequestRow) -> tuple[int, float, int]:
    order = {"cancelled": 0, "rejected": 1, "late": 2}.get(row.outcome, 3)
    return order, min(lateness(row), 1e9), -row.number


def _time(seconds: float) -> str:
    return f"{1000.0 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


# --- runs as data ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    policy: str
    rate_scale: float
    result: SimResult
    summary: Summary
    bound: Bound | None = None  # of the same trace and workers
    is_whole: bool = False  # the policy without prefill workers, compared with the same policy with them

    @property
    def name(self) -> str:
        """Of all runs that differ only in their rate."""
        return f"{self.policy} {self.split}" if self.is_whole else self.policy

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
    return {"policy": run.name, "rate_scale": run.rate_scale} | flat | slo | {"why": why(row)}


def rows_of(runs: Iterable[PolicyRun]) -> Iterator[dict[str, Any]]:
    return (as_row(run, row) for run in runs for row in run.result.requests)


def highest_sustained(runs: Iterable[PolicyRun]) -> dict[str, float | None]:
    """By name: the highest tried rate that met the target, as did all lower ones; 0 if none did.

    Runs that are too short for a verdict do not count. None: all runs that met the target are too short.
    """
    return {name: one.rate_rps for name, one in sustained(runs).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    rate_rps: float | None  # as in highest_sustained
    is_least: bool = False  # a higher rate met the target, in a run that is too short for a verdict


def sustained(runs: Iterable[PolicyRun]) -> dict[str, Sustained]:
    held: dict[str, Sustained] = {}
    broken: set[str] = set()
    for run in sorted(runs, key=lambda one: one.rate_scale):
        before = held.setdefault(run.name, Sustained(rate_rps=0.0))
        if run.summary.attainment < TARGET:
            broken.add(run.name)
        elif run.name not in broken:
            is_proven = run.shortage is None
            held[run.name] = Sustained(
                rate_rps=run.summary.rate_rps if is_proven else before.rate_rps or None, is_least=not is_proven
            )
    return held


# --- runs as text ---------------------------------------------------------------------------------------------

_TIMES = ("TTFT p50", "p99", "TPOT p50", "p99")
_HEAD = ("POLICY", "P:D", "REQ/S", "ATTAINED", "BOUND", "OF BOUND", "GOODPUT/S", *_TIMES, "REJECTED")
LEGEND = (
    "ATTAINED   requests that were completed and met both targets; GOODPUT/S: how many of them per second",
    "BOUND      requests that any scheduler could have served within both targets, at most",
    "OF BOUND   the ones that met both targets, as a share of BOUND",
)


def render(runs: Sequence[PolicyRun], cluster: str) -> str:
    """The settings, a line for each run, and details of the run, or of the rates if there are several."""
    first = runs[0]
    config = first.result.config
    slo = config.slo
    begin = (
        f"{first.result.trace}: {count(first.summary.requests, 'request')}, {cluster}, seed {config.seed}\n"
        f"targets: first token within {seconds(slo.ttft_s)}, then {seconds(slo.tpot_s)} per token\n"
    )
    lines = [begin, table([_HEAD, *(line(run) for run in runs)])]
    if len(runs) == 1:
        lines += ["", *details(first)]
    elif len({run.rate_scale for run in runs}) > 1:
        lines += ["", f"highest of these rates at which {TARGET:.0%} of the requests met both targets:"]
        lines += [f"  {name}: {text}" for name, text in sustained_texts(runs).items()]
        lines += filter(None, (short_note(runs), disaggregation_note(runs)))
    return "\n".join((*lines, "", *LEGEND))


def sustained_texts(runs: Sequence[PolicyRun]) -> dict[str, str]:
    return {
        name: "no verdict"
        if one.rate_rps is None
        else f"{'at least ' if one.is_least else ''}{one.rate_rps:.3g} requests/s"
        for name, one in sustained(runs).items()
    }


def disaggregation_note(runs: Sequence[PolicyRun]) -> str:
    """Whether disaggregation pays, if the same policy ran with and without it; otherwise empty."""
    whole = next((run for run in runs if run.is_whole), None)
    if whole is None:
        return ""
    rates, texts = highest_sustained(runs), sustained_texts(runs)
    without, split = rates[whole.name], rates[whole.policy]
    if without is None or split is None:
        return ""
    is_paying = split > without
    return (
        f"disaggregation {'pays' if is_paying else 'does not pay'} at these rates: with it, {whole.policy} sustains "
        f"{texts[whole.policy]}, without it {texts[whole.name]}; `pdserve plan` compares all splits"
    )


def short_note(runs: Sequence[PolicyRun]) -> str:
    """The longest required run, if any run is too short for a verdict; otherwise empty. A run in which far too many
    requests missed needs no more of them."""
    short = [
        lack
        for run in runs
        if (lack := run.shortage) is not None and not surely_misses(run.summary.met, run.summary.requests)
    ]
    if not short:
        return ""
    worst = max(short, key=lambda one: one.needed_requests)
    times = math.ceil(worst.needed_requests / max(worst.requests, 1))
    return (
        f"no verdict on {count(len(short), 'run')}, which {'is' if len(short) == 1 else 'are'} too short; for example "
        f"{worst.text}\n"
        f"for a verdict, make the trace {times} times as long (--duration of a built-in workload)"
    )


def details(run: PolicyRun) -> list[str]:
    summary, bound = run.summary, run.bound
    lines = []
    if bound is not None:
        lines.append(
            f"bound     no scheduler serves more than {bound.most} of them in time ({bound.limit}); "
            f"{summary.met} were, {bound.share(summary.met):.1%} of that"
        )
    if summary.misses:
        lines.append("missed    " + ", ".join(f"{held} {name}" for name, held in summary.misses.items()))
    if summary.rejection_s.p99 is not None:
        lines.append(f"rejected  within {seconds(summary.rejection_s.p99)} of arrival (p99)")
    paths = (f"{path} {held} ({met} met both)" for path, (held, met) in summary.paths.items())
    lines.append("paths     " + (", ".join(paths) or "nothing was placed"))
    lines.append(f"tokens    {summary.token_attainment:.1%} in time for a reader at the target rate")
    if summary.cached_share:
        pulled = f", {summary.pulled_share:.1%} after a pull from another worker" if summary.pulled_share else ""
        lines.append(f"cache     {summary.cached_share:.1%} of prompt tokens were found in one{pulled}")
    for role, use in summary.roles.items():
        rows = f", {use.mean_rows:.1f} rows a step" if use.mean_rows else ""
        held = (
            f", KV {use.kv_share:.0%} held, {use.stranded_share:.0%} of it by waiting requests" if use.kv_share else ""
        )
        lines.append(f"{role:<9} {count(use.workers, 'worker')}, {use.busy_share:.0%} busy{rows}{held}")
    if summary.ttft_error is not None and summary.tpot_error is not None:
        lines.append(f"predicted TTFT {summary.ttft_error:.1%} off, TPOT {summary.tpot_error:.1%} off (medians)")
    return lines


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first column is left-aligned, figures are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds(value: float | None) -> str:
    """With the most readable unit."""
    if value is None:
        return "-"
    if value < 0.9995:
        return f"{1000.0 * value:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"


def line(run: PolicyRun) -> tuple[str, ...]:
    one, bound = run.summary, run.bound
    return (
        run.policy,
        run.split,
        f"{one.rate_rps:.3g}",
        f"{one.attainment:.1%}",
        "-" if bound is None else f"{bound.most / max(bound.requests, 1):.1%}",
        "-" if bound is None else f"{bound.share(one.met):.1%}",
        f"{one.goodput_rps:.3g}",
        seconds(one.ttft_s.p50),
        seconds(one.ttft_s.p99),
        seconds(one.tpot_s.p50),
        seconds(one.tpot_s.p99),
        str(one.outcomes.get("rejected", 0)),
    )
