"""The sending side of a worker's program: from a router's Prefill to the end of its KV transfer.

Programs of both roles use it: a prefill worker sends the KV of prompts that it computes, a decode worker that of
answers that leave it. The scheduler decides which blocks are sent when, as effects. Runs on the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, final

from kvtransfer.protocol.grants import decode_grant
from kvtransfer.protocol.transport import Sender, SendOutcome, Sent, Text
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import Attempt, AttemptKey, FailureKind
from pdserve.core.cost.overlap import hidden_share
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.kv.hashing import chain_key
from pdserve.core.kv.kv_shape import Grant, TransferKey, is_same_bytes
from pdserve.telemetry import metric_names
from pdserve.v1 import worker_pb2
from pdserve.worker.program import AttemptTransfer, RoleProgram


@dataclass(slots=True)
class OutgoingTransfer(AttemptTransfer):
    grant: Grant
    text: Text | None  # the data that a receiver of another shape requires
    has_failed: bool = False  # it could not start; another transfer may use its key


class SendOrder(NamedTuple):
    """An attempt whose KV is to be sent, and what a scheduler must know of its grant."""

    attempt: Attempt
    grant: Grant
    may_divide: bool  # the receiver accepts blocks in groups of layers

    @property
    def granted_size(self) -> int:
        """Tokens of each granted block."""
        return self.grant.fingerprint.shape.block_size


class OnSent(Protocol):
    """`sent` of a scheduler."""

    def __call__(
        self, key: AttemptKey, *, is_whole: bool, error: str = "", is_cancelled: bool = False
    ) -> Iterable[Any]: ...


@final
class AttemptSender:
    def __init__(
        self,
        program: RoleProgram[Any, Any, Any],
        sender: Sender,
        on_sent: OnSent,
        on_measured: Callable[[str, int, float], None] = lambda receiver, num_bytes, seconds: None,
        *,
        kv_wire: str = "exact",
    ) -> None:
        """`on_measured` learns of each completed transfer: the receiver, and the bytes and seconds that computing did
        not hide."""
        self._program, self._sender, self._on_sent, self._on_measured = program, sender, on_sent, on_measured
        self._is_exact = kv_wire == "exact"

    def begin(self, session: int, message: worker_pb2.Prefill) -> SendOrder | None:
        """The order of a new Prefill. None if it is late, a duplicate, or invalid, which is reported."""
        program = self._program
        attempt = program.begin(session, message.sequence)
        if attempt is None:
            return None
        key = attempt.key
        try:
            grant = decode_grant(message.grant)
        except InvalidRequest as error:
            self._fail(key, error.message)
            return None
        if any(grant.key == other.key for other in program.transfers.values()):
            self._fail(key, "grant: another attempt already writes to it")
            return None
        own, theirs, own_seed = program.fingerprint.shape, grant.fingerprint.shape, program.limits.hash_seed
        text = None
        is_alike = is_same_bytes(own, theirs) and grant.hash_seed in (b"", own_seed)
        if not is_alike or not self._is_exact:
            their_key = chain_key(message.sequence.cache_salt, grant.hash_seed or own_seed)
            text = text_of(attempt, own.block_size, grant, their_key)
        program.transfers[key] = OutgoingTransfer(grant.key, attempt.deadline_at_s, grant, text)
        return SendOrder(attempt, grant, may_divide=text is None)

    def act(self, effect: fx.SendEffect) -> None:
        outgoing: OutgoingTransfer | None = self._program.transfers.get(effect.key)
        if outgoing is None:
            return  # an effect before this one has ended the attempt
        match effect:
            case fx.SendStarted():
                self._start(effect, outgoing)
            case fx.BlocksDone() | fx.SendAborted() if outgoing.has_failed:
                pass  # its end is posted
            case fx.BlocksDone():
                groups = range(effect.first_group, effect.end_group)
                self._sender.push(outgoing.key, effect.blocks, effect.is_last, groups)
            case fx.SendAborted():
                self._sender.abort(outgoing.key)
            case pr.FirstToken():
                self._program.outbox.report(effect)
                self._program.context.metrics.add(metric_names.REUSED_TOKENS, effect.cached_tokens)

    def _fail(self, key: AttemptKey, message: str) -> None:
        """Also because of a grant that cannot be read: it is no input of the client, and another way may be open."""
        failed = pr.AttemptFailed(key=key, kind=FailureKind.TRANSFER, message=message)
        self._program.act([failed, pr.Released(key=key)])

    def _start(self, effect: fx.SendStarted, outgoing: OutgoingTransfer) -> None:
        key, context = effect.key, self._program.context
        context.metrics.add(metric_names.PUSHES, plan=effect.plan)
        try:
            self._sender.start(
                outgoing.grant,
                lambda sent: context.post(partial(self._sent, key, sent)),
                outgoing.remaining_s(context.now()),
                outgoing.text,
                groups=effect.groups,
            )
        except PdserveError as error:
            # The end frees the attempt's blocks, which the step that has just been planned writes to.
            outgoing.has_failed = True
            context.post(partial(self._not_started, key, outgoing.key, error.message))

    def _not_started(self, key: AttemptKey, transfer: TransferKey, error: str) -> None:
        if self._program.transfer_of(key, transfer) is not None:
            self._program.act(self._on_sent(key, is_whole=False, error=error))

    def _sent(self, key: AttemptKey, sent: Sent) -> None:
        outgoing: OutgoingTransfer | None = self._program.transfer_of(key, sent.key)
        if outgoing is None:
            return
        is_whole = sent.outcome is SendOutcome.SENT
        if is_whole:
            self._measure(key, outgoing.grant, sent)
        self._program.act(self._on_sent(key, is_whole=is_whole, error=sent.error, is_cancelled=sent.is_cancelled))

    def _measure(self, key: AttemptKey, grant: Grant, sent: Sent) -> None:
        if not sent.num_bytes:
            return
        # A transfer in one piece measures the link, including all overheads before and after the bytes.
        self._on_measured(grant.worker_id, sent.num_bytes, sent.busy_s if sent.early_bytes else sent.exposed_s)
        metrics, dtype = self._program.context.metrics, sent.wire_dtype or self._program.fingerprint.shape.dtype
        metrics.observe(metric_names.TRANSFER_EXPOSED_TIME, sent.exposed_s)
        metrics.observe(metric_names.TRANSFER_HIDDEN_SHARE, hidden_share(sent.busy_s, sent.exposed_s))
        metrics.add(metric_names.TRANSFER_WIRE_BYTES, sent.num_bytes, dtype=dtype)
        metrics.add(metric_names.TRANSFER_SENT_BYTES, sent.early_bytes, when="early")
        metrics.add(metric_names.TRANSFER_SENT_BYTES, sent.num_bytes - sent.early_bytes, when="late")
        self._program.outbox.report(pr.TransferEnded(key=key, is_committed=True, exposed_s=sent.exposed_s))


def text_of(attempt: Attempt, block_size: int, grant: Grant, their_key: bytes) -> Text:
    """The content hashes of the blocks to send, on this worker and on the granting one."""
    tokens, theirs = attempt.token_ids, replace(attempt, chain_key=their_key)
    their_size = grant.fingerprint.shape.block_size
    own = attempt.content_hashes(attempt.extend_hashes([], tokens, block_size), tokens, block_size)
    names = theirs.content_hashes(theirs.extend_hashes([], tokens, their_size), tokens, their_size)
    return Text(
        num_tokens=len(tokens),
        own=own[grant.num_cached_blocks * their_size // block_size :],
        theirs=names[grant.num_cached_blocks :],
    )
