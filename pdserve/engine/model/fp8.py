"""Products of eight-bit floats (e4m3): weights rounded per output, activations per token, sums in float32.

        w[n, k] ~ q_w[n, k] * s_w[n]          s_w[n] = max_k |w[n, k]| / 448
        x[t, k] ~ q_x[t, k] * s_x[t]          s_x[t] = max_k |x[t, k]| / 448

Compared with bfloat16, half the bytes are read and the matrix units are twice as fast. The relative error of a weight
is at most a sixteenth. The output head is not rounded, because its error would go directly into the logits.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, final

import torch
from torch import Tensor

MOST: Final = 448.0  # the largest number of e4m3
LEAST_SCALE: Final = 2.0**-100  # scale of a row of zeros
_MULTIPLE: Final = 16  # K and N must be multiples of it for the matrix units
_ROUNDED_AT_ONCE: Final = 2**24  # weights converted at a time: a float32 copy of all would double the peak


@final
class Fp8Linear:
    """`scale_N` times `rounded_NK` are the weights. Computes in bfloat16."""

    rounding: Final = "fp8"

    def __init__(self, rounded_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> None:
        self._rounded_KN = rounded_NK.t()  # column-major, as the product requires for its right operand
        self._scale_1N = scale_N[None].contiguous()
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self.product(*round_rows(x_TK))

    def product(self, rounded_TK: Tensor, scale_T1: Tensor) -> Tensor:
        """The product of activations that were rounded when they were computed."""
        out_TN: Tensor = torch._scaled_mm(
            rounded_TK,
            self._rounded_KN,
            scale_a=scale_T1,
            scale_b=self._scale_1N,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # docs/decisions/0011-fast-fp8-sums.md
        )
        return out_TN if self._bias_N is None else out_TN.add_(self._bias_N)


def make_fp8_linear(weight_NK: Tensor, bias_N: Tensor | None) -> Fp8Linear | None:
    """None if the matrix units do not support the shape."""
    num_outputs, num_inputs = weight_NK.shape
    if num_outputs % _MULTIPLE or num_inputs % _MULTIPLE:
        return None
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scale_N = torch.empty(num_outputs, device=weight_NK.device)
    num_at_once = max(1, _ROUNDED_AT_ONCE // num_inputs)
    parts = (tensor.split(num_at_once) for tensor in (weight_NK, rounded_NK, scale_N))
    for weight_PK, rounded_PK, scale_P in zip(*parts, strict=True):
        rounded, scale = _round_rows(weight_PK)
        rounded_PK.copy_(rounded)
        scale_P.copy_(scale[:, 0])
    return Fp8Linear(rounded_NK, scale_N, bias_N)


def round_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and each row's float32 scale, [T, 1]."""
    if x_TK.is_cuda and find_spec("triton") is not None:
        from pdserve.engine.gpu.kernels.fp8 import quantise

        return quantise(x_TK)
    return _round_rows(x_TK)


def _round_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    x = x_TK.float()
    scale_T1 = (x.abs().amax(dim=-1, keepdim=True) / MOST).clamp_(min=LEAST_SCALE)
    return (x / scale_T1).clamp_(-MOST, MOST).to(torch.float8_e4m3fn), scale_T1
