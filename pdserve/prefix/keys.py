"""The Redis schema: names and encodings of all keys. Pure.

Per model of a cluster, under the tag {kv:<cluster>:<fingerprint>} (one hash slot of a Redis Cluster):

    <tag>:b:<hash>     bitmap over slots that hold this block; expires, as a backstop
    <tag>:w:<slot>     owner (worker id, incarnation) that the slot is leased to; expires when it falls silent
    <tag>:r:<slot>     set of the hashes whose bit is set for the slot, so that clearing is O(blocks)
    <tag>:q:<slot>     sequence number of the last applied batch
    <tag>:slots        hash: slot -> owner, until its sweep has finished
    <tag>:owners       hash: worker id -> slot
    <tag>:dead         hash: slot -> when it was first seen dead (ms, the server's clock; 0: released)
    <tag>:free         set of swept slots
    <tag>:next         number of slots ever assigned
    <tag>:epoch        grows with every change of <tag>:slots
    <tag>:sweeper      lock of the sweeping worker

and per cluster, under {pd:<cluster>}, <tag>:workers (set of ids) and <tag>:worker:<id> (facts, with a lease).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import ConfigError

MAX_SLOTS: Final = 4096
MAX_WORKERS: Final = 4096
MAX_FACTS_BYTES: Final = 4096

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


def fingerprint_of(hash_seed: bytes) -> str:
    """A short name for a hash seed (WorkerHello.hash_seed), which differs if the KV of two engines differs."""
    return hash_seed[:16].hex()


def index_tag(cluster: str, fingerprint: str) -> str:
    return f"{{kv:{checked_name('cluster', cluster)}:{checked_name('fingerprint', fingerprint)}}}"


def registry_tag(cluster: str) -> str:
    return f"{{pd:{checked_name('cluster', cluster)}}}"


def checked_name(field: str, name: str) -> str:
    """`name`, checked to contain no character that would end a key's tag. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(field, repr(name), "1 to 128 letters, digits, dots, dashes or underscores")
    return name


def owner_of(worker_id: str, incarnation: str) -> str:
    return f"{worker_id}\n{incarnation}"


def worker_of(owner: bytes) -> str:
    return owner.partition(b"\n")[0].decode("utf-8", "replace")


def bit_offset(slot: int) -> int:
    """The SETBIT offset of a slot, such that the value read as little-endian bytes has bit `slot` set.

    Redis counts bits from the most significant of each byte.
    """
    return (slot & ~7) | (7 - (slot & 7))


def slots_bits(value: bytes | None) -> int:
    """One bit per slot of a block's bitmap; 0 for an absent key."""
    return int.from_bytes(value, "little") if value else 0


def fetched(reply: bytes) -> list[bytes]:
    """The values that scripts.FETCH packed."""
    values, at, end = [], 0, len(reply)
    while at < end:
        begin = at + 2
        at = begin + (reply[begin - 2] << 8 | reply[begin - 1])
        values.append(reply[begin:at])
    return values


def bitmap(slots: Iterable[int]) -> int:
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits
