"""Measures the speed of the simulator: `python -m benchmarks.simulator [--policies NAME...] [--split P:D ...]
[--requests N]`.

It simulates the published Mooncake conversation trace (12,031 requests, folder in PDSERVE_TRACES or ../shared/traces)
on 16 workers of the H100 profile; without the trace, a synthetic one of equal shape. It prints CPU seconds of one
thread, so other work on the machine matters only through shared caches and cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from pathlib import Path

from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.state.settings import RouterSettings
from simulator.cluster.world import World
from simulator.model import SimConfig, Trace
from simulator.search.layouts import make_workers
from simulator.traces.files import FileTrace
from simulator.traces.reshape import Reshaped, first, rate_scaled
from simulator.traces.workloads import Poisson, log_normal

PROFILE = "h100-sxm.llama-3.1-8b.bf16"
FILE = "mooncake_conversation.jsonl"
TRACES = Path(os.environ.get("PDSERVE_TRACES", Path(__file__).parents[2] / "shared/traces"))
SLO = Slo(ttft_s=4.0, tpot_s=0.05)


def find_trace() -> Trace:
    if (TRACES / FILE).exists():
        return FileTrace(TRACES / FILE)
    return Poisson(
        rate_rps=3.4,
        duration_s=3537.0,
        prompts=log_normal(median=6900.0, spread=1.05, most=123_000),
        outputs=log_normal(median=280.0, spread=0.6, most=2_000),
        num_prefixes=8,
        prefix_tokens=512,
        name="synthetic, of the Mooncake trace's shape",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", nargs="+", default=["goodput", "least-ttft", "colocated"])
    parser.add_argument("--split", nargs="+", default=["8:8"], help="prefill:decode workers")
    parser.add_argument("--rate-scale", nargs="+", type=float, default=[1.0])
    parser.add_argument("--requests", type=int, default=10**9, help="only the first so many")
    parser.add_argument("--routers", type=int, default=1)
    arguments = parser.parse_args()
    trace = find_trace()
    profile = load_profile(PROFILE)
    print(f"{trace.name}, {PROFILE}, {platform.machine()}, Python {platform.python_version()}")
    print("policy       split  rate  requests  CPU s  requests/s  tokens/s  events  attainment")
    for rate_scale in arguments.rate_scale:
        for split in arguments.split:
            for policy in arguments.policies:
                prefills, decodes = (int(part) for part in split.split(":"))
                config = SimConfig(
                    workers=make_workers(profile, prefills, decodes),
                    slo=SLO,
                    router=RouterSettings(policy=policy),
                    num_routers=arguments.routers,
                )
                world = World(Reshaped(trace, rate_scaled(rate_scale), first(arguments.requests)), config)
                started_s = time.process_time()
                result = world.run()
                took_s = time.process_time() - started_s
                count, tokens = len(result.requests), sum(row.tokens for row in result.requests)
                print(
                    f"{policy:12} {split:>5} {rate_scale:5g} {count:9} {took_s:6.1f} {count / took_s:11.0f} "
                    f"{tokens / took_s:9.0f} {world.agenda.num_entries:7} {result.attainment:10.3f}",
                    flush=True,
                )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak_mib:.0f} MiB")


if __name__ == "__main__":
    main()
