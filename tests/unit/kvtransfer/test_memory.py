"""Views into a pool's memory never reach past their blocks."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.plan import advance, copy, views_of

BLOCK_BYTES = 4
MEMORY = bytes(range(20))  # Five blocks.


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), []),
        ((1,), [(4, 8)]),
        ((0, 1, 2), [(0, 12)]),
        ((4, 0, 1), [(16, 20), (0, 8)]),
    ],
)
def test_consecutive_blocks_are_one_view(blocks: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    views = views_of(memoryview(MEMORY), blocks, BLOCK_BYTES)
    assert [bytes(view) for view in views] == [MEMORY[begin:end] for begin, end in expected]


@pytest.mark.parametrize("blocks", [(5,), (0, 5), (-1,), (-1, 0), (10**6,)])
def test_a_block_outside_the_memory_is_an_error(blocks: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match=f"blocks {min(blocks)}..{max(blocks)} of a pool of 5"):
        views_of(memoryview(MEMORY), blocks, BLOCK_BYTES)


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 5, 12])
def test_views_are_consumed_byte_by_byte(num_bytes: int) -> None:
    views = views_of(memoryview(MEMORY), (2, 0, 4), BLOCK_BYTES)
    whole = b"".join(views)
    advance(views, num_bytes)
    assert b"".join(views) == whole[num_bytes:]


def test_bytes_are_copied_across_views_of_other_lengths() -> None:
    to = bytearray(20)
    copy(views_of(memoryview(to), (3, 1, 2), BLOCK_BYTES), views_of(memoryview(MEMORY), (0, 1, 4), BLOCK_BYTES))
    expected = bytearray(20)
    expected[12:16], expected[4:8], expected[8:12] = MEMORY[0:4], MEMORY[4:8], MEMORY[16:20]
    assert to == expected
