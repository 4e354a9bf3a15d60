"""Cached KV that moves between workers: pulled from another worker into this one's pool, and given to those that ask.

A router names the source in the message of an attempt (PrefixSource). The worker that lacks the prefix grants pool
blocks for it, as for any transfer, and asks the source directly (TransferService.Pull). The source answers between two
of its steps, or between two layers of a long step. If it has all of the blocks, it references them, and sends them like
the KV of a prompt. What it has on its disk, it reads first. If it has only the leading blocks, it says how many, and
the worker grants and asks again for those. A refusal is a miss: the prompt is computed. A pull never fails a request.

All methods run on the engine thread, except `give`, which runs on the gRPC thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, final

from kvtransfer.link.dial import Calls, NoAnswer, PullClient
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.protocol.grants import compare, grant_from_proto, grant_to_proto
from kvtransfer.protocol.transport import Received, ReceiveOutcome, Sender, Sent
from pdserve.config import WorkerConfig
from pdserve.core import protocol as pr
from pdserve.core.access.proof import caller_name
from pdserve.core.attempt import PULLS_TAKEN, Attempt, PrefixSource
from pdserve.core.durations import clamped_s
from pdserve.core.errors import PdserveError, TransferFailed
from pdserve.core.kv.blocks import runs_of
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.core.kv.kv_shape import Grant, TransferKey, is_same_bytes
from pdserve.core.kv.pulls import (
    ASK_S,
    LONGEST_S,
    is_part_worthwhile,
    may_give,
    num_pullable,
    pull_ends_at_s,
    reader,
)
from pdserve.core.kv.stamps import content_hash64
from pdserve.engine.interface import Engine, KvPool
from pdserve.telemetry import metric_names
from pdserve.v1 import transfer_pb2
from pdserve.worker.program import RoleProgram

log = logging.getLogger(__name__)

MAX_ASKED: Final = 16  # requests of other workers that wait to be considered
MOST_CONSIDERED: Final = 4  # at once: steps wait for it
PAGED_BYTES: Final = 2 * 2**20  # of memory that gets its pages at a time
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14 and later

SENT: Final = ""
DRAINING: Final = "it drains"
BUSY: Final = "it gives KV to others"
MISSING: Final = "it has not all of the blocks"
FOREIGN: Final = "its KV is another"
RESTARTED: Final = "it has started again"
INVALID: Final = "the request is invalid"
#: For metrics.
ANSWERS: Final = {
    SENT: "sent",
    DRAINING: "draining",
    BUSY: "busy",
    MISSING: "missing",
    FOREIGN: "foreign",
    RESTARTED: "restarted",
    INVALID: "invalid",
}


def can_pull(config: WorkerConfig, engine: Engine) -> bool:
    """Pulls between pools of several ranks have not been run."""
    return config.kv_pull and config.is_prefix_cache_on and engine.spec.tp_degree == 1


@dataclass(frozen=True, slots=True)
class Peers:
    """What a worker needs to exchange KV with others, besides a sender."""

    config: EndpointConfig  # of the receiver and the sender
    receiver: PlainReceiver


def add_pulls(program: RoleProgram[Any, Any, Any], peers: Peers | None, sender: Sender | None) -> None:
    """Before the program makes its scheduler. None: it neither pulls nor gives."""
    former = program.sources.pop(Pulls.name, None)  # of the program in the other role
    if former is not None:
        former.close()
    if peers is not None and sender is not None:
        pulls = Pulls(program, peers, sender)
        program.sources[Pulls.name], program.giver = pulls, pulls
        peers.receiver.servicer.give = pulls.give


@dataclass(slots=True, eq=False)
class _Taken:
    """A pull by this worker."""

    fetch: Fetch
    end: Callable[[int], None]
    source: PrefixSource
    ends_at_s: float  # by the context's clock
    key: TransferKey | None = None  # of the present grant, for the first `num_blocks` blocks of the fetch
    num_blocks: int = 0
    num_found: int = 0  # of these, as many as the source has said it has
    calls: Calls = field(default_factory=Calls)  # of the present ask
    is_part: bool = False  # those that it had are asked for
    error: str = ""  # why the source sends nothing
    is_unreachable: bool = False
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class _Asked:
    """What another worker asks for, until it is answered."""

    request: transfer_pb2.PullRequest
    reply: Callable[[str, int], None]
    is_gone: Callable[[], bool]  # nobody waits for the answer
    reader: Attempt | None = None  # reads this worker's disk


@final
class Pulls:
    """Both directions of one worker. A FetchSource for what it takes."""

    name: Final = "peer"

    def __init__(self, program: RoleProgram[Any, Any, Any], peers: Peers, sender: Sender) -> None:
        self._program, self._config, self._receiver, self._sender = program, peers.config, peers.receiver, sender
        self._block_bytes = peers.config.pool.block_bytes
        self._taken: dict[int, _Taken] = {}  # by the number of the fetch
        self._num_granted = 0
        self._client = PullClient(peers.config)
        self._threads = ThreadPoolExecutor(PULLS_TAKEN, thread_name_prefix="kv-pull")
        self._populating = ThreadPoolExecutor(1, thread_name_prefix="kv-populate")
        self._asked: deque[_Asked] = deque()  # appended to on the gRPC thread
        self._reading: list[_Asked] = []
        self._num_readers = 0

    def close(self) -> None:
        """The receiver is closed with the program, so nothing writes to the pool."""
        self._client.close()
        for threads in (self._threads, self._populating):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- what this worker takes ---------------------------------------------------------------------------------

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        return num_pullable(
            attempt,
            len(hashes),
            first,
            taken=[len(one.fetch.blocks) for one in self._taken.values()],
            block_size=self._program.kv.block_size,
            block_bytes=self._block_bytes,
        )

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        assert attempt.source is not None, "something was found"
        return attempt.source.predicted_s

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        source = fetch.attempt.source
        assert source is not None, "something was found"
        taken = _Taken(fetch, end, source, pull_ends_at_s(fetch.attempt, self._program.context.now()))
        self._ask_for(taken, len(fetch.blocks))

    def abort(self, number: int) -> None:
        taken = self._taken.get(number)
        if taken is not None:
            taken.is_given_up = True
            taken.error = taken.error or "it was given up"
            taken.is_unreachable = taken.is_unreachable or self._client.is_silent(taken.source.endpoint)
            self._abort(taken)

    def _abort(self, taken: _Taken) -> None:
        taken.calls.cancel()  # the next ask needs its thread
        if taken.key is not None:
            self._receiver.abort(taken.key)

    def _ask_for(self, taken: _Taken, num_blocks: int) -> None:
        """Grants the first blocks of the fetch to the source, and asks it for them."""
        program, context, fetch = self._program, self._program.context, taken.fetch
        self._num_granted += 1
        name = f"{context.config.worker_id}.{context.incarnation}.pull.{self._num_granted}"
        grant = Grant(
            key=TransferKey(transfer_id=name, attempt=1, generation=self._num_granted),
            endpoint=context.endpoint,
            worker_id=context.config.worker_id,
            incarnation=context.incarnation,
            fingerprint=program.fingerprint,
            blocks=fetch.blocks[:num_blocks],
            num_cached_blocks=fetch.first,
            hash_seed=program.limits.hash_seed,
        )
        left_s = clamped_s(taken.ends_at_s - context.now(), 0.0, LONGEST_S)
        hashes = fetch.hashes[:num_blocks]
        request = transfer_pb2.PullRequest(
            grant=grant_to_proto(grant),
            block_hashes=b"".join(hashes),
            deadline_s=left_s,
            source_incarnation=taken.source.incarnation,
        )

        def received(one: Received) -> None:
            ended_s = context.now()  # the engine may be in a step
            context.post(lambda: self._received(taken, one, ended_s))

        # Before the source is asked, which may send at once. Raises Unavailable after the end of the receiver.
        self._receiver.expect(grant, received, left_s, tuple(map(content_hash64, hashes)))
        taken.key, taken.num_blocks = grant.key, num_blocks
        self._taken[fetch.number] = taken
        taken.calls = Calls()
        try:
            self._threads.submit(self._ask, taken, grant.key, taken.calls, request)
            if not taken.is_part:
                self._populating.submit(populate, self._config.pool, fetch.blocks)
        except Exception as error:  # such as too many threads: a miss
            taken.error = str(error) or type(error).__name__
            self._abort(taken)  # which reports the end

    def _ask(self, taken: _Taken, key: TransferKey, calls: Calls, request: transfer_pb2.PullRequest) -> None:
        """On a thread of its own, for which it may have waited."""
        context, endpoint = self._program.context, taken.source.endpoint
        left_s = min(taken.ends_at_s - context.now(), request.deadline_s)
        if calls.is_cancelled or left_s <= 0.0:
            return  # the receiver reports the end
        request.deadline_s = left_s
        num_found, is_unreachable = 0, False
        try:
            answer = self._client.ask(request, endpoint, min(left_s, ASK_S), calls)
            refusal, num_found = answer.refusal, answer.num_found
        except NoAnswer as error:
            refusal = error.message
        except TransferFailed as error:
            refusal, is_unreachable = error.message, True
        except Exception as error:  # a broken source is a miss
            log.exception("a source could not be asked for KV", extra={"endpoint": endpoint})
            refusal = str(error) or type(error).__name__
        if refusal:
            context.post(partial(self._refused, taken, key, refusal, num_found, is_unreachable))

    def _refused(self, taken: _Taken, key: TransferKey, refusal: str, num_found: int, is_unreachable: bool) -> None:
        if taken.key != key or taken.is_given_up:
            return
        taken.error, taken.num_found, taken.is_unreachable = taken.error or refusal, num_found, is_unreachable
        self._abort(taken)  # nothing writes yet, or the transfer has ended already

    def _received(self, taken: _Taken, received: Received, ended_s: float) -> None:
        program, fetch, source = self._program, taken.fetch, taken.source
        if received.outcome is ReceiveOutcome.QUARANTINED:
            program.counts["quarantined transfer"] += 1  # the blocks stay reserved until DRAINED follows
            return
        is_whole = received.outcome is ReceiveOutcome.VERIFIED
        if not is_whole and self._asks_for_a_part(taken):
            return
        del self._taken[fetch.number]
        num_blocks = taken.num_blocks if is_whole else 0
        error = "" if is_whole else taken.error or received.error
        if error:
            extra = {"source": source.worker_id, "error": error, **program.log_fields.of(fetch.attempt.key)}
            log.info("KV was not pulled", extra=extra)
        program.outbox.report(
            pr.PullEnded(
                key=fetch.attempt.key,
                source=source.worker_id,
                num_tokens=num_blocks * program.kv.block_size,
                num_bytes=received.num_bytes,
                busy_s=received.busy_s,
                pull_s=max(0.0, ended_s - fetch.started_s),
                error=error,
                is_unreachable=taken.is_unreachable,
            )
        )
        taken.end(num_blocks)

    def _asks_for_a_part(self, taken: _Taken) -> bool:
        """Asks the source once more, for the leading blocks that it has, if that is predicted to be sooner than to
        compute them. Nothing writes to the blocks now."""
        program, fetch, count, fetches = self._program, taken.fetch, taken.num_found, self._program.fetches
        if taken.is_given_up or taken.is_part or not 0 < count < taken.num_blocks or fetches is None:
            return False
        now_s, size = program.context.now(), program.kv.block_size
        if not is_part_worthwhile(fetches, fetch, count, block_size=size, now_s=now_s, ends_at_s=taken.ends_at_s):
            return False
        taken.is_part, taken.error = True, ""
        try:
            self._ask_for(taken, count)
        except Exception as error:  # such as that the receiver has ended: a miss
            taken.error = str(error) or type(error).__name__
            return False
        return True

    # -- what this worker gives ---------------------------------------------------------------------------------

    async def give(self, request: transfer_pb2.PullRequest, caller: str) -> transfer_pb2.PullResponse:
        """Why it sends nothing; empty if it does. `caller` is the name in the proof of the worker that asks."""
        if not self._is_plausible(request, caller):
            self._program.context.post(partial(self._count, INVALID))
            return transfer_pb2.PullResponse(refusal=INVALID)
        if len(self._asked) >= MAX_ASKED:  # of which some may have given up, during a long step
            return transfer_pb2.PullResponse(refusal=BUSY)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[transfer_pb2.PullResponse] = loop.create_future()

        def set_result(refusal: str, num_found: int) -> None:
            if not answer.done():
                answer.set_result(transfer_pb2.PullResponse(refusal=refusal, num_found=num_found))

        def reply(refusal: str, num_found: int) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(set_result, refusal, num_found)

        self._asked.append(_Asked(request, reply, answer.done))  # done also if the caller has left
        self._program.context.post(self.answer)
        try:
            async with asyncio.timeout(ASK_S):
                return await answer
        except TimeoutError:
            return transfer_pb2.PullResponse(refusal=BUSY)

    def answer(self) -> None:
        for _ in range(min(len(self._asked), MOST_CONSIDERED)):  # each has posted a call of this method
            self._consider(self._asked.popleft())
        for asked in [one for one in self._reading if not self._is_reading(one)]:
            self._reading.remove(asked)
            self._consider(asked)

    def end_given(self) -> None:
        """The worker drains: what it gives is no longer sent."""
        for key in self._program.kv.lent:
            self._sender.abort(key)
        reading, self._reading = self._reading, []
        for asked in reading:
            self._consider(asked)

    def _count(self, refusal: str) -> None:
        self._program.context.metrics.add(metric_names.KV_PULL_REQUESTS, answer=ANSWERS[refusal])

    def _is_reading(self, asked: _Asked) -> bool:
        fetches = self._program.fetches
        assert asked.reader is not None
        assert fetches is not None
        return not asked.is_gone() and fetches.is_waiting(asked.reader.key)

    def _consider(self, asked: _Asked) -> None:
        """Begins to send, or to read the disk, or refuses. May run between two layers of a step, so it must not
        raise."""
        refusal: str | None = BUSY
        num_found = 0
        try:
            if not asked.is_gone():
                refusal, num_found = self._decide(asked)
        except Exception:  # an error here must not end the step of others
            log.exception("a request for KV could not be considered")
        if refusal is None:
            self._reading.append(asked)
            return
        if asked.reader is not None and self._program.fetches is not None:
            self._program.act(self._program.fetches.leave(asked.reader.key))
        if not asked.is_gone():
            self._count(refusal)
            asked.reply(refusal, num_found)

    def _is_plausible(self, request: transfer_pb2.PullRequest, caller: str) -> bool:
        """Costs little, whatever the request says: a few bytes can name millions of blocks. On any thread."""
        grant = request.grant
        num_blocks, rest = divmod(len(request.block_hashes), HASH_BYTES)
        return (
            caller_name(grant.worker_id, grant.incarnation) == caller
            and not rest
            and 1 <= num_blocks <= self._program.blocks.num_blocks
            and 0.0 < request.deadline_s <= LONGEST_S
            and len(grant.extents) <= num_blocks == grant.num_blocks
            and sum(each.num_blocks for each in grant.extents) == num_blocks
        )

    def _decide(self, asked: _Asked) -> tuple[str | None, int]:
        """Begins to send, or returns why not, and how many of the leading blocks are here. None: the disk is read."""
        program, request = self._program, asked.request
        if program.scheduler.is_draining:
            return DRAINING, 0
        if request.source_incarnation != program.context.incarnation:
            return RESTARTED, 0
        try:
            grant = grant_from_proto(request.grant)
            compare(grant.fingerprint, program.fingerprint)
        except PdserveError:
            return FOREIGN, 0
        if grant.rank_endpoints or grant.key in program.kv.lent:
            return INVALID, 0
        is_alike = is_same_bytes(program.fingerprint.shape, grant.fingerprint.shape)
        if not is_alike or grant.hash_seed != program.limits.hash_seed:
            return FOREIGN, 0
        sizes = [*map(len, program.kv.lent.values()), *(one.request.grant.num_blocks for one in self._reading)]
        if not may_give(sizes, len(grant.blocks), self._block_bytes):
            return BUSY, 0
        joined = request.block_hashes
        hashes = [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]
        refusal = self._send(grant, hashes, request)
        if refusal != MISSING:
            return refusal, 0
        return (None, 0) if self._reads(asked, hashes) else (MISSING, program.kv.num_lendable(hashes))

    def _reads(self, asked: _Asked, hashes: list[bytes]) -> bool:
        """Whether blocks of this worker's disk are read. A fetch like those for its own prompts: of the same bounds,
        and only if that is predicted to be sooner than to compute them."""
        program, fetches = self._program, self._program.fetches
        if fetches is None or program.disk is None:
            return False
        if asked.reader is None:
            self._num_readers += 1
            asked.reader = reader(self._num_readers)
        spare = program.scheduler.load().running
        program.act(fetches.consider(asked.reader, hashes, program.context.now(), spare=spare))
        return fetches.is_waiting(asked.reader.key)

    def _send(self, grant: Grant, hashes: list[bytes], request: transfer_pb2.PullRequest) -> str:
        program = self._program
        # Each running sequence may need one more block before these are given back.
        blocks = program.kv.lend(grant.key, hashes, spare=program.scheduler.load().running)
        if not blocks:
            return MISSING if blocks is None else BUSY
        if program.blocks.stamps.content_hashes(blocks) != tuple(map(content_hash64, hashes)):
            program.kv.take_back(grant.key)  # something else wrote to one
            return MISSING
        post = program.context.post
        try:
            self._sender.start(grant, lambda sent: post(partial(self._sent, sent)), request.deadline_s)
        except Exception as error:  # nothing was started, so no end of it will be reported
            log.info("KV was not given to another worker", extra={"receiver": grant.worker_id, "error": str(error)})
            program.kv.take_back(grant.key)
            return BUSY
        self._sender.push(grant.key, list(enumerate(blocks)), is_last=True)
        return SENT

    def _sent(self, sent: Sent) -> None:
        if sent.key in self._program.kv.lent:
            self._program.kv.take_back(sent.key)


def populate(pool: KvPool, blocks: Iterable[int]) -> None:
    """Lets the system supply the memory of the blocks, which are about to be written, and changes no byte of it. On any
    thread.

    A pool gets its pages when they are first written. With pages of 4 KiB that costs several times the copy, during
    which the receiving thread competes with the engine for a core. So it is done while the source is asked.
    """
    madvise = _madvise()
    if madvise is None or not pool.is_on_host:
        return
    memory = (ctypes.c_char * 0).from_buffer(pool.buffer)
    begin = ctypes.addressof(memory)
    run_bytes = pool.block_bytes // pool.runs_per_block
    for part in range(pool.runs_per_block):
        for first, count in runs_of(sorted(blocks)):
            at = begin + (part * pool.num_blocks + first) * run_bytes
            end = at + count * run_bytes
            at -= at % mmap.PAGESIZE
            while at < end:
                if madvise(at, min(PAGED_BYTES, end - at), _MADV_POPULATE_WRITE):
                    return  # an older system, or no memory, which the transfer will find out
                at += PAGED_BYTES


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Without the GIL, unlike mmap's method."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    found: Callable[[int, int, int], int] = call
    return found
