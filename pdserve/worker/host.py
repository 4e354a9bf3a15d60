"""Runs one role program in this process: a gRPC server on its own thread, the engine thread, the watchdog.

    gRPC thread                          engine thread
    Attach streams -- messages -->  inbox -> program -> engine
                   <-- messages --  outboxes

If a part fails, the process ends after its health has changed, so that a supervisor starts a new one.

A change of the role exchanges the program between two steps. The process, the engine with its pool, the prefix cache
and the ports stay. Streams, KV connections and registrations are those of one incarnation, and end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import grpc

from pdserve.config import WorkerConfig
from pdserve.core.access.proof import NONCE_BYTES, CallChecker, ClusterSecret
from pdserve.core.durations import clamped_s
from pdserve.core.errors import ConfigError, PdserveError, Unavailable
from pdserve.core.kv.blocks import CacheChange
from pdserve.core.types import Role
from pdserve.engine.memory.plan import MemoryPlan
from pdserve.listening import ignore_poller_races, is_held
from pdserve.telemetry import metric_names
from pdserve.telemetry.logs import RecentLog
from pdserve.telemetry.metrics import Metrics, make_metrics
from pdserve.tls.certificates import certificates_of
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire.convert import role_from_proto
from pdserve.wire.peer_server import listen, make_health_servicer, make_peer_server, server_options
from pdserve.worker.context import ProgramContext, ProgramParts
from pdserve.worker.engine_thread import EngineThread, Watchdog, dump_and_exit
from pdserve.worker.program import AnyProgram
from pdserve.worker.role_change import needs_restart, with_settings
from pdserve.worker.session import WorkerServicer

if TYPE_CHECKING:
    from pdserve.prefix.publisher import WorkerPublisher


# --- health service -------------------------------------------------------------------------------------------
# gRPC's standard one. Workers also start without its package, because not every host has it.

log = logging.getLogger(__name__)


@final
class HealthService:
    """The health of one gRPC service. Without the package, a health check gets UNIMPLEMENTED."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._servicer: Any = None
        if find_spec("grpc_health") is None:
            log.warning("no health service", extra={"reason": "the package grpcio-health-checking is not installed"})
            return
        self._servicer = make_health_servicer()

    def add_to(self, server: Any) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, *, is_serving: bool) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2

            response = health_pb2.HealthCheckResponse
            await self._servicer.set(self._service, response.SERVING if is_serving else response.NOT_SERVING)

    async def shut_down(self) -> None:
        """Reports NOT_SERVING from now on; later calls of `set_serving` have no effect."""
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()


# --- methods of the program -----------------------------------------------------------------------------------


@final
class ProgramMethods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """What other workers call on this worker: the methods of the present program. A gRPC server keeps what was added to
    it, so this is added instead."""

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def replace(self, program: AnyProgram) -> None:
        self._handlers = []
        program.add_servicers(self)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Like a server's."""
        self._handlers = [*self._handlers, *handlers]

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Like a server's, for which they repeat the generic ones."""

    def service(self, handler_call_details: Any) -> Any:
        found = (one.service(handler_call_details) for one in self._handlers)
        return next((one for one in found if one is not None), None)


# --- host -----------------------------------------------------------------------------------------------------

SERVICE: Final = "pdserve.v1.WorkerService"  # readiness; the empty name is liveness
FATAL_EXIT_CODE: Final = 71
FAREWELL_S: Final = 0.5  # for the last messages to routers
STOP_GRACE_S: Final = 1.0
DRAIN_POLL_S: Final = 0.05
ORDER_S: Final = 1.0  # for the order to send the KV of an answer that has just left
CHANGE_S: Final = 30.0  # of a change of the role
IDLE_POLL_S: Final = 0.005
Build: TypeAlias = Callable[[ProgramContext], AnyProgram]
MAX_MESSAGE_BYTES: Final = 16 * 2**20  # a prompt of a million tokens
MAX_CONNECTIONS: Final = 512  # routers, prefill workers, and health checks
CONNECTION_IDLE_S: Final = 120.0
OPTIONS: Final = server_options(
    max_message_bytes=MAX_MESSAGE_BYTES, max_connections=MAX_CONNECTIONS, idle_s=CONNECTION_IDLE_S
)


def end_process() -> None:
    time.sleep(FAREWELL_S)
    os._exit(FATAL_EXIT_CODE)


@final
class WorkerHost:
    """start() once; then drain() or stop(); wait() returns when it has ended."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Role,
        build: Build,
        build_other: Build | None = None,
        *,
        on_fatal: Callable[[], None] = end_process,
        on_stall: Callable[[], None] = dump_and_exit,
    ) -> None:
        """`build_other`: the program of the other role; None: the role cannot change. Raises ConfigError where the
        config has no cluster secret, or if a TLS file cannot be used."""
        self._config, self._role, self._build, self._build_other = config, role, build, build_other
        self._secret = ClusterSecret(config.cluster_secret)
        self._tls = certificates_of(config, is_mutual=True)
        self._on_fatal, self._on_stall = on_fatal, on_stall
        self._incarnation = secrets.token_hex(8)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(ignore_poller_races)
        self._loop_thread = threading.Thread(target=self._run_loop, name="grpc", daemon=True)
        self._engine = EngineThread(self, config.heartbeat_s, self._engine_died)
        self._watchdog = Watchdog(self._engine, config.stall_s, on_stall)
        self._server: Any = None
        self._health = HealthService(SERVICE)
        self._methods = ProgramMethods()
        self._servicer: WorkerServicer | None = None
        self._publisher: WorkerPublisher | None = None
        self._metrics = Metrics.off()
        self._recent_log = RecentLog()
        self._has_ended = threading.Event()
        self._stop_lock = threading.Lock()
        self._is_fatal = False
        self._is_ready = False
        self._is_leaving = False
        self._changing: asyncio.Task[None] | None = None
        self.address = ""
        self.memory = ""  # how the engine's memory is divided, as JSON; empty for the toy engine

    # -- called by the process ------------------------------------------------------------------------------------

    def start(self) -> str:
        """Returns HOST:PORT once the engine has sampled a real token and the server answers. Raises the errors of
        building."""
        logging.getLogger().addHandler(self._recent_log)
        try:
            self._loop_thread.start()
            port = self._on_loop(self._bind())
            self.address = f"{self._config.advertise or self._config.host}:{port}"
            self._on_loop(check_id(self._config, self.address))
            program = self._engine.start(self._make_program)
            self._on_loop(self._serve(program))
            plan: MemoryPlan | None = getattr(program.engine, "memory", None)
            self.memory = "" if plan is None else plan.to_json()
            self._watchdog.start()
        except BaseException:
            self.stop()
            raise
        self._is_ready = True
        extra = {"worker_id": self._config.worker_id, "role": self._role.value, "address": self.address}
        log.info("worker is ready", extra=extra)
        return self.address

    def is_healthy(self) -> bool:
        """Whether its threads are alive and the engine makes progress."""
        return self._is_ready and not self._is_fatal and self._engine.is_alive and self._loop_thread.is_alive()

    def drain(self) -> None:
        """Rejects new work, and stops once the running attempts have ended or after drain_s. Returns immediately.
        Idempotent."""
        self._is_leaving = True
        threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def stop(self) -> None:
        """Ends streams, threads and the engine now. Idempotent."""
        with self._stop_lock:
            if self._has_ended.is_set():
                return
            self._is_ready = False
            self._watchdog.stop()
            if self._loop_thread.is_alive():
                try:
                    self._on_loop(self._close(), timeout_s=STOP_GRACE_S + 5.0)
                except Exception:  # the engine is freed despite any error of a connection
                    log.exception("the server did not close cleanly")
            if not self._engine.stop():
                log.error("the engine thread did not end")
            if self._loop_thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop_thread.join(5.0)
            else:
                self._loop.close()
            self._metrics.close()
            logging.getLogger().removeHandler(self._recent_log)
            self._has_ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns True once the host has ended."""
        return self._has_ended.wait(None if timeout_s is None else clamped_s(timeout_s))

    def reload(self, changes: Mapping[str, Any]) -> None:
        self._config = replace(self._config, **changes)
        self._watchdog.stall_s = self._config.stall_s

    # -- outlet of the engine thread ------------------------------------------------------------------------------

    def send(self, messages: Mapping[int, list[worker_pb2.AttachResponse]]) -> None:
        if self._servicer is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._servicer.deliver, messages)
            except RuntimeError:  # the loop ended meanwhile; so did the streams
                return

    def offer(self, change: CacheChange) -> None:
        if self._publisher is not None:
            self._publisher.offer(stored=change.stored, removed=change.removed, tiers=change.tiers)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _make_program(self) -> AnyProgram:
        self._metrics = make_metrics("worker", self._config.metrics_port, self._config.host, self._tls)
        return self._build(self._context())

    def _context(self, kept: ProgramParts | None = None) -> ProgramContext:
        incarnation = self._incarnation

        def post(call: Callable[[], None]) -> None:
            """From threads of the program, which may come after it has been exchanged."""
            self._engine.post(lambda: call() if self._incarnation == incarnation else None)

        return ProgramContext(
            config=self._config,
            role=self._role,
            incarnation=incarnation,
            endpoint=self.address,
            tls=self._tls,
            post=post,
            metrics=self._metrics,
            kept=kept,
        )

    async def _bind(self) -> int:
        self._server, self._proofs = make_peer_server(OPTIONS, self._rejected, shares_port=is_held(self._config.port))
        return listen(self._server, self._config.host, self._config.port, "port", self._tls)

    def _rejected(self, error: PdserveError) -> None:
        self._metrics.add(metric_names.REJECTED_CALLS, reason=error.reason)

    async def _serve(self, program: AnyProgram) -> None:
        self._publisher = make_publisher(
            self._config, self._role, self._incarnation, self.address, program.limits.hash_seed
        )
        self._servicer = WorkerServicer(
            program,
            self._engine.post,
            lambda: self._engine.num_waiting_calls,
            self._recent_log.lines,
            self._change_role,
        )
        checker = CallChecker(self._secret, self.address, partial(secrets.token_bytes, NONCE_BYTES))
        self._proofs.serve(checker, self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server)
        self._health.add_to(self._server)
        self._methods.replace(program)
        self._server.add_generic_rpc_handlers((self._methods,))
        await self._health.set_serving(is_serving=True)
        await self._server.start()
        if self._publisher is not None:  # routers learn of the worker once it answers
            await self._publisher.start()
        self._follower = asyncio.create_task(self._follow())

    # -- change of the role ---------------------------------------------------------------------------------------

    async def _change_role(self, request: worker_pb2.ChangeRoleRequest) -> worker_pb2.ChangeRoleResponse:
        """It goes on if the caller leaves. Raises InvalidRequest, ConfigError, and Unavailable."""
        assert self._servicer is not None
        role = role_from_proto(request.role)
        if self._is_leaving or self._is_fatal or self._changing is not None:
            raise Unavailable("the worker ends, or is changing its role")
        if role is self._role:
            return worker_pb2.ChangeRoleResponse(incarnation=self._incarnation)
        config = with_settings(self._config, request.settings)
        why = needs_restart(self._config, self._servicer.program.engine, request.settings)
        if why or self._build_other is None:
            return worker_pb2.ChangeRoleResponse(needs_restart=why or ["role"])
        self._changing = asyncio.create_task(self._exchange(role, config), name="role-change")
        await asyncio.shield(self._changing)
        return worker_pb2.ChangeRoleResponse(incarnation=self._incarnation)

    async def _exchange(self, role: Role, config: WorkerConfig) -> None:
        """If it fails, the process ends: its parts may be of two roles."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(CHANGE_S):
                num_cached = await self._exchanged(role, config)
        except asyncio.CancelledError:  # the host stops
            raise
        except BaseException as error:
            log.exception("the worker did not change its role")
            threading.Thread(target=self._die, args=("the change of the role failed",), name="end", daemon=True).start()
            raise Unavailable(f"the change of the role failed: {type(error).__name__}: {error}") from error
        self._changing = None
        extra = {"worker_id": config.worker_id, "role": role.value, "incarnation": self._incarnation}
        took_s = round(time.monotonic() - began_s, 3)
        log.info("the worker has changed its role", extra={**extra, "took_s": took_s, "cached_blocks": num_cached})

    async def _exchanged(self, role: Role, config: WorkerConfig) -> int:
        """The number of blocks in the prefix cache."""
        assert self._servicer is not None
        assert self._build_other is not None
        hash_seed = self._servicer.program.limits.hash_seed
        self._engine.post(lambda: self._engine.program.drain())
        await self._health.set_serving(is_serving=False)
        former, self._publisher = self._publisher, None
        if former is not None:
            await _within(STOP_GRACE_S, former.stop())
        while self._engine.is_idle.is_set() and not self._is_over():
            await asyncio.sleep(IDLE_POLL_S)
        await self._servicer.pause(STOP_GRACE_S)
        while not self._engine.is_idle.is_set():
            await asyncio.sleep(IDLE_POLL_S)
        incarnation = secrets.token_hex(8)
        publisher = make_publisher(config, role, incarnation, self.address, hash_seed)
        build = self._build_other
        num_cached = 0

        def take_over(before: AnyProgram) -> AnyProgram:
            nonlocal num_cached
            kept = before.hand_over()
            self._config, self._role, self._incarnation = config, role, incarnation
            program = build(self._context(kept))
            program.take_over()
            if self._is_leaving:
                program.drain()
            cached = program.kv.snapshot()
            num_cached = len(cached.stored)
            self._publisher = publisher
            self.offer(cached)
            return program

        program = await asyncio.wrap_future(self._engine.exchange(take_over))
        self._build, self._build_other = self._build_other, self._build
        self._watchdog.stall_s = config.stall_s
        self._methods.replace(program)
        self._servicer.resume(program)
        await self._health.set_serving(is_serving=not self._is_leaving)
        if publisher is not None:
            await publisher.start()
        return num_cached

    # -- threads --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """A drain, or its end, may come through any router's stream; health shows it within a heartbeat."""
        is_draining = False
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            if self._engine.is_draining is not is_draining:
                is_draining = not is_draining
                await self._health.set_serving(is_serving=not is_draining)

    async def _close(self) -> None:
        await self._health.shut_down()
        if self._publisher is not None:
            await _within(STOP_GRACE_S, self._publisher.stop())
        if self._servicer is not None:
            self._servicer.close()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_S)

    def _drain(self) -> None:
        until_s = time.monotonic() + self._config.drain_s
        if self._servicer is not None and not self._has_ended.is_set():
            self._engine.post(lambda: self._engine.program.drain())
            while not self._is_over():
                time.sleep(DRAIN_POLL_S)
                if time.monotonic() >= until_s or not self._engine.is_alive:
                    log.warning("stopping with work unfinished")
                    break
        self.stop()

    def _is_over(self) -> bool:
        """Whether nothing is left for a drain to wait for. An answer leaves in two messages of a router: its attempt is
        cancelled, and then its KV is ordered from the prefix cache."""
        may_order = self._engine.program.sends_kv and self._servicer is not None and self._servicer.has_routers
        rest_s = ORDER_S if may_order else 0.0
        return self._engine.is_idle.is_set() and time.monotonic() - self._engine.busy_s >= rest_s

    def _engine_died(self, error: BaseException) -> None:
        self._die(f"the engine thread died: {type(error).__name__}")

    def _die(self, why: str) -> None:
        if self._is_fatal:
            return
        self._is_fatal = True
        log.critical("worker ends", extra={"why": why})
        if self._loop_thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._health.shut_down(), self._loop)
        self._on_fatal()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:
            log.critical("the gRPC thread died", exc_info=True)
            self._die("the gRPC thread died")
        finally:
            self._loop.close()

    def _on_loop(self, coroutine: Any, timeout_s: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


async def _within(limit_s: float, farewell: Coroutine[Any, Any, None]) -> None:
    """Waits at most `limit_s`, even for tasks that cannot be cancelled."""
    task = asyncio.create_task(farewell)
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    if not done or task.exception() is not None:
        log.warning("a farewell failed", extra={"error": repr(task.exception()) if done else "it took too long"})


async def check_id(config: WorkerConfig, endpoint: str) -> None:
    """Raises ConfigError if a living worker has this id, before the model is loaded."""
    if config.redis:
        from pdserve.prefix.registry import living_holder

        holder = await living_holder(config.redis, config.cluster, config.worker_id, endpoint, config.lease_s)
        if holder:
            raise ConfigError("worker_id", config.worker_id, f"an id of its own: the worker at {holder} has it")


def make_publisher(
    config: WorkerConfig, role: Role, incarnation: str, endpoint: str, hash_seed: bytes
) -> WorkerPublisher | None:
    """Publishes to Redis that this worker is alive, and what it has cached. None without a Redis URL.

    It is not started yet, and keeps changes that are offered before. Its failures never affect a request: it keeps
    what it could not send, and retries. Raises ConfigError.
    """
    if not config.redis:
        return None
    # imported here, because a worker without a registry needs no Redis client
    from pdserve.prefix.publisher import WorkerPublisher
    from pdserve.prefix.registry import Registration

    registration = Registration(worker_id=config.worker_id, incarnation=incarnation, role=role, endpoint=endpoint)
    return WorkerPublisher(config.redis, config.cluster, registration, hash_seed=hash_seed, lease_s=config.lease_s)
