"""A short storm; `python -m benchmarks.transfer --storm N` runs a long one."""

from __future__ import annotations

import pytest

from benchmarks.transfer_storm import Fault, Storm


@pytest.mark.parametrize("seed", [1, 2])
def test_no_byte_is_wrong_and_no_block_is_lost_in_a_storm_of_faults(transport: str, seed: int) -> None:
    result = Storm(transport, seed).run(300)
    assert result.wrong == []
    assert result.outcomes.total() == 300
    assert result.outcomes["verified"] >= 60
    assert set(result.faults) == {fault.value for fault in Fault}
