"""Decides who may connect: answers Open calls, issues tickets, and accepts each ticket once.

A ticket is 16 random bytes, and is valid for a few seconds. It admits only the worker that called Open. On the data
socket, this worker must prove that it knows the cluster's secret.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, final
from urllib.parse import unquote

import grpc

from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.protocol.frames import TICKET_BYTES, Checksum, Greeting, Parties, is_proven, receiver_answer
from kvtransfer.protocol.grants import compare
from kvtransfer.protocol.plan import PartLayout, arrival_of
from kvtransfer.protocol.transport import TransferStats
from kvtransfer.transports.common.registry import name_of, names_of
from pdserve.build import FULL_VERSION
from pdserve.core.access.hosts import endpoint_of, network_of
from pdserve.core.access.proof import caller_name
from pdserve.core.errors import ConfigError, Overloaded, PdserveError, TransferFailed, Unauthenticated
from pdserve.core.installation import is_compatible, mismatch
from pdserve.core.kv.kv_shape import KvShape
from pdserve.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.wire.peers import proven_caller
from pdserve.wire.protocol import FINGERPRINT

TICKET_TTL_S: Final = 10.0
MAX_TICKETS: Final = 256
MAX_NAME_CHARS: Final = 256
GIVES_NOTHING: Final = "this worker gives no KV to others"
LOCAL: Final = ""  # the host of a connection that does not use the network
CHECKSUMS: Final = {
    Checksum.XXH3_64: transfer_pb2.CHECKSUM_KIND_XXH3_64,
    Checksum.BLAKE2B_64: transfer_pb2.CHECKSUM_KIND_BLAKE2B_64,
}
STATUS: Final[dict[type[PdserveError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TransferFailed: grpc.StatusCode.FAILED_PRECONDITION,  # with this version; a repeated call would fail as well
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
}
CHECKSUM_OF: Final = {number: kind for kind, number in CHECKSUMS.items()}


@dataclass(frozen=True, slots=True)
class Peer:
    """A sender whose fingerprint matched."""

    sender_id: str
    incarnation: str
    transport: int
    transport_reason: str
    checksum: Checksum
    shape: KvShape
    wire_dtype: str  # of its blocks

    @property
    def kind(self) -> tuple[str, KvShape, str]:
        """A sender has one connection of each kind."""
        return self.sender_id, self.shape, self.wire_dtype


@dataclass(frozen=True, slots=True)
class _Ticket:
    peer: Peer
    host: str  # from which its connection is expected
    ends_s: float


class Gate:
    """`addresses`: where each transport of this receiver listens, by number."""

    def __init__(
        self,
        config: EndpointConfig,
        host_id: str,
        addresses: Mapping[int, str],
        chunk_bytes: int,
        stats: TransferStats,
    ) -> None:
        self._config, self._host_id = config, host_id
        self._transports = {one.kind: one for one in config.transports}
        self._addresses, self._chunk_bytes, self._stats = addresses, chunk_bytes, stats
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}

    def open(self, request: transfer_pb2.OpenRequest, caller: str, host: str) -> transfer_pb2.OpenResponse:
        """`caller` is the name in the call's proof, and `host` is where it comes from. Raises ConfigError if the two
        workers do not match, TransferFailed if their versions do not, Unauthenticated if the request contains another
        name, or Overloaded if too many tickets are unused."""
        try:
            if caller_name(request.sender_id, request.sender_incarnation) != caller:
                raise Unauthenticated(
                    f"sender_id: got {request.sender_id[:64]!r}, expected the worker that makes the call, {caller!r}"
                )
            peer = self._judge(request)
            is_local = self._transports[peer.transport].is_same_host
            ticket = self._issue(peer, LOCAL if is_local else host)
        except (ConfigError, Overloaded, TransferFailed, Unauthenticated):
            self._stats.refused_opens += 1
            raise
        return transfer_pb2.OpenResponse(
            transport=peer.transport,  # type: ignore[arg-type]  # also numbers that the enum does not name
            address=self._addresses[peer.transport],
            ticket=ticket,
            receiver_incarnation=self._config.incarnation,
            checksum=transfer_pb2.ChecksumKind.Name(CHECKSUMS[peer.checksum]),
            chunk_bytes=self._chunk_bytes,
            transport_reason=peer.transport_reason,
            version=FULL_VERSION,
        )

    def admit(self, greeting: Greeting, transport: int) -> tuple[Peer, bytes] | None:
        """The peer that received the ticket, and the answer to send to it. Each ticket is accepted once, before it
        expires.

        None if the greeting does not prove the peer. The ticket then stays valid; otherwise a foreign process could
        use it up.
        """
        now_s = self._config.clock()
        with self._lock:
            self._forget_old(now_s)
            found = [one for one in self._tickets if hmac.compare_digest(one, greeting.ticket)]
            if not found:
                return None
            peer = self._tickets[found[0]].peer
            parties = Parties(caller_name(peer.sender_id, peer.incarnation), self._config.incarnation, transport)
            if peer.transport != transport or not is_proven(self._config.secret, parties, greeting):
                self._stats.unproven += 1
                return None
            del self._tickets[found[0]]
        return peer, receiver_answer(self._config.secret, parties, greeting)

    def expected(self) -> Counter[str]:
        """The connections that hosts are about to prove: their unused tickets."""
        with self._lock:
            self._forget_old(self._config.clock())
            return Counter(one.host for one in self._tickets.values())

    def _judge(self, request: transfer_pb2.OpenRequest) -> Peer:
        if not is_compatible(FULL_VERSION, request.version):
            raise TransferFailed(f"the sender: {mismatch(FULL_VERSION, request.version)}")
        theirs = FINGERPRINT.decode(request.fingerprint)
        compare(self._config.fingerprint, theirs)
        PartLayout.to_receive(theirs.shape, self._config.fingerprint.shape)
        arrival_of(theirs.shape, self._config.fingerprint.shape, request.wire_dtype)
        for name in ("sender_id", "sender_incarnation"):
            size = len(getattr(request, name))
            if not 1 <= size <= MAX_NAME_CHARS:
                raise ConfigError(name, f"{size} characters", f"1 to {MAX_NAME_CHARS}")
        checksum = next(
            (CHECKSUM_OF[k] for k in request.checksums if CHECKSUM_OF.get(k) in self._config.checksums), None
        )
        if checksum is None:
            seen = [transfer_pb2.ChecksumKind.Name(k) for k in request.checksums if k in CHECKSUM_OF]
            expected = " or ".join(one.value for one in self._config.checksums)
            raise ConfigError("checksums", ", ".join(seen) or "none that this worker supports", expected)
        transport, reason = self._transport(request)
        name, incarnation, dtype = request.sender_id, request.sender_incarnation, request.wire_dtype
        return Peer(name, incarnation, transport, reason, checksum, theirs.shape, dtype)

    def _transport(self, request: transfer_pb2.OpenRequest) -> tuple[int, str]:
        """The first of the sender's transports that both sides can use, and why the earlier ones cannot be used."""
        is_same_host = bool(self._host_id) and request.host_id == self._host_id
        unusable: list[str] = []
        for kind in request.transports:
            if kind not in self._addresses:
                unusable.append(f"the receiver has no {name_of(kind)}")
            elif self._transports[kind].is_same_host and not is_same_host:
                unusable.append(f"{name_of(kind)} needs one host")
            else:
                plain = "the sender's first choice" if len(request.transports) > 1 else "the sender offers no other"
                return int(kind), "; ".join(unusable) or plain
        offered = names_of(request.transports) or "none"
        local = [kind for kind in self._addresses if self._transports[kind].is_same_host]
        where = "" if is_same_host or not local else f" (another host, so not {names_of(local)})"
        raise ConfigError("transports", offered + where, names_of(list(self._addresses)))

    def _issue(self, peer: Peer, host: str) -> bytes:
        now_s = self._config.clock()
        with self._lock:
            self._forget_old(now_s)
            if len(self._tickets) >= MAX_TICKETS:
                self._take_from_others(peer.sender_id)
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._tickets[ticket] = _Ticket(peer, host, now_s + TICKET_TTL_S)
            return ticket

    def _take_from_others(self, sender_id: str) -> None:
        """Ends the oldest ticket of the sender with the most, which cannot connect. Raises Overloaded if no sender has
        at least two more than this one."""
        senders = {ticket: one.peer.sender_id for ticket, one in self._tickets.items()}
        num_of = Counter(senders.values())
        [(busiest, most)] = num_of.most_common(1)
        if most <= num_of[sender_id] + 1:
            raise Overloaded(f"{MAX_TICKETS} transfer tickets are unused", TICKET_TTL_S)
        del self._tickets[next(ticket for ticket, one in senders.items() if one == busiest)]

    def _forget_old(self, now_s: float) -> None:
        for ticket in [key for key, one in self._tickets.items() if one.ends_s <= now_s]:
            del self._tickets[ticket]


@final
class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """For a grpc.aio server with a ProofInterceptor; add it with add_TransferServiceServicer_to_server."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        #: Answers Pull; the second argument is the name in the caller's proof. None: this worker gives no KV.
        self.give: Callable[[transfer_pb2.PullRequest, str], Awaitable[transfer_pb2.PullResponse]] | None = None

    async def Open(self, request: transfer_pb2.OpenRequest, context: Any) -> transfer_pb2.OpenResponse:
        try:
            return self._gate.open(request, proven_caller(context), host_of(context.peer()))
        except (ConfigError, Overloaded, TransferFailed, Unauthenticated) as error:
            return cast(transfer_pb2.OpenResponse, await context.abort(STATUS[type(error)], error.message))  # raises

    async def Pull(self, request: transfer_pb2.PullRequest, context: Any) -> transfer_pb2.PullResponse:
        if self.give is None:
            return transfer_pb2.PullResponse(refusal=GIVES_NOTHING)
        return await self.give(request, proven_caller(context))


def host_of(peer: str) -> str:
    """Of gRPC's name for a caller, such as ipv4:10.0.0.1:4242 or ipv6:%5B::1%5D:4242."""
    endpoint = endpoint_of(unquote(peer.partition(":")[2]))
    try:
        return LOCAL if endpoint is None else network_of(endpoint[0])
    except ValueError:  # a socket of another kind
        return LOCAL
