"""Formats runs as text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.report.comparison import TARGET, PolicyRun, highest_sustained, sustained
from simulator.search.goodput import surely_misses

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
        lines.append(f"cache     {summary.cached_share:.1%} of prompt tokens were found in one")
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
