"""A prefill worker's connection to one decode worker, served by one thread: connects, sends chunks, and receives the
outcomes of transfers.

The thread owns the transfer table, the socket and the transport. Other threads only queue commands. When the connection
ends, its transfers and the thread end too. A new connection is a new Outbound.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from kvtransfer.link.channel import Channel, Gone, Silent, Waker, WriteProgress, Writer
from kvtransfer.link.dial import DataConnection, Dialled, try_dial
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.protocol.frames import BadFrame, Frame, FrameDecoder, Kind, beat, encode_text, hasher
from kvtransfer.protocol.lease import Heartbeat
from kvtransfer.protocol.plan import WHOLE, Part, PartLayout, blocks_per_chunk
from kvtransfer.protocol.send_transfers import Action, Announce, ReportSent, SendTransfers, StaleSource
from kvtransfer.protocol.transfers import Abort, Job, OnRead, OnSent, Push, Start
from kvtransfer.protocol.transport import Link, TransferStats
from kvtransfer.transports.common.interface import SendHalf
from pdserve.core.durations import clamped_s
from pdserve.core.errors import TransferFailed
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.outage_log import OutageLog

log = logging.getLogger(__name__)


Command = Start | Push | Abort | Dialled


class Outbound(threading.Thread):
    """The thread of one connection, and the SendLink of its transport."""

    def __init__(
        self,
        config: EndpointConfig,
        memory: memoryview,
        endpoint: str,
        worker_id: str,
        incarnation: str,
        ends: OutageLog,
        on_read: OnRead | None,
    ) -> None:
        """To the decode worker with this endpoint, id and incarnation. `ends` logs when connections begin and end."""
        super().__init__(name=f"kv-outbound-{endpoint}", daemon=True)
        self._config, self._clock = config, config.clock
        self.pool, self.memory = config.pool, memory
        self.block_bytes = config.pool.block_bytes
        self.writer = Writer()
        self._endpoint, self._worker_id, self._incarnation = endpoint, worker_id, incarnation
        self._ends, self._on_read = ends, on_read
        self._layout: PartLayout | None = None  # known from the first transfer on, which has the receiver's shape
        self.stats = TransferStats()  # written by this thread only
        self._table = SendTransfers(
            self.block_bytes,
            config.stamps,
            self.stats,
            stall_s=config.lease.stall_s,
            unconfirmed_s=config.lease.unconfirmed_s,
            grace_s=config.lease.grace_s,
        )
        self._heartbeat: Heartbeat | None = None  # once it is connected
        self._owners: dict[TransferKey, OnSent] = {}
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()  # guards the commands and is_over
        self._is_over = False
        self._is_stopping = False
        self._waker = Waker()
        self.wake = self._waker.set
        self._channel: Channel | None = None
        self._connection: DataConnection | None = None
        self._is_dialling = False
        self._jobs: list[Job] = []  # chunks whose source blocks the transport is reading
        self._decoder = FrameDecoder()
        self._scratch = memoryview(bytearray(4096))

    def started(self) -> Outbound:
        """Starts the thread. Raises RuntimeError, and closes everything, if the process cannot have more threads."""
        try:
            self.start()
        except RuntimeError:
            self._waker.close()
            raise
        return self

    def post(self, command: Command) -> bool:
        """Queues a command, from any thread. False: the connection has ended, and the command is not queued."""
        with self._lock:
            if self._is_over:
                return False
            self._commands.append(command)
            self._waker.set()
            return True

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def link(self) -> Link | None:
        """None until it is connected, and after it has ended."""
        connection = self._connection
        if connection is None or self._is_over:
            return None
        return Link(self._worker_id, self._endpoint, connection.transport, connection.reason)

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            if not self._is_over:
                self._waker.set()

    # Called by the transport.

    def digest(self, views: Iterable[memoryview]) -> bytes:
        return self._digest(views)

    def head(self, job: Job, checksum: bytes, *, slot: int = 0, length: int = 0) -> bytes:
        chunk, transfer = job.chunk, job.transfer
        stamps = self._table.stamp(job)
        is_last = transfer.is_stamped
        frame = Frame(Kind.CHUNK, transfer.tag, chunk.first, chunk.count, slot, length, checksum, is_last, job.part)
        return frame.encode() + stamps

    def views(self, job: Job) -> list[memoryview]:
        assert self._layout is not None
        return self._layout.views(self.memory, job.chunk.sources, job.part, self.pool.runs_per_block)

    def extent_of(self, job: Job) -> StridedExtent:
        assert self._layout is not None
        extent = self._layout.extent(job.part)
        if extent is None:
            raise TransferFailed(f"{job.part}: between devices, a part of a block must be equal runs of bytes")
        return extent

    def finished(self, job: Job) -> None:
        self._jobs.remove(job)
        if self._on_read is not None:
            self._on_read(job.transfer.grant.key, job.chunk.sources)
        self._act(self._table.written(job, self._clock()))

    def stale(self, job: Job, error: str) -> None:
        self._jobs.remove(job)
        self._act(self._table.stale(job, error, self._clock()))

    def retire(self) -> None:
        with self._lock:
            if self._commands or self._table.keys:
                return
            self._is_over = True  # `post` refuses new transfers from here on
        raise Gone("its slot was needed by another pair")

    # Inside.

    def run(self) -> None:
        error = "the connection's thread died"
        try:
            self._serve()
        except Gone as gone:
            error = str(gone)
        except (BadFrame, TransferFailed) as failed:
            error = str(failed)
        except Exception:  # the thread ends, so its transfers must end and be reported
            log.exception("kv connection failed", extra={"endpoint": self._endpoint})
        finally:
            self._end(f"{self._endpoint}: {error}")

    def _end(self, error: str) -> None:
        with self._lock:
            self._is_over = True
            late = list(self._commands)
            self._commands.clear()
        self._ends.failed(self._endpoint, endpoint=self._endpoint, error=error)
        for command in late:
            if isinstance(command, Dialled):
                if command.connection is not None:
                    command.connection.close()
            else:
                self._apply(command)
        self.writer.clear()
        self._jobs.clear()
        if self._connection is not None:
            self._connection.close()  # first, because owners reuse their blocks once the end is reported
        self._act(self._table.cut(error, self._clock()))
        self._waker.close()

    def _serve(self) -> None:
        while True:
            self._take_commands()
            if self._is_stopping:
                raise Gone("the sender is closed")
            self._act(self._table.expire(self._clock()))
            if self._channel is None or self._connection is None:
                if self._table.needs_link and not self._is_dialling:
                    self._is_dialling = True
                    threading.Thread(target=self._dial, name=f"kv-dial-{self._endpoint}", daemon=True).start()
                self._waker.wait(self._timeout_s())
                continue
            progress = self._write(self._channel, self._connection.half)
            timeout_s = 0.0 if progress is WriteProgress.BUSY else self._timeout_s()
            self._channel.wait(timeout_s, is_writing=progress is WriteProgress.BLOCKED)
            if self._channel.is_readable:
                self._read(self._channel)
            self._live()

    def _timeout_s(self) -> float | None:
        now_s, alarm_s = self._clock(), self._table.next_alarm_s
        left = [] if alarm_s is None else [clamped_s(alarm_s - now_s)]
        if self._heartbeat is not None:
            left.append(self._heartbeat.left_s(now_s))
        return min(left, default=None)

    def _live(self) -> None:
        now_s, heartbeat = self._clock(), self._heartbeat
        if self._table.is_stuck:
            raise Gone("source blocks were still being read long after the end of their transfer")
        assert heartbeat is not None, "it is connected"
        if heartbeat.is_silent(now_s):
            self.stats.silent += 1
            raise Silent(f"the receiver sent nothing for {heartbeat.silence_s:g} s")
        if heartbeat.is_due(now_s) and self.writer.is_idle:  # bytes in the writer show as well that this side is alive
            self.writer.write(beat())

    def _dial(self) -> None:
        result = try_dial(self._config, self._endpoint, self._incarnation)
        if not self.post(result) and result.connection is not None:
            result.connection.close()

    def _take_commands(self) -> None:
        while self._commands:
            self._apply(self._commands.popleft())

    def _apply(self, command: Command) -> None:
        self._act(self._decide(command, self._clock()))

    def _decide(self, command: Command, now_s: float) -> list[Action]:
        match command:
            case Start(grant=grant, layout=layout):
                self._owners[grant.key] = command.on_end
                shard, num_shards = 0, 1
                if layout is not None:
                    self._layout, shard, num_shards = layout, layout.index, layout.count
                    self._table.block_bytes = layout.bytes_of(WHOLE)
                return self._table.start(
                    grant,
                    now_s,
                    command.deadline_at_s,
                    command.error,
                    shard=shard,
                    num_shards=num_shards,
                    groups=command.groups,
                )
            case Push(key=key, blocks=blocks, is_last=is_last, epochs=epochs, groups=groups, after=after):
                channel = self._channel if is_last else None
                unacknowledged_bytes = 0 if channel is None else channel.unacknowledged_bytes
                return self._table.push(key, blocks, is_last, now_s, unacknowledged_bytes, epochs, groups, after)
            case Abort(key=key, error=error):
                return self._table.fail(key, error, now_s) if error else self._table.abort(key, now_s)
            case Dialled(connection=None, error=error):
                raise TransferFailed(error)
            case Dialled(connection=connection):
                assert connection is not None
                self._link(connection)
                return self._table.linked()

    def _link(self, connection: DataConnection) -> None:
        self._connection = connection
        self._channel = Channel(connection.socket, self._waker)
        self._digest = hasher(connection.checksum)
        self._heartbeat = Heartbeat(self._config.lease, self._clock())
        connection.half.attach(self)
        facts = {"endpoint": self._endpoint, "transport": connection.transport, "reason": connection.reason}
        self._ends.recovered(self._endpoint, **facts)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, ReportSent):
                owner = self._owners.pop(action.sent.key)
                try:
                    owner(action.sent)
                except Exception:  # an error of one owner must not end the other owners' transfers
                    log.exception("on_end of a transfer raised", extra={"transfer_id": action.sent.key.transfer_id})
            elif isinstance(action, Announce):
                self.writer.write(Frame(Kind.ANNOUNCE, action.tag, part=Part(action.shard, 0, action.groups)).encode())
            else:
                self.writer.write(encode_text(Kind.RETRACT, action.tag, action.error, is_cancelled=action.is_cancelled))

    def _write(self, channel: Channel, half: SendHalf) -> WriteProgress:
        """Sends at most one chunk."""
        half.poll()
        for abandoned in [one for one in self._jobs if not one.transfer.session.is_open]:
            half.abandon(abandoned)  # the owner is waiting for the source blocks
        job = self._table.take(self._limit_blocks(half), self._clock()) if half.is_free else None
        if job is not None:
            self._post(half, job)
        return self.writer.advance(channel)

    def _limit_blocks(self, half: SendHalf) -> int:
        assert self._connection is not None
        agreed, own = self._connection.chunk_bytes, half.chunk_bytes
        block_bytes = self.block_bytes if self._layout is None else max(self.block_bytes, self._layout.largest_bytes)
        return blocks_per_chunk(block_bytes, agreed if own is None else min(agreed, own))

    def _post(self, half: SendHalf, job: Job) -> None:
        self._jobs.append(job)
        try:
            half.post(job)
        except StaleSource as stale:
            self.stale(job, str(stale))

    def _read(self, channel: Channel) -> None:
        received = channel.receive([self._scratch])
        if received and self._heartbeat is not None:
            self._heartbeat.heard(self._clock())
        for frame, text in self._decoder.feed(self._scratch[:received]):
            self._on_frame(frame, text)

    def _on_frame(self, frame: Frame, text: str) -> None:
        now_s = self._clock()
        if frame.kind is Kind.DONE:
            self._act(self._table.done(frame.tag, now_s, frame.slot * 1e-6))
        elif frame.kind is Kind.REFUSE:
            self._act(self._table.refused(frame.tag, text, now_s, is_cancelled=frame.is_cancelled))
        elif frame.kind is Kind.CREDIT and self._connection is not None:
            self._connection.half.on_credit(frame)
        elif frame.kind is not Kind.BEAT:
            raise BadFrame(f"a {frame.kind.name} frame from a receiver")
