"""Checks every Triton kernel on a CUDA device: its largest error against float64, and its time. Prints two tables.

    python -m tests.gpu.check_kernels [--errors] [--times] [--tune]

Needs only a checkout, torch, triton and numpy. The checks are those that `make test` runs in the interpreter; the timed
launches have shapes of real models. A time is compared with two others: the bytes that the launch must move at the
bandwidth of a device copy, which is measured first, and torch's own operation if there is one. Each launch is captured
in a CUDA graph and replayed, so times exclude the cost of launching, and a kernel that cannot be captured fails here.
--errors and --times select one of the two tables; --tune tries attention's tilings. Exit code 1 if an error exceeds its
bound or a launch raises, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import triton

from pdserve.engine.gpu import attention, attention_plan
from tests.gpu import case_attention
from tests.gpu.all_cases import CASES, LAUNCHES
from tests.gpu.cases import Launch

REPEATS = 20
SAMPLES = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for what in ("errors", "times", "tune"):
        parser.add_argument(f"--{what}", action="store_true")
    args = parser.parse_args()
    is_all = not (args.errors or args.times)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (make test runs the checks in the interpreter)", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    num_wrong = check_all(device) if args.errors or is_all else 0
    if args.times or is_all:
        num_wrong += time_all(device)
    if args.tune:
        tune(device)
    return int(num_wrong > 0)


def check_all(device: torch.device) -> int:
    print("\n| check | largest error | bound | |\n|---|---|---|---|")
    num_wrong = 0
    for case in CASES:
        try:
            error = case.check(device)
        except Exception as problem:  # so that the other checks still run
            told = f"{type(problem).__name__}: {problem}"[:200]
            print(f"| {case.name} | {told!r} | {case.bound:.2g} | **raised** |", flush=True)
            num_wrong += 1
            continue
        is_wrong = not error <= case.bound
        num_wrong += is_wrong
        print(f"| {case.name} | {error:.2g} | {case.bound:.2g} | {'**wrong**' if is_wrong else ''} |", flush=True)
    print(f"\n{num_wrong} wrong")
    return num_wrong


def time_all(device: torch.device) -> int:
    """The number of launches that could not be timed."""
    copy_gb_s = copy_bandwidth(device)
    print(f"\ndevice copy: {copy_gb_s:.0f} GB/s read and written")
    print("\n| launch | us | GB/s | share of a copy | torch us |\n|---|---|---|---|---|")
    num_raised = 0
    for launch in LAUNCHES:
        try:
            line = timed(launch, device, copy_gb_s)
        except Exception as problem:
            line = f"| {launch.name} | **raised** {type(problem).__name__}: {str(problem)[:200]!r} | | | |"
            num_raised += 1
        print(line, flush=True)
        torch.cuda.empty_cache()
    return num_raised


def timed(launch: Launch, device: torch.device, copy_gb_s: float) -> str:
    run, floor = launch.make(device)
    took_s = graph_s(run)
    gb_s = launch.num_bytes / took_s / 1e9
    torch_us = f"{graph_s(floor) * 1e6:.1f}" if floor is not None else ""
    return f"| {launch.name} | {took_s * 1e6:.1f} | {gb_s:.0f} | {gb_s / copy_gb_s:.0%} | {torch_us} |"


def graph_s(run: Callable[[], object]) -> float:
    """Seconds per call when many are replayed from a graph; the median of several samples."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()  # compiles
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            run()
    samples = []
    for _ in range(SAMPLES + 1):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) / 1e3 / REPEATS)
    return sorted(samples[1:])[SAMPLES // 2]


def copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_s(lambda: target.copy_(source)) / 1e9


def tune(device: torch.device) -> None:
    """Measures which tiling is fastest. attention_plan.choose_tiling considers only shared memory and registers."""
    print("\n| launch | positions | warps | stages | us |\n|---|---|---|---|---|")
    choose = attention_plan.choose_tiling
    began_s = time.monotonic()
    for launch in case_attention.LAUNCHES[:9]:
        found = []
        for positions in (16, 32, 64, 128):
            for num_warps in (2, 4, 8):
                for num_stages in (2, 3, 5, 7):
                    tiling = attention_plan.Tiling(positions, num_warps, num_stages, 12 // num_warps)
                    for module in (attention, attention_plan):  # both have the name
                        module.choose_tiling = lambda *_, tiling=tiling, **__: replace(tiling)
                    try:
                        run, _ = launch.make(device)
                        found.append((graph_s(run), tiling))
                    except Exception:  # needs too much shared memory, so this tiling is unusable
                        torch.cuda.synchronize()
        for took_s, tiling in sorted(found, key=lambda one: one[0])[:3]:
            parts = (tiling.positions, tiling.num_warps, tiling.num_stages)
            print(f"| {launch.name} | {' | '.join(map(str, parts))} | {took_s * 1e6:.1f} |", flush=True)
        torch.cuda.empty_cache()
    attention.choose_tiling = attention_plan.choose_tiling = choose
    print(f"\ntuned in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
