"""Attention of one layer: the model's parameters for it, and the steps around it for an eager batch.

The decoder passes every layer's queries, keys and values to an AttentionBackend, which knows the positions of the
step's tokens and the places of their KV. This one is for a batch that is packed for each step; engine/gpu has one for
the static buffers of a CUDA graph.
"""

# Shapes: T tokens in the packed batch, H query heads, K kv heads, N = H + 2 K, D head dim, U tokens that are read.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

from torch import Tensor

from pdserve.engine import ops
from pdserve.engine.config import ModelConfig
from pdserve.engine.interface import OnLayer
from pdserve.engine.parameters import LayerWeights
from pdserve.engine.pool import TorchPool
from pdserve.engine.rope import inverse_frequencies, rotation
from pdserve.engine.rope_config import RopeConfig

if TYPE_CHECKING:
    from pdserve.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention parameters of a model, or of one rank's part of it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    softcap: float | None
    ropes: tuple[RopeConfig, ...]  # each once
    frequencies: tuple[Tensor, ...]  # of each
    rope_of_layer: tuple[int, ...]

    @staticmethod
    def of(config: ModelConfig, like: Tensor) -> Heads:
        """Creates it on the device of `like`."""
        ropes = tuple(dict.fromkeys(config.ropes))
        return Heads(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            ropes=ropes,
            frequencies=tuple(inverse_frequencies(rope, config.head_dim).to(like.device) for rope in ropes),
            rope_of_layer=tuple(ropes.index(rope) for rope in config.ropes),
        )


class AttentionBackend(Protocol):
    """One step's attention."""

    token_T: Tensor
    read_U: Tensor | None  # tokens whose final state is needed; None: all, in order

    def mix(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        """Stores the layer's keys and values, and returns the attention output of every token, [T, H * D]."""
        ...


@final
class EagerMixer:
    """`on_layer` is called with the number of layers that have issued their writes."""

    def __init__(self, batch: Batch, pool: TorchPool, heads: Heads, on_layer: OnLayer | None = None) -> None:
        self.token_T, self.read_U = batch.token_T, batch.read_U
        self._batch, self._pool, self._heads, self._on_layer = batch, pool, heads, on_layer
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}  # by rope
        pool.clear(batch.fresh_blocks)

    def mix(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        heads, batch, pool = self._heads, self._batch, self._pool
        q_THD, k_TKD, v_TKD = qkv_TND.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD = ops.rms_norm(q_THD, layer.q_norm_D, heads.norm_eps)
            k_TKD = ops.rms_norm(k_TKD, layer.k_norm_D, heads.norm_eps)
        q_THD = batch.place(pool, index, q_THD, k_TKD, v_TKD, self._rotation(heads.rope_of_layer[index], q_THD))
        if self._on_layer is not None:
            self._on_layer(index + 1)
        return batch.attend(pool, index, q_THD, layer.window, heads.scale, heads.softcap)

    def _rotation(self, rope: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if rope not in self._rotations:
            factor = self._heads.ropes[rope].attention_factor
            self._rotations[rope] = rotation(self._heads.frequencies[rope], factor, self._batch.position_T, like.dtype)
        return self._rotations[rope]
