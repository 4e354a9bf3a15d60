"""Messages of the model: the tables' own actions, and chunks with extra fields that only the invariants read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvtransfer.protocol.frames import Tag
from pdserve.core.kv.kv_shape import Grant, TransferKey
from tests.unit.kvtransfer.harness import fingerprint

BLOCK_BYTES: Final = 1
FACTS: Final = fingerprint(64)

Content = Any  # Contents of a block: (transfer, grant index) once it is computed, JUNK or TORN otherwise.
JUNK: Final = "junk"
TORN: Final = "torn"
WRONG: Final = "wrong"


class Chunk(NamedTuple):
    """Blocks first .. first + count - 1 of a grant."""

    tag: Tag
    first: int
    stamps: bytes
    payload: tuple[Content, ...]  # Contents on the wire.
    checksum: tuple[Content, ...]  # Contents when the checksum was computed.
    is_last: bool
    origin: int  # For invariants only: the transfer for which the bytes were read.


FAULTS: Final = frozenset(
    ("restart", "abort", "cut", "thread ends", "duplicates", "corrupts", "repeats the answer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The bounds of an exploration. `faults` is the number of faults that one history may have."""

    blocks: int = 2  # Blocks of each transfer.
    source_blocks: int = 2  # Blocks of the prefill worker's pool.
    # Blocks of the decode worker's pool. If a transfer has as many, the next transfer gets the same blocks.
    target_blocks: int = 2
    transfers: int = 2
    slices: int = 1  # Number of writes of a chunk: 1 from shared memory, more from a socket.
    faults: int = 2
    kinds: frozenset[str] = FAULTS  # Kinds of faults.
    deadline_s: float | None = 10.0
    has_clock: bool = True  # False: no time passes.
    grace_s: float = 1.0


def grant_of(transfer: int, incarnation: int, blocks: tuple[int, ...]) -> Grant:
    """The worst case for the checks: two grants of one worker process differ only in their generation."""
    return Grant(
        key=TransferKey(transfer_id=f"d.{incarnation}", attempt=1, generation=transfer),
        endpoint="d",
        worker_id="d",
        incarnation=str(incarnation),
        fingerprint=FACTS,
        blocks=blocks,
        num_cached_blocks=0,
    )


def content_hash_of(transfer: int, index: int) -> int:
    """The content hash of the prompt's block with that number."""
    return 16 * transfer + index + 1
