"""A short storm; `python -m benchmarks.transfer --storm N` runs a long one."""

from __future__ import annotations

import os

import pytest

from benchmarks.transfer_storm import Fault, Storm


@pytest.mark.parametrize("seed", [1, 2])
def test_no_byte_is_wrong_and_no_block_is_lost_in_a_storm_of_faults(transport: str, seed: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    result = Storm(transport, seed).run(300)
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "descriptors leak"  # gRPC keeps a few of its own
    assert result.wrong == []
    assert result.outcomes.total() == 300
    assert result.outcomes["verified"] >= 60
    assert set(result.faults) == {fault.value for fault in Fault}
