"""What 1, 2 and 4 routers behind one port cost: `python -m benchmarks.routers [--rate 10] [--rounds 3]`.

Starts a cluster of the engine toy, which only waits, for each number of routers in each round, and sends open-loop gRPC
requests of prompts that share prefixes. As many connections go to each router, so the routers have equal loads; the
kernel alone would spread them less evenly (docs/routers.md). Measures, at `--rate` times the number of routers (the
same load of each), and at `--rate` times the largest number (the same load of all):

- CPU seconds of the routers and of Redis for a request, from the first arrival to the last answer;
- the share of the prompt tokens that were cached, and the share of requests that met both targets.

A router uses at most one core. So on a machine with enough cores, N routers place N times as many requests as one,
times the CPU seconds of one router for a request over those of N at the same load of each.

Bars: 4 routers place at least 3.8 times as many; at the same load of all, hit rate and attainment are at most 1 point
below those of one router.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

import grpc

from benchmarks.harness import cpu_s, numbers, span, table
from benchmarks.openloop import Rejection, TimedAnswer, ask, drive, percentile
from benchmarks.overload import is_kept
from pdserve.core.types import Slo
from pdserve.launch.running import Running
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc

PREFIX: Final = 160  # tokens that the requests of a group share
SUFFIX: Final = (32, 64, 128)  # further tokens of a prompt
CONNECTIONS: Final = 32
MOST_TRIES: Final = 60 * CONNECTIONS  # connections that are opened until each router has its share
TIMES: Final = 3.8
POINTS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutersCell:
    routers: int
    rate_rps: int
    sent: int
    failed: int  # rejections included
    attained: float  # percent of the requests
    hit_rate: float  # percent of the prompt tokens
    router_ms: float  # CPU of all routers for a request
    redis_ms: float
    busiest: float  # CPU of the busiest router over the mean
    ttft_p95_s: float
    late_start_s: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of groups that share a prefix each."""

    groups: Sequence[Sequence[int]]

    @classmethod
    def draw(cls, rng: random.Random, groups: int) -> Prompts:
        return cls([[rng.randrange(33, 127) for _ in range(PREFIX)] for _ in range(groups)])

    def one(self, rng: random.Random) -> list[int]:
        own = [rng.randrange(33, 127) for _ in range(rng.choice(SUFFIX))]
        return [*rng.choice(self.groups), *own]


async def connections(target: str, routers: int) -> list[grpc.aio.Channel]:
    """CONNECTIONS of them, in turn to each router. Raises RuntimeError if the kernel gives a router too few."""
    share = CONNECTIONS // routers
    found: dict[str, list[grpc.aio.Channel]] = {}
    for _ in range(MOST_TRIES):
        channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        seen = await stub.GetTopology(cluster_pb2.GetTopologyRequest(only_this_router=True), timeout=30)
        own = found.setdefault(seen.router_id, [])
        if len(own) < share:
            own.append(channel)
        else:
            await channel.close()
        if len(found) == routers and all(len(one) == share for one in found.values()):
            return [channel for turn in zip(*found.values(), strict=True) for channel in turn]
    raise RuntimeError(f"connections of each router: { ({name: len(one) for name, one in found.items()}) }")


async def measure(
    cluster: Running, routers: int, rates: Sequence[int], seed: int, args: argparse.Namespace
) -> list[RoutersCell]:
    channels = await connections(cluster.target, routers)
    stubs = [inference_pb2_grpc.InferenceServiceStub(one) for one in channels]
    names = ["router"] if routers == 1 else [f"router-{number}" for number in range(routers)]
    pids = [*(cluster.pid(name) for name in names), cluster.pid("redis")]
    slo = Slo(ttft_s=args.slo_ttft, tpot_s=args.slo_tpot)
    prompts, found = Prompts.draw(random.Random(seed), args.groups), []

    async def load(rate_rps: int, count: int, name: str) -> tuple[list[TimedAnswer | Rejection | None], float]:
        draw = random.Random(f"{seed} {name} {rate_rps}")
        requests = [request(prompts.one(draw), args.answer, slo) for _ in range(count)]
        sends = [partial(ask, stubs[index % len(stubs)], one) for index, one in enumerate(requests)]
        at_s = accumulate(draw.expovariate(rate_rps) for _ in requests)
        return await drive(zip(at_s, sends, strict=True))

    await load(max(rates), 4 * args.groups, "caches")  # equally full for each number of routers
    for rate_rps in rates:
        await load(rate_rps, int(rate_rps * args.warm), "warm")
        before_s = [cpu_s(pid) for pid in pids]
        answers, late_start_s = await load(rate_rps, int(rate_rps * args.seconds), "measured")
        spent_s = [cpu_s(pid) - one for pid, one in zip(pids, before_s, strict=True)]
        good = [one for one in answers if isinstance(one, TimedAnswer)]
        num = len(answers)
        cell = RoutersCell(
            routers=routers,
            rate_rps=rate_rps,
            sent=num,
            failed=num - len(good),
            attained=100.0 * sum(is_kept(one, slo) for one in good) / num,
            hit_rate=100.0 * sum(one.cached_tokens for one in good) / max(sum(one.prompt_tokens for one in good), 1),
            router_ms=1e3 * sum(spent_s[:-1]) / num,
            redis_ms=1e3 * spent_s[-1] / num,
            busiest=max(spent_s[:-1]) * routers / sum(spent_s[:-1]),
            ttft_p95_s=percentile([one.ttft_s for one in good], 0.95),
            late_start_s=late_start_s,
        )
        print(f"routers: {cell}", file=sys.stderr, flush=True)
        found.append(cell)
    for channel in channels:
        await channel.close()
    return found


def request(token_ids: Sequence[int], answer: int, slo: Slo) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.SamplingParams(max_tokens=answer, temperature=0.0),
        slo=inference_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
    )


# --- report ---------------------------------------------------------------------------------------------------


def times(cells: Sequence[RoutersCell], routers: int, rate_rps: int, *, has_redis: bool = False) -> list[float]:
    """Of each round: how many times as many requests that many routers place as one, at `rate_rps` for each."""

    def spent_ms(count: int) -> list[float]:
        own = [one for one in cells if (one.routers, one.rate_rps) == (count, rate_rps * count)]
        return [one.router_ms + has_redis * one.redis_ms for one in own]

    return [routers * one / several for one, several in zip(spent_ms(1), spent_ms(routers), strict=True)]


def loss(cells: Sequence[RoutersCell], routers: int, rate_rps: int, name: str) -> float:
    """The median of a percentage of one router less that of several, at the same load of all."""
    medians: list[float] = [
        statistics.median(getattr(one, name) for one in cells if (one.routers, one.rate_rps) == (count, rate_rps))
        for count in (1, routers)
    ]
    return medians[0] - medians[1]


def missed(cells: Sequence[RoutersCell], counts: Sequence[int], rate_rps: int) -> list[str]:
    most = max(counts)
    found = [f"{one.failed} requests failed with {one.routers} routers" for one in cells if one.failed]
    seen = statistics.median(times(cells, most, rate_rps))
    if most == 4 and seen < TIMES:
        found.append(f"{seen:.2f} times as many requests")
    for name in ("hit_rate", "attained"):
        if (lost := loss(cells, most, rate_rps * most, name)) > POINTS:
            found.append(f"{name} falls by {lost:.1f} points")
    return found


def render(cells: Sequence[RoutersCell], counts: Sequence[int], rate_rps: int) -> str:
    def shown(values: Sequence[float], form: str = "{:.1f}") -> str:
        low, middle, high = (form.format(one) for one in span(values))
        return middle if low == high else f"{middle} ({low}-{high})"

    rows = [["routers", "requests/s", "sent", "failed", "routers ms", "redis ms", "busiest", "hit rate", "attained"]]
    rows[0].append("TTFT p95 ms")
    for key in sorted({(one.routers, one.rate_rps) for one in cells}):
        own = [one for one in cells if (one.routers, one.rate_rps) == key]
        counted = [str(sum(getattr(one, name) for one in own)) for name in ("sent", "failed")]
        values = [shown([getattr(one, name) for one in own]) for name in ("router_ms", "redis_ms")]
        values.append(shown([one.busiest for one in own], "{:.2f}"))
        values += [shown([getattr(one, name) for one in own]) + " %" for name in ("hit_rate", "attained")]
        values.append(shown([1e3 * one.ttft_p95_s for one in own], "{:.0f}"))
        rows.append([*map(str, key), *counted, *values])
    lines = [table(rows), ""]
    for count in counts[1:]:
        alone, both = times(cells, count, rate_rps), times(cells, count, rate_rps, has_redis=True)
        lines.append(
            f"{count} routers place {shown(alone, '{:.2f}')} times as many requests as one at {rate_rps} requests/s of"
            f" each; {shown(both, '{:.2f}')} times if Redis shares their cores"
        )
    lines.append(f"worst delay of a send: {1e3 * max(one.late_start_s for one in cells):.0f} ms")
    found = missed(cells, counts, rate_rps)
    return "\n".join([*lines, f"bars: {'missed: ' + ', '.join(found) if found else 'met'}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=numbers, default=[1, 2, 4], help="numbers of routers, 1 first (1,2,4)")
    parser.add_argument("--rate", type=int, default=10, help="requests/s of each router (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement (15)")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of the same load before it (5)")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--groups", type=int, default=48, help="of prompts that share a prefix (48)")
    parser.add_argument(
        "--blocks", type=int, default=512, help="of the KV memory of a worker, with 16 tokens each (512)"
    )
    parser.add_argument("--answer", type=int, default=16, help="tokens (16)")
    parser.add_argument("--step-s", type=float, default=0.02, help="of a worker (0.02)")
    parser.add_argument("--token-s", type=float, default=0.0001, help="more for each token of a step (0.0001)")
    parser.add_argument("--slo-ttft", type=float, default=1.0, metavar="S", help="target TTFT (1)")
    parser.add_argument("--slo-tpot", type=float, default=0.2, metavar="S", help="target TPOT (0.2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    counts = args.routers
    if not counts or counts[0] != 1 or any(CONNECTIONS % one for one in counts):
        parser.error(f"--routers: expected 1 first, and divisors of {CONNECTIONS}")
    cells: list[RoutersCell] = []
    for number in range(args.rounds):
        for count in counts if number % 2 == 0 else reversed(counts):
            settings = {
                "worker.toy_step_s": args.step_s,
                "worker.toy_token_s": args.token_s,
                "worker.kv_blocks": args.blocks,
            }
            sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
            sizes = ["--prefill", str(args.prefill), "--decode", str(args.decode), "--routers", str(count)]
            began_s = time.monotonic()
            with Running.start("--model", "toy", *sizes, *sets, env={"OMP_NUM_THREADS": "1"}) as cluster:
                print(f"routers: {count} ready after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
                rates = list(Counter((args.rate * count, args.rate * max(counts))))
                cells += asyncio.run(measure(cluster, count, rates, args.seed + number, args))
    print(render(cells, counts, args.rate))
    return int(bool(missed(cells, counts, args.rate)))


if __name__ == "__main__":
    sys.exit(main())
