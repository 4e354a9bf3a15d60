"""Divides a worker's memory and sizes its KV pool. Pure: sizes in bytes come in, a plan comes out.

A GPU belongs to its workers: the pool takes what `gpu_memory_share` leaves after the weights, the measured peak of
activations, the decode graphs and what the driver holds. A host is shared with other programs and other workers, so
there the pool is an eighth of what is free beside the weights. Its pages are touched only as they come into use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final

from pdserve.core.errors import ConfigError

MIB: Final = 2**20
GIB: Final = 2**30
HOST_PARTS: Final = 8  # a worker's pool is one of as many parts of free memory: a laptop runs several workers
MOST_HOST_BYTES: Final = 8 * GIB
MOST_HOST_BLOCKS: Final = 65_536  # the allocator keeps an entry for each
UNKNOWN_HOST_BYTES: Final = 512 * MIB  # where the system does not say what is free
MOST_RUNTIME_BYTES: Final = 2 * GIB  # context, kernels and cuBLAS workspaces; beyond it, another process's memory
_GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What each part of a worker's memory takes. On a host `total` is what was free; 0 where a part is not measured."""

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
    """None for what is no plan."""
    try:
        return MemoryPlan(**json.loads(text))
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What was measured of one device; `free` while weights and runtime are there and nothing else of this worker."""

    device: str
    total: int
    free: int
    weights: int
    activations: int
    graphs: int
    runtime: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUnit:
    """The pool is made of whole blocks."""

    block_bytes: int
    block_size: int


def explicit_blocks(kv_blocks: int, kv_memory_bytes: int, unit: PoolUnit) -> int | None:
    """What the settings ask for; None where they leave it to the device. Raises ConfigError below one block."""
    if kv_blocks:
        return kv_blocks
    if not kv_memory_bytes:
        return None
    if kv_memory_bytes < unit.block_bytes:
        raise ConfigError("kv_memory_bytes", kv_memory_bytes, f"at least {unit.block_bytes}: one block of this model")
    return kv_memory_bytes // unit.block_bytes


def host_blocks(free: int | None, weights: int, unit: PoolUnit) -> int:
    """Blocks of a host's pool. Raises ConfigError where there is no room for one."""
    room = UNKNOWN_HOST_BYTES if free is None else min(max(free - weights, 0) // HOST_PARTS, MOST_HOST_BYTES)
    if room < unit.block_bytes:
        raise ConfigError(
            "model",
            f"{weights / _GB:.2f} GB of weights and {room / _GB:.2f} GB for KV",
            f"more free memory, or a kv_memory_bytes of at least {unit.block_bytes}: one block of this model",
        )
    return min(room // unit.block_bytes, MOST_HOST_BLOCKS)


def device_blocks(use: DeviceUse, share: float, unit: PoolUnit) -> int:
    """Blocks of a GPU's pool. Raises ConfigError, which names every part, where there is no room for one."""
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
    """Of a host, or of a device whose pool was asked for: nothing but weights and pool is known."""
    return MemoryPlan(
        device=device,
        total=free or 0,
        usable=free or 0,
        weights=weights,
        kv_pool=num_blocks * unit.block_bytes,
        kv_tokens=num_blocks * unit.block_size,
    )


def runtime_bytes(total: int, free: int, reserved: int) -> int:
    """What this process holds beside its allocator. A neighbour on the same device cannot be told apart, so the
    number has a bound."""
    return min(max(total - free - reserved, 0), MOST_RUNTIME_BYTES)


def graph_bytes(before: int, after: Sequence[int], num_graphs: int) -> int:
    """What all graphs take, from the memory reserved before and after each of the first captures, largest first.

    The first holds buffers that all share; each further one is taken as large as the largest measured.
    """
    if not after:
        return 0
    steps = [now - then for then, now in pairwise(after)]
    return max(0, after[0] - before) + max(0, num_graphs - 1) * max([0, *steps])
