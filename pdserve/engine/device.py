"""Chooses the device and the dtypes of a model, and sets the GPU on which a thread launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.int4 import has_amx, has_kernel
from pdserve.engine.linear import Rounding, multiplies_bfloat16


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
    if dtype in ("int8", "int4") and not is_cpu:
        raise ConfigError("dtype", dtype, f"float32 or bfloat16 on CUDA; {dtype} products are for CPUs")
    if dtype == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError("dtype", dtype, "int8 on a CPU; fp8 products need CUDA of compute capability 8.9")
    if dtype == "auto":
        if is_cpu and stored == "int4" and has_kernel():
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
