"""Measures the cost of tracing: tokens per second with every request traced to a collector, compared with no tracing.

    python -m benchmarks.tracing [--pairs 8] [--requests 48] [--model DIR|toy]

Two clusters with the same settings run side by side, one with --otlp to a collector in a separate process. Bursts of
the same requests go to one and then to the other, in changing order. The ratio is computed for each pair of bursts, so
that a slow phase of the machine affects both. The collector shares the machine, so its work counts as a cost of
tracing.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import span
from pdserve import AsyncClient
from pdserve.launch.running import Running

COLLECTOR = """
import sys, threading
from tests.unit.telemetry.otlp_sink import running_sink
with running_sink() as sink:
    print(sink.endpoint, flush=True)
    sys.stdin.read()
    print(len(sink.spans), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=48, help="in a burst, all at once")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--model", default="", help="the bundled model where empty")
    flags = parser.parse_args()
    model = ("--model", flags.model) if flags.model else ()
    with collector() as endpoint, Running.start(*model) as plain, Running.start(*model, "--otlp", endpoint) as traced:
        for cluster in (plain, traced):
            burst(cluster.target, flags.requests, flags.max_tokens, 0)
        ratios = []
        print("  pair   plain tok/s   traced tok/s   ratio")
        for pair in range(1, flags.pairs + 1):
            order = (plain, traced) if pair % 2 else (traced, plain)
            rates = {id(c): burst(c.target, flags.requests, flags.max_tokens, pair) for c in order}
            ratios.append(rates[id(traced)] / rates[id(plain)])
            print(f"{pair:6d} {rates[id(plain)]:13.0f} {rates[id(traced)]:14.0f} {ratios[-1]:7.3f}")
    low, middle, high = span(ratios)
    print(
        f"traced / plain: median {middle:.3f} (from {low:.3f} to {high:.3f}): tracing costs {100 * (1 - middle):.1f} %"
    )


def burst(target: str, requests: int, max_tokens: int, seed: int) -> float:
    """Tokens per second of `requests` requests at once; half of the prompts are long enough for the remote path."""

    async def run() -> float:
        async with AsyncClient(target) as client:
            prompts = [
                [33 + (seed * 31 + i * 17 + j) % 90 for j in range(12 if i % 2 else 40 + i)] for i in range(requests)
            ]
            began_s = time.perf_counter()
            done = await asyncio.gather(
                *(client.generate(p, max_tokens=max_tokens, temperature=0, ignore_eos=True) for p in prompts)
            )
            return sum(len(one.token_ids) for one in done) / (time.perf_counter() - began_s)

    return asyncio.run(run())


@contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        print(f"the collector got {process.stdout.readline().strip()} spans")
        process.wait(10)


if __name__ == "__main__":
    main()
