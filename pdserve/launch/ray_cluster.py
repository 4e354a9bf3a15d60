"""The driver of `up --ray`: makes each worker a Ray actor and replaces actors that Ray has given up.

    python -m pdserve.launch.ray_cluster ADDRESS FILE

The only module that imports ray. The workers are those in FILE, also after it changes: `ray_workers.py` decides. Ray
places them and restarts them. Requests, tokens and KV never pass through it, so losing its control plane stops no
request. Reports events on stdout as `@NAME TEXT`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from pdserve.config import KV_STORE_ENV, REDIS_ENV, SECRET_ENV, WorkerConfig, forget_secrets, from_env
from pdserve.config_flags import parse_flags, to_env, to_flags
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.progress import PhaseProgress, phase_line
from pdserve.core.types import Role
from pdserve.engine.load_engine import VLLM
from pdserve.isolated.tied_program import session_of
from pdserve.launch import confine
from pdserve.launch.actor_api import ActorApi, ActorGone, ActorUnreachable, Bundles, NameTaken, RayTrouble
from pdserve.launch.engine_python import ANSWER_S, trouble_with
from pdserve.launch.ports import listeners
from pdserve.launch.rank_actor import RankActor
from pdserve.launch.ray_workers import RayWorkers
from pdserve.launch.spec import MODULES, Resources, ray_resources, remote_ranks, waiting_env
from pdserve.launch.with_ray import (
    BEGINS,
    IMPORTING,
    LOADING,
    PLACEMENT,
    STATE,
    TOOK,
    WARMING,
    WORKER_START_S,
    ActorHealth,
    WantedCluster,
    WantedFile,
    WantedWorker,
    emit,
    last_line,
    states_to_json,
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
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

NAMESPACE: Final = "pdserve"
GIVE_BACK_S: Final = 5.0
PLACE: Final = "place"  # a resource of a Ray of our own
NUM_PLACES: Final = 4096
_OBJECT_STORE_BYTES: Final = 100 * 2**20  # no data of ours is sent there
_ASK_S: Final = 2 * ANSWER_S  # with the start of the process of Ray that asks
_POLL_S: Final = 0.1
Ranks = tuple[str, list[Any]]  # rendezvous address, actors
_LOOPBACK: Final = re.compile(r"unix:|rediss?://(.*@)?(127\.|localhost|\[::1\])")


def _make_host(module: str, config: WorkerConfig) -> WorkerHost:
    """Imports the roles' programs in the actor's process alone: the driver needs no engine."""
    import decode_worker.program
    import prefill_worker.program

    if module == MODULES[Role.PREFILL]:
        return prefill_worker.program.make_host(config, decode_worker.program.build)
    return decode_worker.program.make_host(config, prefill_worker.program.build)


class WorkerActor:
    """One worker process under Ray. The constructor runs again at each restart; health has its own thread."""

    def __init__(self, module: str, flags: Sequence[str], hidden: Mapping[str, str], is_on_network: bool) -> None:
        """Returns at once, so that `health` can be asked how far the start is."""
        self._host: WorkerHost | None = None
        self._address = ""
        self._error = ""
        self._stage = IMPORTING
        self._phases: dict[str, str] = {}  # the last line of each
        PhaseReport.listener = self._phase_changed
        log_to_stderr(module)  # Ray writes it into its session's log files
        arguments = (module, flags, hidden, is_on_network)
        threading.Thread(target=self._start, args=arguments, name="start", daemon=True).start()

    def _start(self, module: str, flags: Sequence[str], hidden: Mapping[str, str], is_on_network: bool) -> None:
        try:
            config = parse_flags(WorkerConfig, flags, prog=module, environ=hidden)
            confine.check_redis_socket(config.redis)
            here = ray.util.get_node_ip_address()
            if is_on_network:
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


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Ray's errors as those of `ActorApi`."""
    try:
        yield
    except ray.exceptions.ActorUnavailableError as error:
        raise ActorUnreachable(last_line(error)) from None
    except ray.exceptions.ActorDiedError as error:
        raise ActorGone(last_line(error)) from None
    except ray.exceptions.ActorAlreadyExistsError as error:
        raise NameTaken(last_line(error)) from None
    except (ray.exceptions.RayError, TimeoutError, ConnectionError, RuntimeError, ValueError) as error:
        raise RayTrouble(last_line(error)) from None


@dataclass(slots=True, kw_only=True)
class Group:
    """A placement group, which the first `RayApi.is_placed` creates. So it is known, and can be removed, also if that
    call fails halfway."""

    name: str
    bundles: Bundles
    strategy: str
    node: str
    is_asked: bool = False
    group: Any = None
    ready: Any = None  # an object that exists once it is placed

    def create(self) -> None:
        if self.is_asked:
            self.remove()
        self.is_asked = True
        self.group = placement_group(
            [dict(one) for one in self.bundles],
            strategy=self.strategy.upper() if len(self.bundles) > 1 else "STRICT_PACK",
            name=self.name,
            _soft_target_node_id=self.node or None,  # Ray has it for STRICT_PACK alone
        )

    def remove(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)
        elif self.is_asked:
            with contextlib.suppress(ValueError):  # there is none of that name
                remove_placement_group(get_placement_group(self.name))


@final
class RayApi(ActorApi):
    """`address` as of the driver."""

    def __init__(self, address: str, redis: str) -> None:
        self._address, self._redis = address, redis
        self._suffix = secrets.token_hex(4)  # of placement groups: another launcher's may be called the same
        self._unknown: set[str] = set()  # names of actors whose creation failed, perhaps only after they were created
        self._actor_class = ray.remote(concurrency_groups={"health": 1})(WorkerActor)

    def bundles(self, config: WorkerConfig) -> Bundles:
        with _translated():
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        found = []
        for count in (0, *remote_ranks(config)):
            needs = ray_resources(config, has_gpus=has_gpus, ranks=count or None)
            if not self._address:  # any N + M workers share the cores of a laptop
                needs = {PLACE: 1.0, **{kind: one for kind, one in needs.items() if kind != "CPU"}}
            found.append(needs)
        return tuple(found)

    def nodes(self, config: WorkerConfig) -> Mapping[str, Resources]:
        with _translated():
            alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
            if not self._is_on_network(config):
                here = ray.get_runtime_context().get_node_id()
                alive = {name: one for name, one in alive.items() if name == here}
        return alive

    def _is_on_network(self, config: WorkerConfig) -> bool:
        """Whether the worker listens on its node's address instead of loopback. The settings decide about it, and not
        the nodes that are there: others may join later, or come back later than this driver."""
        return bool(self._address and not _LOOPBACK.match(self._redis) and (config.insecure or config.tls_cert))

    def resources(self) -> tuple[Resources, Resources]:
        with _translated():
            return ray.available_resources(), ray.cluster_resources()

    def place(self, name: str, bundles: Bundles, strategy: str, node: str) -> Group:
        return Group(name=f"{name}-{self._suffix}", bundles=bundles, strategy=strategy, node=node)

    def is_placed(self, place: Group) -> bool:
        with _translated():
            if place.group is None:
                place.create()
            place.ready = place.ready or place.group.ready()
            if not ray.wait([place.ready], timeout=0)[0]:
                return False
            ray.get(place.ready)  # raises the error, if it is one
        return True

    def node_of(self, place: Group) -> str:
        with _translated():
            return str(ray.util.placement_group_table(place.group)["bundles_to_node_id"].get(0) or "")

    def release(self, place: Group) -> None:
        with _translated():
            place.remove()

    def check(self, one: WantedWorker, place: Group) -> tuple[Any, float] | None:
        """Begins a check of the worker's Python, which Ray would start again and again if it is absent, and tell
        nobody. Raises ConfigError."""
        if not self._is_on_network(one.config) and self.node_of(place) not in self.nodes(one.config):
            if _LOOPBACK.match(self._redis):
                raise ConfigError("redis", self._redis, "a URL that every host of the Ray cluster reaches")
            expected = "--tls DIR or --insecure: workers on other hosts than the launcher's listen beyond loopback"
            raise ConfigError("tls", "nothing", expected)
        if not self._address or not one.config.engine_python:
            return None
        with _translated():
            at = PlacementGroupSchedulingStrategy(place.group, 0)
            asking = ray.remote(trouble_with).options(num_cpus=0, max_retries=0, scheduling_strategy=at)
            call = asking.remote(one.config.engine_python, is_for_vllm=one.config.engine == VLLM)
        return call, time.monotonic() + _ASK_S

    def complaint(self, call: tuple[Any, float]) -> str | None:
        """If the node's own Python has no pdserve, nothing is known."""
        asked, until_s = call
        try:
            if ray.wait([asked], timeout=0)[0]:
                return str(ray.get(asked))
        except ray.exceptions.RayError:
            return ""
        return None if time.monotonic() < until_s else ""

    def create(self, one: WantedWorker, cluster: str, place: Group, bundles: Bundles) -> Any:
        name, is_on_network = f"pdserve-{cluster}-{one.worker_id}", self._is_on_network(one.config)
        try:
            with _translated():
                actor = self._actor_class.options(
                    name=name,
                    max_restarts=-1,
                    max_task_retries=0,  # a generation is not idempotent
                    **_options(one.config, bundles[0], place, 0),
                ).remote(MODULES[one.role], to_flags(one.config), to_env(one.config), is_on_network)
        except NameTaken:
            if name in self._unknown:
                with _translated(), contextlib.suppress(ValueError):  # it has ended
                    ray.kill(ray.get_actor(name), no_restart=True)
            raise
        except RayTrouble:
            self._unknown.add(name)
            raise
        self._unknown.discard(name)
        return actor

    def with_ranks(self, one: WantedWorker, place: Group, bundles: Bundles, before: Ranks | None) -> Ranks | None:
        """Starts the ranks on other nodes, with the address of the first rank, which changes if its node is lost."""
        config = one.config
        if not config.rendezvous:
            return before
        node = self.node_of(place)
        with _translated():
            alive = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]}
            address = f"{alive.get(node)}:{config.rendezvous.rpartition(':')[2]}"
            if node not in alive or (before is not None and before[1] and address == before[0]):
                return before
            if before is not None:
                self.kill_ranks(before)
            tls = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_peer_name")}
            counts = remote_ranks(config)
            found: Ranks = (address, [])
            try:
                for number, (count, needs) in enumerate(zip(counts, bundles[1:], strict=True), 1):
                    options = _options(config, needs, place, number)
                    rank = ray.remote(RankActor).options(max_restarts=-1, **options)
                    found[1].append(rank.remote(address, count, config.model, to_env(config), WORKER_START_S, tls))
            except BaseException:
                with contextlib.suppress(RayTrouble):  # Ray ends them later, because they have no name and no handle
                    self.kill_ranks(found)
                raise
        return found

    def kill_ranks(self, ranks: Ranks) -> None:
        """Those that are left, if a kill fails, are known."""
        while ranks[1]:
            self.kill(ranks[1][-1])
            ranks[1].pop()

    def ask(self, actor: Any) -> Any:
        with _translated():
            return actor.health.remote()

    def answer(self, call: Any) -> ActorHealth | None:
        with _translated():
            if not ray.wait([call], timeout=0)[0]:
                return None
            health: ActorHealth = ray.get(call)
            return health

    def drain(self, actor: Any, limit_s: float) -> Any:
        with _translated():
            return actor.drain.remote(limit_s)

    def is_over(self, call: Any) -> bool:
        with _translated():
            return bool(ray.wait([call], timeout=0)[0])

    def kill(self, actor: Any) -> None:
        with _translated():
            ray.kill(actor, no_restart=True)


def _options(config: WorkerConfig, needs: Resources, place: Group, bundle: int) -> dict[str, Any]:
    """Of an actor that takes a whole bundle."""
    return {
        "num_cpus": needs.get("CPU", 0),
        "num_gpus": needs.get("GPU", 0),
        "resources": {kind: one for kind, one in needs.items() if kind == PLACE},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, bundle),
        "runtime_env": _environment(config),
    }


@final
class RayDriver:
    """Owns the actors. `address` is of a Ray cluster; empty starts one on this host, which keeps its files in
    `folder`. `read` returns what is wanted."""

    def __init__(self, address: str, folder: OwnedFolder | None, redis: str, read: Callable[[], WantedCluster]) -> None:
        self._address, self._folder, self._read = address, folder, read
        self._wanted: WantedCluster | None = None
        self._workers = RayWorkers(RayApi(address, redis), emit)
        self._states = ""

    def start(self) -> str:
        """Returns the address of Ray's control plane once every worker listens, or at once if the cluster has started
        before. Raises StartFailed."""
        workers = self._workers
        with _step("ray_init"):
            self._init()
        with _step(PLACEMENT):
            self._tick_while(lambda: workers.is_starting and not workers.are_placed)
        self._tick_while(lambda: workers.is_starting)
        for warning in confine.warnings(os.environ, self._open_ports(), is_own=not self._address):
            emit("ray", warning)
        address = str(ray.get_runtime_context().gcs_address)
        emit("ray", f"its state: {confine.status_command(os.environ, address, Path(sys.executable))}")
        return address

    def run(self, stop: threading.Event) -> None:
        """Makes the workers what is wanted, until `stop`."""
        while not stop.wait(_POLL_S):
            self._tick()

    def stop(self) -> None:
        """Drains the workers in parallel, then frees their placement; ends Ray if it is ours."""
        drain_s = max((one.config.drain_s for one in self._wanted.workers), default=0.0) if self._wanted else 0.0
        if calls := [actor.drain.remote(drain_s) for actor in self._workers.actors]:
            ray.wait(calls, num_returns=len(calls), timeout=drain_s)
        # Without its control plane Ray would wait for it here; the launcher ends the remaining processes.
        ending = threading.Thread(target=self._give_back, daemon=True)
        ending.start()
        ending.join(GIVE_BACK_S)
        if self._folder is not None:
            self._folder.remove()
        if ending.is_alive():
            os._exit(0)

    def _tick_while(self, waits: Callable[[], bool]) -> None:
        self._tick()
        while waits():
            time.sleep(_POLL_S)
            self._tick()

    def _tick(self) -> None:
        wanted = self._read()
        if wanted is not self._wanted:
            self._wanted = wanted
            self._workers.want(wanted)
        self._workers.tick(time.monotonic())
        states = states_to_json(self._workers.states)
        if states != self._states:
            self._states = states
            emit("ray", f"{STATE}{states}")

    def _give_back(self) -> None:
        self._workers.give_up()
        ray.shutdown()

    def _init(self) -> None:
        if self._address:
            ray.init(self._address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        else:
            ray.init(
                "local",  # not another user's Ray on this host
                namespace=NAMESPACE,
                resources={PLACE: NUM_PLACES},
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


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """Reports a step of the start."""
    began_s = time.monotonic()
    emit(name, BEGINS)
    yield
    emit(name, f"{TOOK}{time.monotonic() - began_s:.2f} s")


def _environment(config: WorkerConfig) -> dict[str, Any]:
    """Ray's runtime environment of a worker's actors."""
    python = {"py_executable": config.engine_python} if config.engine_python else {}
    return {"env_vars": {"OMP_NUM_THREADS": str(config.threads), **waiting_env(os.environ)}, **python}


def main(address: str, path: str, folder: OwnedFolder | None) -> int:
    secrets = {name: from_env(name) for name in (SECRET_ENV, REDIS_ENV, KV_STORE_ENV)}
    driver = RayDriver(address, folder, secrets[REDIS_ENV], WantedFile(path, secrets).read)
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
    driver.run(stop)
    driver.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], FOLDER))
