"""A decode worker's grant to a prefill worker: where KV may be written, and the format of its bytes. Pure.

Routers forward an encoded Grant without reading it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.kv_shape import KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Names one attempt to transfer one sequence's KV. A late message has an old key, and is counted and ignored."""

    transfer_id: str
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identifies a worker's KV. Two workers that exchange blocks must agree in every field except the shape."""

    protocol: int
    model: str
    engine: str  # identifies the weights
    shape: KvShape

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Blocks that a decode worker has reserved for a transfer.

    `blocks` are the receiver's block numbers in prompt order, after `num_cached_blocks` blocks that its prefix cache
    already has. Both count blocks of the receiver's size.
    """

    key: TransferKey
    endpoint: str  # HOST:PORT of the granting worker's gRPC server
    worker_id: str
    incarnation: str
    fingerprint: Fingerprint
    blocks: tuple[int, ...]
    num_cached_blocks: int
    hash_seed: bytes = b""  # seed of the receiver's content hashes
    rank_endpoints: tuple[str, ...] = ()  # endpoints of the worker's ranks 1, 2, ..; each rank stores its own heads
