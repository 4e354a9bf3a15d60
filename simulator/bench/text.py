"""Formats a benchmark for the terminal, and as fields of other tools' reports. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from simulator.bench.load import LoadLevel
from simulator.bench.statistics import SHARES, BenchResult, BenchSummary, Distribution, LevelResult, Ratio
from simulator.report.comparison import count, seconds, table

_HEAD = ("LOAD", "SERVER", "OK", "REJECTED", "FAILED", "REQ/S", "TOKENS/S")
_TIME_HEADS = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99")
_SLO = ("ATTAINED", "GOODPUT/S")


def render_bench(result: BenchResult) -> str:
    has_slo = result.slo is not None
    head = (*_HEAD, *_TIME_HEADS, *(_SLO if has_slo else ()))
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


# --- fields of other tools ------------------------------------------------------------------------------------
# A summary as the fields of `vllm bench serve`, and as the metrics of aiperf's export. Times are milliseconds in both.
# `own_fields` are those that neither of the two has.

_TIME_NAMES: Final = ("ttft", "tpot", "itl", "e2el")


def vllm_fields(one: BenchSummary) -> dict[str, Any]:
    """`request_goodput` is None without targets, as in vLLM. Times without a value are None in JSON."""
    found: dict[str, Any] = {
        "duration": one.duration_s,
        "completed": one.completed,
        "failed": one.failed,
        "rejected": one.rejected,
        "total_input_tokens": one.total_input_tokens,
        "total_output_tokens": one.total_output_tokens,
        "request_throughput": one.rate(one.completed),
        "request_goodput": None if one.met is None else one.rate(one.met),
        "output_throughput": one.rate(one.total_output_tokens),
        "total_token_throughput": one.rate(one.total_input_tokens + one.total_output_tokens),
        "max_output_tokens_per_s": one.max_output_tokens_per_s,
        "max_concurrent_requests": one.max_concurrent_requests,
    }
    for name in _TIME_NAMES:
        values: Distribution = getattr(one, f"{name}_s")
        found[f"mean_{name}_ms"] = 1000.0 * values.mean
        found[f"median_{name}_ms"] = 1000.0 * values.median
        found[f"std_{name}_ms"] = 1000.0 * values.std
        for share, value in zip(SHARES, values.shares, strict=True):
            found[f"p{100 * share:g}_{name}_ms"] = 1000.0 * value
    return found


def own_fields(one: BenchSummary) -> dict[str, Any]:
    return {
        "requests": one.requests,
        "total_cached_tokens": one.total_cached_tokens,
        "slo_attainment": one.attainment,
        "error_counts": one.errors,
        "error_examples": one.details,
        "generator_send_lag_p99_ms": 1000.0 * one.send_lag_s.p99,
        "generator_loop_delay_p99_ms": 1000.0 * one.loop_delay_s.p99,
        "is_generator_late": one.is_generator_late,
        "server_mean_ttft_ms": 1000.0 * one.server_ttft_s.mean,
        "server_mean_tpot_ms": 1000.0 * one.server_tpot_s.mean,
    }


def aiperf_metrics(one: BenchSummary) -> dict[str, Any]:
    """aiperf's inter-token latency is a mean per request, so it is vLLM's TPOT. Its inter-chunk latency is vLLM's
    ITL."""
    found: dict[str, Any] = {
        "request_throughput": _single("requests/sec", one.rate(one.completed)),
        "output_token_throughput": _single("tokens/sec", one.rate(one.total_output_tokens)),
        "request_count": _single("requests", one.completed),
        "error_request_count": _single("requests", one.failed + one.rejected),
        "benchmark_duration": _single("sec", one.duration_s),
        "time_to_first_token": _spread("ms", one.ttft_s, 1000.0),
        "inter_token_latency": _spread("ms", one.tpot_s, 1000.0),
        "inter_chunk_latency": _spread("ms", one.itl_s, 1000.0),
        "request_latency": _spread("ms", one.e2el_s, 1000.0),
        "input_sequence_length": _spread("tokens", one.input_tokens, 1.0),
        "output_sequence_length": _spread("tokens", one.output_tokens, 1.0),
    }
    if one.met is not None:
        found["goodput"] = _single("requests/sec", one.rate(one.met))
        found["good_request_count"] = _single("requests", one.met)
    return found


def ratio_fields(ratios: list[Ratio]) -> dict[str, Any]:
    return {
        one.metric.name: {"median": one.median, "min": one.least, "max": one.most, "turns": list(one.ratios)}
        for one in ratios
    }


def _single(unit: str, value: float) -> dict[str, Any]:
    return {"unit": unit, "avg": value}


def _spread(unit: str, values: Distribution, scale: float) -> dict[str, Any]:
    shares = {f"p{100 * share:g}": value for share, value in zip(SHARES, values.shares, strict=True)}
    figures = {"avg": values.mean, **shares, "min": values.least, "max": values.most, "std": values.std}
    return {"unit": unit, "count": values.of} | {
        name: scale * value if math.isfinite(value) else None for name, value in figures.items()
    }
