"""Coding agents whose KV is larger than the pools, with and without tiers: `python -m benchmarks.agents`.

Simulates H100s that each prefill and decode, with sessions of the published shape (`coding_agents` of
simulator/traces/workloads.py). The turns of a session wait for each other, and sessions arrive so that the contexts of
those that live at the same time need `--times` as much memory as the pools have. No request is rejected.

Of a prompt, the leading full blocks that an earlier prompt had are *reusable*; the worker reports how many it did not
compute. Bars: at least 97 % of the reusable tokens served, and the 90th percentile of a request's time per output token
2.5 times better with tiers. `python -m benchmarks.tiers` shows the same on a live cluster.

With `--ends`, it compares clients that say that a session has ended with those that do not, in pools without tiers.
With `--choice`, it compares the choice between loading and computing with fixed rules (benchmarks/choice.py), with
`--tasks`, deadlines of whole tasks with ordinary targets, and with `--off`, workers without tiers with those of an
earlier commit (benchmarks/off.py).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks import choice, off
from benchmarks.harness import table
from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.model import SimConfig, SimResult, TraceRequest
from simulator.search.layouts import make_workers
from simulator.traces.workloads import Agents, coding_agents

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
PATIENT: Final = Slo(ttft_s=36_000.0, tpot_s=600.0)
BLOCK_SIZE: Final = 512
BARS: Final = (0.97, 2.5)


def reusable(trace: Sequence[TraceRequest], block_tokens: int, block_size: int) -> list[int]:
    """Tokens of each request's prompt in leading full blocks that an earlier one had; its last token is computed."""
    seen: set[int] = set()
    found = []
    for one in trace:
        known = next((at for at, block in enumerate(one.block_ids) if block not in seen), len(one.block_ids))
        seen.update(one.block_ids[: one.prompt_tokens // block_tokens])
        found.append(min(known * block_tokens, (one.prompt_tokens - 1) // block_size * block_size))
    return found


def working_tokens(trace: Sequence[TraceRequest]) -> int:
    """The most tokens that the contexts of the sessions between their first and their last request have together."""
    roots: list[int] = []
    for number, one in enumerate(trace):
        roots.append(number if one.follows is None else roots[one.follows])
    last = {root: number for number, root in enumerate(roots)}
    held: dict[int, int] = {}
    total = most = 0
    for number, (root, one) in enumerate(zip(roots, trace, strict=True)):
        context = max(one.prompt_tokens, held.get(root, 0))
        total += context - held.get(root, 0)
        held[root] = context
        most = max(most, total)
        if last[root] == number:
            total -= held.pop(root)
    return most


@dataclass(frozen=True, slots=True)
class Figures:
    served: float  # share of the reusable tokens
    per_token_s: float  # 90th percentile
    mean_s: float  # of a request
    ttft_s: float  # median
    mean_ttft_s: float
    error_s: float  # mean difference of the predicted and the actual TTFT


def figures(result: SimResult, trace: Sequence[TraceRequest], block_tokens: int) -> Figures:
    """Of the requests that had something to reuse."""
    bounds = reusable(trace, block_tokens, result.config.block_size)
    rows = [one for one in result.requests if one.ended_s is not None and one.tokens]
    assert len(rows) == len(trace), f"{len(trace) - len(rows)} requests have not ended"
    rows = [one for one in rows if bounds[one.number]]
    seconds = [(one.ended_s or 0.0) - one.arrival_s for one in rows]
    return Figures(
        served=sum(min(one.cached_tokens, bounds[one.number]) for one in rows)
        / sum(bounds[one.number] for one in rows),
        per_token_s=statistics.quantiles([each / one.tokens for each, one in zip(seconds, rows, strict=True)], n=10)[
            -1
        ],
        mean_s=statistics.mean(seconds),
        ttft_s=statistics.median(one.ttft_s or 0.0 for one in rows),
        mean_ttft_s=statistics.mean(one.ttft_s or 0.0 for one in rows),
        error_s=statistics.mean(abs((one.predicted_ttft_s or 0.0) - (one.ttft_s or 0.0)) for one in rows),
    )


def run(trace: Agents, requests: Sequence[TraceRequest], config: SimConfig) -> Figures:
    return figures(simulate(trace, config), requests, trace.block_tokens)


# --- tasks ----------------------------------------------------------------------------------------------------

TASK_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.03)
DEADLINES: Final = (1.0, 2.0, 4.0)  # of the tasks, in times of pauses and answers that just meet the ordinary targets


@dataclass(frozen=True, slots=True)
class _Tasks:
    requests: Sequence[TraceRequest]
    block_tokens: int
    name: str = "tasks"

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


def report_tasks(seed: int) -> None:
    """Sessions without subagents on one GPU. A task attains its deadline if all of its turns are served, the last one
    in time; its client does not repeat a rejected turn."""
    rows = []
    for rate_rps in (4.0, 8.0):
        trace = replace(
            coding_agents(rate_rps=rate_rps, duration_s=60.0, seed=seed, scale=0.25),
            subagent_share=0.0,
            away_share=0.0,
            mean_turns=16.0,
            pause_s=1.0,
            pause_spread=0.5,
        )
        requests = list(trace)
        roots: list[int] = []
        needed_s: dict[int, float] = defaultdict(float)
        for number, one in enumerate(requests):
            roots.append(number if one.follows is None else roots[one.follows])
            needed_s[roots[-1]] += one.pause_s + TASK_SLO.ttft_s + TASK_SLO.tpot_s * one.output_tokens
        rng = random.Random(seed)
        deadline_s = {root: value * rng.choice(DEADLINES) for root, value in needed_s.items()}
        tasks = [replace(one, slo_task_s=deadline_s[root]) for root, one in zip(roots, requests, strict=True)]
        for rules_off in ((), ("rejection",)):
            found = []
            for sent in (requests, tasks):
                config = SimConfig(
                    workers=make_workers(load_profile(PROFILE), 0, 1),
                    slo=TASK_SLO,
                    block_size=BLOCK_SIZE,
                    seed=seed,
                    router=RouterSettings(rules_off=rules_off),
                )
                result = simulate(_Tasks(sent, trace.block_tokens), config)
                served = Counter(roots[one.number] for one in result.requests if one.ended_s is not None and one.tokens)
                ends_s = {roots[one.number]: one.ended_s or math.inf for one in result.requests}
                begins_s = {one.number: one.arrival_s for one in result.requests}
                attained = sum(
                    served[root] == turns and ends_s[root] - begins_s[root] <= deadline_s[root]
                    for root, turns in Counter(roots).items()
                )
                found += [f"{attained} of {len(deadline_s)}", f"{sum(served.values())} of {len(requests)}"]
            rows.append([f"{rate_rps:g}/s", "no" if rules_off else "yes", *found])
    head = ["turns", "rejects", "targets: tasks in time", "turns served", "deadlines: tasks in time", "turns served"]
    print(table([head, *rows]))


# --- ends of sessions -----------------------------------------------------------------------------------------

ENDED_SHARES: Final = (0.0, 0.5, 1.0)  # of the sessions, whose client says that they have ended
POOLS: Final = (2.0, 4.0)  # working sets of this many pools


def report_ends(seeds: Sequence[int]) -> None:
    """Sessions begin for as long as most of them take, so that some have ended while others run."""
    worker = make_workers(load_profile(PROFILE), 0, 1)[0]
    rows = [["working set", "ends told", "reusable tokens served", "(each seed)", "request", "per output token, p90"]]
    for times in POOLS:
        for share in ENDED_SHARES:
            found = []
            for seed in seeds:
                trace = replace(coding_agents(rate_rps=2.0, duration_s=900.0, seed=seed, scale=0.25), ended_share=share)
                requests = list(trace)
                pool = replace(worker, kv_capacity_tokens=int(working_tokens(requests) / times), pulls_kv=False)
                config = SimConfig(workers=(pool,), slo=PATIENT, block_size=BLOCK_SIZE, seed=seed)
                found.append(run(trace, requests, config))
                print(f"{times:g} pools, {100 * share:.0f} % told, seed {seed}", found[-1], flush=True)
            served = [one.served for one in found]
            rows.append(
                [
                    f"{times:g} pools",
                    f"{100 * share:.0f} %",
                    f"{100 * statistics.mean(served):.1f} %",
                    ", ".join(f"{100 * one:.1f}" for one in served),
                    f"{statistics.mean(one.mean_s for one in found):.2f} s",
                    f"{statistics.mean(one.per_token_s for one in found):.4f} s",
                ]
            )
    print(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--scale", type=float, default=0.25, help="of the published numbers of tokens")
    parser.add_argument("--rate", type=float, default=12.0, help="turns per second and GPU, if answers took no time")
    parser.add_argument("--duration", type=float, default=90.0, help="seconds in which sessions begin")
    parser.add_argument("--host-gib", type=float, default=256.0, help="of each GPU")
    parser.add_argument("--host-gb-per-s", type=float, default=25.0)
    parser.add_argument("--disk-gib", type=float, default=0.0, help="of each GPU, below its host tier")
    parser.add_argument("--disk-gb-per-s", type=float, default=2.0)
    parser.add_argument("--pulls", action="store_true", help="workers pull prefixes from each other")
    parser.add_argument("--times", type=float, default=4.0, help="working set, in pools")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--choice", action="store_true", help="compare load rules, over mixes of tiers and loads")
    parser.add_argument("--tasks", action="store_true", help="compare deadlines of tasks with ordinary targets")
    parser.add_argument("--ends", action="store_true", help="compare sessions whose ends are told with others")
    parser.add_argument("--seeds", type=int, default=3, help="traces of each row with --ends")
    parser.add_argument("--off", action="store_true", help="compare workers without tiers with another commit")
    parser.add_argument("--before", default=off.BEFORE_TIERS, metavar="COMMIT", help="that commit, with --off")
    parser.add_argument("--rounds", type=int, default=6, help="of --off")
    group = parser.add_argument_group("--choice")
    group.add_argument("--requests", type=int, default=100, help="of each run")
    group.add_argument("--least-seeds", type=int, default=choice.LEAST_SEEDS, help="of each mix")
    group.add_argument("--most-seeds", type=int, default=8, help="of each mix")
    names = [one.name for one in choice.LENGTHS]
    group.add_argument("--lengths", nargs="+", choices=names, default=names)
    group.add_argument("--loads", nargs="+", type=float, default=choice.LOADS)
    group.add_argument("--tiers", nargs="+", choices=choice.TIERS, default=choice.TIERS)
    group.add_argument("--gb-per-s", nargs="+", type=float, default=choice.BANDWIDTHS_GB_S, help="of the tier")
    arguments = parser.parse_args()
    if arguments.tasks:
        report_tasks(arguments.seed)
        return
    if arguments.ends:
        report_ends(range(arguments.seed, arguments.seed + arguments.seeds))
        return
    if arguments.off:
        off.report(arguments.before, arguments.rounds)
        return
    if arguments.choice:
        choice.report(arguments)
        return
    trace = coding_agents(
        rate_rps=arguments.rate * arguments.gpus,
        duration_s=arguments.duration,
        seed=arguments.seed,
        scale=arguments.scale,
    )
    requests = list(trace)
    workers = make_workers(load_profile(PROFILE), 0, arguments.gpus)
    pool = int(working_tokens(requests) / arguments.times / arguments.gpus)
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    if pool < longest:
        parser.error(f"a pool of {pool} tokens is smaller than a prompt of {longest}: give a higher --rate")
    workers = tuple(
        replace(one, kv_capacity_tokens=min(pool, one.kv_capacity_tokens), pulls_kv=arguments.pulls) for one in workers
    )
    tiered = tuple(
        replace(
            one,
            host_bytes=int(arguments.host_gib * 2**30),
            host_bytes_per_s=arguments.host_gb_per_s * 1e9,
            disk_bytes=int(arguments.disk_gib * 2**30),
            disk_bytes_per_s=arguments.disk_gb_per_s * 1e9,
        )
        for one in workers
    )
    print(
        f"{len(requests)} requests, mean prompt {statistics.mean(one.prompt_tokens for one in requests):.0f} tokens, "
        f"working set {working_tokens(requests)} tokens, pools of {workers[0].kv_capacity_tokens} tokens",
        flush=True,
    )
    found = {}
    for name, several in (("without a tier", workers), ("with a host tier", tiered)):
        config = SimConfig(workers=several, slo=PATIENT, block_size=BLOCK_SIZE, seed=arguments.seed)
        found[name] = run(trace, requests, config)
        print(name, found[name], flush=True)
    rows = [["", "reusable tokens served", "TTFT p50", "seconds of a request per output token, p90"]]
    rows += [
        [name, f"{100 * one.served:.1f} %", f"{one.ttft_s:.2f} s", f"{one.per_token_s:.4f}"]
        for name, one in found.items()
    ]
    print(table(rows))
    before, after = found.values()
    gain = before.per_token_s / after.per_token_s
    for name, seen, bar in (("served", after.served, BARS[0]), ("gain", gain, BARS[1])):
        print(f"{name} {seen:.3f}, bar {bar}: {'met' if seen >= bar else 'missed'}")


if __name__ == "__main__":
    main()
