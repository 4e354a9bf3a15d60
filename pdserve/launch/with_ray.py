"""The launcher's view of a cluster whose workers are Ray actors: Redis, Ray's driver, the router.

The driver is a separate process, so the router continues if Ray fails. Workers have a new port after each restart,
and the router finds them through the registry in Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from pdserve.config import RAY_TOKEN_ENV, REDIS_ENV, SECRET_ENV
from pdserve.core.errors import Unavailable
from pdserve.core.progress import phase_of
from pdserve.core.urls import place
from pdserve.launch.local import LaunchedCluster, redis_trouble, start_steps
from pdserve.launch.report import LauncherReport, memory_of
from pdserve.launch.spec import ClusterSpec, ClusterTls, Process, routers, worker_config
from pdserve.launch.supervisor import REDIS, StartFailed, SupervisedProcess

# --- messages -------------------------------------------------------------------------------------------------
# Messages from Ray's driver to the launcher, and from the actors to the driver; what is said of actors that start.

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


# --- cluster --------------------------------------------------------------------------------------------------

DRIVER: Final = "ray"
DRIVER_START_S: Final = 600.0
REDIS_WAIT_S: Final = 10.0
REDIS_RETRY_S: Final = 0.2
SHUTDOWN_S: Final = 20.0  # time for Ray itself to end, after the workers have drained
_EVENT: Final = re.compile(r"^@(\w+) (.*)$")
_TOOK: Final = re.compile(rf"^{TOOK}(\d+\.\d+) s$")


@final
class RayCluster(LaunchedCluster):
    """The workers are actors of Ray, which Ray itself restarts."""

    def __init__(self, spec: ClusterSpec, address: str, report: LauncherReport) -> None:
        """`address` of a Ray cluster; empty starts one here."""
        super().__init__(spec, report, ray=address)
        self.spec = dataclasses.replace(self.spec, worker_ports=())
        drains_s = [worker_config(self.spec, index)[1].drain_s for index in range(len(self.spec.worker_ids))]
        self._driver = SupervisedProcess(
            name=DRIVER,
            program=("pdserve.launch.ray_cluster", address, spec_to_json(self.spec)),
            env=tuple(_driver_env(self.spec).items()),
            start_s=DRIVER_START_S,
            drain_s=SHUTDOWN_S + max(drains_s),
            on_line=partial(show, report),
        )

    def _processes(self) -> list[Process]:
        return routers(self.spec, ())

    async def _start_workers(self, workers: Sequence[Process]) -> None:
        await self._supervisor.start(self._driver)

    def _names_of_workers(self) -> Sequence[str]:
        return [DRIVER]

    def _steps(self) -> list[str]:
        return ray_start_steps(self.spec, has_own_redis=self._has_own_redis)

    async def _check_redis(self) -> None:
        await check_redis(self.spec, self._report)
        await super()._check_redis()


def show(report: LauncherReport, line: str) -> None:
    """The driver reports events as `@NAME TEXT`; all other lines come from Ray."""
    event = _EVENT.match(line)
    if event is None:
        report.relay(DRIVER)(line)
        return
    name, text = event.groups()
    if (progress := phase_of(text)) is not None:
        report.worker_phase(name, progress)
    elif (plan := memory_of(text)) is not None:
        report.memory(name, plan)
    elif text == BEGINS:
        report.begins(name)
    elif text.startswith(NOW):
        report.waits(name, text.removeprefix(NOW))
    elif took := _TOOK.match(text):
        report.phase(name, float(took.group(1)))
    else:
        report.say(name, text)


async def check_redis(spec: ClusterSpec, report: LauncherReport, limit_s: float = REDIS_WAIT_S) -> None:
    """Waits for Redis. Raises Unavailable if it does not answer in time, and ConfigError if it rejects the URL.

    A running cluster does without Redis, but the start of this one cannot: the router finds the workers only there.
    """
    deadline_s = time.monotonic() + limit_s
    where, told = place(spec.redis), ""
    while why := await redis_trouble(spec.redis):
        if time.monotonic() >= deadline_s:
            raise Unavailable(
                f"redis: {where} does not answer ({why}), and with --ray the router finds the workers only there; "
                "start it, give another URL, or leave --redis out to start one here"
            )
        if why != told:
            report.say(REDIS, f"{where} does not answer ({why}); waiting for it for at most {limit_s:.0f} s")
            told = why
        await asyncio.sleep(REDIS_RETRY_S)


def ray_start_steps(spec: ClusterSpec, *, has_own_redis: bool) -> list[str]:
    """As `start_steps`, with the steps of the driver before the workers."""
    steps = start_steps(spec, has_own_redis=has_own_redis)
    begin = 1 if has_own_redis else 0
    end = begin + len(spec.worker_ids)
    return [*steps[:begin], "ray_init", "placement", *steps[begin:end], DRIVER, *steps[end:]]


def _driver_env(spec: ClusterSpec) -> dict[str, str]:
    held = {SECRET_ENV: spec.cluster_secret, REDIS_ENV: spec.redis, RAY_TOKEN_ENV: os.environ.get(RAY_TOKEN_ENV, "")}
    return {name: value for name, value in held.items() if value}


def spec_to_json(spec: ClusterSpec) -> str:
    """Settings for the driver, without secrets and router settings, because other users can read a command line."""
    fields: dict[str, Any] = dataclasses.asdict(spec)
    del fields["cluster_secret"], fields["redis"]
    fields["settings"] = {kind: values for kind, values in spec.settings.items() if kind != "router"}
    return json.dumps(fields)


def spec_from_json(text: str, cluster_secret: str, redis: str) -> ClusterSpec:
    fields = json.loads(text)
    for name in ("gpus", "worker_ports", "slots"):
        fields[name] = tuple(fields[name])
    if fields["tls"] is not None:
        fields["tls"] = ClusterTls(**fields["tls"])
    return ClusterSpec(cluster_secret=cluster_secret, redis=redis, **fields)
