"""Blocks that are relayed arrive, the others stay, and the sums are those of the rule."""

from __future__ import annotations

import pytest
import torch

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.extent import checksum
from pdserve.engine.gpu.relay import relay


def numbers(*blocks: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=device)


@pytest.mark.parametrize("block_bytes", [64, 5000 * 4])
def test_blocks_arrive_with_their_sums_and_nothing_else_changes(block_bytes: int, device: torch.device) -> None:
    torch.manual_seed(1)
    source = torch.randint(0, 256, (6, block_bytes), dtype=torch.uint8, device=device)
    target = torch.randint(0, 256, (5, block_bytes), dtype=torch.uint8, device=device)
    before = target.clone()
    sums = relay(source, numbers(4, 1, 5, device=device), target, numbers(0, 3, 2, device=device))
    for index, (there, here) in enumerate(((4, 0), (1, 3), (5, 2))):
        assert torch.equal(target[here], source[there])
        expected = checksum(bytes(source[there].cpu().numpy()))
        assert int(sums[index]) % 2**64 == expected
    assert torch.equal(target[1], before[1])
    assert torch.equal(target[4], before[4])
    assert torch.equal(relay(source, numbers(4, 1, 5, device=device)), sums)


def test_no_blocks_and_blocks_that_do_not_fit(device: torch.device) -> None:
    source = torch.zeros((2, 64), dtype=torch.uint8, device=device)
    assert relay(source, numbers(device=device)).shape == (0,)
    with pytest.raises(InternalError, match="64 bytes"):
        relay(source, numbers(0, device=device), torch.zeros((2, 32), dtype=torch.uint8), numbers(0, device=device))
