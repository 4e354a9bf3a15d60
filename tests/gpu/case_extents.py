"""Checks of extents.py: bytes arrive at their places and nowhere else, and wrong blocks are detected."""

from __future__ import annotations

import torch

from pdserve.engine.gpu.extent import StridedExtent, checksum, part_extents
from pdserve.engine.gpu.extents import HEADER_WORDS, WRONG_CHECKSUM, WRONG_STAMP, gather, scatter
from pdserve.engine.pool import BlockShape, TorchPool
from tests.gpu.cases import Case, Launch

_SHAPE = BlockShape(num_layers=3, block_size=8, num_kv_heads=4, head_dim=8, dtype=torch.int8)
_BLOCKS = [5, 0, 3]
_INTO = [1, 4, 2]
_MANY = 2**62


def _extents(layers: range, heads: range) -> tuple[StridedExtent, ...]:
    return part_extents(
        num_layers=_SHAPE.num_layers,
        block_size=_SHAPE.block_size,
        num_kv_heads=_SHAPE.num_kv_heads,
        head_bytes=_SHAPE.head_dim,
        scales_first=_SHAPE.data_bytes,
        layers=layers,
        heads=heads,
    )


def _wrongs(device: torch.device, extents: tuple[StridedExtent, ...], layers: range, heads: range) -> int:
    """The number of errors that were found."""
    generator = torch.Generator().manual_seed(0)
    source, target = (TorchPool(num_blocks=6, shape=_SHAPE, device=device) for _ in range(2))
    raw = torch.randint(0, 256, (6, _SHAPE.block_bytes), generator=generator, dtype=torch.uint8)
    source.raw.copy_(raw)
    stamp_B2 = torch.tensor([[_MANY, 7], [-3, 7], [1, 7 | (1 << 32)]], device=device)
    from_B, into_B = (torch.tensor(blocks, dtype=torch.int32, device=device) for blocks in (_BLOCKS, _INTO))
    wrongs = 0
    for extent in extents:
        staging = torch.zeros(3, extent.num_bytes + 8, dtype=torch.uint8, device=device)
        header = torch.zeros(3, HEADER_WORDS, dtype=torch.int64, device=device)
        gather(source.raw, from_B, extent, stamp_B2, staging, header)
        packed = staging.cpu()[:, : extent.num_bytes]
        for row in range(3):
            wrongs += header[row, 2].item() % 2**64 != checksum(packed[row].numpy().tobytes())
        wrongs += not torch.equal(header[:, :2], stamp_B2)
        wrongs += int(scatter(target.raw, into_B, extent, stamp_B2, staging, header).any())
        # One wrong stamp and one flipped bit.
        other = stamp_B2.clone()
        other[1, 1] = 8
        staging[2, extent.num_bytes - 1] ^= 1
        aside = torch.zeros_like(target.raw)
        status = scatter(aside, into_B, extent, other, staging, header).tolist()
        wrongs += status != [0, WRONG_STAMP, WRONG_CHECKSUM]
        wrongs += int(aside[_INTO[1]].any())  # rejected, so it must be unchanged
    expected = torch.zeros(6, _SHAPE.block_bytes, dtype=torch.uint8)
    there = TorchPool(num_blocks=6, shape=_SHAPE, device=torch.device("cpu"))
    full = TorchPool(num_blocks=6, shape=_SHAPE, device=torch.device("cpu"))
    full.raw.copy_(raw)
    assert there.scales is not None
    assert full.scales is not None
    part = (slice(layers.start, layers.stop), slice(None), slice(None), slice(heads.start, heads.stop))
    for source_block, target_block in zip(_BLOCKS, _INTO, strict=True):
        there.tensor[target_block][part] = full.tensor[source_block][part]
        ours, theirs = there.scales.view(torch.int32), full.scales.view(torch.int32)
        ours[target_block][part] = theirs[source_block][part]
    expected.copy_(there.raw)
    wrongs += not torch.equal(target.raw.cpu(), expected)
    return wrongs


def _case(name: str, layers: range, heads: range) -> Case:
    return Case(f"extents {name}", lambda device: float(_wrongs(device, _extents(layers, heads), layers, heads)), 0.0)


def _large(device: torch.device) -> float:
    """An extent for several programs, whose size is not a multiple of a program's."""
    raw = torch.randint(-(2**31), 2**31 - 1, (2, 5000), generator=torch.Generator().manual_seed(1)).int()
    there = raw.to(device).view(torch.uint8)
    staging = torch.zeros(2, 20_000, dtype=torch.uint8, device=device)
    header = torch.zeros(2, HEADER_WORDS, dtype=torch.int64, device=device)
    extent = StridedExtent(4, 19_992)
    block_B = torch.tensor([1, 0], dtype=torch.int32, device=device)
    gather(there, block_B, extent, torch.zeros(2, 2, dtype=torch.int64, device=device), staging, header)
    wrongs = 0
    for row, block in enumerate((1, 0)):
        data = raw[block, 1:4999].numpy().tobytes()
        wrongs += staging[row, :19_992].cpu().numpy().tobytes() != data
        wrongs += header[row, 2].item() % 2**64 != checksum(data)
    return float(wrongs)


CASES = [
    _case("whole", range(3), range(4)),
    _case("a layer", range(1, 2), range(4)),
    _case("a shard", range(3), range(1, 3)),
    _case("a layer of one head", range(2, 3), range(3, 4)),
    Case("extents of several programs", _large, 0.0),
]


def _launch(name: str, *, is_packing: bool, heads: int) -> Launch:
    shape = BlockShape(num_layers=32, block_size=64, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    (extent,) = part_extents(
        num_layers=32,
        block_size=64,
        num_kv_heads=8,
        head_bytes=256,
        scales_first=None,
        layers=range(32),
        heads=range(heads),
    )

    def make(device: torch.device):  # type: ignore[no-untyped-def]
        pool = TorchPool(num_blocks=64, shape=shape, device=device)
        staging = torch.zeros(32, extent.num_bytes, dtype=torch.uint8, device=device)
        header = torch.zeros(32, HEADER_WORDS, dtype=torch.int64, device=device)
        stamp_B2 = torch.zeros(32, 2, dtype=torch.int64, device=device)
        block_B = torch.arange(32, dtype=torch.int32, device=device) * 2
        move = gather if is_packing else scatter
        if not is_packing:
            gather(pool.raw, block_B, extent, stamp_B2, staging, header)
        copy = torch.zeros_like(staging)
        return lambda: move(pool.raw, block_B, extent, stamp_B2, staging, header), lambda: copy.copy_(staging)

    return Launch(f"{'gather' if is_packing else 'scatter'} {name} 32 blocks", make, 2 * 32 * extent.num_bytes)


LAUNCHES = [
    _launch("llama-8b", is_packing=True, heads=8),
    _launch("llama-8b", is_packing=False, heads=8),
    _launch("llama-8b half the heads", is_packing=True, heads=4),
    _launch("llama-8b half the heads", is_packing=False, heads=4),
]
