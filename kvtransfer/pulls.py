"""Cached KV that moves between workers: pulled from another worker into this one's pool, and given to those that ask.

A router names the source in the message of an attempt (PrefixSource). The worker that lacks the prefix grants pool
blocks for it, as for any transfer, and asks the source directly (TransferService.Pull). The source answers after its
running step. If it has all of the blocks, it references them, and sends them like the KV of a prompt. Otherwise it
refuses, which is a miss: the prompt is computed. A pull never fails a request.

All methods run on the engine thread, except `give`, which runs on the gRPC thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from kvtransfer.link.dial import ask
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.protocol.grants import compare, grant_from_proto, grant_to_proto
from kvtransfer.protocol.transport import Received, ReceiveOutcome, Sender, Sent
from pdserve.config import WorkerConfig
from pdserve.core import protocol as pr
from pdserve.core.access.proof import caller_name
from pdserve.core.attempt import PULLS_GIVEN, PULLS_TAKEN, Attempt
from pdserve.core.durations import clamped_s
from pdserve.core.errors import PdserveError, TransferFailed
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.core.kv.kv_shape import Grant, TransferKey, is_same_bytes
from pdserve.core.kv.stamps import content_hash64
from pdserve.engine.interface import Engine
from pdserve.telemetry import metric_names
from pdserve.v1 import transfer_pb2
from pdserve.worker.program import RoleProgram

log = logging.getLogger(__name__)

MAX_BYTES: Final = 2**30  # on their way in one direction; a pull alone may have more
LONGEST_S: Final = 60.0  # of one pull, also if its prompt waits longer
ASK_S: Final = 10.0  # for the source's answer, which comes after its running step

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
    program.sources.pop(Pulls.name, None)  # of the program in the other role
    if peers is not None and sender is not None:
        pulls = Pulls(program, peers, sender)
        program.sources[Pulls.name], program.giver = pulls, pulls
        peers.receiver.servicer.give = pulls.give


@dataclass(slots=True, eq=False)
class _Taken:
    """A pull by this worker."""

    fetch: Fetch
    end: Callable[[int], None]
    grant: Grant
    error: str = ""  # why the source sends nothing
    is_unreachable: bool = False


@final
class Pulls:
    """Both directions of one worker. A FetchSource for what it takes."""

    name: Final = "peer"

    def __init__(self, program: RoleProgram[Any, Any, Any], peers: Peers, sender: Sender) -> None:
        self._program, self._config, self._receiver, self._sender = program, peers.config, peers.receiver, sender
        self._block_bytes = peers.config.pool.block_bytes
        self._taken: dict[int, _Taken] = {}  # by the number of the fetch
        self._num_granted = 0

    def close(self) -> None:
        """The receiver is closed with the program, so nothing writes to the pool."""

    # -- what this worker takes ---------------------------------------------------------------------------------

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        source = attempt.source
        if source is None or len(self._taken) >= PULLS_TAKEN:
            return 0
        found = min(len(hashes), source.num_tokens // self._program.kv.block_size - first)
        taken_bytes = sum(len(one.fetch.blocks) for one in self._taken.values()) * self._block_bytes
        if taken_bytes and taken_bytes + found * self._block_bytes > MAX_BYTES:
            return 0
        return max(found, 0)

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        assert attempt.source is not None, "something was found"
        return attempt.source.predicted_s

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        program, context = self._program, self._program.context
        source = fetch.attempt.source
        assert source is not None, "something was found"
        self._num_granted += 1
        name = f"{context.config.worker_id}.{context.incarnation}.pull.{self._num_granted}"
        grant = Grant(
            key=TransferKey(transfer_id=name, attempt=1, generation=self._num_granted),
            endpoint=context.endpoint,
            worker_id=context.config.worker_id,
            incarnation=context.incarnation,
            fingerprint=program.fingerprint,
            blocks=fetch.blocks,
            num_cached_blocks=fetch.first,
            hash_seed=program.limits.hash_seed,
        )
        deadline_at_s = fetch.attempt.deadline_at_s
        left_s = LONGEST_S if deadline_at_s is None else clamped_s(deadline_at_s - context.now(), 0.0, LONGEST_S)
        post = context.post
        request = transfer_pb2.PullRequest(
            grant=grant_to_proto(grant),
            block_hashes=b"".join(fetch.hashes),
            deadline_s=left_s,
            source_incarnation=source.incarnation,
        )
        # Before the source is asked, which may send at once. Raises Unavailable after the end of the receiver.
        self._receiver.expect(
            grant,
            lambda received: post(partial(self._received, fetch.number, received)),
            left_s,
            tuple(map(content_hash64, fetch.hashes)),
        )
        taken = self._taken[fetch.number] = _Taken(fetch, end, grant)
        try:
            threading.Thread(
                target=self._ask, args=(taken, request, source.endpoint, left_s), name="kv-pull", daemon=True
            ).start()
        except Exception as error:  # such as too many threads: a miss
            taken.error = str(error) or type(error).__name__
            self._receiver.abort(grant.key)  # which reports the end

    def abort(self, number: int) -> None:
        taken = self._taken.get(number)
        if taken is not None:
            taken.error = taken.error or "it was given up"
            self._receiver.abort(taken.grant.key)

    def _ask(self, taken: _Taken, request: transfer_pb2.PullRequest, endpoint: str, timeout_s: float) -> None:
        """On a thread of its own."""
        try:
            refusal = ask(self._config, request, endpoint, min(timeout_s, ASK_S))
        except TransferFailed as error:
            refusal = error.message
            # Says nothing of the source if it was given up, or had no time because the request's deadline was near.
            taken.is_unreachable = not taken.error and timeout_s >= ASK_S
        except Exception as error:  # a broken source is a miss
            log.exception("a source could not be asked for KV", extra={"endpoint": endpoint})
            refusal = str(error) or type(error).__name__
        if refusal:
            taken.error = taken.error or refusal
            self._receiver.abort(taken.grant.key)  # nothing writes yet, or the transfer has ended already

    def _received(self, number: int, received: Received) -> None:
        program = self._program
        if received.outcome is ReceiveOutcome.QUARANTINED:
            program.counts["quarantined transfer"] += 1  # the blocks stay reserved until DRAINED follows
            return
        taken = self._taken.pop(number)
        fetch = taken.fetch
        source = fetch.attempt.source
        assert source is not None, "it was pulled from somewhere"
        is_whole = received.outcome is ReceiveOutcome.VERIFIED
        num_blocks = len(fetch.blocks) if is_whole else 0
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
                pull_s=max(0.0, program.context.now() - fetch.started_s),
                error=error,
                is_unreachable=taken.is_unreachable,
            )
        )
        taken.end(num_blocks)

    # -- what this worker gives ---------------------------------------------------------------------------------

    async def give(self, request: transfer_pb2.PullRequest, caller: str) -> str:
        """Why it sends nothing; empty if it does. `caller` is the name in the proof of the worker that asks."""
        if not self._is_plausible(request, caller):
            metrics = self._program.context.metrics
            self._program.context.post(lambda: metrics.add(metric_names.KV_PULL_REQUESTS, answer=ANSWERS[INVALID]))
            return INVALID
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def reply(refusal: str) -> None:
            if not answer.done():
                answer.set_result(refusal)

        def decide() -> None:
            if not answer.done():  # the caller may have left
                refusal = self._decide(request)
                self._program.context.metrics.add(metric_names.KV_PULL_REQUESTS, answer=ANSWERS[refusal])
                with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(reply, refusal)

        self._program.context.post(decide)
        try:
            async with asyncio.timeout(ASK_S):
                return await answer
        except TimeoutError:
            return BUSY

    def end_given(self) -> None:
        """The worker drains: what it gives is no longer sent."""
        for key in self._program.kv.lent:
            self._sender.abort(key)

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

    def _decide(self, request: transfer_pb2.PullRequest) -> str:
        """Begins to send, or returns why not."""
        program = self._program
        if program.scheduler.is_draining:
            return DRAINING
        if request.source_incarnation != program.context.incarnation:
            return RESTARTED
        try:
            grant = grant_from_proto(request.grant)
            compare(grant.fingerprint, program.fingerprint)
        except PdserveError:
            return FOREIGN
        if grant.rank_endpoints or grant.key in program.kv.lent:
            return INVALID
        is_alike = is_same_bytes(program.fingerprint.shape, grant.fingerprint.shape)
        if not is_alike or grant.hash_seed != program.limits.hash_seed:
            return FOREIGN
        lent_bytes = sum(map(len, program.kv.lent.values())) * self._block_bytes
        is_much = lent_bytes and lent_bytes + len(grant.blocks) * self._block_bytes > MAX_BYTES
        if len(program.kv.lent) >= PULLS_GIVEN or is_much:
            return BUSY
        joined = request.block_hashes
        return self._send(grant, [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)], request)

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
        except PdserveError as error:
            log.info("KV was not given to another worker", extra={"receiver": grant.worker_id, "error": error.message})
            program.kv.take_back(grant.key)
            return BUSY
        self._sender.push(grant.key, list(enumerate(blocks)), is_last=True)
        return SENT

    def _sent(self, sent: Sent) -> None:
        if sent.key in self._program.kv.lent:
            self._program.kv.take_back(sent.key)
