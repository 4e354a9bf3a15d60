"""From a worker's own words to the messages of worker.proto. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Final

from pdserve.core import effects as fx
from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.blocks import CacheChange
from pdserve.core.latency import CostPrior
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.wire.convert import logprobs_to_proto

MAX_SCORED: Final = 16_384  # logprobs in one message: some 200 kB

_REASONS: Final[Mapping[RefusalReason, worker_pb2.RefusalReason]] = {
    RefusalReason.INBOX_FULL: worker_pb2.REFUSAL_REASON_INBOX_FULL,
    RefusalReason.NO_BLOCKS: worker_pb2.REFUSAL_REASON_NO_BLOCKS,
    RefusalReason.DRAINING: worker_pb2.REFUSAL_REASON_DRAINING,
    RefusalReason.TOO_LARGE: worker_pb2.REFUSAL_REASON_TOO_LARGE,
    RefusalReason.DEADLINE: worker_pb2.REFUSAL_REASON_DEADLINE,
}
_KINDS: Final[Mapping[FailureKind, worker_pb2.FailureKind]] = {
    FailureKind.DEADLINE: worker_pb2.FAILURE_KIND_DEADLINE,
    FailureKind.INTERNAL: worker_pb2.FAILURE_KIND_INTERNAL,
    FailureKind.INVALID: worker_pb2.FAILURE_KIND_INVALID,
    FailureKind.TRANSFER: worker_pb2.FAILURE_KIND_TRANSFER,
}


def refused(effect: fx.Refused) -> worker_pb2.Refused:
    return worker_pb2.Refused(
        request_id=effect.key.request_id,
        attempt=effect.key.attempt,
        reason=_REASONS[effect.reason],
        retry_after_s=fx.RETRY_AFTER_S,
    )


def failed(effect: fx.Failed) -> worker_pb2.Failed:
    return worker_pb2.Failed(
        request_id=effect.key.request_id,
        attempt=effect.key.attempt,
        kind=_KINDS[effect.kind],
        message=effect.message,
    )


def transfer_lost(effect: fx.TransferLost) -> worker_pb2.TransferEnded:
    return worker_pb2.TransferEnded(
        request_id=effect.key.request_id, attempt=effect.key.attempt, is_committed=False, error=effect.error
    )


def released(effect: fx.Released) -> worker_pb2.Released:
    return worker_pb2.Released(request_id=effect.key.request_id, attempt=effect.key.attempt)


def prompt_scored(effect: fx.PromptScored) -> Iterator[worker_pb2.PromptScored]:
    """As many messages as keep each far below any limit on message size."""
    width = 1 + max(len(token.top) for token in effect.tokens)
    size = max(1, MAX_SCORED // width)
    for first in range(0, len(effect.tokens), size):
        scores = inference_pb2.PromptLogprobs(
            first_position=effect.first_position + first,
            tokens=[logprobs_to_proto(token) for token in effect.tokens[first : first + size]],
        )
        yield worker_pb2.PromptScored(request_id=effect.key.request_id, attempt=effect.key.attempt, scores=scores)


def plain_tokens(effect: fx.PlainDrawn) -> Iterator[tuple[int, worker_pb2.PlainTokens]]:
    """One message for each router, by the number of its stream."""
    routers, request_ids, attempts = zip(*effect.keys, strict=True)
    columns: list[Sequence[Any]] = [request_ids, attempts, effect.output_indexes, effect.token_ids]
    for router in sorted(set(routers)):
        names, numbers, indexes, tokens = columns
        if routers.count(router) < len(routers):
            is_its = [one == router for one in routers]
            names, numbers, indexes, tokens = (list(compress(column, is_its)) for column in columns)
        plain = worker_pb2.PlainTokens(request_ids=names, attempts=numbers, output_indexes=indexes, token_ids=tokens)
        yield router, plain


def load(account: fx.Load, *, steps: int, is_draining: bool, is_drained: bool) -> worker_pb2.Load:
    return worker_pb2.Load(
        steps=steps,
        free_blocks=account.free_blocks,
        evictable_blocks=account.evictable_blocks,
        running=account.running,
        waiting=account.waiting,
        context_tokens=account.context_tokens,
        pending_prefill_tokens=account.pending_prefill_tokens,
        is_draining=is_draining,
        is_drained=is_drained,
    )


def batch_timed(account: fx.StepAccount, step_s: float) -> worker_pb2.BatchTimed:
    return worker_pb2.BatchTimed(
        rows=account.decode_rows,
        prefill_tokens=account.prefill_tokens,
        prefill_token_context=account.prefill_token_context,
        context_tokens=account.context_tokens,
        step_s=step_s,
    )


def kv_events(change: CacheChange) -> worker_pb2.KvEvents:
    return worker_pb2.KvEvents(
        sequence=change.sequence, is_snapshot=change.is_snapshot, stored=change.stored, removed=change.removed
    )


def cost_prior(cost: CostPrior) -> worker_pb2.CostPrior:
    return worker_pb2.CostPrior(
        prefill_base_s=cost.prefill_base_s,
        prefill_per_token_s=cost.prefill_per_token_s,
        prefill_per_token_context_s=cost.prefill_per_token_context_s,
        decode_base_s=cost.decode_base_s,
        decode_per_row_s=cost.decode_per_row_s,
        decode_per_context_token_s=cost.decode_per_context_token_s,
    )
