"""Formats a benchmark for the terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.bench.load import LoadLevel
from simulator.bench.ratios import Ratio
from simulator.bench.result import BenchResult, LevelResult
from simulator.bench.statistics import BenchSummary, Distribution
from simulator.tables import count, seconds, table

_HEAD = ("LOAD", "SERVER", "OK", "REJECTED", "FAILED", "REQ/S", "TOKENS/S")
_TIMES = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99")
_SLO = ("ATTAINED", "GOODPUT/S")


def render_bench(result: BenchResult) -> str:
    has_slo = result.slo is not None
    head = (*_HEAD, *_TIMES, *(_SLO if has_slo else ()))
    lines = [f"{name}: {model} at {address}" for name, address, model in result.servers]
    if result.slo is not None:
        lines.append(f"targets: {slo_text(result)}")
    lines += ["", table([head, *(bench_row(one, has_slo=has_slo) for one in result.levels)])]
    for level in result.shown_levels:
        if ratios := result.ratios(level):
            lines += ["", f"{level.label}: {comparison_title(result)}", ratio_table(ratios)]
    lines += notes(result)
    return "\n".join(lines)


def slo_text(result: BenchResult) -> str:
    """Only targets that were set; empty without any."""
    if result.slo is None:
        return ""
    parts = (("TTFT", result.slo.ttft_s), ("TPOT", result.slo.tpot_s))
    return ", ".join(f"{name} within {seconds(value)}" for name, value in parts if value < NO_TARGET_S)


NO_TARGET_S = 86_400.0  # stands for a target that was not set; pdserve has none longer
SHOWN_CACHED_SHARE = 0.01  # random prompts have fewer tokens in common


def bench_row(one: LevelResult, *, has_slo: bool) -> tuple[str, ...]:
    found = one.summary
    cells = (
        one.level.label,
        one.server,
        str(found.completed),
        str(found.rejected),
        str(found.failed),
        f"{found.rate(found.completed):.3g}",
        f"{found.rate(found.total_output_tokens):.4g}",
        *time_cells(found),
    )
    if not has_slo:
        return cells
    attainment = found.attainment or 0.0
    return (*cells, f"{attainment:.1%}", f"{found.rate(found.met or 0):.3g}")


def time_cells(one: BenchSummary) -> list[str]:
    return [time_text(value) for values in (one.ttft_s, one.tpot_s, one.itl_s) for value in (values.median, values.p99)]


def time_text(value: float) -> str:
    return seconds(value if math.isfinite(value) else None)


def comparison_title(result: BenchResult) -> str:
    (first, _, _), (second, _, _) = result.servers
    return f"{first} / {second}, median over pairs of turns (least to most)"


def ratio_table(ratios: Sequence[Ratio]) -> str:
    return table([(one.metric.label, ratio_text(one), better_text(one)) for one in ratios])


def ratio_text(one: Ratio) -> str:
    return f"{one.median:.2f} ({one.least:.2f} to {one.most:.2f})"


def better_text(one: Ratio) -> str:
    return "smaller is better" if one.metric.is_time else "larger is better"


def notes(result: BenchResult) -> list[str]:
    """Errors, rejections, cached prompts, the generator's lag, and whether the user ended the benchmark."""
    lines = [""]
    for one in result.levels:
        found = one.summary
        for error, number in found.errors.items():
            detail = f": {found.details[error]}" if error in found.details else ""
            lines.append(f"{one.level.label}, {one.server}: {number} failed with {error}{detail}")
        if found.rejection:
            lines.append(f"{one.level.label}, {one.server}: {found.rejected} rejected, for example: {found.rejection}")
        if found.cached_share >= SHOWN_CACHED_SHARE:
            lines.append(f"{one.level.label}, {one.server}: {cached_text(found, result)}")
    if result.levels:
        lines.append(lag_text(result.levels))
    late = [one for one in result.levels if one.summary.is_generator_late]
    if late:
        lines.append(
            f"the load generator itself was late in {count(len(late), 'row')}: its delays are part of these figures. "
            "Lower the rate, or run it on another machine"
        )
    if result.is_interrupted:
        lines.append("interrupted: the figures are of the requests that ended before")
    return lines


def cached_text(found: BenchSummary, result: BenchResult) -> str:
    said = f"{found.cached_share:.0%} of the prompt tokens were in a prefix cache"
    if result.has_shared_prefixes:
        return said
    return f"{said}; benchmarks with equal --seed send equal prompts, so choose another one"


def lag_text(levels: Sequence[LevelResult]) -> str:
    return f"load generator: sends {_worst(levels, 'send_lag_s')} late, timers {_worst(levels, 'loop_delay_s')} (p99)"


def _worst(levels: Sequence[LevelResult], name: str) -> str:
    held: list[Distribution] = [getattr(one.summary, name) for one in levels]
    finite = [one.p99 for one in held if one.of]
    return time_text(max(finite)) if finite else "-"


def level_named(levels: Sequence[LevelResult], level: LoadLevel) -> list[LevelResult]:
    return [one for one in levels if one.level == level]
