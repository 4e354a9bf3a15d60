"""The requests that `pdserve plan` simulates: the first ones of a trace, or of a built-in workload that is made as long
as a verdict needs."""

from __future__ import annotations

import argparse
import math
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.profile import Profile
from pdserve.core.types import Slo
from simulator.commands.plan import DEFAULT_REQUESTS, MAX_REQUESTS
from simulator.goodput import TraceWindow, cut
from simulator.model import Trace
from simulator.plan import Question, demand
from simulator.reshape import Step, first, jittered
from simulator.sufficiency import ENOUGH, SPANS
from simulator.synthetic import Poisson, log_normal
from simulator.traces import FileTrace
from simulator.workloads import DEFAULT_RATE_RPS, make_workload

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
    """The number of requests that a verdict on this workload needs (simulator/sufficiency.py), with a reserve. Computed
    from the workers' capacity and the longest time of a request that meets its targets."""
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
