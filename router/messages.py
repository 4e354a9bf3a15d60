"""Between the messages of a worker's stream and the events and commands of the pure centre. No I/O.

What a worker sends is checked as far as types and known enum values; whether it makes sense is the state's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvtransfer.grants import fingerprint_from_proto, grant_from_proto, grant_to_proto
from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.durations import check_duration
from pdserve.core.errors import InvalidRequest
from pdserve.core.latency import CostPrior
from pdserve.core.types import TokenOut
from pdserve.v1 import worker_pb2
from pdserve.wire import convert
from router import commands, events

_REFUSALS: Final[Mapping[int, RefusalReason]] = {
    worker_pb2.REFUSAL_REASON_INBOX_FULL: RefusalReason.INBOX_FULL,
    worker_pb2.REFUSAL_REASON_NO_BLOCKS: RefusalReason.NO_BLOCKS,
    worker_pb2.REFUSAL_REASON_DRAINING: RefusalReason.DRAINING,
    worker_pb2.REFUSAL_REASON_TOO_LARGE: RefusalReason.TOO_LARGE,
    worker_pb2.REFUSAL_REASON_DEADLINE: RefusalReason.DEADLINE,
}
_FAILURES: Final[Mapping[int, FailureKind]] = {
    worker_pb2.FAILURE_KIND_DEADLINE: FailureKind.DEADLINE,
    worker_pb2.FAILURE_KIND_INTERNAL: FailureKind.INTERNAL,
    worker_pb2.FAILURE_KIND_INVALID: FailureKind.INVALID,
    worker_pb2.FAILURE_KIND_TRANSFER: FailureKind.TRANSFER,
}


def connected(hello: worker_pb2.WorkerHello, endpoint: str) -> events.WorkerConnected:
    """Raises InvalidRequest where the role is none that we know, ConfigError on a shape that no pool has."""
    cost, fingerprint = hello.cost, fingerprint_from_proto(hello.fingerprint)
    return events.WorkerConnected(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        role=convert.role_from_proto(hello.role),
        endpoint=endpoint,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        max_context_tokens=hello.max_context_tokens,
        max_batch=hello.max_batch,
        max_batch_tokens=hello.max_batch_tokens,
        inbox_depth=hello.inbox_depth,
        block_bytes=fingerprint.block_bytes * fingerprint.shape.tp_degree,
        cost=CostPrior(
            prefill_base_s=cost.prefill_base_s,
            prefill_per_token_s=cost.prefill_per_token_s,
            prefill_per_token_context_s=cost.prefill_per_token_context_s,
            decode_base_s=cost.decode_base_s,
            decode_per_row_s=cost.decode_per_row_s,
            decode_per_context_token_s=cost.decode_per_context_token_s,
        )
        if hello.HasField("cost")
        else CostPrior(),
    )


def event_of(worker_id: str, message: worker_pb2.AttachResponse) -> events.Event | None:
    """None for messages that are not the state's: hello, KV events, and kinds newer than this router.

    Raises InvalidRequest on a value that the .proto does not name, and on a duration that is none.
    """
    kind = message.WhichOneof("message")
    if kind == "tokens":
        return _tokens(worker_id, message.tokens)
    if kind == "load":
        return _load(worker_id, message.load)
    if kind == "granted":
        granted = message.granted
        return events.Granted(
            worker_id=worker_id,
            request_id=granted.request_id,
            attempt=granted.attempt,
            grant=grant_from_proto(granted.grant) if granted.HasField("grant") else None,
        )
    if kind == "refused":
        refused = message.refused
        return events.Refused(
            worker_id=worker_id,
            request_id=refused.request_id,
            attempt=refused.attempt,
            reason=_REFUSALS.get(refused.reason, RefusalReason.INBOX_FULL),
            retry_after_s=_seconds("retry_after_s", refused.retry_after_s),
        )
    if kind == "first_token":
        first = message.first_token
        return events.FirstToken(
            worker_id=worker_id,
            request_id=first.request_id,
            attempt=first.attempt,
            token=convert.token_from_proto(first.token),
            queue_s=_seconds("queue_s", first.queue_s),
            prefill_s=_seconds("prefill_s", first.prefill_s),
            cached_tokens=first.cached_tokens,
            finish=convert.finish_from_proto(first.finish),
        )
    if kind == "transfer_ended":
        ended = message.transfer_ended
        return events.TransferEnded(
            worker_id=worker_id,
            request_id=ended.request_id,
            attempt=ended.attempt,
            is_committed=ended.is_committed,
            transfer_s=_seconds("transfer_s", ended.transfer_s),
            num_bytes=ended.bytes,
            busy_s=_seconds("busy_s", ended.busy_s),
            exposed_s=_seconds("exposed_s", ended.exposed_s),
            saved_bytes=ended.saved_bytes,
            error=ended.error,
        )
    if kind == "failed":
        failed = message.failed
        return events.AttemptFailed(
            worker_id=worker_id,
            request_id=failed.request_id,
            attempt=failed.attempt,
            kind=_FAILURES.get(failed.kind, FailureKind.INTERNAL),
            message=failed.message,
        )
    if kind == "released":
        released = message.released
        return events.Released(worker_id=worker_id, request_id=released.request_id, attempt=released.attempt)
    if kind == "batch_timed":
        timed = message.batch_timed
        return events.BatchTimed(
            worker_id=worker_id,
            rows=timed.rows,
            prefill_tokens=timed.prefill_tokens,
            prefill_token_context=timed.prefill_token_context,
            context_tokens=timed.context_tokens,
            step_s=timed.step_s,
        )
    return None


def _seconds(field: str, seconds: float) -> float:
    check_duration(field, seconds)
    return seconds


def _load(worker_id: str, load: worker_pb2.Load) -> events.LoadReported:
    return events.LoadReported(
        worker_id=worker_id,
        steps=load.steps,
        free_blocks=load.free_blocks,
        evictable_blocks=load.evictable_blocks,
        running=load.running,
        waiting=load.waiting,
        context_tokens=load.context_tokens,
        pending_prefill_tokens=load.pending_prefill_tokens,
        is_draining=load.is_draining,
        is_drained=load.is_drained,
    )


def load_to_proto(report: events.LoadReported) -> worker_pb2.Load:
    return worker_pb2.Load(
        steps=report.steps,
        free_blocks=report.free_blocks,
        evictable_blocks=report.evictable_blocks,
        running=report.running,
        waiting=report.waiting,
        context_tokens=report.context_tokens,
        pending_prefill_tokens=report.pending_prefill_tokens,
        is_draining=report.is_draining,
        is_drained=report.is_drained,
    )


def _tokens(worker_id: str, message: worker_pb2.Tokens) -> events.TokensArrived:
    return events.TokensArrived(
        worker_id=worker_id,
        rows=(
            *_plain_rows(message.plain),
            *(
                events.TokenRow(
                    request_id=row.request_id,
                    attempt=row.attempt,
                    output_index=row.output_index,
                    tokens=tuple([convert.token_from_proto(token) for token in row.tokens]),
                    finish=convert.finish_from_proto(row.finish),
                    decode_s=_seconds("decode_s", row.decode_s),
                    decode_queue_s=_seconds("decode_queue_s", row.decode_queue_s),
                    preempted_s=_seconds("preempted_s", row.preempted_s),
                    preemptions=row.preemptions,
                    queue_s=_seconds("queue_s", row.queue_s),
                    prefill_s=_seconds("prefill_s", row.prefill_s),
                    cached_tokens=row.cached_tokens,
                )
                for row in message.rows
            ),
        ),
    )


def _plain_rows(message: worker_pb2.PlainTokens) -> list[events.TokenRow]:
    columns = message.request_ids, message.attempts, message.output_indexes, message.token_ids
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InvalidRequest("plain", f"{', '.join(map(str, lengths))} values", "as many of each field")
    return [
        events.TokenRow(
            request_id=request_id, attempt=attempt, output_index=index, tokens=(TokenOut(token_id=token_id),)
        )
        for request_id, attempt, index, token_id in zip(*columns, strict=True)
    ]


def request_of(command: commands.WorkerCommand, sequence: worker_pb2.Sequence | None) -> worker_pb2.AttachRequest:
    """`sequence` is that of the command's request; only Reserve and Prefill need it."""
    match command:
        case commands.Reserve():
            assert sequence is not None
            reserve = worker_pb2.Reserve(sequence=_at(sequence, command), is_local=command.is_local)
            return worker_pb2.AttachRequest(reserve=reserve)
        case commands.Prefill():
            assert sequence is not None
            prefill = worker_pb2.Prefill(sequence=_at(sequence, command), grant=grant_to_proto(command.grant))
            return worker_pb2.AttachRequest(prefill=prefill)
        case commands.Admit():
            admit = worker_pb2.Admit(
                request_id=command.request_id, attempt=command.attempt, first_token_id=command.first_token_id
            )
            return worker_pb2.AttachRequest(admit=admit)
        case commands.Cancel():
            cancel = worker_pb2.Cancel(request_id=command.request_id, attempt=command.attempt)
            return worker_pb2.AttachRequest(cancel=cancel)
        case commands.DrainWorker():
            return worker_pb2.AttachRequest(drain=worker_pb2.DrainWorker())
        case commands.UndrainWorker():
            return worker_pb2.AttachRequest(undrain=worker_pb2.UndrainWorker())


def _at(sequence: worker_pb2.Sequence, command: commands.Reserve | commands.Prefill) -> worker_pb2.Sequence:
    """The sequence as of this attempt."""
    now = worker_pb2.Sequence()
    now.CopyFrom(sequence)
    now.attempt = command.attempt
    now.output_token_ids.extend(command.output_token_ids)
    if command.deadline_s is not None:
        now.deadline_s = command.deadline_s
    return now
