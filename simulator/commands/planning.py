"""Runs `pdserve plan --workers`: chooses the requests, searches in several processes, prints text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.json_text import to_json
from pdserve.core.types import Slo
from pdserve.plot.drawing import figure_page, figure_svg
from pdserve.plot_flag import check_plot, origin, write_plot
from pdserve.profiles import load_profile
from pdserve.progress import ProgressLine
from router.policy import find_policy
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.commands.flags import DEFAULT_REQUESTS, MAX_REQUESTS
from simulator.model import SimResult, Trace
from simulator.report.time_charts import PlannedLayout, plan_figure
from simulator.search.goodput import ENOUGH, SPANS, HighestRate, Shortage, TraceWindow, cut
from simulator.search.plan import MARGIN, Plan, Question, demand, measure, sweep, workers_for
from simulator.traces.files import FileTrace
from simulator.traces.reshaped import Step, first, jittered
from simulator.traces.workloads import DEFAULT_RATE_RPS, Poisson, log_normal, make_workload

# --- requests -------------------------------------------------------------------------------------------------
# The first ones of a trace, or of a built-in workload that is made as long as a verdict needs.

BLOCK_TOKENS: Final = 64  # for traces without block ids; a divisor of the built-in workloads' blocks
LEAST_REQUESTS: Final = 600
_SAMPLE: Final = 400  # requests from which the needed number is computed
_RESERVE: Final = 2.0  # multiple of the predicted number of requests
_SPREAD: Final = 0.5  # of the logarithm of the lengths of --lengths
_MOST_TIMES_MEDIAN: Final = 16  # the longest of these lengths


def plan_windows(
    args: argparse.Namespace, profile: Profile, num_workers: int, slo: Slo
) -> tuple[tuple[TraceWindow, ...], int]:
    """The requests, once per seed, and the size of a KV block. Raises ConfigError or InvalidRequest."""
    if args.requests is not None and not 1 <= args.requests <= MAX_REQUESTS:
        raise ConfigError("requests", args.requests, f"1 to {MAX_REQUESTS}")
    if args.trace is not None:
        for flag in ("workload", "lengths"):
            if getattr(args, flag) is not None:
                raise ConfigError(flag, getattr(args, flag), "no --trace beside it: a trace replaces the workload")
        trace = FileTrace(args.trace)
        windows = []
        for number in range(args.seeds):
            steps: list[Step] = [first(DEFAULT_REQUESTS if args.requests is None else args.requests)]
            if trace.quantum_s:  # rounded arrivals come in bursts that the clients did not send
                steps.append(jittered(args.seed + number, trace.quantum_s))
            windows.append(cut(trace, *steps))
        return tuple(windows), trace.block_tokens or BLOCK_TOKENS
    count = args.requests
    if count is None:
        sample = cut(_built_in(args, args.seed, _SAMPLE), first(_SAMPLE))
        count = needed_requests(Question(windows=(sample,), profile=profile, num_workers=num_workers, slo=slo))
    seeds = range(args.seed, args.seed + args.seeds)
    return tuple(cut(_built_in(args, seed, count), first(count)) for seed in seeds), BLOCK_TOKENS


def needed_requests(question: Question) -> int:
    """The number of requests that a verdict on this workload needs (simulator/search/goodput.py), with a reserve.
    Computed from the workers' capacity and the longest time of a request that meets its targets."""
    needed, window = demand(question), question.windows[0]
    rate_rps = question.num_workers / (needed.prefill_s + needed.decode_s)
    answer_tokens = sum(one.output_tokens for one in window) / len(window)
    stay_s = question.slo.ttft_s + answer_tokens * question.slo.tpot_s
    count = _RESERVE * max(SPANS * stay_s * rate_rps, ENOUGH + stay_s * rate_rps)
    return min(MAX_REQUESTS, max(LEAST_REQUESTS, math.ceil(count)))


def _built_in(args: argparse.Namespace, seed: int, count: int) -> Trace:
    """A workload with more than `count` requests."""
    duration_s = 2.0 * count / DEFAULT_RATE_RPS + 60.0
    if args.lengths is None:
        return make_workload(args.workload or "chat", duration_s=duration_s, seed=seed)
    if args.workload is not None:
        raise ConfigError("lengths", args.lengths, "no --workload beside it")
    prompts, answers = args.lengths
    return Poisson(
        rate_rps=DEFAULT_RATE_RPS,
        duration_s=duration_s,
        seed=seed,
        prompts=log_normal(median=prompts, spread=_SPREAD, most=_MOST_TIMES_MEDIAN * prompts),
        outputs=log_normal(median=answers, spread=_SPREAD, most=_MOST_TIMES_MEDIAN * answers),
        block_tokens=BLOCK_TOKENS,
        name=f"prompts of {prompts} and answers of {answers} tokens",
    )


# --- search and output ----------------------------------------------------------------------------------------

_MOST_SEEDS: Final = 16
_BAR: Final = 30
EXPECTED_RUNS: Final = 8  # of the search of one split, until one has ended
NEARLY: Final = 0.95
_TICK_S: Final = 0.5  # between checks of the processes, to update the progress display
UNATTAINABLE: Final = 1  # exit status: no split meets the targets at any rate
TOO_SHORT: Final = 3  # exit status: the requests are too few, or arrive within too short a time, to say anything
INTERRUPTED: Final = 130  # exit status


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, UNATTAINABLE or TOO_SHORT."""
    check_plot(args)
    if args.degrees is not None:
        raise ConfigError("degrees", ",".join(map(str, args.degrees)), "--gpus beside it, not --workers")
    question = question_from(args, args.workers, load_profile(args.profile))
    with ProgressLine("planning") as bar, pool(args.jobs, len(question.splits)) as jobs:
        plan = sweep(question.num_workers, question.splits, lambda *asked: _measured(question, jobs, bar, *asked))
        needed = None
        shortage = lacking(question, plan)
        if args.rate is not None and shortage is None:
            hold = Sustains(question, args.rate, bar)
            needed = workers_for(args.rate, plan, hold)
    if jobs.is_interrupted:
        return show_interrupted(args, jobs)
    shown = as_object(question, plan, shortage)
    if args.rate is not None:
        shown |= {"rate_rps": args.rate, "needed": needed and {"prefill": needed[0], "decode": needed[1]}}
    layouts = [
        PlannedLayout(name=plan.split(split), found=found, is_colocated=split == 0)
        for split, found in sorted(plan.curve.items())
    ]
    verdict = advice(plan) if shortage is None else f"no verdict: {shortage.text}"
    plot_plan(args, question, layouts, f"{plan.num_workers} workers, prefill:decode", verdict)
    print(to_json(shown) if args.json else render(question, plan, args.rate, needed, shortage))
    return TOO_SHORT if shortage is not None else UNATTAINABLE if not plan.is_attainable else 0


def question_from(args: argparse.Namespace, num_workers: int, profile: Profile) -> Question:
    """Raises ConfigError or InvalidRequest on invalid values."""
    for name, value, most in (("seeds", args.seeds, _MOST_SEEDS), ("jobs", args.jobs, 1024)):
        if not 1 <= value <= most:
            raise ConfigError(name, value, f"1 to {most}")
    find_policy(args.policy)  # raises ConfigError
    if args.rate is not None and not 0.0 < args.rate < float("inf"):
        raise ConfigError("rate", args.rate, "a finite number above 0")
    slo = Slo(ttft_s=args.slo_ttft, tpot_s=args.slo_tpot)
    windows, block_size = plan_windows(args, profile, num_workers, slo)
    return Question(
        windows=windows,
        profile=profile,
        num_workers=num_workers,
        slo=slo,
        router=RouterSettings(policy=args.policy),
        link=args.link,
        block_size=block_size,
        seed=args.seed,
    )


def plot_plan(
    args: argparse.Namespace, question: Question, layouts: Sequence[PlannedLayout], what: str, verdict: str
) -> None:
    """Writes the charts if --plot is given."""
    if args.plot is None:
        return
    slo, window = question.slo, question.windows[0]
    lines = [
        f"{question.profile.name.partition(':')[0]} (simulated), policy {question.router.policy}, {len(window)} "
        f"requests of {window.name}, seed {question.seed}. Targets: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s.",
        verdict,
        origin(),
    ]
    figure = plan_figure(layouts, slo, title=f"Plan of {what}", caption=lines)
    write_plot(args, svg=lambda: figure_svg(figure), page=lambda: figure_page(figure))


# -- processes -------------------------------------------------------------------------------------------------------


class Jobs:
    """Processes, how many simulations they have run (the progress within a task), and the layouts that are finished."""

    def __init__(self, count: int, num_layouts: int) -> None:
        self._runs = multiprocessing.Value("Q", 0)
        before = multiprocessing.active_children()
        self.executor = ProcessPoolExecutor(count, initializer=_begin_process, initargs=(self._runs,))
        self._others = frozenset(before)
        self.num_layouts = num_layouts
        self.found: dict[str, HighestRate] = {}
        self.is_interrupted = False

    @property
    def num_runs(self) -> int:
        return int(self._runs.value)

    def terminate(self) -> None:
        """Ends the simulations that run: one may take minutes."""
        for process in multiprocessing.active_children():
            if process not in self._others:
                process.terminate()


_runs: Any = None  # of a process: the counter of its Jobs


def _begin_process(runs: Any) -> None:
    global _runs
    _runs = runs
    # Ctrl-C reaches all processes of a terminal. The parent handles it, and ends this one by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def counted(*args: Any, **options: Any) -> SimResult:
    """`simulate`, counted."""
    result = simulate(*args, **options)
    if _runs is not None:
        with _runs.get_lock():
            _runs.value += 1
    return result


@contextmanager
def pool(count: int, num_layouts: int) -> Iterator[Jobs]:
    """Processes that compare at most `num_layouts` layouts. SIGINT and SIGTERM end the block: `is_interrupted` is then
    set if a layout is finished, and otherwise KeyboardInterrupt goes on."""
    jobs = Jobs(count, num_layouts)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    try:
        yield jobs
    except KeyboardInterrupt:
        jobs.terminate()
        if not jobs.found:
            raise
        jobs.is_interrupted = True
    finally:
        jobs.executor.shutdown(cancel_futures=True)
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def tasks_done(num_ended: int, num_tasks: int, num_runs: int, runs_of_ended: int) -> float:
    """How many tasks are done, those in progress by the runs that they have made. Pure. A search ends after about
    EXPECTED_RUNS, or as many as those that have ended, and one that takes longer counts as nearly done."""
    per_task = runs_of_ended / num_ended if num_ended else EXPECTED_RUNS
    open_tasks = num_tasks - num_ended
    return num_ended + min((num_runs - runs_of_ended) / max(per_task, 1.0), NEARLY * open_tasks)


def _measured(
    question: Question, jobs: Jobs, bar: ProgressLine, splits: Sequence[int], floor: float
) -> list[HighestRate]:
    tasks = {f"{one}:{question.num_workers - one}": partial(_measure, question, one, floor=floor) for one in splits}
    return measured_together(jobs, bar, tasks, len(question.windows))


def measured_together(
    jobs: Jobs, bar: ProgressLine, tasks: Mapping[str, Callable[[], HighestRate]], runs_per_probe: int
) -> list[HighestRate]:
    """The results of `tasks`, which are the layouts by name, in order. A probe of a search is one run for each seed."""
    bar.begin(_label(list(tasks), len(jobs.found), jobs.num_layouts), len(tasks))
    bar.update(0)
    before = jobs.num_runs
    futures = {jobs.executor.submit(task): name for name, task in tasks.items()}
    waiting: set[Future[HighestRate]] = set(futures)
    runs_of_ended = 0
    while waiting:
        ended, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        for one in ended:
            # Raises the error of a process without waiting for the others.
            found = jobs.found[futures[one]] = one.result()
            runs_of_ended += len(found.probes) * runs_per_probe
        num_ended, num_runs = len(tasks) - len(waiting), jobs.num_runs - before
        done = tasks_done(num_ended, len(tasks), num_runs, runs_of_ended)
        bar.update(done, f"{num_ended} of {len(tasks)}, {num_runs} simulations")
    return [one.result() for one in futures]


def _label(names: Sequence[str], num_before: int, num_layouts: int) -> str:
    """Which of all layouts the bar shows. The search may end before it has run all."""
    first, last = num_before + 1, num_before + len(names)
    numbers = f"layout {first}" if first == last else f"layouts {first} to {last}"
    return f"{numbers} of {num_layouts} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"


def _measure(question: Question, num_prefill: int, *, floor: float) -> HighestRate:
    return measure(question, num_prefill, counted, floor=floor)


@dataclass(frozen=True, slots=True)
class Sustains:
    """Whether this many workers sustain the requested rate."""

    question: Question
    rate_rps: float
    bar: ProgressLine

    def __call__(self, num_prefill: int, num_decode: int) -> bool:
        self.bar.begin(f"{self.rate_rps:g} requests/s on {num_prefill}:{num_decode}")
        self.bar.update(0)
        scale = self.rate_rps / self.question.windows[0].rate_rps
        return self.question.resized(num_prefill + num_decode).run(num_prefill, simulate)(scale).has_met


# -- what is shown ---------------------------------------------------------------------------------------------------


def render(
    question: Question,
    plan: Plan,
    rate_rps: float | None,
    needed: tuple[int, int] | None,
    shortage: Shortage | None = None,
) -> str:
    lines = [
        f"{question.profile.name}, policy {question.router.policy}, {plan.num_workers} workers, "
        f"{len(question.windows[0])} requests of {question.windows[0].name}",
        f"targets: TTFT {question.slo.ttft_s:g} s, TPOT {question.slo.tpot_s:g} s, to nine requests in ten",
        "",
        "prefill:decode   requests/s   per worker   limited by",
    ]
    top = plan.curve[plan.best].rate_rps
    for split, found in sorted(plan.curve.items()):
        each, full = "", 0
        if not found.is_bound:
            each = f"{found.rate_rps / plan.num_workers:.3g}"
            full = round(_BAR * found.rate_rps / top) if top else 0
        limit = found.limit.upper()
        row = f"{plan.split(split):>14}   {found.rate_text:>10}   {each:>10}   {limit:<10}  {'#' * full}"
        lines.append(row.rstrip())
    lines += ["", advice(plan) if shortage is None else f"no verdict: {shortage.text}"]
    if shortage is not None:
        lines.append("record for longer, or set more --requests; --seeds pools runs of the same requests")
    elif rate_rps is not None:
        lines.append(
            f"{rate_rps:g} requests/s: {sum(needed)} workers, {needed[0]}:{needed[1]}"
            if needed
            else f"{rate_rps:g} requests/s: no number of workers that was tried sustains it"
        )
    return "\n".join(lines)


def show_interrupted(args: argparse.Namespace, jobs: Jobs) -> int:
    """Prints the layouts that were finished."""
    if args.json:
        layouts = [{"layout": name, **found.bounds} for name, found in jobs.found.items()]
        print(to_json({"is_interrupted": True, "num_layouts": jobs.num_layouts, "finished": layouts}))
        return INTERRUPTED
    print(f"interrupted after {len(jobs.found)} of {jobs.num_layouts} layouts; no verdict\n")
    width = max(map(len, ("layout", *jobs.found)))
    print(f"{'layout':<{width}}   requests/s")
    for name, found in jobs.found.items():
        print(f"{name:<{width}}   {found.rate_text:>10}")
    return INTERRUPTED


def advice(plan: Plan) -> str:
    best = plan.curve[plan.best]
    if not plan.is_attainable:
        return best.verdict
    if plan.advice:
        whole = plan.curve[0].rate_rps
        rest = (
            f"{best.rate_rps / whole:.2f} times {plan.split(0)}"
            if whole
            else f"where {plan.split(0)} meets these targets at no rate"
        )
        return f"disaggregate: {plan.split(plan.best)} sustains {best.verdict}, {rest}"
    gain = best.rate_rps / plan.curve[0].rate_rps - 1.0
    why = (
        f"{plan.split(plan.best)} gains {gain:.1%}, below {MARGIN:.0%}" if plan.best else "no other split sustains more"
    )
    return f"do not disaggregate: {plan.split(0)} sustains {plan.curve[0].verdict}; {why}"


def lacking(question: Question, plan: Plan) -> Shortage | None:
    """Why the requests are too few to decide which split is best. The best split ran at the highest rate, so it needs
    the most requests."""
    return plan.curve[plan.best].shortage(question.slo.ttft_s, len(question.windows))


def as_object(question: Question, plan: Plan, shortage: Shortage | None = None) -> dict[str, Any]:
    """Without a verdict, its fields are null."""
    curve = [
        {
            "prefill": split,
            "decode": plan.num_workers - split,
            **found.bounds,
            "per_worker_rps": None if found.is_bound else found.rate_rps / plan.num_workers,
            "limit": found.limit,
            "misses": dict(sorted((+found.missed.misses).items())) if found.missed is not None else {},
            "runs": len(found.probes),
        }
        for split, found in sorted(plan.curve.items())
    ]
    verdict = {
        "is_attainable": plan.is_attainable,
        "disaggregate": plan.advice > 0,
        "best": {"prefill": plan.best, "decode": plan.num_workers - plan.best},
        "advice": {"prefill": plan.advice, "decode": plan.num_workers - plan.advice},
        "verdict": advice(plan),
    }
    return {
        "trace": question.windows[0].name,
        "requests": len(question.windows[0]),
        "profile": question.profile.name,
        "policy": question.router.policy,
        "workers": plan.num_workers,
        "slo": {"ttft_s": question.slo.ttft_s, "tpot_s": question.slo.tpot_s},
        "is_long_enough": shortage is None,
        "shortage": None if shortage is None else dataclasses.asdict(shortage),
        **(verdict if shortage is None else dict.fromkeys(verdict)),
        "curve": curve,
    }
