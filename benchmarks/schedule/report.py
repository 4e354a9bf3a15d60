"""The tables of benchmarks/schedule/ as markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import table_head, table_row
from benchmarks.schedule.work import NUM_WORKERS, PAIRS, POLICIES, PROFILE, TRACES, slo
from router.policy.interface import RULES

Lines = dict[str, dict[str, Any]]  # by the cell's name


def render(lines: Lines) -> str:
    tables = (_promises, _goodput, _ratios, _overload, _ablation, _mixed, _speed)
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


def _goodput(lines: Lines) -> Iterator[str]:
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


def _overload(lines: Lines) -> Iterator[str]:
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


def _ablation(lines: Lines) -> Iterator[str]:
    found = [line for name, line in lines.items() if name.startswith("ablation.")]
    if not found:
        return
    yield "### Each rule off alone: goodput against the whole policy, same split\n"
    columns = sorted({line["cell"].rsplit(".goodput.", 1)[0].removeprefix("ablation.") for line in found})
    yield table_head(["rule", *columns])
    for rule in RULES:
        row = [lines.get(f"ablation.{column}.goodput.{rule}") for column in columns]
        if any(row):
            shares = [one["rate_rps"] / one["with_rps"] if one and one["with_rps"] else math.nan for one in row]
            yield table_row([rule, *(f"{100 * (share - 1):+.1f} %" for share in shares)])
    yield ""


def _mixed(lines: Lines) -> Iterator[str]:
    found = [line for name, line in lines.items() if name.startswith("mixed.")]
    if not found:
        return
    yield "### Rules about who goes first, at 1.5 times the peak: share that met both promises\n"
    names = ("attainment", "small_tenant", "big_tenant", "higher_class", "lower_class")
    yield table_head(["rule off", *(name.replace("_", " ") for name in names)])
    for line in found:
        rule = line["cell"].rsplit(".goodput", 1)[1].removeprefix(".")
        yield table_row([rule or "none", *(f"{line[name]:.1%}" for name in names)])
    yield ""


def _speed(lines: Lines) -> Iterator[str]:
    for name, line in lines.items():
        if name.startswith("speed"):
            what = f"{line['requests']} requests of the Mooncake trace"
            yield f"Simulator: {what} in {line['run_cpu_s']:.1f} s of one core's time."
