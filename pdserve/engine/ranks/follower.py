"""A follower rank of tensor parallelism: loads its part of the model, then executes the leader's orders.

python -m pdserve.engine.ranks.follower RANK STORE POOL [FLAG ...]      started by pdserve.engine.ranks.leader

STORE is the inherited descriptor of the ranks' private store or, for a worker with a rendezvous, the store's port. POOL
is the inherited descriptor of the memory file that all ranks share, or `own`. A rank with its own pool has a KV
endpoint: it is started as kvtransfer.ranks.follower, which passes the endpoint to `main`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from pdserve.config import WorkerConfig, forget_secrets
from pdserve.config_flags import parse_flags
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.errors import PdserveError
from pdserve.core.types import Role
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.build_engine import open_rank
from pdserve.engine.load.device import choose_device, use_device
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.model.collectives import Ranks, make_store, private_store
from pdserve.engine.model.parameters import Shard
from pdserve.engine.ranks.leader import GRAPHS, MEET_S, OWN, STEP, gloo_host
from pdserve.engine.rows import from_words

if TYPE_CHECKING:
    from pdserve.engine.gpu.engine import GraphEngine

VLLM: Final = "vllm"  # of the setting `engine`
PROGRAM: Final = "python -m pdserve.engine.ranks.follower"


class Served(Protocol):
    """A rank's KV endpoint."""

    address: str  # HOST:PORT of its RankService

    def reached(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The leader has reassigned these blocks: (block, epoch). Called before the step that writes them."""
        ...


class FollowingEngine(Engine, Protocol):
    """The engine of a follower."""

    def follow(self, rows: Sequence[Row]) -> None:
        """Takes part in a step whose tokens the leader samples."""
        ...


Serve = Callable[[Engine, WorkerConfig, torch.device], Served]


def main(serve: Serve | None = None) -> int:
    rank, store, pool, *flags = sys.argv[1:]
    try:
        config = parse_flags(WorkerConfig, flags, PROGRAM)
        forget_secrets()
        return follow(int(rank), int(store), pool, config, serve)
    except PdserveError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    except RuntimeError as error:  # the leader or another rank is gone
        sys.stderr.write(f"rank {rank} ends: {error}\n")
        return 1


def follow(
    rank: int, place: int, pool: str, config: WorkerConfig, serve: Serve | None = None, index: int | None = None
) -> int:
    """`place`: STORE, as above. `index`: for a rank on another host than its leader, the GPU of that host. Its groups
    connect to the others at `config.host`."""
    shard = Shard(rank, config.tensor_parallel)
    if config.rendezvous:
        store = make_store(place, shard.size, is_leader=False, timeout_s=MEET_S)
    else:
        store = private_store(place, shard.size, timeout_s=MEET_S)
    store.set(f"here/{rank}", "")
    memory = None if pool == OWN else HostMemory(os.fstat(int(pool)).st_size, int(pool))
    if config.engine == VLLM:
        return follow_vllm(config, shard, store, serve)
    device = choose_device(config.device, rank if index is None else index)
    use_device(device)
    secret = ClusterSecret(config.cluster_secret) if config.rendezvous else None
    host = gloo_host(config) if index is None else config.host
    ranks = Ranks(shard, store, device, config.stall_s, host, secret)
    has_graphs = store.get(GRAPHS) == b"on"
    graphs, replaying = None, None
    if has_graphs:
        from pdserve.engine.load import gpu_engine as gpu_opening  # Triton is not available for CPUs

        graphs = gpu_opening.graphs_meter(config)
    engine = open_rank(config, shard, ranks, memory, device=device, graphs=graphs)
    served = None if serve is None else serve(engine, config, device)
    if served is not None:
        store.set(f"address/{rank}", served.address)
    store.set(f"loaded/{rank}", engine.spec.weights_hash)
    if has_graphs:
        replaying = gpu_opening.open_graphs(engine, config)
    return obey(ranks, engine, replaying, served)


def follow_vllm(config: WorkerConfig, shard: Shard, store: Any, serve: Serve | None) -> int:
    """Like the rest of `follow`, with vLLM's worker."""
    from pdserve.engine.vllm import start  # in vLLM's environment only
    from pdserve.engine.vllm.groups import Place

    ranks = Ranks(shard, store, torch.device("cpu"), config.stall_s)
    # The leader has set what depends on the role.
    engine = start.open_rank(config, Role.DECODE, Place(shard, store, ranks))
    served = None if serve is None else serve(engine, config, engine.pool.raw.device)
    if served is not None:
        store.set(f"address/{shard.rank}", served.address)
    store.set(f"loaded/{shard.rank}", engine.spec.weights_hash)
    status = obey(ranks, engine, None, served)
    engine.close()
    return status


def obey(ranks: Ranks, engine: FollowingEngine, replaying: GraphEngine | None, served: Served | None) -> int:
    """Takes part in each step that the leader orders, until the leader ends. Returns the process's exit status.

    `replaying` if the steps run as graphs.
    """
    while True:
        order = ranks.receive_order()
        if order[0] != STEP:
            ranks.close()
            return 0
        rows_at = 2 + order[1]
        begun = order[2:rows_at]
        if served is not None:
            served.reached(list(zip(begun[::2], begun[1::2], strict=True)))
        if replaying is None:
            engine.follow(from_words(order[rows_at:]))
        else:
            replaying.follow(order[rows_at:])


if __name__ == "__main__":
    sys.exit(main())
