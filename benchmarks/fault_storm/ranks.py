"""A process of the fault storm as a worker of several tensor-parallel ranks: each rank has a pool of its own heads.

Rank 0 is the leader's own transfer end. The others are controlled over real streams (kvtransfer/ranks/rank_server.py),
as if they were separate processes. A kill ends all of them, because a worker that loses a rank ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from benchmarks.fault_storm.storage import NUM_BLOCKS, Memory, Storage, content_hash_of
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.protocol.grants import PROTOCOL
from kvtransfer.protocol.transport import RankReceiver, RankSender, Text
from kvtransfer.ranks.rank_endpoints import JoinedReceiver, JoinedSender
from kvtransfer.ranks.rank_link import RankLink, RemoteReceiver, RemoteSender
from kvtransfer.ranks.rank_server import RankServer
from pdserve.config import WorkerConfig
from pdserve.core.access.proof import Identity
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.engine.interface import EngineSpec, KvPool
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.v1 import rank_pb2
from tests.support.cluster_secret import SECRET, TEXT
from tests.support.fake_device import HiddenPool

SHAPE: Final = BlockShape(num_layers=2, block_size=16, num_kv_heads=4, head_dim=8, dtype=torch.float32)
OPEN_S: Final = 30.0
RANKS_PATIENCE: Final = 4.0  # by which deadlines are longer


class RankedStorage(Storage):
    """The pools of all ranks. A block is correct when each rank's heads of it are."""

    def __init__(self, ranks: int, memory: Memory = "host") -> None:
        super().__init__(SHAPE)
        shape = replace(SHAPE, num_kv_heads=SHAPE.num_kv_heads // ranks)
        self.pools = [TorchPool(num_blocks=NUM_BLOCKS, shape=shape, device=torch.device("cpu")) for _ in range(ranks)]
        self.shown: list[Any] = [HiddenPool(pool) if memory == "stand-in" else pool for pool in self.pools]
        self.pool = self.shown[0]
        self.servers: list[RankServer] = []
        self.stamps.take_begun()  # they are counted from here on

    def write(self, block: int, number: int, place: int) -> None:
        self._send_epochs()
        values = torch.from_numpy(self._contents(number, place).view(np.float32)).view(_INNER)
        for pool, part in zip(self.pools, values.chunk(len(self.pools), dim=-2), strict=True):
            pool.tensor[block].view(torch.int32).copy_(part.contiguous().view(torch.int32))
        self._holds[block] = (number, place)

    def _whole(self, block: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        parts = [pool.tensor[block].view(torch.int32) for pool in self.pools]
        return torch.cat(parts, dim=-2).contiguous().view(-1).numpy().view(np.uint64)

    def _send_epochs(self) -> None:
        """Sends the blocks' epochs to the ranks, as a leader does before each step: only steps write blocks."""
        begun = self.stamps.take_begun()
        for server in self.servers:
            server.reached(begun)


_INNER: Final = (SHAPE.num_layers, 2, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)


def fingerprint_of_ranks(ranks: int) -> Fingerprint:
    shape = KvShape(
        layout=SHAPE.layout,
        dtype="float32",
        num_layers=SHAPE.num_layers,
        num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        block_size=SHAPE.block_size,
        tp_degree=ranks,
    )
    return Fingerprint(protocol=PROTOCOL, model="m", engine="e", shape=shape)


def text_of(number: int, count: int) -> Text:
    """The prompt's tokens, which a sender of another degree needs."""
    names = tuple(content_hash_of(number, place) for place in range(count))
    return Text(num_tokens=count * SHAPE.block_size, own=names, theirs=names)


class StormRanks:
    """Runs all ranks except the first."""

    def __init__(
        self, storage: RankedStorage, transport: str, name: str, incarnation: str, disturb: FaultInjector
    ) -> None:
        self._storage = storage
        self._identity = Identity.of(SECRET, "leader", name, incarnation)
        self._incarnation = incarnation
        plain = transport.removesuffix("_staged")  # as the setting calls it
        config = WorkerConfig(model="m", worker_id=name, transport=plain, cluster_secret=TEXT)
        degree = len(storage.pools)
        storage.servers = [
            RankServer(pool, _spec(degree, rank, pool), config, fault_injector=disturb)
            for rank, pool in enumerate(storage.shown[1:], 1)
        ]
        self.servers = storage.servers

    def receiver(self, own: RankReceiver) -> JoinedReceiver:
        links = self._links(is_sender=False)
        ranks: list[RankReceiver] = [own, *(RemoteReceiver(link, self._storage.stamps) for link in links)]
        return JoinedReceiver(ranks, [link.endpoint for link in links], len(ranks))

    def sender(self, own: RankSender) -> JoinedSender:
        ranks: list[RankSender] = [own]
        ranks += [RemoteSender(link, self._storage.stamps) for link in self._links(is_sender=True)]
        return JoinedSender(ranks, fingerprint_of_ranks(len(ranks)).shape, is_on_host=self._storage.pool.is_on_host)

    def _links(self, *, is_sender: bool) -> list[RankLink]:
        opening = rank_pb2.OpenEndpoint(incarnation=self._incarnation, is_sender=is_sender)
        return [
            RankLink(rank, server.address, self._identity, opening, OPEN_S)
            for rank, server in enumerate(self.servers, 1)
        ]

    def close(self) -> None:
        for server in self.servers:
            server.close()


def _spec(degree: int, rank: int, pool: KvPool) -> EngineSpec:
    return EngineSpec(
        model="m",
        weights_hash="e",
        dtype="float32",
        layout=SHAPE.layout,
        vocab_size=1,
        max_context_tokens=1,
        eos_token_ids=(),
        block_size=SHAPE.block_size,
        num_blocks=pool.num_blocks,
        block_bytes=pool.block_bytes,
        kv_dtype="float32",
        kv_layers=SHAPE.num_layers,
        kv_heads=SHAPE.num_kv_heads,
        kv_head_dim=SHAPE.head_dim,
        tp_degree=degree,
        tp_rank=rank,
        num_layers=SHAPE.num_layers,
    )


def in_order(pieces: Sequence[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
    """The same pushes in block order, which converted blocks require. Blocks that are sent twice are still sent
    twice."""
    indices = [index for _, piece in pieces for index in piece]
    twice = indices[-1:] if indices.count(indices[-1]) > 1 else []
    left = sorted(indices[: len(indices) - len(twice)]) + twice
    found: list[tuple[float, tuple[int, ...]]] = []
    for pause_s, piece in pieces:
        found.append((pause_s, tuple(left[: len(piece)])))
        del left[: len(piece)]
    return found
