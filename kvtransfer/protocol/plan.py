"""How source blocks become bytes of target blocks: heads and tokens, extents, chunks, views, parts of blocks. Pure.

A grant lists blocks in prompt order. Frames use *grant indices*, which are positions in that list. Each side maps
indices to its own block numbers, and runs of consecutive numbers become single memory ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, final

from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import LOSSES, SCALE_BYTES, BlockForm, KvShape
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool

# --- heads and tokens -----------------------------------------------------------------------------------------
# Which of the source blocks' fill which of the target blocks.
#
# - Heads: a target rank gets its heads from one or several source ranks. The heads from one source rank are a *shard*.
# - Tokens: *pieces* fill a target block. A piece is a run of tokens in one source block. The pieces are the same for
#   every shard and layer, so a transfer consists of shards x layers x pieces.
# - Target blocks are counted as in the grant: index 0 is the first block after the held ones.
#
#     source blocks of 16    |0      |1      |2   :   |          40 tokens
#     target blocks of 32    |held           |0   :          |   one piece: 8 tokens of source 2, then zeros


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


# --- extents, chunks, coverage --------------------------------------------------------------------------------

DEFAULT_CHUNK_BYTES: Final = 4 * 2**20  # a transport may use less
# between GPUs, where a launch and a wake take far longer than the copy of a small chunk
DEVICE_CHUNK_BYTES: Final = 64 * 2**20
MAX_CHUNK_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Extent:
    """Blocks first, first + 1, ..., first + count - 1 of one pool."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blocks of one message: grant indices first, first + 1, ... read from these source blocks."""

    first: int
    sources: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.sources)

    def split(self, limit_blocks: int) -> tuple[Chunk, Chunk | None]:
        """At most `limit_blocks` blocks of it, and the rest."""
        if self.count <= limit_blocks:
            return self, None
        head, tail = self.sources[:limit_blocks], self.sources[limit_blocks:]
        return Chunk(self.first, head), Chunk(self.first + limit_blocks, tail)


def extents_of(blocks: Sequence[int]) -> list[Extent]:
    """The fewest extents that list `blocks` in the same order."""
    if not blocks:
        return []
    starts = [0, *(i for i, (left, right) in enumerate(pairwise(blocks), start=1) if right != left + 1)]
    return [Extent(blocks[a], b - a) for a, b in pairwise([*starts, len(blocks)])]


def byte_ranges(blocks: Sequence[int], block_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) in memory with one run of bytes per block, one range per run of consecutive blocks."""
    return [(e.first * block_bytes, (e.first + e.count) * block_bytes) for e in extents_of(blocks)]


@lru_cache(maxsize=4096)
def spans_of(parts: Sequence[tuple[int, int]], run_bytes: int, num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Where `parts`, (offset, length) within a block, are in a pool's memory: (offset, length) for block 0.

    Those of block b are b * run_bytes further on. All that moves a block's bytes finds them here, because they need not
    be one run (KvPool.runs_per_block); whatever is sent has the order of the block.
    """
    spans = []
    for at, size in parts:
        end = at + size
        while at < end:
            run, within = divmod(at, run_bytes)
            length = min(end - at, run_bytes - within)
            spans.append((run * num_blocks * run_bytes + within, length))
            at += length
    return tuple(spans)


def ranges_of(
    blocks: Sequence[int], block_bytes: int, parts: Sequence[tuple[int, int]], num_blocks: int, runs_per_block: int
) -> list[tuple[int, int]]:
    """(begin, end) of these parts of the blocks, or of whole blocks, in the memory of such a pool, in the order in
    which they are sent."""
    if not parts and runs_per_block == 1:
        return byte_ranges(blocks, block_bytes)
    run_bytes = block_bytes // runs_per_block
    spans = spans_of(parts or ((0, block_bytes),), run_bytes, num_blocks)
    if len(spans) == 1 and spans[0][1] == run_bytes:  # whole runs, of which those of consecutive blocks are one range
        first = spans[0][0]
        return [(first + begin, first + end) for begin, end in byte_ranges(blocks, run_bytes)]
    starts = [block * run_bytes for block in blocks]
    return [(start + at, start + at + size) for start in starts for at, size in spans]


def blocks_per_chunk(block_bytes: int, chunk_bytes: int) -> int:
    """How many blocks one chunk may hold: at least one, even if a block is larger than the limit."""
    return max(1, chunk_bytes // block_bytes)


def chunks_of(pushes: Sequence[tuple[int, int]], limit_blocks: int) -> Iterator[Chunk]:
    """Groups (grant index, source block) pairs into chunks of consecutive indices."""
    if pushes and len(pushes) <= limit_blocks:
        indices, sources = zip(*pushes, strict=True)
        if indices == tuple(range(indices[0], indices[0] + len(indices))):  # the usual case, which is much faster
            yield Chunk(indices[0], sources)
            return
    begin = 0
    for at in range(1, len(pushes) + 1):
        is_end = at == len(pushes)
        if is_end or at - begin == limit_blocks or pushes[at][0] != pushes[at - 1][0] + 1:
            yield Chunk(pushes[begin][0], tuple(source for _, source in pushes[begin:at]))
            begin = at


def mask(first: int, count: int) -> int:
    """Bits first .. first + count - 1 of a coverage bitmap."""
    return ((1 << count) - 1) << first


@dataclass(slots=True)
class Coverage:
    """Which of `size` grant indices have been seen."""

    size: int
    bits: int = 0

    def overlaps(self, first: int, count: int) -> bool:
        return bool(self.bits & mask(first, count))

    def add(self, first: int, count: int) -> None:
        self.bits |= mask(first, count)

    @property
    def count(self) -> int:
        return self.bits.bit_count()

    def count_in(self, first: int, count: int) -> int:
        return (self.bits & mask(first, count)).bit_count()

    @property
    def is_full(self) -> bool:
        return self.count == self.size


# --- views into a pool's memory -------------------------------------------------------------------------------
# Lists for sendmsg and recvmsg_into. A view never extends beyond its blocks.

MAX_VIEWS: Final = 64  # per system call; the kernel's limit is 1024


def flat(buffer: memoryview) -> memoryview:
    """The same memory as bytes in one dimension."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def host_view(pool: KvPool) -> memoryview:
    """The bytes of the pool's blocks; empty for a pool on a device, which only the device transports access. Raises
    ConfigError if the pool's buffer is too small."""
    if not pool.is_on_host:
        return memoryview(b"")
    view, num_bytes = flat(pool.buffer), pool.num_blocks * pool.block_bytes
    if len(view) < num_bytes:
        expected = f"{num_bytes}: {pool.num_blocks} blocks of {pool.block_bytes} bytes"
        raise ConfigError("kv_pool.buffer", f"{len(view)} bytes", expected)
    return view[:num_bytes]


def views_of(
    memory: memoryview,
    blocks: Sequence[int],
    block_bytes: int,
    parts: Sequence[tuple[int, int]] = (),
    runs_per_block: int = 1,
) -> list[memoryview]:
    """Views of these parts of the blocks, or of whole blocks, in the order in which they are sent. `memory` is a whole
    pool. Raises IndexError on a block outside it."""
    num_blocks = len(memory) // block_bytes
    if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
        raise IndexError(f"blocks {min(blocks)}..{max(blocks)} of a pool of {num_blocks}")
    return [memory[begin:end] for begin, end in ranges_of(blocks, block_bytes, parts, num_blocks, runs_per_block)]


def advance(views: list[memoryview], num_bytes: int) -> None:
    """Drops the first num_bytes of the views."""
    while num_bytes:
        size = len(views[0])
        if num_bytes < size:
            views[0] = views[0][num_bytes:]
            return
        num_bytes -= size
        del views[0]


def copy(destination: list[memoryview], source: list[memoryview]) -> None:
    """Copies between two lists of views that cover the same number of bytes."""
    to, out = list(destination), list(source)
    while out:
        size = min(len(out[0]), len(to[0]))
        to[0][:size] = out[0][:size]
        advance(out, size)
        advance(to, size)


# --- parts of a block -----------------------------------------------------------------------------------------
# A block is sent whole or in parts. A part is one *group* of layers of one *shard*; a shard is the heads that one
# tensor-parallel rank of the sender has. The sender announces the number of groups, which are equal. A transfer is
# complete when every part of every shard has arrived for each block. Each shard has one writer.

MAX_GROUPS: Final = 32  # bits of a stamp's mask


class Part(NamedTuple):
    shard: int = 0
    group: int = 0
    groups: int = 1

    @property
    def mask(self) -> int:
        """The bit of this layer group in a stamp's mask."""
        return 1 << self.group


WHOLE: Final = Part()


@final
class PartLayout:
    """The places of a shard's parts in the blocks of one side of a pair, in the order in which a block is sent.

    `form` is the format of this side's blocks. The shard has the heads `first_head` .. `first_head + num_heads - 1`.
    Both sides list the same bytes in the same order.
    """

    def __init__(self, form: BlockForm, shard: HeadShard, count: int, first_head: int, largest_bytes: int = 0) -> None:
        """`largest_bytes`: size of the larger of both sides' blocks, if they differ."""
        self.form, self.index, self.count = form, shard.index, count
        self.largest_bytes = max(largest_bytes, form.block_bytes)
        self._first_head, self._num_heads = first_head, shard.num_heads
        self.block_bytes = form.block_bytes

    @staticmethod
    @lru_cache(maxsize=1024)
    def to_send(source: KvShape, target: KvShape, dtype: str = "") -> PartLayout:
        """For a sender that sends blocks in the receiver's format, narrowed to the shard, in `dtype` (empty: the
        receiver's dtype). Raises ConfigError."""
        shard, count = _shard(source, target)
        form = target.form.narrowed(target.num_layers, shard.num_heads).stored_as(dtype or target.dtype)
        return PartLayout(form, shard, count, 0)

    @staticmethod
    @lru_cache(maxsize=1024)
    def to_cut(source: KvShape, target: KvShape) -> PartLayout:
        """For a sender on a device, between ranks of different degrees: it sends the shard's heads directly out of its
        blocks. Raises ConfigError if the shapes differ in more than the heads."""
        shard, count = _shard(source, target)
        if source.form.narrowed(source.num_layers, 1) != target.form.narrowed(target.num_layers, 1):
            expected = f"{target}, except the tensor-parallel rank: blocks on a GPU cannot be converted"
            raise ConfigError("kv_shape", source, expected)
        return PartLayout(source.form, shard, count, shard.source_head, target.block_bytes)

    @staticmethod
    def to_receive(source: KvShape, target: KvShape) -> PartLayout:
        """For the receiver. Raises ConfigError if the sender's rank has no heads for it."""
        shard, count = _shard(source, target)
        return PartLayout(target.form, shard, count, shard.target_head)

    def is_all(self, part: Part) -> bool:
        """Whether the part is the whole block."""
        return self.count == 1 and part.groups == 1 and self._num_heads == self.form.num_heads

    def bytes_of(self, part: Part) -> int:
        """The size of the part in one block."""
        return sum(size for _, size in self.runs(part))

    def runs(self, part: Part) -> tuple[tuple[int, int], ...]:
        """(offset, length) within a block. Raises ConfigError if the layers cannot be divided into that many groups."""
        form = self.form
        if self.is_all(part):
            return ((0, form.block_bytes),)
        return _runs(form, self._first_head, self._num_heads, part.group, part.groups)

    def extent(self, part: Part) -> StridedExtent | None:
        """The part's bytes in each block, for a copy by a device; None if they are not equal runs at equal
        distances."""
        return _extent(self.runs(part))

    def views(self, memory: memoryview, blocks: Sequence[int], part: Part, runs_per_block: int = 1) -> list[memoryview]:
        """The part's bytes of these blocks in such a pool, in order. Raises IndexError on a block outside it."""
        parts = () if self.is_all(part) else self.runs(part)
        return views_of(memory, blocks, self.block_bytes, parts, runs_per_block)


def _shard(source: KvShape, target: KvShape) -> tuple[HeadShard, int]:
    shard = shard_of(source, target)
    if shard is None:
        expected = f"a rank that holds heads of rank {target.tp_rank} of {target.tp_degree}"
        raise ConfigError("kv_shape.tp_rank", f"{source.tp_rank} of {source.tp_degree}", expected)
    return shard, len(shards_of(source, target))


@lru_cache(maxsize=1024)
def _extent(runs: tuple[tuple[int, int], ...]) -> StridedExtent | None:
    first, size = runs[0]
    stride = runs[1][0] - first if len(runs) > 1 else 0
    is_even = all(run == (first + index * stride, size) for index, run in enumerate(runs))
    return StridedExtent(first, size, len(runs), stride) if is_even else None


@lru_cache(maxsize=1024)
def _runs(form: BlockForm, first_head: int, num_heads: int, group: int, groups: int) -> tuple[tuple[int, int], ...]:
    if not 0 <= group < groups <= MAX_GROUPS or form.num_layers % groups:
        expected = f"a divisor of the {form.num_layers} layers, at most {MAX_GROUPS}"
        raise ConfigError("groups", f"group {group} of {groups}", expected)
    num_layers = form.num_layers // groups
    window = Window(group * num_layers, num_layers, first_head, num_heads)
    if window == Window.whole(form):  # without the padding, which the other side may lack
        scales = ((form.scales_at, form.num_rows * SCALE_BYTES),) if form.is_scaled else ()
        return ((0, form.value_bytes), *scales)
    return tuple(runs_of(form, window))
