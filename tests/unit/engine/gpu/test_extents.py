import numpy as np

from pdserve.engine.gpu.kernels.extent import GOLDEN, MIX, checksum


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
