"""What `python -m` of each role shares: flags, logs on stderr, signals, one line on stdout when it listens."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pdserve.config import Config, RouterConfig, forget_secrets, parse_flags
from pdserve.core.errors import PdserveError
from pdserve.core.extras import missing
from pdserve.telemetry.logs import log_to_stderr

USAGE_EXIT_CODE: Final = 2


class Host(Protocol):
    """A role that runs on threads of its own."""

    @property
    def memory(self) -> str:
        """Once started: how its memory is divided, as JSON; empty where nothing is known."""
        ...

    def start(self) -> str:
        """Returns HOST:PORT once it listens. Raises PdserveError."""
        ...

    def drain(self) -> None:
        """Returns at once; the host stops itself when its work is done or its time is over."""
        ...

    def stop(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...


def run(name: str, kind: type[Config], make_host: Callable[[Config], Host], argv: Sequence[str]) -> int:
    """Serves until a signal: SIGTERM and SIGINT drain, a second one stops at once."""
    log_to_stderr(name)
    try:
        config = parse_flags(kind, argv, f"python -m {name}")
        forget_secrets()
        host = make_host(config)
        address = host.start()
    except PdserveError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        return USAGE_EXIT_CODE
    except ModuleNotFoundError as error:  # an extra that is not installed
        if (absent := missing(error)) is None:
            raise
        sys.stderr.write(f"{name}: {absent.message}\n")
        return USAGE_EXIT_CODE
    # What there is by now (modules, tokenizer, weights) stays: the collector need not look through it again and again.
    gc.collect()
    gc.freeze()
    _follow_signals(host)  # until here a signal just ends the process: nobody depends on it yet
    own_id = config.router_id if isinstance(config, RouterConfig) else config.worker_id
    memory = f"{name} {own_id} memory {host.memory}\n" if host.memory else ""
    sys.stdout.write(f"{name} {own_id} listening on {address}\n{memory}")
    sys.stdout.flush()
    host.wait()
    return 0


def _follow_signals(host: Host) -> None:
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
