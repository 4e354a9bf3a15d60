"""`python -m prefill_worker`: one prefill worker process; its flags are the fields of WorkerConfig."""

from __future__ import annotations

import sys

from pdserve.config import WorkerConfig
from pdserve.program import run
from prefill_worker.program import make_host

if __name__ == "__main__":
    sys.exit(run("prefill_worker", WorkerConfig, make_host, sys.argv[1:]))
