"""The figure of simulated runs and its page, for `pdserve simulate --plot`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdserve.plot.charts import (
    Bar,
    BarKind,
    GanttRow,
    Rule,
    Series,
    ShareKind,
    ShareRow,
    assign_lanes,
    gantt,
    gantt_legend,
    line_chart,
    share_legend,
    share_rows,
)
from pdserve.plot.drawing import (
    CONTENT,
    HALF,
    Axis,
    Drawing,
    Figure,
    Legend,
    Panel,
    document,
    key,
    legend,
    line_legend,
    means,
    safe,
    section,
    table,
    thinned,
    tiles,
)
from pdserve.plot.drawing import caption as caption_html
from simulator.model import RequestRow, Sample, WorkerRow
from simulator.report.comparison import (
    LEGEND,
    TARGET,
    PolicyRun,
    count,
    details,
    disaggregation_note,
    line,
    seconds,
    short_note,
    sustained_texts,
    why,
    worst,
)
from simulator.report.time_charts import TimedRequests, frontier_panel, prediction_panel

# --- charts of policies ---------------------------------------------------------------------------------------


def colours(runs: Iterable[PolicyRun]) -> dict[str, int]:
    """Each policy has the same colour on the whole page."""
    return {policy: number for number, policy in enumerate(dict.fromkeys(run.name for run in runs))}


def attainment_chart(runs: Sequence[PolicyRun]) -> Drawing:
    return _rate_chart(
        runs,
        lambda run: run.summary.attainment,
        Axis(low=0.0, high=1.0, label="met both targets", unit="%"),
        title="share of requests that met both targets, by rate of arrival",
        rules=[Rule(at=TARGET, label=f"{TARGET:.0%}: the rate is sustained")],
    )


def goodput_chart(runs: Sequence[PolicyRun]) -> Drawing:
    most = max(run.summary.goodput_rps for run in runs)
    return _rate_chart(
        runs,
        lambda run: run.summary.goodput_rps,
        Axis(low=0.0, high=1.1 * most or 1.0, label="goodput, requests per second"),
        title="goodput by rate of arrival",
    )


def _rate_chart(
    runs: Sequence[PolicyRun],
    value: Callable[[PolicyRun], float],
    y_axis: Axis,
    *,
    title: str,
    rules: Sequence[Rule] = (),
) -> Drawing:
    """Rate of arrival against a value, a line for each policy."""
    found = [
        Series(
            name=policy,
            points=sorted((run.summary.rate_rps, value(run)) for run in runs if run.name == policy),
            colour=colour,
            is_marked=True,
        )
        for policy, colour in colours(runs).items()
    ]
    most_rps = max(run.summary.rate_rps for run in runs)
    x_axis = Axis(low=0.0, high=1.05 * most_rps or 1.0, label="requests per second that arrived")
    return line_chart(found, x_axis, y_axis, title=title, rules=rules, width=HALF, height=300)


def share_chart(
    runs: Sequence[PolicyRun],
    value: Callable[[RequestRow], float | None],
    target_s: float,
    colour_of: dict[str, int],
    title: str,
) -> Drawing:
    """The share of all requests, including rejected ones, whose time was at most x. If a run left requests unanswered,
    its curve does not reach 1."""
    held = {
        run.name: sorted(seen for row in run.result.requests if (seen := value(row)) is not None and seen > 0.0)
        for run in runs
    }
    every = [seconds for values in held.values() for seconds in values] + [target_s]
    low, high = max(min(every), target_s / 1000.0), max(every)
    series = []
    for run in runs:
        values, total = held[run.name], len(run.result.requests)
        points = [(seconds, (rank + 1) / total) for rank, seconds in enumerate(values)]
        series.append(Series(name=run.name, points=thinned(points), colour=colour_of[run.name], is_stepped=True))
    return line_chart(
        series,
        Axis(low=low * 0.9, high=high * 1.1, label=f"{title}, logarithmic", is_log=True, unit="s"),
        Axis(low=0.0, high=1.0, label="of all requests", unit="%"),
        title=f"share of all requests by {title}",
        rules=[Rule(at=target_s, label="target", is_vertical=True)],
        width=HALF,
        height=260,
    )


TIMELINE_COLOURS: Final = (6, 3)  # must differ from the colours of the first policies
TIMELINES: Final[tuple[tuple[str, tuple[tuple[str, Callable[[Sample], float]], ...]], ...]] = (
    ("queued requests", (("queued", lambda one: one.queued),)),
    ("running requests, and rows that decode", (("running", lambda one: one.running), ("rows", lambda one: one.rows))),
    (
        "busy workers",
        (("prefill", lambda one: one.busy_prefills), ("decode", lambda one: one.busy_decodes)),
    ),
    ("KV memory of decode workers in use", (("KV", lambda one: one.kv_share),)),
)


def timeline(run: PolicyRun, number: int) -> Drawing:
    """TIMELINES[number] of a run. Each point is the mean of its interval."""
    title, values = TIMELINES[number]
    samples = run.result.samples
    series = [
        Series(
            name=name,
            points=means([(one.at_s, float(value(one))) for one in samples]),
            colour=TIMELINE_COLOURS[colour],
            is_filled=len(values) == 1,
        )
        for colour, (name, value) in enumerate(values)
    ]
    is_share = number == len(TIMELINES) - 1
    most = max((level for one in series for _, level in one.points), default=0.0)
    is_last = number == len(TIMELINES) - 1
    return line_chart(
        series,
        Axis(low=0.0, high=samples[-1].at_s if samples else 1.0, label="seconds" if is_last else ""),
        Axis(low=0.0, high=1.0 if is_share else max(1.0, 1.05 * most), unit="%" if is_share else "n"),
        title=f"{title} over time",
        height=160 if is_last else 140,
    )


# --- timelines of workers -------------------------------------------------------------------------------------
# How they spent their time, and which requests they served.

MAX_WORKERS: Final = 24
MAX_REQUESTS: Final = 80  # of a timeline of requests
MAX_LANES: Final = 14  # of one worker
ROUTER: Final = "router"  # where requests wait
STEP_KINDS: Final = (
    ShareKind(name="prefill steps", colour=1, opacity=0.95),
    ShareKind(name="mixed steps", colour=6, opacity=0.6),
    ShareKind(name="decode steps", colour=0, opacity=0.3),
)
WAIT: Final = BarKind(name="queue", colour=3, height=0.35)
PREFILL: Final = BarKind(name="prefill", colour=1)
TRANSFER: Final = BarKind(name="rest of the KV transfer", colour=2, height=0.35)
DECODE: Final = BarKind(name="decode", colour=0, height=0.65)
LOST: Final = BarKind(name="rejected, failed or cancelled", colour=7, is_hollow=True)
REQUEST_KINDS: Final = (WAIT, PREFILL, TRANSFER, DECODE, LOST)


def steps_panel(run: PolicyRun, *, is_folded: bool = False) -> Panel | None:
    """How each worker spent its time, over the whole run. None: nothing was recorded."""
    workers = [one for one in run.result.workers if any(map(any, one.shares))]
    if not workers:
        return None
    shown = workers[:MAX_WORKERS]
    span_s = max(_lasted_s(one) for one in shown)
    rows = [ShareRow(name=one.worker_id, width=one.shares_width_s, shares=one.shares) for one in shown]
    chart = share_rows(
        rows, STEP_KINDS, _seconds(0.0, span_s), title=f"steps of each worker over time, {run.name}", width=CONTENT
    )
    width_s = max(one.shares_width_s for one in shown)
    note = f"The height is the share of the time in which a worker computes, in intervals of {width_s:g} s."
    if len(workers) > len(shown):
        note += f" The first {len(shown)} of {len(workers)} workers."
    return Panel(
        title=f"Workers over time: {_about(run)}",
        drawings=(chart,),
        note=note,
        legend=share_legend(STEP_KINDS),
        is_folded=is_folded,
    )


def requests_panel(run: PolicyRun, *, is_folded: bool = False) -> Panel | None:
    """The requests on each worker, around the first one that missed a target. None: there are none."""
    rows = window(run.result.requests)
    if not rows:
        return None
    begin_s = min(one.arrival_s for one in rows)
    end_s = max(one.ended_s if one.ended_s is not None else one.arrival_s for one in rows)
    order = [one.worker_id for one in run.result.config.workers]
    chart = requests_gantt(rows, order, title=f"requests on each worker over time, {run.name}")
    note = (
        f"Requests {rows[0].number} to {rows[-1].number}, from {begin_s:.3g} s to {end_s:.3g} s, each on the workers "
        f"that served it. A worker shows at most {MAX_LANES} requests at once."
    )
    return Panel(
        title=f"Requests on the workers: {_about(run)}",
        drawings=(chart,),
        note=note,
        legend=gantt_legend(REQUEST_KINDS),
        is_folded=is_folded,
    )


def window(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """At most MAX_REQUESTS requests in a row, in the middle of which is the first that missed a target."""
    first = next((number for number, row in enumerate(rows) if not row.has_met_slo), 0)
    begin = max(0, min(first - MAX_REQUESTS // 2, len(rows) - MAX_REQUESTS))
    return list(rows[begin : begin + MAX_REQUESTS])


def requests_gantt(rows: Sequence[RequestRow], order: Sequence[str], *, title: str) -> Drawing:
    """`order`: all workers."""
    spans: dict[str, list[tuple[float, float, list[Bar]]]] = {}  # by worker: the extent of a request and its bars
    for row in rows:
        for worker, bars in _bars(row):
            spans.setdefault(worker, []).append((bars[0].begin, bars[-1].end, bars))
    names = [name for name in (ROUTER, *order) if name in spans][: MAX_WORKERS + 1]
    drawn = [GanttRow(name=name, bars=_in_lanes(spans[name])) for name in names]
    ends = [one.end for row in drawn for one in row.bars]
    begin_s = min((one.begin for row in drawn for one in row.bars), default=0.0)
    return gantt(drawn, _seconds(begin_s, max(ends, default=1.0)), title=title, width=CONTENT)


def _bars(row: RequestRow) -> Iterable[tuple[str, list[Bar]]]:
    """The bars of a request on the router and on each of its workers."""
    about = f"request {row.number}: {row.prompt_tokens} prompt tokens, {row.outcome}"
    ended_s = row.arrival_s if row.ended_s is None else row.ended_s
    if row.ttft_s is None or not row.decode_worker:
        yield ROUTER, [Bar(begin=row.arrival_s, end=ended_s, kind=LOST, about=about)]
        return
    placed_s, first_s = row.arrival_s + row.queue_s, row.arrival_s + row.ttft_s
    if row.queue_s > 0.0:
        yield ROUTER, [Bar(begin=row.arrival_s, end=placed_s, kind=WAIT, about=about)]
    last = DECODE if row.outcome in ("served", "late") else LOST
    ready_s = min(first_s + row.transfer_exposed_s, ended_s)
    prefill = Bar(begin=min(placed_s, first_s), end=first_s, kind=PREFILL, about=about)
    decode = Bar(begin=ready_s, end=ended_s, kind=last, about=about)
    if row.prefill_worker:
        yield row.prefill_worker, [prefill]
        transfer = Bar(begin=first_s, end=ready_s, kind=TRANSFER, about=about)
        yield row.decode_worker, [transfer, decode] if ready_s > first_s else [decode]
    else:
        yield row.decode_worker, [prefill, decode]


def _in_lanes(spans: Iterable[tuple[float, float, list[Bar]]]) -> list[Bar]:
    ordered = sorted(spans, key=lambda one: one[:2])
    lanes = assign_lanes([(begin, end) for begin, end, _ in ordered], MAX_LANES)
    return [
        Bar(begin=one.begin, end=one.end, kind=one.kind, about=one.about, lane=lane)
        for (_, _, bars), lane in zip(ordered, lanes, strict=True)
        if lane is not None
        for one in bars
    ]


def _lasted_s(worker: WorkerRow) -> float:
    return worker.shares_width_s * max(len(one) for one in worker.shares)


def _seconds(begin_s: float, end_s: float) -> Axis:
    return Axis(low=begin_s, high=end_s if end_s > begin_s else begin_s + 1.0, label="simulated time, seconds")


def _about(run: PolicyRun) -> str:
    return f"{run.name} at {run.summary.rate_rps:.3g} requests/s"


# --- panels of the figure -------------------------------------------------------------------------------------


def figure(runs: Sequence[PolicyRun], *, cluster: str, origin: Sequence[str]) -> Figure:
    """`origin` names the machine and the commit."""
    return Figure(
        title=f"{runs[0].result.trace}: simulated", caption=caption(runs, cluster, origin), panels=panels(runs)
    )


def caption(runs: Sequence[PolicyRun], cluster: str, origin: Sequence[str]) -> list[str]:
    first = runs[0]
    slo = first.result.config.slo
    return [
        f"{count(first.summary.requests, 'request')} on {cluster}, {split_text(runs)}, "
        f"seed {first.result.config.seed}. Targets: the first token within {seconds(slo.ttft_s)}, then "
        f"{seconds(slo.tpot_s)} per token. A request counts if it was served whole and met both; rejected, failed and "
        "late ones are misses.",
        *origin,
    ]


def panels(runs: Sequence[PolicyRun]) -> list[Panel]:
    focus, colour_of = focused(runs), colours(runs)
    found = [goodput_panel(runs)] if len({run.rate_scale for run in runs}) > 1 else []
    found.append(times_panel(focus, colour_of))
    groups = [_timed(run, colour_of[run.name]) for run in focus]
    where = f"at {focus[0].summary.rate_rps:.3g} requests/s"
    optional = [frontier_panel(groups, focus[0].result.config.slo, where), prediction_panel(groups, where)]
    for number, run in enumerate(focus):
        optional += [make(run, is_folded=number > 0) for make in (steps_panel, requests_panel)]
    return found + [one for one in optional if one is not None]


def focused(runs: Sequence[PolicyRun]) -> list[PolicyRun]:
    """The runs at the lowest rate at which any policy misses the target, where policies differ. Otherwise at the
    highest rate."""
    missed = [run.rate_scale for run in runs if run.summary.attainment < TARGET]
    scale = min(missed) if missed else max(run.rate_scale for run in runs)
    return [run for run in runs if run.rate_scale == scale]


def goodput_panel(runs: Sequence[PolicyRun]) -> Panel:
    return Panel(
        title="Goodput and attainment by rate",
        drawings=(goodput_chart(runs), attainment_chart(runs)),
        note="Goodput is the number of requests per second that met both targets. Attainment is their share of all "
        "requests.",
        legend=line_legend(colours(runs)),
    )


def times_panel(focus: Sequence[PolicyRun], colour_of: dict[str, int]) -> Panel:
    slo = focus[0].result.config.slo
    return Panel(
        title=f"Times at {focus[0].summary.rate_rps:.3g} requests/s",
        drawings=(
            share_chart(focus, lambda row: row.ttft_s, slo.ttft_s, colour_of, "time to first token"),
            share_chart(focus, lambda row: row.tpot_s, slo.tpot_s, colour_of, "time per token"),
        ),
        note="A curve that is higher at the target is better. If it ends below 100%, the other requests got no token.",
        legend=line_legend({run.name: colour_of[run.name] for run in focus}),
    )


def split_text(runs: Sequence[PolicyRun]) -> str:
    splits = {run.split: None for run in runs}
    prefill, decode = next(iter(splits)).split(":")
    return (
        f"{prefill} prefill and {count(int(decode), 'decode worker')}"
        if len(splits) == 1
        else f"P:D {', '.join(splits)}"
    )


def _timed(run: PolicyRun, colour: int) -> TimedRequests:
    rows = run.result.requests
    ended = [row for row in rows if row.ttft_s is not None and row.tpot_s is not None]
    whole = [row for row in ended if row.outcome in ("served", "late")]
    return TimedRequests(
        name=run.name,
        colour=colour,
        total=len(rows),
        times=[(row.ttft_s or 0.0, row.tpot_s or 0.0) for row in whole],
        ttft=[(row.ttft_s or 0.0, row.predicted_ttft_s) for row in ended if row.predicted_ttft_s is not None],
        tpot=[(row.tpot_s or 0.0, row.predicted_tpot_s) for row in ended if row.predicted_tpot_s is not None],
    )


# --- page -----------------------------------------------------------------------------------------------------
# One self-contained HTML page of runs, without network and scripts, in a light and a dark theme.
#
# Every text that comes from a trace, a profile or a name is escaped.

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
