"""Opens the channel of a client. A test replaces it (pdserve.testing.MockTransport)."""

from __future__ import annotations

from typing import Any, Protocol

import grpc
import grpc.aio

from pdserve.client.connect import Target


class ClientTransport(Protocol):
    """Each method returns a channel of its kind: the methods that generated stubs call, and `close`."""

    def open(self, target: Target) -> Any: ...

    def open_aio(self, target: Target) -> Any: ...


class GrpcTransport:
    """Connects to the target. The default."""

    def open(self, target: Target) -> grpc.Channel:
        credentials, options = target.credentials(), target.channel_options()
        if credentials is None:
            return grpc.insecure_channel(target.address, options=options)
        return grpc.secure_channel(target.address, credentials, options=options)

    def open_aio(self, target: Target) -> grpc.aio.Channel:
        """Call it inside the event loop that will use the channel."""
        credentials, options = target.credentials(), target.channel_options()
        if credentials is None:
            return grpc.aio.insecure_channel(target.address, options=options)
        return grpc.aio.secure_channel(target.address, credentials, options=options)
