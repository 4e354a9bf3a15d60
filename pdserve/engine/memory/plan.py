"""Divides a worker's memory and sizes its KV pool. Pure: computes a plan from sizes in bytes.

A GPU is used by its workers only: the pool takes `gpu_memory_share` less the weights, the measured peak of activations,
the decode graphs and the driver's memory. A host is shared with other programs and workers, so there the pool is an
eighth of the memory that is free beside the weights. Its pages are allocated when they are used.

Batches, chunks and speculation have defaults by device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Final

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role

MIB: Final = 2**20
GIB: Final = 2**30
HOST_PARTS: Final = 8  # a worker's pool is this fraction of the free memory, because a laptop runs several workers
MAX_HOST_BYTES: Final = 8 * GIB
MAX_HOST_BLOCKS: Final = 65_536  # limit, because the allocator keeps an entry for each
UNKNOWN_HOST_BYTES: Final = 512 * MIB  # if the free memory is unknown
MAX_RUNTIME_BYTES: Final = 2 * GIB  # limit for context, kernels and cuBLAS workspaces; more belongs to other processes
_GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The sizes of the parts of a worker's memory. On a host `total` is what was free; a part that is not measured is
    0."""

    device: str
    total: int
    usable: int
    weights: int
    activations: int = 0
    graphs: int = 0
    runtime: int = 0
    kv_pool: int
    kv_tokens: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def plan_from_json(text: str) -> MemoryPlan | None:
    """None if the value is not a plan."""
    try:
        return MemoryPlan(**json.loads(text))
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Measurements of one device; `free` was measured with only weights and runtime of this worker."""

    device: str
    total: int
    free: int
    weights: int
    activations: int
    graphs: int
    runtime: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUnit:
    """Rounds the pool down to whole blocks."""

    block_bytes: int
    block_size: int


def explicit_blocks(kv_blocks: int, kv_memory_bytes: int, unit: PoolUnit) -> int | None:
    """The size in the settings; None if they leave it to the device. Raises ConfigError below one block."""
    if kv_blocks:
        return kv_blocks
    if not kv_memory_bytes:
        return None
    if kv_memory_bytes < unit.block_bytes:
        raise ConfigError("kv_memory_bytes", kv_memory_bytes, f"at least {unit.block_bytes}: one block of this model")
    return kv_memory_bytes // unit.block_bytes


def host_blocks(free: int | None, weights: int, unit: PoolUnit) -> int:
    """Number of blocks of a host's pool. Raises ConfigError if there is no room for one."""
    room = UNKNOWN_HOST_BYTES if free is None else min(max(free - weights, 0) // HOST_PARTS, MAX_HOST_BYTES)
    if room < unit.block_bytes:
        raise ConfigError(
            "model",
            f"{weights / _GB:.2f} GB of weights and {room / _GB:.2f} GB for KV",
            f"more free memory, or a kv_memory_bytes of at least {unit.block_bytes}: one block of this model",
        )
    return min(room // unit.block_bytes, MAX_HOST_BLOCKS)


def device_blocks(use: DeviceUse, share: float, unit: PoolUnit) -> int:
    """Number of blocks of a GPU's pool. Raises ConfigError, naming every part, if there is no room for one."""
    usable = int(use.total * share)
    # Another process may hold more of the device than 1 - share.
    room = min(usable - use.weights - use.runtime, use.free) - use.activations - use.graphs
    if room < unit.block_bytes:
        parts = f"{use.weights / _GB:.2f} GB of weights, {use.activations / _GB:.2f} of activations, "
        parts += f"{use.graphs / _GB:.2f} of graphs and {use.runtime / _GB:.2f} of runtime"
        raise ConfigError(
            "gpu_memory_share",
            f"{share:g} of {use.total / _GB:.2f} GB, {use.free / _GB:.2f} GB of it free beside the weights",
            f"room for {parts} and a KV block: a larger share, a smaller max_batch or max_batch_tokens, dtype fp8, "
            "or more tensor_parallel ranks",
        )
    return room // unit.block_bytes


def device_plan(use: DeviceUse, share: float, num_blocks: int, unit: PoolUnit) -> MemoryPlan:
    return MemoryPlan(
        device=use.device,
        total=use.total,
        usable=int(use.total * share),
        weights=use.weights,
        activations=use.activations,
        graphs=use.graphs,
        runtime=use.runtime,
        kv_pool=num_blocks * unit.block_bytes,
        kv_tokens=num_blocks * unit.block_size,
    )


def plain_plan(device: str, free: int | None, weights: int, num_blocks: int, unit: PoolUnit) -> MemoryPlan:
    """For a host, or for a device whose pool size is a setting: only weights and pool are known."""
    return MemoryPlan(
        device=device,
        total=free or 0,
        usable=free or 0,
        weights=weights,
        kv_pool=num_blocks * unit.block_bytes,
        kv_tokens=num_blocks * unit.block_size,
    )


def runtime_bytes(total: int, free: int, reserved: int) -> int:
    """Memory of this process outside its allocator. Memory of other processes on the device cannot be separated, so the
    number is bounded."""
    return min(max(total - free - reserved, 0), MAX_RUNTIME_BYTES)


def graph_bytes(before: int, after: Sequence[int], num_graphs: int) -> int:
    """The memory of all graphs, estimated from the memory reserved before and after each of the first captures, largest
    first.

    The first includes buffers that all share. Each further one counts as the largest one measured.
    """
    if not after:
        return 0
    steps = [now - then for then, now in pairwise(after)]
    return max(0, after[0] - before) + max(0, num_graphs - 1) * max([0, *steps])


# --- defaults by device ---------------------------------------------------------------------------------------
# A step reads the weights once for any number of rows, so a GPU's batches and chunks are larger than a CPU's.
# Speculation is off on a GPU, because a step with drafts cannot be launched before the results of the previous step
# were read.

GPU_BATCH: Final = 256
CPU_BATCH: Final = 64
GPU_PREFILL_CHUNK: Final = 2048
CHUNK: Final = 512  # also for a decode worker on a GPU, because chunks delay the decode rows in the same step


def with_device_defaults(config: WorkerConfig, role: Role, *, is_gpu: bool) -> WorkerConfig:
    """`config` with a value for every setting that was left to the device. Explicit settings are unchanged."""
    chunk = GPU_PREFILL_CHUNK if is_gpu and role is Role.PREFILL else CHUNK
    speculation = config.speculation
    if speculation == "auto":
        speculation = "off" if is_gpu else "ngram"
    return replace(
        config,
        max_batch=config.max_batch or (GPU_BATCH if is_gpu else CPU_BATCH),
        max_batch_tokens=config.max_batch_tokens or chunk,
        speculation=speculation,
    )
