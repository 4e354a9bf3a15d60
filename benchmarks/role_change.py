"""Changes of a worker's role under load: `python -m benchmarks.role_change [--changes 4] [--rate 4]`.

Two prefill and two decode workers of the bundled model serve open-loop traffic. After every `--gap` seconds, the worker
d1 takes the other role. A request is kept if its whole answer came and met the router's default targets on the
client's clock. A row has the seconds from the end of the drain until every router was connected again, and the shares
of the requests that were kept: of those that arrived in the 10 s before the change, and in each 10 s after it.

Bars: at most 2 s after the drain, no failed request, no weights read again, and from 20 to 30 s after a change at least
the share before it, less 5 points.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from benchmarks.openloop import Rejection, TimedAnswer, ask, make_request, poisson
from benchmarks.overload import is_kept, seconds_of
from pdserve import AsyncClient
from pdserve.client.results import ChangeStep
from pdserve.core.types import Role, Slo
from pdserve.launch.running import Running
from pdserve.v1 import inference_pb2_grpc

WORKER: Final = "d1"
PROMPTS: Final = (40, 80, 160, 320)  # tokens, equally likely
ANSWER: Final = 40  # tokens
SLO: Final = Slo(ttft_s=2.0, tpot_s=0.2)  # the router's defaults
WINDOW_S: Final = 10.0
WINDOWS: Final = 3  # after a change
LOADED: Final = "model loaded"  # in the log of a worker that has read weights
MOST_S: Final = 2.0
MOST_LOST: Final = 0.05


@dataclass(slots=True)
class Traffic:
    """When each request was sent, and whether it was kept; by time.monotonic()."""

    kept: list[tuple[float, bool]] = field(default_factory=list)
    rejected: int = 0
    failed: int = 0

    def share(self, from_s: float) -> float:
        found = [one for at_s, one in self.kept if from_s <= at_s < from_s + WINDOW_S]
        return sum(found) / len(found) if found else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    role: str
    drain_s: float
    after_drain_s: float
    began_s: float
    ready_s: float
    says: str

    def shares(self, traffic: Traffic) -> list[float]:
        before = traffic.share(self.began_s - WINDOW_S)
        return [before, *(traffic.share(self.ready_s + number * WINDOW_S) for number in range(WINDOWS))]


async def send(target: str, rate_rps: float, seconds: float, seed: int, traffic: Traffic) -> None:
    draw = random.Random(seed)
    async with grpc.aio.insecure_channel(target) as conn:
        stub = inference_pb2_grpc.InferenceServiceStub(conn)

        async def one() -> None:
            sent_s = time.monotonic()
            answer = await ask(stub, make_request(draw, draw.choice(PROMPTS), ANSWER, None))
            traffic.kept.append((sent_s, isinstance(answer, TimedAnswer) and is_kept(answer, SLO)))
            traffic.rejected += isinstance(answer, Rejection)
            traffic.failed += answer is None

        begin_s, tasks = time.monotonic(), []
        for at_s in poisson(draw, rate_rps, seconds):
            await asyncio.sleep(begin_s + at_s - time.monotonic())
            tasks.append(asyncio.create_task(one()))
        await asyncio.gather(*tasks)


async def change(target: str, role: Role) -> ChangeRow:
    steps: list[tuple[float, ChangeStep]] = []
    began_s = time.monotonic()
    async with AsyncClient(target) as client:
        await client.set_role(WORKER, role, on_step=lambda step: steps.append((time.monotonic(), step)))
    at = {step.text.split()[0]: at_s for at_s, step in steps}
    drained_s = at.get("drained", at.get("still", began_s))
    return ChangeRow(
        role=role.value,
        drain_s=drained_s - began_s,
        after_drain_s=at["ready"] - drained_s,
        began_s=began_s,
        ready_s=at["ready"],
        says=next((step.text for _, step in steps if step.text.startswith(("is a", "needs"))), ""),
    )


async def reads(target: str, since_unix_s: float) -> int:
    """How often the worker's process has loaded the model. A new process has a new log."""
    async with AsyncClient(target) as client:
        lines = await client.worker_log(WORKER)
    return sum(LOADED in one.text and one.at_unix_s >= since_unix_s for one in lines)


async def measure(target: str, args: argparse.Namespace) -> tuple[list[ChangeRow], Traffic, int]:
    """The last is the number of times that weights were read again."""
    if not await reads(target, 0.0):
        raise RuntimeError(f"{WORKER} has not logged {LOADED!r}")
    traffic, rows, since_unix_s = Traffic(), [], time.time()
    gap_s = max(args.gap, (WINDOWS + 1) * WINDOW_S)
    seconds = args.changes * (gap_s + 10.0) + gap_s
    sending = asyncio.create_task(send(target, args.rate, seconds, args.seed, traffic))
    for number in range(args.changes):
        await asyncio.sleep(gap_s)
        rows.append(await change(target, (Role.PREFILL, Role.DECODE)[number % 2]))
        print(f"role_change: {WORKER} {rows[-1].says}", file=sys.stderr, flush=True)
    await sending  # until all are answered
    return rows, traffic, await reads(target, since_unix_s)


def missed_bars(rows: Sequence[ChangeRow], traffic: Traffic, num_read: int) -> list[str]:
    missed = [f"{one.after_drain_s:.1f} s" for one in rows if one.after_drain_s > MOST_S]
    for one in rows:
        before, *_, last = one.shares(traffic)
        if not last >= before - MOST_LOST:
            missed.append(f"{last:.0%} kept after {before:.0%}")
    missed += [f"{traffic.failed} failed"] if traffic.failed else []
    return missed + ([f"weights read {num_read} times"] if num_read else [])


def render(rows: Sequence[ChangeRow], traffic: Traffic, num_read: int) -> str:
    lines = [
        "| new role | drain | after the drain | kept: 10 s before | 0 to 10 s after | 10 to 20 s | 20 to 30 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        shares = " | ".join(f"{share:.0%}" for share in one.shares(traffic))
        lines.append(f"| {one.role} | {one.drain_s:.2f} s | {one.after_drain_s:.2f} s | {shares} |")
    sums = f"{len(traffic.kept)} requests, {traffic.rejected} rejected, {traffic.failed} failed"
    missed = ", ".join(missed_bars(rows, traffic, num_read))
    verdict = f"bars missed: {missed}" if missed else "bars met"
    return "\n".join([*lines, "", f"{sums}; weights read {num_read} times; {verdict}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changes", type=int, default=4)
    parser.add_argument("--rate", type=seconds_of, default=4.0, help="requests per second (4)")
    parser.add_argument("--gap", type=seconds_of, default=40.0, help="seconds between two changes, at least 40 (40)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with Running.start("--prefill", "2", "--decode", "2", env={"OMP_NUM_THREADS": "1"}) as cluster:
        rows, traffic, num_read = asyncio.run(measure(cluster.target, args))
    print(render(rows, traffic, num_read))
    return int(bool(missed_bars(rows, traffic, num_read)))


if __name__ == "__main__":
    sys.exit(main())
