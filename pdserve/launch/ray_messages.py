"""Messages from Ray's driver to the launcher, and from the actors to the driver; what is said of actors that start."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from pdserve.launch.child import StartFailed

BEGINS: Final = "begins"
NOW: Final = "now "  # followed by what a step does or waits for
TOOK: Final = "took "
PLACING: Final = "waits for a node"
SPAWNING: Final = "waits for its process"
IMPORTING: Final = "imports its modules"
LOADING: Final = "loads the model"
WARMING: Final = "warms up"
_LOGS: Final = "; the logs of Ray on its node may have the reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorHealth:
    """The state of an actor; `error` is why its worker could not start."""

    pid: int
    address: str  # empty until its worker listens
    is_healthy: bool
    error: str
    memory: str = ""  # how it is divided, as JSON
    stage: str = ""  # of a worker that starts: IMPORTING, LOADING or WARMING
    phases: tuple[str, ...] = ()  # that have begun, each as a line of core/progress.py


@final
class ActorStarts:
    """Workers that start as actors. Pure: the caller asks each for its health, and emits what `observe` returns."""

    def __init__(self, worker_ids: Iterable[str], began_s: float, limit_s: float) -> None:
        self._began_s, self._limit_s = began_s, limit_s
        self._stages = dict.fromkeys(worker_ids, SPAWNING)
        self._told: dict[str, set[str]] = {}
        self._pids: dict[str, int] = {}

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(self._stages)

    def observe(self, worker_id: str, health: ActorHealth | None, now_s: float) -> list[str]:
        """What has changed. None: it has not answered. Raises StartFailed if it cannot start."""
        texts = []
        if health is not None:
            if health.error:
                raise StartFailed(f"{worker_id}: {health.error}")
            if self._pids.setdefault(worker_id, health.pid) != health.pid:
                raise self._ended(worker_id)
            self._stages[worker_id] = health.stage
            texts = list(health.phases)
        if now_s - self._began_s > self._limit_s:
            still = "; ".join(f"{name} {stage}" for name, stage in self._stages.items())
            raise StartFailed(f"not started within {self._limit_s:.0f} s: {still}{_LOGS}")
        told = self._told.setdefault(worker_id, set())
        changed = [one for one in (f"{NOW}{self._stages[worker_id]}", *texts) if one not in told]
        told.update(changed)
        if health is not None and health.address:
            del self._stages[worker_id]
            changed.append(f"{TOOK}{now_s - self._began_s:.2f} s")
        return changed

    def lost(self, worker_id: str, why: str) -> None:
        """Ray cannot reach the actor. Raises StartFailed, unless its first process has not answered yet."""
        if worker_id in self._pids:
            raise self._ended(worker_id, f": {why}")

    def _ended(self, worker_id: str, why: str = "") -> StartFailed:
        return StartFailed(f"{worker_id}: its process ended while it {self._stages[worker_id]}{why}{_LOGS}")


def emit(name: str, text: str) -> None:
    sys.stdout.write(f"@{name} {text}\n")
    sys.stdout.flush()


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
