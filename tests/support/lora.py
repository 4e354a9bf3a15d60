"""Adapters of low rank (LoRA) for tests: what somebody writes who adds them to the engine, in one file.

    y[t] += scale * (x[t] A^T) B^T          A and B of the adapter of token t

No operation depends on which tokens have which adapter, so a CUDA graph may contain them.
"""

# Shapes: T tokens, J adapters, R rank, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pdserve.engine.model.linear import Addend, LayerAddends

Key = tuple[int, str]  # layer and field of LayerAddends; (-1, "head")


@dataclass(frozen=True)
class Lora:
    """Addends of a batch."""

    low_of: Mapping[Key, tuple[Tensor, Tensor]]  # A [J, R, K] and B [J, N, R]
    adapter_T: Tensor
    scale: float

    @property
    def head(self) -> Addend | None:
        return self._addend(-1, "head")

    def layer(self, index: int) -> LayerAddends:
        return LayerAddends(*(self._addend(index, name) for name in LayerAddends._fields))

    def take(self, token_U: Tensor | slice) -> Lora:
        return replace(self, adapter_T=self.adapter_T[token_U])

    def merged(self, layer: int, name: str, weight_NK: Tensor, adapter: int) -> Tensor:
        """The weights of one adapter's sequences: the definition, in weight's dtype."""
        if (layer, name) not in self.low_of:
            return weight_NK
        low_JRK, high_JNR = self.low_of[layer, name]
        return weight_NK + self.scale * high_JNR[adapter].to(weight_NK) @ low_JRK[adapter].to(weight_NK)

    def _addend(self, layer: int, name: str) -> Addend | None:
        found = self.low_of.get((layer, name))
        return None if found is None else partial(_add, *found, self.adapter_T, self.scale)


def _add(low_JRK: Tensor, high_JNR: Tensor, adapter_T: Tensor, scale: float, x_TK: Tensor, y_TN: Tensor) -> None:
    inner_TR1 = torch.bmm(low_JRK[adapter_T], x_TK.to(low_JRK.dtype)[:, :, None])
    y_TN.add_(scale * torch.bmm(high_JNR[adapter_T], inner_TR1)[:, :, 0])
