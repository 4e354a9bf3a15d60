"""The Attach stream to one worker: connects, exchanges hellos, reads and writes, and reconnects after failures.

It makes no decisions. The end of a stream is reported immediately, whatever its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, final

import grpc
import grpc.aio

from pdserve.core.access.proof import Identity, Introduction
from pdserve.core.errors import Unauthenticated
from pdserve.core.types import Slo
from pdserve.outage_log import PeerLog
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.tls.reasons import tls_failure
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import channel_options, peer_channel_aio

log = logging.getLogger(__name__)

HELLO_S: Final = 10.0  # short, because a worker listens only after it has loaded its model
FIRST_BACKOFF_S: Final = 0.1
LAST_BACKOFF_S: Final = 2.0
# A message has a few hundred bytes plus its prompt. A worker with this many waiting messages has stopped reading.
MAX_UNSENT: Final = 8192
SILENCE_S: Final = 20.0
MAX_BATCH: Final = 64  # messages in one
MAX_BATCH_BYTES: Final = 2**18  # small, so a long prompt delays the other messages of its batch only briefly
MAX_MESSAGE_BYTES: Final = 64 * 2**20  # a snapshot of a large cache

CHANNEL_OPTIONS: Final = (*channel_options(MAX_MESSAGE_BYTES), ("grpc.min_reconnect_backoff_ms", 1_000))
# Status of a worker that rejects the router's proof, and of a foreign server that knows no proofs.
_UNPROVEN: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


class Listener(Protocol):
    """Called on the event loop, in the order of the stream."""

    def attached(self, stream: WorkerStream, hello: worker_pb2.WorkerHello) -> str | None:
        """Returns why this worker is rejected, or None. No other method is called for a rejected worker."""
        ...

    def received(self, stream: WorkerStream, message: worker_pb2.AttachResponse) -> None: ...

    def detached(self, stream: WorkerStream, reason: str) -> None: ...


@final
class WorkerStream:
    """`run` returns only when it is cancelled or after `close`."""

    def __init__(
        self,
        endpoint: str,
        hello: Callable[[], worker_pb2.RouterHello],
        listener: Listener,
        identity: Identity,
        silence_s: float = SILENCE_S,
        on_unproven: Callable[[str], None] = lambda reason: None,
        tls: ReloadingCertificates | None = None,
    ) -> None:
        """If a worker sends nothing for `silence_s`, not even its load, the stream is closed and opened again.

        It sends no message before the worker has proven that it knows the secret of `identity`. If the worker has not,
        or rejects the router's proof, `on_unproven` is called with the reason.
        """
        self.endpoint = endpoint
        self.worker_id = ""  # known after the hello
        self.incarnation = ""
        self.is_attached = False
        self._identity = identity
        self._on_unproven = on_unproven
        self._tls = tls
        self._hello = hello
        self._listener = listener
        self._silence_s = silence_s
        self._heard_s = 0.0
        self._watching: asyncio.TimerHandle | None = None
        self._unsent: asyncio.Queue[worker_pb2.AttachRequest] = asyncio.Queue(MAX_UNSENT)
        self._call: Any = None
        self._lines = PeerLog(log)
        self._random = random.Random()

    def send(self, message: worker_pb2.AttachRequest) -> bool:
        """Queues a message. False: there is no stream, or the worker has stopped reading."""
        if not self.is_attached:
            return False
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self._lines.line(logging.ERROR, "a worker does not read its stream", worker_id=self.worker_id)
            self.hang_up()
            return False
        return True

    def hang_up(self) -> None:
        """Ends the connection. The stream is opened again."""
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_attached, reason = await self._stream()
            backoff_s = FIRST_BACKOFF_S if was_attached else min(backoff_s * 2.0, LAST_BACKOFF_S)
            log.debug("stream to a worker ended", extra={"endpoint": self.endpoint, "reason": reason})
            await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.0))

    async def _stream(self) -> tuple[bool, str]:
        """One stream from connecting to its end. Returns whether the worker was accepted, and why the stream ended."""
        reason = ""
        introduction = peers.introduce(self._identity, peers.ATTACH, self.endpoint)
        async with peer_channel_aio(introduction.target, self._tls, CHANNEL_OPTIONS) as channel:
            writer: asyncio.Task[None] | None = None
            try:
                hello, reason = await self._greet(channel, introduction)
                if hello is None:
                    return False, reason
                self.worker_id, self.incarnation = hello.worker_id, hello.incarnation
                self.is_attached = True
                rejection = self._listener.attached(self, hello)
                if rejection is not None:
                    self.is_attached = False
                    return False, rejection
                reason = "the router ended the stream"  # if this task is cancelled
                write = self._write(is_batching=hello.reads_batches)
                writer = asyncio.create_task(write, name=f"to-{hello.worker_id}")
                self._heard_s = asyncio.get_running_loop().time()
                self._watch()
                reason = await self._read()
            finally:
                await self._end(writer, reason)
        return True, reason

    async def _greet(self, channel: Any, introduction: Introduction) -> tuple[worker_pb2.WorkerHello | None, str]:
        try:
            async with asyncio.timeout(HELLO_S):
                metadata = await peers.prove(channel, introduction)
                self._call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=metadata)
                await peers.check_call(introduction, self._call)
                await self._call.write(worker_pb2.AttachRequest(hello=self._hello()))
                first = await self._call.read()
        except Unauthenticated as error:
            self._on_unproven(error.message)
            return None, error.message
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
            reason = _reason(error)
            if isinstance(error, grpc.aio.AioRpcError):
                failure = tls_failure(reason)
                if error.code() in _UNPROVEN or failure:
                    self._on_unproven(failure or reason)
            return None, reason
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            return None, "the call was cancelled"
        if not isinstance(first, worker_pb2.AttachResponse) or not first.HasField("hello"):
            return None, "the worker did not say hello"
        return first.hello, ""

    def _watch(self) -> None:
        """Closes the stream of a silent worker. After a network failure, the worker's host may have dropped the
        connection without notice, and reading would never end."""
        loop = asyncio.get_running_loop()
        left_s = self._heard_s + self._silence_s - loop.time()
        if left_s > 0:
            self._watching = loop.call_later(left_s, self._watch)
        else:
            self.hang_up()

    async def _read(self) -> str:
        loop = asyncio.get_running_loop()
        try:
            while True:
                message = await self._call.read()
                if not isinstance(message, worker_pb2.AttachResponse):  # grpc.aio.EOF
                    return "the worker ended the stream"
                self._heard_s = loop.time()
                for one in message.batch.messages if message.HasField("batch") else (message,):
                    self._listener.received(self, one)
        except grpc.RpcError as error:
            return _reason(error)
        except asyncio.CancelledError:
            # grpc.aio raises this as well where hang_up() cancelled the call.
            if _is_being_cancelled():
                raise
            is_silent = loop.time() - self._heard_s >= self._silence_s
            return f"the worker sent nothing for {self._silence_s:g} s" if is_silent else "the router closed the stream"

    async def _write(self, *, is_batching: bool) -> None:
        """Writes queued messages. `is_batching`: the worker accepts several in one, which costs both sides less."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader also sees the end
            while True:
                message = await self._unsent.get()
                if is_batching and not self._unsent.empty():
                    message = self._batch(message)
                await self._call.write(message)

    def _batch(self, first: worker_pb2.AttachRequest) -> worker_pb2.AttachRequest:
        """`first` and the following messages, within limits."""
        batch = worker_pb2.AttachRequests(messages=[first])
        num_bytes = first.ByteSize()
        while not self._unsent.empty() and len(batch.messages) < MAX_BATCH and num_bytes < MAX_BATCH_BYTES:
            message = self._unsent.get_nowait()
            num_bytes += message.ByteSize()
            batch.messages.append(message)
        return worker_pb2.AttachRequest(batch=batch)

    async def _end(self, writer: asyncio.Task[None] | None, reason: str) -> None:
        was_attached, self.is_attached = self.is_attached, False
        if self._watching is not None:
            self._watching.cancel()
        if writer is not None:
            writer.cancel()
        self.hang_up()
        self._call = None
        self._unsent = asyncio.Queue(MAX_UNSENT)
        if was_attached:
            self._listener.detached(self, reason)
        if writer is not None:
            await asyncio.wait([writer])


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@final
class WorkerPacing:
    """How long workers wait between two messages."""

    def __init__(self, send_all: Callable[[worker_pb2.AttachRequest], object]) -> None:
        """`send_all` sends a message to all attached workers."""
        self._send_all = send_all
        self._pace = worker_pb2.SetPace()
        self._stream_interval_s, self._num_strict = 0.0, 0

    @property
    def message(self) -> worker_pb2.AttachRequest:
        """For a worker that has just attached."""
        return worker_pb2.AttachRequest(set_pace=self._pace)

    def set_pace(self, interval_s: float) -> None:
        """Between any two messages, while this process is overloaded."""
        self._pace.interval_s = interval_s
        self._send_all(self.message)

    def set_stream_interval(self, interval_s: float) -> None:
        """The time for which tokens may wait for others."""
        self._stream_interval_s = interval_s
        self._set_tokens_interval()

    @contextlib.contextmanager
    def streaming(self, slo: Slo) -> Iterator[None]:
        """Of an answer. No tokens wait while any answer has a target that is too strict for that."""
        if min(slo.tpot_s, slo.itl_s or slo.tpot_s) >= 2.0 * self._stream_interval_s:
            yield
            return
        self._num_strict += 1
        self._set_tokens_interval()
        try:
            yield
        finally:
            self._num_strict -= 1
            self._set_tokens_interval()

    def _set_tokens_interval(self) -> None:
        interval_s = 0.0 if self._num_strict else self._stream_interval_s
        if interval_s != self._pace.tokens_interval_s:
            self._pace.tokens_interval_s = interval_s
            self._send_all(self.message)
