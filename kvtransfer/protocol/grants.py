"""Converts grants and fingerprints between the generated messages and kvtransfer.protocol.transport. No I/O."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.kv.kv_shape import Fingerprint, Grant, KvShape, TransferKey, check_convertible
from pdserve.engine.interface import EngineSpec
from pdserve.v1 import transfer_pb2
from pdserve.wire.codec import Codec, Special
from pdserve.wire.convert import blocks_from_extents, extents_from_blocks
from pdserve.wire.protocol import FINGERPRINT

PROTOCOL: Final = 2  # version of the transfer protocol; incremented when frames, stamps or checksums change
MAX_TRANSFER_ID_CHARS: Final = 256
MAX_RANKS: Final = 64  # of one worker
MAX_ENDPOINT_CHARS: Final = 256
_GRANT: Final = Codec(
    Grant,
    transfer_pb2.Grant,
    nested=(FINGERPRINT,),
    special={"blocks": Special(extents_from_blocks, blocks_from_extents)},
    renamed={"blocks": "extents"},
    given=("key",),
    ignored=("transfer_id", "attempt", "generation", "num_blocks"),
)


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
    """Raises ConfigError unless the pools of the `num_ranks` ranks together contain whole blocks."""
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
    """Raises InvalidRequest on an invalid grant."""
    try:
        message = transfer_pb2.Grant.FromString(data)
    except DecodeError as error:
        raise InvalidRequest("grant", f"{len(data)} bytes that do not parse", "an encoded Grant") from error
    return grant_from_proto(message)


def grant_to_proto(grant: Grant) -> transfer_pb2.Grant:
    message = _GRANT.encode(grant)
    key = grant.key
    message.transfer_id, message.attempt, message.generation = key.transfer_id, key.attempt, key.generation
    message.num_blocks = len(grant.blocks)
    return message


def grant_from_proto(message: transfer_pb2.Grant) -> Grant:
    """Raises InvalidRequest on a grant that no decode worker makes."""
    if not 1 <= len(message.transfer_id) <= MAX_TRANSFER_ID_CHARS:
        seen = f"{len(message.transfer_id)} characters"
        raise InvalidRequest("grant.transfer_id", seen, f"1 to {MAX_TRANSFER_ID_CHARS} characters")
    if len(message.rank_endpoints) >= MAX_RANKS:
        raise InvalidRequest("grant.rank_endpoints", len(message.rank_endpoints), f"fewer than {MAX_RANKS}")
    if any(not 1 <= len(one) <= MAX_ENDPOINT_CHARS for one in message.rank_endpoints):
        raise InvalidRequest("grant.rank_endpoints", "another length", f"1 to {MAX_ENDPOINT_CHARS} characters each")
    key = TransferKey(transfer_id=message.transfer_id, attempt=message.attempt, generation=message.generation)
    try:
        grant = _GRANT.decode(message, key=key)
    except ConfigError as error:
        raise InvalidRequest(f"grant.fingerprint.{error.field}", error.seen, error.expected) from error
    if len(grant.blocks) != message.num_blocks:
        raise InvalidRequest("grant.extents", f"{len(grant.blocks)} blocks", f"num_blocks = {message.num_blocks}")
    return grant
