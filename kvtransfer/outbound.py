"""One pair's connection on the prefill side, served by one thread: dials, sends chunks, hears how transfers ended.

The thread owns the book, the socket and the ring; other threads only queue commands. It ends with its connection,
and every transfer of it ends then too: a new connection is a new Outbound.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtransfer.channel import Channel, Gone, Waker
from kvtransfer.checksum import hasher
from kvtransfer.departures import Action, Announce, Departures, Job, Report
from kvtransfer.dial import Caller, Line, dial
from kvtransfer.frames import HEADER_BYTES, BadFrame, Frame, Kind, decode, decode_text, encode_text
from kvtransfer.memory import advance, copy, views_of
from kvtransfer.plan import blocks_per_chunk
from kvtransfer.ring import Ring
from kvtransfer.stats import TransferStats
from kvtransfer.transport import Grant, Sent, TransferKey
from pdserve.core.errors import TransferFailed

log = logging.getLogger(__name__)

OnSent = Callable[[Sent], None]


@dataclass(frozen=True, slots=True)
class Start:
    grant: Grant
    on_end: OnSent
    deadline_at_s: float | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Push:
    key: TransferKey
    blocks: tuple[tuple[int, int], ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Abort:
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Dialled:
    line: Line | None
    error: str = ""


Command = Start | Push | Abort | Dialled


class Progress(Enum):
    IDLE = "idle"  # nothing to write, or no free slot: wait to be told
    BLOCKED = "blocked"  # the socket is full
    BUSY = "busy"  # there may be more to write at once


class Outbound(threading.Thread):
    def __init__(
        self,
        caller: Caller,
        memory: memoryview,
        endpoint: str,
        incarnation: str,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(name=f"kv-outbound-{endpoint}", daemon=True)
        self._caller, self._memory, self._endpoint, self._incarnation = caller, memory, endpoint, incarnation
        self._block_bytes = caller.fingerprint.block_bytes
        self._clock = clock
        self.stats = TransferStats()  # written by this thread only
        self._book = Departures(self._block_bytes, self.stats)
        self._owners: dict[TransferKey, OnSent] = {}
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()  # guards the commands and is_over
        self._is_over = False
        self._is_stopping = False
        self._waker = Waker()
        self._channel: Channel | None = None
        self._line: Line | None = None
        self._is_dialling = False
        self._control: deque[bytes] = deque()
        self._current: list[memoryview] = []  # the frame that is being written
        self._job: Job | None = None  # whose source blocks `_current` reads
        self._free_slots: deque[int] = deque()
        self._inbox = bytearray()
        self._scratch = memoryview(bytearray(4096))
        self._limit_blocks = 1

    def begun(self) -> Outbound:
        """Starts it. Raises RuntimeError, and keeps nothing, where the process may have no more threads."""
        try:
            self.start()
        except RuntimeError:
            self._waker.close()
            raise
        return self

    def post(self, command: Command) -> bool:
        """Queues a command from any thread; False where this connection is over, and nobody will read it."""
        with self._lock:
            if self._is_over:
                return False
            self._commands.append(command)
            self._waker.set()
            return True

    @property
    def is_over(self) -> bool:
        return self._is_over

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            if not self._is_over:
                self._waker.set()

    def run(self) -> None:
        error = "the connection's thread died"
        try:
            self._serve()
        except Gone as gone:
            error = str(gone)
        except (BadFrame, TransferFailed) as failed:
            error = str(failed)
        except Exception:  # the thread ends, and its transfers must end with it, visibly
            log.exception("kv connection failed", extra={"endpoint": self._endpoint})
        finally:
            self._end(f"{self._endpoint}: {error}")

    def _end(self, error: str) -> None:
        with self._lock:
            self._is_over = True
            late = list(self._commands)
            self._commands.clear()
        log.info("kv connection ended", extra={"endpoint": self._endpoint, "error": error})
        for command in late:
            if isinstance(command, Dialled):
                if command.line is not None:
                    command.line.close()
            else:
                self._apply(command)
        self._current.clear()
        self._job = None
        self._act(self._book.cut(error, self._clock()))
        if self._line is not None:
            self._line.close()
        self._waker.close()

    def _serve(self) -> None:
        while True:
            self._take_commands()
            if self._is_stopping:
                raise Gone("the sender is closed")
            self._act(self._book.expire(self._clock()))
            self._let_go()
            if self._channel is None:
                if self._book.needs_link and not self._is_dialling:
                    self._is_dialling = True
                    threading.Thread(target=self._dial, name=f"kv-dial-{self._endpoint}", daemon=True).start()
                self._waker.wait(self._timeout_s())
                continue
            progress = self._write(self._channel)
            timeout_s = 0.0 if progress is Progress.BUSY else self._timeout_s()
            self._channel.wait(timeout_s, is_writing=progress is Progress.BLOCKED)
            if self._channel.is_readable:
                self._read(self._channel)

    def _timeout_s(self) -> float | None:
        alarm_s = self._book.next_alarm_s
        return None if alarm_s is None else max(0.0, alarm_s - self._clock())

    def _dial(self) -> None:
        try:
            result = Dialled(dial(self._caller, self._endpoint, self._incarnation))
        except TransferFailed as failed:
            result = Dialled(None, failed.message)
        except Exception as error:  # whatever it is, the transfers that wait for this must hear of it
            log.exception("dialling failed", extra={"endpoint": self._endpoint})
            result = Dialled(None, f"dialling failed: {error}")
        if not self.post(result) and result.line is not None:
            result.line.close()

    def _take_commands(self) -> None:
        while self._commands:
            self._apply(self._commands.popleft())

    def _apply(self, command: Command) -> None:
        now_s = self._clock()
        if isinstance(command, Start):
            self._owners[command.grant.key] = command.on_end
            self._act(self._book.start(command.grant, now_s, command.deadline_at_s, command.error))
        elif isinstance(command, Push):
            self._act(self._book.push(command.key, command.blocks, command.is_last, now_s))
        elif isinstance(command, Abort):
            self._act(self._book.abort(command.key, now_s))
        elif command.line is None:
            raise TransferFailed(command.error)
        else:
            self._link(command.line)

    def _link(self, line: Line) -> None:
        self._line = line
        self._channel = Channel(line.socket, self._waker)
        self._digest = hasher(line.checksum)
        size = line.chunk_bytes if line.ring is None else min(line.chunk_bytes, line.ring.slot_bytes)
        self._limit_blocks = blocks_per_chunk(self._block_bytes, size)
        self._free_slots.extend(range(0 if line.ring is None else line.ring.slots))
        log.info("kv connection up", extra={"endpoint": self._endpoint, "is_shm": line.ring is not None})
        self._act(self._book.linked())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Report):
                owner = self._owners.pop(action.sent.key)
                try:
                    owner(action.sent)
                except Exception:  # the owner's fault must not end the other owners' transfers
                    log.exception("on_end of a transfer raised", extra={"transfer_id": action.sent.key.transfer_id})
            elif isinstance(action, Announce):
                self._control.append(Frame(Kind.ANNOUNCE, action.tag).encode())
            else:
                self._control.append(encode_text(Kind.RETRACT, action.tag, action.error))

    def _let_go(self) -> None:
        """A transfer that failed while its chunk was being written: the rest goes out from a copy.

        The frame must be completed for the next one to be understood, but the owner is waiting for its blocks.
        """
        if self._job is not None and not self._job.departure.session.is_open:
            self._current = [memoryview(b"".join(self._current))]
            self._finish_job(self._job)

    def _finish_job(self, job: Job) -> None:
        self._job = None
        self._act(self._book.written(job, self._clock()))

    def _write(self, channel: Channel) -> Progress:
        """Moves on by at most one chunk."""
        if not self._current and not self._next_frame():
            return Progress.IDLE
        sent = channel.send(self._current)
        if sent == 0:
            return Progress.BLOCKED
        advance(self._current, sent)
        if not self._current and self._job is not None:
            self._finish_job(self._job)
        return Progress.BUSY

    def _next_frame(self) -> bool:
        ring = self._line.ring if self._line is not None else None
        if ring is not None:
            self._fill_slot(ring)
        if self._control:
            self._current = [memoryview(b"".join(self._control))]
            self._control.clear()
            return True
        job = self._book.take(self._limit_blocks, self._clock()) if ring is None else None
        if job is None:
            return False
        views = views_of(self._memory, job.chunk.sources, self._block_bytes)
        frame = self._chunk_frame(job, self._digest(views), length=job.chunk.count * self._block_bytes)
        self._current, self._job = [memoryview(frame), *views], job
        return True

    def _fill_slot(self, ring: Ring) -> None:
        job = self._book.take(self._limit_blocks, self._clock()) if self._free_slots else None
        if job is None:
            return
        slot = self._free_slots.popleft()
        views = views_of(self._memory, job.chunk.sources, self._block_bytes)
        digest = self._digest(views)  # of the source, so that it covers the copy too
        copy([ring.slot(slot, job.chunk.count * self._block_bytes)], views)
        self._control.append(self._chunk_frame(job, digest, slot=slot))
        self._finish_job(job)

    def _chunk_frame(self, job: Job, digest: bytes, *, slot: int = 0, length: int = 0) -> bytes:
        chunk, tag = job.chunk, job.departure.tag
        frame = Frame(Kind.CHUNK, tag, chunk.first, chunk.count, slot, length, digest, job.is_last)
        return frame.encode()

    def _read(self, channel: Channel) -> None:
        received = channel.receive([self._scratch])
        self._inbox += self._scratch[:received]
        while len(self._inbox) >= HEADER_BYTES:
            frame = decode(bytes(self._inbox[:HEADER_BYTES]), 0)
            size = HEADER_BYTES + frame.length
            if len(self._inbox) < size:
                return
            text = decode_text(bytes(self._inbox[HEADER_BYTES:size]))
            del self._inbox[:size]
            self._hear(frame, text)

    def _hear(self, frame: Frame, text: str) -> None:
        now_s = self._clock()
        if frame.kind is Kind.DONE:
            self._act(self._book.done(frame.tag, now_s))
        elif frame.kind is Kind.REFUSE:
            self._act(self._book.refused(frame.tag, text, now_s))
        elif frame.kind is Kind.CREDIT and self._line is not None and self._line.ring is not None:
            if frame.slot >= self._line.ring.slots or frame.slot in self._free_slots:
                raise BadFrame(f"credit for slot {frame.slot}, which is not in use")
            self._free_slots.append(frame.slot)
        else:
            raise BadFrame(f"a {frame.kind.name} frame from a receiver")
