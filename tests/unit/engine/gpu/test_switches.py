"""Switches of the GPU engine are read from one variable, and an unknown one is an error."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError
from pdserve.engine.gpu.switches import GpuSwitches, gpu_switches


def test_switches_come_from_one_variable() -> None:
    assert gpu_switches({}) == GpuSwitches()
    found = gpu_switches({"PDSERVE_GPU": "merge=fused, products=split-k,"})
    assert found == GpuSwitches(merge="fused", products="split-k")


@pytest.mark.parametrize("text", ["merge", "merge=", "merge=both", "speed=high", "=on"])
def test_an_unknown_switch_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PDSERVE_GPU.*one of"):
        gpu_switches({"PDSERVE_GPU": text})
