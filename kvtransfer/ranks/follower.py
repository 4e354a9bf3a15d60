"""A tensor-parallel rank with a separate pool: carries out the leader's steps, and transfers its heads of KV blocks.

python -m kvtransfer.ranks.follower RANK STORE own [FLAG ...]      started by pdserve.engine.ranks.leader
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from kvtransfer.ranks.rank_server import RankServer
from pdserve.config import WorkerConfig
from pdserve.engine.load.device import use_device
from pdserve.engine.ranks.follower import main
from pdserve.engine.torch_engine import TorchEngine


def serve(engine: TorchEngine, config: WorkerConfig, device: torch.device) -> RankServer:
    return RankServer(engine.pool, engine.spec, config, partial(use_device, device))


if __name__ == "__main__":
    sys.exit(main(serve))
