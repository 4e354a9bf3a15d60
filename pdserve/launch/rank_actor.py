"""An actor of Ray with ranks of a worker whose first rank is on another node. It imports no ray."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Final

from pdserve.isolated.tied_program import tied_command

_AGAIN_S: Final = 0.5


class RankActor:
    """Runs `pdserve rank`. If one of the two processes ends, so does the other."""

    def __init__(
        self,
        rendezvous: str,
        count: int,
        model: str,
        hidden: Mapping[str, str],
        wait_s: float,
        tls: Mapping[str, str],
    ) -> None:
        """`hidden`: environment variables of secrets. `tls`: settings with files, at the same path on every node."""
        flags = (f"--count={count}", f"--model={model}", f"--wait-s={wait_s}")
        command = tied_command("pdserve", "rank", rendezvous, *flags)
        command += [f"--{name.replace('_', '-')}={value}" for name, value in tls.items() if value]
        self._process = subprocess.Popen(command, env={**os.environ, **hidden}, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._process.wait()
        time.sleep(_AGAIN_S)
        os._exit(1)  # Ray starts it again
