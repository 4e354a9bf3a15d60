"""The page of a benchmark: one self-contained HTML document. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.plot.line_chart import Rule
from pdserve.plot.page import document, key, legend, safe, table, tiles
from simulator.bench.charts import (
    SPAN_COLOURS,
    distribution_chart,
    load_chart,
    ratio_chart,
    timeline_chart,
)
from simulator.bench.load import LoadLevel
from simulator.bench.result import BenchResult, LevelResult
from simulator.bench.text import (
    NO_TARGET_S,
    bench_row,
    better_text,
    comparison_title,
    level_named,
    notes,
    ratio_text,
    slo_text,
    time_text,
)
from simulator.tables import count

_GOOD_SHARE = 0.9  # attainment at which a rate counts as served, as in the simulator
_LEFT = ("load", "server", "metric", "")


def bench_page(result: BenchResult, *, command: str, date: str) -> str:
    colour_of = {name: number for number, (name, _, _) in enumerate(result.servers)}
    focus = focus_level(result)
    parts = [_head(result, command, date)]
    if result.levels:
        parts += [_tiles(result), _rows(result, colour_of)]
        if len(result.shown_levels) > 1:
            parts.append(_by_load(result, colour_of))
        parts += [_comparison(result), _times(result, focus, colour_of), _timelines(result, focus)]
    return document("pdserve bench: " + ", ".join(name for name, _, _ in result.servers), parts)


def focus_level(result: BenchResult) -> LoadLevel | None:
    """The level whose distributions and timelines are shown: the highest at which a server still served 90 % within
    its targets, or the last one."""
    levels = result.shown_levels
    good = [one.level for one in result.levels if (one.summary.attainment or 0.0) >= _GOOD_SHARE]
    return good[-1] if good else levels[-1] if levels else None


def _head(result: BenchResult, command: str, date: str) -> str:
    servers = "".join(
        f"<p><b>{safe(name)}</b>: {safe(model)} at {safe(address)}</p>" for name, address, model in result.servers
    )
    targets = f"<p>Targets: {safe(slo_text(result))}.</p>" if result.slo is not None else ""
    return f"<h1>pdserve bench</h1><p>{safe(date)}</p><pre>{safe(command)}</pre>{servers}{targets}"


def _tiles(result: BenchResult) -> str:
    """For a single row; the table shows more."""
    if len(result.levels) > 1:
        return ""
    one = result.levels[0].summary
    figures = [
        (f"{one.rate(one.completed):.3g}/s", "requests completed"),
        (f"{one.rate(one.total_output_tokens):.4g}/s", "output tokens"),
        (time_text(one.ttft_s.median), "median time to first token"),
        (time_text(one.tpot_s.median), "median time per output token"),
    ]
    if one.attainment is not None:
        figures.append((f"{one.attainment:.1%}", "met the targets"))
    return tiles(figures)


def _rows(result: BenchResult, colour_of: dict[str, int]) -> str:
    has_slo = result.slo is not None
    slo = ("attained", "goodput/s") if has_slo else ()
    times = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99")
    head = ("load", "server", "ok", "rejected", "failed", "req/s", "tokens/s", *times, *slo)
    rows = []
    for one in result.levels:
        load, server, *cells = bench_row(one, has_slo=has_slo)
        rows.append([safe(load), key(colour_of[server]) + safe(server), *map(safe, cells)])
    said = "\n".join(line for line in notes(result) if line)
    return f"<section><h2>Results</h2>{table(head, rows, left=_LEFT)}<pre>{safe(said)}</pre></section>"


def _by_load(result: BenchResult, colour_of: dict[str, int]) -> str:
    """Levels of a sweep; a trace's own rate is one level and has no curve."""
    levels = result.levels
    charts = [
        load_chart(levels, colour_of, lambda one: one.rate(one.total_output_tokens), "output tokens per second"),
        load_chart(levels, colour_of, lambda one: one.ttft_s.median, "median TTFT", unit="s"),
        load_chart(levels, colour_of, lambda one: one.tpot_s.median, "median TPOT", unit="s"),
    ]
    if result.slo is not None:
        rule = Rule(at=_GOOD_SHARE, label=f"{_GOOD_SHARE:.0%}")
        charts.insert(
            0, load_chart(levels, colour_of, lambda one: one.rate(one.met or 0), "goodput, requests per second")
        )
        charts.insert(
            1,
            load_chart(levels, colour_of, lambda one: one.attainment or 0.0, "met the targets", unit="%", rules=[rule]),
        )
    else:
        charts.insert(0, load_chart(levels, colour_of, lambda one: one.rate(one.completed), "requests per second"))
    shown = "".join(f"<div>{chart}</div>" for chart in charts)
    return f'<section><h2>By load</h2>{legend(colour_of.items())}<div class="pair">{shown}</div></section>'


def _comparison(result: BenchResult) -> str:
    shown = []
    for level in result.shown_levels:
        ratios = result.ratios(level)
        if not ratios:
            continue
        rows = [[safe(one.metric.label), safe(ratio_text(one)), safe(better_text(one))] for one in ratios]
        listed = table(("metric", "ratio", ""), rows, left=_LEFT)
        chart = ratio_chart(ratios, f"ratios at {level.label}")
        shown.append(f"<h3>{safe(level.label)}, {count(len(ratios[0].ratios), 'pair')} of turns</h3>{chart}{listed}")
    if not shown:
        return ""
    return (
        f"<section><h2>Comparison</h2><p>{safe(comparison_title(result))}. The servers took turns with the same "
        f"requests. Each dot is one pair of turns, and the bar is their median.</p>{''.join(shown)}</section>"
    )


def _times(result: BenchResult, focus: LoadLevel | None, colour_of: dict[str, int]) -> str:
    """Distributions of each server at one level, or of each level of a single server."""
    if focus is None:
        return ""
    if len(result.servers) > 1:
        chosen = [(one.server, colour_of[one.server], one) for one in level_named(result.levels, focus)]
        title = f"Times at {focus.label}"
    else:
        chosen = [(one.level.label, number, one) for number, one in enumerate(result.levels)]
        title = "Times"
    ttft = [(name, colour, _ttfts(one), max(one.summary.requests, 1)) for name, colour, one in chosen]
    itl = [(name, colour, gaps, max(len(gaps), 1)) for name, colour, one in chosen if (gaps := _gaps(one)) is not None]
    target_s = result.slo.ttft_s if result.slo is not None and result.slo.ttft_s < NO_TARGET_S else None
    charts = (
        distribution_chart(ttft, "time to first token", target_s=target_s),
        distribution_chart(itl, "time between two parts of an answer (ITL)"),
    )
    names = legend((name, colour) for name, colour, _ in chosen)
    return (
        f"<section><h2>{safe(title)}</h2><p>TTFT is shown as a share of all requests: a curve that ends below 100% "
        f'belongs to requests without a first token.</p>{names}<div class="pair">'
        f"{''.join(f'<div>{one}</div>' for one in charts)}</div></section>"
    )


def _ttfts(one: LevelResult) -> Sequence[float]:
    return [answer.chunk_s[0] - answer.sent_s for turn in one.turns for answer in turn.answers if answer.chunk_s]


def _gaps(one: LevelResult) -> Sequence[float]:
    return [gap for turn in one.turns for answer in turn.answers for gap in answer.itl_s]


def _timelines(result: BenchResult, focus: LoadLevel | None) -> str:
    if focus is None:
        return ""
    shown: list[str] = []
    for one in level_named(result.levels, focus):
        chart = timeline_chart(one.turns[0].answers, f"requests of {one.server} over time")
        is_open = " open" if not shown else ""
        name = f"{one.server} at {one.level.label}, first turn"
        shown.append(f"<details{is_open}><summary>{safe(name)}</summary><div>{chart}</div></details>")
    return f"<section><h2>Requests over time</h2>{legend(SPAN_COLOURS)}{''.join(shown)}</section>"
