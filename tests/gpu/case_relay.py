"""Checks of relay (kv.py), which every transfer between GPUs uses: copied blocks, unchanged other blocks, checksums."""

from __future__ import annotations

import torch

from pdserve.engine.gpu.kernels.extent import checksum
from pdserve.engine.gpu.kernels.kv import relay
from tests.gpu.cases import Case, Launch


def _case(name: str, block_bytes: int) -> Case:
    def check(device: torch.device) -> float:
        """The numbers of wrong blocks and of wrong checksums."""
        generator = torch.Generator().manual_seed(5)
        source, target = (
            torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, generator=generator) for count in (6, 5)
        )
        pairs = {0: 4, 3: 1, 2: 5}  # target block: source block
        expected = target.clone()
        for into, of in pairs.items():
            expected[into] = source[of]
        there, here = source.to(device), target.to(device, copy=True)
        of_B, into_B = (torch.tensor(list(x), dtype=torch.int32).to(device) for x in (pairs.values(), pairs))
        sums = relay(there, of_B, here, into_B)
        alone = relay(there, of_B)
        right = [checksum(bytes(source[of].numpy())) for of in pairs.values()]
        wrong = sum(not torch.equal(a, b) for a, b in zip(here.cpu(), expected, strict=True))
        for ours in (sums, alone):
            wrong += sum(one % 2**64 != other for one, other in zip(ours.tolist(), right, strict=True))
        return float(wrong)

    return Case(f"relay {name}", check, 0.0)


def _part(block_bytes: int, first: int, part_bytes: int) -> Case:
    """Copies a part of each block: to the same place in other blocks, into blocks of the part's size, and back."""

    def check(device: torch.device) -> float:
        generator = torch.Generator().manual_seed(6)
        source, target = (
            torch.randint(0, 256, (5, block_bytes), dtype=torch.uint8, generator=generator) for _ in range(2)
        )
        numbers, inside = torch.tensor([4, 1], dtype=torch.int32), slice(first, first + part_bytes)
        expected, dense = target.clone(), torch.zeros((2, part_bytes), dtype=torch.uint8)
        expected[[4, 1], inside] = source[[1, 4], inside]
        there, here, packed = source.to(device), target.to(device, copy=True), dense.to(device, copy=True)
        back, places = target.to(device, copy=True), torch.arange(2, dtype=torch.int32).to(device)
        of_B, into_B = numbers.flip(0).contiguous().to(device), numbers.to(device)
        sums = [
            relay(there[:, inside], of_B, here[:, inside], into_B),
            relay(there[:, inside], of_B, packed, places),
            relay(packed, places, back[:, inside], into_B),
            relay(there[:, inside], of_B),
        ]
        right = [checksum(bytes(source[of, inside].numpy())) for of in (1, 4)]
        wrong = sum(not torch.equal(one.cpu(), expected) for one in (here, back))
        wrong += sum([one % 2**64 for one in each.tolist()] != right for each in sums)
        return float(wrong)

    return Case(f"relay {part_bytes} bytes of a block", check, 0.0)


CASES = [
    _case("one program a block", 64),
    _case("several programs a block", 5000 * 4),
    _part(1024, 256, 128),
    _part(6 * 5000 * 4, 2 * 5000 * 4, 5000 * 4),
    _part(96, 12, 36),
]


def _launch(name: str, *, is_copy: bool) -> Launch:
    num_blocks, block_bytes = 32, 2 * 2**20  # a chunk of Llama-3.1-8B's blocks of 16 tokens

    def make(device: torch.device):  # type: ignore[no-untyped-def]
        source = torch.zeros(2 * num_blocks, block_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        block_B = torch.arange(num_blocks, dtype=torch.int32, device=device) * 2
        into = (target, block_B) if is_copy else ()
        return (
            lambda: relay(source, block_B, *into),
            (lambda: target[:num_blocks].copy_(source[:num_blocks])) if is_copy else None,
        )

    return Launch(f"relay {name} 32 blocks", make, (1 + is_copy) * num_blocks * block_bytes)


LAUNCHES = [_launch("copy", is_copy=True), _launch("sums", is_copy=False)]
