"""Measures how polling device events from another thread slows an engine, by polling interval. Needs no GPU.

    python -m benchmarks.device_poll [--rounds 7]

The engine is a loop of small torch calls on this thread. The watcher of kvtransfer/devices/cuda.py runs beside it with
an event that never completes, as for a receive whose sender is late. Rounds alternate; each figure is a median of
rounds, beside that of the loop alone in the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

import torch

from kvtransfer.devices import cuda
from kvtransfer.devices.cuda import CudaCopying, Watcher

CALLS: Final = 20_000
INTERVALS_S: Final = (None, 50e-6, 200e-6, 1e-3)  # None: nobody looks


class PendingEvent:
    """An event that passes when the benchmark sets it."""

    def __init__(self) -> None:
        self.is_over, self.num_looks = False, 0

    def query(self) -> bool:
        self.num_looks += 1
        return self.is_over


def loop_s() -> float:
    x, began_s = torch.zeros(8), time.perf_counter()
    for _ in range(CALLS):
        x = x * 0.5 + 1.0
    return time.perf_counter() - began_s


def measure(interval_s: float | None) -> tuple[float, float]:
    """Seconds of the loop, and looks per second beside it."""
    event = PendingEvent()
    if interval_s is not None:
        cuda.poll_s = lambda waited_s: interval_s
        Watcher().add(CudaCopying(event, None, 1e6), lambda: None)
    took_s = loop_s()
    event.is_over = True
    return took_s, event.num_looks / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    loop_s()
    seen: dict[float | None, list[tuple[float, float]]] = {interval_s: [] for interval_s in INTERVALS_S}
    for number in range(rounds):
        for interval_s in INTERVALS_S[:: 1 if number % 2 else -1]:
            seen[interval_s].append(measure(interval_s))
    alone_s = statistics.median(took_s for took_s, _ in seen[None])
    print("| between looks | looks/s | us a call | times the loop alone |\n|---|---|---|---|")
    for interval_s, each in seen.items():
        took_s = statistics.median(took_s for took_s, _ in each)
        looks = statistics.median(looks for _, looks in each)
        name = "alone" if interval_s is None else f"{interval_s * 1e6:.0f} us"
        print(f"| {name} | {looks:,.0f} | {took_s / CALLS * 1e6:.2f} | {took_s / alone_s:.2f} |")


if __name__ == "__main__":
    main()
