"""`python -m decode_worker`: one decode worker process; its flags are the fields of WorkerConfig."""

from __future__ import annotations

import sys

from decode_worker.program import make_host
from pdserve.config import WorkerConfig
from pdserve.program import run

if __name__ == "__main__":
    sys.exit(run("decode_worker", WorkerConfig, make_host, sys.argv[1:]))
