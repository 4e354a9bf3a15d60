"""Ranks on other hosts: authenticated processes join the leader, which forwards their connections to the store.

    leader's host                                     another host
    Rendezvous, at config.rendezvous  <- Join         Membership: settings for the rank's process
                                      <- ReachStore   torch's client of the store, by a port of its host's loopback
      torch's store, on the loopback

torch's store does not authenticate callers: a process that reaches it can change the addresses by which ranks find each
other, and fill the leader's memory. So it never listens on the network, and every connection to it goes through an
authenticated call. Rank numbers are given in the order of joining.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import grpc
import grpc.aio

from pdserve.build import FULL_VERSION
from pdserve.core.access.hosts import check_endpoint
from pdserve.core.access.proof import NONCE_BYTES, CallChecker, ClusterSecret, Identity, canonical_address
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.installation import VERSION, release
from pdserve.engine.model.collectives import LOOPBACK
from pdserve.engine.ranks.rejected_joins import count_rejected_join
from pdserve.listening import is_held
from pdserve.loop_thread import LoopThread
from pdserve.outage_log import LogLimit, PeerLog
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.tls.reasons import connection_failure
from pdserve.v1 import rank_pb2, rank_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import channel_options, listen, make_peer_server, peer_channel, server_options

log = logging.getLogger(__name__)

# --- the leader's side ----------------------------------------------------------------------------------------

EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
MAX_MESSAGE_BYTES: Final = 2**20
PIECE_BYTES: Final = 2**16
MAX_CONNECTIONS: Final = 256  # one for each rank, and some for foreign processes
IDLE_S: Final = 120.0
HELLO_S: Final = 10.0  # time limit for a caller to introduce itself
_MAX_ERROR_CHARS: Final = 500
_JOIN_S: Final = 5.0
_POLL_S: Final = 0.02
OPTIONS: Final = server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)


@final
class RemoteRank:
    """The leader's view of a rank that joins from another host."""

    def __init__(self, rank: int, address: str) -> None:
        self.rank = rank
        self.peer = ""  # address of the caller; empty until it has joined
        self.error: str | None = None  # why it has ended
        self._address = address

    @property
    def is_alive(self) -> bool:
        return self.error is None

    def check(self) -> None:
        """Raises ConfigError with its last message if it has ended."""
        if self.error is not None:
            seen = f"rank {self.rank} of {self.peer} left: {self.error}"
            raise ConfigError("tensor_parallel", seen, "a rank that starts")

    def silence(self, timeout_s: float) -> ConfigError:
        if self.peer:
            seen = f"rank {self.rank} of {self.peer} silent for {timeout_s:.0f} s"
            return ConfigError("tensor_parallel", seen, "an answer")
        seen = f"rank {self.rank} has not joined at {self._address} in {timeout_s:.0f} s"
        return ConfigError("tensor_parallel", seen, f"`pdserve rank {self._address}` on its host")

    def end(self) -> None:
        """Waits for a short time until it has ended."""
        ends_s = time.monotonic() + _JOIN_S
        while self.peer and self.is_alive and time.monotonic() < ends_s:
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Nothing to do: its stream ends with the Rendezvous, and it ends with its stream."""


@final
class Rendezvous:
    """Listens immediately, until close()."""

    def __init__(
        self,
        address: str,
        secret: ClusterSecret,
        store_port: int,
        ranks: Sequence[int],
        flags: Sequence[str],
        tls: ReloadingCertificates | None = None,
    ) -> None:
        """`ranks` may join; each receives `flags` of the leader's config. Raises ConfigError if `address` cannot be
        used: it belongs to another host or another leader."""
        self.address = canonical_address(address)
        self.ranks: Mapping[int, RemoteRank] = {rank: RemoteRank(rank, address) for rank in ranks}
        self._secret, self._store_port, self._flags = secret, store_port, flags
        self._tls = tls
        self._rejections = LogLimit()
        self._thread = LoopThread("rendezvous")
        self._server: Any = None
        try:
            self._thread.start()
            self._thread.result_of(self._serve())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the streams of all ranks, which then exit. Idempotent."""
        try:
            if self._server is not None and self._thread.is_running:
                self._thread.result_of(self._server.stop(None))
        finally:
            self._thread.close()

    async def join(self, context: Any) -> None:
        try:
            first = await asyncio.wait_for(context.read(), HELLO_S)
        except TimeoutError:
            first = EOF
        if first is EOF or release(first.version) != VERSION:
            seen = "nothing" if first is EOF else repr(first.version[:64])
            text = f"version: got {seen}, expected {VERSION!r}, the leader's: install the same on all hosts"
            self._reject("VERSION")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        place = next((one for one in self.ranks.values() if not one.peer), None)
        if any(not one.is_alive for one in self.ranks.values()):
            # The worker exits and is started again; the process retries until then.
            self._reject("RANK_LOST")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a rank has left, so this worker ends")
            return
        if place is None:
            text = f"all {len(self.ranks)} ranks from other hosts have joined already: start fewer, or another worker"
            self._reject("ALL_JOINED")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
            return
        place.peer = context.peer()
        log.info("a tensor-parallel rank has joined", extra={"rank": place.rank, "peer": place.peer})
        error = "its process ended, or cannot be reached"
        try:
            await context.write(rank_pb2.JoinResponse(rank=place.rank, flags=self._flags))
            while (message := await context.read()) is not EOF:
                error = message.error[:_MAX_ERROR_CHARS] or error
        finally:
            place.error = error

    async def reach_store(self, context: Any) -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, self._store_port)
        pumps = {asyncio.create_task(one) for one in (_to_store(context, writer), _from_store(reader, context))}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()

    async def _serve(self) -> None:
        host, _, port = self.address.rpartition(":")
        self._server, proofs = make_peer_server(OPTIONS, self._unproven, shares_port=is_held(int(port)))
        listen(self._server, host, int(port), "rendezvous", self._tls)
        checker = CallChecker(self._secret, self.address, partial(secrets.token_bytes, NONCE_BYTES))
        proofs.serve(checker, self._server)
        rank_pb2_grpc.add_RendezvousServiceServicer_to_server(_RendezvousServicer(self), self._server)
        await self._server.start()

    def _unproven(self, error: PdserveError) -> None:
        self._reject(error.reason)

    def _reject(self, reason: str) -> None:
        count_rejected_join(reason)
        if count := self._rejections.due(time.monotonic()):
            log.warning("calls to the ranks' rendezvous were rejected", extra={"reason": reason, "calls": count})


class _RendezvousServicer(rank_pb2_grpc.RendezvousServiceServicer):
    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    async def Join(self, request_iterator: Any, context: Any) -> None:
        await self._rendezvous.join(context)

    async def ReachStore(self, request_iterator: Any, context: Any) -> None:
        await self._rendezvous.reach_store(context)


async def _to_store(context: Any, writer: asyncio.StreamWriter) -> None:
    while (message := await context.read()) is not EOF:
        writer.write(message.data)
        await writer.drain()


async def _from_store(reader: asyncio.StreamReader, context: Any) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE_BYTES):
            await context.write(rank_pb2.ReachStoreResponse(data=data))


# --- the side of a rank on another host -----------------------------------------------------------------------

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
