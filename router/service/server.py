"""One router on one event loop: its gRPC server, its streams to workers, and the state between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.build import FULL_VERSION
from pdserve.config import RouterConfig
from pdserve.core.access.hosts import join
from pdserve.core.access.proof import ClusterSecret, Identity
from pdserve.core.access.shares import BYTES_WEIGHT, Shares
from pdserve.core.errors import ConfigError, ShuttingDown
from pdserve.core.types import NO_DEFAULTS, Role, SamplingDefaults
from pdserve.listening import PortInUse, bind_error, is_held
from pdserve.load_gate import ENTERED, LoadGate
from pdserve.model_source import TOY_MODELS, model_name
from pdserve.prefix.index import MemoryLookup, PrefixIndex, PrefixLookup
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics, make_metrics
from pdserve.telemetry.tracing import Service, make_tracing
from pdserve.text.chat import TOY_TEMPLATES, TemplateSources, read_templates
from pdserve.text.sampling_defaults import read_sampling_defaults
from pdserve.text.tokenizer import load_tokenizer
from pdserve.tls.certificates import certificates_of
from pdserve.v1 import cluster_pb2_grpc, inference_pb2_grpc, router_group_pb2_grpc, worker_pb2
from pdserve.wire import status
from pdserve.wire.local_channel import LocalServer, LocalTransport
from pdserve.wire.peer_server import age_options, caller_port, make_health_servicer, port_options
from pdserve.wire.requests import RequestCheck
from router.recording.recording import RecordFile
from router.scaling.observing import RouterDemand
from router.service.admission import Admission, Limits
from router.service.auth import AuthInterceptor, Tenants
from router.service.cluster import ClusterServicer, LauncherLink, Watching
from router.service.demand import Advisor, OwnDemand, ask_addresses, read_demand
from router.service.inference import InferenceServicer
from router.service.measure import Gauges, Measure
from router.service.router_group import RouterGroup, SharedCountsFile, check_private, socket_of
from router.service.runtime import Runtime
from router.service.sessions import RouterGroupServicer, SessionCalls
from router.service.tenants import Quotas
from router.service.text.child_pool import GrammarCheck
from router.service.text.tokenizing import launching_child
from router.service.workers import Workers
from router.state.interface import Command, DrainEnded, Event, RouterClosing, RouterSettings
from router.state.state import RouterState

if TYPE_CHECKING:
    from pdserve.gateway.server import GatewayServer
    from pdserve.prefix.redis_index import RedisIndex
    from pdserve.prefix.registry import Registration

log = logging.getLogger(__name__)

INFERENCE: Final = "pdserve.v1.InferenceService"
CLUSTER: Final = "pdserve.v1.ClusterService"
STOP_GRACE_S: Final = 3.0  # for the error with which each call ends; a busy machine may need most of it
LATE_CALLS_S: Final = 0.5  # for a gateway, after the last answer of a drain
READ_CHECK_S: Final = 0.5  # between two checks whether prompts can be read
WORKERS_S: Final = 5.0  # how long a router of a group waits for its workers before it listens beside the others
WORKERS_CHECK_S: Final = 0.02
GRACE_MARGIN_S: Final = 30.0  # for the last messages of a request that has used all of its time
HANG_UP: Final = 4.0  # multiple of the silence limit; after twice the limit, a worker's requests have moved
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@final
class RouterServer:
    """start() once, on its event loop; drain() or stop() at the end."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        metrics: Metrics | None = None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`metrics` replaces the metrics of config.metrics_port.

        Raises ConfigError on an invalid setting.
        """
        self._config = config
        self._secret = secret = ClusterSecret(config.cluster_secret)
        self._tls = certificates_of(config, is_mutual=True)
        self._on_crash = on_crash
        self._settings = RouterSettings(
            policy=config.policy,
            local_max_uncached_tokens=config.local_max_uncached_tokens,
            max_queue=config.max_queue,
            max_attempts=config.max_attempts,
            worker_silence_s=config.worker_silence_s,
        )
        state = RouterState(self._settings)
        self._limits = Limits.of(config, _sampling_defaults(config))
        self.gate = LoadGate(config.slo_ttft_s)  # a gateway in this process shares it
        self._held = Shares(config.max_held_bytes, BYTES_WEIGHT)
        if config.group:
            check_private("group", Path(config.group))
        with contextlib.ExitStack() as opened:
            self._shared_counts = SharedCountsFile(Path(config.group), config.member) if config.group else None
            if self._shared_counts is not None:
                opened.callback(self._shared_counts.close)
            quotas = None if self._shared_counts is None else Quotas(counts_of=self._shared_counts.counts_of)
            self._tenants = Tenants(config.key_file, quotas)
            self._grammars = GrammarCheck(None if config.model in TOY_MODELS else Path(config.model))
            self._admission: Admission | None = None
            self._tracing = make_tracing(
                Service("pdserve-router", config.router_id), config.otlp, share=config.trace_share
            )
            opened.callback(self._tracing.close)
            self._metrics = metrics or make_metrics(
                "router", config.metrics_port, config.metrics_host or config.host, self._tls
            )
            opened.callback(self._metrics.close)
            self._measure = Measure(
                self._metrics,
                self._tracing,
                lambda prefill_worker, decode_worker: self._workers.links.between(prefill_worker, decode_worker),
                state.role_of,
                config.tenant_labels,
                state.revision_of,
            )
            self._record = (
                RecordFile(config.record, self._settings, config.record_mib * 2**20) if config.record else None
            )
            if self._record is not None:
                opened.callback(self._record.close)
            self._index = None if config.redis else PrefixIndex()
            self._incarnation = secrets.token_hex(8)
            self._demand = OwnDemand(state, self._incarnation)
            self._runtime = Runtime(
                state,
                self._measure,
                send=lambda worker_id, message: self._workers.send(worker_id, message),
                on_step=self._handled,
                on_crash=self._crashed,
            )
            self._workers = Workers(
                self._hello,
                self._runtime.submit,
                identity=Identity.of(secret, "router", config.router_id, self._incarnation),
                model_name=model_name(config.model),
                served_names=config.served_model_name,
                index=self._index,
                silence_s=max(HANG_UP * config.worker_silence_s, 1.0),
                on_change=self._workers_changed,
                on_scored=self._runtime.scored,
                on_unproven=partial(self._metrics.add, metric_names.UNPROVEN_WORKERS),
                on_crash=self._crashed,
                tls=self._tls,
            )
            self.gate.on_pace = self._workers.pacing.set_pace
            self._workers.pacing.set_stream_interval(config.stream_interval_s)
            self._group = RouterGroup(config.group, config.member, config.members, config.token)
            self._watching = Watching(self._runtime.state, self._group, incarnation=self._incarnation)
            self._health = make_health_servicer()
            self._server: Any = None
            self._local: LocalServer | None = None  # for a gateway in this process
            self._group_server: Any = None  # for the other routers, which it answers also while it drains
            self._redis_index: RedisIndex | None = None
            self._tasks: list[asyncio.Task[None]] = []
            self._readiness = asyncio.Event()
            self._is_closing = False
            self._has_crashed = False
            self._farewell: asyncio.Task[None] | None = None  # a reference, because the loop does not keep tasks alive
            self.address = ""
            self._port = 0
            self._opened = opened.pop_all()

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    @property
    def is_healthy(self) -> bool:
        return bool(self.address) and not self._has_crashed and not self._is_closing

    async def start(self) -> str:
        """Returns HOST:PORT once it listens. Raises ConfigError if the port is in use, and ModelError if the model's
        tokenizer or a chat template cannot be read."""
        config = self._config
        interceptors = (
            RequestCheck(status.abort, self._measure.rejected),
            AuthInterceptor(config.token, lambda: self._tenants.file, self._measure.rejected),
        )
        self._server = grpc.aio.server(interceptors=interceptors, options=_server_options(config))
        self._local = LocalServer(interceptors, config.max_message_bytes, inherited=(ENTERED,))
        if config.group:
            options = [("grpc.max_receive_message_length", config.max_message_bytes)]
            self._group_server = grpc.aio.server(interceptors=interceptors, options=options)
            self._bind_unix(self._group_server, socket_of(Path(config.group), config.member), "group")
        port = 0 if config.group else self._bind()
        admission = await self._load_texts()
        self._add_services(admission)
        await self._health.set(INFERENCE, _NOT_SERVING)
        await self._health.set(CLUSTER, _SERVING)
        if self._group_server is None:
            await self._listen(port)
        else:
            await self._group_server.start()
        if config.redis:
            await self._follow_redis()
        self._spawn(self._tenants.watch(), "tenants")
        if self._shared_counts is not None:
            self._spawn(self._shared_counts.keep_written(), "counts")
        self._workers.dial(config.workers)
        self._spawn(self._follow_readiness(admission), "readiness")
        self._spawn(admission.children.keep_warm(), "warm")
        self._spawn(asyncio.to_thread(admission.tokenizer.warm_up), "words")
        gauges = Gauges(
            self._measure,
            self._runtime.state,
            self._workers,
            self._tenants.quotas,
            admission.tokenizer,
            lambda: self._port,
        )
        self._spawn(gauges.run(), "gauges")
        if config.scaling:
            self._spawn(Advisor(config, self._ask_demand, self._tell_wanted).run(), "scaling")
        if config.group:  # the kernel gives it connections that the others would serve
            await self._wait_for_workers()
            await self._listen(self._bind())
        log.info("router is up", extra={"router_id": config.router_id, "address": self.address})
        return self.address

    @property
    def transport(self) -> LocalTransport:
        """Of a client on this event loop, after `start`."""
        assert self._local is not None
        return LocalTransport(self._local)

    async def drain(self, gateway: GatewayServer | None = None) -> None:
        """Reports itself as not serving, lets running requests finish for at most drain_s, then stops. So does
        `gateway`, in this process; it stops first, because its requests call this server."""
        if self._is_closing:
            return
        self._is_closing = True
        draining = None if gateway is None else asyncio.create_task(gateway.drain(leaves_port=bool(self._config.group)))
        await self._health.enter_graceful_shutdown()
        self._runtime.submit(RouterClosing())
        if self._config.group:  # clients begin new calls on new connections, which the other routers get
            self._tasks.append(asyncio.create_task(self._server.stop(self._config.drain_s), name="leave"))
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._runtime.wait_until_idle()
                if draining is not None:
                    await draining
        except TimeoutError:
            log.warning("stopping with unfinished requests", extra={"requests": self._runtime.num_calls})
        if gateway is not None:
            await gateway.stop()
        if self._config.unix_socket:  # a gateway on this host may still ask for the texts of an answer's tokens
            await asyncio.sleep(LATE_CALLS_S)
        await self.stop()

    def reload(self, changes: Mapping[str, Any]) -> None:
        """Of settings with `is_live`; for new requests. On its event loop."""
        self._config = config = replace(self._config, **changes)
        self._limits = Limits.of(config, self._limits.sampling)
        if self._admission is not None:
            self._admission.limits = self._limits
        self._held.limit = config.max_held_bytes
        self.gate.core.ttft_s = config.slo_ttft_s
        self._workers.pacing.set_stream_interval(config.stream_interval_s)
        self._tracing.share = config.trace_share
        if "workers" in changes:
            self._workers.dial_only(config.workers)

    async def stop(self) -> None:
        """Ends every call and stream now, with an error that says why. Raises the error of a step after all others."""
        self._is_closing = True
        async with contextlib.AsyncExitStack() as ending:  # the last step comes first
            ending.push_async_callback(asyncio.to_thread, self.close)  # it waits for the threads of metrics and traces
            ending.push_async_callback(self._grammars.close)
            ending.push_async_callback(self._close_started)
            ending.push_async_callback(self._wait_for_tasks)
            ending.push_async_callback(self._workers.close)
            ending.callback(self._cancel_tasks)
            ending.callback(self.gate.close)
            ending.callback(self._runtime.close)
            ending.push_async_callback(self._group.close)
            if self._server is not None and self._local is not None:
                ending.push_async_callback(self._stop_servers)
                ending.callback(self._watching.close)
                ending.push_async_callback(self._health.enter_graceful_shutdown)
            if not self._has_crashed:
                ending.callback(self._runtime.submit, DrainEnded())

    def close(self) -> None:
        """Closes files and ports that are open without an event loop. Idempotent."""
        self._opened.close()

    # ------------------------------------------------------------------------------------------------------------

    async def _stop_servers(self) -> None:
        servers = filter(None, (self._server, self._local, self._group_server))
        ends = await asyncio.gather(*(one.stop(STOP_GRACE_S) for one in servers), return_exceptions=True)
        for error in filter(None, ends):
            raise error

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _wait_for_tasks(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _close_started(self) -> None:
        async with contextlib.AsyncExitStack() as ending:
            if self._admission is not None:
                ending.push_async_callback(self._admission.close)
            if self._redis_index is not None:
                ending.push_async_callback(self._redis_index.close)

    async def _load_texts(self) -> Admission:
        """The child that reads the templates starts beside the tokenizer. It is started by this thread, because it
        ends with the thread that has started it."""
        model = self._config.model
        templates = _templates(model)
        with launching_child(templates) as quick:
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            self._admission = admission = Admission(
                tokenizer, templates, self._limits, self._grammars, self._secret, model, quick
            )
            await admission.load()
        return admission

    def _bind(self) -> int:
        where = join(self._config.host, self._config.port)
        try:
            port = caller_port(self._server, where, self._tls)
        except RuntimeError:
            port = 0
        if port == 0:
            host = self._config.host
            raise bind_error("port", host, self._config.port) or PortInUse("port", host, self._config.port)
        if self._config.unix_socket:
            self._bind_unix(self._server, Path(self._config.unix_socket), "unix_socket")
        return port

    def _bind_unix(self, server: Any, path: Path, name: str) -> None:
        """gRPC first removes the socket file of an ended router. Callers need the token here too, but no certificate,
        because only this user can reach the file."""
        check_private(name, path.parent)
        try:
            bound = server.add_insecure_port(f"unix:{path}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(name, path, "a path of at most 107 bytes that is free or a socket")
        path.chmod(0o600)

    async def _listen(self, port: int) -> None:
        """On the bound port."""
        await self._server.start()
        self.address, self._port = join(self._config.host, port), port
        self._measure.listens_at(self._config.host, port)

    async def _wait_for_workers(self) -> None:
        """Until all known workers are attached, at most WORKERS_S. Raises ShuttingDown."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORKERS_S):
                while not (self._workers.are_attached or self._is_closing):
                    await asyncio.sleep(WORKERS_CHECK_S)
        if self._is_closing:
            raise ShuttingDown

    def _add_services(self, admission: Admission) -> None:
        lookup = self._lookup()
        sessions = SessionCalls(self._runtime, lookup, self._group, self._config.router_id)
        servicer = InferenceServicer(
            self._runtime,
            admission,
            lambda: self._workers.model_with(self._runtime.state.next_weights),
            self._workers.adapters,
            lookup,
            self._measure,
            self._tenants.quotas,
            sessions,
            models=lambda: self._workers.models,
            prefix_lookup_s=self._config.prefix_lookup_s,
            held=self._held,
            gate=self.gate,
            streaming=self._workers.pacing.streaming,
        )
        cluster = ClusterServicer(
            self._runtime,
            self._watching,
            self._workers.links,
            self._workers.logs,
            self._workers.adapters,
            self._group,
            LauncherLink(self._config.launcher_socket, self._config.token),
            self._config.router_id,
            self._demand,
        )
        for server in filter(None, (self._server, self._local, self._group_server)):
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
            cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._group_server is not None:
            group = RouterGroupServicer(sessions)
            router_group_pb2_grpc.add_RouterGroupServiceServicer_to_server(group, self._group_server)
        services = (INFERENCE, CLUSTER, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server)

    def _lookup(self) -> PrefixLookup:
        config = self._config
        if self._index is not None:
            return MemoryLookup(self._index)
        from pdserve.prefix.redis_index import RedisIndex

        self._redis_index = RedisIndex(config.redis, config.cluster, timeout_s=config.prefix_lookup_s)
        return self._redis_index

    async def _follow_redis(self) -> None:
        from pdserve.prefix.registry import Registry

        def on_change(workers: Iterable[Registration]) -> None:
            self._workers.register({one.worker_id: one.endpoint for one in workers})

        assert self._redis_index is not None
        await self._redis_index.start()
        self._spawn(Registry(self._config.redis, self._config.cluster).watch(on_change), "registry")

    def _handled(self, now_s: float, event: Event, commands: list[Command]) -> None:
        self._demand.handled(event, commands)
        if self._record is not None:
            self._record.step(now_s, event, commands)

    async def _ask_demand(self) -> dict[str, RouterDemand]:
        """Of the routers whose arrivals count together."""
        if self._config.scaling_routers:
            return await ask_addresses(self._config)
        others = map(read_demand, await self._group.demands())
        return {one.incarnation: one for one in (self._demand.now(), *others)}

    def _tell_wanted(self, role: Role, number: int) -> None:
        self._metrics.set(metric_names.DESIRED_WORKERS, number, role=role.value)

    def _hello(self) -> worker_pb2.RouterHello:
        return worker_pb2.RouterHello(
            router_id=self._config.router_id,
            router_incarnation=self._incarnation,
            wants_kv_events=self._index is not None,
            reads_batches=True,
            version=FULL_VERSION,
        )

    def _workers_changed(self) -> None:
        model = self._workers.model
        if model is not None and self._redis_index is not None:
            self._redis_index.bind(model.hash_seed)
        self._readiness.set()

    async def _follow_readiness(self, admission: Admission) -> None:
        """Reports the inference service as serving while a decode worker is attached that is not drained, and prompts
        can be read."""
        was_ready = was_drained = False
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_CHECK_S):
                    await self._readiness.wait()
            self._readiness.clear()
            has_decode = Role.DECODE in self._workers.roles.values()
            is_drained = has_decode and not self._runtime.state.has_undrained_decode
            if is_drained and not was_drained:
                log.warning("all decode workers are drained; `pdserve undrain WORKER` lets one serve again")
            was_drained = is_drained
            is_ready = has_decode and not is_drained and admission.can_work
            if is_ready != was_ready:
                await self._health.set(INFERENCE, _SERVING if is_ready else _NOT_SERVING)
                was_ready = is_ready

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("a part of the router crashed", exc_info=task.exception(), extra={"part": task.get_name()})
            self._crashed(task.exception() or RuntimeError(task.get_name()))

    def _crashed(self, error: BaseException) -> None:
        if not self._has_crashed:
            self._has_crashed = True
            self._farewell = asyncio.create_task(self._health.enter_graceful_shutdown())
            self._on_crash(error)


def _templates(model: str) -> TemplateSources | None:
    return TOY_TEMPLATES if model in TOY_MODELS else read_templates(Path(model))


def _sampling_defaults(config: RouterConfig) -> SamplingDefaults:
    if config.generation_config == "none" or config.model in TOY_MODELS:
        return NO_DEFAULTS
    return read_sampling_defaults(Path(config.model))


def _server_options(config: RouterConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        *port_options(
            max_connections=config.max_connections,
            idle_s=config.connection_idle_s,
            shares_port=is_held(config.port),
        ),
        *age_options(age_s=config.connection_age_s, grace_s=config.request_timeout_s + GRACE_MARGIN_S),
        # Clients may ping while a long prompt is computed; otherwise gRPC would disconnect them.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Detects clients whose host vanished, and cancels their requests.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
