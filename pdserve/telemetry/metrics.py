"""Counters, gauges and histograms of one process, served to Prometheus. Does nothing if it is off.

Each process has its own registry, so that tests can run several in one interpreter. All metrics are declared in
pdserve/telemetry/metric_names.py.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import socketserver
import threading
import wsgiref.simple_server
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, final

from pdserve.core.access.hosts import network_of
from pdserve.core.access.shares import to_close
from pdserve.core.errors import ConfigError
from pdserve.listening import bind_error, is_held
from pdserve.telemetry.metric_names import METRICS, MetricSpec
from pdserve.telemetry.names import Process
from pdserve.telemetry.series import Collector, Counter, Family, Histogram, family_of
from pdserve.tls.certificates import ReloadingCertificates

# --- server of /metrics ---------------------------------------------------------------------------------------
# HTTP or HTTPS: one thread for each connection, at most MAX_CONNECTIONS at a time. One more closes another one.

MAX_CONNECTIONS: Final = 16
MAX_REQUEST_BYTES: Final = 16_384  # request line and headers; bodies are not read
REQUEST_S: Final = 10.0  # time limit of a connection, the TLS handshake included
_LEAVE_S: Final = 5.0  # within which the thread of a closed connection ends, unless the process is very busy


class _Caller:
    """One connection, whose socket changes with the TLS handshake."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has left
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # that of SSLSocket would first end the encryption


@final
class MetricsServer(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """Listens at once; `close` ends it. Raises OSError if the port is not available."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait in the kernel: so few that one behind all of them waits shortly

    def __init__(self, host: str, port: int, app: Callable[..., Any], tls: ReloadingCertificates | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.allow_reuse_port = is_held(port)
        self._tls = tls
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()  # guards the callers, and changes of their sockets
        self._silent: dict[_Caller, str] = {}  # have sent nothing; with their hosts, oldest first
        self._active: dict[_Caller, str] = {}  # have sent something, those that did so first come first
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.server_close()
            raise

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=2.0)

    def server_bind(self) -> None:
        """Without the look-up of the host's name, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False) and not self._make_room():
            self.shutdown_request(request)
            return
        caller: Any = _Caller(request)  # for the thread, in place of the socket
        with self._lock:
            self._silent[caller] = network_of(client_address[0])
        try:
            super().process_request(caller, client_address)
        except BaseException:  # no thread was started
            self._leave(caller)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        caller: _Caller = request
        limit = threading.Timer(REQUEST_S, caller.hang_up)
        limit.daemon = True
        limit.start()
        try:
            caller.socket.settimeout(REQUEST_S)
            caller.socket.recv(1, socket.MSG_PEEK)
            with self._lock:
                self._has_sent(caller)
            if self._tls is not None and self._tls.files.cert:
                context = self._tls.current().caller_server
                with self._lock:
                    secured = context.wrap_socket(caller.socket, server_side=True, do_handshake_on_connect=False)
                    caller.socket = secured
                secured.do_handshake()
            super().process_request_thread(caller.socket, client_address)
        except OSError:  # it sent nothing, or the handshake failed
            self.shutdown_request(caller.socket)
        finally:
            limit.cancel()
            self._leave(caller)

    def _make_room(self) -> bool:
        """Takes the place of another connection, which it closes. False if that one's thread does not end in time."""
        poll = select.poll()
        with self._lock:
            silent = {caller.socket.fileno(): caller for caller in self._silent}
            for descriptor in silent:
                if descriptor >= 0:  # its thread has not closed it
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(0):  # they have sent something that their threads have not read yet
                self._has_sent(silent[descriptor])
            closed = to_close(self._silent, self._active)
            if closed is not None:
                self._forget(closed)
                closed.hang_up()
        return self._free.acquire(timeout=_LEAVE_S)

    def _has_sent(self, caller: _Caller) -> None:
        """With the lock held."""
        if caller in self._silent:
            self._active[caller] = self._silent.pop(caller)

    def _leave(self, caller: _Caller) -> None:
        with self._lock:
            self._forget(caller)
        self._free.release()

    def _forget(self, caller: _Caller) -> None:
        """With the lock held."""
        self._silent.pop(caller, None)
        self._active.pop(caller, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is not an error."""

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            super().shutdown_request(request)


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _BoundedReader(self.rfile)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request, because a stranger could fill the log."""


class _BoundedReader:
    """The lines of a request; raises OSError, which ends the connection, if they are longer than MAX_REQUEST_BYTES."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, MAX_REQUEST_BYTES
        self.close = file.close

    def readline(self, limit: int = -1) -> bytes:
        line = bytes(self._file.readline(self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise OSError("the request is too long")
        return line


# --- metrics of a process -------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


@final
class Metrics:
    """Safe to call from any thread. A metric that was not declared for this process raises KeyError.

    `add`, `set` and `observe` find the series by its labels. A caller that records often keeps a series instead, by
    `counter` or `histogram`.
    """

    def __init__(self, by: Process | None) -> None:
        """The metrics that metric_names.py declares for processes of kind `by`; none where that is None."""
        self._registry: Any = None
        self._server: Any = None
        self._by_name: dict[str, Family[Any]] | None = None
        if by is None:
            return
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        self._by_name = {spec.name: family_of(spec) for spec in METRICS.values() if by in (spec.by, spec.also_by)}
        self._registry.register(Collector(list(self._by_name.values())))
        prometheus.ProcessCollector(registry=self._registry)  # CPU, memory, file descriptors, start time

    @classmethod
    def off(cls) -> Self:
        return cls(None)

    @property
    def is_on(self) -> bool:
        return self._by_name is not None

    def add(self, spec: MetricSpec, amount: float = 1.0, **labels: str) -> None:
        if self._by_name is not None:
            self._by_name[spec.name].of(labels).add(amount)

    def set(self, spec: MetricSpec, value: float, **labels: str) -> None:
        if self._by_name is not None:
            self._by_name[spec.name].of(labels).set(value)

    def observe(self, spec: MetricSpec, value: float, *, trace_id: str = "", **labels: str) -> None:
        if self._by_name is not None:
            self._by_name[spec.name].of(labels).observe(value, trace_id)

    def counter(self, spec: MetricSpec, **labels: str) -> Counter:
        """One that nobody reads, if metrics are off."""
        return Counter(spec) if self._by_name is None else self._by_name[spec.name].of(labels)

    def histogram(self, spec: MetricSpec, **labels: str) -> Histogram:
        """One that nobody reads, if metrics are off."""
        return Histogram(spec) if self._by_name is None else self._by_name[spec.name].of(labels)

    def serve(
        self,
        port: int,
        host: str = "127.0.0.1",
        tls: ReloadingCertificates | None = None,
        pages: Mapping[str, bytes] | None = None,
    ) -> int:
        """Answers GET /metrics on its own thread, over HTTPS if `tls` has a certificate. Returns the port; 0 selects a
        free one. `pages` maps further paths to JSON documents.

        Raises ConfigError if the port is in use.
        """
        if self._by_name is None:
            return 0
        import prometheus_client as prometheus

        try:
            app = _with_pages(prometheus.make_wsgi_app(self._registry), pages or {})
            self._server = MetricsServer(host, port, app, tls)
        except OSError as error:
            raise bind_error("metrics_port", host, port) or ConfigError("metrics_port", port, str(error)) from error
        bound = int(self._server.server_port)
        log.info("metrics are served", extra={"host": host, "port": bound})
        return bound

    def text(self) -> str:
        """The text of /metrics; empty if it is off."""
        if self._by_name is None:
            return ""
        import prometheus_client as prometheus

        return str(prometheus.generate_latest(self._registry).decode())

    def close(self) -> None:
        """Frees the port. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def make_metrics(by: Process, port: int, host: str = "127.0.0.1", tls: ReloadingCertificates | None = None) -> Metrics:
    """Metrics served on `port`; 0 turns them off, as in a worker's --metrics-port."""
    if port == 0:
        return Metrics.off()
    metrics = Metrics(by)
    metrics.serve(port, host, tls)
    return metrics


def _with_pages(app: Callable[..., Any], pages: Mapping[str, bytes]) -> Callable[..., Any]:
    def answer(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
        page = pages.get(environ["PATH_INFO"])
        if page is None or environ["REQUEST_METHOD"] != "GET":
            return app(environ, start_response)
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(page)))])
        return [page]

    return answer
