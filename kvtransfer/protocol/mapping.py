"""The mapping from tokens and heads of source blocks to target blocks. Pure.

- Heads: a target rank gets its heads from one or several source ranks. The heads from one source rank are a *shard*.
- Tokens: *pieces* fill a target block. A piece is a run of tokens in one source block. The pieces are the same for
  every shard and layer, so a transfer consists of shards x layers x pieces.
- Target blocks are counted as in the grant: index 0 is the first block after the held ones.

    source blocks of 16    |0      |1      |2   :   |          40 tokens
    target blocks of 32    |held           |0   :          |   one piece: 8 tokens of source 2, then zeros
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import LOSSES, BlockForm, KvShape


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The heads that one source rank sends to one target rank. Each side counts heads within its own rank."""

    index: int  # among the target's shards, in the order of their heads
    source_rank: int
    source_head: int
    target_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class TokenRun:
    """`num_tokens` tokens from (source block, offset) to (target block, offset).

    `source` and `target` are counted from the first block of each side that contains tokens of the call.
    """

    source: int
    source_at: int
    target: int
    target_at: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """The layers and heads of each block that a copy reads or writes."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @staticmethod
    def whole(form: BlockForm) -> Window:
        return Window(0, form.num_layers, 0, form.num_heads)


def shards_of(source: KvShape, target: KvShape) -> tuple[HeadShard, ...]:
    """The shards of the target rank, from all ranks of the source's worker. The source's own rank is ignored.

    If several source ranks hold a head, the target's replicas are divided among them.
    """
    begin, end = target.first_head, target.first_head + target.num_heads
    share = source.num_heads
    replica = target.tp_rank % target.replicas * source.replicas // target.replicas
    shards = []
    for index, shard in enumerate(range(begin // share, -(-end // share))):
        first, last = max(begin, shard * share), min(end, (shard + 1) * share)
        rank = shard * source.replicas + replica
        shards.append(HeadShard(index, rank, first - shard * share, first - begin, last - first))
    return tuple(shards)


def shard_of(source: KvShape, target: KvShape) -> HeadShard | None:
    """The shard of the source's own rank; None if the target needs no heads of it."""
    return next((shard for shard in shards_of(source, target) if shard.source_rank == source.tp_rank), None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The format `form` in which a source's blocks are sent, from the window `out_of` of its pool to the window `into`
    of the target's pool."""

    form: BlockForm
    out_of: Window
    into: Window


def arrival_of(source: KvShape, target: KvShape, dtype: str) -> Arrival:
    """For the source's own rank, if blocks are sent in `dtype`. Raises ConfigError if that is impossible."""
    shard = shard_of(source, target)
    if shard is None:
        raise ConfigError("kv_shape.tp_rank", source.tp_rank, f"a rank that holds heads of rank {target.tp_rank}")
    if not {(source.dtype, dtype), (dtype, target.dtype)} <= LOSSES.keys():
        raise ConfigError("wire_dtype", dtype, f"one between {source.dtype} and {target.dtype}")
    layers = target.num_layers
    form = target.form.narrowed(layers, shard.num_heads).stored_as(dtype)
    return Arrival(
        form=form,
        out_of=Window(0, layers, shard.source_head, shard.num_heads),
        into=Window(0, layers, shard.target_head, shard.num_heads),
    )


def pieces_of(
    source_size: int, target_size: int, *, num_tokens: int, first_block: int, num_blocks: int
) -> list[TokenRun]:
    """The pieces of the sequence's target blocks first_block, first_block + 1, ...

    Sizes are tokens per block. Positions from num_tokens on, the sequence's length, are in no piece.
    """
    pieces = []
    at = first_block * target_size
    first_source = at // source_size
    end = min(at + num_blocks * target_size, num_tokens)
    while at < end:
        source, source_at = divmod(at, source_size)
        target, target_at = divmod(at, target_size)
        count = min(source_size - source_at, target_size - target_at, end - at)
        pieces.append(TokenRun(source - first_source, source_at, target - first_block, target_at, count))
        at += count
    return pieces


def ready_blocks(final_tokens: int, target_size: int, num_tokens: int) -> int:
    """Leading target blocks of the sequence whose tokens are all final; the last one may be partly filled."""
    return -(-num_tokens // target_size) if final_tokens >= num_tokens else final_tokens // target_size


def runs_of(form: BlockForm, window: Window) -> list[tuple[int, int]]:
    """(offset, length) of the bytes within a block that the window covers, the padding of a whole block included."""
    if window == Window.whole(form):
        return [(0, form.block_bytes)]
    planes = [(0, form.value_bytes // form.num_rows)]  # (begin, bytes of one head's row)
    if form.is_scaled:
        planes.append((form.scales_at, 4))
    runs: list[tuple[int, int]] = []
    tokens = form.block_size if form.heads_first else 1  # contiguous tokens of a head
    for begin, row_bytes in planes:
        head_bytes = tokens * row_bytes
        all_bytes = form.num_heads * head_bytes
        of_layer = form.planes * form.block_size // tokens
        first, count = window.first_layer * of_layer, window.num_layers * of_layer
        if window.num_heads == form.num_heads:
            runs.append((begin + first * all_bytes, count * all_bytes))
            continue
        head_at = begin + window.first_head * head_bytes
        size = window.num_heads * head_bytes
        runs += ((head_at + index * all_bytes, size) for index in range(first, first + count))
    return runs
