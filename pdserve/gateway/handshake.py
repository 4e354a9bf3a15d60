"""HTTPS: the TLS handshake of an accepted connection, under the same limits as a connection that sends nothing.

uvicorn by itself would learn of a connection only after its handshake, and would wait a minute for it. So it accepts
plain connections, and this protocol turns each into a TLS connection, with the current certificates.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
from typing import TYPE_CHECKING, Any, final

from pdserve.tls.certificates import ReloadingCertificates
from pdserve.tls.reasons import tls_failure

if TYPE_CHECKING:
    from pdserve.gateway.connection import Connection, Connections

# asyncio gives each TLS connection a buffer of this size for reading; its own 256 KiB would be 128 MiB for 512 of them.
asyncio.sslproto.SSLProtocol.max_size = 32 * 1024  # type: ignore[attr-defined]


@final
class Handshake(asyncio.Protocol):
    """`http` takes over once both sides agree. Before that, nothing is sent in plain text."""

    def __init__(self, http: Connection, connections: Connections, tls: ReloadingCertificates) -> None:
        self._http, self._all, self._tls = http, connections, tls
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport, self._is_open = transport, True
        self._all.num_open += 1
        transport.pause_reading()  # the first bytes belong to the handshake
        self._all.idle[self] = None
        if self._all.make_room():
            self._task = asyncio.get_running_loop().create_task(self._shake_hands())
        else:
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()

    def drop(self) -> None:
        self._transport.abort()

    end_idle = drop  # without TLS there is no way to answer

    async def _shake_hands(self) -> None:
        limit_s, early = self._all.limits.header_s, _EarlyBytes(self._transport)
        try:
            secured: Any = await asyncio.get_running_loop().start_tls(
                self._transport,
                early,
                self._tls.current().caller_server,
                server_side=True,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except OSError as error:  # the client does not use TLS, does not trust the certificate, or lacks one
            self._all.handshake_failed(tls_failure(str(error)) or str(error) or type(error).__name__)
            secured = None
        finally:
            self._leave()
        if secured is None or early.has_ended:
            self._transport.abort()
            return
        secured.set_protocol(self._http)
        self._http.connection_made(secured)
        if early.data:
            self._transport.resume_reading()
            self._http.data_received(bytes(early.data))

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._all.num_open -= 1
        self._all.idle.pop(self, None)


@final
class _EarlyBytes(asyncio.Protocol):
    """Keeps what a client sends together with the end of its handshake: one piece, and the rest stays in the kernel."""

    def __init__(self, plain: Any) -> None:
        self.data = bytearray()
        self.has_ended = False
        self._plain = plain  # transport below TLS

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._plain.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended = True
