"""Checks of fp8.py: values times scales against float64; the error must not exceed fp8's rounding of the row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.gpu.kernels import fp8
from tests.gpu.cases import Case, Launch, draw

_EPS = 1e-5
#: e4m3 has four significant bits; for values below 2^-6 its step is 2^-9.
_ROUNDING = 2.0**-4
_STEP = 2.0**-9 / 448


def _excess(ours: tuple[Tensor, Tensor], reference: Tensor) -> float:
    """The largest error divided by the error that rounding allows; at most 1 if correct."""
    values, scales = ours[0].cpu().float().double(), ours[1].cpu().double()
    if values.shape != reference.shape or scales.shape != (len(reference), 1):
        return float("inf")
    largest = reference.abs().amax(-1, keepdim=True)
    allowed = reference.abs() * _ROUNDING + largest * (_STEP + 2.0**-20) + 1e-30
    excess = float(((values * scales - reference).abs() / allowed).max()) if len(reference) else 0.0
    return excess if excess == excess else float("inf")


def _case(name: str, run: Callable[[torch.device, torch.dtype], tuple[tuple[Tensor, Tensor], Tensor]]) -> list[Case]:
    def case(dtype: torch.dtype) -> Case:
        return Case(f"fp8 {name} {dtype}".replace("torch.", ""), lambda device: _excess(*run(device, dtype)), 1.0)

    return [case(dtype) for dtype in (torch.float32, torch.bfloat16)]


def _plain(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x = draw((4, 100), dtype, size=5.0)
    x[1] = 0.0
    x[2, 7] = 1e4  # an outlier, beside which the other values are small
    return fp8.quantise(x.to(device)), x.double()


def _norm(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, delta, weight = (draw(shape, dtype, seed) for seed, shape in enumerate(((3, 96), (3, 96), (96,))))
    there, total = x.to(device, copy=True), x + delta
    ours = fp8.add_rms_norm(there, delta.to(device), weight.to(device), _EPS)
    if not torch.equal(there.cpu(), total):
        ours = (ours[0], ours[1] * torch.nan)
    return ours, F.rms_norm(total.double(), (96,), weight.double(), _EPS)


def _norm_alone(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, weight = draw((3, 96), dtype), draw((96,), dtype, 1)
    ours = fp8.rms_norm(x.to(device), weight.to(device), _EPS)
    return ours, F.rms_norm(x.double(), (96,), weight.double(), _EPS)


def _silu(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    gate_up = draw((3, 400), dtype, size=3.0)
    gate, up = gate_up.double().chunk(2, -1)
    return fp8.silu_mul(gate_up.to(device)), F.silu(gate) * up


def _gelu(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    gate_up = draw((3, 400), dtype, size=3.0)
    gate, up = gate_up.double().chunk(2, -1)
    return fp8.gelu_mul(gate_up.to(device)), F.gelu(gate, approximate="tanh") * up


CASES = [
    *_case("quantise", _plain),
    *_case("add_rms_norm", _norm),
    *_case("rms_norm", _norm_alone),
    *_case("silu_mul", _silu),
    *_case("gelu_mul", _gelu),
]


def _llama(name: str, num_rows: int, size: int, run: Callable[[Tensor], object], num_bytes: int) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        x = torch.ones(num_rows, size, dtype=torch.bfloat16, device=device)
        return lambda: run(x), None

    return Launch(f"fp8 {name} {num_rows}x{size}", make, num_rows * num_bytes)


LAUNCHES = [
    _llama("quantise", 128, 4096, fp8.quantise, 4096 * 3),
    _llama("rms_norm", 128, 4096, lambda x: fp8.rms_norm(x, x[0], _EPS), 4096 * 3),
    _llama("add_rms_norm", 128, 4096, lambda x: fp8.add_rms_norm(x, x, x[0], _EPS), 4096 * 7),
    _llama("silu_mul", 1, 2 * 14336, fp8.silu_mul, 14336 * 5),
    _llama("silu_mul", 128, 2 * 14336, fp8.silu_mul, 14336 * 5),
]
