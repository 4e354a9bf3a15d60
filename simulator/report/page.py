"""One self-contained HTML page of runs, without network and scripts, in a light and a dark theme. Pure.

Every text that comes from a trace, a profile or a name is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pdserve.plot.drawing import Legend, line_legend, safe
from pdserve.plot.figure import caption as caption_html
from pdserve.plot.figure import document, key, legend, section, table, tiles
from simulator.report.comparison import TARGET, PolicyRun, why, worst
from simulator.report.figures import TIMELINE_COLOURS, TIMELINES, caption, colours, focused, panels, timeline
from simulator.report.tables import LEGEND, details, disaggregation_note, line, seconds, short_note, sustained_texts

_WORST: Final = 20
_LEFT: Final = ("policy", "time", "path", "workers")  # columns of text
_WIDE: Final = ("why",)
_TIMES: Final = ("TTFT p50", "p99", "TPOT p50", "p99")


def page(runs: Sequence[PolicyRun], *, cluster: str, origin: Sequence[str] = ()) -> str:
    """`origin` names the machine and the commit."""
    focus = focused(runs)
    head = f"<h1>{safe(runs[0].result.trace)}</h1>{caption_html(caption(runs, cluster, origin))}"
    charts = [section(panel) for panel in panels(runs)]
    parts = [head, _tiles(focus), _runs(runs), *charts]
    parts += [_percentiles(focus, colours(runs)), _timelines(focus), _misses(focus)]
    return document(f"{runs[0].result.trace}: simulated", parts)


def _tiles(focus: Sequence[PolicyRun]) -> str:
    """For a single run; for several runs the table shows more."""
    if len(focus) > 1:
        return ""
    run = focus[0]
    one = run.summary
    rejected = one.outcomes.get("rejected", 0)
    figures = (
        (f"{one.attainment:.1%}", "met both targets"),
        (f"{one.goodput_rps:.3g}/s", f"goodput, of {one.rate_rps:.3g}/s that arrived"),
        (seconds(one.ttft_s.p99), "p99 time to first token"),
        (seconds(one.tpot_s.p99), "p99 time per token"),
        (str(rejected), "rejected"),
    )
    return tiles(figures)


def _runs(runs: Sequence[PolicyRun]) -> str:
    colour_of = colours(runs)
    head = ("policy", "P:D", "req/s", "attained", "bound", "of bound", "goodput/s", *_TIMES, "rejected")
    rows = [[key(colour_of[run.name]) + safe(run.name), *map(safe, line(run)[1:])] for run in runs]
    held = ""
    if len({run.rate_scale for run in runs}) > 1:
        best = ", ".join(f"{name} {text}" for name, text in sustained_texts(runs).items())
        said = [f"Highest of these rates that held with {TARGET:.0%} of the requests: {best}."]
        said += filter(None, (short_note(runs), disaggregation_note(runs)))
        held = "".join(f"<p>{safe(one)}</p>" for one in said)
    about = "" if len(runs) > 1 else f"<pre>{safe(chr(10).join(details(runs[0])))}</pre>"
    # The legend is that of the terminal's table, in its letters.
    legend_text = f"<pre>{safe(chr(10).join(LEGEND))}</pre>"
    return f"<section><h2>Runs</h2>{held}{table(head, rows, left=_LEFT, wide=_WIDE)}{legend_text}{about}</section>"


def _percentiles(focus: Sequence[PolicyRun], colour_of: dict[str, int]) -> str:
    head = ("policy", "time", "of", "p50", "p90", "p95", "p99")
    rows = []
    for run in focus:
        for name, held in (("TTFT", run.summary.ttft_s), ("TPOT", run.summary.tpot_s)):
            figures = (seconds(value) for value in (held.p50, held.p90, held.p95, held.p99))
            rows.append([key(colour_of[run.name]) + safe(run.name), name, str(held.of), *figures])
    shown = table(head, rows, left=_LEFT, wide=_WIDE)
    return f"<section><h2>Percentiles at {focus[0].summary.rate_rps:.3g} requests/s</h2>{shown}</section>"


def _timelines(focus: Sequence[PolicyRun]) -> str:
    shown = []
    for number, run in enumerate(focus):
        if not run.result.samples:
            continue
        charts = "".join(
            f"<h3>{safe(title)}</h3>{legend(_named(values)) if len(values) > 1 else ''}{timeline(run, index).inline}"
            for index, (title, values) in enumerate(TIMELINES)
        )
        is_open = " open" if number == 0 else ""
        about = f"{safe(run.name)} at {run.summary.rate_rps:.3g} requests/s"
        shown.append(f"<details{is_open}><summary>{about}</summary><div>{charts}</div></details>")
    return f"<section><h2>Over time</h2>{''.join(shown)}</section>" if shown else ""


def _named(values: Iterable[tuple[str, object]]) -> Legend:
    return line_legend({name: colour for colour, (name, _) in zip(TIMELINE_COLOURS, values, strict=False)})


def _misses(focus: Sequence[PolicyRun]) -> str:
    head = ("request", "at", "prompt", "answer", "TTFT", "TPOT", "path", "workers", "why")
    shown = []
    for number, run in enumerate(focus):
        rows = [
            [
                str(row.number),
                f"{row.arrival_s:.1f} s",
                str(row.prompt_tokens),
                str(row.output_tokens),
                seconds(row.ttft_s),
                seconds(row.tpot_s),
                row.path.value if row.path is not None else "-",
                safe(" ".join(filter(None, (row.prefill_worker, row.decode_worker))) or "-"),
                safe(why(row)),
            ]
            for row in worst(run.result.requests, _WORST)
        ]
        total = run.summary.requests - run.summary.met
        about = f"{safe(run.name)}: {len(rows)} of {total} that missed" if rows else f"{safe(run.name)}: none missed"
        is_open = " open" if number == 0 else ""
        listed = table(head, rows, left=_LEFT, wide=_WIDE) if rows else ""
        shown.append(f"<details{is_open}><summary>{about}</summary>{listed}</details>")
    return f"<section><h2>The worst requests</h2>{''.join(shown)}</section>"
