"""The gateway: its HTTP server on an event loop, and as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import uvicorn

from pdserve.client.aio import AsyncClient
from pdserve.client.connect import ClientTransport, ReloadingTransport
from pdserve.client.retries import Retries
from pdserve.config import GatewayConfig
from pdserve.core.access.hosts import is_loopback_host
from pdserve.core.durations import clamped_s
from pdserve.core.errors import ConfigError, InternalError, NoWorkers, Unauthenticated
from pdserve.gateway.app import Gateway
from pdserve.gateway.arrivals import Arrivals, Handshake
from pdserve.gateway.connection import BUSY, Connection, set_options
from pdserve.gateway.door import Shutdown
from pdserve.gateway.open_connections import ConnectionLimits, Connections
from pdserve.listening import bind_error, ignore_poller_races, share_port, with_allowed_connections
from pdserve.load_gate import LoadGate
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.tls.certificates import ReloadingCertificates, TlsFiles, certificates_of

log = logging.getLogger(__name__)

START_S: Final = 60.0
MEASURE_EVERY_S: Final = 1.0
STOP_S: Final = 5.0
INTERRUPT_S: Final = 1.0  # in which each request gets its error at the end
FLUSH_S: Final = 1  # after it, in which the errors reach the clients; uvicorn takes whole seconds
TICKS_S: Final = 0.5  # of uvicorn, which looks at its flags every tenth of a second


@final
class GatewayServer:
    """The gateway on one event loop: start() once; then drain() or stop(). `ended` is set when it has ended."""

    def __init__(
        self,
        config: GatewayConfig,
        transport: ClientTransport | None = None,
        *,
        gate: LoadGate | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`transport` leads to a router in this process, whose `gate` it shares; None: to the one at config.router.
        `on_end` is called when the HTTP server has ended. Raises ConfigError if a TLS file cannot be used."""
        # uvicorn logs each request that is not HTTP, so any client could fill the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._config, self._transport, self._gate, self._on_end = config, transport, gate, on_end
        # The certificate may be from another CA than the router's.
        self._tls = certificates_of(config, is_mutual=False)
        self._router_tls: ReloadingCertificates | None = None
        if config.router_cert:
            files = TlsFiles(cert=config.router_cert, key=config.router_key, ca=config.tls_ca)
            self._router_tls = ReloadingCertificates(files, peer_name=config.tls_peer_name)
        self._metrics = Metrics("gateway")
        self._connections = Connections(limits=_connection_limits(config))
        self._gateway: Gateway | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._arrivals: Arrivals | None = None
        self._shutdown = Shutdown()
        self._closing = contextlib.AsyncExitStack()  # of what `start` has opened
        self.address = ""

    async def start(self) -> str:
        """Returns HOST:PORT once it listens.

        Raises ConfigError if the port is in use, or if callers off this host would need no token.
        """
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> str:
        config = self._config
        self._closing.push_async_callback((client := self._client()).close)
        is_local = is_loopback_host(config.host)
        if not is_local:
            await _check_closed(client, config.host)
        if config.metrics_port:
            self._metrics.serve(config.metrics_port, config.metrics_host or config.host, self._tls)
        self._listener = listener = _listen(config.host, config.port)
        self._closing.callback(listener.close)
        set_options(listener, config.stall_s)
        host, port = listener.getsockname()[:2]
        self._gateway = gateway = Gateway(
            config, client, self._metrics, self._shutdown, needs_token=not is_local, gate=self._gate
        )
        self._closing.push_async_callback(gateway.close)
        self._connections.shed = gateway.shed
        self._server = server = uvicorn.Server(_uvicorn_config(gateway.app()))
        self._serving = serving = asyncio.create_task(self._serve(server))
        serving.add_done_callback(lambda _: self._on_end())
        while not server.started:
            if serving.done():
                serving.result()
                raise InternalError("the HTTP server ended at its start")
            await asyncio.sleep(0.001)
        self._arrivals = self._accept(server, listener)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("gateway is up", extra={"address": self.address, "router": config.router or "in this process"})
        return self.address

    async def drain(self, *, leaves_port: bool = False) -> None:
        """Finishes running requests, for at most drain_s, and ends. The port stays open until then, so that new
        requests and health checks get an answer. `leaves_port`: other processes that listen there get them."""
        if leaves_port and self._arrivals is not None:
            self._arrivals.close()
            self._connections.is_ending = True
            for one in list(self._connections.idle):
                one.end_idle()
        await self._shutdown.drain(self._config.drain_s)
        await self.stop()

    async def stop(self) -> None:
        """Ends every request now, with an error that says why. Idempotent."""
        try:
            if self._serving is not None and not self._serving.done():
                await self._shutdown.interrupt(INTERRUPT_S)
                self._exit()
                await asyncio.wait([self._serving], timeout=FLUSH_S + TICKS_S)
            if self._serving is not None and not self._serving.done():
                self._abort()
                await asyncio.wait([self._serving], timeout=STOP_S)
        finally:
            await self._closing.aclose()  # what is still open
            await asyncio.to_thread(self.close)  # it waits for the thread of the metrics

    def close(self) -> None:
        """Ends what runs beside the event loop. Idempotent."""
        self._metrics.close()

    def reload(self, changes: Mapping[str, Any]) -> None:
        """Of open connections, the next waits have the new limits."""
        self._config = config = dataclasses.replace(self._config, **changes)
        self._connections.limits = _connection_limits(config)
        if self._gateway is not None:
            self._gateway.bodies.config = config
        if self._listener is not None and self._listener.fileno() >= 0:
            set_options(self._listener, config.stall_s)

    # ------------------------------------------------------------------------------------------------------------

    def _client(self) -> AsyncClient:
        config, tls = self._config, self._tls
        if self._transport is not None:
            # The router of the call is this process.
            return AsyncClient(insecure=True, retries=Retries(limit=0, resume_s=0.0), transport=self._transport)
        transport = None
        if tls is not None and tls.files.ca and not config.router.startswith("unix:"):
            transport = ReloadingTransport(self._router_tls or tls)
        return AsyncClient(
            config.router,
            tls=transport is not None,
            insecure=config.insecure,
            # One for each further router. A longer wait is the caller's, whose connection would be kept for it.
            retries=Retries(limit=config.router.count(","), first_backoff_s=0.1, longest_wait_s=1.0),
            transport=transport,
        )

    def _accept(self, server: uvicorn.Server, listener: socket.socket) -> Arrivals:
        def http() -> Connection:
            return Connection(server.config, server.server_state, {}, connections=self._connections)

        if self._tls is None or not self._tls.files.cert:
            return Arrivals(listener, self._connections, http, BUSY)
        tls = self._tls
        # Before the handshake there is no way to answer.
        return Arrivals(listener, self._connections, lambda: Handshake(http(), self._connections, tls), b"")

    def _exit(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
        if self._server is not None:
            self._server.should_exit = True

    async def _serve(self, server: uvicorn.Server) -> None:
        measuring = asyncio.create_task(self._measure_forever())
        try:
            await server.serve(sockets=[])
        finally:
            measuring.cancel()
            await self._closing.aclose()

    async def _measure_forever(self) -> None:
        dropped = 0
        while True:
            self._metrics.set(metric_names.HTTP_CONNECTIONS, self._connections.num_open)
            self._metrics.add(metric_names.HTTP_DROPPED, self._connections.num_dropped - dropped)
            dropped = self._connections.num_dropped
            await asyncio.sleep(MEASURE_EVERY_S)

    def _abort(self) -> None:
        self._exit()
        if self._server is not None:
            self._server.force_exit = True
            for one in list(self._server.server_state.connections):
                one.transport.abort()  # type: ignore[union-attr]


@final
class GatewayHost:
    """The gateway as a process of its own, with its own thread and event loop.

    start() once; then drain() or stop(); wait() returns when it has ended.
    """

    memory = ""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError, as GatewayServer does."""
        self._has_ended = threading.Event()
        self._server = GatewayServer(config, on_end=self._ended)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(ignore_poller_races)
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._draining: asyncio.Task[None] | None = None  # a reference, because the loop does not keep tasks alive

    @property
    def address(self) -> str:
        return self._server.address

    def start(self) -> str:
        """Returns HOST:PORT once it listens. Raises ConfigError, as GatewayServer does."""
        try:
            self._thread.start()
            return str(asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result())
        except BaseException:
            self._end()
            raise

    def drain(self) -> None:
        """Finishes running requests, for at most drain_s, and ends. Returns immediately. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._begin_drain)

    def stop(self) -> None:
        """Ends every request now, with an error that says why. Idempotent."""
        if self._thread.is_alive() and not self._has_ended.is_set():
            stopping = asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop)
            with contextlib.suppress(TimeoutError):
                stopping.result(INTERRUPT_S + FLUSH_S + TICKS_S + 2 * STOP_S)
        self._end()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the gateway has ended."""
        return self._has_ended.wait(None if timeout_s is None else clamped_s(timeout_s))

    def reload(self, changes: Mapping[str, Any]) -> None:
        self._server.reload(changes)

    # ------------------------------------------------------------------------------------------------------------

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._server.drain())
            self._draining.add_done_callback(lambda _: self._has_ended.set())

    def _ended(self) -> None:
        if self._draining is None:
            self._has_ended.set()

    def _end(self) -> None:
        self._server.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
        else:
            self._loop.close()
        self._has_ended.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def make_gateway(config: GatewayConfig) -> GatewayHost:
    return GatewayHost(with_allowed_connections(config))


def _connection_limits(config: GatewayConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=config.max_connections,
        max_header_bytes=config.max_header_bytes,
        header_s=config.header_s,
        idle_s=config.idle_s,
        stall_s=config.stall_s,
    )


async def _check_closed(client: AsyncClient, host: str) -> None:
    """Raises ConfigError if the router needs no token, which it shows by accepting a made-up one, and Unavailable if it
    does not answer."""
    try:
        await client.with_token(secrets.token_hex(16)).model()
    except Unauthenticated:
        return
    except NoWorkers:
        pass
    raise ConfigError(
        "host", host, "a loopback address, or a router that requires a token: anyone could call this port"
    )


def _listen(host: str, port: int) -> socket.socket:
    error = bind_error("port", host, port)
    if error is not None:
        raise error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    share_port(listener, port)
    try:
        listener.bind((host, port))
    except OSError as raced:
        listener.close()
        raise bind_error("port", host, port) or ConfigError("port", port, str(raced)) from raced
    return listener


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_S,  # the drain has ended
    )
