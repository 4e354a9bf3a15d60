"""An engine on a CPU: attention by the paged kernel, and decode steps that repeat recorded kernel calls. Needs numba.

The kernel calls of a decode step are recorded once for each number of tokens, and then repeated, as a CUDA graph does.

The layers are run once in a mode that notes every kernel call instead of computing it. Tensors of that run get fixed
memory. Steps of as many tokens then differ in few addresses only: the embedded tokens, the angles, the places of the
KV, and the plan of attention. The calls are the same, so a step has the same bits.

A step is computed as usual if its batch has more tokens or long chunks, or if its layers also use operations of torch,
such as a product by oneDNN, a bias or an expert.
"""

# Shapes: T tokens in the packed batch, E hidden size.

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.engine.cpu.kernels import task
from pdserve.engine.cpu.kernels.task import KernelProgram
from pdserve.engine.cpu.paged import PagedAttention
from pdserve.engine.load.load_plan import LoadedRank
from pdserve.engine.model.attention import AttentionBackend, EagerAttention
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.torch_engine import TorchEngine
from pdserve.progress import PhaseReport

_MOST_TOKENS: Final = 32

_aten: Final = torch.ops.aten
_VIEWS: Final = {_aten.view.default, _aten.split_with_sizes.default, _aten.slice.Tensor, _aten.alias.default}


def assemble(rank: LoadedRank, num_blocks: int) -> TorchEngine:
    """Compiles the kernels for the pool's shape."""
    plan, model = rank.plan, rank.model
    rounding, pool = plan.facts.precision.rounding, rank.pool(num_blocks)
    report = PhaseReport(plan.config.worker_id, "kernels", "kernels")
    report(0, 1)
    kernel = PagedAttention(
        pool,
        plan.rank_model.num_heads,
        torch.bfloat16 if rounding == "bfloat16" else torch.float32,
        is_normed=plan.model.has_qk_norm,
        is_rounded=rounding != "none",
    )
    report(1, 1)
    return TorchEngine(
        plan.spec(num_blocks),
        model,
        pool,
        rank.grammars,
        lambda batch, on_layer: EagerAttention(batch, pool, model.heads, kernel, on_layer),
        sys.maxsize,  # the kernel is as fast as torch's attention or faster, for every row
        RecordedSteps(model).hidden if rank.is_alone else None,
    )


# --- recorded steps -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: KernelProgram
    states_TE: Tensor


@final
class RecordedSteps:
    """`Decoder.hidden`, for one engine at a time."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._memory = _Memory()
        self._recorded: dict[int, _Recorded | None] = {}  # by number of tokens; None: cannot be repeated
        self._num_threads = 0

    def hidden(self, attention: AttentionBackend) -> Tensor:
        """The result is valid until the next call."""
        assert isinstance(attention, EagerAttention)
        if self._num_threads != torch.get_num_threads():  # kernels have memory for each thread, which any step replaces
            self._num_threads = torch.get_num_threads()
            self._recorded.clear()
        num_tokens, inputs = len(attention.token_T), attention.inputs()
        if num_tokens > _MOST_TOKENS or inputs is None or not task.has_barrier():
            return self._model.hidden(attention)
        x_TE = self._model.embed(attention.token_T)
        addresses = (x_TE.data_ptr(), *inputs.addresses)
        if num_tokens not in self._recorded:
            self._recorded[num_tokens] = self._record(x_TE, attention, addresses)
        recorded = self._recorded[num_tokens]
        if recorded is None:
            return self._model.through_layers(x_TE, attention)
        recorded.program.run(addresses, inputs.num_tasks, inputs.work)
        return recorded.states_TE

    def _record(self, x_TE: Tensor, attention: EagerAttention, addresses: Sequence[int]) -> _Recorded | None:
        try:
            with task.recording() as calls, _Recorder(self._memory):
                states_TE = self._model.through_layers(x_TE, attention)
        except _UsesTorch:
            return None
        return _Recorded(KernelProgram(calls, addresses), states_TE)


class _UsesTorch(Exception):
    """The layers compute something with an operation that is not a kernel."""


class _Recorder(TorchDispatchMode):
    """Gives new tensors memory from `memory`, and permits no operations but views."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else the first call imports torch._dynamo, which takes two seconds of every start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.empty.memory_format:
            return self._memory.empty(args[0], (kwargs or {}).get("dtype") or torch.get_default_dtype())
        if func not in _VIEWS:
            raise _UsesTorch
        return func(*args, **(kwargs or {}))


@final
class _Memory:
    """Memory for tensors of up to 32 tokens. All programs share it, because one step runs at a time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)  # by bytes of a token

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose first axis are the tokens. Its memory is used again when no tensor has it."""
        token_bytes = math.prod(shape[1:]) * dtype.itemsize
        free = self._free[token_bytes]
        memory = free.pop() if free else np.zeros(_MOST_TOKENS * token_bytes, np.uint8)
        lent = memory[: shape[0] * token_bytes]
        finalizer = weakref.finalize(lent, free.append, memory)  # torch keeps `lent` as long as any view
        finalizer.atexit = False  # at exit tensors may still be in use
        return torch.frombuffer(lent, dtype=dtype).view(shape)
