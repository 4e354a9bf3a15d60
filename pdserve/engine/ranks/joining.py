"""The side of a rank on another host than its leader: joins at the rendezvous address, and connects to the store
through it.

The leader's side is pdserve/engine/ranks/rendezvous.py.
"""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import grpc

from pdserve.build import FULL_VERSION
from pdserve.core.access.hosts import check_endpoint
from pdserve.core.access.proof import ClusterSecret, Identity
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.engine.model.collectives import LOOPBACK
from pdserve.engine.ranks.rendezvous import MAX_MESSAGE_BYTES, PIECE_BYTES
from pdserve.outage_log import PeerLog
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.tls.reasons import connection_failure
from pdserve.v1 import rank_pb2, rank_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import channel_options
from pdserve.wire.tls_credentials import peer_channel

log = logging.getLogger(__name__)

CALL_S: Final = 10.0  # time limit for the leader's answer to a call
RETRY_S: Final = 0.5  # between attempts while the leader does not listen yet
_LAST_WORDS_S: Final = 1.0
# While the leader has not started, or is starting.
_NOT_YET: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@final
class Membership:
    """A place among the ranks of a worker: `rank`, the leader's `flags`, and `store_port` of this host's loopback."""

    def __init__(
        self,
        address: str,
        secret: ClusterSecret,
        wait_s: float,
        on_lost: Callable[[str], None],
        tls: ReloadingCertificates | None = None,
    ) -> None:
        """Waits up to `wait_s` for the leader to listen. `on_lost` is called on a separate thread, with the reason,
        if the leader is lost, and never after leave().

        Raises ConfigError if nothing listens at `address`, if it is no rendezvous, or if it has no place left; and
        Unauthenticated if one side does not know the cluster's secret.
        """
        self._address, self._on_lost = address, on_lost
        self._identity = Identity.of(secret, "rank", "rank", secrets.token_hex(8))
        self._requests: queue.SimpleQueue[rank_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._is_leaving = False
        self._lines = PeerLog(log)
        self._channel = peer_channel(self._target(peers.JOIN).target, tls, channel_options(MAX_MESSAGE_BYTES))
        try:
            self._call, answer = self._join(wait_s)
        except BaseException:
            self._channel.close()
            raise
        self.rank, self.flags = int(answer.rank), list(answer.flags)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.store_port = int(self._listener.getsockname()[1])
        for work in (self._watch, self._accept):
            threading.Thread(target=work, name=f"rank-{work.__name__.strip('_')}", daemon=True).start()

    def leave(self, error: str = "") -> None:
        """Sends the leader the error, if there was one."""
        self._is_leaving = True
        if error:
            self._requests.put(rank_pb2.JoinRequest(error=error))
        self._requests.put(None)
        ended = threading.Event()
        if self._call.add_callback(ended.set):
            ended.wait(_LAST_WORDS_S)
        self._listener.close()
        self._channel.close()

    def _target(self, method: str) -> Any:
        return peers.introduce(self._identity, method, self._address)

    def _join(self, wait_s: float) -> tuple[Any, rank_pb2.JoinResponse]:
        ends_s, has_said = time.monotonic() + wait_s, False
        while True:
            try:
                call = self._proven(peers.JOIN, "Join", iter(self._requests.get, None))
                self._requests.put(rank_pb2.JoinRequest(version=FULL_VERSION))
                return call, next(call)
            except grpc.RpcError as error:
                details = str(error.details())  # type: ignore[attr-defined]
                why = connection_failure(details) or f"{error.code().name}: {details}"  # type: ignore[attr-defined]
                if error.code() not in _NOT_YET:  # type: ignore[attr-defined]
                    raise ConfigError(
                        "rendezvous", f"{self._address}: {why}", "a worker with room for a rank"
                    ) from None
                if time.monotonic() > ends_s:
                    seen = f"{self._address}: no server answers in {wait_s:.0f} s ({why})"
                    expected = "the --rendezvous address of a worker that is starting"
                    raise ConfigError("rendezvous", seen, expected) from None
            if not has_said:
                log.info("waiting for the leader", extra={"rendezvous": self._address, "why": why})
                has_said = True
            time.sleep(RETRY_S)

    def _proven(self, method: str, name: str, requests: Iterator[Any]) -> Any:
        """Makes a call and checks the callee's proof. Raises Unauthenticated and grpc.RpcError."""
        introduction = self._target(method)
        metadata = peers.prove_blocking(self._channel, introduction, CALL_S)
        call = getattr(rank_pb2_grpc.RendezvousServiceStub(self._channel), name)(requests, metadata=metadata)
        peers.check_call_blocking(introduction, call, CALL_S)
        return call

    def _watch(self) -> None:
        why = "the leader has ended the stream"
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        if not self._is_leaving:
            self._on_lost(why)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed by leave()
                return
            threading.Thread(target=self._carry, args=(connection,), name="rank-store", daemon=True).start()

    def _carry(self, connection: socket.socket) -> None:
        """One connection of torch's client to the leader's store."""
        with connection:
            try:
                for response in self._proven(peers.REACH_STORE, "ReachStore", _pieces(connection)):
                    connection.sendall(response.data)
            # The client sees its connection closed. gRPC raises ValueError if leave() has closed the channel.
            except (OSError, ValueError, grpc.RpcError, PdserveError) as error:
                if not self._is_leaving:
                    self._lines.warning("a connection to the ranks' store broke", error=str(error))


def own_address(rendezvous: str) -> str:
    """The address of this host from which it reaches the leader's host. Raises ConfigError."""
    host, port = check_endpoint("rendezvous", rendezvous)
    try:
        [(family, *_, where), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:  # ValueError: a name that IDNA cannot encode
        raise ConfigError("rendezvous", rendezvous, f"HOST:PORT that this host reaches ({error})") from None


def _pieces(connection: socket.socket) -> Iterator[rank_pb2.ReachStoreRequest]:
    while True:
        try:
            data = connection.recv(PIECE_BYTES)
        except OSError:
            return
        if not data:
            return
        yield rank_pb2.ReachStoreRequest(data=data)
