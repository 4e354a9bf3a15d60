"""A device: which one a rank uses, in which dtypes, and its memory: what is free, and what the largest steps and graphs
take once the weights are loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, cast, final

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.types import Sampling
from pdserve.engine.interface import EngineSpec, Row
from pdserve.engine.load.checkpoint_files import Checkpoint
from pdserve.engine.memory.host import free_bytes
from pdserve.engine.memory.plan import DeviceUse, PoolUnit, runtime_bytes
from pdserve.engine.model.forms import multiplies_bfloat16, reads_bfloat16
from pdserve.engine.model.linear import Rounding
from pdserve.engine.model.rounded import has_amx, has_int4_kernel
from pdserve.engine.torch_engine import TorchEngine


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread. No-op for a CPU.

    torch launches on a tensor's device. Triton launches on the thread's current device, which is the first one by
    default. So each thread that computes sets its device once.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Each tensor-parallel rank uses its own GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "cpu or auto: torch sees no CUDA device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError("tensor_parallel", f"rank {rank}", f"at most {torch.cuda.device_count()} ranks: one per GPU")
    return torch.device("cuda", rank)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model on its device."""

    name: str  # as in --dtype, but never auto
    compute: torch.dtype  # between products; also of norms and vectors
    rounding: Rounding
    kv: torch.dtype  # of the KV pool, unless --kv-dtype gives another


def choose_precision(dtype: str, device: torch.device, stored: str = "") -> Precision:
    """`dtype` as in --dtype, `stored` the checkpoint's. Raises ConfigError if the device cannot compute it.

    auto is bfloat16 on CUDA. On a CPU with the instructions it is bfloat16 or int4, if the checkpoint is; otherwise
    float32.
    A CPU computes everything but products in float32.
    """
    is_cpu = device.type == "cpu"
    if dtype == "float16":
        raise ConfigError("dtype", dtype, "float32 or bfloat16; float16 is for the engine vllm")
    if dtype in ("int8", "int4") and not is_cpu:
        raise ConfigError("dtype", dtype, f"float32 or bfloat16 on CUDA; {dtype} products are for CPUs")
    if dtype == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError("dtype", dtype, "int8 on a CPU; fp8 products need CUDA of compute capability 8.9")
    if dtype == "auto":
        if is_cpu and stored == "int4" and has_int4_kernel():
            dtype = "int4"
        elif not is_cpu or (stored == "bfloat16" and has_fast_bfloat16()):
            dtype = "bfloat16"
        else:
            dtype = "float32"
    if dtype == "float32":
        return Precision(dtype, torch.float32, "none", torch.float32)
    if dtype in ("int8", "int4"):
        return Precision(dtype, torch.float32, cast(Rounding, dtype), torch.bfloat16)
    if is_cpu:
        return Precision(dtype, torch.float32, "bfloat16", torch.bfloat16)
    return Precision(dtype, torch.bfloat16, "fp8" if dtype == "fp8" else "none", torch.bfloat16)


def has_fast_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 faster than float32 on this CPU."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or has_amx()
    return has_instructions and multiplies_bfloat16()


# --- what is known before a load ------------------------------------------------------------------------------


def reads_bfloat16_of(
    checkpoint: Checkpoint | None, device: torch.device, dtype: torch.dtype, rounding: Rounding
) -> bool:
    """Whether products in float32 read the checkpoint's matrices in bfloat16 (decision 0026)."""
    if checkpoint is None or device.type != "cpu" or dtype != torch.float32 or rounding != "none":
        return False
    matrices = [one for one in checkpoint.tensors.values() if len(one.shape) > 1]
    return all(one.dtype == "BF16" for one in matrices) and reads_bfloat16()


def available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return free_bytes()


# --- measured memory ------------------------------------------------------------------------------------------
# Steps and graphs are measured before the pool takes the rest.

# Truncated sampling sorts or searches the vocabulary, which takes the most memory.
_DRAW: Final = Sampling(temperature=1.0, top_p=0.9, seed=1)


class Meter(Protocol):
    """The memory of one device, in bytes."""

    def capacity(self) -> tuple[int, int]:
        """Free and total memory; other processes count as used."""
        ...

    def settle(self) -> None:
        """Waits for queued work, and returns unused memory to the device."""
        ...

    def reserved(self) -> int:
        """Memory held by this process's allocator."""
        ...

    def begin_peak(self) -> None: ...

    def peak(self) -> int:
        """The most memory that was reserved since `begin_peak`."""
        ...


@final
class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capacity(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))


Assemble = Callable[[int], TorchEngine]  # creates an engine over a pool of this many blocks
MeasureGraphs = Callable[[TorchEngine, Meter], int]


def measure_use(
    meter: Meter,
    device: str,
    assemble: Assemble,
    unit: PoolUnit,
    *,
    share: float,
    context_tokens: int,
    max_batch: int,
    max_batch_tokens: int,
    is_leader: bool = True,
    agree: Callable[[int], int] = int,
    measure_graphs: MeasureGraphs | None = None,
) -> DeviceUse:
    """Runs the largest steps over a temporary pool, then captures some graphs. The weights are loaded already.

    Tensor-parallel ranks call it together: the steps are the same on each, and followers do not sample. `agree` returns
    the minimum over all ranks, because a rank with less memory would otherwise take shorter steps than the others.
    """
    meter.settle()
    free, total = meter.capacity()
    weights = meter.reserved()
    # Another worker on the device may be loading into the free memory beyond this worker's share.
    room = min(free, int(total * share) - weights)
    num_blocks = agree(_profile_blocks(room, context_tokens, max_batch, max_batch_tokens, unit))
    engine: TorchEngine | None = assemble(num_blocks)
    assert engine is not None
    meter.begin_peak()
    for rows in largest_steps(engine.spec, max_batch=max_batch, max_batch_tokens=max_batch_tokens):
        if is_leader:
            engine.step(rows)
        else:
            engine.follow(rows)
    # Includes rope tables and kernel buffers, which are made with the engine.
    activations = max(0, meter.peak() - weights - num_blocks * unit.block_bytes)
    graphs = 0
    if measure_graphs is not None:
        graphs = measure_graphs(engine, meter)
    engine = None
    meter.settle()
    free, total = meter.capacity()
    reserved = meter.reserved()
    return DeviceUse(
        device=device,
        total=total,
        free=free,
        weights=weights,
        activations=activations,
        graphs=graphs,
        runtime=runtime_bytes(total, free, reserved),
    )


def largest_steps(spec: EngineSpec, *, max_batch: int, max_batch_tokens: int) -> Iterator[list[Row]]:
    """The longest chunk at the end of the longest context, with further prompts if a step may have more tokens than
    that; and a full batch that samples from the whole vocabulary."""
    size = spec.block_size
    limit = min(spec.max_context_tokens, spec.num_blocks * size)
    count = min(max_batch_tokens, limit)
    used = -(-limit // size)
    rows, left = [_row(spec, count, limit - count, range(used))], max_batch_tokens - count
    while left and used < spec.num_blocks:  # prompts that are computed whole
        count = min(left, limit, (spec.num_blocks - used) * size)
        end = used - (-count // size)
        rows.append(_row(spec, count, 0, range(used, end)))
        used, left = end, left - count
    yield rows
    yield [_row(spec, 1, 0, [block]) for block in range(min(max_batch, spec.num_blocks))]


def _row(spec: EngineSpec, count: int, start: int, blocks: range | list[int]) -> Row:
    token = 1 % spec.vocab_size
    history = [token] * (start + count)
    return Row(
        tokens=history[start:],
        start=start,
        blocks=list(blocks),
        sample=_DRAW,
        history=history,
        prompt_len=len(history),
    )


def _profile_blocks(room: int, context_tokens: int, max_batch: int, max_batch_tokens: int, unit: PoolUnit) -> int:
    """Enough blocks for the longest context, the most prompt tokens and the largest batch, in at most half of the free
    memory."""
    num_prompts, rest = divmod(max_batch_tokens, context_tokens)
    of_prompts = num_prompts * -(-context_tokens // unit.block_size) - (-rest // unit.block_size)
    wanted = max(-(-context_tokens // unit.block_size), of_prompts, max_batch)
    return max(1, min(wanted, room // 2 // unit.block_bytes))
