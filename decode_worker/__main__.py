"""`python -m decode_worker`: one decode worker process; its flags are the fields of WorkerConfig."""

from __future__ import annotations

import sys

from pdserve.config import WorkerConfig
from pdserve.program import Host, end, run


def make(config: WorkerConfig) -> Host:
    # Imported here, because `--help` must work without the packages of the extra `server`.
    from decode_worker.program import make_host
    from prefill_worker.program import build

    return make_host(config, build)


if __name__ == "__main__":
    end(run("decode_worker", WorkerConfig, make, sys.argv[1:]))
