"""Which rows use the paged attention kernel, and how a step's work is divided among threads.

The kernel (kernels/paged.py) reads blocks in place; torch's attention (model/attention.py) gathers them first. The
kernel needs numba, a CPU and float32 activations. It is then used for every row, because it is as fast or faster, also
for long prefill chunks (docs/benchmarks/engine.md#throughput).
"""

# Shapes: T tokens, H query heads, K kv heads, D head dim.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.memory.pool import TorchPool

_LEAST_WORK: Final = 1 << 17  # multiplications of a layer below which a few tasks are not split

Task = tuple[int, int, int, int, int, int]  # kernels.paged.TASK_FIELDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The paged rows of a step: tokens 0 .. num_tokens - 1 of the packed batch."""

    num_tokens: int
    tables: Any  # int32: all rows' block numbers
    tasks: Any  # int64 [num_tasks, TASK_FIELDS], longest first
    work: int  # multiplications of a layer


@dataclass(frozen=True, slots=True)
class Norms:
    """RMS norms of each head's queries and keys, which come before the rotation."""

    q_D: Tensor
    k_D: Tensor
    eps: float


@final
class PagedAttention:
    """Attention over one pool."""

    def __init__(
        self,
        pool: TorchPool,
        num_heads: int,
        computed: torch.dtype = torch.float32,
        *,
        is_normed: bool = False,
        is_rounded: bool = False,
    ) -> None:
        """`computed` is the dtype of the queries, keys and values that `place` will usually be given.

        `is_normed`: the model normalises each head's queries and keys. `is_rounded`: queries and attention weights may
        be rounded to bfloat16 if the pool is bfloat16, because the weights of the model are rounded.
        """
        from pdserve.engine.cpu.kernels import amx_attention, paged, task

        shape = pool.shape
        self._num_heads, self._empty = num_heads, task.empty
        self._shape, self._heads = shape, pool.heads
        self._data = pool.raw.data_ptr()
        self._pool = pool.raw  # keeps the memory
        self._num_threads = torch.get_num_threads()
        self._places = [self._layer_place(layer) for layer in range(shape.num_layers)]
        stored = str(shape.dtype).removeprefix("torch.")
        self.is_tiled = (
            is_rounded and stored == "bfloat16" and amx_attention.is_supported(shape.head_dim, shape.block_size)
        )
        if self.is_tiled:
            self._attend = amx_attention.make_attend(shape.head_dim, shape.block_size)
            self._max_task_queries = amx_attention.MAX_QUERIES
            self._scratch_floats = amx_attention.scratch_floats(shape.head_dim, num_heads, len(pool.heads))
        else:
            self._attend = paged.make_attend(shape.head_dim, shape.block_size, stored)
            self._max_task_queries = paged.max_queries(num_heads, len(pool.heads))
            self._scratch_floats = paged.scratch_floats(shape.head_dim, num_heads, len(pool.heads))
        self._scratch = torch.zeros(self._num_threads * self._scratch_floats)
        self._place = {
            dtype: paged.make_place(shape.head_dim, shape.block_size, stored, name, is_normed=is_normed)
            for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
        }
        self._compile(computed, is_normed=is_normed)

    def _compile(self, computed: torch.dtype, *, is_normed: bool) -> None:
        """Compiles the kernel now, so that the first request does not wait for it. Leaves zeros at block 0's first
        position."""
        from pdserve.engine.cpu.kernels import paged

        began_s = time.monotonic()
        head_dim, num_kv_heads = self._shape.head_dim, len(self._heads)
        qkv_THD = torch.zeros(1, self._num_heads + 2 * num_kv_heads, head_dim, dtype=computed)
        q_THD, k_TKD, v_TKD = qkv_THD.split((self._num_heads, num_kv_heads, num_kv_heads), dim=1)
        angle_T1R, zero_T = torch.zeros(1, 1, head_dim // 2), torch.zeros(1, dtype=torch.int64)
        norms = Norms(torch.ones(head_dim), torch.ones(head_dim), 1.0) if is_normed else None
        q_THD = self.place(0, q_THD, k_TKD, v_TKD, angle_T1R, angle_T1R, zero_T, zero_T, norms)
        self.attend(0, q_THD, self.plan([[0]], [0], [1]), None, None, None)
        log.info("attention kernels ready", extra={"compile_s": round(time.monotonic() - began_s, 3)})
        if jit.cache_folder(paged.scratch_floats) is None:
            log.warning("kernels are compiled at every start: no folder can be written; NUMBA_CACHE_DIR may name one")

    def plan(self, tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> PagedPlan:
        """Row i has counts[i] queries, at positions from starts[i] on; its tokens follow those of row i - 1."""
        pages: list[int] = []
        tasks: list[Task] = []
        token = 0
        for table, start, count in zip(tables, starts, counts, strict=True):
            for skip in range(0, count, self._max_task_queries):
                num_queries = min(count - skip, self._max_task_queries)
                tasks.append((len(pages), start + skip, token + skip, num_queries, 0, len(self._heads)))
            pages += table[: -(-(start + count) // self._shape.block_size)]
            token += count
        tasks, work = deal(tasks, self._num_threads, self._num_heads * self._shape.head_dim)
        return PagedPlan(num_tokens=token, tables=np.array(pages, np.int32), tasks=np.array(tasks, np.int64), work=work)

    def place(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_T1R: Tensor,
        sin_T1R: Tensor,
        block_T: Tensor,
        offset_T: Tensor,
        norms: Norms | None = None,
    ) -> Tensor:
        """Stores the step's rotated keys and its values, and returns the rotated queries: ops.rms_norm with `norms`,
        attention.rotate and pool.write.

        The heads of a token are contiguous; tokens may be apart.
        """
        q_out_THD = self._empty(q_THD.shape)
        tensors = cos_T1R, sin_T1R, block_T, offset_T, q_out_THD
        self._place[q_THD.dtype](
            q_THD.shape[0],
            q_THD.numel(),
            *(x.data_ptr() for x in (q_THD, k_TKD, v_TKD)),
            *(x.stride(0) for x in (q_THD, k_TKD, v_TKD)),
            *(x.data_ptr() for x in tensors),
            self._data,
            self._data,
            *self._places[layer],
            *((0, 0, 0) if norms is None else (norms.q_D.data_ptr(), norms.k_D.data_ptr(), jit.bits(norms.eps))),
        )
        return q_out_THD

    def _layer_place(self, layer: int) -> tuple[int, ...]:
        """Numbers of heads, then the pool's strides between blocks and the start of the layer's heads, for values and
        scales."""
        shape, heads = self._shape, self._heads
        layer_scales = 2 * shape.block_size * shape.num_kv_heads
        return (
            self._num_heads,
            len(heads),
            shape.num_kv_heads,
            shape.block_bytes // shape.dtype.itemsize,
            (layer * layer_scales + heads.start) * shape.head_dim,
            shape.block_bytes // 4,
            shape.data_bytes // 4 + layer * layer_scales + heads.start,
        )

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        plan: PagedPlan,
        window: int | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """softmax(cap(scale * q k)) v for the plan's tokens, [num_tokens, H * D]; see attention.attend."""
        head_dim = self._shape.head_dim
        out = self._empty((plan.num_tokens, self._num_heads * head_dim))
        scale = head_dim**-0.5 if scale is None else scale
        q_THD = q_THD.contiguous()
        if torch.get_num_threads() > self._num_threads:  # each needs its part of the scratch memory
            self._num_threads = torch.get_num_threads()
            self._scratch = torch.zeros(self._num_threads * self._scratch_floats)
        self._attend(
            len(plan.tasks),
            plan.work,
            q_THD.data_ptr(),
            self._data,
            self._data,
            out.data_ptr(),
            plan.tables.ctypes.data,
            plan.tasks.ctypes.data,
            *self._places[layer],
            window or 0,
            jit.bits(scale),
            jit.bits(softcap or 0.0),
            self._scratch.data_ptr(),
            self._scratch_floats,
        )
        return out


def deal(tasks: list[Task], num_threads: int, width: int) -> tuple[list[Task], int]:
    """The tasks, longest first, and the number of multiplications. A few long tasks are split by kv head, so that every
    thread has work.

    `width` is the number of multiplications of one query for one position. The order does not change results.
    """
    total = sum(map(_work, tasks)) * width // tasks[0][5]
    if num_threads == 1 or total < _LEAST_WORK:
        return tasks, total
    if len(tasks) < 2 * num_threads:
        num_parts = -(-2 * num_threads // len(tasks))
        tasks = [part for task in tasks for part in split_heads(task, num_parts)]
    return sorted(tasks, key=_work, reverse=True), total


def split_heads(task: Task, num_parts: int) -> list[Task]:
    """The task as up to `num_parts` tasks over a share of its kv heads."""
    table, start, token, num_queries, _, num_heads = task
    num_parts = min(num_parts, num_heads)
    cuts = [num_heads * part // num_parts for part in range(num_parts + 1)]
    return [(table, start, token, num_queries, begin, end) for begin, end in pairwise(cuts)]


def _work(task: Task) -> int:
    _, start, _, num_queries, head_from, head_to = task
    return (start + num_queries) * num_queries * (head_to - head_from)
