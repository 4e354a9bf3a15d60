"""A tensor-parallel rank that is led: loads its part of the model, then does as it is told.

python -m pdserve.engine.follower RANK PORT POOL [FLAG ...]      started by pdserve.engine.parallel

POOL is the number of an inherited descriptor, of the memory file that all ranks share, or `own`.
"""

from __future__ import annotations

import sys
from typing import Final

from pdserve.config import WorkerConfig, parse_flags
from pdserve.core.errors import PdserveError
from pdserve.engine.current_device import use_device
from pdserve.engine.host_memory import HostMemory
from pdserve.engine.opening import choose_device, open_rank, shared_bytes
from pdserve.engine.parallel import MEET_S, OWN, STEP
from pdserve.engine.ranks import Ranks, make_store
from pdserve.engine.row_words import from_words
from pdserve.engine.sharding import Shard

PROGRAM: Final = "python -m pdserve.engine.follower"


def main() -> int:
    rank, port, pool, *flags = sys.argv[1:]
    try:
        return follow(int(rank), int(port), pool, parse_flags(WorkerConfig, flags, PROGRAM))
    except PdserveError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    except RuntimeError as error:  # the leader or another rank is gone
        sys.stderr.write(f"rank {rank} ends: {error}\n")
        return 1


def follow(rank: int, port: int, pool: str, config: WorkerConfig) -> int:
    shard = Shard(rank, config.tensor_parallel)
    store = make_store(port, shard.size, is_leader=False, timeout_s=MEET_S)
    store.set(f"here/{rank}", "")
    memory = None if pool == OWN else HostMemory(shared_bytes(config), int(pool))
    device = choose_device(config.device, rank)
    use_device(device)
    ranks = Ranks(shard, store, device, config.stall_s)
    engine = open_rank(config, lambda _read, _all: None, shard, ranks, memory)
    store.set(f"loaded/{rank}", "")
    while True:
        order = ranks.hear()
        if order[0] != STEP:
            return 0
        engine.follow(from_words(order[1:]))


if __name__ == "__main__":
    sys.exit(main())
