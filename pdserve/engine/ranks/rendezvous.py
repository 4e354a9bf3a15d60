"""The leader's side of ranks on other hosts: lets authenticated processes join, and forwards their connections to the
store.

    leader's host                                     another host
    Rendezvous, at config.rendezvous  <- Join         pdserve/engine/ranks/joining.py: settings for the rank's process
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
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import grpc
import grpc.aio

from pdserve.core.access.proof import NONCE_BYTES, CallChecker, ClusterSecret, canonical_address
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.installation import VERSION, release
from pdserve.core.log_limit import LogLimit
from pdserve.engine.model.collectives import LOOPBACK
from pdserve.engine.ranks.rejected_joins import count_rejected_join
from pdserve.listening import is_held
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.v1 import rank_pb2, rank_pb2_grpc
from pdserve.wire.peer_server import listen, make_peer_server, server_options

log = logging.getLogger(__name__)

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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rendezvous", daemon=True)
        self._thread.start()
        self._server: Any = None
        try:
            self._on_loop(self._serve())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the streams of all ranks, which then exit. Idempotent."""
        if not self._thread.is_alive():
            return
        if self._server is not None:
            self._on_loop(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)

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

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


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
