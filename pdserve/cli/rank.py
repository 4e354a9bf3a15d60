"""`pdserve rank`: runs the ranks of a tensor-parallel worker on this host, while its leader runs on another host."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Final

from pdserve.config import SECRET_ENV, from_env
from pdserve.core.errors import ConfigError
from pdserve.core.installation import check_platform
from pdserve.model_source import find_model

HELP = "start ranks on this host that join a worker on another host"
PROGRAM: Final = ("kvtransfer.ranks.follower", "join")
MAX_COUNT: Final = 63
TLS_FLAGS: Final = {
    "tls-cert": "certificate of this host's ranks (PEM), if the worker has TLS",
    "tls-key": "its private key (PEM)",
    "tls-ca": "CA of the cluster (PEM)",
    "tls-peer-name": "name in the certificates of the cluster's processes (the host that is called)",
}
FLAGS: Final = ("host", "advertise", "model", *TLS_FLAGS)
LOST: Final = 1  # of the program: the leader or another rank is gone
_POLL_S: Final = 0.1
_END_S: Final = 20.0  # time for ranks to detect that another one is gone
_AGAIN_S: Final = 1.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("rendezvous", metavar="HOST:PORT", help="value of the worker's rendezvous setting")
    add("--count", type=int, default=1, help="number of ranks to start; each takes its own GPU if there are GPUs (1)")
    add("--host", metavar="ADDRESS", help="address of this host that other hosts reach (the one used to reach HOST)")
    add("--advertise", metavar="HOST", help="host name or address that others use instead of --host")
    add(
        "--model",
        metavar="MODEL",
        help="model folder on this host, or name on the Hub (the same path as on the worker's host)",
    )
    for name, what in TLS_FLAGS.items():
        add(f"--{name}", metavar="NAME" if name == "tls-peer-name" else "FILE", help=what)
    add("--wait-s", type=float, default=120.0, help="time to wait until the worker listens, in seconds (120)")


def run(args: argparse.Namespace) -> int:
    """Joins again after each restart of the worker, until the worker ends or rejects a rank."""
    check_platform(sys.platform)
    if not 1 <= args.count <= MAX_COUNT:
        raise ConfigError("count", args.count, f"1 to {MAX_COUNT} ranks")
    if not 0.0 < args.wait_s <= 86_400.0:
        raise ConfigError("wait-s", args.wait_s, "seconds up to a day")
    if not from_env(SECRET_ENV):
        raise ConfigError(
            "cluster_secret", "nothing", f"the cluster's secret in {SECRET_ENV}, or its file's name there"
        )
    if args.model:
        args.model = find_model(args.model)
    while True:
        statuses = _run_once(args)
        if any(status not in (0, LOST) for status in statuses):
            return 1
        if not any(statuses):
            return 0
        print("the worker has lost a rank or its leader; joining again", file=sys.stderr, flush=True)
        time.sleep(_AGAIN_S)


def _run_once(args: argparse.Namespace) -> list[int]:
    """Exit statuses of all ranks here; if one ends, the others are ended."""
    from pdserve.isolated.tied_program import tied_command  # Linux only, and all commands import this file

    flags = [f"--count={args.count}", f"--wait-s={args.wait_s}"]
    flags += [f"--{name}={value}" for name in FLAGS if (value := getattr(args, name.replace("-", "_")))]
    commands = [tied_command(*PROGRAM, args.rendezvous, str(index), *flags) for index in range(args.count)]
    ranks = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
    try:
        while all(rank.poll() is None for rank in ranks):
            time.sleep(_POLL_S)
        ends_s = time.monotonic() + _END_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    statuses = [rank.wait() for rank in ranks]
    return [LOST if status < 0 else status for status in statuses]  # a killed one may join again
