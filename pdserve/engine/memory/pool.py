"""Memory of all KV blocks: one allocation, block-major, so that a block is one run of bytes over all layers.

float32 and bfloat16 blocks hold keys and values unchanged. An int8 or fp8 (e4m3) block holds them rounded to a scale
for each token and kv head, followed by the scales, so a block is still one run of bytes. Attention reads the rounded
values, even in the chunk that wrote them. So a position's result is the same whether its context was computed in one
chunk or in many, on this or another worker.

Within a layer's keys or values, a token's heads are contiguous. With `heads_first`, a head's tokens are contiguous, so
attention, which reads one head at a time, reads one run of bytes of each block.
"""

# Shapes: N blocks, L layers, C tokens per block, K kv heads, D head dim; 2 is keys, then values.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError, InternalError
from pdserve.engine.memory.host import HostMemory

# the value to which a row's largest magnitude is scaled; -128 is not used
_MOST: Final = {torch.int8: 127, torch.float8_e4m3fn: 448}
_LEAST: Final = 2.0**-120  # below it a row becomes zero: 127 / largest must be finite
_SCALE_BYTES: Final = 4  # float32
# alignment of scaled blocks, so that their scales can be read as float32 and do not share cache lines
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The contents and size of one block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the stored keys and values
    heads_first: bool = False  # the order in memory is [K, C, D]; otherwise [C, K, D]

    @property
    def is_int8(self) -> bool:
        return self.dtype == torch.int8

    @property
    def is_scaled(self) -> bool:
        return self.dtype in _MOST

    @property
    def layout(self) -> str:
        """The name of the layout; workers with incompatible layouts cannot exchange blocks."""
        order = "-heads" if self.heads_first else ""
        rounding = ("-int8" if self.is_int8 else "-fp8") if self.is_scaled else ""
        return f"block-major{order}{rounding}.v1"

    @property
    def num_scales(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads

    @property
    def data_bytes(self) -> int:
        """Bytes of keys and values; a scaled block's scales follow them, at a multiple of 64."""
        num_bytes = self.num_scales * self.head_dim * self.dtype.itemsize
        return _round_up(num_bytes) if self.is_scaled else num_bytes

    @property
    def block_bytes(self) -> int:
        return self.data_bytes + (_round_up(self.num_scales * _SCALE_BYTES) if self.is_scaled else 0)


@final
class TorchPool:
    """`tensor` is [N, L, 2, C, K, D], and `scales`, of a scaled pool, [N, L, 2, C, K]: views, in whichever order the
    memory is.

    `raw` is the whole pool as bytes, [N, block_bytes]. On the CPU `buffer` is the same memory. If tensor-parallel ranks
    share the memory, `heads` are the blocks' heads of this rank, and K counts only them.
    """

    runs_per_block = 1

    def __init__(
        self,
        *,
        num_blocks: int,
        shape: BlockShape,
        device: torch.device,
        memory: HostMemory | None = None,
        heads: range | None = None,
    ) -> None:
        """`memory` None: the pool allocates its memory. `heads` None: all heads."""
        self.shape = shape
        self.heads = range(shape.num_kv_heads) if heads is None else heads
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.block_bytes = shape.block_bytes
        self._buffer: memoryview | None = None
        self.descriptor: int | None = None
        self.is_on_host = device.type == "cpu"
        if device.type == "cpu":
            memory = memory or HostMemory(num_blocks * self.block_bytes)
            self._memory = memory  # keeps the descriptor
            self._buffer, self.descriptor = memory.buffer, memory.descriptor
            self.raw = torch.frombuffer(memory.buffer, dtype=torch.uint8).view(num_blocks, self.block_bytes)
        else:
            self.raw = device_blocks(num_blocks, self.block_bytes, device)
        self.tensor = self._rows(self.raw.view(shape.dtype)[:, : shape.num_scales * shape.head_dim], shape.head_dim)
        self.scales: Tensor | None = None
        if shape.is_scaled:
            first = shape.data_bytes // _SCALE_BYTES
            scales = self.raw.view(torch.float32)[:, first : first + shape.num_scales]
            self.scales = self._rows(scales, 1)[..., 0]

    def _rows(self, flat: Tensor, row_size: int) -> Tensor:
        """[N, L, 2, C, K, row_size] of this rank's heads."""
        shape = self.shape
        order = (shape.block_size, shape.num_kv_heads)
        rows: Tensor = flat.unflatten(
            1, (shape.num_layers, 2, *(order[::-1] if shape.heads_first else order), row_size)
        )
        return (rows.transpose(3, 4) if shape.heads_first else rows)[..., self.heads.start : self.heads.stop, :]

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise InternalError(f"the KV pool lies on {self.tensor.device}: it has no host buffer")
        return self._buffer

    def seal(self) -> None:
        """Called after every process that may write has mapped the memory."""
        self._memory.seal()
        self.descriptor = self._memory.descriptor

    def clear(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Clears the unused part of newly assigned blocks: (block, number of positions that the step fills).

        Attention reads whole blocks and gives positions after the end the weight 0, but 0 * NaN from a previous request
        would be NaN. Clearing also keeps one request's KV out of the unused part of a block that is sent. The part that
        the step fills is not cleared: if a step is repeated, some of its layers may be on their way to a receiver.
        """
        for block, num_filled in blocks:
            self.tensor[block, :, :, num_filled:].zero_()
            if self.scales is not None:
                self.scales[block, :, :, num_filled:].zero_()

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, block_T: Tensor, offset_T: Tensor) -> None:
        """Stores the keys and values of a step's tokens."""
        for part, x_TKD in enumerate((k_TKD, v_TKD)):
            if self.scales is None:
                self.tensor[:, layer, part][block_T, offset_T] = x_TKD.to(self.shape.dtype)
            else:
                rounded_TKD, scale_TK = quantise(x_TKD, self.shape.dtype)
                self.tensor[:, layer, part][block_T, offset_T] = rounded_TKD
                self.scales[:, layer, part][block_T, offset_T] = scale_TK

    def read(self, layer: int, block_BP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of P blocks per row, [B, K, P * C, D] each (K and S strided, D contiguous), in `dtype`."""
        keys, values = (self._read(layer, part, block_BP, dtype) for part in (0, 1))
        return keys, values

    def _read(self, layer: int, part: int, block_BP: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, num_pages = block_BP.shape
        flat = block_BP.reshape(-1)
        x_NCKD = self.tensor[:, layer, part].index_select(0, flat)
        if self.scales is not None:
            x_NCKD = x_NCKD.float() * self.scales[:, layer, part].index_select(0, flat)[..., None]
        shape = (num_rows, num_pages * self.block_size, len(self.heads), self.shape.head_dim)
        x_BSKD: Tensor = x_NCKD.to(dtype).view(shape)
        return x_BSKD.transpose(1, 2)


def quantise(x_TKD: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """int8 or fp8 values and their float32 scales, [T, K]: x is about values * scale; in int8 the error is at most half
    a scale.

    A NaN or an infinity makes the scale NaN or infinite, so that an invalid row stays visible. Only operations that
    round in the same way everywhere are used: kernels.place, gpu.place and kvtransfer.reshape.convert store the same
    bits.
    """
    most = _MOST[dtype]
    x_TKD = x_TKD.float()
    largest_TK = x_TKD.abs().amax(-1)
    inverse_TK = torch.where(largest_TK > _LEAST, torch.full_like(largest_TK, most) / largest_TK, 0)
    scaled_TKD = x_TKD * inverse_TK[..., None]
    # Rounding may give a maximum slightly above 448, which fp8 rounds down; larger values would become NaN.
    rounded_TKD = scaled_TKD.round() if dtype == torch.int8 else scaled_TKD
    return rounded_TKD.nan_to_num(0).to(dtype), largest_TK * (1 / most)


def device_blocks(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, block_bytes] on a GPU, in one allocation. Raises ConfigError without the memory."""
    try:
        return torch.zeros((num_blocks, block_bytes), device=device, dtype=torch.uint8)
    except torch.OutOfMemoryError as error:
        gigabytes = num_blocks * block_bytes / 1e9
        raise ConfigError(
            "kv_blocks",
            f"{num_blocks} blocks of {block_bytes} bytes, {gigabytes:.2f} GB",
            f"fewer, by kv_blocks, kv_memory_bytes or gpu_memory_share: {device} has less memory left",
        ) from error


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
