"""Admission control of a live cluster under overload: `python -m benchmarks.overload [--loads 0.7,1,1.5,3,5,10]`.

Starts a cluster of the bundled model and measures its capacity with callers in a closed loop: the most requests per
second, and the most prompt tokens per second, that any number of callers gets. Then it sends open-loop traffic at each
multiple of that capacity in requests, every load for `--seconds` after a warm-up of `--warm` at the same load. A
request is kept if its whole answer came and met both targets on the client's clock.

Admission control prefers short prompts, so an overloaded cluster keeps more requests per second than its capacity,
which is that of the whole mix. The share of the prompt tokens shows how much of the work is still done.

Bars: a load of at most 0.7 rejects nothing; a load of at least 1.5 keeps 95 % of the capacity, and half of its
rejections arrive within 20 ms, 95 % within 200 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.openloop import OfferedLoad, TimedAnswer, closed_loop, open_loop, percentile
from pdserve.core.types import Slo
from pdserve.launch.running import Running

CALLERS: Final = (8, 24, 48)  # of the closed loop; on few cores more callers than fill the batches slow each other
PROMPTS: Final = (40, 60, 90, 120, 160, 400, 700, 1000)  # tokens, equally likely
ANSWER: Final = 40  # tokens
UNLIMITED: Final = Slo(ttft_s=60.0, tpot_s=60.0)  # capacity is measured without admission control
LIGHT: Final = 0.7  # times the capacity: nothing may be rejected up to this
HEAVY: Final = 1.5  # and rejections must be fast from this on
KEPT_SHARE: Final = 0.95
MEDIAN_S: Final = 0.020
P95_S: Final = 0.200


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRow:
    """One load."""

    load: float  # times the capacity
    seconds: float
    sent: int
    kept: int
    kept_tokens: int  # of their prompts
    late: int
    rejected: int
    failed: int  # otherwise
    rejections_s: tuple[float, ...]  # sorted
    late_start_s: float  # worst delay of a send: the client's own saturation
    client_cores: float = 0.0  # that the client took from the cluster

    def verdict(self, capacity_rps: float) -> str:
        """ "met", or the bars that were missed; "" for a load without bars."""
        missed = []
        if self.load <= LIGHT and self.rejected:
            missed.append(f"{self.rejected} rejected")
        if self.load >= HEAVY:
            if self.kept < KEPT_SHARE * capacity_rps * self.seconds:
                missed.append("kept")
            if self.rejections_s and percentile(self.rejections_s, 0.5) > MEDIAN_S:
                missed.append("median")
            if self.rejections_s and percentile(self.rejections_s, 0.95) > P95_S:
                missed.append("p95")
        if not missed and LIGHT < self.load < HEAVY:
            return ""
        return "missed: " + ", ".join(missed) if missed else "met"


def row_of(load: float, seconds: float, seen: OfferedLoad, slo: Slo, client_s: float = 0.0) -> OverloadRow:
    """`client_s`: CPU time of the client."""
    good = [one for one in seen.answers if is_kept(one, slo)]
    return OverloadRow(
        load=load,
        seconds=seconds,
        sent=seen.sent,
        kept=len(good),
        kept_tokens=sum(one.prompt_tokens for one in good),
        late=len(seen.answers) - len(good),
        rejected=len(seen.rejections),
        failed=seen.failed - len(seen.rejections),
        rejections_s=tuple(sorted(one.after_s for one in seen.rejections)),
        late_start_s=seen.late_start_s,
        client_cores=client_s / seen.wall_s if seen.wall_s else 0.0,
    )


def is_kept(answer: TimedAnswer, slo: Slo) -> bool:
    tpot_s = (answer.total_s - answer.ttft_s) / (answer.tokens - 1) if answer.tokens > 1 else 0.0
    return answer.ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s


def render(capacity_rps: float, capacity_tps: float, slo: Slo, rows: Sequence[OverloadRow]) -> str:
    lines = [
        f"capacity {capacity_rps:.1f} requests/s, {capacity_tps:.0f} prompt tokens/s;"
        f" targets {slo.ttft_s:g} s / {slo.tpot_s:g} s",
        "",
        "| load | sent | kept/s | of requests | of tokens | late | rejected | failed |"
        " after min / median / p95 / max | bars |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        rate_rps = one.kept / one.seconds
        waits = one.rejections_s
        shown = (waits[0], percentile(waits, 0.5), percentile(waits, 0.95), waits[-1]) if waits else ()
        spread = " / ".join(f"{1e3 * seconds:.0f}" for seconds in shown) + " ms" if shown else ""
        shares = [
            f"{found / most:.0%}" if most > 0.0 else ""
            for found, most in ((rate_rps, capacity_rps), (one.kept_tokens / one.seconds, capacity_tps))
        ]
        cells = [f"{one.load:g}", one.sent, f"{rate_rps:.1f}", *shares, one.late, one.rejected, one.failed, spread]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {one.verdict(capacity_rps)} |")
    worst_s = max((one.late_start_s for one in rows), default=0.0)
    most_cores = max((one.client_cores for one in rows), default=0.0)
    lines += ["", f"worst delay of a send: {1e3 * worst_s:.0f} ms; the client took at most {most_cores:.2f} cores"]
    return "\n".join(lines)


async def measure(target: str, args: argparse.Namespace, slo: Slo) -> tuple[float, float, list[OverloadRow]]:
    """Capacity in requests/s and in prompt tokens/s, and a row for each load."""
    capacity_rps = capacity_tps = 0.0
    for number, callers in enumerate(CALLERS):
        warm_s = args.warm if number == 0 else args.warm / 4.0
        seen = await closed_loop(
            target, callers, args.seconds, PROMPTS, ANSWER, args.seed + 100 + number, UNLIMITED, warm_s
        )
        capacity_rps = max(capacity_rps, len(seen.answers) / seen.wall_s)
        capacity_tps = max(capacity_tps, sum(one.prompt_tokens for one in seen.answers) / seen.wall_s)
        print(
            f"overload: {callers} callers, {len(seen.answers) / seen.wall_s:.1f} requests/s",
            file=sys.stderr,
            flush=True,
        )
    rows = []
    for number, load in enumerate(args.loads):
        rate_rps, seed = load * capacity_rps, args.seed + 10 * number
        await open_loop(target, rate_rps, args.warm, PROMPTS, ANSWER, seed + 2, slo=slo)
        began_s = time.process_time()
        seen = await open_loop(target, rate_rps, args.seconds, PROMPTS, ANSWER, seed + 3, slo=slo)
        rows.append(row_of(load, args.seconds, seen, slo, time.process_time() - began_s))
        print(f"overload: load {load:g} done", file=sys.stderr, flush=True)
    return capacity_rps, capacity_tps, rows


def loads_of(text: str) -> list[float]:
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0.0 < one < 1000.0 for one in found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers above 0, separated by commas")
    return found


def seconds_of(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 86_400.0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds above 0")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=loads_of, default=loads_of("0.7,1,1.5,3,5,10"), help="times the capacity")
    parser.add_argument("--seconds", type=seconds_of, default=20.0, help="of each load, and of the capacity (20)")
    parser.add_argument("--warm", type=seconds_of, default=20.0, help="of traffic before each measurement (20)")
    parser.add_argument("--slo-ttft", type=seconds_of, default=1.0, metavar="S", help="target TTFT (1)")
    parser.add_argument("--slo-tpot", type=seconds_of, default=0.15, metavar="S", help="target TPOT (0.15)")
    parser.add_argument("--model", default="bundled", help="as of pdserve up; bundled: its default")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--target", default="", help="a running cluster HOST:PORT, instead of one of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args(argv)
    slo = Slo(ttft_s=args.slo_ttft, tpot_s=args.slo_tpot)
    if args.target:
        capacity_rps, capacity_tps, rows = asyncio.run(measure(args.target, args, slo))
    else:
        flags = ["--prefill", str(args.prefill), "--decode", str(args.decode)]
        if args.model != "bundled":
            flags += ["--model", args.model]
        with Running.start(*flags, env={"OMP_NUM_THREADS": "1"}) as cluster:
            capacity_rps, capacity_tps, rows = asyncio.run(measure(cluster.target, args, slo))
    if args.json:
        print(
            json.dumps(
                {"capacity_rps": capacity_rps, "capacity_tps": capacity_tps, "rows": [asdict(one) for one in rows]}
            )
        )
    else:
        print(render(capacity_rps, capacity_tps, slo, rows))


if __name__ == "__main__":
    main()
