"""Connects a prefill worker to a decode worker: Open over gRPC, then the data connection with the ticket. Blocking.

On both connections, each side proves that it knows the cluster's secret before the other side sends anything else.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

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
from pdserve.core.access.proof import NONCE_BYTES, ClusterSecret, Introduction
from pdserve.core.errors import TransferFailed, Unauthenticated
from pdserve.core.installation import is_compatible, mismatch
from pdserve.tls.reasons import connection_failure, tls_failure
from pdserve.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import peer_channel
from pdserve.wire.protocol import FINGERPRINT

log = logging.getLogger(__name__)

DIAL_S: Final = 5.0
SILENT_S: Final = 9.0  # without an answer: less than the 10 s of an ask, so that one ask can find it
LATE_S: Final = 1.0  # after a call's deadline
MAX_CHANNELS: Final = 64  # connections to sources of pulls that are kept


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


@final
class Calls:
    """The calls of one thread, one after another. Another thread may cancel them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Any = None
        self.is_cancelled = False

    def wait(self, call: Any, timeout_s: float) -> Any:
        """The answer of the started call. Raises grpc.FutureTimeoutError if it outlives its own deadline: gRPC had no
        thread for the channel, whose calls then never end."""
        with self._lock:
            self._running, is_cancelled = call, self.is_cancelled
        if is_cancelled:
            call.cancel()
        return call.result(timeout=timeout_s + LATE_S)

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled, running = True, self._running
        if running is not None:
            running.cancel()


class NoAnswer(TransferFailed):
    """The answer was not awaited for long, which says nothing of the worker."""


@final
@dataclass(slots=True, eq=False)
class _Connection:
    channel: grpc.Channel
    num_calls: int = 0
    is_dropped: bool = False  # closed after its last call
    waited_s: float = 0.0  # for an answer, since the last one
    waited_until_s: float = 0.0  # time up to which running calls are counted

    def count(self, now_s: float) -> float:
        if self.num_calls:
            self.waited_s += now_s - self.waited_until_s
        self.waited_until_s = now_s
        return self.waited_s


@final
class PullClient:
    """Asks workers to send blocks that they have cached. Blocking, on any threads.

    Connections are kept, because a new one takes as long as the transfer of a short prefix.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._connections: OrderedDict[str, _Connection] = OrderedDict()  # by endpoint, the most recently used last
        self._dropped: set[_Connection] = set()  # that still have calls
        self._is_closed = False

    def ask(
        self, request: transfer_pb2.PullRequest, endpoint: str, timeout_s: float, calls: Calls | None = None
    ) -> transfer_pb2.PullResponse:
        """Raises NoAnswer if `calls` was cancelled or the time was short, unless `is_silent`.
        Raises TransferFailed if the worker cannot be asked."""
        ends_s = time.monotonic() + timeout_s
        introduction = peers.introduce(self._config.identity, peers.PULL, endpoint)
        connection = self._begin(endpoint, introduction.target)
        has_answered = is_dropped = False
        try:
            answer: transfer_pb2.PullResponse = _proven(
                connection.channel, introduction, lambda stub: stub.Pull, request, endpoint, ends_s, calls
            )
            has_answered = True
        except NoAnswer as error:
            is_dropped = self.is_silent(endpoint)
            if is_dropped:
                raise TransferFailed(error.message) from error
            raise
        except TransferFailed:
            is_dropped = True  # a new one reads new certificates, and connects at once
            raise
        except Exception as error:  # such as too many threads: closing such a channel might never return
            self._forget(endpoint, connection)
            raise TransferFailed(f"no call to {endpoint}: {error or type(error).__name__}") from error
        finally:
            self._end(endpoint, connection, has_answered=has_answered, is_dropped=is_dropped)
        return answer

    def is_silent(self, endpoint: str) -> bool:
        """Whether asks of the worker have waited for SILENT_S, together, since its last answer."""
        with self._lock:
            connection = self._connections.get(endpoint)
            return connection is not None and connection.count(time.monotonic()) >= SILENT_S

    def close(self) -> None:
        """Calls that run fail."""
        with self._lock:
            self._is_closed = True
            connections = [*self._connections.values(), *self._dropped]
            self._connections.clear()
            self._dropped.clear()
        for one in connections:
            one.channel.close()

    def _begin(self, endpoint: str, target: str) -> _Connection:
        old: _Connection | None = None
        with self._lock:
            if self._is_closed:
                raise TransferFailed("the worker ends")
            connection = self._connections.pop(endpoint, None) or _Connection(peer_channel(target, self._config.tls))
            self._connections[endpoint] = connection
            connection.count(time.monotonic())
            connection.num_calls += 1
            if len(self._connections) > MAX_CHANNELS:
                old = self._drop(next(iter(self._connections)))
        if old is not None:
            old.channel.close()
        return connection

    def _end(self, endpoint: str, connection: _Connection, *, has_answered: bool, is_dropped: bool) -> None:
        """Other calls of a dropped connection go on."""
        with self._lock:
            connection.count(time.monotonic())
            connection.num_calls -= 1
            if has_answered:
                connection.waited_s = 0.0
            if is_dropped and self._connections.get(endpoint) is connection:
                self._drop(endpoint)
            is_over = connection.is_dropped and not connection.num_calls
            self._dropped -= {connection} if is_over else set()
        if is_over:
            connection.channel.close()

    def _forget(self, endpoint: str, connection: _Connection) -> None:
        with self._lock:
            if self._connections.get(endpoint) is connection:
                del self._connections[endpoint]

    def _drop(self, endpoint: str) -> _Connection | None:
        """Returns the connection if it has no calls, so that it must be closed."""
        connection = self._connections.pop(endpoint)
        connection.is_dropped = True
        if not connection.num_calls:
            return connection
        self._dropped.add(connection)
        return None


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
        return _proven(channel, introduction, of, request, endpoint, ends_s)


def _proven(
    channel: grpc.Channel,
    introduction: Introduction,
    of: Callable[[transfer_pb2_grpc.TransferServiceStub], Any],
    request: Any,
    endpoint: str,
    ends_s: float,
    calls: Calls | None = None,
) -> Any:
    """Raises NoAnswer if `calls` was cancelled, or the time is over. Without `calls`, gRPC needs no thread."""

    def left_s() -> float:
        return max(0.1, ends_s - time.monotonic())

    try:
        wait = None if calls is None else partial(calls.wait, timeout_s=left_s())
        metadata = peers.prove_blocking(channel, introduction, left_s(), wait)
        method = of(transfer_pb2_grpc.TransferServiceStub(channel))
        if calls is None:
            answer, call = method.with_call(request, timeout=left_s(), metadata=metadata)
        else:
            call = method.future(request, timeout=left_s(), metadata=metadata)
            answer = calls.wait(call, left_s())
        peers.check_answer(introduction, call.initial_metadata())
    except Unauthenticated as error:
        raise TransferFailed(error.message) from error
    except grpc.FutureCancelledError as error:
        raise NoAnswer(f"nobody waits for the answer of {endpoint}") from error
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise NoAnswer(f"{endpoint} did not answer in time: {error.code().name}") from error
        why = connection_failure(str(error.details()))
        if error.code() is grpc.StatusCode.UNAVAILABLE and why:
            raise TransferFailed(f"no connection to {endpoint}: {why}") from error
        raise TransferFailed(f"{endpoint} refused: {error.code().name}: {error.details()}") from error
    except ValueError as error:  # the channel was closed meanwhile
        raise TransferFailed(f"no call to {endpoint}: {error}") from error
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
