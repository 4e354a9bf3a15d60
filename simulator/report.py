"""One self-contained HTML page of runs, without network and scripts, in a light and a dark theme. Pure.

Every text that comes from a trace, a profile or a name is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from simulator.charts import COLOURS
from simulator.comparison import TARGET, PolicyRun, highest_held
from simulator.curves import TIMELINE_COLOURS, TIMELINES, attainment_chart, colours, share_chart, timeline
from simulator.misses import why, worst
from simulator.tables import count, details, held_text, line, seconds, short_note

_WORST: Final = 20
_TIMES: Final = ("TTFT p50", "p99", "TPOT p50", "p99")
_LIGHT: Final = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
_DARK: Final = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#008300", "#9085e9", "#e66767")
_STYLE: Final = """
:root { color-scheme: light dark; --page: #f4f4f2; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --mute: #75736c;
  --grid: #e1e0d9; --axis: #c3c2b7; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #ffffff; --soft: #c3c2b7;
  --mute: #9a988f; --grid: #2c2c2a; --axis: #44443f; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 4px; }
p { margin: 0 0 10px; color: var(--soft); }
section, .tile { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }
section { padding: 16px 18px; margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0; }
.tile { padding: 10px 14px; } .tile b { display: block; font-size: 24px; font-weight: 600; }
.tile span { color: var(--soft); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 18px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--axis); }
td { text-align: right; border-bottom: 1px solid var(--grid); } th, td { padding: 5px 9px; white-space: nowrap; }
.left { text-align: left; } td.why { white-space: normal; min-width: 300px; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.legend { font-size: 13px; color: var(--soft); margin: 2px 0 4px; } .legend span.of { margin-right: 16px; }
pre { margin: 8px 0 0; font: 13px/1.6 ui-monospace, monospace; color: var(--soft); white-space: pre-wrap; }
summary { cursor: pointer; font-weight: 600; } details > *:not(summary) { margin-top: 10px; }
h3 { font-size: 13px; font-weight: 500; color: var(--soft); margin: 12px 0 0; }
svg { display: block; width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--mute); }
svg .label { fill: var(--soft); } svg .note { fill: var(--soft); font-weight: 500; }
svg .note { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
svg .rule { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dot { stroke: var(--card); stroke-width: 2; }
"""


def page(runs: Sequence[PolicyRun], *, cluster: str) -> str:
    focus = focused(runs)
    parts = [_head(runs, cluster), _tiles(focus), _runs(runs)]
    if len({run.rate_scale for run in runs}) > 1:
        parts.append(_attainment(runs))
    parts += [_times(focus, colours(runs)), _timelines(focus), _misses(focus)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_safe(runs[0].result.trace)}: simulated'
        f'</title><meta name="viewport" content="width=device-width, initial-scale=1"><style>{_style()}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def focused(runs: Sequence[PolicyRun]) -> list[PolicyRun]:
    """The runs at the lowest rate at which any policy misses the target, where policies differ. Otherwise at the
    highest rate."""
    missed = [run.rate_scale for run in runs if run.summary.attainment < TARGET]
    scale = min(missed) if missed else max(run.rate_scale for run in runs)
    return [run for run in runs if run.rate_scale == scale]


def _head(runs: Sequence[PolicyRun], cluster: str) -> str:
    first = runs[0]
    slo = first.result.config.slo
    return (
        f"<h1>{_safe(first.result.trace)}</h1><p>{count(first.summary.requests, 'request')} on {_safe(cluster)}, "
        f"{_split(runs)}, seed {first.result.config.seed}. Promised: the first token within "
        f"{seconds(slo.ttft_s)}, then {seconds(slo.tpot_s)} per token. A request counts if it was served whole and "
        "met both; rejected, failed and late ones are misses.</p>"
    )


def _split(runs: Sequence[PolicyRun]) -> str:
    splits = {run.split: None for run in runs}
    prefill, decode = next(iter(splits)).split(":")
    return (
        f"{prefill} prefill and {count(int(decode), 'decode worker')}"
        if len(splits) == 1
        else f"P:D {', '.join(splits)}"
    )


def _tiles(focus: Sequence[PolicyRun]) -> str:
    """For a single run; for several runs the table shows more."""
    if len(focus) > 1:
        return ""
    run = focus[0]
    one = run.summary
    rejected = one.outcomes.get("rejected", 0)
    tiles = (
        (f"{one.attainment:.1%}", "met both targets"),
        (f"{one.goodput_rps:.3g}/s", f"goodput, of {one.rate_rps:.3g}/s that arrived"),
        (seconds(one.ttft_s.p99), "p99 time to first token"),
        (seconds(one.tpot_s.p99), "p99 time per token"),
        (str(rejected), "rejected"),
    )
    shown = "".join(
        f'<div class="tile"><b>{_safe(figure)}</b><span>{_safe(text)}</span></div>' for figure, text in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _runs(runs: Sequence[PolicyRun]) -> str:
    colour_of = colours(runs)
    head = ("policy", "P:D", "req/s", "attained", "bound", "of bound", "goodput/s", *_TIMES, "rejected")
    rows = [[_key(colour_of[run.policy]) + _safe(run.policy), *map(_safe, line(run)[1:])] for run in runs]
    held = ""
    if len({run.rate_scale for run in runs}) > 1:
        best = ", ".join(f"{policy} {held_text(rate)}" for policy, rate in highest_held(runs).items())
        note = short_note(runs)
        said = f"Highest of these rates that held with {TARGET:.0%} of the requests: {best}. {note}"
        held = f"<p>{_safe(said.strip())}</p>"
    about = "" if len(runs) > 1 else f"<pre>{_safe(chr(10).join(details(runs[0])))}</pre>"
    return f"<section><h2>Runs</h2>{held}{_table(head, rows)}{about}</section>"


def _attainment(runs: Sequence[PolicyRun]) -> str:
    return (
        "<section><h2>Rate against attainment</h2>"
        f"<p>The share of all requests that met both targets.</p>{_legend(colours(runs).items())}"
        f"{attainment_chart(runs)}</section>"
    )


def _times(focus: Sequence[PolicyRun], colour_of: dict[str, int]) -> str:
    slo = focus[0].result.config.slo
    legend = _legend((run.policy, colour_of[run.policy]) for run in focus)
    ttft = share_chart(focus, lambda row: row.ttft_s, slo.ttft_s, colour_of, "time to first token")
    tpot = share_chart(focus, lambda row: row.tpot_s, slo.tpot_s, colour_of, "time per token")
    return (
        f"<section><h2>Times at {focus[0].summary.rate_rps:.3g} requests/s</h2><p>A curve that is higher at the "
        "target is better. If it ends below 100%, the other requests got no token.</p>"
        f'{legend}<div class="pair">{ttft}{tpot}</div>{_percentiles(focus, colour_of)}</section>'
    )


def _percentiles(focus: Sequence[PolicyRun], colour_of: dict[str, int]) -> str:
    head = ("policy", "time", "of", "p50", "p90", "p95", "p99")
    rows = []
    for run in focus:
        for name, held in (("TTFT", run.summary.ttft_s), ("TPOT", run.summary.tpot_s)):
            figures = (seconds(value) for value in (held.p50, held.p90, held.p95, held.p99))
            rows.append([_key(colour_of[run.policy]) + _safe(run.policy), name, str(held.of), *figures])
    return _table(head, rows)


def _timelines(focus: Sequence[PolicyRun]) -> str:
    shown = []
    for number, run in enumerate(focus):
        if not run.result.samples:
            continue
        charts = "".join(
            f"<h3>{_safe(title)}</h3>{_legend(_named(values)) if len(values) > 1 else ''}{timeline(run, index)}"
            for index, (title, values) in enumerate(TIMELINES)
        )
        is_open = " open" if number == 0 else ""
        about = f"{_safe(run.policy)} at {run.summary.rate_rps:.3g} requests/s"
        shown.append(f"<details{is_open}><summary>{about}</summary><div>{charts}</div></details>")
    return f"<section><h2>Over time</h2>{''.join(shown)}</section>" if shown else ""


def _named(values: Iterable[tuple[str, object]]) -> list[tuple[str, int]]:
    return [(name, colour) for colour, (name, _) in zip(TIMELINE_COLOURS, values, strict=False)]


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
                _safe(" ".join(filter(None, (row.prefill_worker, row.decode_worker))) or "-"),
                _safe(why(row)),
            ]
            for row in worst(run.result.requests, _WORST)
        ]
        total = run.summary.requests - run.summary.met
        about = (
            f"{_safe(run.policy)}: {len(rows)} of {total} that missed" if rows else f"{_safe(run.policy)}: none missed"
        )
        is_open = " open" if number == 0 else ""
        shown.append(f"<details{is_open}><summary>{about}</summary>{_table(head, rows) if rows else ''}</details>")
    return f"<section><h2>The worst requests</h2>{''.join(shown)}</section>"


def _legend(names: Iterable[tuple[str, int]]) -> str:
    shown = "".join(f'<span class="of">{_key(colour)}{_safe(name)}</span>' for name, colour in names)
    return f'<div class="legend">{shown}</div>'


def _key(colour: int) -> str:
    return f'<span class="key" style="background: var(--s{colour % COLOURS})"></span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells of `rows` are HTML already. Text is left-aligned, figures are right-aligned."""
    kinds = [
        "left" if name in ("policy", "time", "path", "workers") else "left why" if name == "why" else ""
        for name in head
    ]
    marks = [f' class="{kind}"' if kind else "" for kind in kinds]
    top = "".join(f"<th{mark}>{_safe(name)}</th>" for name, mark in zip(head, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _style() -> str:
    light = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(_LIGHT))
    dark = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(_DARK))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
