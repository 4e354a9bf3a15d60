"""Creates the engine of a worker's config. torch is imported only when a model is loaded."""

from __future__ import annotations

from typing import Final

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.toy import CELL_BYTES, MARKS, ToyEngine
from pdserve.model_source import TOY_MODELS

TOY_CONTEXT_TOKENS: Final = 8192
TOY_MAX_BLOCKS: Final = 8192  # size of its pool, independent of the available memory


def load_engine(config: WorkerConfig, role: Role) -> Engine:
    """The engine of `config`, ready for steps.

    `toy` gives the same tokens on every worker. With `toy-marked`, prefill workers mark the cells that they write.
    Raises ModelError if the folder cannot be served.
    """
    if config.model in TOY_MODELS:
        if config.tensor_parallel > 1:
            raise ConfigError("tensor_parallel", config.tensor_parallel, "1: a toy has nothing to divide")
        return _toy(config, role)
    if config.tensor_parallel > 1:
        from pdserve.engine.ranks.leader import open_parallel_engine

        return open_parallel_engine(config, role)
    from pdserve.engine.load.build_engine import open_engine

    return open_engine(config, role)


def toy_blocks(config: WorkerConfig) -> int:
    if config.kv_blocks or not config.kv_memory_bytes:
        return config.kv_blocks or TOY_MAX_BLOCKS
    return max(1, min(TOY_MAX_BLOCKS, config.kv_memory_bytes // (CELL_BYTES * config.block_size)))


def _toy(config: WorkerConfig, role: Role) -> ToyEngine:
    is_marked = config.model == "toy-marked"
    return ToyEngine(
        num_blocks=toy_blocks(config),
        block_size=config.block_size,
        max_context_tokens=config.max_context_tokens or TOY_CONTEXT_TOKENS,
        role_mark=MARKS[role] if is_marked else 0,
        is_marked=is_marked,
        step_s=config.toy_step_s,
    )
