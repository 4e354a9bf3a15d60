"""The leader's view of the processes of a worker's other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import IO, Final, Protocol, final

from pdserve.config import SECRET_ENV, WorkerConfig
from pdserve.config_flags import to_flags
from pdserve.core.errors import ConfigError

OWN: Final = "own"  # in place of a descriptor: each rank has its own pool
PROGRAM: Final = "pdserve.engine.follower"
# the follower that also transfers the rank's KV from and to its own pool
MOVING_PROGRAM: Final = "kvtransfer.follower"
_JOIN_S: Final = 5.0
_TAIL_BYTES: Final = 2000


class RankProcess(Protocol):
    """Another rank's process, on this host or another."""

    rank: int

    @property
    def is_alive(self) -> bool: ...

    def check(self) -> None:
        """Raises ConfigError with its last output if it has ended."""
        ...

    def silence(self, timeout_s: float) -> ConfigError:
        """The error message if it has made no progress for so long."""
        ...

    def end(self) -> None:
        """Waits for its end."""
        ...

    def kill(self) -> None: ...


@final
class Follower:
    """A rank's process. It ends with its leader, even if the leader is killed."""

    def __init__(self, config: WorkerConfig, rank: int, store: int, descriptor: int | None = None) -> None:
        """`store`: its port, for a config with a rendezvous, otherwise its descriptor. `descriptor`: the memory file
        that ranks share, if they do."""
        self.rank = rank
        shared = [*([] if descriptor is None else [descriptor]), *([] if config.rendezvous else [store])]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        pool = OWN if descriptor is None else str(descriptor)
        # Without a secret no peer could authenticate to the rank: it then computes, but does not transfer its KV.
        is_moving = descriptor is None and bool(config.cluster_secret)
        program = [MOVING_PROGRAM if is_moving else PROGRAM, str(rank), str(store), pool, *to_flags(config)]
        command = [sys.executable, "-m", "pdserve.launch.tether", str(os.getpid()), "module", *program]
        # A separate session: a terminal's Ctrl-C must reach only the leader, which drains with all its ranks.
        environment = {**os.environ, SECRET_ENV: config.cluster_secret} if is_moving else None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=shared,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raises ConfigError with its last output if it has ended."""
        if not self.is_alive:
            raise ConfigError("tensor_parallel", f"rank {self.rank} ended: {self._last_words()}", "a rank that starts")

    def silence(self, timeout_s: float) -> ConfigError:
        return ConfigError("tensor_parallel", f"rank {self.rank} silent for {timeout_s:.0f} s", "an answer")

    def end(self) -> None:
        try:
            self._process.wait(_JOIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL_BYTES))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"
