"""A summary as the fields of `vllm bench serve`, and as the metrics of aiperf's export. Pure.

Times are milliseconds in both. `own_fields` are those that neither of the two has.
"""

from __future__ import annotations

import math
from typing import Any, Final

from simulator.bench.ratios import Ratio
from simulator.bench.statistics import SHARES, BenchSummary, Distribution

_TIMES: Final = ("ttft", "tpot", "itl", "e2el")


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
    for name in _TIMES:
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
