"""Checks before the start whether this host has cores and memory for the workers, and how many would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.config import WorkerConfig
from pdserve.engine.checkpoint_sizes import check_sizes
from pdserve.engine.config import ModelConfig, read_config
from pdserve.engine.host_limits import free_bytes, usable_cores
from pdserve.engine.load import toy_blocks
from pdserve.engine.memory_plan import PoolUnit, host_blocks
from pdserve.engine.rounding import INT4_BYTES
from pdserve.engine.safetensors_file import Checkpoint, open_checkpoint
from pdserve.engine.toy import CELL_BYTES
from pdserve.launch.spec import ClusterSpec, worker_config
from pdserve.model_source import TOY_MODELS

_TOY_PROCESS_BYTES: Final = 60 * 2**20  # resident memory of interpreter and libraries after a start
_PROCESS_BYTES: Final = 300 * 2**20
# bytes per stored weight; other dtypes take one byte, and an int32 packs eight weights
_ITEM_BYTES: Final = {"F64": 8.0, "F32": 4.0, "BF16": 2.0, "F16": 2.0, "I32": 0.5}
_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """An upper bound of one worker's memory on this host, in bytes."""

    weights: int
    pool: int
    process: int
    threads: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.process


def capacity_warnings(spec: ClusterSpec) -> list[str]:
    """Reads the model's headers. Raises ModelError if the folder cannot be served."""
    model = None if spec.model in TOY_MODELS else read_config(Path(spec.model))
    configs = [worker_config(spec, index)[1] for index in range(spec.prefill + spec.decode)]
    stored = None if model is None or configs[0].load != "auto" else open_checkpoint(Path(spec.model))
    if model is not None and stored is not None:
        check_sizes(model, stored.tensors)
    has_gpus, free = bool(spec.gpus), free_bytes()
    footprints = [footprint(one, model, stored, free, is_on_cpu=one.device == "cpu" or not has_gpus) for one in configs]
    return warnings(footprints, cores=usable_cores(), free=free)


def warnings(footprints: Sequence[Footprint], *, cores: int, free: int | None) -> list[str]:
    """Pure."""
    found = []
    count, threads = len(footprints), sum(one.threads for one in footprints)
    workers = _counted(count, "worker")
    if threads > cores:
        fit = min(count, cores)
        on = f"{_counted(threads, 'thread')} on {_counted(cores, 'core')}"
        each = _counted(max(1, cores // fit), "thread")
        found.append(
            f"WARNING: {workers} compute with {on}, so steps wait for each other: "
            f"{_counted(fit, 'worker')} with {each} each would fit"
        )
    needed = sum(one.total for one in footprints)
    if free is not None and needed > free:
        fixed = sum(one.total - one.pool for one in footprints)
        advice = f"{_counted(_num_fitting(footprints, free), 'worker')} would fit"
        if free > fixed:
            advice += f", or all with pools of {(free - fixed) // count} bytes (worker.kv_memory_bytes)"
        found.append(
            f"WARNING: {workers} may take {_gib(needed)} for weights, KV pools and themselves, and {_gib(free)} are "
            f"free: {advice}"
        )
    return found


def footprint(
    config: WorkerConfig, model: ModelConfig | None, stored: Checkpoint | None, free: int | None, *, is_on_cpu: bool
) -> Footprint:
    """An upper bound: pools count as full, although their pages are allocated only when used.

    A pool without a set size is computed from the `free` bytes, as in the worker, which may count fewer for weights.
    """
    threads = max(1, config.threads) * config.ranks_here if is_on_cpu else 1
    if model is None:
        pool = toy_blocks(config) * CELL_BYTES * config.block_size
        return Footprint(weights=0, pool=pool, process=_TOY_PROCESS_BYTES, threads=threads)
    process = _PROCESS_BYTES * config.ranks_here
    if not is_on_cpu:
        return Footprint(weights=0, pool=0, process=process, threads=threads)
    weights = 0 if stored is None else weight_bytes(config, stored)
    pool = config.kv_blocks * block_bytes(config, model) or config.kv_memory_bytes
    if not pool:
        unit = PoolUnit(block_bytes=block_bytes(config, model), block_size=config.block_size)
        pool = host_blocks(free, weights, unit) * unit.block_bytes
    return Footprint(weights=weights, pool=pool, process=process, threads=threads)


def block_bytes(config: WorkerConfig, model: ModelConfig) -> int:
    """Bytes of one KV block on a CPU, without alignment."""
    rows = model.num_layers * 2 * config.block_size * model.num_kv_heads
    if config.kv_dtype != "auto":
        return rows * (model.head_dim + _SCALE_BYTES)
    return rows * model.head_dim * (2 if config.dtype in ("bfloat16", "int8", "int4") else 4)


def weight_bytes(config: WorkerConfig, stored: Checkpoint) -> int:
    """One byte per weight on a CPU for int8; four for float32, and for auto, which may widen the stored weights.

    Both int4 and auto keep what is stored in 4 bits. int4 rounds the rest of such a checkpoint to int8.
    """
    is_4_bit = any(one.dtype == "I32" for one in stored.tensors.values())
    int4 = 1.0 if is_4_bit else INT4_BYTES
    kept = {"int8": 1.0, "bfloat16": 2.0, "int4": int4}.get(config.dtype, 4.0)
    packed = INT4_BYTES if config.dtype in ("int4", "auto") else kept
    return math.ceil(
        sum(
            one.num_bytes / _ITEM_BYTES.get(one.dtype, 1.0) * (packed if one.dtype == "I32" else kept)
            for one in stored.tensors.values()
        )
    )


def _num_fitting(footprints: Sequence[Footprint], free: int) -> int:
    left, count = free, 0
    for one in footprints:
        left -= one.total
        count += left >= 0
    return count


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'s' if count > 1 else ''}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
