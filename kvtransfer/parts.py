"""Which bytes of a block are sent in one chunk. Pure.

A block is sent whole or in parts. A part is one *group* of layers of one *shard*; a shard is the heads that one
tensor-parallel rank of the sender has. The sender announces the number of groups, which are equal. A transfer is
complete when every part of every shard has arrived for each block. Each shard has one writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, final

from kvtransfer.memory import views_of
from kvtransfer.reshape.mapping import HeadShard, Window, runs_of, shard_of, shards_of
from pdserve.core.errors import ConfigError
from pdserve.core.kv_shape import SCALE_BYTES, BlockForm, KvShape
from pdserve.engine.gpu.extent import StridedExtent

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
