"""Types and helpers for the checks of kernels, which run both in the interpreter and on a CUDA device.

Each case file has CASES (small shapes, compared with float64 on the CPU) and LAUNCHES (shapes of real models, whose
results are not checked). The launches are compiled for sm_90 without a device, and timed if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    name: str
    check: Callable[[torch.device], float]  # the largest error
    bound: float


@dataclass(frozen=True)
class Launch:
    """`make` allocates on the device and returns the launch, and torch's equivalent operation if there is one."""

    name: str
    make: Callable[[torch.device], tuple[Callable[[], object], Callable[[], object] | None]]
    num_bytes: int = 0  # that the launch must move


def worst(ours: Tensor, reference: Tensor, floor: float = 1e-3) -> float:
    """The largest error, relative to the largest reference of the tensor. NaN or a wrong shape counts as infinite."""
    if ours.shape != reference.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    error = (ours.detach().cpu().double() - reference.double()).abs().max()
    if not bool(torch.isfinite(error)):
        return float("inf")
    return float(error / reference.double().abs().max().clamp(min=floor))


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    """Normal numbers on the CPU, rounded to `dtype`."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size).to(dtype)


#: Relative error that a result of this dtype may have, from rounding and from the order of sums.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
