"""The processes that every cluster has on this host: Redis (unless a URL was given) and the routers; the checks around
their start; and the launcher's metrics. `changes/cluster.py` and `with_ray.py` say where the workers run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from pdserve.client.aio import AsyncClient
from pdserve.client.connect import Tls
from pdserve.client.results import Completion
from pdserve.client.retries import Retries
from pdserve.config import LOG_LEVEL_ENV, MAX_ROUTERS, RouterConfig, member_socket
from pdserve.core.access.hosts import join, local_host
from pdserve.core.errors import ConfigError, Overloaded, PdserveError, Unavailable
from pdserve.core.types import Role
from pdserve.launch.confine import continue_certificates, make_certificates
from pdserve.launch.detached.link import Attached, KeeperLink
from pdserve.launch.keys import Settings
from pdserve.launch.ports import HeldPorts, check_free, free_ports, with_user_of_port
from pdserve.launch.report import LauncherReport
from pdserve.launch.services import check_alone
from pdserve.launch.spec import (
    METRICS_HOST,
    ClusterSpec,
    Process,
    fixed_ports,
    gateway,
    gateway_config,
    metrics_host,
    ports,
    processes,
    router_config,
    served_names,
)
from pdserve.launch.supervisor import (
    REDIS,
    SupervisedProcess,
    Supervisor,
    redis_process,
    side_by_side,
    supervised,
)
from pdserve.listening import PortInUse
from pdserve.owned_folder import OwnedFolder
from pdserve.prefix.embedded import MAX_MEMORY_BYTES, socket_url
from pdserve.prefix.embedded import SOCKET as REDIS_SOCKET
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.tls.certificates import certificates_of
from pdserve.wire.status import NO_CONNECTION

if TYPE_CHECKING:
    from pdserve.launch.detached.saved import SavedCluster

# --- first answer ---------------------------------------------------------------------------------------------
# Proves that a cluster answers: generates a real token through the router, on the remote path if there is one.

# Longer than a prompt that a decode worker would prefill itself, so that the prefill worker and the transfer are tested
# too.
PROMPT: Final = "def ready(cluster):\n    return all(worker.is_ready for worker in cluster.workers)\n" * 2
ANSWER_TOKENS: Final = 2
FIRST_ANSWER_S: Final = 120.0
COUNT_S: Final = 0.5  # for the number of open requests, before a drain
_ASK_AGAIN_S: Final = 0.05


async def first_answer(
    target: str,
    *,
    token: str | None,
    workers: int,
    timeout_s: float,
    tls: Tls | None = None,
    insecure: bool = False,
    on_wait: Callable[[str], None] = lambda cause: None,
) -> Completion:
    """The first completion. Waits while workers are still connecting, and tells `on_wait` the cause; raises the last
    error after `timeout_s`, and an error of TLS at once."""
    deadline_s = time.monotonic() + timeout_s
    async with AsyncClient(target, token=token, tls=tls, insecure=insecure, retries=Retries(limit=0)) as client:
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.1)
            try:
                topology = await client.topology()
                connected = [worker.worker_id for worker in topology.workers if worker.is_connected]
                if len(connected) < workers:
                    seen = f" ({', '.join(sorted(connected))})" if connected else ""
                    raise Unavailable(f"the router is connected to {len(connected)} of {workers} workers{seen}")
                return await client.generate(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0.0, timeout_s=left_s)
            except (Unavailable, Overloaded) as error:
                if time.monotonic() >= deadline_s or error.message.startswith(NO_CONNECTION):
                    raise
                on_wait(error.message)
            await asyncio.sleep(_ASK_AGAIN_S)


# --- metrics of the launcher ----------------------------------------------------------------------------------
# Also lists the metrics ports of all its processes, for Prometheus's HTTP service discovery.

TARGETS: Final = "/targets"
GATEWAY: Final = "gateway"
_COMPONENTS: Final = {"prefill_worker": "prefill", "decode_worker": "decode"}


def targets(spec: ClusterSpec) -> list[dict[str, object]]:
    """One group for each metrics port, the launcher's first. The gateway has its own also in the router's process.
    `instance` is the name of the process, so that it stays the same after a restart of the cluster on other ports.
    Pure."""
    if spec.metrics is None:
        return []
    found = [_group(spec, "launcher", "launcher", METRICS_HOST, spec.metrics, is_https=spec.tls is not None)]
    workers, routers = split(processes(spec), spec)
    served = [(one.name, _COMPONENTS.get(one.module, one.module), one.config) for one in (*routers, *workers)]
    for member in range(spec.routers):
        if (http := gateway_config(spec, member=member)) is not None:
            served.append((GATEWAY if spec.routers == 1 else f"{GATEWAY}-{member}", GATEWAY, http))
    for name, component, config in served:
        if config.metrics_port:
            host, is_https = local_host(metrics_host(config)), bool(config.tls_cert)
            found.append(_group(spec, name, component, host, config.metrics_port, is_https=is_https))
    return found


def split(started: Sequence[Process], spec: ClusterSpec) -> tuple[Sequence[Process], Sequence[Process]]:
    """The workers and the routers."""
    return started[: -spec.routers], started[-spec.routers :]


def _group(spec: ClusterSpec, name: str, component: str, host: str, port: int, *, is_https: bool) -> dict[str, object]:
    labels = {
        "instance": name,
        "component": component,
        "cluster": spec.cluster,
        "model": served_names(spec)[0],
        "__scheme__": "https" if is_https else "http",
    }
    return {"targets": [join(host, port)], "labels": labels}


@final
class LauncherMetrics:
    """Does nothing if the cluster has no metrics."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._metrics = Metrics.off() if spec.metrics is None else Metrics("launcher")
        self._pages: dict[str, bytes] = {}

    def start(self) -> None:
        """Raises ConfigError if the port is in use or a TLS file cannot be used."""
        if self._spec.metrics is None:
            return
        tls = certificates_of(router_config(self._spec, ()), is_mutual=False)
        self.changed(self._spec)
        self._metrics.serve(self._spec.metrics, METRICS_HOST, tls, self._pages)

    def changed(self, spec: ClusterSpec) -> None:
        """Lists the processes of `spec` from now on."""
        self._spec = spec
        self._pages[TARGETS] = json.dumps(targets(spec)).encode()

    def process_started(self, name: str) -> None:
        self._metrics.add(metric_names.PROCESS_STARTS, process=name)

    def wanted(self, numbers: Mapping[Role, int]) -> None:
        for role, number in numbers.items():
            self._metrics.set(metric_names.DESIRED_WORKERS, number, role=role.value)

    def describe(self) -> str:
        """For the operator: where Prometheus finds the targets, and the port of each process. Empty if it is off."""
        if self._spec.metrics is None:
            return ""
        groups = targets(self._spec)
        ports = {group["labels"]["instance"]: group["targets"][0].rpartition(":")[2] for group in groups}  # type: ignore[index]
        scheme = groups[0]["labels"]["__scheme__"]  # type: ignore[index]
        listed = ", ".join(f"{name} {port}" for name, port in ports.items())
        return f"metrics: {scheme}://{join(METRICS_HOST, self._spec.metrics)}{TARGETS} lists the ports {listed}"

    def close(self) -> None:
        """Idempotent."""
        self._metrics.close()


# --- cluster of processes -------------------------------------------------------------------------------------

FIRST_TOKEN: Final = "first token"
ROUTER_SOCKET: Final = "router.sock"


class LaunchedCluster(ABC):
    """`start`, then `run`, then `stop`; `stop` is safe at any point. A subclass says where the workers run."""

    def __init__(
        self,
        spec: ClusterSpec,
        report: LauncherReport,
        *,
        ray: str | None = None,
        saved: SavedCluster | None = None,
    ) -> None:
        """`ray` as in `with_ports`. `saved`: it runs already, and `adopt` follows. Raises ConfigError and OSError."""
        self._report, self._held = report, HeldPorts()
        with ExitStack() as opened:
            if saved is None:
                self.has_own_redis = not spec.redis
                check_store(spec)
                opened.callback(self._held.release)
                spec, self._sockets = with_sockets(with_ports(spec, self._held, ray=ray))
                opened.callback(self._sockets.remove)
                self.spec, self._certificates = make_certificates(spec)
                if self._certificates is not None:
                    opened.callback(self._certificates.remove)
            else:
                self.spec, self.has_own_redis = saved.spec, saved.has_own_redis
                self._sockets = OwnedFolder.of_another(Path(saved.spec.launcher_socket).parent)
                opened.callback(self._sockets.leave)
                self._certificates = continue_certificates(saved.spec, saved.authority)
            self.link: KeeperLink | None = None  # to the keeper of the processes, if they outlive the launcher
            self.on_change: Callable[[], None] = lambda: None  # of what a new launcher needs
            self._metrics = LauncherMetrics(self.spec)
            self._supervisor = Supervisor(report, self._held, self._metrics.process_started)
            self.overlay: Settings = {}  # what roll-outs have set over `spec.settings`
            opened.pop_all()

    async def start(self) -> str:
        """Returns the router's address after a real token has come through it. Raises the error otherwise."""
        self._metrics.start()
        self._report.expect("starting", self._steps())
        if self.has_own_redis:
            await self._supervisor.start(redis_process(redis_path(self._sockets)))
        else:
            await self._check_redis()
        workers, routers = split(self._processes(), self.spec)
        await self._start_workers(workers)
        await side_by_side(self._supervisor.start(supervised(one)) for one in routers)
        address = self._supervisor.address(routers[0].name)
        await self._supervisor.unless_ended(ask_first(self.spec, address, self._report))
        await start_gateway(self._supervisor, self.spec, address)
        self._supervisor.keep()
        if text := self._metrics.describe():
            self._report.say("launcher", text)
        return address

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set; restarts processes that die until then."""
        await self._supervisor.run(stop)

    def reload(self, settings: Settings, log_level: str) -> None:
        """Gives the processes of this host new values of the settings that may change."""
        self.spec = dataclasses.replace(self.spec, settings=settings)
        os.environ[LOG_LEVEL_ENV] = log_level  # of processes that are started later
        http = gateway(self.spec, "")
        self._supervisor.reload([*self._processes(), *([] if http is None else [http])])
        self.on_change()

    @property
    def folder(self) -> Path:
        """For its sockets."""
        return self._sockets.path

    @property
    def running_change(self) -> str:
        """What is changed now; empty: nothing."""
        return ""

    # -- without its launcher --------------------------------------------------------------------------------------

    async def detach(self, orphan_s: float) -> KeeperLink:
        """Before `start`: its processes will outlive this launcher, for that time. Raises OSError and Unavailable."""
        folders = [self._sockets, *([] if self._certificates is None else [self._certificates.folder])]
        link = await KeeperLink.start(self._sockets, orphan_s, folders)
        self._use(link)
        self._held.hold_with(link)
        return link

    async def adopt(self, link: KeeperLink, attached: Attached) -> str:
        """Instead of `start`, if it was saved. Processes that have ended are started again. Returns the router's
        address."""
        self._use(link)
        self._held.hold_with(link, attached.ports)
        self._metrics.start()
        for name, line in attached.lines:
            self._report.relay(name)(line)
        address = join(self.spec.host, self.spec.port)
        wanted = self._all_processes(address)
        for one in wanted:
            running = attached.running.get(one.name)
            if running is None or not running.address:
                self._supervisor.adopt(one, None, "", 0.0)
            elif (child := self._supervisor.adopt(one, running.process, running.address, running.start_s)) is not None:
                running.process.on_line = child.take
        names = {one.name for one in wanted}
        strays = [one.process for name, one in attached.running.items() if name not in names or not one.address]
        for process in strays:  # of a change that the former launcher has not finished: they serve nothing yet
            process.send_signal(signal.SIGKILL)
            await process.wait()
        self._supervisor.keep()
        return address

    async def leave(self) -> None:
        """Ends what belongs to this launcher. Its processes go on."""
        await self._supervisor.release()
        self._metrics.close()
        self._supervisor.close()
        self._sockets.leave()
        if self._certificates is not None:
            self._certificates.folder.leave()
        if self.link is not None:
            await self.link.close(ends=False)

    def saved(self) -> SavedCluster:
        from pdserve.launch.detached.saved import SavedCluster  # imports the router

        return SavedCluster(
            spec=self.spec,
            has_own_redis=self.has_own_redis,
            authority="" if self._certificates is None else self._certificates.secret,
        )

    def _use(self, link: KeeperLink) -> None:
        self.link = link
        self._supervisor.keep_with(link, self._sockets.path)
        link.on_lost = lambda: self._supervisor.fail(Unavailable("the keeper of the cluster's processes has ended"))

    def _all_processes(self, address: str) -> list[SupervisedProcess]:
        """`address` of the router."""
        http = gateway(self.spec, _own_address(self.spec, address))
        redis = [redis_process(redis_path(self._sockets))] if self.has_own_redis else []
        return [*redis, *map(supervised, [*self._processes(), *([] if http is None else [http])])]

    # ------------------------------------------------------------------------------------------------------------

    def say(self, name: str, text: str) -> None:
        self._report.say(name, text)

    async def stop(self, *, is_graceful: bool) -> None:
        """Stops the gateway and the router first, so that no new work comes, then the workers together, Redis last. A
        caller that cancels it calls it again: until then, processes that still run keep what they use."""
        async with AsyncExitStack() as ending:  # of each, also if another one cannot be ended
            if self._certificates is not None:
                ending.callback(self._certificates.remove)
            ending.callback(self._sockets.remove)
            ending.callback(self._held.release)
            ending.callback(self._supervisor.close)
            ending.callback(self._metrics.close)
            if self.link is not None:
                ending.push_async_callback(self.link.close, ends=True)
            try:
                await self._stop_processes(is_graceful=is_graceful)
            except asyncio.CancelledError:
                ending.pop_all()
                raise

    async def _stop_processes(self, *, is_graceful: bool) -> None:
        await self._supervisor.release()
        # The first two drain together, so that one drain_s bounds both.
        stages = ([GATEWAY, *self.spec.router_names], self._names_of_workers())
        if is_graceful:
            self._supervisor.expect_stop(stages, await open_requests(self.spec))
        for names in stages:
            await self._supervisor.stop(names, is_graceful=is_graceful)
        if self.has_own_redis:
            await self._supervisor.stop([REDIS], is_graceful=True)

    # -- where the workers run -------------------------------------------------------------------------------------

    @abstractmethod
    def _processes(self) -> list[Process]:
        """The workers that are processes of this host, then the routers."""

    @abstractmethod
    async def _start_workers(self, workers: Sequence[Process]) -> None: ...

    @abstractmethod
    def _names_of_workers(self) -> Sequence[str]:
        """Of the processes that end with the workers."""

    def _steps(self) -> list[str]:
        return start_steps(self.spec, has_own_redis=self.has_own_redis)

    async def _check_redis(self) -> None:
        """Of a Redis that is not the launcher's own."""
        await check_alone(self.spec)


def with_ports(spec: ClusterSpec, held: HeldPorts, *, ray: str | None = None) -> ClusterSpec:
    """The spec with all ports filled in. `ray` is the address of a Ray cluster, empty for one on this host; None: the
    workers are processes of the launcher.

    The ports of the launcher's processes are `held`. Raises ConfigError if a requested port is in use.
    """
    fixed = fixed_ports(spec, are_workers_here=not ray)
    for port, (name, host) in fixed.items():
        try:
            check_free(name, host, port)
        except PortInUse as error:
            raise with_user_of_port(error, host, port) from None
    hosts = {spec.host} if ray is not None else {process.config.host for process in processes(spec)}
    *workers, router_port, http = free_ports(spec.prefill + spec.decode + 2, hosts, avoid=fixed)
    filled = dataclasses.replace(
        spec,
        worker_ports=tuple(workers),
        port=spec.port or router_port,
        http=None if spec.http is None else spec.http or http,
    )
    try:
        for name, address, port in ports(filled, are_workers_here=ray is None):
            held.hold(name, address, port)
        shared = [filled.port] if filled.http is None else [filled.port, filled.http]
        if spec.routers > 1 and not set(shared) <= set(held.ports):
            raise ConfigError("routers", spec.routers, "1: this system lets no two processes listen on one port")
    except ConfigError:
        held.release()
        raise
    return filled


def with_sockets(spec: ClusterSpec) -> tuple[ClusterSpec, OwnedFolder]:
    """The spec with the sockets of its Redis, unless a URL was given, and of the router for a gateway that is another
    process; and their folder. No other user can take a path in it while the server of that path is being restarted."""
    names = (REDIS_SOCKET, ROUTER_SOCKET, member_socket(MAX_ROUTERS - 1))
    with ExitStack() as opened:
        folder = OwnedFolder.for_socket("sockets", max(names, key=len))
        opened.callback(folder.remove)
        spec = dataclasses.replace(
            spec,
            redis=spec.redis or socket_url(redis_path(folder)),
            unix_socket=str(folder.path / ROUTER_SOCKET) if gateway(spec, "") is not None else "",
            group=str(folder.path) if spec.routers > 1 else "",
        )
        opened.pop_all()
    return spec, folder


def check_store(spec: ClusterSpec) -> None:
    """Raises ConfigError if the stored responses of one tenant could evict the prefix index from the embedded Redis."""
    store_bytes, most = int(str(spec.settings.get("gateway", {}).get("store_bytes", 0))), MAX_MEMORY_BYTES // 4
    if store_bytes > most and not spec.redis:
        expected = f"at most {most} with the embedded Redis, which the prefix index uses too; give another by --redis"
        raise ConfigError("store_bytes", store_bytes, expected)


def redis_path(sockets: OwnedFolder) -> Path:
    return sockets.path / REDIS_SOCKET


def start_steps(spec: ClusterSpec, *, has_own_redis: bool) -> list[str]:
    """What must end before the cluster is ready, by the names of the report."""
    redis = [REDIS] if has_own_redis else []
    http = [GATEWAY] if gateway(spec, "") is not None else []
    return [*redis, *spec.worker_ids, *spec.router_names, FIRST_TOKEN, *http]


async def ask_first(spec: ClusterSpec, address: str, report: LauncherReport) -> None:
    """Tests the cluster with a real answer of each router."""
    config = router_config(spec, ())
    began_s = time.monotonic()
    report.begins(FIRST_TOKEN)
    for target, tls in targets_of_routers(spec, address):
        await first_answer(
            target,
            token=config.token or None,
            workers=spec.prefill + spec.decode,
            timeout_s=FIRST_ANSWER_S,
            tls=tls,
            insecure=config.insecure,
            on_wait=partial(report.waits, FIRST_TOKEN),
        )
    report.phase(FIRST_TOKEN, time.monotonic() - began_s)


def targets_of_routers(spec: ClusterSpec, address: str) -> list[tuple[str, Tls | None]]:
    """How the launcher calls each router: at a socket if they are a group, because the kernel chooses one for a
    connection to their port."""
    if not spec.group:
        return [(_own_address(spec, address), tls_to(router_config(spec, ())))]
    return [(f"unix:{Path(spec.group, member_socket(member))}", None) for member in range(spec.routers)]


async def open_requests(spec: ClusterSpec) -> int | None:
    """The number of requests that the router has not finished; None if it does not answer soon."""
    config = router_config(spec, ())
    target = join(local_host(spec.host), spec.port)
    try:
        async with (
            asyncio.timeout(COUNT_S),  # also for a call that connects
            AsyncClient(
                target,
                token=config.token or None,
                tls=tls_to(config),
                insecure=config.insecure,
                retries=Retries(limit=0),
            ) as client,
        ):
            topology = await client.topology()
    except (PdserveError, TimeoutError):
        return None
    return topology.running_requests + topology.queued_requests


async def start_gateway(supervisor: Supervisor, spec: ClusterSpec, address: str) -> None:
    """Starts the HTTP gateway of the router at `address`, if it is a process of its own. Raises StartFailed."""
    process = gateway(spec, _own_address(spec, address))
    if process is not None:
        await supervisor.start(supervised(process))


def _own_address(spec: ClusterSpec, address: str) -> str:
    """The router's address for processes on this host."""
    return join(local_host(spec.host), address.rpartition(":")[2])


def tls_to(config: RouterConfig) -> Tls | None:
    """How this host's own processes call the router; None: in plain text. Raises ConfigError."""
    if not config.tls_cert:
        return None
    return Tls.from_files(
        ca=config.tls_ca or None, cert=config.tls_cert, key=config.tls_key, server_name=config.tls_peer_name
    )
