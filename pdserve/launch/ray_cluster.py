"""A cluster whose workers are Ray actors. The only module that imports ray.

Ray places the workers and starts them again; requests, tokens and KV never pass through it, so losing its control
plane stops no request. The router and Redis are plain processes beside this launcher. A restarted worker has a new
incarnation and a new port: routers find it through the registry in Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.config import WorkerConfig, parse_flags, to_flags
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.launch.call_thread import CallThread
from pdserve.launch.child import StartFailed
from pdserve.launch.crew import Crew
from pdserve.launch.local import ask_first, with_ports
from pdserve.launch.ports import free_ports
from pdserve.launch.report import Report
from pdserve.launch.spec import MODULES, ClusterSpec, router, worker_config

NAMESPACE: Final = "pdserve"
# Small on purpose: the engine's threads are set by WorkerConfig, and any N + M workers fit on a laptop.
WORKER_CPUS: Final = 0.01
INIT_S: Final = 120.0
PLACE_S: Final = 120.0
START_S: Final = 600.0
SHUTDOWN_S: Final = 20.0
_OBJECT_STORE_BYTES: Final = 100 * 2**20  # nothing of ours goes there
_HEALTH_S: Final = 2.0
_WATCH_S: Final = 0.5
_QUIET_S: Final = 10.0  # between two reports that Ray does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What an actor says of itself; `error` is why its worker could not start."""

    pid: int
    address: str
    is_healthy: bool
    error: str


class WorkerActor:
    """One worker process under Ray. The constructor runs again at each restart; a health call has its own thread."""

    def __init__(self, module: str, flags: Sequence[str], is_on_many_hosts: bool) -> None:
        self._host: Any = None
        self._address = ""
        self._error = ""
        try:
            config = parse_flags(WorkerConfig, flags, prog=module)
            if is_on_many_hosts:
                config = dataclasses.replace(config, host=ray.util.get_node_ip_address())
            self._host = importlib.import_module(f"{module}.program").make_host(config)
            self._address = self._host.start()
        except PdserveError as error:  # told by health(): Ray would wrap it in its own traceback
            self._error = str(error)

    def health(self) -> Health:
        is_healthy = not self._error and bool(self._host.is_healthy())
        return Health(pid=os.getpid(), address=self._address, is_healthy=is_healthy, error=self._error)

    def drain(self, timeout_s: float) -> None:
        """Returns when the residents have finished or their time is over."""
        if self._host is not None:
            self._host.drain()
            self._host.wait(timeout_s)


@final
class RayCluster:
    """`start`, then `run`, then `stop`, as LocalCluster. `address` is of a Ray cluster; empty starts one here."""

    def __init__(self, spec: ClusterSpec, address: str, report: Report) -> None:
        self._report = report
        self._ray_address = address
        self._crew = Crew(report)
        self._ray = CallThread("ray")  # also keeps alive what ray.init forks: it dies with the thread that forked it
        self._actors: dict[str, Any] = {}
        self._last: dict[str, Health] = {}
        self._group: Any = None
        self._is_on_many_hosts = False
        self._redis_port = 0
        if not spec.redis:
            [self._redis_port] = free_ports(1)
            spec = dataclasses.replace(spec, redis=f"redis://127.0.0.1:{self._redis_port}/0")
        self.spec = dataclasses.replace(with_ports(spec), worker_ports=())

    async def start(self) -> str:
        """Returns the router's address once a real token has come through it. Raises what stood in the way."""
        if self._redis_port:
            await self._crew.start_redis(self._redis_port)
        await self._phase("ray", self._ray.call(self._init, timeout_s=INIT_S))
        await self._phase("placement", self._ray.call(self._place, timeout_s=PLACE_S))
        await self._phase("workers", self._start_workers())
        process = router(self.spec, ())
        await self._crew.start(process, process.start_s)
        address = self._crew.address(process.name)
        await self._crew.unless_ended(ask_first(self.spec, address, self._report))
        self._crew.keep()
        return address

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set. Brings back what ends: Ray its actors, the crew router and Redis."""
        tasks = [asyncio.ensure_future(one) for one in (stop.wait(), self._crew.watch(), self._reconcile())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for task in done:
            task.result()

    async def stop(self, *, is_graceful: bool) -> None:
        """The router first, so that no new work comes; then the workers together; then Ray, if it is ours; Redis."""
        await self._crew.release()
        await self._crew.stop(["router"], is_graceful=is_graceful)
        try:
            if is_graceful:
                drain_s = max(worker_config(self.spec, index)[1].drain_s for index in range(len(self.spec.worker_ids)))
                await self._ray.call(self._drain, drain_s, timeout_s=drain_s + SHUTDOWN_S)
            await self._ray.call(self._shutdown, timeout_s=SHUTDOWN_S)
        except Exception as error:  # Ray may be gone; its processes are tied to ours and end with us
            self._report.say("ray", f"did not shut down: {_last_line(error)}")
        self._report.say("ray", "stopped")
        await self._crew.stop_redis()

    async def _phase(self, name: str, work: Any) -> None:
        began_s = time.monotonic()
        self._report.say(name, "starting")
        try:
            await work
        except TimeoutError:
            raise StartFailed(f"{name} took longer than {time.monotonic() - began_s:.0f} s") from None
        except PdserveError:
            raise
        except Exception as error:  # Ray raises RuntimeError, ConnectionError, RayError and its own ValueErrors
            raise StartFailed(f"{name}: {_last_line(error)}") from error
        self._report.phase(name, time.monotonic() - began_s)

    # --- on Ray's thread ---------------------------------------------------------------------------------------

    def _init(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._ray_address:
            ray.init(self._ray_address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        else:
            # A raylet ends itself, and the actors with it, when its control plane stays away for a minute.
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
            ray.init(
                namespace=NAMESPACE,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
            )
        self._is_on_many_hosts = sum(bool(node["Alive"]) for node in ray.nodes()) > 1
        if self._is_on_many_hosts and self._redis_port:
            raise ConfigError("redis", "none", "a URL that every host of the Ray cluster reaches")

    def _place(self) -> None:
        needs_gpu = self._needs_gpu()
        bundle = {"CPU": WORKER_CPUS, **({"GPU": 1.0} if needs_gpu else {})}
        workers = len(self.spec.worker_ids)
        self._group = placement_group([bundle] * workers, strategy="PACK", name=f"pdserve-{self.spec.cluster}")
        if not self._group.wait(PLACE_S):
            has = ray.cluster_resources()
            raise StartFailed(f"Ray cannot place {workers} workers of {bundle}: it has {has.get('GPU', 0):g} GPUs")
        for index in range(workers):
            self._create(index)

    def _create(self, index: int) -> None:
        role, config = worker_config(self.spec, index)
        options: dict[str, Any] = {
            "name": f"pdserve-{self.spec.cluster}-{config.worker_id}",
            "namespace": NAMESPACE,
            "num_cpus": WORKER_CPUS,
            "num_gpus": 1 if self._needs_gpu() else 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(config.threads)}},
        }
        self._actors[config.worker_id] = (
            _actor_class().options(**options).remote(MODULES[role], to_flags(config), self._is_on_many_hosts)
        )

    def _needs_gpu(self) -> bool:
        device = worker_config(self.spec, 0)[1].device
        return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)

    def _health(self, worker_id: str, timeout_s: float) -> Health:
        health: Health = ray.get(self._actors[worker_id].health.remote(), timeout=timeout_s)
        return health

    def _recreate(self, worker_id: str) -> None:
        ray.kill(self._actors[worker_id], no_restart=True)
        self._create(self.spec.worker_ids.index(worker_id))

    def _drain(self, timeout_s: float) -> None:
        calls = [actor.drain.remote(timeout_s) for actor in self._actors.values()]
        ray.wait(calls, num_returns=len(calls), timeout=timeout_s)

    def _shutdown(self) -> None:
        if not ray.is_initialized():
            return
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    # --- on the event loop -------------------------------------------------------------------------------------

    async def _start_workers(self) -> None:
        for worker_id in self.spec.worker_ids:
            health = await self._ray.call(self._health, worker_id, START_S)
            if health.error:
                raise StartFailed(f"{worker_id} ended: {health.error}")
            self._note(worker_id, health)

    async def _reconcile(self) -> None:
        """Looks at each actor by turns; makes one anew only when Ray itself has given it up."""
        told_s = -_QUIET_S
        while True:
            for worker_id in self.spec.worker_ids:
                await asyncio.sleep(_WATCH_S)
                try:
                    health = await self._ray.call(self._health, worker_id, _HEALTH_S, timeout_s=2 * _HEALTH_S)
                except ray.exceptions.ActorUnavailableError:
                    self._lost(worker_id)
                except ray.exceptions.ActorDiedError as error:
                    self._lost(worker_id)
                    self._report.say(worker_id, f"Ray has given it up ({_last_line(error)}); making it anew")
                    await self._try(self._recreate, worker_id)
                except (ray.exceptions.RayError, TimeoutError, ConnectionError, RuntimeError) as error:
                    if time.monotonic() - told_s > _QUIET_S:
                        told_s = time.monotonic()
                        self._report.say("ray", f"no word of {worker_id} ({_last_line(error)}); requests go on")
                else:
                    if health.error:
                        self._report.say(worker_id, f"did not come back: {health.error}; making it anew")
                        await self._try(self._recreate, worker_id)
                    else:
                        self._note(worker_id, health)

    async def _try(self, function: Any, *args: Any) -> None:
        try:
            await self._ray.call(function, *args, timeout_s=PLACE_S)
        except Exception as error:  # the next turn tries again
            self._report.say("ray", _last_line(error))

    def _lost(self, worker_id: str) -> None:
        health = self._last.pop(worker_id, None)
        if health is not None:
            self._report.say(worker_id, f"pid {health.pid} was lost; Ray starts it again")

    def _note(self, worker_id: str, health: Health) -> None:
        before = self._last.get(worker_id)
        if before is None or before.pid != health.pid:
            if before is not None:
                self._lost(worker_id)
            self._report.say(worker_id, f"pid {health.pid} listens on {health.address}")
        self._last[worker_id] = health


def _actor_class() -> Any:
    ray.method(concurrency_group="health")(WorkerActor.health)  # marks the function
    return ray.remote(concurrency_groups={"health": 1})(WorkerActor)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
