"""The latency that the router adds, at increasing open-loop rates, with toy workers that compute in microseconds.

    python -m benchmarks.router [--workers 4] [--rates 50,100,200,...] [--seconds 10] [--json]

Client, router and workers share this machine's cores, so the figures are upper bounds. Added latency is the client's
time to first token minus the worker's own prefill time: gRPC both ways, tokenizing, hashing, the index lookup,
queueing, placement, and the worker's message handling. CPU is the time of all threads of the router's process, per
request. The bend is the first rate at which p95 exceeds three times that of the lowest rate, or at which requests fail.
"""

from __future__ import annotations

import argparse
import asyncio
import math

import psutil  # type: ignore[import-untyped]

from benchmarks.http import cpu_s
from benchmarks.openloop import open_loop, percentile
from pdserve.core.json_text import to_json
from pdserve.launch.running import Running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="decode workers; as many prefill workers again")
    parser.add_argument("--rates", default="25,50,100,150,200,300,400,500", help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each rate")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = []
    workers = ("--prefill", str(flags.workers), "--decode", str(flags.workers))
    with Running.start("--model", "toy", *workers) as cluster:
        asyncio.run(open_loop(cluster.target, 20, 2, flags.prompt_tokens, flags.max_tokens, seed=0))  # warm-up
        print(f"{flags.workers} prefill and {flags.workers} decode toy workers, {flags.prompt_tokens} prompt tokens")
        print("   rate   sent  failed   p50 ms   p95 ms   p99 ms   router CPU ms/request   worst client delay ms")
        router = psutil.Process(cluster.pid("router"))
        for rate in map(float, flags.rates.split(",")):
            before_s = cpu_s(router)
            load = asyncio.run(
                open_loop(cluster.target, rate, flags.seconds, flags.prompt_tokens, flags.max_tokens, seed=1)
            )
            added = [answer.added_s for answer in load.answers]
            row = {
                "rate_rps": rate,
                "sent": load.sent,
                "failed": load.failed,
                "added_p50_s": percentile(added, 0.5),
                "added_p95_s": percentile(added, 0.95),
                "added_p99_s": percentile(added, 0.99),
                "router_cpu_s": (cpu_s(router) - before_s) / load.sent if load.sent else math.nan,
                "client_delay_s": load.late_start_s,
            }
            rows.append(row)
            print(
                f"{rate:7.0f} {load.sent:6d} {load.failed:7d} {row['added_p50_s'] * 1e3:8.2f} "
                f"{row['added_p95_s'] * 1e3:8.2f} {row['added_p99_s'] * 1e3:8.2f} "
                f"{row['router_cpu_s'] * 1e3:23.2f} {load.late_start_s * 1e3:23.1f}"
            )
            if load.failed > load.sent / 2:
                break
    bend = next((r["rate_rps"] for r in rows if r["failed"] or r["added_p95_s"] > 3 * rows[0]["added_p95_s"]), None)
    print(f"bends at {bend:.0f} requests/s" if bend else "does not bend within these rates")
    if flags.json:
        print(to_json({"rows": rows, "bend_rps": bend}))


if __name__ == "__main__":
    main()
