import numpy as np
import pytest
import torch

from pdserve.engine.gpu.extent import GOLDEN, MIX, StridedExtent, checksum, part_extents
from tests.gpu.case_extents import CASES
from tests.gpu.cases import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_extents_are_copied_and_wrong_ones_detected(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound


def test_numpy_computes_the_checksum_on_the_host() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    index = np.arange(1, 1001, dtype=np.uint64)
    mixed = (words.astype(np.uint64) + index * np.uint64(GOLDEN)) * np.uint64(MIX)
    assert checksum(words.tobytes()) == int((mixed ^ (mixed >> np.uint64(32))).sum())


def test_changed_or_swapped_words_change_the_checksum() -> None:
    data = np.arange(64, dtype=np.uint32)
    whole = checksum(data.tobytes())
    for at in range(64):
        for bit in (0, 17, 31):
            changed = data.copy()
            changed[at] ^= np.uint32(1 << bit)
            assert checksum(changed.tobytes()) != whole
    swapped = data.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert checksum(swapped.tobytes()) != whole
    assert checksum(b"") == 0
    assert checksum(bytes(4)) != checksum(bytes(8))


def test_parts_are_runs_of_a_block() -> None:
    shape = {"num_layers": 4, "block_size": 16, "num_kv_heads": 2, "head_bytes": 32}
    layer = 2 * 16 * 2 * 32
    assert part_extents(**shape, scales_first=None, layers=range(1, 3), heads=range(2)) == (
        StridedExtent(layer, 2 * layer),
    )
    values, scales = part_extents(**shape, scales_first=4 * layer, layers=range(4), heads=range(1, 2))
    assert values == StridedExtent(32, 32, 4 * 32, 64)
    assert scales == StridedExtent(4 * layer + 4, 4, 4 * 32, 8)
    with pytest.raises(ValueError):
        part_extents(**shape, scales_first=None, layers=range(5), heads=range(2))
    with pytest.raises(ValueError):
        part_extents(**shape, scales_first=None, layers=range(0), heads=range(2))
