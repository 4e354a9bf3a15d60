"""A tensor-parallel rank with a separate pool: executes the leader's steps, and transfers its heads of KV blocks.

python -m kvtransfer.ranks.follower RANK STORE own [FLAG ...]      started by pdserve.engine.ranks.leader
python -m kvtransfer.ranks.follower join HOST:PORT INDEX [FLAG ...]      started by `pdserve rank`

`join` is for a rank on another host than its leader. INDEX is the GPU of this host that the rank uses. The leader sends
the rank number and the settings; flags override settings that differ on this host.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch

from kvtransfer.ranks.rank_server import RankServer
from pdserve.config import SECRET_ENV, WorkerConfig, forget_secrets, from_env
from pdserve.config_flags import parse_flags
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.errors import PdserveError
from pdserve.core.setting import TlsSettings, check_tls
from pdserve.engine.interface import Engine
from pdserve.engine.load.device import use_device
from pdserve.engine.model.collectives import LOOPBACK
from pdserve.engine.ranks.follower import follow
from pdserve.engine.ranks.follower import main as follow_leader
from pdserve.engine.ranks.leader import MEET_S, OWN
from pdserve.engine.ranks.rendezvous import Membership, own_address
from pdserve.telemetry.logs import log_to_stderr
from pdserve.tls.certificates import certificates_of

JOIN: Final = "join"
REJECTED: Final = 2  # exit status: another attempt would fail in the same way
TLS: Final = ("tls_cert", "tls_key", "tls_ca", "tls_peer_name")  # files of this host
LOST: Final = 1  # the leader or another rank is gone


def main(argv: Sequence[str]) -> int:
    return join(argv[1:]) if argv[:1] == [JOIN] else follow_leader(serve)


def serve(engine: Engine, config: WorkerConfig, device: torch.device) -> RankServer:
    return RankServer(engine.pool, engine.spec, config, partial(use_device, device))


def join(argv: Sequence[str]) -> int:
    """Joins a leader on another host, then runs like a rank that its leader has started."""
    parser = argparse.ArgumentParser(prog=f"python -m kvtransfer.ranks.follower {JOIN}", allow_abbrev=False)
    parser.add_argument("rendezvous")
    parser.add_argument("index", type=int)
    parser.add_argument("--host")
    parser.add_argument("--advertise", default="")
    parser.add_argument("--model")
    for name in TLS:
        parser.add_argument(f"--{name.replace('_', '-')}", default="")
    parser.add_argument("--count", type=int, default=1, help="ranks of the worker on this host")
    parser.add_argument("--wait-s", type=float, default=MEET_S)
    args = parser.parse_args(argv)
    log_to_stderr("rank")
    membership: Membership | None = None
    try:
        secret = from_env(SECRET_ENV)
        forget_secrets()
        host = args.host or own_address(args.rendezvous)
        mine = TlsSettings(**{name: getattr(args, name) for name in TLS})
        check_tls(mine, LOOPBACK, is_worker=True)
        tls = certificates_of(mine, is_mutual=True)
        membership = Membership(args.rendezvous, ClusterSecret(secret), args.wait_s, _lost, tls)
        config = dataclasses.replace(
            parse_flags(WorkerConfig, membership.flags, "the leader"),
            **{name: getattr(mine, name) for name in TLS},
            host=host,
            local_ranks=args.count,
            advertise=args.advertise,
            cluster_secret=secret,
        )
        if args.model:
            config = dataclasses.replace(config, model=args.model)
        status = follow(membership.rank, membership.store_port, OWN, config, serve, args.index)
    except (PdserveError, RuntimeError) as error:
        text = error.message if isinstance(error, PdserveError) else str(error)
        sys.stderr.write(f"rank: {text}\n")
        if membership is not None:
            membership.leave(text)
        return REJECTED if isinstance(error, PdserveError) else LOST
    membership.leave()
    return status


def _lost(why: str) -> None:
    """An idle rank waits for the leader's next order without a time limit."""
    sys.stderr.write(f"rank: the leader is gone ({why})\n")
    sys.stderr.flush()
    os._exit(LOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
