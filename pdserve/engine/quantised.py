"""Turns stored integers or eight-bit floats and their scales back into weights."""

# Shapes: N outputs, K inputs; a scale belongs to `block` of them.

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.core.errors import ModelError
from pdserve.engine.quantisation_config import Scheme


def check_scale(name: str, scale: Tensor) -> None:
    """Raises ModelError on an impossible scale."""
    wrong = ~(torch.isfinite(scale) & (scale > 0))
    if wrong.any():
        raise ModelError(name, f"a scale of {scale[wrong].flatten()[0].item():g}", "positive finite numbers")


def dequantise(stored_NK: Tensor, scale: Tensor, scheme: Scheme, out_NK: Tensor) -> None:
    """float32 products, rounded once to `out_NK`'s dtype. `scale` is float32 in any shape that the scheme allows."""
    num_outputs, num_inputs = stored_NK.shape
    scale = scale.view(scheme.scale_counts(num_outputs, num_inputs))
    num_rows, num_columns = scheme.block
    if num_columns is not None:
        scale = scale.repeat_interleave(num_columns, dim=1)[:, :num_inputs]
    num_rows = num_outputs if num_rows is None else num_rows
    out_NK.copy_(stored_NK)  # exact: bfloat16 represents every stored value
    if num_rows == 1 or scale.shape[0] == 1:
        out_NK.mul_(scale)
        return
    for index, part_NK in enumerate(out_NK.split(num_rows)):
        part_NK.mul_(scale[index])
