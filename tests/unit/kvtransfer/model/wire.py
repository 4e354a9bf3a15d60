"""Messages of the model: the tables' own actions, and chunks with extra fields that only the invariants read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvtransfer.frames import Tag
from pdserve.core.grant import Grant, TransferKey
from tests.unit.kvtransfer.harness import fingerprint

BLOCK_BYTES: Final = 1
FACTS: Final = fingerprint(64)

Content = Any  # of a block: (transfer, grant index) once it is computed, JUNK or TORN otherwise
JUNK: Final = "junk"
TORN: Final = "torn"
WRONG: Final = "wrong"


class Chunk(NamedTuple):
    """Blocks first .. first + count - 1 of a grant."""

    tag: Tag
    first: int
    stamps: bytes
    payload: tuple[Content, ...]  # as it is on the wire
    checksum: tuple[Content, ...]  # as it was when the checksum was taken
    is_last: bool
    origin: int  # ghost: the transfer that it was read for


FAULTS: Final = frozenset(
    ("restart", "abort", "cut", "thread ends", "duplicates", "corrupts", "repeats the answer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is explored. `faults` is how many faults one history may have."""

    blocks: int = 2  # of each transfer
    source_blocks: int = 2  # of the prefill worker's pool
    target_blocks: int = 2  # of the decode worker's; as many as a transfer has: the next one lands on the same
    transfers: int = 2
    slices: int = 1  # in how many writes a chunk reaches memory: 1 from shared memory, more from a socket
    faults: int = 2
    kinds: frozenset[str] = FAULTS  # of faults
    deadline_s: float | None = 10.0
    has_clock: bool = True  # False: no time passes
    grace_s: float = 1.0


def grant_of(transfer: int, incarnation: int, blocks: tuple[int, ...]) -> Grant:
    """The worst case for the fence: two grants in one worker's life differ in their generation and nothing else."""
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
    """The name of what the prompt's block with that number holds."""
    return 16 * transfer + index + 1
