"""A rank on a CPU whose decode steps use static buffers, as on a GPU. Kernels run one by one, and ranks use gloo.

python -m tests.unit.engine.gpu.graph_rank RANK PORT FOLDER      a follower
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.interpreter import prepare

if __name__ == "__main__":
    prepare()  # Before Triton is imported. In tests, conftest.py has done this.

from pdserve.config import WorkerConfig
from pdserve.engine.gpu.engine import GraphEngine
from pdserve.engine.gpu.graphs import EagerReplays, StaticDecode
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for
from pdserve.engine.load.build_engine import open_rank
from pdserve.engine.model.collectives import Ranks, make_store
from pdserve.engine.model.parameters import Shard
from pdserve.engine.ranks.follower import obey

SIZE = 2
BLOCK_SIZE = 16
MAX_ROWS = 3
TIMEOUT_S = 60.0


def open_graph_rank(folder: Path, rank: int, store: Any) -> tuple[Ranks, Any, GraphEngine]:
    """The rank's groups, its eager engine, and the engine with static buffers over the same pool."""
    torch.set_num_threads(1)
    ranks = Ranks(Shard(rank, SIZE), store, torch.device("cpu"), TIMEOUT_S)
    config = WorkerConfig(
        model=str(folder),
        worker_id="w",
        device="cpu",
        tensor_parallel=SIZE,
        rank_pools="own",
        kv_blocks=64,
        block_size=BLOCK_SIZE,
        max_context_tokens=128,
        max_batch=MAX_ROWS,
        max_batch_tokens=64,
        threads=1,
    )
    eager = open_rank(config, Shard(rank, SIZE), ranks)
    decode = StaticDecode(
        eager.model,
        eager.pool,
        most_rows=MAX_ROWS,
        max_context_tokens=eager.spec.max_context_tokens,
        vocab_size=eager.spec.vocab_size,
        num_processors=4,
    )
    return ranks, eager, GraphEngine(eager, decode, EagerReplays(decode, buckets_for(MAX_ROWS)))


if __name__ == "__main__":
    rank, port, folder = sys.argv[1:]
    store = make_store(int(port), SIZE, is_leader=False, timeout_s=TIMEOUT_S)
    groups, eager, graphs = open_graph_rank(Path(folder), int(rank), store)
    sys.exit(obey(groups, eager, graphs, None))
