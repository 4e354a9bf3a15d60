"""Between the generated messages and the words of kvtransfer.transport: grants and fingerprints. No I/O."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from kvtransfer.transport import Fingerprint, Grant, TransferKey
from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.engine.interface import EngineSpec
from pdserve.v1 import transfer_pb2
from pdserve.wire.convert import blocks_from_extents, extents_from_blocks

PROTOCOL: Final = 1  # of the transfer; raised when frames or checksums change their meaning
MAX_TRANSFER_ID_CHARS: Final = 256


def fingerprint_of(spec: EngineSpec) -> Fingerprint:
    return Fingerprint(
        protocol=PROTOCOL,
        model=spec.model,
        dtype=spec.dtype,
        layout=spec.layout,
        block_size=spec.block_size,
        block_bytes=spec.block_bytes,
        engine=spec.weights_hash,
    )


def fingerprint_to_proto(fingerprint: Fingerprint) -> transfer_pb2.Fingerprint:
    return transfer_pb2.Fingerprint(
        protocol=fingerprint.protocol,
        model=fingerprint.model,
        dtype=fingerprint.dtype,
        layout=fingerprint.layout,
        block_size=fingerprint.block_size,
        block_bytes=fingerprint.block_bytes,
        engine=fingerprint.engine,
    )


def fingerprint_from_proto(message: transfer_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        protocol=message.protocol,
        model=message.model,
        dtype=message.dtype,
        layout=message.layout,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
        engine=message.engine,
    )


def compare(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Raises ConfigError naming the first field that differs, with both values."""
    for one in fields(Fingerprint):
        expected, seen = getattr(mine, one.name), getattr(theirs, one.name)
        if expected != seen:
            raise ConfigError(f"fingerprint.{one.name}", repr(seen), f"{expected!r}, as on the receiving worker")


def grant_to_proto(grant: Grant) -> transfer_pb2.Grant:
    return transfer_pb2.Grant(
        transfer_id=grant.key.transfer_id,
        attempt=grant.key.attempt,
        generation=grant.key.generation,
        endpoint=grant.endpoint,
        worker_id=grant.worker_id,
        incarnation=grant.incarnation,
        fingerprint=fingerprint_to_proto(grant.fingerprint),
        extents=extents_from_blocks(grant.blocks),
        held_blocks=grant.held_blocks,
        num_blocks=len(grant.blocks),
    )


def grant_from_proto(message: transfer_pb2.Grant) -> Grant:
    """Raises InvalidRequest on what no decode worker grants."""
    if not 1 <= len(message.transfer_id) <= MAX_TRANSFER_ID_CHARS:
        seen = f"{len(message.transfer_id)} characters"
        raise InvalidRequest("grant.transfer_id", seen, f"1 to {MAX_TRANSFER_ID_CHARS} characters")
    blocks = blocks_from_extents(message.extents)
    if len(blocks) != message.num_blocks:
        raise InvalidRequest("grant.extents", f"{len(blocks)} blocks", f"num_blocks = {message.num_blocks}")
    return Grant(
        key=TransferKey(transfer_id=message.transfer_id, attempt=message.attempt, generation=message.generation),
        endpoint=message.endpoint,
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        fingerprint=fingerprint_from_proto(message.fingerprint),
        blocks=blocks,
        held_blocks=message.held_blocks,
    )
