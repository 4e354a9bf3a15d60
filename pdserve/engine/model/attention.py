"""Attention of one layer: the model's parameters for it, and its computation for an eager batch over the paged pool.

The decoder passes every layer's queries, keys and values to an AttentionBackend, which knows the positions of the
step's tokens and the places of their KV. EagerAttention is for a batch that is packed for each step; engine/gpu has two
others, one of them for the static buffers of a CUDA graph. A backend plans once per step which positions each row sees,
and computes once per layer.

The rotation of queries and keys comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu import ops
from pdserve.engine.cpu.paged import Norms, PagedAttention
from pdserve.engine.interface import OnLayer
from pdserve.engine.memory.pool import TorchPool
from pdserve.engine.model.batch import PackedBatch, RowGroup, to_device
from pdserve.engine.model.config import ModelConfig, RopeConfig
from pdserve.engine.model.parameters import LayerWeights

# --- rotary position embedding --------------------------------------------------------------------------------
# The frequencies of every supported rope type, and the rotation.

# Shapes: T tokens in the packed batch, N heads, D head dim, R = D / 2 rotated pairs.


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [R] in float32. The order of operations is that of transformers."""
    exponent_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return _SCALINGS[rope.kind](rope, head_dim, 1.0 / rope.theta**exponent_R)


def rotation(
    frequency_R: Tensor, attention_factor: float, position_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin) at each token's position, [T, 1, R]. Computed in float32, where positions up to 2^24 are exact."""
    angle_T1R = position_T[:, None, None] * frequency_R
    cos_T1R, sin_T1R = angle_T1R.cos(), angle_T1R.sin()
    if attention_factor != 1.0:
        cos_T1R, sin_T1R = cos_T1R * attention_factor, sin_T1R * attention_factor
    return cos_T1R.to(dtype), sin_T1R.to(dtype)


def rotate(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotates pair i, which is dimensions i and i + R (the layout of Hugging Face checkpoints)."""
    low_TNR, high_TNR = x_TND.chunk(2, dim=-1)
    return torch.cat((low_TNR * cos_T1R - high_TNR * sin_T1R, high_TNR * cos_T1R + low_TNR * sin_T1R), dim=-1)


def _linear(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    return frequency_R / rope.factor


def _llama3(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    """Stretches long wavelengths, keeps short ones, and blends those in between. Source: Llama 3.1 reference code."""
    wavelength_R = 2 * math.pi / frequency_R
    longest, shortest = rope.original_positions / rope.low_freq_factor, rope.original_positions / rope.high_freq_factor
    share_R = (rope.original_positions / wavelength_R - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_R = (1 - share_R) * frequency_R / rope.factor + share_R * frequency_R
    stretched_R = torch.where(wavelength_R > longest, frequency_R / rope.factor, frequency_R)
    is_between_R = (wavelength_R >= shortest) & (wavelength_R <= longest)
    return torch.where(is_between_R, blended_R, stretched_R)


def _yarn(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    """Blends original and stretched frequencies along a ramp over the dimensions. Source: arXiv 2309.00071."""

    def dimension(num_rotations: float) -> float:
        return head_dim * math.log(rope.original_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp_R = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_R = 1 - ramp_R
    stretched_R = 1.0 / (rope.factor * rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    return stretched_R * (1 - kept_R) + frequency_R * kept_R


def _default(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    return frequency_R


_SCALINGS: Final[Mapping[str, Callable[[RopeConfig, int, Tensor], Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


# --- attention ------------------------------------------------------------------------------------------------

# Shapes: T tokens in the packed batch, B rows, Q query tokens per row, H query heads, K kv heads, N = H + 2 K,
#         G = H / K, D head dim, P blocks per row, C tokens per block, S = P * C positions, R = G * Q queries of one kv
#         head, U tokens that are read.

# On a CPU the queries of a long chunk are computed in tiles, each with the keys that any of its queries sees. torch's
# kernel works on 64 queries at a time, and with a mask it would also compute masked positions.
_TILE_QUERIES: Final = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention parameters of a model, or of one rank's part of it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    softcap: float | None
    windows: tuple[int | None, ...]  # each once
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
            windows=tuple(dict.fromkeys(config.windows)),
            ropes=ropes,
            frequencies=tuple(inverse_frequencies(rope, config.head_dim).to(like.device) for rope in ropes),
            rope_of_layer=tuple(ropes.index(rope) for rope in config.ropes),
        )


class AttentionBackend(Protocol):
    """One step's attention."""

    token_T: Tensor
    read_U: Tensor | None  # tokens whose final state is needed; None: all, in order

    def forward(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        """Stores the layer's keys and values, and returns the attention output of every token, [T, H * D]."""
        ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What differs between two steps of as many tokens; the address of the attention's tasks is the last."""

    addresses: tuple[int, ...]
    num_tasks: int
    work: int


MakeAttention = Callable[[PackedBatch, OnLayer | None], AttentionBackend]


@final
class EagerAttention:
    """The rows of `batch.short` use `kernel`; blocks of the others are gathered for torch's attention."""

    def __init__(
        self,
        batch: PackedBatch,
        pool: TorchPool,
        heads: Heads,
        kernel: PagedAttention | None = None,
        on_layer: OnLayer | None = None,
    ) -> None:
        """`on_layer` is called with the number of layers that have issued their writes."""
        self.token_T, self.read_U = batch.token_T, batch.read_U
        self._batch, self._pool, self._heads, self._kernel, self._on_layer = batch, pool, heads, kernel, on_layer
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}  # by rope
        short = batch.short
        self._paged = None if short is None or kernel is None else kernel.plan(short.tables, short.starts, short.counts)
        self._contexts = [contexts_of(group, pool, heads) for group in batch.groups]
        pool.clear(batch.fresh_blocks)

    def forward(self, index: int, layer: LayerWeights, qkv_TND: Tensor) -> Tensor:
        heads = self._heads
        q_THD, k_TKD, v_TKD = qkv_TND.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        norms = None
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            norms = Norms(layer.q_norm_D, layer.k_norm_D, heads.norm_eps)
        q_THD = self.place(index, q_THD, k_TKD, v_TKD, self._rotation(heads.rope_of_layer[index], q_THD.dtype), norms)
        if self._on_layer is not None:
            self._on_layer(index + 1)
        return self.attend(index, q_THD, layer.window)

    def inputs(self) -> StepInputs | None:
        """None if the step is not computed by kernels alone."""
        batch, plan = self._batch, self._paged
        if plan is None or batch.groups or self.read_U is not None or self._on_layer is not None:
            return None
        angles = [x for rope in range(len(self._heads.ropes)) for x in self._rotation(rope, torch.float32)]
        tensors = (*angles, batch.block_T, batch.offset_T)
        addresses = (*(x.data_ptr() for x in tensors), plan.tables.ctypes.data, plan.tasks.ctypes.data)
        return StepInputs(addresses, len(plan.tasks), plan.work)

    def place(
        self,
        index: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: Norms | None = None,
    ) -> Tensor:
        """Stores the step's rotated keys and its values, and returns the rotated queries."""
        batch = self._batch
        if self._kernel is not None:
            return self._kernel.place(index, q_THD, k_TKD, v_TKD, *cos_sin, batch.block_T, batch.offset_T, norms)
        if norms is not None:
            q_THD, k_TKD = ops.rms_norm(q_THD, norms.q_D, norms.eps), ops.rms_norm(k_TKD, norms.k_D, norms.eps)
        self._pool.write(index, rotate(k_TKD, *cos_sin), v_TKD, batch.block_T, batch.offset_T)
        return rotate(q_THD, *cos_sin)

    def attend(self, index: int, q_THD: Tensor, window: int | None) -> Tensor:
        """The attention output of every token of the step, [T, H * D]."""
        parts, scale, softcap = [], self._heads.scale, self._heads.softcap
        if self._kernel is not None and self._paged is not None:
            q_paged_THD = q_THD[: self._paged.num_tokens]
            parts.append(self._kernel.attend(index, q_paged_THD, self._paged, window, scale, softcap))
        for group, contexts in zip(self._batch.groups, self._contexts, strict=True):
            parts.append(attend(self._pool, index, rows_of(q_THD, group), contexts[window], scale, softcap))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _rotation(self, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if rope not in self._rotations:
            factor = self._heads.ropes[rope].attention_factor
            dtype = dtype if self._kernel is None else torch.float32
            self._rotations[rope] = rotation(self._heads.frequencies[rope], factor, self._batch.position_T, dtype)
        return self._rotations[rope]


def rows_of(q_THD: Tensor, group: RowGroup) -> Tensor:
    """The group's queries, [B, Q, H, D]."""
    q_group_THD = q_THD[group.first : group.first + group.num_tokens]
    return q_group_THD.view(len(group.starts), -1, *q_THD.shape[1:])


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of each row, the gathered positions that any of them sees, and the mask."""

    queries: slice
    keys: slice
    is_seen_BQS: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """The blocks that a group of rows reads, and the positions that each query sees."""

    block_BP: Tensor
    tiles: tuple[Tile, ...]
    # For a single row without a window: its number of positions, including the queries. Flash attention then needs no
    # mask.
    chunk_end: int | None = None


def contexts_of(group: RowGroup, pool: TorchPool, heads: Heads) -> dict[int | None, Context]:
    """By window."""
    size, device = pool.block_size, pool.tensor.device
    return {
        window: make_context(group.tables, group.starts, group.counts[0], window, size, device)
        for window in heads.windows
    }


def make_context(
    tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_queries: int,
    window: int | None,
    block_size: int,
    device: torch.device,
) -> Context:
    """The queries of row b are at positions starts[b] .. starts[b] + num_queries - 1, and tables[b] are all its blocks.

    Blocks that lie wholly outside the window are not read. Short rows are padded with one of their own blocks, which is
    masked and has finite values.
    """
    firsts, pages = [], []
    for table, start in zip(tables, starts, strict=True):
        first = 0 if window is None else max(0, start - window + 1) // block_size
        firsts.append(first)
        pages.append(list(table[first : -(-(start + num_queries) // block_size)]))
    num_pages = max(len(page) for page in pages)
    block_BP = to_device([page + page[:1] * (num_pages - len(page)) for page in pages], device)
    first_B1 = to_device(firsts, device)[:, None] * block_size
    key_B1S = (first_B1 + torch.arange(num_pages * block_size, device=device))[:, None]
    query_BQ1 = (to_device(starts, device)[:, None] + torch.arange(num_queries, device=device))[:, :, None]
    is_seen_BQS = key_B1S <= query_BQ1
    if window is not None:
        is_seen_BQS &= key_B1S > query_BQ1 - window
    # In gathered positions: each row's first block begins at 0.
    shifts = [start - first * block_size for start, first in zip(starts, firsts, strict=True)]
    size = _TILE_QUERIES if device.type == "cpu" else num_queries
    tiles = []
    for at in range(0, num_queries, size):
        queries = slice(at, min(at + size, num_queries))
        oldest = 0 if window is None else max(0, min(shifts) + at - window + 1)
        keys = slice(oldest, max(shifts) + queries.stop)
        tiles.append(Tile(queries, keys, is_seen_BQS[:, queries, keys]))
    is_chunk = len(starts) == 1 and window is None and num_queries > 1
    return Context(block_BP, tuple(tiles), starts[0] + num_queries if is_chunk else None)


def attend(
    pool: TorchPool,
    layer: int,
    q_BQHD: Tensor,
    context: Context,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(scale * q k)) v over the context, [B * Q, H * D].

    `scale` None means 1 / sqrt(D). cap(x) is softcap * tanh(x / softcap), or x if softcap is None. The G query heads
    that share a kv head are folded into its query axis, so that no kernel repeats keys and values.
    """
    num_rows, num_queries, num_heads, head_dim = q_BQHD.shape
    k_BKSD, v_BKSD = pool.read(layer, context.block_BP, q_BQHD.dtype)
    if q_BQHD.is_cuda and softcap is None and context.chunk_end is not None:
        return attend_chunk(q_BQHD, k_BKSD, v_BKSD, context.chunk_end, scale)
    num_kv_heads = k_BKSD.shape[1]
    group = num_heads // num_kv_heads
    out_BQHD = torch.empty_like(q_BQHD, memory_format=torch.contiguous_format)
    for tile in context.tiles:
        count, keys = tile.queries.stop - tile.queries.start, tile.keys
        grouped = (num_rows, count, num_kv_heads, group, head_dim)
        q_BKRD = q_BQHD[:, tile.queries].view(grouped).permute(0, 2, 3, 1, 4).flatten(2, 3)
        is_seen_B1RS = tile.is_seen_BQS[:, None, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
        out_BKRD = _attend(q_BKRD, k_BKSD[:, :, keys], v_BKSD[:, :, keys], is_seen_B1RS, scale, softcap)
        out_BKGQD = out_BKRD.view(num_rows, num_kv_heads, group, count, head_dim)
        out_BQHD[:, tile.queries].view(grouped).copy_(out_BKGQD.permute(0, 3, 1, 2, 4))
    return out_BQHD.view(num_rows * num_queries, num_heads * head_dim)


def attend_chunk(q_1QHD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, end: int, scale: float | None) -> Tensor:
    """One row's last Q of `end` positions, each seeing all up to itself: [Q, H * D].

    Flash attention supports this causal mask, so a chunk costs only its products and no [Q, S] mask is stored.
    """
    num_queries = q_1QHD.shape[1]
    q_1HQD, k_1KSD, v_1KSD = q_1QHD.transpose(1, 2), k_1KSD[:, :, :end], v_1KSD[:, :, :end]
    if q_1QHD.is_cuda and is_for_flash(q_1QHD):
        return flash_chunk(q_1HQD, k_1KSD, v_1KSD, scale)
    from torch.nn.attention.bias import causal_lower_right  # takes two seconds to import, and is needed for CUDA only

    mask: Any = causal_lower_right(num_queries, end)
    out_1HQD = F.scaled_dot_product_attention(q_1HQD, k_1KSD, v_1KSD, mask, scale=scale, enable_gqa=True)
    return out_1HQD.transpose(1, 2).reshape(num_queries, -1)


def is_for_flash(q: Tensor) -> bool:
    head_dim = q.shape[-1]
    return q.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def flash_chunk(q_1HQD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, scale: float | None) -> Tensor:
    """`attend_chunk` by flash attention and nothing else: [Q, H * D].

    On Hopper torch may prefer cuDNN, which needs 25 to 40 ms of host time to plan each new pair of lengths. The causal
    mask of this operation is aligned to the lower right corner.
    """
    out_1HQD: Tensor
    out_1HQD, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_1HQD, k_1KSD, v_1KSD, 0.0, True, scale=scale)
    return out_1HQD.transpose(1, 2).reshape(q_1HQD.shape[2], -1)


def _attend(
    q_BKRD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, is_seen_B1RS: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q_BKRD, k_BKSD, v_BKSD, attn_mask=is_seen_B1RS, scale=scale)
    score_BKRS = (q_BKRD @ k_BKSD.mT).float() * (q_BKRD.shape[-1] ** -0.5 if scale is None else scale)
    score_BKRS = (score_BKRS / softcap).tanh() * softcap
    weight_BKRS = score_BKRS.masked_fill(~is_seen_B1RS, -torch.inf).softmax(-1)
    return weight_BKRS.to(v_BKSD.dtype) @ v_BKSD
