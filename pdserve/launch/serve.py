"""Runs `pdserve up`: start, print ready, serve until a signal, drain in order."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.extras import advice
from pdserve.core.hosts import is_loopback_host
from pdserve.core.urls import place
from pdserve.descriptors import OF_A_CHILD, OF_A_PROCESS, allow_descriptors, needed_by
from pdserve.launch.capacity import capacity_warnings
from pdserve.launch.degraded import degradations
from pdserve.launch.keys import Kind, Value
from pdserve.launch.local import LocalCluster
from pdserve.launch.report import LauncherReport
from pdserve.launch.settings import Asked, merge
from pdserve.launch.spec import ClusterSpec, gateway, processes, router, served_names
from pdserve.launch.with_ray import RayCluster
from pdserve.owned_folder import sweep
from pdserve.progress import is_on_terminal
from pdserve.telemetry.logs import JSON, log_format

INTERRUPTED: Final = 130
TICK_S: Final = 0.25  # between two draws of the status line


class ServedCluster(Protocol):
    @property
    def spec(self) -> ClusterSpec: ...

    async def start(self) -> str: ...

    async def run(self, stop: asyncio.Event) -> None: ...

    async def stop(self, *, is_graceful: bool) -> None: ...

    def reload(self, settings: Mapping[Kind, Mapping[str, Value]], log_level: str) -> None: ...


async def serve(asked: Asked, read_again: Callable[[], Asked]) -> int:
    """Returns the exit status. After SIGHUP, settings that may change become those of `read_again`.

    Raises PdserveError if the cluster cannot start; all its processes have then ended.
    """
    if gateway(asked.spec, "") is not None and importlib.util.find_spec("starlette") is None:
        raise ConfigError("http", "no such package as starlette", f"the extra gateway: {advice('gateway')}")
    _allow_descriptors(asked)
    stop, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(stop, hurry)
    is_json, holds_details = log_format() == JSON, not asked.is_level_given
    report = LauncherReport(asked.log_dir, asked.log_limits, is_json=is_json, holds_details=holds_details)
    hangup = asyncio.Event()
    if not is_on_terminal():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    if swept := sweep():  # folders of killed launchers
        report.say("launcher", f"removed {len(swept)} temporary folders that have no owner")
    if not asked.ray:  # another Ray cluster has other hosts
        for warning in await asyncio.to_thread(capacity_warnings, asked.spec):
            report.say("launcher", warning)
    cluster = _cluster(asked, report)
    tasks = [asyncio.create_task(_tick(report))]
    is_graceful = False
    try:
        try:
            address = await _unless_set(stop, cluster)
        except PdserveError:
            report.failed()
            raise
        if address is None:
            return INTERRUPTED
        report.table()
        _say_security(cluster.spec, report)
        if cluster.spec.inject_faults:
            report.say("launcher", f"FAULTS ARE INJECTED into KV transfers: {cluster.spec.inject_faults}")
        if cluster.spec.http is not None:
            url = http_url(address, cluster.spec.http, is_tls=_is_https(cluster.spec))
            report.say("launcher", f"live view: {url.removesuffix('/v1')}/ui")
        missing = await degradations(cluster.spec, has_own_redis=not asked.spec.redis)
        report.ready(ready_line(cluster.spec, address, missing))
        is_graceful = True
        tasks.append(asyncio.create_task(_follow_hangups(hangup, cluster, report, asked, read_again)))
        await cluster.run(stop)
        report.say("launcher", "draining; a second signal ends everything at once")
        return 0
    finally:
        await _stop(cluster, hurry, is_graceful=is_graceful)
        for task in tasks:
            task.cancel()
        report.close()


async def _follow_hangups(
    hangup: asyncio.Event,
    cluster: ServedCluster,
    report: LauncherReport,
    asked: Asked,
    read_again: Callable[[], Asked],
) -> None:
    while True:
        await hangup.wait()
        hangup.clear()
        report.reopen()
        try:
            wanted = await asyncio.to_thread(read_again)
        except PdserveError as error:
            report.say("launcher", f"SIGHUP: the settings are invalid and stay as they are: {error}")
            continue
        asked, changed, fixed = merge(asked, wanted)
        report.limit_files(asked.log_limits)
        cluster.reload(asked.spec.settings, asked.log_level)
        report.say("launcher", f"SIGHUP: the settings were read again; changed: {', '.join(changed) or 'none'}")
        if fixed:
            report.say("launcher", f"SIGHUP: WARNING: these settings change at the next start only: {', '.join(fixed)}")


async def _tick(report: LauncherReport) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        report.tick()


def ready_line(spec: ClusterSpec, address: str, missing: Sequence[str]) -> str:
    """Names the Redis, without its password, and the missing services. Pure."""
    degraded = f"; DEGRADED: {'; '.join(missing)}" if missing else ""
    http = "" if spec.http is None else f"http {http_url(address, spec.http, is_tls=_is_https(spec))} "
    ca = "" if spec.tls is None else f", ca {spec.tls.ca}"
    return (
        f"pdserve ready: grpc {address} {http}({spec.prefill} prefill, {spec.decode} decode, "
        f"redis {place(spec.redis) or 'none'}, model {' or '.join(served_names(spec))}{ca}){degraded}"
    )


def http_url(address: str, port: int, *, is_tls: bool = False) -> str:
    """What OpenAI's clients call `base_url`. Both listen on the same host."""
    return f"http{'s' if is_tls else ''}://{address.rpartition(':')[0]}:{port}/v1"


def _is_https(spec: ClusterSpec) -> bool:
    process = gateway(spec, "")
    return process is not None and bool(process.config.tls_cert)


def _say_security(spec: ClusterSpec, report: LauncherReport) -> None:
    if spec.tls is not None:
        report.say("launcher", f"TLS is on; callers trust the CA certificate {spec.tls.ca}")
    elif not is_loopback_host(spec.host):
        report.say("launcher", f"INSECURE: {spec.host} serves plain text, which others on the network can read")


def _cluster(asked: Asked, report: LauncherReport) -> ServedCluster:
    if asked.ray is None:
        return LocalCluster(asked.spec, report)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray", "no such package", f"the extra ray: {advice('ray')}")
    return RayCluster(asked.spec, asked.ray, report)


async def _unless_set(stop: asyncio.Event, cluster: ServedCluster) -> str | None:
    """The address of the started cluster; None if `stop` came first."""
    starting, stopping = asyncio.ensure_future(cluster.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return None


async def _stop(cluster: ServedCluster, hurry: asyncio.Event, *, is_graceful: bool) -> None:
    draining, hurrying = (
        asyncio.ensure_future(cluster.stop(is_graceful=is_graceful)),
        asyncio.ensure_future(hurry.wait()),
    )
    await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await cluster.stop(is_graceful=False)


def _allow_descriptors(asked: Asked) -> None:
    """Raises ConfigError if this process or one that it starts may need more open files than it is allowed. Checked
    here, because the process would report it only after others have started."""
    spec = asked.spec
    http = gateway(spec, "")
    started = processes(spec) if asked.ray is None else [router(spec, ())]
    allow_descriptors(OF_A_PROCESS + OF_A_CHILD * spec.num_processes, "the launcher")
    for process in started if http is None else [*started, http]:
        allow_descriptors(needed_by(process.config), process.name)


def _on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
