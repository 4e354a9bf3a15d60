"""Computes the points of the report's charts from runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdserve.plot.axis import Axis
from pdserve.plot.drawing import HALF, Drawing
from pdserve.plot.line_chart import Rule, Series, line_chart
from pdserve.plot.thinning import means, thinned
from simulator.comparison import TARGET, PolicyRun
from simulator.model import RequestRow, Sample


def colours(runs: Iterable[PolicyRun]) -> dict[str, int]:
    """Each policy has the same colour on the whole page."""
    return {policy: number for number, policy in enumerate(dict.fromkeys(run.policy for run in runs))}


def attainment_chart(runs: Sequence[PolicyRun]) -> Drawing:
    """Rate against attainment, a line for each policy."""
    found = [
        Series(
            name=policy,
            points=sorted((run.summary.rate_rps, run.summary.attainment) for run in runs if run.policy == policy),
            colour=colour,
            is_marked=True,
        )
        for policy, colour in colours(runs).items()
    ]
    most_rps = max(run.summary.rate_rps for run in runs)
    return line_chart(
        found,
        Axis(low=0.0, high=1.05 * most_rps or 1.0, label="requests per second that arrived"),
        Axis(low=0.0, high=1.0, label="met both targets", unit="%"),
        title="share of requests that met both targets, by rate of arrival",
        rules=[Rule(at=TARGET, label=f"{TARGET:.0%}: the rate is sustained")],
        width=HALF,
        height=300,
    )


def goodput_chart(runs: Sequence[PolicyRun]) -> Drawing:
    """Rate of arrival against requests per second that met both targets, a line for each policy."""
    found = [
        Series(
            name=policy,
            points=sorted((run.summary.rate_rps, run.summary.goodput_rps) for run in runs if run.policy == policy),
            colour=colour,
            is_marked=True,
        )
        for policy, colour in colours(runs).items()
    ]
    most_rps = max(run.summary.rate_rps for run in runs)
    most = max(run.summary.goodput_rps for run in runs)
    return line_chart(
        found,
        Axis(low=0.0, high=1.05 * most_rps or 1.0, label="requests per second that arrived"),
        Axis(low=0.0, high=1.1 * most or 1.0, label="goodput, requests per second"),
        title="goodput by rate of arrival",
        width=HALF,
        height=300,
    )


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
        run.policy: sorted(seen for row in run.result.requests if (seen := value(row)) is not None and seen > 0.0)
        for run in runs
    }
    every = [seconds for values in held.values() for seconds in values] + [target_s]
    low, high = max(min(every), target_s / 1000.0), max(every)
    series = []
    for run in runs:
        values, total = held[run.policy], len(run.result.requests)
        points = [(seconds, (rank + 1) / total) for rank, seconds in enumerate(values)]
        series.append(Series(name=run.policy, points=thinned(points), colour=colour_of[run.policy], is_stepped=True))
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
