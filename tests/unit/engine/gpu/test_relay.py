"""Relayed blocks arrive, other blocks stay unchanged, and checksums follow the rule."""

from __future__ import annotations

import pytest
import torch

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.kv import relay
from tests.gpu.case_relay import CASES
from tests.gpu.cases import Case


def numbers(*blocks: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_relayed_blocks_arrive_with_checksums(case: Case, device: torch.device) -> None:
    assert case.check(device) == 0.0


def test_relay_of_no_blocks_and_wrong_sizes(device: torch.device) -> None:
    source = torch.zeros((2, 64), dtype=torch.uint8, device=device)
    assert relay(source, numbers(device=device)).shape == (0,)
    with pytest.raises(InternalError, match="64 bytes"):
        relay(source, numbers(0, device=device), torch.zeros((2, 32), dtype=torch.uint8), numbers(0, device=device))
