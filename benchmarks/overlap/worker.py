"""A worker process whose tcp rate is limited by the kernel: `python -m benchmarks.overlap.worker ROLE BYTES_PER_S ...`.

Further flags are those of the role's program. 0 means no limit.
"""

from __future__ import annotations

import socket
import sys

from decode_worker.program import make_host as make_decode
from kvtransfer.link import channel
from pdserve.config import WorkerConfig
from pdserve.program import run
from prefill_worker.program import make_host as make_prefill

SO_MAX_PACING_RATE = 47  # of Linux; not in the socket module before Python 3.14


def pace(bytes_per_s: int) -> None:
    tune = channel.tune

    def tune_and_pace(sock: socket.socket) -> None:
        tune(sock)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)

    channel.tune = tune_and_pace


if __name__ == "__main__":
    role, bytes_per_s = sys.argv[1], int(sys.argv[2])
    if bytes_per_s:
        pace(bytes_per_s)
    sys.exit(run(f"{role}_worker", WorkerConfig, make_prefill if role == "prefill" else make_decode, sys.argv[3:]))
