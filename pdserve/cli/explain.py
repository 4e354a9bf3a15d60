"""`pdserve explain REQUEST`: why a recent request was placed where it was, and how accurate the prediction was.

Each router explains its own decisions. With several routers, name all: --target A:1,B:2.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from pdserve.cli.plot_file import add_plot_flag, check_plot, write_plot
from pdserve.cli.target import add_target_flags, connect
from pdserve.client.results import ExplainedCandidate, Explanation
from pdserve.core.errors import ConfigError, NotFound, PdserveError
from pdserve.core.json_text import to_json

HELP = "explain the placement of a request"
HEAD: Final = ("", "PREFILL", "DECODE", "TTFT", "TPOT", "SLACK", "KEEPS TPOT", "LOST", "PREFERENCE", "COST")
#: Below the table; docs/explain.md has more.
COST_NOTES: Final = (
    "LOST        time that this and other requests lose by the placement, in shares of their targets",
    "PREFERENCE  against (+) a decode worker alone while a prefill worker is free; for it (-) with a short prompt",
    "COST        LOST + PREFERENCE; the lowest one is chosen",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="request id, as `pdserve generate --stats` or an answer over HTTP has it; ID#0, ID#1 .. if it had several "
        "completions",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each router that knows the request"
    )
    add_plot_flag(parser)
    add_target_flags(parser, are_several=True)


def run(args: argparse.Namespace) -> int:
    check_plot(args)
    found = ask(args)
    if args.plot:
        from pdserve.cli.explain_figure import explain_figure
        from pdserve.cli.origin import origin
        from pdserve.plot.figure import figure_page, figure_svg

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
        lines += ["", *_table([HEAD, *map(_row, one.candidates)])]
    if any(each.cost is not None for each in one.candidates):
        lines += ["", *COST_NOTES]
    return "\n".join(lines)


def _facts(one: Explanation) -> str:
    facts = [f"{one.prompt_tokens} prompt tokens"]
    if one.attempt:
        facts.append(f"attempt {one.attempt}" + (", resumed" if one.is_resumed else ""))
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
    return _table(rows)


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


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None or not math.isfinite(seconds) else f"{1000.0 * seconds:,.1f} ms"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
