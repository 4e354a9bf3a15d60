"""Timelines of workers: how they spent their time, and which requests they served. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import Drawing
from pdserve.plot.figure import CONTENT, Panel
from pdserve.plot.gantt import Bar, BarKind, GanttRow, gantt, gantt_legend, place_in_lanes
from pdserve.plot.share_rows import ShareKind, ShareRow, share_legend, share_rows
from simulator.comparison import PolicyRun
from simulator.model import RequestRow, WorkerRow

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
        rows, STEP_KINDS, _seconds(0.0, span_s), title=f"steps of each worker over time, {run.policy}", width=CONTENT
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
    chart = requests_gantt(rows, order, title=f"requests on each worker over time, {run.policy}")
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
    lanes = place_in_lanes([(begin, end) for begin, end, _ in ordered], MAX_LANES)
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
    return f"{run.policy} at {run.summary.rate_rps:.3g} requests/s"
