"""Conversions of worker messages on the router, in addition to pdserve/wire/protocol.py. No I/O."""

from __future__ import annotations

from typing import Final

from pdserve.v1 import worker_pb2
from pdserve.wire.codec import Codec
from pdserve.wire.protocol import COST, FINGERPRINT
from router import events

_CONNECTED: Final = Codec(
    events.WorkerConnected,
    worker_pb2.WorkerHello,
    nested=(COST,),
    given=("endpoint", "block_bytes"),
    ignored=("model", "fingerprint", "vocab_size", "eos_token_ids", "hash_seed", "reads_batches"),
)


def connected(hello: worker_pb2.WorkerHello, endpoint: str) -> events.WorkerConnected:
    """Raises InvalidRequest on an unknown role, ConfigError on an invalid shape."""
    fingerprint = FINGERPRINT.decode(hello.fingerprint)
    block_bytes = fingerprint.block_bytes * fingerprint.shape.tp_degree
    return _CONNECTED.decode(hello, endpoint=endpoint, block_bytes=block_bytes)
