"""The KV pool of vLLM's layers: our allocation, so that every transport can read and write it, which vLLM divides.

vLLM keeps the caches of all layers in one allocation, and names the order of its dimensions by letters: L layers,
B blocks, H heads, N tokens, C the content of one head and token. If blocks are outermost, a block is one run of bytes
over all layers. If layers are, it is one run per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, final

import torch
from torch.overrides import TorchFunctionMode

from pdserve.core.errors import InternalError
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.pool import device_blocks

# Orders in which a page of one layer and block is one run of bytes, the most useful first.
_OUTERMOST_BLOCKS: Final = ("BLHNC", "BLNHC")
_OUTERMOST_LAYERS: Final = ("LBHNC", "LBNHC")
#: Backends that state only orders with layers outermost, but find blocks by their stride. Tried.
_READS_STRIDES: Final = frozenset({"CPU_ATTN"})
#: Backends that state no order, but view the whole cache of a layer as one matrix.
_VIEWS_LAYERS: Final = frozenset({"CPU_MLA", "AMX_MLA"})


def choose_layout(supported: Sequence[str], backends: Collection[str], *, is_gpu: bool = False) -> str | None:
    """The order of the pool: blocks outermost if the attention backends can read that. None if no order suits: on a GPU
    a block must be one run of bytes (kvtransfer/transports/common/registry.py)."""
    allowed = set(supported)
    if _VIEWS_LAYERS & set(backends):
        allowed -= set(_OUTERMOST_BLOCKS)
    elif set(backends) <= _READS_STRIDES and "LBHNC" in allowed:
        allowed.add("BLHNC")
    orders = _OUTERMOST_BLOCKS if is_gpu else (*_OUTERMOST_BLOCKS, *_OUTERMOST_LAYERS)
    return next((name for name in orders if name in allowed), None)


@final
class VllmPool:
    """`raw` is the whole pool as bytes: [num_blocks, block_bytes], or with one run per layer [runs, num_blocks,
    run_bytes]. On the CPU `buffer` is the same memory."""

    def __init__(self, num_blocks: int, block_bytes: int, runs_per_block: int, device: torch.device) -> None:
        self.num_blocks, self.block_bytes, self.runs_per_block = num_blocks, block_bytes, runs_per_block
        self.is_on_host = device.type == "cpu"
        self.descriptor: int | None = None
        self._buffer: memoryview | None = None
        num_bytes = num_blocks * block_bytes
        if self.is_on_host:
            self._memory = HostMemory(num_bytes)  # keeps the descriptor
            self._buffer, self.descriptor = self._memory.buffer, self._memory.descriptor
            flat = torch.frombuffer(self._buffer, dtype=torch.uint8)
        else:
            flat = device_blocks(num_blocks, block_bytes, device).view(-1)
        runs = [] if runs_per_block == 1 else [runs_per_block]
        self.raw = flat.view(*runs, num_blocks, block_bytes // runs_per_block)

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise InternalError(f"the KV pool lies on {self.raw.device}: it has no host buffer")
        return self._buffer

    def clear(self, blocks: Sequence[int]) -> None:
        """Clears whole blocks, so that attention, which reads whole blocks, meets no NaN of a previous request, and a
        transfer sends nothing of it."""
        if blocks:
            self.raw[..., torch.tensor(blocks, device=self.raw.device), :] = 0

    def give(self, allocate: Callable[[], None], caches: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Calls vLLM's `allocate`, whose one allocation becomes this pool. Raises InternalError unless all `caches` lie
        in it then."""
        with _Instead(self.raw):
            allocate()
        begin = self.raw.untyped_storage().data_ptr()
        if not all(cache.untyped_storage().data_ptr() == begin for cache in caches()):
            raise InternalError("vLLM allocated its KV cache elsewhere than in the worker's pool")


@final
class _Instead(TorchFunctionMode):
    """vLLM allocates all KV with one torch.zeros of bytes, which returns `raw` here."""

    def __init__(self, raw: torch.Tensor) -> None:
        super().__init__()
        self._raw = raw.view(-1).view(torch.int8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._raw.numel(),) and kwargs.get("dtype") == torch.int8:
            return self._raw
        return func(*args, **kwargs)
