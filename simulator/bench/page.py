"""The page of a benchmark: one self-contained HTML document. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.plot.drawing import safe
from pdserve.plot.figure import caption as caption_html
from pdserve.plot.figure import section
from pdserve.plot.page import document, key, table, tiles
from simulator.bench.figures import caption_lines, panels
from simulator.bench.result import BenchResult
from simulator.bench.text import bench_row, better_text, comparison_title, notes, ratio_text, time_text
from simulator.tables import count

_LEFT = ("load", "server", "metric", "")


def bench_page(result: BenchResult, *, command: str, caption: Sequence[str]) -> str:
    """`caption` names the time, the machine and the commit."""
    colour_of = {name: number for number, (name, _, _) in enumerate(result.servers)}
    parts = [f"<h1>pdserve bench</h1><pre>{safe(command)}</pre>", caption_html([*caption, *caption_lines(result)])]
    if result.levels:
        parts += [_tiles(result), _rows(result, colour_of), _comparison(result), *map(section, panels(result))]
    return document("pdserve bench: " + ", ".join(name for name, _, _ in result.servers), parts)


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


def _comparison(result: BenchResult) -> str:
    shown = []
    for level in result.shown_levels:
        ratios = result.ratios(level)
        if not ratios:
            continue
        rows = [[safe(one.metric.label), safe(ratio_text(one)), safe(better_text(one))] for one in ratios]
        listed = table(("metric", "ratio", ""), rows, left=_LEFT)
        shown.append(f"<h3>{safe(level.label)}, {count(len(ratios[0].ratios), 'pair')} of turns</h3>{listed}")
    if not shown:
        return ""
    return f"<section><h2>Comparison</h2><p>{safe(comparison_title(result))}.</p>{''.join(shown)}</section>"
