"""Connects a prefill worker to a decode worker: Open over gRPC, then the data connection with the ticket. Blocking.

On both connections, each side proves that it knows the cluster's secret before the other side sends anything else.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvtransfer.link.channel import secured
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.gate import CHECKSUM_OF, CHECKSUMS
from kvtransfer.protocol.frames import (
    ANSWER_BYTES,
    MAX_TEXT_BYTES,
    TICKET_BYTES,
    Checksum,
    Parties,
    decode_text,
    receiver_answer,
    sender_greeting,
)
from kvtransfer.protocol.plan import MAX_CHUNK_BYTES
from kvtransfer.transports.common.interface import SendHalf, Transport
from kvtransfer.transports.common.slots import host_id
from pdserve.build import FULL_VERSION
from pdserve.core.access.proof import NONCE_BYTES, ClusterSecret
from pdserve.core.errors import TransferFailed, Unauthenticated
from pdserve.core.installation import is_compatible, mismatch
from pdserve.tls.reasons import connection_failure, tls_failure
from pdserve.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import peer_channel
from pdserve.wire.protocol import FINGERPRINT

log = logging.getLogger(__name__)

DIAL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class DataConnection:
    """An authenticated data connection."""

    socket: socket.socket
    half: SendHalf
    transport: str
    reason: str  # why this transport was chosen
    checksum: Checksum
    chunk_bytes: int

    def close(self) -> None:
        self.socket.close()
        self.half.close()


@dataclass(frozen=True, slots=True)
class Dialled:
    """The result of an attempt to connect."""

    connection: DataConnection | None
    error: str = ""


def try_dial(config: EndpointConfig, endpoint: str, incarnation: str) -> Dialled:
    """Like `dial`, but returns every error, because transfers wait for the result."""
    try:
        return Dialled(dial(config, endpoint, incarnation))
    except TransferFailed as failed:
        return Dialled(None, failed.message)
    except Exception as error:
        log.exception("dialling failed", extra={"endpoint": endpoint})
        return Dialled(None, f"dialling failed: {error}")


def dial(config: EndpointConfig, endpoint: str, incarnation: str) -> DataConnection:
    """Tries the transports in order until one connects. Raises TransferFailed with the error of each."""
    ends_s = time.monotonic() + DIAL_S
    errors: list[str] = []
    transports = config.transports
    while transports:
        answer = _open(config, transports, endpoint, ends_s)
        if answer.receiver_incarnation != incarnation:
            raise TransferFailed(f"{endpoint} has restarted since it granted this transfer")
        transport = next((one for one in transports if one.kind == answer.transport), None)
        if transport is None:
            raise TransferFailed(f"{endpoint} chose transport {answer.transport}, which was not offered")
        try:
            connection = _connect(config, transport, answer, endpoint, ends_s)
            return dataclasses.replace(connection, reason="; ".join([*errors, connection.reason]))
        except OSError as error:
            errors.append(f"{transport.name} to {endpoint}: {tls_failure(str(error)) or error}")
            transports = tuple(one for one in transports if one is not transport)
    raise TransferFailed("; ".join(errors))


def open_request(config: EndpointConfig, transports: Sequence[Transport]) -> transfer_pb2.OpenRequest:
    return transfer_pb2.OpenRequest(
        fingerprint=FINGERPRINT.encode(config.fingerprint),
        sender_id=config.worker_id,
        sender_incarnation=config.incarnation,
        host_id=host_id(),
        transports=[one.kind for one in transports],  # type: ignore[misc]  # also numbers that the enum does not name
        checksums=[CHECKSUMS[kind] for kind in config.checksums],
        wire_dtype=config.wire_dtype or config.fingerprint.shape.dtype,
        version=FULL_VERSION,
    )


def ask(config: EndpointConfig, request: transfer_pb2.PullRequest, endpoint: str, timeout_s: float) -> str:
    """Asks a worker to send blocks that it has cached. Returns why it does not; empty if it does. Blocking. Raises
    TransferFailed if it does not answer."""
    answer = _call(config, peers.PULL, lambda stub: stub.Pull, request, endpoint, time.monotonic() + timeout_s)
    return str(answer.refusal)


def _open(
    config: EndpointConfig, transports: Sequence[Transport], endpoint: str, ends_s: float
) -> transfer_pb2.OpenResponse:
    request = open_request(config, transports)
    answer: transfer_pb2.OpenResponse = _call(config, peers.OPEN, lambda stub: stub.Open, request, endpoint, ends_s)
    if not is_compatible(FULL_VERSION, answer.version):  # an older receiver, which did not check it itself
        raise TransferFailed(f"{endpoint}: {mismatch(FULL_VERSION, answer.version)}")
    return answer


def _call(
    config: EndpointConfig,
    method: str,
    of: Callable[[transfer_pb2_grpc.TransferServiceStub], Any],
    request: Any,
    endpoint: str,
    ends_s: float,
) -> Any:
    """The answer of a worker that has proven itself. Raises TransferFailed."""
    introduction = peers.introduce(config.identity, method, endpoint)
    with peer_channel(introduction.target, config.tls) as channel:
        try:
            metadata = peers.prove_blocking(channel, introduction, max(0.1, ends_s - time.monotonic()))
            answer, call = of(transfer_pb2_grpc.TransferServiceStub(channel)).with_call(
                request, timeout=max(0.1, ends_s - time.monotonic()), metadata=metadata
            )
            peers.check_answer(introduction, call.initial_metadata())
        except Unauthenticated as error:
            raise TransferFailed(error.message) from error
        except grpc.RpcError as error:
            why = connection_failure(str(error.details()))
            if error.code() is grpc.StatusCode.UNAVAILABLE and why:
                raise TransferFailed(f"no connection to {endpoint}: {why}") from error
            raise TransferFailed(f"{endpoint} refused: {error.code().name}: {error.details()}") from error
    return answer


def _connect(
    config: EndpointConfig, transport: Transport, answer: transfer_pb2.OpenResponse, endpoint: str, ends_s: float
) -> DataConnection:
    """Raises OSError."""
    kind = CHECKSUM_OF.get(answer.checksum)
    block_bytes = config.pool.block_bytes
    if kind not in config.checksums:
        raise OSError("it chose a checksum that was not offered")
    if not block_bytes <= answer.chunk_bytes <= MAX_CHUNK_BYTES or len(answer.ticket) != TICKET_BYTES:
        raise OSError(f"it answered with chunks of {answer.chunk_bytes} bytes, or a malformed ticket")
    sock = transport.dial(answer.address, endpoint, max(0.1, ends_s - time.monotonic()))
    try:
        if config.tls is not None and not transport.is_same_host:
            sock = secured(sock, config.tls, endpoint.rpartition(":")[0])
        parties = Parties(config.identity.name, answer.receiver_incarnation, answer.transport)
        _greet(config.secret, parties, sock, answer.ticket, ends_s)
        reason = decode_text(answer.transport_reason.encode()[:MAX_TEXT_BYTES])
        sock, half = transport.sender(sock, config.pool)
        return DataConnection(sock, half, transport.name, reason, kind, answer.chunk_bytes)
    except BaseException:
        sock.close()
        raise


def _greet(secret: ClusterSecret, parties: Parties, sock: socket.socket, ticket: bytes, ends_s: float) -> None:
    """Authenticates both sides. The pool is shared only after the receiver's answer. Raises OSError."""
    greeting = sender_greeting(secret, parties, ticket, secrets.token_bytes(NONCE_BYTES))
    sock.sendall(greeting.encode())
    answer, timeout_s = bytearray(), sock.gettimeout()
    while len(answer) < ANSWER_BYTES:
        sock.settimeout(max(0.1, ends_s - time.monotonic()))
        received = sock.recv(ANSWER_BYTES - len(answer))
        if not received:
            raise OSError("the receiver did not accept the ticket")
        answer += received
    sock.settimeout(timeout_s)
    if not hmac.compare_digest(answer, receiver_answer(secret, parties, greeting)):
        raise OSError("the receiver did not prove that it knows the cluster's secret")
