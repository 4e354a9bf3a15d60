"""`pdserve explain REQUEST`: why a recent request was placed where it was, and how accurate the prediction was.
`pdserve explain --scaling`: the last decisions about the number of workers.

Each router explains its own decisions. With several routers, name all: --target A:1,B:2.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from pdserve.cli import table
from pdserve.client.results import (
    MOST_DECISIONS,
    ExplainedCandidate,
    Explanation,
    Scaling,
    ScalingAlternative,
    ScalingDecision,
)
from pdserve.client.target_flags import add_target_flags, connect
from pdserve.core.errors import ConfigError, NotFound, PdserveError
from pdserve.core.json_text import to_json
from pdserve.plot.charts import Rule, Series, line_chart
from pdserve.plot.drawing import CONTENT, Axis, Figure, Panel, swatch
from pdserve.plot_flag import add_plot_flag, check_plot, origin, write_plot

HELP = "explain the placement of a request, or the number of workers"
HEAD: Final = ("", "PREFILL", "DECODE", "TTFT", "TPOT", "SLACK", "KEEPS TPOT", "LOST", "PREFERENCE", "COST")
#: Below the table; docs/explain.md has more.
NOTES: Final = (
    "TTFT        counts from the decision; the one at the top also has the wait before it",
    "SLACK       (target - prediction) / target, for the target that is nearest",
    "KEEPS TPOT  whether this request and those on the decode worker meet their TPOT targets",
)
COST_NOTES: Final = (
    "LOST        time that this and other requests lose by the placement, in shares of their targets",
    "PREFERENCE  against (+) a decode worker alone while a prefill worker is free; for it (-) with a short prompt",
    "COST        LOST + PREFERENCE; the lowest one is chosen of those that meet every target and can start now,",
    "            unless one that must wait for a busy worker costs over 3 points less",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="request id, as `pdserve generate --stats` or an answer over HTTP has it; ID#0, ID#1 .. if it had several "
        "completions",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="explain the last decisions of `up --autoscale` or `--roles auto` instead of a request",
    )
    parser.add_argument(
        "--last",
        type=int,
        metavar="N",
        help="with --scaling: how many decisions to show (5; in JSON, all that are kept)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object for each router that knows the request, or one of all decisions",
    )
    add_plot_flag(parser)
    add_target_flags(parser, are_several=True)


def run(args: argparse.Namespace) -> int:
    if args.scaling:
        return explain_scaling(args)
    if args.request is None or args.last is not None:
        given = "nothing" if args.request is None else "a request with --last"
        raise ConfigError("request", given, "the id of a request, or --scaling, which --last belongs to")
    check_plot(args)
    found = ask(args)
    if args.plot:
        from pdserve.plot.drawing import figure_page, figure_svg

        figure = explain_figure(found, origin=origin())
        write_plot(args, svg=lambda: figure_svg(figure), page=lambda: figure_page(figure))
    for number, explanation in enumerate(found):
        if args.json:
            print(to_json(as_object(explanation)))
        else:
            print(("\n" if number else "") + render(explanation))
    return 0


def ask(args: argparse.Namespace) -> list[Explanation]:
    """From every router that knows it. Raises NotFound if none does, or the error of a router that could not be
    asked."""
    targets = [one for one in args.target.split(",") if one]
    if not targets:
        raise ConfigError("target", repr(args.target), "HOST:PORT, or several with commas between them")
    found: list[Explanation] = []
    missing: PdserveError | None = None
    for target in targets:
        try:
            with connect(argparse.Namespace(**{**vars(args), "target": target})) as client:
                found.append(client.explain(args.request))
        except NotFound as error:
            missing = missing or error
        except PdserveError as error:
            missing = error if missing is None or isinstance(missing, NotFound) else missing
    if not found:
        assert missing is not None, "each target answered or failed"
        raise missing
    return found


def as_object(explanation: Explanation) -> dict[str, object]:
    predicted = {"predicted_ttft_s": explanation.predicted_ttft_s, "predicted_tpot_s": explanation.predicted_tpot_s}
    return dataclasses.asdict(explanation) | predicted


def render(explanation: Explanation) -> str:
    """Formats an explanation as text. Pure."""
    one = explanation
    state = one.outcome or one.stage
    lines = [
        f"{one.request_id}: {one.decision}, {state}" + (f" ({one.ended_because})" if one.ended_because else ""),
        f"why        {one.reason}",
        f"request    {_facts(one)}",
        f"waited     {_ms(one.waited_s)} before the decision" + (f" of {one.router_id}" if one.router_id else ""),
    ]
    if one.retry_after_s is not None:
        lines.append(f"client     to retry after {one.retry_after_s:.2f} s")
    lines += ["", *_outcome(one)]
    if one.candidates:
        lines += ["", *table([HEAD, *map(_row, one.candidates)])]
        lines += ["", *pulls] if (pulls := [*_reads(one.candidates), *_pulls(one.candidates)]) else []
        lines += ["", *NOTES]
    if any(each.cost is not None for each in one.candidates):
        lines += COST_NOTES
    return "\n".join(lines)


def _facts(one: Explanation) -> str:
    facts = [f"{one.prompt_tokens} prompt tokens"]
    if one.attempt:
        facts.append(f"attempt {one.attempt}" + (", resumed" if one.is_resumed else ""))
    if one.adapter:
        facts.append(f"adapter {one.adapter}")
    if one.tenant:
        facts.append(f"tenant {one.tenant}")
    if one.priority:
        facts.append(f"priority {one.priority}")
    return ", ".join(facts)


def _outcome(one: Explanation) -> list[str]:
    """Targets, predictions and actual values side by side. TTFT counts from arrival."""
    rows = [("", "SLO", "PREDICTED", "ACTUAL", "OFF BY")]
    rows.append(("TTFT", *_against(one.slo_ttft_s, one.predicted_ttft_s, one.actual_ttft_s)))
    rows.append(("TPOT", *_against(one.slo_tpot_s, one.predicted_tpot_s, one.actual_tpot_s)))
    return table(rows)


def _against(slo_s: float, predicted_s: float | None, actual_s: float | None) -> tuple[str, str, str, str]:
    off = "-"
    if predicted_s is not None and actual_s:
        off = f"{(predicted_s - actual_s) / actual_s:+.0%}"
    return _ms(slo_s), _ms(predicted_s), _ms(actual_s), off


def _row(candidate: ExplainedCandidate) -> tuple[str, ...]:
    cost, preference = candidate.cost, candidate.preference
    return (
        "->" if candidate.is_chosen else "",
        candidate.prefill_worker or "(itself)",
        candidate.decode_worker,
        _ms(candidate.predicted_ttft_s),
        _ms(candidate.predicted_tpot_s),
        "-" if candidate.slack is None else f"{candidate.slack:+.1%}",
        "yes" if candidate.is_feasible else "no",
        "-" if cost is None or preference is None else f"{cost - preference:.1%}",
        "-" if cost is None or preference is None else f"{preference:+.1%}",
        "-" if cost is None else f"{cost:.1%}",
    )


def _reads(candidates: Sequence[ExplainedCandidate]) -> list[str]:
    """One line for each worker that would read its tiers instead of computing, with both predictions."""
    lines = {}
    for one in candidates:
        if (reads := one.reads) is not None:
            ways = f"recompute {_ms(reads.recompute_s)}, read {_ms(reads.read_s)}"
            lines[one.prefill_worker or one.decode_worker] = f"{reads.num_tokens:,} tokens below its pool: {ways}"
    return [f"{worker} has {line}" for worker, line in lines.items()]


def _pulls(candidates: Sequence[ExplainedCandidate]) -> list[str]:
    """One line for each worker that could pull KV instead of computing it, with both predictions."""
    lines = {}
    for one in candidates:
        if (pull := one.pull) is not None:
            ways = f"recompute {_ms(pull.recompute_s)}, pull from {pull.source} {_ms(pull.pull_s)}"
            if pull.source_read_s:
                ways += f" (of it {_ms(pull.source_read_s)} to read its tiers)"
            chosen = "pull" if pull.is_pulled else "recompute"
            lines[one.prefill_worker or one.decode_worker] = f"{pull.num_tokens:,} cached tokens: {ways} -> {chosen}"
    return [f"{worker} lacks {line}" for worker, line in lines.items()]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None or not math.isfinite(seconds) else f"{1000.0 * seconds:,.1f} ms"


# --- number of workers ----------------------------------------------------------------------------------------

SHOWN_DECISIONS: Final = 5
SCALING_HEAD: Final = ("", "CHANGE", "PREFILL", "DECODE", "IN TARGETS", "COST", "OF THE CHANGE", "REFUSED")


def explain_scaling(args: argparse.Namespace) -> int:
    if args.request is not None or args.plot:
        other = args.request if args.request is not None else "--plot"
        raise ConfigError("scaling", other, "no request and no --plot beside it")
    if args.last is not None and not 1 <= args.last <= MOST_DECISIONS:
        raise ConfigError("last", args.last, f"1 to {MOST_DECISIONS}")
    with connect(args) as client:
        found = client.scaling(args.last or (MOST_DECISIONS if args.json else SHOWN_DECISIONS))
    print(to_json(found) if args.json else render_scaling(found))
    return 0


def render_scaling(found: Scaling) -> str:
    """Formats the decisions, the last one at the end. Pure."""
    several = found.min_workers < found.max_workers
    bounds = f"{found.min_workers} to {found.max_workers} workers" if several else f"{found.max_workers} workers"
    roles = "roles change" if found.may_change_roles else "roles are fixed"
    lines = [f"{bounds}, {roles}, decided every {found.every_s:g} s"]
    if found.trouble:
        lines.append(f"nothing is decided now: {found.trouble}")
    if not found.decisions:
        lines.append("no decision yet")
    for one in found.decisions:
        lines += ["", *_decision(one)]
    if any(one.alternatives for one in found.decisions):
        lines += [
            "",
            "IN TARGETS  predicted share of the requests that meet both targets, until a change could have its effect",
            "COST        worker-seconds in the next minutes: workers, misses and changes",
        ]
    return "\n".join(lines)


def _decision(one: ScalingDecision) -> list[str]:
    ended = one.met + one.missed
    met = f"{one.met} of {ended} that ended met both targets" if ended else "none ended"
    lines = [
        f"{one.age_s:.0f} s ago: {one.change or 'no change'}, at {one.prefill} prefill and {one.decode} decode workers",
        f"why       {one.reason}",
        f"saw       {one.seen_rate_rps:.1f} requests/s, {one.queued} queued, {one.running} running; {met}",
    ]
    if one.now is not None and one.later is not None:
        now = one.now
        lines.append(
            f"expected  {now.rate_rps:.1f} requests/s (error {now.error:.0%}), then {one.later.rate_rps:.1f}; "
            f"{now.prompt_tokens:.0f} prompt tokens ({now.uncached_tokens:.0f} not cached), "
            f"{now.output_tokens:.0f} output tokens; {one.capacity_share:.0%} of the predicted capacity"
        )
    if one.failure:
        lines.append(f"failed    {one.failure}")
    elif one.outcome is not None:
        lines.append(f"came      {one.outcome.text}")
    if one.alternatives:
        chosen = one.change or "keep"
        lines += ["", *table([SCALING_HEAD, *(_alternative(each, chosen) for each in one.alternatives)])]
    return lines


def _alternative(one: ScalingAlternative, chosen: str) -> tuple[str, ...]:
    return (
        "->" if one.change == chosen else "",
        one.change,
        str(one.prefill),
        str(one.decode),
        f"{one.attainment:.1%}",
        f"{one.cost_s:,.0f} s",
        f"{one.change_cost_s:,.0f} s",
        one.refused,
    )


# --- figure of an explanation ---------------------------------------------------------------------------------
# The compared placements by predicted TTFT and TPOT, the targets, and what then happened.

_SPAN: Final = 1.5  # how far the axes go beyond the data
#: Series with their place in the palette, which also decides the marker.
_FEASIBLE, _CHOSEN, _INFEASIBLE, _ACTUAL = 2, 0, 7, 1


def explain_figure(found: Sequence[Explanation], *, origin: str) -> Figure:
    """`found`: the explanation of each router that knows the request, at least one."""
    caption = [f"{len(one.candidates)} placements were compared: {one.reason}" for one in found] + [origin]
    title = f"Placement of {found[0].request_id}"
    return Figure(title=title, caption=caption, panels=[_placements(one) for one in found])


def _placements(one: Explanation) -> Panel:
    chosen = one.chosen
    others = [candidate for candidate in one.candidates if candidate is not chosen]
    series = [
        _series("meets both targets", _FEASIBLE, one, [each for each in others if each.is_feasible]),
        _series("misses a target", _INFEASIBLE, one, [each for each in others if not each.is_feasible], is_hollow=True),
        _series("chosen, as predicted", _CHOSEN, one, [] if chosen is None else [chosen]),
    ]
    if one.actual_ttft_s is not None and one.actual_tpot_s is not None:
        actual = [(one.actual_ttft_s, one.actual_tpot_s)]
        series.append(Series(name="what then happened", points=actual, colour=_ACTUAL, is_marked=True, has_line=False))
    series = [each for each in series if each.points]
    points = [point for each in series for point in each.points]
    x = _axis("TTFT from arrival", [ttft_s for ttft_s, _ in points], one.slo_ttft_s)
    y = _axis("TPOT", [tpot_s for _, tpot_s in points], one.slo_tpot_s)
    rules = [
        Rule(at=one.slo_ttft_s, label="TTFT target", is_vertical=True),
        Rule(at=one.slo_tpot_s, label="TPOT target"),
    ]
    chart = line_chart(
        series, x, y, title=f"placements of {one.request_id} by TTFT and TPOT", rules=rules, width=CONTENT, height=360
    )
    return Panel(
        title=f"Predicted and actual times, {one.router_id}" if one.router_id else "Predicted and actual times",
        drawings=(chart,),
        note=_note(one),
        legend=tuple((each.name, swatch(each.colour, has_line=False, is_hollow=each.is_hollow)) for each in series),
    )


def _series(
    name: str, colour: int, one: Explanation, candidates: Sequence[ExplainedCandidate], *, is_hollow: bool = False
) -> Series:
    """The predictions count from arrival, like the actual times. Infinite ones have no place."""
    points = [(one.waited_s + each.predicted_ttft_s, each.predicted_tpot_s) for each in candidates]
    return Series(
        name=name,
        points=[point for point in points if math.isfinite(sum(point))],
        colour=colour,
        is_marked=True,
        has_line=False,
        is_hollow=is_hollow,
    )


def _axis(name: str, values: Sequence[float], target_s: float) -> Axis:
    """Long targets of short requests would leave no room for the placements, so the axis is logarithmic."""
    known = [one for one in (*values, target_s) if one > 0.0 and math.isfinite(one)] or [1.0]
    return Axis(low=min(known) / _SPAN, high=max(known) * _SPAN, label=f"{name}, logarithmic", is_log=True, unit="s")


def _note(one: Explanation) -> str:
    words = [f"{one.decision}, {one.outcome or one.stage}; {one.prompt_tokens} prompt tokens."]
    if one.chosen is not None:
        prefill = one.chosen.prefill_worker or one.chosen.decode_worker
        words.append(f"Prefill on {prefill}, decode on {one.chosen.decode_worker}.")
    for name, predicted_s, actual_s in (
        ("TTFT", one.predicted_ttft_s, one.actual_ttft_s),
        ("TPOT", one.predicted_tpot_s, one.actual_tpot_s),
    ):
        if predicted_s is not None and actual_s:
            words.append(
                f"{name}: predicted {1000 * predicted_s:.1f} ms, actual {1000 * actual_s:.1f} ms "
                f"({(predicted_s - actual_s) / actual_s:+.0%})."
            )
    return " ".join(words)
