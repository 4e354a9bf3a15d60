"""Converts grants and fingerprints between the generated messages and kvtransfer.transport. No I/O."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.grant import Fingerprint, Grant, TransferKey
from pdserve.core.kv_shape import KvShape, check_convertible
from pdserve.engine.interface import EngineSpec
from pdserve.v1 import transfer_pb2
from pdserve.wire.convert import blocks_from_extents, extents_from_blocks
from pdserve.wire.protocol import FINGERPRINT

PROTOCOL: Final = 2  # of the transfer; raised when frames, stamps or checksums change their meaning
MAX_TRANSFER_ID_CHARS: Final = 256
MAX_RANKS: Final = 64  # of one worker
MAX_ENDPOINT_CHARS: Final = 256


def shape_of(spec: EngineSpec) -> KvShape:
    return KvShape(
        layout=spec.layout,
        dtype=spec.kv_dtype,
        num_layers=spec.kv_layers,
        num_kv_heads=spec.kv_heads,
        head_dim=spec.kv_head_dim,
        block_size=spec.block_size,
        tp_degree=spec.tp_degree,
        tp_rank=spec.tp_rank,
    )


def check_movable(degree: int, num_ranks: int = 1) -> None:
    """Raises ConfigError unless the pools of `num_ranks` ranks together hold whole blocks."""
    if degree != num_ranks:
        expected = f"{num_ranks} for KV transfer: the other ranks have separate pools, and no KV endpoint"
        raise ConfigError("tensor_parallel", degree, expected)


def fingerprint_of(spec: EngineSpec) -> Fingerprint:
    return Fingerprint(protocol=PROTOCOL, model=spec.model, engine=spec.weights_hash, shape=shape_of(spec))


def compare(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Raises ConfigError, with the first field that differs, unless blocks of `theirs` can be converted to `mine`."""
    for name in ("protocol", "model", "engine"):
        expected, seen = getattr(mine, name), getattr(theirs, name)
        if expected != seen:
            raise ConfigError(f"fingerprint.{name}", repr(seen), f"{expected!r}, as on the receiving worker")
    check_convertible(theirs.shape, mine.shape)


def encode_grant(grant: Grant) -> bytes:
    """The form in which routers forward a grant from the decode worker to the prefill worker."""
    return grant_to_proto(grant).SerializeToString()


def decode_grant(data: bytes) -> Grant:
    """Raises InvalidRequest on a grant that no decode worker makes."""
    try:
        message = transfer_pb2.Grant.FromString(data)
    except DecodeError as error:
        raise InvalidRequest("grant", f"{len(data)} bytes that do not parse", "an encoded Grant") from error
    return grant_from_proto(message)


def grant_to_proto(grant: Grant) -> transfer_pb2.Grant:
    return transfer_pb2.Grant(
        transfer_id=grant.key.transfer_id,
        attempt=grant.key.attempt,
        generation=grant.key.generation,
        endpoint=grant.endpoint,
        worker_id=grant.worker_id,
        incarnation=grant.incarnation,
        fingerprint=FINGERPRINT.encode(grant.fingerprint),
        extents=extents_from_blocks(grant.blocks),
        num_cached_blocks=grant.num_cached_blocks,
        num_blocks=len(grant.blocks),
        hash_seed=grant.hash_seed,
        rank_endpoints=grant.rank_endpoints,
    )


def grant_from_proto(message: transfer_pb2.Grant) -> Grant:
    """Raises InvalidRequest on a grant that no decode worker makes."""
    if not 1 <= len(message.transfer_id) <= MAX_TRANSFER_ID_CHARS:
        seen = f"{len(message.transfer_id)} characters"
        raise InvalidRequest("grant.transfer_id", seen, f"1 to {MAX_TRANSFER_ID_CHARS} characters")
    blocks = blocks_from_extents(message.extents)
    if len(blocks) != message.num_blocks:
        raise InvalidRequest("grant.extents", f"{len(blocks)} blocks", f"num_blocks = {message.num_blocks}")
    if len(message.rank_endpoints) >= MAX_RANKS:
        raise InvalidRequest("grant.rank_endpoints", len(message.rank_endpoints), f"fewer than {MAX_RANKS}")
    if any(not 1 <= len(one) <= MAX_ENDPOINT_CHARS for one in message.rank_endpoints):
        raise InvalidRequest("grant.rank_endpoints", "another length", f"1 to {MAX_ENDPOINT_CHARS} characters each")
    try:
        fingerprint = FINGERPRINT.decode(message.fingerprint)
    except ConfigError as error:
        raise InvalidRequest(f"grant.fingerprint.{error.field}", error.seen, error.expected) from error
    return Grant(
        key=TransferKey(transfer_id=message.transfer_id, attempt=message.attempt, generation=message.generation),
        endpoint=message.endpoint,
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        fingerprint=fingerprint,
        blocks=blocks,
        num_cached_blocks=message.num_cached_blocks,
        hash_seed=message.hash_seed,
        rank_endpoints=tuple(message.rank_endpoints),
    )
