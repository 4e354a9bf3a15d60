"""The figure of simulated runs: the panels of `pdserve simulate --plot`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.plot.figure import Figure, Panel
from pdserve.plot.marks import line_legend
from simulator.comparison import TARGET, PolicyRun
from simulator.curves import attainment_chart, colours, goodput_chart, share_chart
from simulator.tables import count, seconds
from simulator.time_charts import TimedRequests, frontier_panel, prediction_panel
from simulator.worker_charts import requests_panel, steps_panel


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
    groups = [_timed(run, colour_of[run.policy]) for run in focus]
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
        legend=line_legend({run.policy: colour_of[run.policy] for run in focus}),
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
        name=run.policy,
        colour=colour,
        total=len(rows),
        times=[(row.ttft_s or 0.0, row.tpot_s or 0.0) for row in whole],
        ttft=[(row.ttft_s or 0.0, row.predicted_ttft_s) for row in ended if row.predicted_ttft_s is not None],
        tpot=[(row.tpot_s or 0.0, row.predicted_tpot_s) for row in ended if row.predicted_tpot_s is not None],
    )
