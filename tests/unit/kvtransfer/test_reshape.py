"""Which token ranges of the source fill which blocks of the target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.protocol.plan import (
    HeadShard,
    TokenRun,
    Window,
    arrival_of,
    byte_ranges,
    pieces_of,
    ready_blocks,
    runs_of,
    shard_of,
    shards_of,
)
from kvtransfer.reshape.sender import CONVERTED_BYTES_S, LEAST_BYTES, MAX_PAIRS, REVISIT, WireRule
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import KvShape
from tests.unit.kvtransfer.test_shape import PLAIN, SMALL


def test_the_example_in_the_docstring() -> None:
    assert pieces_of(16, 32, num_tokens=40, first_block=1, num_blocks=1) == [TokenRun(0, 0, 0, 0, 8)]


def test_equal_sizes_map_blocks_one_to_one() -> None:
    pieces = pieces_of(16, 16, num_tokens=64, first_block=1, num_blocks=3)
    assert pieces == [TokenRun(0, 0, 0, 0, 16), TokenRun(1, 0, 1, 0, 16), TokenRun(2, 0, 2, 0, 16)]


def test_a_small_block_is_a_part_of_a_large_one() -> None:
    assert pieces_of(32, 16, num_tokens=61, first_block=1, num_blocks=3) == [
        TokenRun(0, 16, 0, 0, 16),
        TokenRun(1, 0, 1, 0, 16),
        TokenRun(1, 16, 2, 0, 13),
    ]


def test_sizes_without_a_common_divisor() -> None:
    assert pieces_of(3, 5, num_tokens=9, first_block=0, num_blocks=2) == [
        TokenRun(0, 0, 0, 0, 3),
        TokenRun(1, 0, 0, 3, 2),
        TokenRun(1, 2, 1, 0, 1),
        TokenRun(2, 0, 1, 1, 3),
    ]


def test_an_empty_range_has_no_pieces() -> None:
    assert pieces_of(3, 5, num_tokens=9, first_block=0, num_blocks=0) == []
    assert pieces_of(3, 5, num_tokens=9, first_block=2, num_blocks=1) == []


def test_an_impossible_conversion_is_rejected() -> None:
    plain = KvShape(layout="block-major.v1", dtype="float32", num_layers=1, num_kv_heads=4, head_dim=8, block_size=4)
    source, target = replace(plain, tp_degree=2, tp_rank=1), replace(plain, tp_degree=4, tp_rank=0)
    with pytest.raises(ConfigError, match=r"kv_shape\.tp_rank: got 1, expected a rank that holds heads of rank 0"):
        arrival_of(source, target, "float32")
    with pytest.raises(ConfigError, match="wire_dtype: got uint64, expected one between float32 and float32"):
        arrival_of(plain, plain, "uint64")


@settings(deadline=None)
@given(
    source_size=st.integers(1, 20),
    target_size=st.integers(1, 20),
    num_tokens=st.integers(0, 100),
    first=st.integers(0, 9),
    count=st.integers(0, 9),
)
def test_each_token_is_mapped_exactly_once(
    source_size: int, target_size: int, num_tokens: int, first: int, count: int
) -> None:
    pieces = pieces_of(source_size, target_size, num_tokens=num_tokens, first_block=first, num_blocks=count)
    first_source = first * target_size // source_size
    seen = []
    for piece in pieces:
        for step in range(piece.num_tokens):
            assert piece.source_at + step < source_size
            assert piece.target_at + step < target_size
            position = (first_source + piece.source) * source_size + piece.source_at + step
            assert position == (first + piece.target) * target_size + piece.target_at + step
            seen.append(position)
    assert seen == list(range(first * target_size, min((first + count) * target_size, num_tokens)))
    assert len(pieces) <= count * (target_size // source_size + 2), "never one piece per token"


@settings(deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    num_tokens=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 100), max_size=5),
)
def test_blocks_become_ready_once_and_only_when_their_tokens_are_final(
    sizes: tuple[int, int], num_tokens: int, cuts: list[int]
) -> None:
    source_size, target_size = sizes
    done = 0
    for final in [*sorted(min(cut, num_tokens) for cut in cuts), num_tokens]:
        ready = ready_blocks(final, target_size, num_tokens)
        pieces = pieces_of(source_size, target_size, num_tokens=num_tokens, first_block=done, num_blocks=ready - done)
        first = done * target_size // source_size
        assert all(
            (first + piece.source) * source_size + piece.source_at + piece.num_tokens <= final for piece in pieces
        )
        done = ready
    assert done == -(-num_tokens // target_size)


def ranks(shape: KvShape, degree: int) -> list[KvShape]:
    return [replace(shape, tp_degree=degree, tp_rank=rank) for rank in range(degree)]


def test_two_ranks_fill_one() -> None:
    source = ranks(PLAIN, 2)
    assert shards_of(source[0], PLAIN) == (HeadShard(0, 0, 0, 0, 4), HeadShard(1, 1, 0, 4, 4))
    assert [shard_of(one, PLAIN) for one in source] == list(shards_of(source[1], PLAIN))


def test_one_rank_fills_each_of_two() -> None:
    assert [shards_of(PLAIN, target) for target in ranks(PLAIN, 2)] == [
        (HeadShard(0, 0, 0, 0, 4),),
        (HeadShard(0, 0, 4, 0, 4),),
    ]


def test_degrees_without_a_common_divisor() -> None:
    twelve = replace(PLAIN, num_kv_heads=12)
    source, target = ranks(twelve, 4), ranks(twelve, 6)
    assert shards_of(source[0], target[1]) == (HeadShard(0, 0, 2, 0, 1), HeadShard(1, 1, 0, 1, 1))
    assert shard_of(source[2], target[1]) is None


def test_replicas_of_a_head_share_the_work() -> None:
    pair = replace(PLAIN, num_kv_heads=2)
    source, target = ranks(pair, 8), ranks(pair, 4)
    senders = [[shard.source_rank for shard in shards_of(source[0], one)] for one in target]
    assert senders == [[0], [2], [4], [6]]


degrees = st.sampled_from([1, 2, 3, 4, 6, 12, 24])


@settings(deadline=None)
@given(source_degree=degrees, target_degree=degrees)
def test_shards_fill_every_head_of_a_rank_once_with_that_head(source_degree: int, target_degree: int) -> None:
    twelve = replace(PLAIN, num_kv_heads=12)
    senders = ranks(twelve, source_degree)
    for target in ranks(twelve, target_degree):
        shards = shards_of(senders[0], target)
        seen = []
        for index, shard in enumerate(shards):
            sender = senders[shard.source_rank]
            assert shard.index == index
            assert shard == shard_of(sender, target)
            assert shard.source_head + shard.num_heads <= sender.num_heads
            for head in range(shard.num_heads):
                assert sender.first_head + shard.source_head + head == target.first_head + shard.target_head + head
                seen.append(shard.target_head + head)
        assert seen == list(range(target.num_heads))


def test_equal_shapes_map_to_whole_blocks() -> None:
    """Blocks are not divided: each piece is a block, and its window is one run, the whole block."""
    for shape in (PLAIN, SMALL):
        [shard] = shards_of(shape, shape)
        window = Window(0, shape.num_layers, shard.source_head, shard.num_heads)
        assert window == Window.whole(shape.form)
        assert runs_of(shape.form, window) == [(0, shape.block_bytes)]
    assert byte_ranges([4, 5, 6, 2], PLAIN.block_bytes)[0] == (4 * PLAIN.block_bytes, 7 * PLAIN.block_bytes)


@pytest.mark.parametrize("shape", [PLAIN, SMALL, replace(PLAIN, block_size=3, num_layers=3)])
def test_windows_of_all_layers_and_heads_cover_a_block_once(shape: KvShape) -> None:
    form = shape.form
    for layers in (1, form.num_layers):
        for heads in (1, 4, form.num_heads):
            seen = sorted(
                run
                for first_layer in range(0, form.num_layers, layers)
                for first_head in range(0, form.num_heads, heads)
                for run in runs_of(form, Window(first_layer, layers, first_head, heads))
            )
            at = 0
            for begin, size in seen:
                assert begin in (at, form.scales_at), "runs meet, padding aside"
                at = begin + size
            assert at <= form.block_bytes
            assert sum(size for _, size in seen) >= form.value_bytes


# -- the rule that decides when float KV is sent as int8 -------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(("choice", "is_quantised"), [("exact", False), ("int8", True)])
def test_a_fixed_choice_ignores_the_link(choice: str, is_quantised: bool) -> None:
    rule = WireRule(choice)
    for bytes_s in (1e6, 1e12):
        rule.sent("d", 64 * MIB, 64 * MIB / bytes_s)
        assert rule.is_quantised("d") is is_quantised


def test_unknown_and_fast_links_send_exact_values() -> None:
    rule = WireRule("auto")
    assert not rule.is_quantised("d")
    rule.sent("d", 64 * MIB, 64 * MIB / (2 * CONVERTED_BYTES_S))
    assert not rule.is_quantised("d")


def test_a_slow_link_is_measured_again() -> None:
    rule = WireRule("auto")
    rule.sent("slow", 64 * MIB, 64 * MIB / 1e8)
    choices = [rule.is_quantised("slow") for _ in range(2 * REVISIT)]
    assert choices.count(False) == 2
    assert not rule.is_quantised("other")
    for _ in range(20):
        rule.sent("slow", 64 * MIB, 64 * MIB / 1e10)
    assert not rule.is_quantised("slow")


def test_small_transfers_are_not_measured() -> None:
    rule = WireRule("auto")
    rule.sent("d", LEAST_BYTES - 1, 10.0)
    rule.sent("d", 64 * MIB, 0.0)
    assert not rule.is_quantised("d")


def test_links_that_are_not_used_are_forgotten() -> None:
    rule = WireRule("auto")
    for number in range(MAX_PAIRS + 1):
        rule.sent(f"d{number}", 64 * MIB, 10.0)
    assert not rule.is_quantised("d0")
    assert rule.is_quantised("d1")
