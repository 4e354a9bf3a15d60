"""The driver of `up --ray`: makes each worker a Ray actor and replaces actors that Ray has given up.

    python -m pdserve.launch.ray_cluster ADDRESS SPEC

The only module that imports ray. Ray places the workers and restarts them. Requests, tokens and KV never pass through
it, so losing its control plane stops no request. Reports events on stdout as `@NAME TEXT`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from pdserve.config import REDIS_ENV, SECRET_ENV, WorkerConfig, forget_secrets, from_env
from pdserve.config_flags import parse_flags, to_env, to_flags
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.progress import PhaseProgress, phase_line
from pdserve.core.types import Role
from pdserve.engine.load_engine import VLLM
from pdserve.launch import confine
from pdserve.launch.engine_python import ANSWER_S, trouble_with
from pdserve.launch.ports import listeners, session_of
from pdserve.launch.rank_actor import RankActor
from pdserve.launch.spec import (
    MODULES,
    ClusterSpec,
    ray_bundles,
    ray_resources,
    remote_ranks,
    waiting_env,
    why_not_placed,
    worker_config,
)
from pdserve.launch.supervisor import StartFailed
from pdserve.launch.with_ray import (
    BEGINS,
    IMPORTING,
    LOADING,
    NOW,
    PLACING,
    TOOK,
    WARMING,
    ActorHealth,
    ActorStarts,
    emit,
    last_line,
    spec_from_json,
)
from pdserve.model_source import TOY, find_model
from pdserve.owned_folder import OwnedFolder
from pdserve.progress import PhaseReport
from pdserve.telemetry.logs import log_to_stderr

if TYPE_CHECKING:
    from pdserve.worker.host import WorkerHost

if __name__ == "__main__":  # before the import of ray, which reads its environment at import
    FOLDER: OwnedFolder | None = None
    if sys.argv[1]:
        confine.join(os.environ)
    else:
        FOLDER = confine.confine(os.environ)

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

NAMESPACE: Final = "pdserve"
START_S: Final = 600.0
GIVE_BACK_S: Final = 5.0
_OBJECT_STORE_BYTES: Final = 100 * 2**20  # no data of ours is sent there
_HEALTH_S: Final = 2.0
_WATCH_S: Final = 0.5
_ASK_S: Final = 2 * ANSWER_S  # with the start of the process of Ray that asks
_POLL_S: Final = 0.1  # between two looks at workers that start
_QUIET_S: Final = 10.0  # interval between two reports that Ray does not answer
_LOOPBACK: Final = re.compile(r"unix:|rediss?://(.*@)?(127\.|localhost|\[::1\])")


def _make_host(module: str, config: WorkerConfig) -> WorkerHost:
    """Imports the role's program in the actor's process alone: the driver needs no engine."""
    if module == MODULES[Role.PREFILL]:
        import prefill_worker.program

        return prefill_worker.program.make_host(config)
    import decode_worker.program

    return decode_worker.program.make_host(config)


class WorkerActor:
    """One worker process under Ray. The constructor runs again at each restart; health has its own thread."""

    def __init__(self, module: str, flags: Sequence[str], hidden: Mapping[str, str], is_on_many_hosts: bool) -> None:
        """Returns at once, so that `health` can be asked how far the start is."""
        self._host: WorkerHost | None = None
        self._address = ""
        self._error = ""
        self._stage = IMPORTING
        self._phases: dict[str, str] = {}  # the last line of each
        PhaseReport.listener = self._phase_changed
        log_to_stderr(module)  # Ray writes it into its session's log files
        arguments = (module, flags, hidden, is_on_many_hosts)
        threading.Thread(target=self._start, args=arguments, name="start", daemon=True).start()

    def _start(self, module: str, flags: Sequence[str], hidden: Mapping[str, str], is_on_many_hosts: bool) -> None:
        try:
            config = parse_flags(WorkerConfig, flags, prog=module, environ=hidden)
            confine.check_redis_socket(config.redis)
            here = ray.util.get_node_ip_address()
            if is_on_many_hosts:
                config = dataclasses.replace(config, host=here)
            if config.rendezvous:  # the node was not known before
                rendezvous = f"{here}:{config.rendezvous.rpartition(':')[2]}"
                config = dataclasses.replace(config, host=here, rendezvous=rendezvous)
            config = dataclasses.replace(config, model=find_model(config.model, has_weights=config.engine != TOY))
            self._host = _make_host(module, config)
            self._address = self._host.start()
        except PdserveError as error:  # reported by health(), because Ray would wrap it in its own traceback
            self._error = str(error)
        except BaseException as error:
            log.exception("the worker did not start")
            self._error = f"{type(error).__name__}: {last_line(error)}"

    def _phase_changed(self, one: PhaseProgress) -> None:
        self._stage = WARMING if one.phase == "calibration" else LOADING
        self._phases[one.phase] = phase_line(one)

    @ray.method(concurrency_group="health")
    def health(self) -> ActorHealth:
        started = self._host if self._address else None
        return ActorHealth(
            pid=os.getpid(),
            address=self._address,
            is_healthy=started is not None and started.is_healthy(),
            error=self._error,
            memory="" if started is None else started.memory,
            stage=self._stage,
            phases=tuple(self._phases.values()),
        )

    def drain(self, timeout_s: float) -> None:
        """Returns when the running attempts have ended or the time limit is reached."""
        if self._host is not None:
            self._host.drain()
            self._host.wait(timeout_s)


@final
class RayDriver:
    """Owns the actors. `address` is of a Ray cluster; empty starts one on this host, which keeps its files in
    `folder`."""

    def __init__(self, spec: ClusterSpec, address: str, folder: OwnedFolder | None) -> None:
        self._spec = spec
        self._address = address
        self._folder = folder
        self._configs = {spec.worker_ids[index]: worker_config(spec, index) for index in range(len(spec.worker_ids))}
        self._bundles = ray_bundles(spec)
        self._actors: dict[str, Any] = {}
        # for workers with ranks on other nodes: rendezvous address, actors
        self._ranks: dict[str, tuple[str, list[Any]]] = {}
        self._last: dict[str, ActorHealth] = {}
        self._group: Any = None
        self._is_on_many_hosts = False
        self._actor_class = ray.remote(concurrency_groups={"health": 1})(WorkerActor)

    def start(self) -> str:
        """Returns the address of Ray's control plane once every worker listens."""
        for name, work in (("ray_init", self._init), ("placement", self._place)):
            began_s = time.monotonic()
            emit(name, BEGINS)
            work()
            emit(name, f"{TOOK}{time.monotonic() - began_s:.2f} s")
        self._wait_for_workers()
        for warning in confine.warnings(os.environ, self._open_ports(), is_own=not self._address):
            emit("ray", warning)
        address = str(ray.get_runtime_context().gcs_address)
        emit("ray", f"its state: {confine.status_command(os.environ, address, Path(sys.executable))}")
        return address

    def reconcile(self, stop: threading.Event) -> None:
        """Checks each actor in turn until `stop`; replaces one only after Ray itself has given it up."""
        told_s = 0.0
        while True:
            for worker_id in self._actors:
                if stop.wait(_WATCH_S):
                    return
                try:
                    self._look(worker_id)
                except (ray.exceptions.RayError, TimeoutError, ConnectionError, RuntimeError, ValueError) as error:
                    if time.monotonic() - told_s > _QUIET_S:
                        told_s = time.monotonic()
                        emit("ray", f"{worker_id} does not report ({last_line(error)}); requests continue")

    def stop(self) -> None:
        """Drains the workers in parallel, then frees their placement; ends Ray if it is ours."""
        drain_s = max(config.drain_s for _, config in self._configs.values())
        calls = [actor.drain.remote(drain_s) for actor in self._actors.values()]
        ray.wait(calls, num_returns=len(calls), timeout=drain_s)
        # Without its control plane Ray would wait for it here; the launcher ends the remaining processes.
        ending = threading.Thread(target=self._give_back, daemon=True)
        ending.start()
        ending.join(GIVE_BACK_S)
        if self._folder is not None:
            self._folder.remove()
        if ending.is_alive():
            os._exit(0)

    def _give_back(self) -> None:
        for actor in [*self._actors.values(), *(rank for _, ranks in self._ranks.values() for rank in ranks)]:
            ray.kill(actor, no_restart=True)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _init(self) -> None:
        if self._address:
            ray.init(self._address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        else:
            ray.init(
                "local",  # not another user's Ray on this host
                namespace=NAMESPACE,
                num_cpus=max(os.cpu_count() or 1, self._needed_cpus()),  # any N + M workers start on a laptop
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=None if self._folder is None else confine.temp_dir(self._folder),
            )

    def _open_ports(self) -> list[str]:
        """For our own Ray, from the kernel; for another one, the addresses that its nodes report."""
        if not self._address:
            return [str(one) for one in listeners(session_of(os.getpid())) if not one.is_on_loopback]
        nodes = [node for node in ray.nodes() if node["Alive"] and not node["NodeManagerAddress"].startswith("127.")]
        return [f"raylet on {node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in nodes]

    def _place(self) -> None:
        bundles = [self._resources(worker_id, count) for worker_id, count in self._bundles]
        free, strategy = ray.available_resources(), self._spec.ray_strategy
        if strategy == "auto":  # GPUs of one node exchange KV without a network
            strategy = "pack" if any("GPU" in bundle for bundle in bundles) else "spread"
        for worker_id in self._configs:
            emit(worker_id, BEGINS)
            emit(worker_id, f"{NOW}{PLACING}")
        self._group = placement_group(bundles, strategy=strategy.upper(), name=f"pdserve-{self._spec.cluster}")
        if not self._group.wait(self._spec.ray_wait_s):
            raise StartFailed(why_not_placed(bundles, free, ray.cluster_resources(), self._spec.ray_wait_s))
        # Only now, because nodes may have joined while the workers waited for them.
        self._is_on_many_hosts = sum(bool(node["Alive"]) for node in ray.nodes()) > 1
        if self._is_on_many_hosts and _LOOPBACK.match(self._spec.redis):
            raise ConfigError("redis", self._spec.redis, "a URL that every host of the Ray cluster reaches")
        if self._address:
            self._check_pythons()
        for worker_id in self._configs:
            self._create(worker_id)

    def _check_pythons(self) -> None:
        """On the nodes where the workers are placed: Ray would start an absent Python again and again, and tell nobody.
        If the nodes' own Python has no pdserve, nothing is known. Raises StartFailed."""
        calls = {}
        for worker_id, (_, config) in self._configs.items():
            if config.engine_python:
                at = PlacementGroupSchedulingStrategy(self._group, self._bundles.index((worker_id, 0)))
                asking = ray.remote(trouble_with).options(num_cpus=0, max_retries=0, scheduling_strategy=at)
                calls[worker_id] = asking.remote(config.engine_python, is_for_vllm=config.engine == VLLM)
        until_s = time.monotonic() + _ASK_S  # for all together
        for worker_id, call in calls.items():
            trouble = ""
            with contextlib.suppress(ray.exceptions.RayError):
                trouble = ray.get(call, timeout=max(0.0, until_s - time.monotonic()))
            if trouble:
                raise StartFailed(f"{worker_id}, on its node: {trouble}")

    def _create(self, worker_id: str) -> None:
        role, config = self._configs[worker_id]
        options = self._actor_class.options(
            name=f"pdserve-{self._spec.cluster}-{worker_id}",
            num_cpus=self._resources(worker_id)["CPU"],
            num_gpus=self._resources(worker_id).get("GPU", 0),
            max_restarts=-1,
            max_task_retries=0,  # a generation is not idempotent
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._bundles.index((worker_id, 0))),
            runtime_env=_environment(config),
        )
        self._actors[worker_id] = options.remote(
            MODULES[role], to_flags(config), to_env(config), self._is_on_many_hosts
        )
        self._see_to_ranks(worker_id)

    def _see_to_ranks(self, worker_id: str) -> None:
        """Starts the ranks on other nodes, with the address of the first rank, which changes if its node is lost."""
        _, config = self._configs[worker_id]
        if not config.rendezvous:
            return
        first = self._bundles.index((worker_id, 0))
        node = ray.util.placement_group_table(self._group)["bundles_to_node_id"].get(first)
        where = next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node and one["Alive"]), None)
        address = f"{where}:{config.rendezvous.rpartition(':')[2]}"
        before, ranks = self._ranks.get(worker_id, ("", []))
        if where is None or address == before:
            return
        tls = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_peer_name")}
        for rank in ranks:
            ray.kill(rank, no_restart=True)
        self._ranks[worker_id] = (
            address,
            [
                ray.remote(RankActor)
                .options(
                    num_cpus=self._resources(worker_id, count)["CPU"],
                    num_gpus=self._resources(worker_id, count).get("GPU", 0),
                    max_restarts=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, first + number),
                    runtime_env=_environment(config),
                )
                .remote(address, count, config.model, to_env(config), START_S, tls)
                for number, count in enumerate(remote_ranks(config), 1)
            ],
        )

    def _wait_for_workers(self) -> None:
        """The first worker that fails ends the start, also while others load."""
        starts = ActorStarts(self._actors, time.monotonic(), START_S)
        calls: dict[str, Any] = {}
        while starts.waiting:
            for worker_id in starts.waiting:
                if worker_id not in calls:
                    calls[worker_id] = self._actors[worker_id].health.remote()
                health: ActorHealth | None = None
                try:
                    if ray.wait([calls[worker_id]], timeout=0)[0]:
                        health = ray.get(calls.pop(worker_id))
                except ray.exceptions.ActorUnavailableError as error:
                    starts.lost(worker_id, last_line(error))
                except ray.exceptions.ActorDiedError as error:
                    raise StartFailed(f"{worker_id}: {last_line(error)}") from None
                for text in starts.observe(worker_id, health, time.monotonic()):
                    emit(worker_id, text)
                if health is not None and health.address:
                    self._note(worker_id, health)
            time.sleep(_POLL_S)

    def _look(self, worker_id: str) -> None:
        self._see_to_ranks(worker_id)
        try:
            health = self._health(worker_id, _HEALTH_S)
        except ray.exceptions.ActorUnavailableError:  # it is being started again
            self._lost(worker_id)
        except ray.exceptions.ActorDiedError as error:
            self._lost(worker_id)
            emit(worker_id, f"Ray has given it up ({last_line(error)}); it is created again")
            self._create_again(worker_id)
        else:
            if health.error:
                emit(worker_id, f"did not come back: {health.error}; it is created again")
                self._create_again(worker_id)
            elif not health.address:  # it is being started again
                self._lost(worker_id)
            else:
                self._note(worker_id, health)

    def _create_again(self, worker_id: str) -> None:
        ray.kill(self._actors[worker_id], no_restart=True)
        self._create(worker_id)

    def _health(self, worker_id: str, timeout_s: float) -> ActorHealth:
        health: ActorHealth = ray.get(self._actors[worker_id].health.remote(), timeout=timeout_s)
        return health

    def _resources(self, worker_id: str, ranks: int = 0) -> dict[str, float]:
        """Resources for this many ranks on one node; 0: for those on the worker's first node."""
        _, config = self._configs[worker_id]
        return ray_resources(config, has_gpus=ray.cluster_resources().get("GPU", 0) > 0, ranks=ranks or None)

    def _needed_cpus(self) -> int:
        configs = [(self._configs[worker_id][1], count or None) for worker_id, count in self._bundles]
        return math.ceil(sum(ray_resources(one, has_gpus=False, ranks=count)["CPU"] for one, count in configs))

    def _lost(self, worker_id: str) -> None:
        health = self._last.pop(worker_id, None)
        if health is not None:
            emit(worker_id, f"pid {health.pid} was lost; Ray starts it again")

    def _note(self, worker_id: str, health: ActorHealth) -> None:
        if worker_id in self._last and self._last[worker_id].pid != health.pid:
            self._lost(worker_id)
        if worker_id not in self._last:
            emit(worker_id, f"pid {health.pid} listens on {health.address}")
            if health.memory:
                emit(worker_id, f"memory {health.memory}")
        self._last[worker_id] = health


def _environment(config: WorkerConfig) -> dict[str, Any]:
    """Ray's runtime environment of a worker's actors."""
    python = {"py_executable": config.engine_python} if config.engine_python else {}
    return {"env_vars": {"OMP_NUM_THREADS": str(config.threads), **waiting_env(os.environ)}, **python}


def main(address: str, spec: str, folder: OwnedFolder | None) -> int:
    driver = RayDriver(spec_from_json(spec, from_env(SECRET_ENV), from_env(REDIS_ENV)), address, folder)
    forget_secrets()  # Ray's child processes would inherit them; actors receive theirs separately
    stop = threading.Event()
    try:
        control = driver.start()
    except Exception as error:  # Ray raises RuntimeError, ConnectionError, RayError and its own ValueErrors
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        is_of_ray = address and not isinstance(error, PdserveError)
        hint = f" (RAY_AUTH_MODE is {mode} here; it must be as on the cluster)" if is_of_ray else ""
        if folder is not None:
            hint = f" (until the next start, Ray's logs are in {folder.path})"
        sys.stderr.write(f"error: {last_line(error)}{hint}\n")
        return 1
    # Only now, because Ray has installed its own handlers, which end the process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sys.stdout.write(f"ray_cluster {NAMESPACE} listening on {control}\n")
    sys.stdout.flush()
    driver.reconcile(stop)
    driver.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], FOLDER))
