"""One self-contained HTML page of runs, without network and scripts, in a light and a dark theme. Pure.

Every text that comes from a trace, a profile or a name is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pdserve.plot.page import document, key, legend, safe, table, tiles
from simulator.comparison import TARGET, PolicyRun, highest_held
from simulator.curves import TIMELINE_COLOURS, TIMELINES, attainment_chart, colours, share_chart, timeline
from simulator.misses import why, worst
from simulator.tables import count, details, held_text, line, seconds, short_note

_WORST: Final = 20
_LEFT: Final = ("policy", "time", "path", "workers")  # columns of text
_WIDE: Final = ("why",)
_TIMES: Final = ("TTFT p50", "p99", "TPOT p50", "p99")


def page(runs: Sequence[PolicyRun], *, cluster: str) -> str:
    focus = focused(runs)
    parts = [_head(runs, cluster), _tiles(focus), _runs(runs)]
    if len({run.rate_scale for run in runs}) > 1:
        parts.append(_attainment(runs))
    parts += [_times(focus, colours(runs)), _timelines(focus), _misses(focus)]
    return document(f"{runs[0].result.trace}: simulated", parts)


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
        f"<h1>{safe(first.result.trace)}</h1><p>{count(first.summary.requests, 'request')} on {safe(cluster)}, "
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
    rows = [[key(colour_of[run.policy]) + safe(run.policy), *map(safe, line(run)[1:])] for run in runs]
    held = ""
    if len({run.rate_scale for run in runs}) > 1:
        best = ", ".join(f"{policy} {held_text(rate)}" for policy, rate in highest_held(runs).items())
        note = short_note(runs)
        said = f"Highest of these rates that held with {TARGET:.0%} of the requests: {best}. {note}"
        held = f"<p>{safe(said.strip())}</p>"
    about = "" if len(runs) > 1 else f"<pre>{safe(chr(10).join(details(runs[0])))}</pre>"
    return f"<section><h2>Runs</h2>{held}{table(head, rows, left=_LEFT, wide=_WIDE)}{about}</section>"


def _attainment(runs: Sequence[PolicyRun]) -> str:
    return (
        "<section><h2>Rate against attainment</h2>"
        f"<p>The share of all requests that met both targets.</p>{legend(colours(runs).items())}"
        f"{attainment_chart(runs)}</section>"
    )


def _times(focus: Sequence[PolicyRun], colour_of: dict[str, int]) -> str:
    slo = focus[0].result.config.slo
    shown = legend((run.policy, colour_of[run.policy]) for run in focus)
    ttft = share_chart(focus, lambda row: row.ttft_s, slo.ttft_s, colour_of, "time to first token")
    tpot = share_chart(focus, lambda row: row.tpot_s, slo.tpot_s, colour_of, "time per token")
    return (
        f"<section><h2>Times at {focus[0].summary.rate_rps:.3g} requests/s</h2><p>A curve that is higher at the "
        "target is better. If it ends below 100%, the other requests got no token.</p>"
        f'{shown}<div class="pair">{ttft}{tpot}</div>{_percentiles(focus, colour_of)}</section>'
    )


def _percentiles(focus: Sequence[PolicyRun], colour_of: dict[str, int]) -> str:
    head = ("policy", "time", "of", "p50", "p90", "p95", "p99")
    rows = []
    for run in focus:
        for name, held in (("TTFT", run.summary.ttft_s), ("TPOT", run.summary.tpot_s)):
            figures = (seconds(value) for value in (held.p50, held.p90, held.p95, held.p99))
            rows.append([key(colour_of[run.policy]) + safe(run.policy), name, str(held.of), *figures])
    return table(head, rows, left=_LEFT, wide=_WIDE)


def _timelines(focus: Sequence[PolicyRun]) -> str:
    shown = []
    for number, run in enumerate(focus):
        if not run.result.samples:
            continue
        charts = "".join(
            f"<h3>{safe(title)}</h3>{legend(_named(values)) if len(values) > 1 else ''}{timeline(run, index)}"
            for index, (title, values) in enumerate(TIMELINES)
        )
        is_open = " open" if number == 0 else ""
        about = f"{safe(run.policy)} at {run.summary.rate_rps:.3g} requests/s"
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
                safe(" ".join(filter(None, (row.prefill_worker, row.decode_worker))) or "-"),
                safe(why(row)),
            ]
            for row in worst(run.result.requests, _WORST)
        ]
        total = run.summary.requests - run.summary.met
        about = (
            f"{safe(run.policy)}: {len(rows)} of {total} that missed" if rows else f"{safe(run.policy)}: none missed"
        )
        is_open = " open" if number == 0 else ""
        listed = table(head, rows, left=_LEFT, wide=_WIDE) if rows else ""
        shown.append(f"<details{is_open}><summary>{about}</summary>{listed}</details>")
    return f"<section><h2>The worst requests</h2>{''.join(shown)}</section>"
