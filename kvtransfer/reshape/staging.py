"""Host memory for blocks between two formats. It is a pool like an engine's, so every transport can use it."""

from __future__ import annotations

from typing import final

from pdserve.core.kv_shape import BlockForm
from pdserve.engine.host_memory import HostMemory


@final
class StagingPool:
    is_on_host = True

    def __init__(self, form: BlockForm, num_blocks: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, form.block_bytes
        self._memory = HostMemory(num_blocks * form.block_bytes)  # keeps the descriptor
        self.buffer, self.descriptor = self._memory.buffer, self._memory.descriptor
