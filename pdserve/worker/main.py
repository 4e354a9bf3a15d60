"""What `python -m prefill_worker` and `python -m decode_worker` share: flags, signals, one line on stdout."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.config import WorkerConfig, parse_flags
from pdserve.core.errors import PdserveError
from pdserve.worker.host import WorkerHost

USAGE_EXIT_CODE: Final = 2


def run(name: str, make_host: Callable[[WorkerConfig], WorkerHost], argv: Sequence[str]) -> int:
    """Serves until a signal: SIGTERM and SIGINT drain, a second one stops at once."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    )
    try:
        config = parse_flags(WorkerConfig, argv, f"python -m {name}")
        host = make_host(config)
        address = host.start()
    except PdserveError as error:
        print(f"{name}: {error.message}", file=sys.stderr)  # noqa: T201 - a usage message, not a log
        return USAGE_EXIT_CODE
    _follow_signals(host)  # until here a signal just ends the process: nobody depends on it yet
    sys.stdout.write(f"{name} {config.worker_id} listening on {address}\n")
    sys.stdout.flush()
    host.wait()
    return 0


def _follow_signals(host: WorkerHost) -> None:
    signals_seen = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal signals_seen
        signals_seen += 1
        if signals_seen == 1:
            host.drain()
        else:
            threading.Thread(target=host.stop, name="stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
