"""Sealed objects of a shared store, and how fast a store reads them.

They are encrypted and authenticated (AES-256-GCM) under keys that follow from the cluster's secret.
Others may write to the store. The block's hash and what its bytes depend on are authenticated with each object: one
that was torn, damaged, made by others or moved to another name does not open.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any, Final

from pdserve.core.access.proof import ClusterSecret
from pdserve.engine.memory.object_stores.interface import FULL, ObjectStore
from pdserve.engine.memory.slow_tier import ReadSpeed

log = logging.getLogger(__name__)

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
PROBE_BYTES: Final = 8 * 2**20  # written and read to measure the store
START_S: Final = 20.0  # for that
SLOW_BYTES_S: Final = 50e6  # assumed of a store that is full, until it was read


class Seal:
    """Encrypts and authenticates blocks. Workers with the same secret and contents make the same names."""

    def __init__(self, secret: str, contents: bytes, block_bytes: int) -> None:
        """`contents` identifies everything that makes a block's bytes differ for equal hashes."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aes = AESGCM
        self._contents = contents + block_bytes.to_bytes(8, "little")
        keys = ClusterSecret(secret)
        self._key = keys.mac("kv store: contents", self._contents)
        self._name_key = keys.mac("kv store: names", self._contents)
        self.room = keys.mac("kv store: room", self._contents)[:16].hex()

    def name(self, block_hash: bytes) -> str:
        """Does not tell the hash, which follows from the text for the default tenant."""
        return blake2b(block_hash, digest_size=16, key=self._name_key).hexdigest()

    def close(self, block_hash: bytes, contents: Any) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        sealed: bytes = self._cipher(block_hash).encrypt(nonce, contents, self._contents)
        return nonce + sealed

    def open(self, block_hash: bytes, sealed: bytes) -> bytes | None:
        """None if it is not the block."""
        from cryptography.exceptions import InvalidTag

        nonce, rest = sealed[:NONCE_BYTES], memoryview(sealed)[NONCE_BYTES:]
        try:
            contents: bytes = self._cipher(block_hash).decrypt(nonce, rest, self._contents)
            return contents
        except (InvalidTag, ValueError):
            return None

    def _cipher(self, block_hash: bytes) -> Any:
        """A key for each block: so no number of blocks is too large for random nonces."""
        return self._aes(blake2b(block_hash, digest_size=32, key=self._key).digest())


# --- speed of a store -------------------------------------------------------------------------------------------


def measure(store: ObjectStore, seal: Seal, block_bytes: int, num_readers: int) -> tuple[ReadSpeed, float]:
    """How fast objects are read, and the seconds of a lookup. Raises OSError if the store does not work, and
    TimeoutError if it does not answer."""
    results: SimpleQueue[tuple[ReadSpeed, float] | Exception] = SimpleQueue()

    def run() -> None:
        try:
            results.put(_measured(store, seal, block_bytes, num_readers))
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, name="kv-store-start", daemon=True).start()  # a call may never return
    try:
        result = results.get(timeout=START_S)
    except Empty:
        raise TimeoutError(f"no answer within {START_S:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def _measured(store: ObjectStore, seal: Seal, block_bytes: int, num_readers: int) -> tuple[ReadSpeed, float]:
    count = max(1, min(4 * num_readers, PROBE_BYTES // block_bytes))
    hashes = [os.urandom(16) for _ in range(count)]
    names = [seal.name(one) for one in hashes]
    contents = os.urandom(block_bytes)
    try:
        is_full = False
        try:
            for at in range(0, count, store.most_got):
                batch = zip(names[at : at + store.most_got], hashes[at : at + store.most_got], strict=True)
                store.put([(name, seal.close(block_hash, contents)) for name, block_hash in batch])
        except OSError as error:
            if error.errno not in FULL:
                raise
            is_full = True  # the next writes make room
        lookups = []
        for _ in range(3):
            began_s = time.perf_counter()
            if store.num_found(names) != count and not is_full:
                raise OSError("what was written is not there")
            lookups.append(time.perf_counter() - began_s)
        if is_full:
            log.warning("the store of KV blocks is full, so reads of it were not measured")
            return ReadSpeed(SLOW_BYTES_S, sorted(lookups)[1]), sorted(lookups)[1]
        one_s, all_s = _read_s(store, seal, hashes[:1], 1), _read_s(store, seal, hashes, num_readers)
    finally:
        store.delete(names)
    fixed_s = min(one_s, sorted(lookups)[1])
    bytes_s = count * block_bytes / max(all_s - fixed_s, all_s / 4, 1e-6)
    return ReadSpeed(bytes_s, fixed_s), sorted(lookups)[1]


def _read_s(store: ObjectStore, seal: Seal, hashes: Sequence[bytes], num_readers: int) -> float:
    """Reads and verifies the objects by so many threads, as a fetch does."""
    most = max(1, min(store.most_got, -(-len(hashes) // num_readers)))
    parts = SimpleQueue[Sequence[bytes]]()
    for at in range(0, len(hashes), most):
        parts.put(hashes[at : at + most])
    wrong: list[str] = []

    def read() -> None:
        try:
            while True:
                part = parts.get_nowait()
                for block_hash, sealed in zip(part, store.get(list(map(seal.name, part))), strict=True):
                    if sealed is None or seal.open(block_hash, sealed) is None:
                        wrong.append("what was written is read differently")
        except Empty:
            return
        except OSError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=read, name="kv-store-start", daemon=True) for _ in range(num_readers)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise OSError(wrong[0])
    return time.perf_counter() - began_s
