"""The launcher's view of a cluster whose workers are Ray actors: Redis, Ray's driver, the router.

The driver is a separate process, so the router continues if Ray fails. The launcher writes the workers that it wants
into a file, and the driver reports their states, so a driver that is started again makes what is wanted then. Workers
have a new port after each restart, and the router finds them through the registry in Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from pdserve.bounded_file import open_private
from pdserve.config import KV_STORE_ENV, RAY_TOKEN_ENV, REDIS_ENV, SECRET_ENV, WorkerConfig
from pdserve.config_flags import parse_flags, to_flags
from pdserve.core.errors import Unavailable
from pdserve.core.progress import phase_of
from pdserve.core.types import Role
from pdserve.core.urls import place
from pdserve.launch.changes.cluster import ChangingCluster
from pdserve.launch.changes.plans import add_worker, index_of, overlaid, with_role
from pdserve.launch.changes.server import Say
from pdserve.launch.child import StartFailed
from pdserve.launch.detached.link import Attached, KeeperLink
from pdserve.launch.keys import Settings
from pdserve.launch.local import start_steps
from pdserve.launch.report import LauncherReport, memory_of
from pdserve.launch.services import redis_trouble
from pdserve.launch.spec import ClusterSpec, Process, routers, worker_config
from pdserve.launch.supervisor import REDIS, SupervisedProcess

if TYPE_CHECKING:
    from pdserve.launch.detached.saved import SavedCluster

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
    error: str
    memory: str = ""  # how it is divided, as JSON
    stage: str = ""  # of a worker that starts: IMPORTING, LOADING or WARMING
    phases: tuple[str, ...] = ()  # that have begun, each as a line of core/progress.py


@final
class ActorStart:
    """The start of a worker as an actor. Pure: the caller asks for its health, and emits what `observe` returns."""

    def __init__(self, worker_id: str, began_s: float, limit_s: float) -> None:
        self._worker_id, self._began_s, self._limit_s = worker_id, began_s, limit_s
        self._stage = SPAWNING
        self._told: set[str] = set()
        self._pid = 0  # 0: its first process has not answered yet

    def observe(self, health: ActorHealth | None, now_s: float) -> list[str]:
        """What has changed. None: it has not answered. Raises StartFailed if it cannot start."""
        texts = []
        if health is not None:
            if health.error:
                raise StartFailed(f"{self._worker_id}: {health.error}")
            self._pid = self._pid or health.pid
            if self._pid != health.pid:
                raise self._ended()
            self._stage = health.stage
            texts = list(health.phases)
        if now_s - self._began_s > self._limit_s:
            still = f"{self._worker_id} {self._stage}"
            raise StartFailed(f"not started within {self._limit_s:.0f} s: {still}{_LOGS}")
        changed = [one for one in (f"{NOW}{self._stage}", *texts) if one not in self._told]
        self._told.update(changed)
        if health is not None and health.address:
            changed.append(f"{TOOK}{now_s - self._began_s:.2f} s")
        return changed

    def lost(self, why: str) -> None:
        """Ray cannot reach the actor. Raises StartFailed, unless its first process has not answered yet."""
        if self._pid:
            raise self._ended(f": {why}")

    def _ended(self, why: str = "") -> StartFailed:
        return StartFailed(f"{self._worker_id}: its process ended while it {self._stage}{why}{_LOGS}")


def emit(name: str, text: str) -> None:
    sys.stdout.write(f"@{name} {text}\n")
    sys.stdout.flush()


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


# --- what the launcher wants ----------------------------------------------------------------------------------

STATE: Final = "state "  # followed by what `states_to_json` returns
MAX_ERROR_CHARS: Final = 400
MAX_LISTED_ERRORS: Final = 16  # a line has a limit


class Phase(Enum):
    """Of a worker in Ray's driver."""

    PLACING = "placing"
    STARTING = "starting"
    UP = "up"
    FAILED = "failed"  # nothing of it runs
    ENDING = "ending"
    ENDED = "ended"


SETTLED: Final = frozenset({Phase.UP, Phase.FAILED, Phase.ENDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorker:
    """`revision` is another one for each start and each end. A worker that `is_ended` keeps its place on a node."""

    worker_id: str
    role: Role
    revision: int
    config: WorkerConfig
    is_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCluster:
    cluster: str
    strategy: str
    wait_s: float  # in which a worker must be placed
    workers: tuple[WantedWorker, ...]
    has_started: bool = False  # once, so a driver that is started again need not wait for all workers

    def to_json(self) -> str:
        """Without secrets."""
        workers = [
            {"id": one.worker_id, "role": one.role.value, "revision": one.revision, "is_ended": one.is_ended}
            | {"flags": to_flags(one.config)}
            for one in self.workers
        ]
        named = {"cluster": self.cluster, "strategy": self.strategy, "wait_s": self.wait_s}
        return json.dumps({**named, "has_started": self.has_started, "workers": workers})

    @classmethod
    def from_json(cls, text: str, config: Callable[[tuple[str, ...]], WorkerConfig]) -> WantedCluster:
        """`config` reads flags, with the secrets."""
        fields = json.loads(text)
        workers = tuple(
            WantedWorker(
                worker_id=one["id"],
                role=Role(one["role"]),
                revision=one["revision"],
                is_ended=one["is_ended"],
                config=config(tuple(one["flags"])),
            )
            for one in fields.pop("workers")
        )
        return cls(**fields, workers=workers)


@final
class WantedFile:
    """What the launcher has written last, as one object until it writes again."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        """`environ`: the secrets."""
        self._path, self._environ = Path(path), environ
        self._configs: dict[tuple[str, ...], WorkerConfig] = {}
        self._read: tuple[str, WantedCluster] | None = None

    def read(self) -> WantedCluster:
        text = self._path.read_text()
        if self._read is None or text != self._read[0]:
            wanted = WantedCluster.from_json(text, self._config)
            self._read = text, wanted
            used = {tuple(to_flags(one.config)) for one in wanted.workers}
            self._configs = {flags: one for flags, one in self._configs.items() if flags in used}
        return self._read[1]

    def _config(self, flags: tuple[str, ...]) -> WorkerConfig:
        if flags not in self._configs:
            self._configs[flags] = parse_flags(WorkerConfig, flags, prog="worker", environ=self._environ)
        return self._configs[flags]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    revision: int
    phase: Phase
    error: str = ""


def states_to_json(states: Mapping[str, WorkerState]) -> str:
    """One line, of bounded length."""
    found: dict[str, list[Any]] = {}
    errors = 0
    for name, one in states.items():
        found[name] = [one.revision, one.phase.value]
        if one.error and errors < MAX_LISTED_ERRORS:
            errors += 1
            found[name].append(one.error[:MAX_ERROR_CHARS])
    return json.dumps(found)


def states_from_json(text: str) -> dict[str, WorkerState]:
    return {
        name: WorkerState(revision=revision, phase=Phase(phase), error=error[0] if error else "")
        for name, (revision, phase, *error) in json.loads(text).items()
    }


# --- cluster --------------------------------------------------------------------------------------------------

DRIVER: Final = "ray"
PLACEMENT: Final = "placement"  # a step of the driver
DRIVER_START_S: Final = 600.0  # without the wait for nodes
WORKER_START_S: Final = 600.0  # once it is placed
ENDING_S: Final = 30.0  # until a worker that has drained is gone
REPORT_S: Final = 30.0  # until the driver reports what it has done
REDIS_WAIT_S: Final = 10.0
REDIS_RETRY_S: Final = 0.2
SHUTDOWN_S: Final = 20.0  # time for Ray itself to end, after the workers have drained
WANTED: Final = "workers.json"  # in the launcher's folder
_EVENT: Final = re.compile(r"^@(\w+) (.*)$")
_TOOK: Final = re.compile(rf"^{TOOK}(\d+\.\d+) s$")


@final
class RayCluster(ChangingCluster):
    """The workers are actors of Ray, which Ray itself restarts. The driver starts and ends them."""

    what_follows = "`pdserve restart` tries again"

    def __init__(
        self, spec: ClusterSpec, address: str, report: LauncherReport, *, saved: SavedCluster | None = None
    ) -> None:
        """`address` of a Ray cluster; empty starts one here. `saved` as of LaunchedCluster."""
        super().__init__(spec, report, ray=address, saved=saved)
        self._file = self._sockets.path / WANTED
        self._has_started = saved is not None
        if saved is None:
            self._wanted = {name: self._want(name, 0, {}) for name in self.spec.worker_ids}
        else:  # the driver goes on with what it has read
            secrets = _worker_secrets(self.spec)
            self._wanted = {one.worker_id: one for one in WantedFile(str(self._file), secrets).read().workers}
            for slot in self.spec.slots:
                wanted = None if slot.is_vacant else self._wanted.get(slot.worker_id)
                if wanted is not None and wanted.role is not slot.role:
                    self.spec = with_role(self.spec, slot.worker_id, wanted.role)
        self._revision = max((one.revision for one in self._wanted.values()), default=0)
        self._states: Mapping[str, WorkerState] = {}  # as the driver reports them
        self._has_changed = asyncio.Event()
        self._listeners: dict[str, Say] = {}  # by the worker that starts during a change
        self._took_s: dict[str, float] = {}  # by the worker or the step of the driver that was started last
        self._driver = SupervisedProcess(
            name=DRIVER,
            program=("pdserve.launch.ray_cluster", address, str(self._file)),
            env=tuple(_driver_env(self.spec).items()),
            start_s=DRIVER_START_S + self.spec.ray_wait_s,
            drain_s=self._longest_drain_s(),
            on_line=self._on_line,
        )

    async def adopt(self, link: KeeperLink, attached: Attached) -> str:
        self._want_all()
        return await super().adopt(link, attached)

    def _want_all(self) -> None:
        """The former launcher may have been killed before it had asked for a worker, or while it ended one that it
        would have started again. An additional worker of a roll-out is then ended as all others are."""
        missing = [one for one in self.spec.worker_ids if one not in self._wanted or self._wanted[one].is_ended]
        for worker_id in missing:
            self._revision += 1
            self._wanted[worker_id] = self._want(worker_id, self._revision, self._overlays[worker_id])
        if missing:
            self._write()

    def _processes(self) -> list[Process]:
        return self._routers()

    def _all_processes(self, address: str) -> list[SupervisedProcess]:
        return [self._driver, *super()._all_processes(address)]

    def _routers(self) -> list[Process]:
        return routers(self.spec, ())

    async def _start_workers(self, workers: Sequence[Process]) -> None:
        self._write()
        await self._supervisor.start(self._driver)
        self._has_started = True
        self._write()

    def _names_of_workers(self) -> Sequence[str]:
        return [DRIVER]

    def _first_start_s(self) -> float:
        """With the wait for their nodes, which a worker that is added may need too."""
        return self._took_s.get(PLACEMENT, 0.0) + max(self._took_s.get(one, 0.0) for one in self.spec.worker_ids)

    def _steps(self) -> list[str]:
        return ray_start_steps(self.spec, has_own_redis=self.has_own_redis)

    async def _check_redis(self) -> None:
        await check_redis(self.spec, self._report)
        await super()._check_redis()

    # -- changes -------------------------------------------------------------------------------------------------

    def _with_worker(self, worker_id: str, role: Role, *, is_surge: bool) -> ClusterSpec:
        """Ray gives it ports and GPUs."""
        return add_worker(self.spec, worker_id, role, 0, is_surge=is_surge)

    async def _start_worker(self, worker_id: str, overlay: Settings, say: Say, *, is_retried: bool = False) -> None:
        """Returns when the worker has a node and listens there."""
        self._revision += 1
        wanted = self._wanted[worker_id] = self._want(worker_id, self._revision, overlay)
        self._listeners[worker_id] = say
        try:
            self._write()
            state = await self._settled(wanted, self.spec.ray_wait_s + WORKER_START_S + REPORT_S)
        finally:
            del self._listeners[worker_id]
        if state is None:
            raise StartFailed(f"{worker_id}: Ray's driver does not report that it has started")
        if state.phase is not Phase.UP:
            raise StartFailed(state.error or f"{worker_id}: it did not start")

    async def _end_worker(self, worker_id: str) -> None:
        """It keeps its place on its node, for a worker of the same name, until it is forgotten."""
        former = self._wanted.get(worker_id)
        if former is None:  # it had no settings that can be used
            return
        self._revision += 1
        wanted = self._wanted[worker_id] = replace(former, revision=self._revision, is_ended=True)
        self._write()
        if await self._settled(wanted, former.config.drain_s + ENDING_S + REPORT_S) is None:
            self._report.say(worker_id, "Ray's driver does not report that it has ended")

    def _drain_s(self, worker_id: str) -> float:
        return self._wanted[worker_id].config.drain_s

    def _told(self) -> None:
        """Also gives the places of workers back that there are no more."""
        super()._told()
        gone = self._wanted.keys() - set(self.spec.worker_ids)
        for worker_id in gone:
            del self._wanted[worker_id]
        if gone:
            self._write()

    def _want(self, worker_id: str, revision: int, overlay: Settings) -> WantedWorker:
        spec = replace(self.spec, settings=overlaid(self.spec.settings, overlay))
        role, config = worker_config(spec, index_of(spec, worker_id))
        return WantedWorker(worker_id=worker_id, role=role, revision=revision, config=config)

    def _longest_drain_s(self) -> float:
        return SHUTDOWN_S + max(one.config.drain_s for one in self._wanted.values())

    def _write(self) -> None:
        """In one step, because the driver reads it at any time."""
        wanted = WantedCluster(
            cluster=self.spec.cluster,
            strategy=self.spec.ray_strategy,
            wait_s=self.spec.ray_wait_s,
            workers=tuple(self._wanted.values()),
            has_started=self._has_started,
        )
        written = self._file.with_suffix(".new")
        with os.fdopen(open_private(written), "w") as file:
            file.write(wanted.to_json())
        written.replace(self._file)
        self._driver = replace(self._driver, drain_s=self._longest_drain_s())
        self._supervisor.replace(self._driver)

    async def _settled(self, wanted: WantedWorker, limit_s: float) -> WorkerState | None:
        """The state of a worker once the driver has done what is wanted. None: it has not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    self._has_changed.clear()
                    state = self._states.get(wanted.worker_id)
                    if state is not None and state.revision == wanted.revision and state.phase in SETTLED:
                        return state
                    await self._has_changed.wait()
        return None

    def _on_line(self, line: str) -> None:
        name, text = _event(line) or ("", "")
        if name == DRIVER and text.startswith(STATE):
            self._states = states_from_json(text.removeprefix(STATE))
            self._has_changed.set()
            return
        if took := _TOOK.match(text):
            self._took_s[name] = float(took.group(1))
        if text.startswith(NOW) and name in self._listeners:
            self._listeners[name](name, text.removeprefix(NOW))
        show(self._report, line)


def _event(line: str) -> tuple[str, str] | None:
    found = _EVENT.match(line)
    return None if found is None else (found.group(1), found.group(2))


def show(report: LauncherReport, line: str) -> None:
    """The driver reports events as `@NAME TEXT`; all other lines come from Ray."""
    event = _event(line)
    if event is None:
        report.relay(DRIVER)(line)
        return
    name, text = event
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
        if why != told:
            report.say(REDIS, f"{where} does not answer ({why}); waiting for it for at most {limit_s:.0f} s")
            told = why
        if time.monotonic() >= deadline_s:
            raise Unavailable(
                f"redis: {where} does not answer ({why}), and with --ray the router finds the workers only there; "
                "start it, give another URL, or leave --redis out to start one here"
            )
        await asyncio.sleep(REDIS_RETRY_S)


def ray_start_steps(spec: ClusterSpec, *, has_own_redis: bool) -> list[str]:
    """As `start_steps`, with the steps of the driver before the workers."""
    steps = start_steps(spec, has_own_redis=has_own_redis)
    begin = 1 if has_own_redis else 0
    end = begin + len(spec.worker_ids)
    return [*steps[:begin], "ray_init", PLACEMENT, *steps[begin:end], DRIVER, *steps[end:]]


def _driver_env(spec: ClusterSpec) -> dict[str, str]:
    held = {**_worker_secrets(spec), RAY_TOKEN_ENV: os.environ.get(RAY_TOKEN_ENV, "")}
    return {name: value for name, value in held.items() if value}


def _worker_secrets(spec: ClusterSpec) -> dict[str, str]:
    kv_store = str(spec.settings.get("worker", {}).get("kv_store", ""))
    return {SECRET_ENV: spec.cluster_secret, REDIS_ENV: spec.redis, KV_STORE_ENV: kv_store}
