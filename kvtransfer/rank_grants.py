"""The pairs of ranks that transfer parts of one grant, and the grant of each part. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.reshape.mapping import shards_of
from pdserve.core.grant import Grant, TransferKey
from pdserve.core.kv_shape import KvShape


def rank_pairs(source: KvShape, target: KvShape) -> list[tuple[int, int]]:
    """(sending rank, receiving rank) of each part. `tp_rank` of both shapes is ignored."""
    return [
        (shard.source_rank, rank)
        for rank in range(target.tp_degree)
        for shard in shards_of(source, replace(target, tp_rank=rank))
    ]


def rank_key(key: TransferKey, rank: int) -> TransferKey:
    """The key of one rank's part. Parts need different keys, because a sender may send parts to several ranks."""
    return replace(key, transfer_id=f"{key.transfer_id}/{rank}")


def rank_grant(grant: Grant, rank: int) -> Grant:
    """The grant of the receiving worker's rank `rank`: the same block numbers in its own pool, for its heads."""
    shape = grant.fingerprint.shape
    if shape.tp_degree == 1:
        return grant
    endpoint = (grant.endpoint, *grant.rank_endpoints)[rank]
    fingerprint = replace(grant.fingerprint, shape=replace(shape, tp_rank=rank))
    key = rank_key(grant.key, rank)
    return replace(grant, key=key, endpoint=endpoint, fingerprint=fingerprint, rank_endpoints=())
