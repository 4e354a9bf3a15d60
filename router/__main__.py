"""`python -m router`: one router process. One line on stdout when it listens; logs go to stderr."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

from pdserve.config import RouterConfig, parse_flags
from pdserve.core.errors import PdserveError
from router.program import RouterHost, make_router

USAGE_EXIT_CODE: Final = 2


def main(argv: Sequence[str]) -> int:
    """Serves until a signal: SIGTERM and SIGINT drain, a second one stops at once."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s router %(name)s: %(message)s"
    )
    try:
        config = parse_flags(RouterConfig, argv, "python -m router")
        host = make_router(config)
        address = host.start()
    except PdserveError as error:
        sys.stderr.write(f"router: {error.message}\n")
        return USAGE_EXIT_CODE
    _follow_signals(host)
    sys.stdout.write(f"router {config.router_id} listening on {address}\n")
    sys.stdout.flush()
    host.wait()
    return 0


def _follow_signals(host: RouterHost) -> None:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
