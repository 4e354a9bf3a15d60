"""Roll-outs of all workers of a live cluster under load: `python -m benchmarks.rollout [--requests 2000]`.

Starts a cluster of the engine toy, which only waits, for `--step-s` and `--token-s` per token; so its capacity is that
of its stated step times, not that of this machine, as long as router and clients have enough of a core. Measures the
capacity with callers in a closed loop that have no targets, then sends Poisson arrivals at `--load` times that
capacity, from clients of the SDK, of HTTP, and of gRPC without retries. A quarter of the requests comes before the
roll-outs and a quarter after them. Between these, `pdserve roll --settings` replaces both pools, again and again until
half of the requests were sent, each time with other settings. A request belongs to the phase in which it arrives.

Bars: no request fails, no token is wrong, and the attainment during and after the roll-outs is at most 2 points below
that before. A rejection is no failure, but attains no target.

With `--launcher` the cluster runs with `up --detach`, and its launcher is replaced instead of its workers: in turn by
`pdserve adopt`, and by SIGKILL and `pdserve adopt` a few seconds later. Then an answer that was resumed counts as
interrupted too, and none may be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchmarks.harness import numbers, table
from benchmarks.kill_storm_calls import By
from benchmarks.openloop import closed_loop, drive, percentile
from benchmarks.toy_load import Sent, ToyClients, toy_requests
from pdserve import AsyncClient
from pdserve.client.results import ChangeStep
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import Slo
from pdserve.launch.running import Running, RunningDetached

PHASES: Final = ("before", "during", "after")
CALLERS: Final = (8, 16, 32)  # of the closed loops
UNLIMITED: Final = Slo(ttft_s=60.0, tpot_s=60.0)
SETTINGS: Final = ("[worker]\nheartbeat_s = 0.2\n", "[worker]\nheartbeat_s = 0.25\n")  # of roll-outs in turn
MOST_POINTS: Final = 2.0
POLL_S: Final = 0.1
WITHOUT_S: Final = 3.0  # a launcher, after it was killed


@dataclass(slots=True, kw_only=True)
class Drain:
    worker_id: str
    seconds: float
    end: str  # as the launcher says it


@dataclass(slots=True)
class Drains:
    """The drains of a change. Times are the launcher's, or the client's if it names none."""

    found: list[Drain] = field(default_factory=list)
    _since_s: dict[str, float] = field(default_factory=dict)

    def on_step(self, step: ChangeStep) -> None:
        print(f"rollout: {step.worker_id:8} {step.text}", file=sys.stderr, flush=True)
        if step.text.startswith("draining"):
            self._since_s[step.worker_id] = time.monotonic()
        elif step.worker_id in self._since_s:
            seconds = time.monotonic() - self._since_s.pop(step.worker_id)
            said = re.search(r"after ([\d.]+) s", step.text)
            seconds = float(said.group(1)) if said is not None else seconds
            self.found.append(Drain(worker_id=step.worker_id, seconds=seconds, end=step.text))


@dataclass(slots=True, kw_only=True)
class RolloutResult:
    capacity_rps: float
    rate_rps: float
    late_start_s: float
    sent: list[Sent]
    rolls_s: list[float]
    drains: list[Drain]
    what: str = "roll-outs"  # or changes of launcher
    may_resume: bool = True  # an answer, after an interruption

    def of(self, phase: str) -> list[Sent]:
        return [one for one in self.sent if one.phase == phase]

    def attainment(self, phase: str, slo: Slo) -> float:
        """In percent."""
        own = self.of(phase)
        return 100.0 * sum(one.attains(slo) for one in own) / len(own) if own else 0.0

    def missed(self, slo: Slo) -> list[str]:
        """The bars that were missed."""
        failed, wrong = sum(one.is_failed for one in self.sent), sum(bool(one.wrong) for one in self.sent)
        found = [f"{failed} failed"] if failed else []
        found += [f"{wrong} with wrong tokens"] if wrong else []
        found += [f"{self.num_resumed} interrupted"] if self.num_resumed and not self.may_resume else []
        before = self.attainment("before", slo)
        for phase in PHASES[1:]:
            if (below := before - self.attainment(phase, slo)) > MOST_POINTS:
                found.append(f"attainment {phase} the {self.what} {below:.1f} points below")
        return found

    @property
    def num_resumed(self) -> int:
        return sum(one.is_resumed for one in self.sent)


def render(result: RolloutResult, slo: Slo) -> str:
    rows = [["phase", "requests", "failed", "rejected", "wrong", "attained", "TTFT p50 / p95", "TPOT p50 / p95"]]
    for phase in PHASES:
        own = result.of(phase)
        whole = [one for one in own if one.error is None]
        spans = [
            " / ".join(f"{1e3 * percentile(values, share):.0f}" for share in (0.5, 0.95)) + " ms"
            for values in ([one.ttft_s for one in whole], [one.tpot_s for one in whole])
        ]
        counts = [
            sum(one.is_failed for one in own),
            sum(one.is_rejected for one in own),
            sum(bool(one.wrong) for one in own),
        ]
        attained = f"{result.attainment(phase, slo):.1f} %"
        rows.append([phase, str(len(own)), *map(str, counts), attained, *spans])
    by = Counter(one.request.by.value for one in result.sent)
    drains = ", ".join(f"{one.worker_id} {one.seconds:.1f}" for one in result.drains)
    unfinished = [one for one in result.drains if not one.end.startswith("drained")]
    drained = f"drains, s: {drains}; {len(unfinished)} ended with requests"
    lines = [
        f"capacity {result.capacity_rps:.1f} requests/s, load {result.rate_rps:.1f} requests/s;"
        f" targets {slo.ttft_s:g} s / {slo.tpot_s:g} s",
        "",
        table(rows),
        "",
        f"clients: {', '.join(f'{name} {count}' for name, count in sorted(by.items()))}",
        f"{result.what}: {', '.join(f'{one:.0f} s' for one in result.rolls_s)}",
        drained if result.may_resume else f"interrupted and resumed: {result.num_resumed}",
        f"worst delay of a send: {1e3 * result.late_start_s:.0f} ms",
    ]
    errors = Counter(one.error_text for one in result.sent if one.is_failed)
    lines += [f"{count} x {text}" for text, count in errors.items()]
    lines += [f"WRONG {one.wrong}" for one in result.sent if one.wrong][:20]
    return "\n".join([*lines, f"bars: {'missed: ' + ', '.join(missed) if (missed := result.missed(slo)) else 'met'}"])


async def capacity(target: str, args: argparse.Namespace) -> float:
    """The most requests per second that any number of callers gets."""
    most = 0.0
    for number, callers in enumerate(CALLERS):
        seed = args.seed + 100 + number
        seen = await closed_loop(
            target, callers, args.seconds, args.prompts, args.answer, seed, UNLIMITED, args.seconds / 2
        )
        print(f"rollout: {callers} callers, {len(seen.answers) / seen.wall_s:.1f} requests/s", file=sys.stderr)
        most = max(most, len(seen.answers) / seen.wall_s)
    return most


Change = Callable[[int, AsyncClient, Drains], Awaitable[None]]  # the number of earlier ones


async def roll(number: int, operator: AsyncClient, drains: Drains, *, surge: int) -> None:
    await operator.roll(surge=surge, settings=SETTINGS[number % 2], on_step=drains.on_step)


async def replace_launcher(number: int, operator: AsyncClient, drains: Drains, *, cluster: RunningDetached) -> None:
    """The router reaches the new launcher at its end."""
    if number % 2:
        await asyncio.to_thread(cluster.kill_launcher)
        await asyncio.sleep(WITHOUT_S)
    await asyncio.to_thread(cluster.adopt)
    with contextlib.suppress(InvalidRequest):  # by the launcher
        await operator.scale()
    print(f"rollout: launcher {number + 1} replaced", file=sys.stderr, flush=True)


async def measure(target: str, http_url: str, args: argparse.Namespace, change: Change) -> RolloutResult:
    capacity_rps = await capacity(target, args)
    rate_rps = args.load * capacity_rps
    phase, drains = "warm", Drains()
    rolls_s: list[float] = []
    draw = random.Random(args.seed)

    async with ToyClients.connected(target, http_url) as clients, AsyncClient(target) as operator:

        def arrivals() -> Iterator[tuple[float, Callable[[], Any]]]:
            at_s = 0.0
            for request in toy_requests(draw, args.prompts, args.answer, tuple(By)):
                if not phase:
                    return
                at_s += draw.expovariate(rate_rps)
                yield at_s, partial(clients.send, request, phase)

        def num_sent() -> int:
            return sum(one.phase == phase for one in clients.sent)

        async def wait_for(count: int) -> None:
            while num_sent() < count:
                if loading.done():
                    loading.result()
                await asyncio.sleep(POLL_S)

        loading = asyncio.create_task(drive(arrivals()))
        await wait_for(max(20, args.requests // 20))
        phase = "before"
        await wait_for(args.requests // 4)
        phase = "during"
        while not rolls_s or num_sent() < args.requests // 2:
            began_s = time.monotonic()
            await change(len(rolls_s), operator, drains)
            rolls_s.append(time.monotonic() - began_s)
        phase = "after"
        await wait_for(args.requests // 4)
        phase = ""
        _, late_start_s = await loading
        return RolloutResult(
            capacity_rps=capacity_rps,
            rate_rps=rate_rps,
            late_start_s=late_start_s,
            sent=clients.sent,
            rolls_s=rolls_s,
            drains=drains.found,
            what="changes of launcher" if args.launcher else "roll-outs",
            may_resume=not args.launcher,
        )


def flags(args: argparse.Namespace) -> list[str]:
    """Of `pdserve up`."""
    settings = {
        "worker.toy_token_s": args.token_s,
        "prefill_worker.toy_step_s": args.step_s / 4,
        "decode_worker.toy_step_s": args.step_s,
        "router.slo_ttft_s": args.slo_ttft,
        "router.slo_tpot_s": args.slo_tpot,
    }
    sizes = ["--prefill", str(args.prefill), "--decode", str(args.decode)]
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["--model", "toy", "--http", "0", *sizes, *sets]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="before, during and after the roll-outs (2000)")
    parser.add_argument("--load", type=float, default=0.8, help="times the capacity (0.8)")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--surge", type=int, choices=(0, 1), default=1)
    parser.add_argument("--launcher", action="store_true", help="replace the launcher, and no worker")
    parser.add_argument("--step-s", type=float, default=0.02, help="of a decode step; prefill steps take a quarter")
    parser.add_argument("--token-s", type=float, default=0.001, help="more for each token of a step (0.001)")
    parser.add_argument("--prompts", type=numbers, default=[100, 200, 300], help="tokens, equally likely (100,200,300)")
    parser.add_argument("--answer", type=int, default=32, help="tokens (32)")
    parser.add_argument("--slo-ttft", type=float, default=1.5, metavar="S", help="target TTFT (1.5)")
    parser.add_argument("--slo-tpot", type=float, default=0.1, metavar="S", help="target TPOT (0.1)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of the capacity (10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.requests < 4 or not args.load > 0.0 or not args.prompts:
        parser.error("expected at least 4 requests, a load above 0 and a length of prompts")
    slo = Slo(ttft_s=args.slo_ttft, tpot_s=args.slo_tpot)
    env = {"OMP_NUM_THREADS": "1"}
    if args.launcher:
        with RunningDetached.start(*flags(args), env=env) as detached:
            change: Change = partial(replace_launcher, cluster=detached)
            result = asyncio.run(measure(detached.target, detached.http_url, args, change))
    else:
        with Running.start(*flags(args), env=env) as cluster:
            change = partial(roll, surge=args.surge)
            result = asyncio.run(measure(cluster.target, cluster.http_url, args, change))
    print(render(result, slo))
    return int(bool(result.missed(slo)))


if __name__ == "__main__":
    sys.exit(main())
