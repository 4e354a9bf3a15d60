"""KV that changes its shape during a transfer equals a dense array that is converted in the simplest way."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.protocol.plan import TokenRun, Window, pieces_of, shard_of
from kvtransfer.reshape.convert import (
    FP8_VALUES,
    BlockArrays,
    fp8_bits,
    move,
    pack,
    quantised,
    rounded,
    unpack,
    widened,
)
from pdserve.core.kv.kv_shape import KvShape, Loss, check_convertible
from pdserve.engine.memory.pool import BlockShape, TorchPool, quantise

FP8 = "float8_e4m3fn"
LAYOUTS = {
    "float32": "block-major.v1",
    "bfloat16": "block-major.v1",
    "int8": "block-major-int8.v1",
    FP8: "block-major-fp8.v1",
}
DIRT = 0xA5  # Contents of memory before the copy.


def shape_of(
    dtype: str, block_size: int, num_kv_heads: int, num_layers: int = 2, head_dim: int = 4, **tp: int
) -> KvShape:
    return KvShape(
        **tp,
        layout=LAYOUTS[dtype],
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )


# The reference. `dense` is [tokens, layers, planes, heads, dim] of the whole model, as float32.


def row_bytes(shape: KvShape, values: np.ndarray) -> tuple[bytes, bytes]:
    """One head's stored values, and its scale, as the engine stores them (torch's arithmetic)."""
    x = torch.from_numpy(values.copy())
    if shape.dtype in ("int8", FP8):
        whole, scale = quantise(x.view(1, 1, -1), getattr(torch, shape.dtype))
        return whole.view(torch.int8).numpy().tobytes(), scale.numpy().tobytes()
    if shape.dtype == "bfloat16":
        return x.to(torch.bfloat16).view(torch.int16).numpy().tobytes(), b""
    return values.astype("<f4").tobytes(), b""


def places_of(shape: KvShape, blocks: list[int], position: int, layer: int, plane: int, head: int) -> tuple[int, int]:
    """Offsets of a row's values and of its scale in the rank's memory."""
    block, offset = blocks[position // shape.block_size], position % shape.block_size
    row = ((layer * 2 + plane) * shape.block_size + offset) * shape.num_heads + head
    width = shape.head_dim * {"float32": 4, "bfloat16": 2}.get(shape.dtype, 1)
    data = shape.num_layers * 2 * shape.block_size * shape.num_heads * width
    begin = block * shape.block_bytes
    return begin + row * width, begin + -(-data // 64) * 64 + 4 * row


def rows_of(shape: KvShape) -> list[tuple[int, int, int]]:
    return [(a, b, c) for a in range(shape.num_layers) for b in range(2) for c in range(shape.num_heads)]


def write(shape: KvShape, memory: bytearray, blocks: list[int], dense: np.ndarray) -> None:
    for position in range(len(dense)):
        for layer, plane, head in rows_of(shape):
            values, scale = row_bytes(shape, dense[position, layer, plane, shape.first_head + head])
            at, scale_at = places_of(shape, blocks, position, layer, plane, head)
            memory[at : at + len(values)] = values
            memory[scale_at : scale_at + len(scale)] = scale


def read(shape: KvShape, memory: bytearray, blocks: list[int], num_tokens: int) -> np.ndarray:
    """This rank's heads, [tokens, layers, planes, heads, dim], as float32."""
    out = np.empty((num_tokens, shape.num_layers, 2, shape.num_heads, shape.head_dim), np.float32)
    for position in range(num_tokens):
        for layer, plane, head in rows_of(shape):
            at, scale_at = places_of(shape, blocks, position, layer, plane, head)
            if shape.dtype == "float32":
                row = np.frombuffer(memory, "<f4", shape.head_dim, at)
            elif shape.dtype in ("int8", FP8):
                [scale] = np.frombuffer(memory, "<f4", 1, scale_at)
                stored = torch.from_numpy(np.frombuffer(memory, "i1", shape.head_dim, at).copy())
                row = stored.view(getattr(torch, shape.dtype)).float().numpy() * scale
            else:
                row = (np.frombuffer(memory, "<u2", shape.head_dim, at).astype(np.uint32) << 16).view(np.float32)
            out[position, layer, plane, head] = row
    return out


@dataclass
class Case:
    """The pools of one worker on each side. Target blocks before `held` are not granted."""

    source: KvShape
    target: KvShape
    num_tokens: int
    held: int
    num_groups: int  # layer groups
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 6]))
    degrees = st.sampled_from(
        [one for one in (1, 2, 3, 4, 6, 12) if not max(one, num_kv_heads) % min(one, num_kv_heads)]
    )
    sizes = st.sampled_from([1, 2, 3, 4, 7, 8])
    dtypes = st.sampled_from(sorted(LAYOUTS))
    num_layers, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 4]))
    source, target = (
        replace(shape_of(draw(dtypes), draw(sizes), num_kv_heads, num_layers, head_dim), tp_degree=draw(degrees))
        for _ in range(2)
    )
    num_tokens = draw(st.integers(1, 20))
    held = draw(st.integers(0, (num_tokens - 1) // target.block_size))
    return Case(source, target, num_tokens, held, draw(st.sampled_from([1, num_layers])), draw(st.integers(0, 999)))


def within(seen: np.ndarray, expected: np.ndarray, loss: Loss) -> bool:
    largest = np.abs(expected).max(-1, keepdims=True)
    return bool((np.abs(seen - expected) <= loss.relative * np.abs(expected) + loss.of_largest * largest).all())


@settings(max_examples=50, deadline=None)
@given(cases())
def test_received_values_match_the_reference(case: Case) -> None:
    """All ranks of the source send to each rank of the target, in shards and layer groups, over a staging area."""
    rng, order = np.random.default_rng(case.seed), random.Random(case.seed)
    source, target = case.source, case.target
    loss = check_convertible(source, target)
    dense = rng.standard_normal((case.num_tokens, source.num_layers, 2, source.num_kv_heads, source.head_dim))
    dense = (dense * 10.0 ** rng.integers(-3, 3, dense.shape[:-1])[..., None]).astype(np.float32)
    num_sources = -(-case.num_tokens // source.block_size)
    num_targets = -(-case.num_tokens // target.block_size)
    senders = []
    for rank in range(source.tp_degree):
        shape = replace(source, tp_rank=rank)
        blocks = order.sample(range(num_sources + 5), num_sources)
        memory = bytearray((num_sources + 5) * shape.block_bytes)
        write(shape, memory, blocks, dense)
        senders.append((shape, blocks, memory))
    for rank in range(target.tp_degree):
        shape = replace(target, tp_rank=rank)
        targets = order.sample(range(num_targets + 5), num_targets)
        memory = bytearray([DIRT]) * ((num_targets + 5) * shape.block_bytes)
        granted = targets[case.held :]
        for sender, blocks, sent in senders:
            shard = shard_of(sender, shape)
            if shard is None:
                continue
            for group in range(case.num_groups):
                layers = shape.num_layers // case.num_groups
                out_of = Window(group * layers, layers, shard.source_head, shard.num_heads)
                into = Window(group * layers, layers, shard.target_head, shard.num_heads)
                at = 0
                while at < len(granted):  # in chunks
                    count = min(order.randint(1, 3), len(granted) - at)
                    pieces = pieces_of(
                        sender.block_size,
                        shape.block_size,
                        num_tokens=case.num_tokens,
                        first_block=case.held + at,
                        num_blocks=count,
                    )
                    touched = blocks[(case.held + at) * shape.block_size // sender.block_size :]
                    form = shape.form.narrowed(layers, shard.num_heads)
                    staging = BlockArrays(bytearray([DIRT]) * (count * form.block_bytes), form)
                    pack(BlockArrays(sent, sender.form), touched, out_of, staging, range(count), pieces)
                    unpack(staging, BlockArrays(memory, shape.form), granted[at : at + count], into)
                    at += count
        first = case.held * shape.block_size
        heads = slice(shape.first_head, shape.first_head + shape.num_heads)
        stored = read_all(senders, case.num_tokens)[first:, :, :, heads]
        seen = read(shape, memory, targets, case.num_tokens)[first:]
        if loss == Loss():
            np.testing.assert_array_equal(seen, stored)
        assert within(seen, stored, loss)
        if source.dtype == "float32" and case.held == 0:
            expected = bytearray(memory)
            write(shape, expected, targets, dense)
            assert memory == expected, "bit for bit what the target's engine stores"
        for block in set(range(num_targets + 5)) - set(granted):
            whole = memory[block * shape.block_bytes : (block + 1) * shape.block_bytes]
            assert whole == bytearray([DIRT]) * shape.block_bytes, "a block outside the grant was touched"
        behind = -case.num_tokens % shape.block_size
        if behind:
            tail = read(shape, memory, targets, case.num_tokens + behind)[case.num_tokens :]
            assert not tail.any(), "behind the end of the sequence there are zeros"


def read_all(senders: list[tuple[KvShape, list[int], bytearray]], num_tokens: int) -> np.ndarray:
    """The values in the source's pools, with the heads of all ranks."""
    shape = senders[0][0]
    heads = [read(one, memory, blocks, num_tokens) for one, blocks, memory in senders[:: shape.replicas]]
    return np.concatenate(heads, axis=3)


def test_a_copy_changes_only_its_window() -> None:
    shape = shape_of("int8", 4, 3, num_layers=3)
    source, target = (bytearray(content) for content in (bytes(range(256)) * 20, bytes([DIRT]) * 5120))
    before = BlockArrays(bytearray(target), shape.form)
    after = BlockArrays(target, shape.form)
    window = Window(1, 1, 2, 1)
    move(BlockArrays(source, shape.form), [1, 0], window, after, [2, 1], window, [TokenRun(0, 1, 1, 0, 3)])
    changed = np.argwhere((after.values != before.values).any(-1))
    assert {tuple(int(i) for i in at) for at in changed} == {(1, 1, p, c, 2) for p in (0, 1) for c in (0, 1, 2)}
    assert (after.raw != before.raw).sum() <= 2 * 3 * (4 + 4)


@pytest.mark.parametrize(("out_of", "into"), [([0, 9], [0, 1]), ([0, 1], [0, 9]), ([0, -1], [0, 1]), ([0, 1], [-1, 0])])
def test_blocks_outside_a_memory_are_rejected_before_any_write(out_of: list[int], into: list[int]) -> None:
    form = shape_of("float32", 2, 1).form
    source, target = (bytearray([fill]) * (4 * form.block_bytes) for fill in (1, 2))
    window = Window.whole(form)
    with pytest.raises(IndexError):
        move(
            BlockArrays(source, form), out_of, window, BlockArrays(target, form), into, window,
            [TokenRun(0, 0, 0, 0, 2), TokenRun(1, 0, 1, 0, 2)],
        )  # fmt: skip
    assert target == bytearray([2]) * len(target)


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None)
@given(st.lists(floats, min_size=6, max_size=6))
def test_rounding_to_bfloat16_matches_torch(values: list[float]) -> None:
    x = np.array(values, np.float32)
    seen, expected = rounded(x), torch.from_numpy(x).to(torch.bfloat16)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(seen[~is_nan], expected.view(torch.int16).numpy().view(np.uint16)[~is_nan])
    assert np.isnan(widened(seen)[is_nan]).all()
    np.testing.assert_array_equal(widened(seen)[~is_nan], expected.float().numpy()[~is_nan])


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=6, max_size=6))
def test_rounding_to_a_scale_matches_the_engine(values: list[float]) -> None:
    for dtype in ("int8", FP8):
        x = np.array(values, np.float32).reshape(1, 2, 3)
        whole, scale = quantise(torch.from_numpy(x.copy()), getattr(torch, dtype))
        seen, scales = quantised(x, dtype)
        np.testing.assert_array_equal(seen.view(np.int8), whole.view(torch.int8).numpy())
        np.testing.assert_array_equal(scales, scale.numpy())


def test_fp8_matches_torch_for_every_value() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    np.testing.assert_array_equal(FP8_VALUES, codes.view(torch.float8_e4m3fn).float().numpy())
    x = np.concatenate([np.linspace(-448, 448, 20_001), 2.0 ** np.linspace(-12, 8.8, 20_001)]).astype(np.float32)
    ties = (FP8_VALUES[:126] + FP8_VALUES[1:127]) / 2
    x = np.concatenate([x, ties, -ties])
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fp8_bits(x), expected)


@pytest.mark.parametrize("dtype", sorted(LAYOUTS))
def test_torch_pools_are_converted_in_place(dtype: str) -> None:
    """From one engine's pool to another's without staging, as transports on one host may do."""
    sizes: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8}
    exact = BlockShape(block_size=4, dtype=torch.float32, **sizes)
    other = BlockShape(block_size=6, dtype=getattr(torch, dtype), **sizes)
    source, target, alone = (
        TorchPool(num_blocks=5, shape=shape, device=torch.device("cpu")) for shape in (exact, other, other)
    )
    k_TKD, v_TKD = torch.randn(2, 12, 3, 8, generator=torch.Generator().manual_seed(1))
    position_T = torch.arange(12)
    for layer in (0, 1):
        source.write(layer, k_TKD, v_TKD + layer, torch.tensor([3, 0, 4])[position_T // 4], position_T % 4)
        own = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        alone.write(
            layer, k_TKD.to(own), (v_TKD + layer).to(own), torch.tensor([2, 1])[position_T // 6], position_T % 6
        )
    ours, theirs = (
        KvShape(layout=shape.layout, dtype=name, block_size=shape.block_size, **sizes)
        for shape, name in ((exact, "float32"), (other, dtype))
    )
    pieces = pieces_of(4, 6, num_tokens=12, first_block=0, num_blocks=2)
    window = Window.whole(ours.form)
    move(
        BlockArrays(source.buffer, ours.form),
        [3, 0, 4],
        window,
        BlockArrays(target.buffer, theirs.form),
        [2, 1],
        window,
        pieces,
    )
    assert torch.equal(target.raw, alone.raw)
