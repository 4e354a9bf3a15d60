"""Computes the processes of a cluster and their settings. Pure.

`up` and `up --ray` start what `processes` returns; manifests use the same flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pdserve.config import (
    MAX_ROUTERS,
    RAY_STRATEGIES,
    ROLES,
    GatewayConfig,
    RouterConfig,
    WorkerConfig,
    bounds_of,
    with_gateway,
)
from pdserve.config_flags import to_env, to_flags
from pdserve.core.access.hosts import PORTS, check_endpoint, endpoint_of, join
from pdserve.core.durations import DAY_S
from pdserve.core.errors import ConfigError
from pdserve.core.setting import AUTO, CA, CERT, KEY, Range
from pdserve.core.types import Role
from pdserve.launch.keys import Kind, Settings, Value, check_settings
from pdserve.model_source import model_name

# --- TLS files of the processes -------------------------------------------------------------------------------
# An operator's, or made for this start.

CALLERS: Final = ("router", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTls:
    """`folder` holds CERT, KEY and CA. If the launcher made it, each process has a folder of its own in it, with its
    own certificate and key."""

    folder: str
    is_made_here: bool = False
    peer_name: str = ""  # name in the operator's certificate; empty: it is valid for the addresses that are called
    client_ca: str = ""

    @classmethod
    def asked(cls, value: str, client_ca: str) -> ClusterTls:
        return cls(folder=value, is_made_here=value == AUTO, client_ca=client_ca)

    @property
    def ca(self) -> str:
        return str(Path(self.folder, CA))

    def of(self, process: str) -> dict[str, str]:
        """The settings of a process."""
        folder = Path(self.folder, process) if self.is_made_here else Path(self.folder)
        found = {"tls_cert": str(folder / CERT), "tls_key": str(folder / KEY), "tls_ca": str(folder / CA)}
        if self.peer_name:
            found["tls_peer_name"] = self.peer_name
        if process == "gateway":  # its tls_cert may be one of a public CA, which the router does not accept
            found |= {"router_cert": found["tls_cert"], "router_key": found["tls_key"]}
        if self.client_ca and process in CALLERS:
            found["tls_client_ca"] = self.client_ca
        return found


# --- processes and their settings -----------------------------------------------------------------------------

GATEWAY_FIRST_S: Final = 1.0  # by which the router ends later than the gateway
SPINS: Final = "1000"  # turns of the waiting loop
MAX_WORKERS: Final = 256
NUM_WORKERS: Final[Mapping[str, Range]] = {"prefill": Range(0, MAX_WORKERS), "decode": Range(1, MAX_WORKERS)}
NUM_ROUTERS: Final = Range(1, MAX_ROUTERS)
_PORTS: Final = Range(*PORTS)
RAY_WAIT_S: Final = Range(1.0, 3600.0)
METRICS_HOST: Final = "127.0.0.1"
MODULES: Final[Mapping[Role, Kind]] = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """A worker's place on this host. Its ports and GPUs stay if another worker takes it."""

    worker_id: str
    role: Role
    port: int
    gpus: tuple[str, ...] = ()
    is_vacant: bool = False
    is_surge: bool = False  # an additional worker of a roll-out, which has no share of the cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster on one host. The launcher replaces ports of 0 once, so that restarts keep them."""

    model: str
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"  # address of the router; workers always use the loopback
    port: int = 50051
    autoscale: str = ""  # MIN:MAX, bounds of the number of workers; empty: it changes by an operator alone
    roles: str = "fixed"  # auto: their split changes too
    routers: int = 1  # router processes, which share the port
    http: int | None = None  # port of the HTTP gateway; None: there is none
    http_process: bool = False  # the gateway is a process of its own, and not in the router's
    metrics: int | None = None  # port of the launcher's metrics; the other processes have those after it
    tls: ClusterTls | None = None  # None: plain text
    insecure: bool = False  # plain text beyond loopback is allowed
    redis: str = field(default="", repr=False)
    cluster: str = "default"
    cluster_secret: str = field(default="", repr=False)
    cores: int = 1
    ray_strategy: str = "auto"  # where Ray places the workers: spread over the nodes, or packed on few
    ray_wait_s: float = 10.0  # how long Ray may take to place them; more where it starts nodes on demand
    gpus: tuple[str, ...] = ()  # of this host, as CUDA_VISIBLE_DEVICES names them
    worker_ports: tuple[int, ...] = ()
    slots: tuple[WorkerSlot, ...] = ()  # once workers were changed; before, they follow from the numbers of workers
    first_slots: int = 0  # the number of workers at the start, if there are slots
    launcher_socket: str = ""  # where routers reach the launcher
    unix_socket: str = ""  # of the router, for the gateway
    group: str = ""  # folder of the routers, if there are several
    inject_faults: str = ""  # for tests: faults to inject into KV transfers
    revisions: Mapping[str, str] = field(default_factory=dict)  # folder of each revision of the weights but the first
    settings: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, count in (("prefill", self.prefill), ("decode", self.decode)):
            if count not in NUM_WORKERS[name]:
                raise ConfigError(name, count, str(NUM_WORKERS[name]))
        if self.autoscale:
            bounds_of("autoscale", self.autoscale)
        if self.roles not in ROLES:
            raise ConfigError("roles", self.roles, f"one of {', '.join(ROLES)}")
        if self.routers not in NUM_ROUTERS:
            raise ConfigError("routers", self.routers, str(NUM_ROUTERS))
        if self.routers > 1 and self.http_process:
            raise ConfigError(
                "http_process", True, f"false: `http_process` works with one router only, and routers is {self.routers}"
            )
        if self.http_process and self.http is None:
            raise ConfigError("http_process", True, "http with it (`--http PORT`): no HTTP is served without")
        if self.ray_strategy not in RAY_STRATEGIES:
            raise ConfigError("ray_strategy", self.ray_strategy, f"one of {', '.join(RAY_STRATEGIES)}")
        if self.ray_wait_s not in RAY_WAIT_S:
            raise ConfigError("ray_wait_s", self.ray_wait_s, str(RAY_WAIT_S))
        for kind, values in self.settings.items():
            check_settings(kind, values)
        if self.http is not None and self.http not in _PORTS:
            raise ConfigError("http", self.http, str(_PORTS))
        if self.metrics is not None and self.metrics not in (allowed := Range(1, PORTS[1] - self.num_processes)):
            raise ConfigError("metrics", self.metrics, f"{allowed}: each process has a port after it")

    @property
    def num_processes(self) -> int:
        """The workers, the routers, and a gateway of each, which has a metrics port of its own in each form."""
        return len(_workers(self)) + 2 * self.routers

    @property
    def is_automatic(self) -> bool:
        """Whether a controller changes the number of workers or their roles."""
        return bool(self.autoscale) or self.roles == "auto"

    @property
    def num_first(self) -> int:
        """Workers at the start: their metrics ports come before those of gateways and further routers."""
        return self.first_slots or self.prefill + self.decode

    @property
    def running(self) -> list[int]:
        """The indices of the workers, without vacant slots."""
        return [index for index in range(len(_workers(self))) if not (self.slots and self.slots[index].is_vacant)]

    @property
    def router_names(self) -> tuple[str, ...]:
        return ("router",) if self.routers == 1 else tuple(f"router-{member}" for member in range(self.routers))

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(_workers(self)[index][0] for index in self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process: `python -m module` with the flags of its config."""

    name: str
    module: str
    config: WorkerConfig | RouterConfig | GatewayConfig
    env: tuple[tuple[str, str], ...] = ()

    @property
    def start_s(self) -> float:
        """Time limit until the process listens; a large checkpoint may be on a slow disk."""
        return 600.0 if isinstance(self.config, WorkerConfig) else 60.0

    @property
    def argv(self) -> tuple[str, ...]:
        return ("-m", self.module, *to_flags(self.config))


def processes(spec: ClusterSpec) -> list[Process]:
    """The processes of the cluster itself in the order of their start: the workers, then the routers."""
    workers = [worker_process(spec, index) for index in spec.running]
    addresses = tuple(join(one.config.host, one.config.port) for one in workers if one.config.port)
    return [*workers, *routers(spec, addresses)]


def check_reports(started: Sequence[Process]) -> None:
    """Raises ConfigError if a router would avoid a worker because it reports less often than expected."""
    configs = [process.config for process in started]
    router = next(one for one in configs if isinstance(one, RouterConfig))
    for worker in (one for one in configs if isinstance(one, WorkerConfig)):
        if worker.heartbeat_s >= router.worker_silence_s:
            expected = f"less than router.worker_silence_s, which is {router.worker_silence_s:g}"
            raise ConfigError("worker.heartbeat_s", worker.heartbeat_s, expected)


def fixed_ports(spec: ClusterSpec, *, are_workers_here: bool) -> dict[int, tuple[str, str]]:
    """The requested ports on this host: the setting of each, and its address.

    Raises ConfigError if two processes would listen on one port.
    """
    found: dict[int, tuple[str, str]] = {} if spec.metrics is None else {spec.metrics: ("metrics", METRICS_HOST)}
    for name, host, port in ports(spec, are_workers_here=are_workers_here):
        if port in found:
            raise ConfigError(name, port, f"another port: {found[port][0]} has the same")
        found[port] = (name, host)
    return found


def ports(spec: ClusterSpec, *, are_workers_here: bool) -> list[tuple[str, str, int]]:
    """The setting, address and number of each port on this host that has a number. Without those of the launcher
    itself."""
    started = processes(spec) if are_workers_here else routers(spec, ())
    found = [one for process in started for one in _ports(spec, process.config, process.module)]
    for member in range(spec.routers):
        if (http := gateway_config(spec, member=member)) is not None:
            found += _ports(spec, http, "gateway", member)
    return [one for one in dict.fromkeys(found) if one[2]]  # routers share ports


def _ports(
    spec: ClusterSpec, config: WorkerConfig | RouterConfig | GatewayConfig, table: str, member: int = 0
) -> list[tuple[str, str, int]]:
    """`member`: the number of the gateway's router."""
    member = config.member if isinstance(config, RouterConfig) else member
    given = {f"{kind}.metrics_port" for kind, values in spec.settings.items() if values.get("metrics_port")}
    metrics = f"{table}.metrics_port"
    if spec.metrics is not None and not given & {metrics, "worker.metrics_port"}:
        metrics = f"metrics + {config.metrics_port - spec.metrics}"
    elif member:
        metrics += f" + {member}"
    found = [
        ("http" if isinstance(config, GatewayConfig) else "port", config.host, config.port),
        (metrics, metrics_host(config), config.metrics_port),
    ]
    if isinstance(config, WorkerConfig) and (rendezvous := endpoint_of(config.rendezvous)):
        found.append((f"{table}.rendezvous", *rendezvous))
    return found


def metrics_host(config: WorkerConfig | RouterConfig | GatewayConfig) -> str:
    """The address of the process's metrics port."""
    return config.host if isinstance(config, WorkerConfig) else config.metrics_host or config.host


def _metrics(spec: ClusterSpec, index: int) -> dict[str, Value]:
    """The settings of the process with that number among the ports after the launcher's: the first router, the
    workers of the start, the gateway, the further routers, the workers that were added."""
    if spec.metrics is None:
        return {}
    return {"metrics_port": spec.metrics + 1 + index, "metrics_host": METRICS_HOST}


def waiting_env(environ: Mapping[str, str]) -> dict[str, str]:
    """How the OpenMP threads of a worker wait for each other: they spin shortly, then sleep, unless `environ` sets it.

    libgomp's default is a long spin. If another process uses one of the cores, threads then spin for one that has no
    core (docs/engine.md, "Threads").
    """
    if "OMP_WAIT_POLICY" in environ:
        return {}
    return {"GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", SPINS)}


def routers(spec: ClusterSpec, workers: Sequence[str]) -> list[Process]:
    """`workers`: the addresses that they connect to."""
    return [router(spec, workers, member) for member in range(spec.routers)]


def router(spec: ClusterSpec, workers: Sequence[str], member: int = 0) -> Process:
    """The router with that number, with a gateway in its process if the gateway is none of its own."""
    config, http = router_config(spec, workers, member), gateway_config(spec, member=member)
    if http is not None and spec.http_process:  # the gateway tells its own clients
        config = replace(config, drain_s=min(config.drain_s + GATEWAY_FIRST_S, DAY_S))
    elif http is not None:
        config = with_gateway(config, http)
    env = (("OMP_NUM_THREADS", "1"), *to_env(config).items())
    return Process(name=spec.router_names[member], module="router", config=config, env=env)


def gateway(spec: ClusterSpec, router: str) -> Process | None:
    """The process of the HTTP gateway of the router at that address, or at its socket; None if there is none."""
    config = gateway_config(spec, router)
    if config is None or not spec.http_process:
        return None
    return Process(name="gateway", module="pdserve.gateway", config=config, env=(("OMP_NUM_THREADS", "1"),))


def gateway_config(spec: ClusterSpec, router: str = "", member: int = 0) -> GatewayConfig | None:
    """Of the router with that number; None if no HTTP is asked for."""
    if spec.http is None:
        return None
    given = dict(spec.settings.get("gateway", {}))
    if port := given.get("metrics_port"):
        given["metrics_port"] = int(str(port)) + member
    if given.get("store_bytes"):
        given |= {"redis": spec.redis, "cluster": spec.cluster}
    return GatewayConfig(
        router=f"unix:{spec.unix_socket}" if spec.unix_socket else router,
        host=spec.host,
        port=spec.http,
        **{
            **_security(spec, "gateway"),
            **_metrics(spec, spec.num_first + 1 + 2 * member),
            **given,
        },  # type: ignore[arg-type]
    )


def router_config(spec: ClusterSpec, workers: Sequence[str], member: int = 0) -> RouterConfig:
    """Of the router with that number. `workers`: the addresses that it connects to."""
    given: dict[str, Value] = dict(spec.settings.get("router", {}))
    if record := given.get("record"):
        given["record"] = str(recordings(spec, Path(str(record)))[member])
    if port := given.get("metrics_port"):
        given["metrics_port"] = int(str(port)) + member
    metrics = _metrics(spec, spec.num_first + 2 * member if member else 0)
    return RouterConfig(
        model=spec.model,
        host=spec.host,
        port=spec.port,
        workers=tuple(workers),
        redis=spec.redis,
        cluster=spec.cluster,
        cluster_secret=spec.cluster_secret,
        unix_socket=spec.unix_socket,
        launcher_socket=spec.launcher_socket,
        group=spec.group,
        member=member,
        members=spec.routers,
        router_id=f"router-{member}",
        **{**_security(spec, "router"), **metrics, **given},  # type: ignore[arg-type]
    )


def recordings(spec: ClusterSpec, file: Path) -> list[Path]:
    """One for each router: its number is added to the name if there are several."""
    if spec.routers == 1:
        return [file]
    return [file.with_name(f"{file.stem}-{member}{file.suffix}") for member in range(spec.routers)]


def scaling_recording(file: Path) -> Path:
    """Of the decisions about the number of workers, which the launcher makes for all routers."""
    return file.with_name(f"{file.stem}-scaling{file.suffix}")


def served_names(spec: ClusterSpec) -> tuple[str, ...]:
    """The model's names for callers."""
    return router_config(spec, ()).served_model_name or (model_name(spec.model),)


def worker_config(spec: ClusterSpec, index: int) -> tuple[Role, WorkerConfig]:
    """The role and the settings of worker `index`; at the start, prefill workers come first."""
    worker_id, role = _workers(spec)[index]
    given: dict[str, Value] = {
        **_security(spec, worker_id),
        **spec.settings.get("worker", {}),
        **spec.settings.get(MODULES[role], {}),
    }
    given.setdefault("threads", max(1, spec.cores // (spec.prefill + spec.decode)))
    if given.get("metrics_port"):
        given["metrics_port"] = int(str(given["metrics_port"])) + index  # workers on one host need different ports
    elif spec.metrics is not None:
        given.setdefault("metrics_port", spec.metrics + 2 + index + (2 * spec.routers - 1) * (index >= spec.num_first))
    if rendezvous := str(given.get("rendezvous", "")):
        host, port = check_endpoint("rendezvous", rendezvous)
        given["host"] = host  # ranks on other hosts join the worker here, and exchange KV with it
        given["rendezvous"] = join(host, port + index)
    config = WorkerConfig(
        model=spec.revisions.get(str(given.get("revision", "")), spec.model),
        worker_id=worker_id,
        port=spec.slots[index].port if spec.slots else spec.worker_ports[index] if spec.worker_ports else 0,
        redis=spec.redis,
        cluster=spec.cluster,
        cluster_secret=spec.cluster_secret,
        inject_faults=spec.inject_faults,
        **given,  # type: ignore[arg-type]
    )
    return role, config


def _security(spec: ClusterSpec, name: str) -> dict[str, Value]:
    """The settings of a process that the tables may override."""
    return {"insecure": spec.insecure, **({} if spec.tls is None else spec.tls.of(name))}


def _workers(spec: ClusterSpec) -> list[tuple[str, Role]]:
    if spec.slots:
        return [(one.worker_id, one.role) for one in spec.slots]
    prefill = [(f"p{index}", Role.PREFILL) for index in range(spec.prefill)]
    return prefill + [(f"d{index}", Role.DECODE) for index in range(spec.decode)]


def worker_process(spec: ClusterSpec, index: int) -> Process:
    role, config = worker_config(spec, index)
    gpus = gpus_of(spec, index)
    if gpus:
        config = _sharing(spec, index, config)
    env = [("OMP_NUM_THREADS", str(config.threads)), *to_env(config).items()]
    if gpus:
        env.append(("CUDA_VISIBLE_DEVICES", ",".join(gpus)))
    return Process(name=config.worker_id, module=MODULES[role], config=config, env=tuple(env))


def gpus_of(spec: ClusterSpec, index: int) -> tuple[str, ...]:
    """The GPUs of worker `index`: one for each of its ranks on this host, assigned in turn; none on a CPU.

    Raises ConfigError if this host has fewer GPUs than the worker has ranks.
    """
    if spec.slots:
        return spec.slots[index].gpus
    first = 0
    for at in range(index + 1):
        wanted = num_gpus(spec, at)
        if wanted > len(spec.gpus):
            expected = f"at most {len(spec.gpus)} ranks: each needs a GPU of this host"
            raise ConfigError("tensor_parallel", wanted, expected)
        if at < index:
            first += wanted
    return tuple(spec.gpus[(first + rank) % len(spec.gpus)] for rank in range(wanted))


def num_gpus(spec: ClusterSpec, index: int) -> int:
    """That worker `index` needs on this host."""
    _, config = worker_config(spec, index)
    return 0 if config.device == "cpu" or not spec.gpus else config.ranks_here


Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    role: Role
    node: str
    needs: Resources


def choose_node(
    nodes: Mapping[str, Resources], placed: Sequence[PlacedWorker], role: Role, needs: Resources, *, packs: bool
) -> str:
    """The node for one more worker, from what its nodes have and what our workers take; empty: Ray chooses. Spread:
    the node with the fewest workers of that role, so that the loss of a node leaves workers of both roles. Packed: the
    one with the most workers, because KV needs no network there. Pure.

    Others may use the node, so Ray may choose another one nevertheless.
    """
    best: tuple[tuple[float, ...], str] | None = None
    for node, total in nodes.items():
        own = [one for one in placed if one.node == node]
        left = {kind: total.get(kind, 0.0) - sum(one.needs.get(kind, 0.0) for one in own) for kind in needs}
        if any(left[kind] < wanted for kind, wanted in needs.items()):
            continue
        of_role = sum(one.role is role for one in own)
        free = tuple(-left[kind] for kind in sorted(needs, reverse=True))
        rank = ((-len(own),) if packs else (of_role, len(own))) + free
        best = min(best, (rank, node)) if best is not None else (rank, node)
    return "" if best is None else best[1]


def ray_resources(config: WorkerConfig, *, has_gpus: bool, ranks: int | None = None) -> dict[str, float]:
    """Ray's resources for `ranks` of a worker on one node; None: for those on its first rank's node. A CPU for each
    compute thread, so that Ray gives no node more workers than it has cores for, and a GPU for each rank. Ranks with
    GPUs share the worker's CPUs, because they compute little on them."""
    takes_gpus = config.device == "cuda" or (config.device == "auto" and has_gpus)
    count = config.ranks_here if ranks is None else ranks
    cpus = max(1, config.threads) * (1 if takes_gpus else count)
    return {"CPU": float(cpus), **({"GPU": float(count)} if takes_gpus else {})}


def why_not_placed(
    bundles: Sequence[Mapping[str, float]], free: Mapping[str, float], total: Mapping[str, float], wait_s: float
) -> str:
    """Why Ray did not place the bundles, and what to change."""
    needs = []
    for kind in dict.fromkeys(kind for one in bundles for kind in one):
        each = [one.get(kind, 0.0) for one in bundles]
        listed = ", ".join(f"{one:g}" for one in each)
        has = f"of which {free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} are free"
        needs.append(f"{sum(each):g} {kind}s ({listed}) {has}")
    return (
        f"Ray did not place the workers within {wait_s:g} s. They need {' and '.join(needs)}; what a worker needs must "
        "be free on one node. Start fewer workers, lower worker.threads, add nodes, or raise --ray-wait-s if Ray "
        "starts nodes on demand"
    )


def needs_text(bundles: Sequence[Mapping[str, float]]) -> str:
    """What a worker needs: on its first node, then on each further one."""

    def listed(needs: Mapping[str, float]) -> str:
        return " and ".join(f"{count:g} {kind}{'s' if count != 1 else ''}" for kind, count in needs.items())

    return ", and for one ".join(f"with {listed(one)}" for one in bundles)


def remote_ranks(config: WorkerConfig) -> list[int]:
    """The numbers of the worker's ranks on each further node, at most as many as on the first."""
    left, here = config.tensor_parallel - config.ranks_here, config.ranks_here
    return [min(here, left - done) for done in range(0, left, here)]


def _sharing(spec: ClusterSpec, index: int, config: WorkerConfig) -> WorkerConfig:
    """Divides a GPU's memory among its workers, unless their settings do."""
    given = {**spec.settings.get("worker", {}), **spec.settings.get(MODULES[worker_config(spec, index)[0]], {})}
    if "gpu_memory_share" in given:
        return config
    every = [gpus_of(spec, at) for at in range(len(_workers(spec)))]
    most = max(sum(gpu in gpus for gpus in every) for gpu in every[index])
    return replace(config, gpu_memory_share=config.gpu_memory_share / most) if most > 1 else config
