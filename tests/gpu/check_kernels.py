"""Checks every Triton kernel on a CUDA device: its largest error against float64, and its time. Prints two tables.

    python -m tests.gpu.check_kernels [--errors] [--times] [--tune] [--only 'attention,sampling: draw']
        [--from CASE] [--rehearse]

Needs only a checkout, torch, triton and numpy. The checks are those that `make test` runs in the interpreter; the timed
launches have shapes of real models. A time is compared with two others: the bytes that the launch must move at the
bandwidth of a device copy, which is measured first, and torch's own operation if there is one. Each launch is captured
in a CUDA graph and replayed, so times exclude the cost of launching, and a kernel that cannot be captured fails here.
--errors and --times select one of the two tables; --tune tries attention's tilings. A case's name is that of its file
and its own; failures.py says what follows a case that raises. Exit code 1 if an error exceeds its bound or a launch
raises, 2 without a CUDA device. --rehearse runs them in Triton's interpreter, and times small launches by the host.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.failures import Cases, add_flags, cases_of, told
from tests.gpu.cases import Case, Launch

REPEATS = 20
SAMPLES = 5
CASE_S = 45.0  # compilation included
REHEARSED = 200_000  # bytes of a launch that the interpreter runs in a tenth of a second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for what in ("errors", "times", "tune"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: times mean nothing")
    add_flags(parser, "kernels' cases")
    args = parser.parse_args()
    is_all = not (args.errors or args.times)
    if args.rehearse:
        from tests.gpu.interpreter import prepare

        prepare()
    elif not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs the checks in the interpreter)", file=sys.stderr)
        return 2
    import triton

    from tests.gpu.all_cases import NAMED_CASES, NAMED_LAUNCHES

    device = torch.device("cpu" if args.rehearse else "cuda")
    name = "a CPU" if args.rehearse else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    names = [name for name in NAMED_CASES if args.errors or is_all]
    if args.times or is_all:
        names += [
            f"{name}, time"
            for name, launch in NAMED_LAUNCHES.items()
            if not args.rehearse or 0 < launch.num_bytes <= REHEARSED
        ]
    cases = cases_of(args, names, None if args.rehearse else torch.cuda.synchronize, CASE_S)
    check_all(device, cases, NAMED_CASES)
    time_all(device, cases, NAMED_LAUNCHES)
    if args.tune:
        tune(device)
    print(f"\n{cases.num_failed} wrong")
    return int(cases.num_failed > 0)


def check_all(device: torch.device, cases: Cases, named: Mapping[str, Case]) -> None:
    if any(name in named for name in cases):
        print("\n| check | largest error | bound | |\n|---|---|---|---|")
    for name, case in named.items():

        def failed(problem: Exception, name: str = name, bound: float = case.bound) -> None:
            print(f"| {name} | {told(name, problem)} | {bound:.2g} | **raised** |", flush=True)

        def check(name: str = name, case: Case = case) -> None:
            error = case.check(device)
            is_wrong = not error <= case.bound
            cases.num_failed += is_wrong
            print(f"| {name} | {error:.2g} | {case.bound:.2g} | {'**wrong**' if is_wrong else ''} |", flush=True)

        cases.run(name, check, failed)


def time_all(device: torch.device, cases: Cases, named: Mapping[str, Launch]) -> None:
    names = [name for name in named if f"{name}, time" in cases]
    if not names:
        return
    copy_gb_s = copy_bandwidth(device)
    print(f"\ndevice copy: {copy_gb_s:.0f} GB/s read and written")
    print("\n| launch | us | GB/s | share of a copy | torch us |\n|---|---|---|---|---|")
    for name in names:

        def failed(problem: Exception, name: str = name) -> None:
            print(f"| {name} | **raised** {told(name, problem)} | | | |", flush=True)

        cases.run(f"{name}, time", partial(time_one, name, named[name], device, copy_gb_s), failed)


def time_one(name: str, launch: Launch, device: torch.device, copy_gb_s: float) -> None:
    print(f"| {name} | {timed(launch, device, copy_gb_s)} |", flush=True)
    torch.cuda.empty_cache()


def timed(launch: Launch, device: torch.device, copy_gb_s: float) -> str:
    run, floor = launch.make(device)
    seconds_of = graph_s if device.type == "cuda" else host_s
    took_s = seconds_of(run)
    gb_s = launch.num_bytes / took_s / 1e9
    torch_us = f"{seconds_of(floor) * 1e6:.1f}" if floor is not None else ""
    return f"{took_s * 1e6:.1f} | {gb_s:.0f} | {gb_s / copy_gb_s:.0%} | {torch_us}"


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


def host_s(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def copy_bandwidth(device: torch.device) -> float:
    seconds_of = graph_s if device.type == "cuda" else host_s
    source = torch.empty(1 << 30 if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source)) / 1e9


def tune(device: torch.device) -> None:
    """Measures which tiling is fastest. attention_plan.choose_tiling considers only shared memory and registers."""
    from pdserve.engine.gpu.kernels import attention, attention_plan
    from tests.gpu import case_attention

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
