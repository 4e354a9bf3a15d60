"""Validation of grants and of an engine's block shape where they are read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.protocol.grants import (
    MAX_ENDPOINT_CHARS,
    MAX_RANKS,
    PROTOCOL,
    check_movable,
    fingerprint_of,
    grant_from_proto,
    grant_to_proto,
)
from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.engine.interface import EngineSpec
from pdserve.v1 import transfer_pb2
from tests.unit.kvtransfer.harness import fingerprint, grant_of

SPEC = EngineSpec(
    model="m",
    weights_hash="w",
    dtype="float32",
    layout="block-major.v1",
    vocab_size=100,
    max_context_tokens=64,
    eos_token_ids=(1,),
    block_size=16,
    num_blocks=8,
    block_bytes=4096,
    kv_dtype="float32",
    kv_layers=4,
    kv_heads=2,
    kv_head_dim=4,
)


def told(**changes: object) -> transfer_pb2.Grant:
    message = grant_to_proto(replace(grant_of("t", 1, 5, (3, 4)), fingerprint=fingerprint()))
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def test_the_block_shape_follows_from_the_engine_spec() -> None:
    facts = fingerprint_of(SPEC)
    assert (facts.protocol, facts.model, facts.engine) == (PROTOCOL, "m", "w")
    assert facts.shape.block_bytes == SPEC.block_bytes
    assert (facts.shape.num_layers, facts.shape.num_kv_heads, facts.shape.head_dim) == (4, 2, 4)


def test_a_single_rank_pool_cannot_be_transferred() -> None:
    check_movable(1)
    check_movable(4, 4)
    with pytest.raises(ConfigError, match="tensor_parallel: got 2, expected 1 for KV transfer"):
        check_movable(2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"transfer_id": ""}, "grant.transfer_id"),
        ({"transfer_id": "x" * 257}, "grant.transfer_id"),
        ({"num_blocks": 3}, "grant.extents"),
        ({"rank_endpoints": ["h:1"] * MAX_RANKS}, "grant.rank_endpoints"),
        ({"rank_endpoints": ["h" * (MAX_ENDPOINT_CHARS + 1)]}, "grant.rank_endpoints"),
        ({"rank_endpoints": [""]}, "grant.rank_endpoints"),
    ],
)
def test_an_invalid_grant_names_its_field(changes: dict[str, object], field: str) -> None:
    assert grant_from_proto(told()).blocks == (3, 4)
    with pytest.raises(InvalidRequest) as refused:
        grant_from_proto(told(**changes))
    assert refused.value.field == field


def test_a_grant_with_an_invalid_shape_names_the_field() -> None:
    message = told()
    message.fingerprint.shape.dtype = "float3"
    with pytest.raises(InvalidRequest) as refused:
        grant_from_proto(message)
    assert refused.value.field.startswith("grant.fingerprint.kv_shape.")
