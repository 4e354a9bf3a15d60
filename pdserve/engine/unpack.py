"""Unpacks the 4-bit matrices of GPTQ, AWQ and compressed-tensors checkpoints: see packed_scheme.py."""

# Shapes: N outputs, K inputs, G groups of inputs.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import ModelError
from pdserve.engine.packed_scheme import PER_WORD, PackedScheme
from pdserve.engine.rounding import WEIGHTS_AT_ONCE

_ZERO: Final = 8  # of symmetric weights
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where the integer of each of eight outputs is


@dataclass(frozen=True, slots=True)
class Groups:
    """(`rounded_NK` - `zero_NG`) * `scale_NG` are the weights; integers are uint8 from 0 to 15."""

    rounded_NK: Tensor
    scale_NG: Tensor
    zero_NG: Tensor


def unpack(scheme: PackedScheme, module: str, read: Callable[[str], Tensor]) -> Groups:
    """`read` returns a stored tensor by its name, and may overwrite what it returned before."""
    names = [f"{module}.{tensor.suffix}" for tensor in scheme.tensors()]
    if scheme.format == "pack-quantized":
        rounded_NK, scale_NG = _across(read(names[0])), _scale(names[1], read)
        # The integers that fill the last int32 are cut off.
        zero_NG = _down(read(names[2]))[: len(rounded_NK)] if scheme.has_zeros else None
    else:
        is_awq = scheme.format == "awq"
        rounded_KN = _reordered(_across(read(names[0]))) if is_awq else _down(read(names[0]))
        rounded_NK, scale_NG = rounded_KN.t().contiguous(), _scale(names[1], read).t().contiguous()
        zero_GN = _across(read(names[2]))
        zero_GN = _reordered(zero_GN) if is_awq else zero_GN + 1 & 15 if scheme.format == "gptq" else zero_GN
        zero_NG = zero_GN.t().contiguous()
    if zero_NG is None:
        zero_NG = torch.full(scale_NG.shape, _ZERO, dtype=torch.uint8)
    return Groups(rounded_NK, scale_NG, zero_NG)


def dequantise_groups(groups: Groups, out_NK: Tensor) -> None:
    """float32 products, rounded once to `out_NK`'s dtype."""
    num_at_once = max(1, WEIGHTS_AT_ONCE // out_NK.shape[1])
    tensors = (groups.rounded_NK, groups.scale_NG, groups.zero_NG, out_NK)
    for rounded, scale, zero, out in zip(*(one.split(num_at_once) for one in tensors), strict=True):
        weight = rounded.float().view(*scale.shape, -1).sub_(zero[..., None]).mul_(scale[..., None])
        out.copy_(weight.view(out.shape))


def _scale(name: str, read: Callable[[str], Tensor]) -> Tensor:
    scale = read(name).to(torch.float32, copy=True)
    if not scale.isfinite().all():
        raise ModelError(name, "a scale that is not finite", "finite numbers")
    return scale


def _across(words: Tensor) -> Tensor:
    """The integers of int32 [R, C], whose words hold neighbours of a row: uint8 [R, 8 C]."""
    return _halves(words).flatten(1)


def _down(words: Tensor) -> Tensor:
    """The integers of int32 [R, C], whose words hold neighbours of a column: uint8 [8 R, C]."""
    return _halves(words).permute(0, 2, 1).flatten(0, 1)


def _halves(words: Tensor) -> Tensor:
    """uint8 [R, C, 8]."""
    parts = words.contiguous().view(torch.uint8).view(*words.shape, PER_WORD // 2)
    return torch.stack([parts & 15, parts >> 4], dim=-1).flatten(2)


def _reordered(rounded: Tensor) -> Tensor:
    return rounded.view(len(rounded), -1, PER_WORD)[..., _AWQ_ORDER].flatten(1)
