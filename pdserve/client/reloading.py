"""A transport for programs that run long: it opens a new channel when the certificate files have changed.

Running calls keep their channel, which is closed after they have ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final, final

from pdserve.client.connect import Target, Tls
from pdserve.client.transport import GrpcTransport
from pdserve.tls.certificates import Certificates, ReloadingCertificates

GRACE_S: Final = 600.0  # for the calls on a channel that was replaced


@final
class ReloadingTransport:
    """Trusts the CA in the files, and presents their certificate."""

    def __init__(self, tls: ReloadingCertificates) -> None:
        self._tls = tls

    def open(self, target: Target) -> Any:
        """A blocking channel, which keeps its certificates."""
        return GrpcTransport().open(self._with(target, self._tls.current()))

    def open_aio(self, target: Target) -> Any:
        return ReloadingChannel(self, target)

    def channel_of(self, target: Target, known: Certificates | None) -> tuple[Any, Certificates] | None:
        """A new channel; None if the certificates are still `known`."""
        found = self._tls.current()
        if found is known:
            return None
        return GrpcTransport().open_aio(self._with(target, found)), found

    def _with(self, target: Target, found: Certificates) -> Target:
        tls = Tls(
            root_certs=found.ca,
            private_key=found.key or None,
            certificate_chain=found.cert or None,
            server_name=self._tls.peer_name or None,
        )
        return dataclasses.replace(target, tls=tls)


@final
class ReloadingChannel:
    """The methods of a grpc.aio channel that generated stubs use. Belongs to one event loop."""

    def __init__(self, transport: ReloadingTransport, target: Target) -> None:
        self._transport, self._target = transport, target
        self._known: Certificates | None = None
        self._channel: Any = None
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().unary_unary(*args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().unary_stream(*args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().stream_unary(*args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().stream_stream(*args, **kwargs)

    async def close(self, grace: float | None = None) -> None:
        for one in list(self._closing):
            one.cancel()
        if self._channel is not None:
            await self._channel.close(grace)

    def _current(self) -> Any:
        found = self._transport.channel_of(self._target, self._known)
        if found is not None:
            former, (self._channel, self._known) = self._channel, found
            if former is not None:
                closing = asyncio.ensure_future(former.close(GRACE_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._channel
