"""The layout of 4-bit weights in memory: panels of 64 outputs, in blocks of one group each.

    w[n, k] ~ (q_w[n, k] - zero[n, g]) * s_w[n, g]         0 <= q_w <= 15; g is the group of input k

A block has 32 S + 192 bytes:

    32 S bytes   [S / 8, 64, 4]: byte i holds input i of eight in its lower half, and input i + 4 in its upper half
    128 bytes    [64] scales, float16
    64 bytes     [64] zeros
"""

# Shapes: N outputs, G groups of inputs, S inputs of a group, P panels of 64 outputs.

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels.rounding import WEIGHTS_AT_ONCE

LEVELS: Final = 15
PANEL: Final = 64  # outputs
STEP: Final = 8  # inputs of two halves of a byte and its three neighbours
STEP_BYTES: Final = PANEL * STEP // 2
SCALE_BYTES: Final = 2
ROUNDING_BYTES: Final = PANEL * (SCALE_BYTES + 1)  # scales and zeros of a block


def pack(rounded_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor, size: int) -> Tensor:
    """uint8 [P, G, bytes] of integers [N, G S], and of the scales and zeros of their groups [N, G]."""
    num_groups = scale_NG.shape[1]
    num_panels = -(-len(rounded_NK) // PANEL)
    blocks = torch.empty((num_panels, num_groups, PANEL * (size // 2 + 3)), dtype=torch.uint8)
    num_at_once = max(1, WEIGHTS_AT_ONCE // (PANEL * num_groups * size))
    parts = (tensor.split(num_at_once * PANEL) for tensor in (rounded_NK, scale_NG.half(), zero_NG))
    for block, *part in zip(blocks.split(num_at_once), *parts, strict=True):
        rounded, scale, zero = (F.pad(one, (0, 0, 0, len(block) * PANEL - len(one))) for one in part)
        packed, scales, zeros = block.split([PANEL * size // 2, 2 * PANEL, PANEL], dim=-1)
        halves = rounded.view(len(block), PANEL, num_groups, size // STEP, 2, STEP // 2).unbind(-2)
        packed.copy_((halves[0] | halves[1] << 4).permute(0, 2, 3, 1, 4).reshape(packed.shape))
        scales.copy_(scale.view(len(block), PANEL, num_groups).transpose(1, 2).contiguous().view(torch.uint8))
        zeros.copy_(zero.view(len(block), PANEL, num_groups).transpose(1, 2))
    return blocks


def dequantise(blocks: Tensor, size: int) -> Tensor:
    """The weights of panels [P, G, bytes], relative to the factor of the matrix: float32 [64 P, G S]."""
    num_panels, num_groups, _ = blocks.shape
    packed, scale, zero = blocks.split([PANEL * size // 2, 2 * PANEL, PANEL], dim=-1)
    packed = packed.reshape(num_panels, num_groups, size // STEP, PANEL, 1, STEP // 2)
    rounded = torch.cat([packed & LEVELS, packed >> 4], dim=-2).permute(0, 3, 1, 2, 4, 5)
    scale_PG = scale.contiguous().view(torch.float16).transpose(1, 2)[..., None]
    weight: Tensor = rounded.reshape(num_panels, PANEL, num_groups, size).float() - zero.transpose(1, 2)[..., None]
    return weight.mul_(scale_PG).view(num_panels * PANEL, num_groups * size)
