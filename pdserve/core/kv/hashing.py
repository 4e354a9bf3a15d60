"""Identity of KV blocks: a chain of keyed BLAKE2b-128 over (parent, token ids). Pure.

Two blocks have the same hash if they contain the KV of the same tokens after the same prefix, with the same tenant salt
and the same model. Only the server knows the key, so one tenant cannot probe another's prefixes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

HASH_BYTES: Final = 16
KEY_BYTES: Final = 32
_ROOT: Final = bytes(HASH_BYTES)  # parent of the first block
_UINT32: Final = "I"
if array(_UINT32).itemsize != 4:  # pragma: no cover - true on no supported platform
    raise ImportError("array('I') does not have items of 4 bytes on this platform")


def hash_seed(model_hash: str, dtype: str, layout: str, block_size: int) -> bytes:
    """Identifies everything that makes KV differ for equal tokens: 32 bytes for `chain_key`."""
    return blake2b(
        f"{model_hash}\n{dtype}\n{layout}\n{block_size}".encode(), digest_size=KEY_BYTES, person=b"pdserve.seed"
    ).digest()


def chain_key(salt: bytes, hash_seed: bytes) -> bytes:
    """Key of one tenant's chain on one model: 32 bytes. The default tenant has an empty salt."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"pdserve.chain")
    digest.update(len(salt).to_bytes(8, "little"))  # makes (salt, seed) unambiguous
    digest.update(salt)
    digest.update(hash_seed)
    return digest.digest()


def block_hashes(token_ids: Sequence[int], block_size: int, key: bytes) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, 16 bytes each. A partial last block has none."""
    return extend_hashes([], token_ids, block_size, key)


def extend_hashes(known: list[bytes], token_ids: Sequence[int], block_size: int, key: bytes) -> list[bytes]:
    """`known` (the hashes of the first blocks of `token_ids`), followed by the hashes of the further full blocks."""
    first, full = len(known), len(token_ids) // block_size
    if full <= first:
        return known[:full]
    data = _packed(token_ids[first * block_size : full * block_size])
    hashes = list(known)
    parent = known[-1] if known else _ROOT
    width = 4 * block_size
    keyed = blake2b(digest_size=HASH_BYTES, key=key)  # a copy costs less than another one
    for at in range(0, len(data), width):
        digest = keyed.copy()
        digest.update(parent + data[at : at + width])
        parent = digest.digest()
        hashes.append(parent)
    return hashes


def tail_hash(hashes: Sequence[bytes], token_ids: Sequence[int], block_size: int, key: bytes) -> bytes | None:
    """Hash of the last, partly filled block; None if there is none. `hashes` are those of the full blocks before it.

    The hashed text is shorter than that of a full block, so the two cannot collide.
    """
    full = len(token_ids) // block_size
    if full * block_size == len(token_ids):
        return None
    digest = blake2b(hashes[full - 1] if full else _ROOT, digest_size=HASH_BYTES, key=key)
    digest.update(_packed(token_ids[full * block_size :]))
    return digest.digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    packed = array(_UINT32, token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()
