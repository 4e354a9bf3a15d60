"""The block hash chain."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from pdserve.core.kv.hashing import block_hashes, chain_key, extend_hashes, hash_seed, tail_hash

KEY = chain_key(b"tenant", hash_seed("weights", "float32", "v1", 4))


def test_a_hash_is_keyed_blake2b_over_parent_and_little_endian_token_ids() -> None:
    first = blake2b(bytes(16) + bytes([1, 0, 0, 0, 2, 0, 0, 0]), digest_size=16, key=KEY).digest()
    second = blake2b(first + bytes([3, 0, 0, 0, 0, 1, 0, 0]), digest_size=16, key=KEY).digest()
    assert block_hashes([1, 2, 3, 256], 2, KEY) == [first, second]


def test_a_partial_block_has_no_hash() -> None:
    assert block_hashes([1, 2, 3], 4, KEY) == []
    assert block_hashes([], 4, KEY) == []
    assert len(block_hashes(range(9), 4, KEY)) == 2


def test_hashes_differ_after_the_first_difference() -> None:
    left, right = block_hashes([0, 1, 2, 3, 4, 5], 2, KEY), block_hashes([0, 1, 9, 3, 4, 5], 2, KEY)
    assert left[0] == right[0]
    assert not set(left[1:]) & set(right[1:])


def test_tenants_and_models_do_not_share_hashes() -> None:
    seed = hash_seed("weights", "float32", "v1", 4)
    keys = [
        chain_key(b"a", seed),
        chain_key(b"b", seed),
        chain_key(b"", seed),
        chain_key(b"a", hash_seed("other", "float32", "v1", 4)),
        chain_key(b"a", hash_seed("weights", "bfloat16", "v1", 4)),
        chain_key(b"a", hash_seed("weights", "float32", "int8.v1", 4)),
        chain_key(b"a", hash_seed("weights", "float32", "v1", 8)),
    ]
    assert len({block_hashes([1, 2, 3, 4], 4, key)[0] for key in keys}) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_extending_a_chain_equals_hashing_it_whole() -> None:
    tokens = list(range(23))
    whole = block_hashes(tokens, 4, KEY)
    for known in range(len(whole) + 1):
        assert extend_hashes(whole[:known], tokens, 4, KEY) == whole


def test_a_token_id_that_is_not_an_unsigned_32_bit_integer_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_hashes([-1], 1, KEY)


def test_a_partly_filled_block_has_a_different_hash() -> None:
    key, tokens = chain_key(b"", bytes(32)), list(range(8))
    hashes = block_hashes(tokens, 4, key)
    assert tail_hash(hashes, tokens, 4, key) is None
    names = {tail_hash(hashes[: size // 4], tokens[:size], 4, key) for size in (1, 2, 3, 5, 6, 7)}
    assert len(names | set(hashes)) == 8
    assert tail_hash(hashes[:1], tokens[:6], 4, key) != tail_hash(hashes[:1], [*tokens[:5], 9], 4, key)
    assert tail_hash(hashes[:1], tokens[:6], 4, key) != tail_hash(hashes[1:], tokens[:6], 4, key)
    assert tail_hash(hashes[:1], tokens[:6], 4, key) != tail_hash(hashes[:1], tokens[:6], 4, chain_key(b"x", bytes(32)))
