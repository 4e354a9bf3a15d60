"""Which ranks of two workers take part in a transfer, and the part of its grant that each pair of ranks receives.
Pure."""

from __future__ import annotations

from dataclasses import replace

from kvtransfer.reshape.mapping import shards_of
from pdserve.core.grant import Grant, TransferKey
from pdserve.core.kv_shape import KvShape


def rank_pairs(source: KvShape, target: KvShape) -> list[tuple[int, int]]:
    """(sending rank, receiving rank) of each part; the ranks in both shapes do not matter."""
    return [
        (shard.source_rank, rank)
        for rank in range(target.tp_degree)
        for shard in shards_of(source, replace(target, tp_rank=rank))
    ]


def rank_key(key: TransferKey, rank: int) -> TransferKey:
    """A receiving rank's own name of the transfer, because a sender may send parts of one transfer to several ranks."""
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
