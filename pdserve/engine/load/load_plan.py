"""What a rank will load, before any weight is read: its part of the model, the forms of products and KV, the size of
the pool, and whether all of it fits. Pure: what the device and the files say are arguments (`Facts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.cpu.kernels.rounding import INT4_BYTES
from pdserve.engine.interface import EngineSpec
from pdserve.engine.load.checkpoint import Needs
from pdserve.engine.load.device import Precision
from pdserve.engine.load.weights import rounding_beside
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.plan import PoolUnit, explicit_blocks, host_blocks
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.model.config import ModelConfig
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.linear import Rounding
from pdserve.engine.model.parameters import WHOLE, Shard, build_weights, rank_config
from pdserve.engine.sampling.grammars import Grammars
from pdserve.model_source import model_name

_GB: Final = 1e9
_ITEM_BYTES: Final = {"bfloat16": 2, "int8": 1, "fp8": 1, "int4": INT4_BYTES}  # of a weight, by rounding
_STORED: Final = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by kv_dtype; None: as computed


Attention = Literal["paged", "triton", "gathered"]  # the last copies each row's blocks, and then uses torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a plan depends on beside the settings and the model."""

    device: torch.device
    precision: Precision
    free_bytes: int | None  # of the device; None: unknown
    has_triton: bool
    has_paged: bool  # the CPU's kernel for paged attention
    heads_first: bool  # within a block of the pool, a head's tokens are contiguous
    is_measured: bool  # the pool takes the memory that steps with the loaded weights leave
    reads_bfloat16: bool  # products in float32 read the checkpoint's matrices in bfloat16
    weights_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The decisions for one rank."""

    config: WorkerConfig  # `deterministic` is decided where it can be
    facts: Facts
    model: ModelConfig  # of all ranks together
    shard: Shard
    shares_pool: bool  # of whole blocks, in which each rank stores its heads
    attention: Attention
    shape: BlockShape
    weight_bytes: int  # of this rank, at most
    num_blocks: int | None  # None: measured after the weights are loaded

    @property
    def rank_model(self) -> ModelConfig:
        return rank_config(self.model, self.shard)

    @property
    def heads(self) -> range | None:
        """The heads of a shared pool that this rank stores; None: it stores all heads of its pool."""
        kv_heads = self.model.num_kv_heads
        return range(*self.shard.span(kv_heads, kv_heads)) if self.shares_pool else None

    @property
    def unit(self) -> PoolUnit:
        return PoolUnit(block_bytes=self.shape.block_bytes, block_size=self.shape.block_size)

    def spec(self, num_blocks: int) -> EngineSpec:
        """The context limit is the least of the model's, the operator's and the capacity of the pool."""
        config, model, shape = self.config, self.model, self.shape
        pool_shard = WHOLE if self.shares_pool else self.shard
        context_tokens = config.max_context_tokens or model.max_context_tokens
        return EngineSpec(
            model=model_name(config.model),
            weights_hash=self.facts.weights_hash,
            dtype=self.facts.precision.name,
            layout=shape.layout,
            vocab_size=model.vocab_size,
            max_context_tokens=min(context_tokens, num_blocks * config.block_size),
            eos_token_ids=model.eos_token_ids,
            block_size=config.block_size,
            num_blocks=num_blocks,
            block_bytes=shape.block_bytes,
            kv_dtype=str(shape.dtype).removeprefix("torch."),
            kv_layers=shape.num_layers,
            kv_heads=model.num_kv_heads,
            kv_head_dim=shape.head_dim,
            tp_degree=pool_shard.size,
            tp_rank=pool_shard.rank,
            # The scales of all layers are stored after the values.
            num_layers=1 if shape.is_scaled else shape.num_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """A rank whose weights are loaded, without its pool."""

    plan: LoadPlan
    model: Decoder
    grammars: Grammars
    memory: HostMemory | None  # of a shared pool
    is_alone: bool  # it is the only rank

    def pool(self, num_blocks: int) -> TorchPool:
        """Raises ConfigError if the ranks of a shared pool have planned pools of different sizes."""
        plan = self.plan
        num_bytes = num_blocks * plan.shape.block_bytes
        if self.memory is not None and len(self.memory.buffer) != num_bytes:
            raise ConfigError("kv_blocks", num_blocks, f"a pool of {len(self.memory.buffer)} bytes, as the leader's is")
        return TorchPool(
            num_blocks=num_blocks, shape=plan.shape, device=plan.facts.device, memory=self.memory, heads=plan.heads
        )


def plan_rank(config: WorkerConfig, model: ModelConfig, shard: Shard, facts: Facts, *, shares_pool: bool) -> LoadPlan:
    """Raises ConfigError if the settings do not suit the model or the device, or if it does not fit."""
    precision = facts.precision
    rank_model = rank_config(model, shard)
    # The CPU's kernel cannot read fp8, so such a pool is gathered, which is slower.
    is_paged = facts.has_paged and config.kv_dtype != "fp8" and not facts.heads_first
    if config.deterministic == "on" and not is_paged:
        raise ConfigError("deterministic", "on", "off, or a CPU with numba and kv_dtype not fp8")
    if config.deterministic == "auto" and is_paged and precision.rounding == "bfloat16":
        config = replace(config, deterministic="on")
    attention: Attention = "paged" if is_paged else "gathered"
    if facts.has_triton and takes_blocks(config.block_size):
        attention = "triton"
    shape = block_shape(config, model if shares_pool else rank_model, precision, heads_first=facts.heads_first)
    num_bytes = weight_bytes(
        model, precision.compute, rounding=precision.rounding, shard=shard, halves_float32=facts.reads_bfloat16
    )
    # Ranks on one host share its memory.
    num_together = 1 if facts.device.type == "cuda" else min(config.ranks_here, shard.size)
    unit = PoolUnit(block_bytes=shape.block_bytes, block_size=shape.block_size)
    num_blocks = explicit_blocks(config.kv_blocks, config.kv_memory_bytes, unit)
    if num_blocks is None and not facts.is_measured:
        num_blocks = host_blocks(facts.free_bytes, num_bytes * num_together, unit)
    if config.max_context_tokens > model.max_context_tokens:
        raise ConfigError(
            "max_context_tokens",
            config.max_context_tokens,
            f"at most {model.max_context_tokens}, the model's own limit",
        )
    check_fits(num_bytes * num_together, (num_blocks or 1) * shape.block_bytes, facts.free_bytes)
    return LoadPlan(
        config=config,
        facts=facts,
        model=model,
        shard=shard,
        shares_pool=shares_pool,
        attention=attention,
        shape=shape,
        weight_bytes=num_bytes,
        num_blocks=num_blocks,
    )


def takes_blocks(block_size: int) -> bool:
    """Whether Triton's kernels take blocks of so many tokens."""
    return block_size >= 8 and block_size & (block_size - 1) == 0


def block_shape(
    config: WorkerConfig, model: ModelConfig, precision: Precision, *, heads_first: bool = False
) -> BlockShape:
    if config.kv_dtype not in _STORED:
        expected = f"one of {', '.join(_STORED)}; the others are for the engine vllm"
        raise ConfigError("kv_dtype", config.kv_dtype, expected)
    return BlockShape(
        num_layers=model.num_layers,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=_STORED[config.kv_dtype] or precision.kv,
        heads_first=heads_first,
    )


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    rounding: Rounding,
    shard: Shard = WHOLE,
    halves_float32: bool = False,
) -> int:
    """An upper bound of the memory of the weights of a rank's part of the model.

    `halves_float32` is `Facts.reads_bfloat16`.
    """
    needs = Needs(config.quantisation, shard)
    build_weights(config, needs)
    item_bytes = _ITEM_BYTES.get(rounding, dtype.itemsize)
    other_bytes = _ITEM_BYTES.get(rounding_beside(config.quantisation, rounding), item_bytes)
    num_other = needs.num_matrix_weights - needs.num_packed_weights
    in_matrices = math.ceil(needs.num_packed_weights * item_bytes + num_other * other_bytes)
    saved = needs.num_panel_weights * (dtype.itemsize - torch.bfloat16.itemsize) if halves_float32 else 0
    return in_matrices - saved + needs.num_table_weights * dtype.itemsize


def check_fits(num_weight_bytes: int, num_kv_bytes: int, num_available_bytes: int | None) -> None:
    """Raises ConfigError with both numbers. None: unknown. A process that is killed while it loads gives no error
    message, so this check comes first."""
    if num_available_bytes is not None and num_weight_bytes + num_kv_bytes > num_available_bytes:
        raise ConfigError(
            "model",
            f"{num_weight_bytes / _GB:.2f} GB of weights and {num_kv_bytes / _GB:.2f} GB of KV",
            f"at most the {num_available_bytes / _GB:.2f} GB that are free: a smaller kv_memory_bytes, dtype int8, "
            "or a machine with more memory",
        )
