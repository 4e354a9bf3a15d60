"""The HTTP or HTTPS server of /metrics: one thread for each connection, at most MAX_CONNECTIONS at a time."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
import wsgiref.simple_server
from collections.abc import Callable
from typing import Any, Final, final

from pdserve.listening import is_held
from pdserve.tls.certificates import ReloadingCertificates

MAX_CONNECTIONS: Final = 16
MAX_REQUEST_BYTES: Final = 16_384  # request line and headers; bodies are not read
REQUEST_S: Final = 10.0  # time limit of a connection, the TLS handshake included


@final
class MetricsServer(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """Listens at once; `close` ends it. Raises OSError if the port is not available."""

    daemon_threads = True

    def __init__(self, host: str, port: int, app: Callable[..., Any], tls: ReloadingCertificates | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.allow_reuse_port = is_held(port)
        self._tls = tls
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

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
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        held = [request]
        limit = threading.Timer(REQUEST_S, lambda: _hang_up(held[0]))
        limit.daemon = True
        limit.start()
        try:
            request.settimeout(REQUEST_S)
            if self._tls is not None and self._tls.files.cert:
                context = self._tls.current().caller_server
                held[0] = request = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except (OSError, ssl.SSLError):  # the handshake failed
            self.shutdown_request(request)
        finally:
            limit.cancel()
            self._free.release()

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


def _hang_up(request: Any) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
