"""Block stamps: a life begins unmarked and is told from the one before it."""

from pdserve.core.stamps import UNMARKED, BlockStamps, chain64


def test_a_new_life_forgets_the_old_name() -> None:
    stamps = BlockStamps(4)
    stamps.begin([1, 2])
    stamps.mark(1, chain64(b"\x05" + bytes(15)))
    before = stamps.lives([0, 1, 2])
    assert stamps.chains([0, 1, 2]) == (UNMARKED, 5, UNMARKED)
    stamps.begin([1])
    assert stamps.chain(1) == UNMARKED
    assert stamps.life(1) == before[1] + 1
    assert stamps.lives([0, 2]) == (before[0], before[2])


def test_a_name_is_never_the_missing_one() -> None:
    assert chain64(bytes(16)) != UNMARKED
    assert chain64(bytes(8) + b"\xff" * 8) != UNMARKED
    assert chain64(b"\xff" * 16) == 2**64 - 1
