"""Checks of norms.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pdserve.engine.gpu.kernels.norms import add_rms_norm, gelu_mul, rms_norm, silu_mul
from tests.gpu.cases import BOUNDS, Case, Launch, draw, worst

_EPS = 1e-5


def _norm(num_rows: int, size: int, dtype: torch.dtype, weight_dtype: torch.dtype, *, has_delta: bool) -> Case:
    def check(device: torch.device) -> float:
        # A slice of wider rows, because q, k and v are in one tensor.
        wide = draw((num_rows, size + 8), dtype)
        x, there = wide[:, :size], wide.to(device, copy=True)[:, :size]
        delta, weight = draw((num_rows, size), dtype, 1), draw((size,), weight_dtype, 2)
        total = x
        if has_delta:
            out = add_rms_norm(there, delta.to(device), weight.to(device), _EPS)
            total = x + delta
            if not torch.equal(there.cpu(), total):
                return float("inf")
        else:
            out = rms_norm(there, weight.to(device), _EPS)
        return worst(out, F.rms_norm(total.double(), (size,), weight.double(), _EPS))

    name = f"{'add_' if has_delta else ''}rms_norm {num_rows}x{size} {dtype} w {weight_dtype}".replace("torch.", "")
    return Case(name, check, BOUNDS[dtype])


def _gate(num_rows: int, size: int, dtype: torch.dtype, *, is_gelu: bool) -> Case:
    def check(device: torch.device) -> float:
        gate_up = draw((num_rows, 2 * size), dtype, size=4.0)
        gate_up[0, 0], gate_up[0, 1] = 100.0, -100.0  # where exp overflows
        gate, up = gate_up.double().chunk(2, dim=-1)
        out = (gelu_mul if is_gelu else silu_mul)(gate_up.to(device))
        return worst(out, (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up)

    return Case(
        f"{'gelu' if is_gelu else 'silu'}_mul {num_rows}x{size} {dtype}".replace("torch.", ""), check, BOUNDS[dtype]
    )


CASES = [
    *(
        _norm(num_rows, size, dtype, weight, has_delta=has_delta)
        for num_rows, size in ((1, 64), (5, 96), (0, 64))
        for dtype, weight in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        )
        for has_delta in (False, True)
    ),
    *(_gate(3, 1100, dtype, is_gelu=is_gelu) for dtype in BOUNDS for is_gelu in (False, True)),
]


def _llama_norm(num_rows: int) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        x, delta = (torch.ones(num_rows, 4096, dtype=torch.bfloat16, device=device) for _ in range(2))
        weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
        return lambda: add_rms_norm(x, delta, weight, _EPS), lambda: F.rms_norm(x.add_(delta), (4096,), weight, _EPS)

    return Launch(f"add_rms_norm {num_rows}x4096", make, num_rows * 4096 * 2 * 4)


def _llama_gate(num_rows: int) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        gate_up = torch.ones(num_rows, 2 * 14336, dtype=torch.bfloat16, device=device)
        return lambda: silu_mul(gate_up), lambda: F.silu(gate_up[:, :14336]) * gate_up[:, 14336:]

    return Launch(f"silu_mul {num_rows}x14336", make, num_rows * 14336 * 2 * 3)


LAUNCHES = [_llama_norm(1), _llama_norm(128), _llama_gate(1), _llama_gate(128)]
