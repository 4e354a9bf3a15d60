"""How blocks become bytes: extents, chunks, runs, coverage, views into memory, and parts of blocks. Pure.

A grant lists blocks in prompt order. Frames use *grant indices*, which are positions in that list. Each side maps
indices to its own block numbers, and runs of consecutive numbers become single memory ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, final

from kvtransfer.protocol.mapping import HeadShard, Window, runs_of, shard_of, shards_of
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import SCALE_BYTES, BlockForm, KvShape
from pdserve.engine.gpu.kernels.extent import StridedExtent
from pdserve.engine.interface import KvPool

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
    """(begin, end) in the pool's memory, one per run of consecutive blocks."""
    return [(e.first * block_bytes, (e.first + e.count) * block_bytes) for e in extents_of(blocks)]


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
    """The pool's bytes; empty for a pool on a device, which only the device transports access."""
    return flat(pool.buffer) if pool.is_on_host else memoryview(b"")


def views_of(memory: memoryview, blocks: Sequence[int], block_bytes: int) -> list[memoryview]:
    """One view per run of consecutive blocks. Raises IndexError on a block outside the memory."""
    if blocks and not (min(blocks) >= 0 and (max(blocks) + 1) * block_bytes <= len(memory)):
        raise IndexError(f"blocks {min(blocks)}..{max(blocks)} of a pool of {len(memory) // block_bytes}")
    return [memory[begin:end] for begin, end in byte_ranges(blocks, block_bytes)]


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
    """The places of a shard's parts in the blocks of one side of a pair.

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
    def to_send(source: KvShape, target: KvShape, dtype: str = "") -> PartLayout:
        """For a sender that sends blocks in the receiver's format, narrowed to the shard, in `dtype` (empty: the
        receiver's dtype). Raises ConfigError."""
        shard, count = _shard(source, target)
        form = target.form.narrowed(target.num_layers, shard.num_heads).stored_as(dtype or target.dtype)
        return PartLayout(form, shard, count, 0)

    @staticmethod
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

    def views(self, memory: memoryview, blocks: Sequence[int], part: Part) -> list[memoryview]:
        """The part's bytes of these blocks, in order. Raises IndexError on a block outside the memory."""
        views = views_of(memory, blocks, self.block_bytes)
        if self.is_all(part):
            return views
        runs = self.runs(part)
        starts = [block * self.block_bytes for block in blocks]
        return [memory[start + at : start + at + size] for start in starts for at, size in runs]


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
