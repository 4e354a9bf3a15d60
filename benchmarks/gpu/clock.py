"""Times work on a device, by events on its stream or the host's clock in a rehearsal; measures two rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch

SAMPLES: Final = 7


class Clock(Protocol):
    device: torch.device

    def mark(self) -> Any:
        """A point in the queued work."""
        ...

    def between_s(self, first: Any, last: Any) -> float:
        """Valid after `sync`."""
        ...

    def sync(self) -> None: ...


@final
class CudaClock:
    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def sync(self) -> None:
        torch.cuda.synchronize()


@final
class HostClock:
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def mark(self) -> float:
        return time.perf_counter()

    def between_s(self, first: float, last: float) -> float:
        return last - first

    def sync(self) -> None:
        pass


def seconds_of(clock: Clock, run: Callable[[], object], at_once: int = 4) -> float:
    """Seconds of one call, from several that are queued together; the median of a few samples."""
    run()
    clock.sync()
    samples = []
    for _ in range(SAMPLES):
        first = clock.mark()
        for _ in range(at_once):
            run()
        last = clock.mark()
        clock.sync()
        samples.append(clock.between_s(first, last) / at_once)
    return statistics.median(samples)


def copy_gb_s(clock: Clock, num_bytes: int) -> float:
    """GB/s of a device copy; counts bytes read and bytes written."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(clock, lambda: target.copy_(source)) / 1e9


def matrix_tflop_s(clock: Clock, size: int, kind: str) -> float:
    """TFLOP/s of a square product: bfloat16, or fp8 with row scales and exact or fast accumulation."""
    left, right = (torch.randn(size, size, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    if kind == "bfloat16":
        took_s = seconds_of(clock, lambda: left @ right.t())
    else:
        fp8 = torch.float8_e4m3fn
        left8, right8 = left.to(fp8), right.to(fp8).t()
        # One scale a row; torch 2.11 has only one for the whole matrix on a CPU.
        sizes = ((size, 1), (1, size)) if clock.device.type == "cuda" else ((), ())
        scales = torch.ones(sizes[0], device=clock.device), torch.ones(sizes[1], device=clock.device)

        def product() -> object:
            return torch._scaled_mm(
                left8,
                right8,
                scale_a=scales[0],
                scale_b=scales[1],
                out_dtype=torch.bfloat16,
                use_fast_accum=kind == "fp8, fast sums",
            )

        took_s = seconds_of(clock, product)
    return 2 * size**3 / took_s / 1e12


@dataclass(frozen=True)
class Kernels:
    """The kernels that some steps ran on the device, without copies between host and device."""

    seconds: float
    by_name: tuple[tuple[str, int, float], ...]  # launches and seconds, the longest first


def kernels_of(clock: Clock, run: Callable[[], object]) -> Kernels:
    """Launches and seconds of all kernels that `run` queues."""
    is_cuda = clock.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    clock.sync()
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        clock.sync()
    events: Any = profile.events()
    found: dict[str, tuple[int, float]] = {}
    for one in events:
        is_counted = one.device_type.name == activity.name and one.cpu_parent is None
        if is_counted and not one.name.startswith(("Memcpy", "Memset")):
            count, total_s = found.get(one.name, (0, 0.0))
            found[one.name] = count + 1, total_s + (one.time_range.end - one.time_range.start) / 1e6
    by_name = sorted(((name, count, total_s) for name, (count, total_s) in found.items()), key=lambda one: -one[2])
    return Kernels(sum(total_s for _, _, total_s in by_name), tuple(by_name))
