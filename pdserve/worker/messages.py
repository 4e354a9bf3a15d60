"""Builds the messages of worker.proto that no codec covers. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, Final

from pdserve.build import FULL_VERSION
from pdserve.core import effects as fx
from pdserve.core.blocks import CacheChange
from pdserve.core.latency import CostPrior
from pdserve.engine.interface import EngineSpec
from pdserve.v1 import inference_pb2, transfer_pb2, worker_pb2
from pdserve.wire.convert import logprobs_to_proto, role_to_proto
from pdserve.wire.protocol import COST
from pdserve.worker.context import ProgramContext
from pdserve.worker.intake import SequenceLimits

MAX_SCORED: Final = 16_384  # logprobs in one message: some 200 kB


def worker_hello(
    context: ProgramContext,
    spec: EngineSpec,
    limits: SequenceLimits,
    cost: CostPrior,
    fingerprint: transfer_pb2.Fingerprint,
) -> worker_pb2.WorkerHello:
    config = context.config
    return worker_pb2.WorkerHello(
        worker_id=config.worker_id,
        incarnation=context.incarnation,
        role=role_to_proto(context.role),
        model=spec.model,
        fingerprint=fingerprint,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        max_context_tokens=limits.max_context_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_batch=config.max_batch,
        max_batch_tokens=config.max_batch_tokens,
        inbox_depth=config.inbox_depth,
        cost=COST.encode(cost),
        hash_seed=limits.hash_seed,
        reads_batches=True,
        version=FULL_VERSION,
    )


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


def plain_tokens(effect: fx.PlainSampled) -> Iterator[tuple[int, worker_pb2.PlainTokens]]:
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


def kv_events(change: CacheChange) -> worker_pb2.KvEvents:
    return worker_pb2.KvEvents(
        sequence=change.sequence, is_snapshot=change.is_snapshot, stored=change.stored, removed=change.removed
    )
