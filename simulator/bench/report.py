"""The report of a benchmark: as text, as fields with vLLM's names, and as charts. Pure.

The charts are those that general load generators do not draw (docs/decisions/0035): goodput by load, ratios of
paired turns, the attainment frontier, and what only a router reports: its predictions and placements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from pdserve.core.types import Slo
from pdserve.plot.charts import Bar, BarKind, GanttRow, Rule, Series, assign_lanes, gantt, gantt_legend, line_chart
from pdserve.plot.drawing import (
    CONTENT,
    HALF,
    WIDE,
    Axis,
    Drawing,
    Figure,
    Panel,
    document,
    line_at,
    line_legend,
    safe,
    section,
    text_at,
)
from pdserve.plot.drawing import caption as caption_html
from pdserve.plot.drawing import colour as shade_of
from simulator.bench.load import LoadLevel
from simulator.bench.server import BenchAnswer, BenchOutcome
from simulator.bench.statistics import (
    SHARES,
    BenchResult,
    BenchSummary,
    Distribution,
    LevelResult,
    Ratio,
    TaskSummary,
)
from simulator.report.comparison import count, seconds, table
from simulator.report.time_charts import TimedRequests, frontier_panel, prediction_panel

_HEAD = ("LOAD", "SERVER", "OK", "REJECTED", "FAILED", "REQ/S", "TOKENS/S")
_TIME_HEADS = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99")
_SLO = ("ATTAINED", "GOODPUT/S")


def render_bench(result: BenchResult) -> str:
    has_slo = result.slo is not None
    head = (*_HEAD, *_TIME_HEADS, *(_SLO if has_slo else ()))
    lines = [f"{name}: {model} at {address}" for name, address, model in result.servers]
    if result.slo is not None:
        lines.append(f"targets: {slo_text(result)}")
    lines += ["", table([head, *(_row(one, has_slo=has_slo) for one in result.levels)])]
    lines += _tasks_text(result)
    for level in result.shown_levels:
        if ratios := result.ratios(level):
            lines += ["", f"{level.label}: {comparison_title(result)}", table([*map(_ratio_row, ratios)])]
    lines += _notes(result)
    return "\n".join(lines)


_TASK_HEAD = ("LOAD", "SERVER", "TASKS", "OK", "TASK p50", "p90", "SERVED p50", "p90", "REUSABLE", "REUSED")


def _tasks_text(result: BenchResult) -> list[str]:
    """A table of sessions, if the load has them."""
    rows = []
    for level in result.levels:
        if (found := level.summary.tasks) is None:
            continue
        p90 = SHARES.index(0.9)
        times_s = [at_s for one in (found.task_s, found.served_s) for at_s in (one.median, one.shares[p90])]
        cells = (level.level.label, level.server, str(found.tasks), str(found.completed), *map(_time_text, times_s))
        cells += (f"{found.reusable_tokens} tokens", f"{found.reused_share:.1%}")
        rows.append(cells if found.attainment is None else (*cells, f"{found.attainment:.1%}"))
    if not rows:
        return []
    deadline_s = result.slo_task_s
    head = _TASK_HEAD if deadline_s is None else (*_TASK_HEAD, f"WITHIN {seconds(deadline_s)}")
    return ["", table([head, *rows])]


def slo_text(result: BenchResult) -> str:
    """Only targets that were set; empty without any."""
    if result.slo is None:
        return ""
    parts = (("TTFT", result.slo.ttft_s), ("TPOT", result.slo.tpot_s))
    return ", ".join(f"{name} within {seconds(value)}" for name, value in parts if value < NO_TARGET_S)


NO_TARGET_S = 86_400.0  # stands for a target that was not set; pdserve has none longer
SHOWN_CACHED_SHARE = 0.01  # random prompts have fewer tokens in common


def _row(one: LevelResult, *, has_slo: bool) -> tuple[str, ...]:
    found = one.summary
    times_s = (found.ttft_s, found.tpot_s, found.itl_s)
    cells = (
        one.level.label,
        one.server,
        str(found.completed),
        str(found.rejected),
        str(found.failed),
        f"{found.rate(found.completed):.3g}",
        f"{found.rate(found.total_output_tokens):.4g}",
        *(_time_text(value) for times in times_s for value in (times.median, times.p99)),
    )
    if not has_slo:
        return cells
    attainment = found.attainment or 0.0
    return (*cells, f"{attainment:.1%}", f"{found.rate(found.met or 0):.3g}")


def _time_text(value: float) -> str:
    return seconds(value if math.isfinite(value) else None)


def comparison_title(result: BenchResult) -> str:
    (first, _, _), (second, _, _) = result.servers
    return f"{first} / {second}, median over pairs of turns (least to most)"


def _ratio_row(one: Ratio) -> tuple[str, str, str]:
    better = "smaller is better" if one.metric.is_time else "larger is better"
    return one.metric.label, f"{one.median:.2f} ({one.least:.2f} to {one.most:.2f})", better


def _notes(result: BenchResult) -> list[str]:
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
            lines.append(f"{one.level.label}, {one.server}: {_cached_text(found, result)}")
    if result.levels:
        late_s = [_worst(result.levels, name) for name in ("send_lag_s", "loop_delay_s")]
        lines.append(f"load generator: sends {late_s[0]} late, timers {late_s[1]} (p99)")
    late = [one for one in result.levels if one.summary.is_generator_late]
    if late:
        lines.append(
            f"the load generator itself was late in {count(len(late), 'row')}: its delays are part of these figures. "
            "Lower the rate, or run it on another machine"
        )
    if result.is_interrupted:
        lines.append("interrupted: the figures are of the requests that ended before")
    return lines


def _cached_text(found: BenchSummary, result: BenchResult) -> str:
    said = f"{found.cached_share:.0%} of the prompt tokens were in a prefix cache"
    if result.has_shared_prefixes:
        return said
    return f"{said}; benchmarks with equal --seed send equal prompts, so choose another one"


def _worst(levels: Sequence[LevelResult], name: str) -> str:
    held: list[Distribution] = [getattr(one.summary, name) for one in levels]
    finite = [one.p99 for one in held if one.of]
    return _time_text(max(finite)) if finite else "-"


def level_named(levels: Sequence[LevelResult], level: LoadLevel) -> list[LevelResult]:
    return [one for one in levels if one.level == level]


# --- fields ---------------------------------------------------------------------------------------------------
# A summary as the fields of `vllm bench serve`, in milliseconds. `own_fields` are those that it does not have.

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
        **({} if one.tasks is None else _task_fields(one.tasks)),
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


def _task_fields(one: TaskSummary) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tasks": one.tasks,
        "tasks_completed": one.completed,
        "task_attainment": one.attainment,
        "total_reusable_tokens": one.reusable_tokens,
        "total_reused_tokens": one.reused_tokens,
    }
    for name, values in (("task", one.task_s), ("task_served", one.served_s)):
        found[f"mean_{name}_s"] = values.mean
        for share, value in zip(SHARES, values.shares, strict=True):
            found[f"p{100 * share:g}_{name}_s"] = value
    return found


def ratio_fields(ratios: list[Ratio]) -> dict[str, Any]:
    return {
        one.metric.name: {"median": one.median, "min": one.least, "max": one.most, "turns": list(one.ratios)}
        for one in ratios
    }


# --- charts ---------------------------------------------------------------------------------------------------

_MOST_PLACED: Final = 80  # requests of a timeline of workers
_MOST_WORKERS: Final = 24
_MOST_LANES: Final = 14  # of one worker
_RATIO_ROW: Final = 30


def load_chart(
    levels: Sequence[LevelResult],
    colour_of: Mapping[str, int],
    value: Callable[[BenchSummary], float],
    title: str,
    *,
    unit: str = "",
    rules: Sequence[Rule] = (),
) -> Drawing:
    """One figure of each server over the load, which is arrivals per second or concurrent requests."""
    is_open = levels[0].level.is_open
    series = []
    for name, colour in colour_of.items():
        points = [(load_of(one), value(one.summary)) for one in levels if one.server == name]
        known = sorted(point for point in points if math.isfinite(point[1]))
        series.append(Series(name=name, points=known, colour=colour, is_marked=True))
    highest = max((y for one in series for _, y in one.points), default=1.0)
    if unit == "%":
        y_axis = Axis(low=0.0, high=1.0, unit=unit, label=title)
    else:
        y_axis = Axis(low=0.0, high=1.1 * highest or 1.0, unit=unit, label=title)
    x_label = "requests per second that arrived" if is_open else "requests at once"
    most = max(map(load_of, levels))
    x_axis = Axis(low=0.0, high=1.05 * most or 1.0, label=x_label)
    return line_chart(series, x_axis, y_axis, title=f"{title} by load", rules=rules, width=HALF, height=240)


def load_of(one: LevelResult) -> float:
    """Concurrent requests, or arrivals per second. For a trace at its own rate, the measured rate."""
    if one.level.concurrency is not None:
        return float(one.level.concurrency)
    if one.level.rate_rps is not None:
        return one.level.rate_rps
    return one.summary.rate(one.summary.requests)


WAIT: Final = BarKind(name="until the first token", colour=3, height=0.4)
TOKENS: Final = BarKind(name="tokens", colour=2)


def workers_chart(answers: Sequence[BenchAnswer], title: str) -> Drawing | None:
    """The requests on each worker. None: the server does not report the placement; only a router does."""
    chosen = sorted((one for one in answers if one.decode_worker and one.chunk_s), key=lambda one: one.sent_s)[
        :_MOST_PLACED
    ]
    if not chosen:
        return None
    spans: dict[str, list[tuple[float, float, BarKind, str]]] = {}
    for one in chosen:
        wait_s, first_s, last_s = one.sent_s, one.chunk_s[0], one.chunk_s[-1]
        spans.setdefault(one.prefill_worker or one.decode_worker, []).append((wait_s, first_s, WAIT, _about(one)))
        spans.setdefault(one.decode_worker, []).append((first_s, last_s, TOKENS, _about(one)))
    rows = []
    for worker, held in sorted(spans.items())[:_MOST_WORKERS]:
        ordered = sorted(held, key=lambda one: one[:2])
        lanes = assign_lanes([one[:2] for one in ordered], _MOST_LANES)
        bars = [
            Bar(begin=begin, end=end, kind=kind, lane=lane, about=about)
            for (begin, end, kind, about), lane in zip(ordered, lanes, strict=True)
            if lane is not None
        ]
        rows.append(GanttRow(name=worker, bars=bars))
    begin_s = chosen[0].sent_s
    x_axis = Axis(low=begin_s, high=max(one.ended_s for one in chosen), label="seconds since the turn began")
    return gantt(rows, x_axis, title=title, width=CONTENT)


def _about(one: BenchAnswer) -> str:
    return (
        f"request {one.number}: {one.prompt_tokens} prompt tokens, TTFT {1000 * one.ttft_s:.0f} ms, "
        f"{one.output_tokens} tokens in {one.e2el_s:.2f} s"
    )


def ratio_chart(ratios: Sequence[Ratio], title: str) -> Drawing | None:
    """A row for each metric: the ratios of all pairs of turns as dots, and their median as a bar."""
    every = [value for one in ratios for value in one.ratios if value > 0.0]
    if not every:
        return None
    far = max(max(every), 1.0 / min(every), 1.1) * 1.05
    axis = Axis(low=1.0 / far, high=far, is_log=True)
    left, right, top = 130, WIDE - 20, 6
    bottom = top + _RATIO_ROW * len(ratios)

    def at_x(value: float) -> float:
        return round(left + (right - left) * axis.position(value), 1)

    parts = []
    for tick in _ratio_ticks(far):
        parts.append(line_at("grid", at_x(tick), top, at_x(tick), bottom))
        parts.append(text_at(at_x(tick), bottom + 17, f"{tick:.3g}", "tick", "middle"))
    parts.append(line_at("rule", at_x(1.0), top, at_x(1.0), bottom))
    for row, one in enumerate(ratios):
        y = top + _RATIO_ROW * row + _RATIO_ROW / 2
        shade = shade_of(row)
        parts.append(text_at(left - 10, y + 4, one.metric.label, "label", "end"))
        parts.append(
            f'<line x1="{at_x(one.least)}" x2="{at_x(one.most)}" y1="{y}" y2="{y}" stroke="{shade}" stroke-width="2"/>'
        )
        for value in one.ratios:
            shown = f"<title>{safe(f'{one.metric.label}: {value:.3f}')}</title>"
            parts.append(f'<circle class="dot" cx="{at_x(value)}" cy="{y}" r="4" fill="{shade}">{shown}</circle>')
        x = at_x(one.median)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{y - 9}" y2="{y + 9}" stroke="{shade}" stroke-width="3"/>')
    parts.append(text_at((left + right) / 2, bottom + 36, "ratio of the first server to the second", "label", "middle"))
    return Drawing(width=WIDE, height=bottom + 44, title=title, body="".join(parts))


def _ratio_ticks(far: float) -> list[float]:
    steps = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
    above = [one for one in steps if one <= far]
    while len(above) > 5:
        above = [above[0], *above[2::2]]
    return sorted({*above, *(1.0 / one for one in above)})


# --- panels ---------------------------------------------------------------------------------------------------

GOOD_SHARE: Final = 0.9  # attainment at which a rate counts as served, as in the simulator


def bench_figure(result: BenchResult, *, caption: Sequence[str]) -> Figure:
    """`caption` names the command, the time, the machine and the commit."""
    title = "pdserve bench: " + ", ".join(name for name, _, _ in result.servers)
    return Figure(title=title, caption=[*caption, *caption_lines(result)], panels=panels(result))


def caption_lines(result: BenchResult) -> list[str]:
    lines = [f"{name}: {model} at {address}" for name, address, model in result.servers]
    return [*lines, f"Targets: {slo_text(result)}."] if result.slo is not None else lines


def panels(result: BenchResult) -> list[Panel]:
    if not result.levels:
        return []
    colour_of = {name: number for number, (name, _, _) in enumerate(result.servers)}
    focus = focus_level(result)
    found = [_by_load(result, colour_of)] if len(result.shown_levels) > 1 else []
    found += _comparisons(result)
    if focus is not None:
        shown = level_named(result.levels, focus)
        groups = [_timed(one, colour_of[one.server]) for one in shown]
        where = f"at {focus.label}"
        optional = [frontier_panel(groups, _finite(result.slo), where), prediction_panel(groups, where)]
        optional += [_workers(one, is_folded=number > 0) for number, one in enumerate(shown)]
        found += [one for one in optional if one is not None]
    return found


def focus_level(result: BenchResult) -> LoadLevel | None:
    """The level whose predictions and placements are shown: the highest at which a server still served 90 % within
    its targets, or the last one."""
    levels = result.shown_levels
    good = [one.level for one in result.levels if (one.summary.attainment or 0.0) >= GOOD_SHARE]
    return good[-1] if good else levels[-1] if levels else None


def _by_load(result: BenchResult, colour_of: dict[str, int]) -> Panel:
    """Levels of a sweep; a trace's own rate is one level and has no curve."""
    levels = result.levels

    def chart(
        value: Callable[[BenchSummary], float], title: str, unit: str = "", rules: Sequence[Rule] = ()
    ) -> Drawing:
        return load_chart(levels, colour_of, value, title, unit=unit, rules=rules)

    charts = [
        chart(lambda one: one.rate(one.total_output_tokens), "output tokens per second"),
        chart(lambda one: one.ttft_s.median, "median TTFT", "s"),
        chart(lambda one: one.tpot_s.median, "median TPOT", "s"),
    ]
    if result.slo is None:
        charts.insert(0, chart(lambda one: one.rate(one.completed), "requests completed per second"))
    else:
        rule = Rule(at=GOOD_SHARE, label=f"{GOOD_SHARE:.0%}")
        charts.insert(0, chart(lambda one: one.rate(one.met or 0), "goodput, requests per second"))
        charts.insert(1, chart(lambda one: one.attainment or 0.0, "met the targets", "%", [rule]))
    return Panel(title="By load", drawings=charts, legend=line_legend(colour_of))


def _comparisons(result: BenchResult) -> list[Panel]:
    found = []
    for level in result.shown_levels:
        ratios = result.ratios(level)
        chart = ratio_chart(ratios, f"ratios at {level.label}") if ratios else None
        if chart is not None:
            note = (
                f"{comparison_title(result)}. The servers took turns with the same requests. Each dot is one of "
                f"{count(len(ratios[0].ratios), 'pair')} of turns, and the bar is their median."
            )
            found.append(Panel(title=f"Comparison at {level.label}", drawings=(chart,), note=note))
    return found


def _workers(one: LevelResult, *, is_folded: bool) -> Panel | None:
    chart = workers_chart(one.turns[0].answers, f"requests on each worker of {one.server}")
    if chart is None:
        return None
    title = f"Requests on the workers: {one.server} at {one.level.label}, first turn"
    return Panel(title=title, drawings=(chart,), legend=gantt_legend((WAIT, TOKENS)), is_folded=is_folded)


def _timed(one: LevelResult, colour: int) -> TimedRequests:
    answers = [answer for turn in one.turns for answer in turn.answers]
    done = [answer for answer in answers if answer.outcome is BenchOutcome.COMPLETED]
    return TimedRequests(
        name=one.server,
        colour=colour,
        total=sum(answer.outcome is not BenchOutcome.INTERRUPTED for answer in answers),
        times=[(answer.ttft_s, answer.tpot_s or 0.0) for answer in done],
        ttft=_pairs((answer.server_ttft_s, answer.predicted_ttft_s) for answer in done),
        tpot=_pairs((answer.server_tpot_s, answer.predicted_tpot_s) for answer in done if answer.output_tokens > 1),
    )


def _pairs(found: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(actual, predicted) for actual, predicted in found if actual is not None and predicted is not None]


def _finite(slo: Slo | None) -> Slo | None:
    """None unless both targets were set."""
    return slo if slo is not None and max(slo.ttft_s, slo.tpot_s) < NO_TARGET_S else None


# --- page -----------------------------------------------------------------------------------------------------
# One self-contained HTML document.


def bench_page(result: BenchResult, *, command: str, caption: Sequence[str]) -> str:
    """`caption` names the time, the machine and the commit."""
    parts = [f"<h1>pdserve bench</h1><pre>{safe(command)}</pre>", caption_html([*caption, *caption_lines(result)])]
    if result.levels:
        parts.append(f'<section><pre class="scroll">{safe(render_bench(result))}</pre></section>')
        parts += map(section, panels(result))
    return document("pdserve bench: " + ", ".join(name for name, _, _ in result.servers), parts)
