"""Which policy meets more targets at one rate.

    python -m benchmarks.attainment --trace azure --pair chat-66b --rate 732

Compares policies of benchmarks/schedule/ on the same cluster, split, trace and rate. `--skip N` excludes the first N
requests, so that a constant is not judged on the requests that it was chosen on.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

from benchmarks.schedule.work import FINAL_TOLERANCE, NUM_WORKERS, PAIRS, POLICIES, TRACES, question
from pdserve.core.types import Slo
from simulator.cluster.world import simulate
from simulator.traces.reshape import Reshaped, rate_scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=TRACES, required=True)
    parser.add_argument("--pair", choices=[one.name for one in PAIRS], default="chat-13b")
    parser.add_argument("--slo", default="", help="TTFT/TPOT in seconds, in place of the pair's: 4/0.05")
    parser.add_argument("--rate", type=float, required=True, help="requests per second, all workers together")
    parser.add_argument("--prefill", type=int, default=0, help=f"of {NUM_WORKERS} workers; the others decode")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--policies", default="goodput,mooncake", help=", ".join(POLICIES))
    flags = parser.parse_args()
    print("| policy | kept % | kept/s | outcomes | rejected within 10 ms % |\n|---|---|---|---|---|")
    for policy in flags.policies.split(","):
        asked = question(flags.trace, flags.pair, policy, flags.requests, FINAL_TOLERANCE)
        window, config = asked.windows[0], asked.config(flags.prefill)
        if flags.slo:
            ttft_s, tpot_s = map(float, flags.slo.split("/"))
            config = replace(config, slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s))
        result = simulate(Reshaped(window, rate_scaled(flags.rate / window.rate_rps)), config)
        rows = result.requests[flags.skip :]
        kept = sum(row.has_met_slo for row in rows)
        span_s = rows[-1].arrival_s - rows[0].arrival_s
        waits_s = [row.ended_s - row.arrival_s for row in rows if row.outcome == "rejected" and row.ended_s is not None]
        at_once = f"{sum(one <= 0.010 for one in waits_s) / len(waits_s):.1%}" if waits_s else ""
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(Counter(row.outcome for row in rows).items()))
        print(f"| {policy} | {kept / len(rows):.2%} | {kept / span_s:.1f} | {outcomes} | {at_once} |", flush=True)


if __name__ == "__main__":
    main()
