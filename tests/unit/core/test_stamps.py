"""Block stamps: a reassigned block has a new epoch and no content hash."""

from pdserve.core.kv.stamps import UNMARKED, BlockStamps, content_hash64


def test_reassignment_clears_the_hash() -> None:
    stamps = BlockStamps(4)
    stamps.begin([1, 2])
    stamps.mark(1, content_hash64(b"\x05" + bytes(15)))
    before = stamps.epochs([0, 1, 2])
    assert stamps.content_hashes([0, 1, 2]) == (UNMARKED, 5, UNMARKED)
    stamps.begin([1])
    assert stamps.content_hash(1) == UNMARKED
    assert stamps.epoch(1) == before[1] + 1
    assert stamps.epochs([0, 2]) == (before[0], before[2])


def test_no_hash_equals_unmarked() -> None:
    assert content_hash64(bytes(16)) != UNMARKED
    assert content_hash64(bytes(8) + b"\xff" * 8) != UNMARKED
    assert content_hash64(b"\xff" * 16) == 2**64 - 1
