import pytest

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.fixed_shapes import CountSlots


def test_a_growing_sequence_keeps_its_slot() -> None:
    slots, one, other = CountSlots(4), [1, 2], [1, 2]
    assert slots.take([(one, 2), (other, 2)]) == [(0, False), (1, False)]
    assert slots.take([(other, 3), (one, 3)]) == [(1, True), (0, True)]
    assert slots.take([(one, 4)]) == [(0, True)]


def test_a_skipped_or_shortened_sequence_is_filled_again() -> None:
    slots, one = CountSlots(2), [1]
    slots.take([(one, 1)])
    assert slots.take([(one, 3)]) == [(0, False)]
    assert slots.take([(one, 3)]) == [(0, False)], "its last step was given up"
    assert slots.take([(one, 4)]) == [(0, True)]


def test_slots_are_reused_but_not_those_of_the_last_step() -> None:
    slots = CountSlots(2)
    lists = [[token] for token in range(6)]
    assert slots.take([(lists[0], 1)]) == [(0, False)]
    assert slots.take([(lists[1], 1)]) == [(1, False)]
    assert slots.take([(lists[2], 1)]) == [(0, False)]
    assert slots.take([(lists[2], 2)]) == [(0, True)]
    assert slots.take([(lists[0], 2)]) == [(1, False)], "a list that comes back is a new one"
    with pytest.raises(InternalError, match="more rows than the 2 slots"):
        slots.take([(lists[3], 1), (lists[4], 1)])
    with pytest.raises(InternalError, match="share a list"):
        CountSlots(4).take([(lists[0], 1), (lists[0], 1)])
