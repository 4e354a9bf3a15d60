"""Runs `pdserve up`: check the host, start, print ready, serve until a signal, drain in order."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from pdserve.config import LOG_LEVEL_ENV, WorkerConfig, bounds_of
from pdserve.core.access.hosts import is_any_host, is_loopback_host, join
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.installation import advice
from pdserve.core.urls import place
from pdserve.engine.cpu.kernels.rounding import INT4_BYTES
from pdserve.engine.load.checkpoint_files import Checkpoint, check_sizes, open_checkpoint
from pdserve.engine.load_engine import MOCK, OURS, toy_blocks
from pdserve.engine.memory.host import free_bytes, usable_cores
from pdserve.engine.memory.plan import PoolUnit, host_blocks
from pdserve.engine.model.config import ModelConfig, read_config
from pdserve.engine.toy import CELL_BYTES
from pdserve.launch.changes.local_cluster import LocalCluster
from pdserve.launch.detached.link import KeeperLink, look
from pdserve.launch.keys import Settings, Value
from pdserve.launch.local import LaunchedCluster
from pdserve.launch.report import LauncherReport
from pdserve.launch.services import degradations
from pdserve.launch.settings import Asked, SettingsSource, merge
from pdserve.launch.spec import ClusterSpec, gateway, gateway_config, processes, routers, served_names, worker_config
from pdserve.launch.with_ray import RayCluster
from pdserve.listening import OF_A_CHILD, OF_A_PROCESS, allow_descriptors, needed_by
from pdserve.model_source import TOY, TOY_MODELS
from pdserve.owned_folder import sweep
from pdserve.progress import is_on_terminal
from pdserve.telemetry.logs import JSON, log_format

if TYPE_CHECKING:
    from pdserve.launch.detached.saved import SavedCluster, SavedLauncher

# --- capacity of this host ------------------------------------------------------------------------------------
# Checks before the start whether it has cores and memory for the workers, and how many would fit.

_TOY_PROCESS_BYTES: Final = 60 * 2**20  # resident memory of interpreter and libraries after a start
_PROCESS_BYTES: Final = 300 * 2**20
# bytes per stored weight; other dtypes take one byte, and an int32 packs eight weights
_ITEM_BYTES: Final = {"F64": 8.0, "F32": 4.0, "BF16": 2.0, "F16": 2.0, "I32": 0.5}
_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """An upper bound of one worker's memory on this host, in bytes."""

    weights: int
    pool: int
    process: int
    threads: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.process


def capacity_warnings(spec: ClusterSpec) -> list[str]:
    """Reads the model's headers. Raises ModelError if the folder cannot be served."""
    configs = [worker_config(spec, index)[1] for index in range(spec.prefill + spec.decode)]
    if not {one.engine for one in configs} <= OURS:  # how much memory another engine takes is unknown
        return []
    model = None if spec.model in TOY_MODELS or is_mock(spec) else read_config(Path(spec.model))
    stored = None if model is None or configs[0].load != "auto" else open_checkpoint(Path(spec.model))
    if model is not None and stored is not None:
        check_sizes(model, stored.tensors)
    has_gpus, free = bool(spec.gpus), free_bytes()
    footprints = [footprint(one, model, stored, free, is_on_cpu=one.device == "cpu" or not has_gpus) for one in configs]
    return warnings(footprints, cores=usable_cores(), free=free)


def is_mock(spec: ClusterSpec) -> bool:
    """Whether the engine toy stands in for a model."""
    return spec.model not in TOY_MODELS and worker_config(spec, 0)[1].engine == TOY


def warnings(footprints: Sequence[Footprint], *, cores: int, free: int | None) -> list[str]:
    """Pure."""
    found = []
    count, threads = len(footprints), sum(one.threads for one in footprints)
    workers = _counted(count, "worker")
    if threads > cores:
        fit = min(count, cores)
        on = f"{_counted(threads, 'thread')} on {_counted(cores, 'core')}"
        each = _counted(max(1, cores // fit), "thread")
        found.append(
            f"WARNING: {workers} compute with {on}, so steps wait for each other: "
            f"{_counted(fit, 'worker')} with {each} each would fit"
        )
    needed = sum(one.total for one in footprints)
    if free is not None and needed > free:
        fixed = sum(one.total - one.pool for one in footprints)
        advice = f"{_counted(_num_fitting(footprints, free), 'worker')} would fit"
        if free > fixed:
            advice += f", or all with pools of {(free - fixed) // count} bytes (worker.kv_memory_bytes)"
        found.append(
            f"WARNING: {workers} may take {_size(needed)} for weights, KV pools and themselves, and {_size(free)} are "
            f"free: {advice}"
        )
    return found


def footprint(
    config: WorkerConfig, model: ModelConfig | None, stored: Checkpoint | None, free: int | None, *, is_on_cpu: bool
) -> Footprint:
    """An upper bound: pools count as full, although their pages are allocated only when used.

    A pool without a set size is computed from the `free` bytes, as in the worker, which may count fewer for weights.
    """
    threads = max(1, config.threads) * config.ranks_here if is_on_cpu else 1
    if model is None:
        pool = toy_blocks(config) * CELL_BYTES * config.block_size
        return Footprint(weights=0, pool=pool, process=_TOY_PROCESS_BYTES, threads=threads)
    process = _PROCESS_BYTES * config.ranks_here
    if not is_on_cpu:
        return Footprint(weights=0, pool=0, process=process, threads=threads)
    weights = 0 if stored is None else weight_bytes(config, stored)
    pool = config.kv_blocks * block_bytes(config, model) or config.kv_memory_bytes
    if not pool:
        unit = PoolUnit(block_bytes=block_bytes(config, model), block_size=config.block_size)
        pool = host_blocks(free, weights, unit) * unit.block_bytes
    return Footprint(weights=weights, pool=pool, process=process, threads=threads)


def block_bytes(config: WorkerConfig, model: ModelConfig) -> int:
    """Bytes of one KV block on a CPU, without alignment."""
    rows = model.num_layers * 2 * config.block_size * model.num_kv_heads
    if config.kv_dtype != "auto":
        return rows * (model.head_dim + _SCALE_BYTES)
    return rows * model.head_dim * (2 if config.dtype in ("bfloat16", "int8", "int4") else 4)


def weight_bytes(config: WorkerConfig, stored: Checkpoint) -> int:
    """One byte per weight on a CPU for int8; four for float32, and for auto, which may widen the stored weights.

    Both int4 and auto keep what is stored in 4 bits. int4 rounds the rest of such a checkpoint to int8.
    """
    is_4_bit = any(one.dtype == "I32" for one in stored.tensors.values())
    int4 = 1.0 if is_4_bit else INT4_BYTES
    kept = {"int8": 1.0, "bfloat16": 2.0, "int4": int4}.get(config.dtype, 4.0)
    packed = INT4_BYTES if config.dtype in ("int4", "auto") else kept
    return math.ceil(
        sum(
            one.num_bytes / _ITEM_BYTES.get(one.dtype, 1.0) * (packed if one.dtype == "I32" else kept)
            for one in stored.tensors.values()
        )
    )


def _num_fitting(footprints: Sequence[Footprint], free: int) -> int:
    left, count = free, 0
    for one in footprints:
        left -= one.total
        count += left >= 0
    return count


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'s' if count > 1 else ''}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.0f} MiB"


# --- start, serving and drain ---------------------------------------------------------------------------------

INTERRUPTED: Final = 130
LAUNCHER_LOG: Final = "launcher.log"
NO_LAUNCHER: Final = "the cluster has no launcher now; run `pdserve adopt`"
TICK_S: Final = 0.25  # between two draws of the status line


async def serve(asked: Asked, source: SettingsSource, *, detaches: bool = False) -> int:
    """Returns the exit status. After SIGHUP, settings that may change are read from `source` again. `detaches`: the
    processes outlive this launcher, and another one may `take_over`.

    Raises PdserveError if the cluster cannot start; all its processes have then ended.
    """
    _check_host(asked)
    serving = _Serving(asked, source)
    if swept := sweep():  # folders of killed launchers
        serving.report.say("launcher", f"removed {len(swept)} temporary folders that have no owner")
    if not asked.ray:  # another Ray cluster has other hosts
        for warning in await asyncio.to_thread(capacity_warnings, asked.spec):
            serving.report.say("launcher", warning)
    cluster = _cluster(asked, serving.report)

    async def start() -> str:
        if detaches:
            (await cluster.detach(asked.orphan_s)).set_on_down(serving.down)
        return await cluster.start()

    return await serving.run(cluster, start)


async def take_over(path: Path) -> int:
    """As `serve`, for the running cluster whose keeper listens there. Its launcher leaves, if it has one.

    Raises PdserveError if it stays, or if this one cannot take its place. The cluster goes on.
    """
    _restore((await look(path)).state)  # raises before the other one leaves
    link, attached = await KeeperLink.attach(path)
    try:
        saved = _restore(attached.state)
        serving = _Serving(saved.asked, saved.source)
        link.set_on_down(serving.down)
        cluster = _cluster(saved.asked, serving.report, saved.cluster)
    except BaseException:
        await link.close(ends=False)
        sys.stderr.write(f"{NO_LAUNCHER}\n")
        raise
    return await serving.run(cluster, lambda: cluster.adopt(link, attached), adopts=True)


def _restore(state: Any) -> SavedLauncher:
    """This process gets the folder and the environment of the launcher that has saved it. Raises ConfigError."""
    from pdserve.launch.detached.saved import SavedLauncher  # imports the router

    saved = SavedLauncher.from_json(state)
    saved.restore()
    os.environ[LOG_LEVEL_ENV] = saved.asked.log_level
    _check_host(saved.asked)
    return saved


@final
class _Serving:
    """One launcher, from the start of its cluster to its end."""

    def __init__(self, asked: Asked, source: SettingsSource) -> None:
        self._asked, self._source = asked, source
        self._environ = dict(os.environ)
        self._stop, self._force = asyncio.Event(), asyncio.Event()
        self._leaves = False  # for another launcher
        self._is_down = False  # `pdserve down` was called
        _on_signals(self._stop, self._force)
        is_json, holds_details = log_format() == JSON, not asked.is_level_given
        self.report = LauncherReport(asked.log_dir, asked.log_limits, is_json=is_json, holds_details=holds_details)
        self._hangup = asyncio.Event()
        if not is_on_terminal():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hangup.set)

    async def run(
        self, cluster: LaunchedCluster, start: Callable[[], Coroutine[Any, Any, str]], *, adopts: bool = False
    ) -> int:
        """`adopts`: if it does not start, the cluster goes on."""
        report = self.report
        tasks = [asyncio.create_task(_tick(report))]
        is_graceful, leaves = False, adopts
        try:
            address = await _unless_set(self._stop, start)
            if address is None:
                return INTERRUPTED
            if not adopts:
                report.table()
            _say_security(cluster.spec, report)
            if cluster.spec.inject_faults:
                report.say("launcher", f"FAULTS ARE INJECTED into KV transfers: {cluster.spec.inject_faults}")
            if cluster.spec.http is not None:
                report.say("launcher", f"live view: {live_url(cluster.spec)}")
            missing = await degradations(cluster.spec, has_own_redis=cluster.has_own_redis)
            if (link := cluster.link) is not None:
                cluster.on_change = lambda: self._save(cluster, link)
                cluster.on_change()
                link.set_on_down(self.down)
                link.on_leave, link.on_go = lambda: self._why_not(cluster), self._leave
            if adopts and self._stop.is_set() and not self._is_down:  # interrupted before it was ready
                return INTERRUPTED
            report.ready(ready_line(cluster.spec, address, missing))
            if link is not None:
                report.to_background((self._asked.log_dir or cluster.folder) / LAUNCHER_LOG)
            is_graceful, leaves = True, False
            tasks.append(asyncio.create_task(self._follow_hangups(cluster)))
            await cluster.run(self._stop)
            leaves = self._leaves
            return 0
        finally:
            report.failed()
            if leaves:
                what_follows = "the keeper ends the cluster" if self._is_down else "the cluster goes on"
                report.say("launcher", f"leaves; {what_follows}")
                if not self._leaves and not self._is_down:  # nobody takes its place
                    report.say("launcher", NO_LAUNCHER)
                await cluster.leave()
            else:
                await _stop(cluster, self._force, is_graceful=is_graceful)
            for task in tasks:
                task.cancel()
            sweep()  # folders of workers that were killed during their start
            report.close()

    def down(self) -> None:
        """`pdserve down` was called."""
        self._is_down = True
        self._stop.set()

    def _save(self, cluster: LaunchedCluster, link: KeeperLink) -> None:
        from pdserve.launch.detached.saved import SavedLauncher  # imports the router

        saved = SavedLauncher.of_this(self._asked, self._source, cluster.saved(), self._environ)
        link.save(saved.to_json())

    def _why_not(self, cluster: LaunchedCluster) -> str:
        """Why it cannot leave for another launcher now; empty: it can."""
        if change := cluster.running_change:
            return f"the launcher makes a change ({change}); try again when it has ended"
        return "the cluster is ending" if self._stop.is_set() else ""

    def _leave(self) -> None:
        self._leaves = True
        self._stop.set()

    async def _follow_hangups(self, cluster: LaunchedCluster) -> None:
        report = self.report
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            report.reopen()
            try:
                wanted = await asyncio.to_thread(self._source.read, self._asked)
            except PdserveError as error:
                report.say("launcher", f"SIGHUP: the settings are invalid and stay as they are: {error}")
                continue
            for why in wanted.unread:
                report.say(
                    "launcher", f"SIGHUP: WARNING: the file of a secret cannot be read, and the secret stays: {why}"
                )
            self._asked, changed, fixed = merge(self._asked, wanted)
            report.limit_files(self._asked.log_limits)
            cluster.reload(self._asked.spec.settings, self._asked.log_level)
            report.say("launcher", f"SIGHUP: the settings were read again; changed: {', '.join(changed) or 'none'}")
            rolled, read = _by_name(cluster.overlay), _by_name(wanted.spec.settings)
            differs = {one for one in rolled if rolled[one] != read.get(one)}
            fixed = [one for one in fixed if one not in rolled or one in differs]
            if kept := [one for one in changed if one in differs]:
                report.say("launcher", f"SIGHUP: WARNING: workers keep what a roll-out has set: {', '.join(kept)}")
            if fixed:
                report.say(
                    "launcher", f"SIGHUP: WARNING: these settings change at the next start only: {', '.join(fixed)}"
                )


def _by_name(settings: Settings) -> dict[str, Value]:
    return {f"{kind}.{name}": value for kind, values in settings.items() for name, value in values.items()}


async def _tick(report: LauncherReport) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        report.tick()


def ready_line(spec: ClusterSpec, address: str, missing: Sequence[str]) -> str:
    """Names the Redis, without its password, and the missing services. Pure."""
    degraded = f"; DEGRADED: {'; '.join(missing)}" if missing else ""
    http = "" if spec.http is None else f"http {http_url(address, spec.http, is_tls=_is_https(spec))} "
    several = f"{spec.routers} routers, " if spec.routers > 1 else ""
    mock = f", {MOCK}" if is_mock(spec) else ""
    ca = "" if spec.tls is None else f", ca {spec.tls.ca}"
    return (
        f"pdserve ready: grpc {address} {http}({spec.prefill} prefill, {spec.decode} decode, {several}"
        f"redis {place(spec.redis) or 'none'}, model {' or '.join(served_names(spec))}{mock}{ca}){degraded}"
    )


def http_url(address: str, port: int, *, is_tls: bool = False) -> str:
    """What OpenAI's clients call `base_url`. Both listen on the same host."""
    return f"http{'s' if is_tls else ''}://{address.rpartition(':')[0]}:{port}/v1"


def live_url(spec: ClusterSpec) -> str:
    """As a browser on this host opens it. Pure."""
    host = "localhost" if is_any_host(spec.host) else spec.host
    return http_url(join(host, 0), spec.http or 0, is_tls=_is_https(spec)).removesuffix("/v1") + "/ui"


def _is_https(spec: ClusterSpec) -> bool:
    config = gateway_config(spec)
    return config is not None and bool(config.tls_cert)


def _say_security(spec: ClusterSpec, report: LauncherReport) -> None:
    if spec.tls is not None:
        report.say("launcher", f"TLS is on; callers trust the CA certificate {spec.tls.ca}")
    elif not is_loopback_host(spec.host):
        report.say("launcher", f"INSECURE: {spec.host} serves plain text, which others on the network can read")


def _cluster(asked: Asked, report: LauncherReport, saved: SavedCluster | None = None) -> LaunchedCluster:
    if asked.ray is None:
        return LocalCluster(asked.spec, report, saved=saved)
    return RayCluster(asked.spec, asked.ray, report, saved=saved)


async def _unless_set(stop: asyncio.Event, start: Callable[[], Coroutine[Any, Any, str]]) -> str | None:
    """The address of the started cluster; None if `stop` came first."""
    starting, stopping = asyncio.ensure_future(start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return None


async def _stop(cluster: LaunchedCluster, force: asyncio.Event, *, is_graceful: bool) -> None:
    draining, forcing = (
        asyncio.ensure_future(cluster.stop(is_graceful=is_graceful)),
        asyncio.ensure_future(force.wait()),
    )
    await asyncio.wait([draining, forcing], return_when=asyncio.FIRST_COMPLETED)
    forcing.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await cluster.stop(is_graceful=False)


def _check_host(asked: Asked) -> None:
    """Raises ConfigError without the packages or the open files that the cluster needs."""
    if asked.spec.http is not None and importlib.util.find_spec("starlette") is None:
        raise ConfigError("http", "no such package as starlette", f"the extra gateway: {advice('gateway')}")
    if asked.ray is not None and importlib.util.find_spec("ray") is None:
        raise ConfigError("ray", "no such package", f"the extra ray: {advice('ray')}")
    _allow_descriptors(asked)


def _allow_descriptors(asked: Asked) -> None:
    """Raises ConfigError if this process or one that it starts may need more open files than it is allowed. Checked
    here, because the process would report it only after others have started."""
    spec = asked.spec
    http = gateway(spec, "")
    started = processes(spec) if asked.ray is None else routers(spec, ())
    num_added = bounds_of("autoscale", spec.autoscale)[1] - spec.prefill - spec.decode if spec.autoscale else 0
    allow_descriptors(OF_A_PROCESS + OF_A_CHILD * (spec.num_processes + num_added), "the launcher")
    for process in started if http is None else [*started, http]:
        allow_descriptors(needed_by(process.config), process.name)


def _on_signals(stop: asyncio.Event, force: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            force.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
