"""Runs `pdserve plan --gpus`: compares layouts of GPUs, with text or JSON output."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.json_text import to_json
from pdserve.plot_flag import check_plot
from pdserve.profiles import load_degrees
from pdserve.progress import ProgressLine
from router.policy import find_policy
from simulator.cluster.world import simulate
from simulator.commands.planning import (
    TOO_SHORT,
    UNATTAINABLE,
    Jobs,
    counted,
    measured_together,
    plot_plan,
    pool,
    question_from,
    show_interrupted,
)
from simulator.report.time_charts import PlannedLayout
from simulator.search.goodput import HighestRate, Shortage
from simulator.search.layouts import MAX_DEGREES, MAX_GPUS, Layout, usable_layouts
from simulator.search.plan import LayoutPlan, Question, compare, limiting_target, measure_layout, verdict

_BAR: Final = 20


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, UNATTAINABLE or TOO_SHORT."""
    check_plot(args)
    if args.rate is not None:
        raise ConfigError("rate", args.rate, "no --gpus beside it: --rate computes a number of workers (--workers)")
    if not 1 <= args.gpus <= MAX_GPUS:
        raise ConfigError("gpus", args.gpus, f"1 to {MAX_GPUS}")
    wanted = args.degrees or ()
    if len(wanted) > MAX_DEGREES:
        raise ConfigError("degrees", ",".join(map(str, wanted)), f"at most {MAX_DEGREES}")
    profiles = load_degrees(args.profile, wanted)
    question = question_from(args, args.gpus, next(iter(profiles.values())))
    layouts = usable_layouts(args.gpus, profiles, question.windows[0], question.block_size)
    if not find_policy(question.router.policy).uses_prefill:
        layouts = [one for one in layouts if one.is_colocated]
    with ProgressLine("planning") as bar, pool(args.jobs, len(layouts)) as jobs:
        plan = compare(layouts, lambda *asked: _measured(question, profiles, jobs, bar, *asked))
        shortage = plan.found[plan.top].shortage(question.slo.ttft_s, len(question.windows))
        limits = _limits(question, profiles, plan, bar) if shortage is None and plan.is_attainable else {}
    if jobs.is_interrupted:
        return show_interrupted(args, jobs)
    shown = [
        PlannedLayout(name=layout.text, found=found, is_colocated=layout.is_colocated)
        for layout, found in plan.found.items()
    ]
    said = verdict(plan, limits) if shortage is None else f"no verdict: {shortage.text}"
    plot_plan(args, question, shown, f"{args.gpus} GPUs", said)
    if args.json:
        print(to_json(as_object(question, args.gpus, profiles, plan, limits, shortage)))
    else:
        print(render(question, args.gpus, profiles, plan, limits, shortage))
    return TOO_SHORT if shortage is not None else UNATTAINABLE if not plan.is_attainable else 0


def _measured(
    question: Question,
    profiles: Mapping[int, Profile],
    jobs: Jobs,
    bar: ProgressLine,
    layouts: Sequence[Layout],
    floor: float,
) -> list[HighestRate]:
    tasks = {one.text: partial(_measure, question, one, profiles, floor) for one in layouts}
    return measured_together(jobs, bar, tasks, len(question.windows))


def _measure(question: Question, layout: Layout, profiles: Mapping[int, Profile], floor: float) -> HighestRate:
    return measure_layout(question, layout, profiles, counted, floor)


def _limits(
    question: Question, profiles: Mapping[int, Profile], plan: LayoutPlan, bar: ProgressLine
) -> dict[Layout, str]:
    """The limiting target of the best layout of each family, at the lowest rate that it missed."""
    found = {}
    for colocated in (True, False):
        best = plan.best(colocated=colocated)
        missed = plan.found[best].missed if best is not None else None
        if best is not None and missed is not None:
            bar.begin(f"targets of {best.text}")
            bar.update(0)
            found[best] = limiting_target(question, best, profiles, simulate, missed.scale)
    return found


# -- what is shown ---------------------------------------------------------------------------------------------------


def render(
    question: Question,
    gpus: int,
    profiles: Mapping[int, Profile],
    plan: LayoutPlan,
    limits: Mapping[Layout, str],
    shortage: Shortage | None,
) -> str:
    name = next(iter(profiles.values())).name.partition(":")[0]
    lines = [
        f"{name}, policy {question.router.policy}, {gpus} GPUs, {len(question.windows[0])} requests of "
        f"{question.windows[0].name}",
        f"targets: TTFT {question.slo.ttft_s:g} s, TPOT {question.slo.tpot_s:g} s, to nine requests in ten",
        "",
        f"{'layout':<42}   requests/s   per GPU   limited by",
    ]
    peak = plan.found[plan.top].rate_rps
    for layout, found in plan.found.items():
        each, full = "", 0
        if not found.is_bound:
            each = f"{found.rate_rps / gpus:.3g}"
            full = round(_BAR * found.rate_rps / peak) if peak else 0
        mark = "*" if _is_derived(layout, profiles) else ""
        limit = limits.get(layout, "").upper()
        lines.append(
            f"{layout.text + mark:<42}   {found.rate_text:>10}   {each:>7}   {limit:<10}  {'#' * full}".rstrip()
        )
    derived = [f"{one.derived} of tp{one.degree}" for one in profiles.values() if one.derived]
    if derived:
        lines += ["", f"* derived from another degree, not measured: {'; '.join(derived)}"]
    lines += ["", verdict(plan, limits) if shortage is None else f"no verdict: {shortage.text}"]
    if shortage is not None:
        lines.append("set more --requests, or record for longer; --seeds pools runs of the same requests")
    return "\n".join(lines)


def _is_derived(layout: Layout, profiles: Mapping[int, Profile]) -> bool:
    return bool(profiles[layout.prefill_degree].derived or profiles[layout.decode_degree].derived)


def as_object(
    question: Question,
    gpus: int,
    profiles: Mapping[int, Profile],
    plan: LayoutPlan,
    limits: Mapping[Layout, str],
    shortage: Shortage | None = None,
) -> dict[str, Any]:
    """Without a verdict, its fields are null."""
    rows = [
        {
            **dataclasses.asdict(layout),
            **found.bounds,
            "limit": limits.get(layout),
            "is_derived": _is_derived(layout, profiles),
            "runs": len(found.probes),
        }
        for layout, found in plan.found.items()
    ]
    colocated, apart = plan.best(colocated=True), plan.best(colocated=False)
    judged = {
        "is_attainable": plan.is_attainable,
        "disaggregate": plan.disaggregates,
        "best_colocated": colocated and dataclasses.asdict(colocated),
        "best_disaggregated": apart and dataclasses.asdict(apart),
        "ratio": plan.ratio,
        "verdict": verdict(plan, limits),
    }
    return {
        "trace": question.windows[0].name,
        "requests": len(question.windows[0]),
        "profile": next(iter(profiles.values())).name.partition(":")[0],
        "policy": question.router.policy,
        "gpus": gpus,
        "slo": {"ttft_s": question.slo.ttft_s, "tpot_s": question.slo.tpot_s},
        "derived": {f"tp{one.degree}": one.derived for one in profiles.values() if one.derived},
        "is_long_enough": shortage is None,
        "shortage": None if shortage is None else dataclasses.asdict(shortage),
        **(judged if shortage is None else dict.fromkeys(judged)),
        "layouts": rows,
    }
