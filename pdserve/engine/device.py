"""Chooses the device and the compute dtype of a model, and sets the GPU on which a thread launches."""

from __future__ import annotations

import torch

from pdserve.core.errors import ConfigError


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


def choose_dtype(name: str, device_name: str) -> torch.dtype:
    """auto: float32 on a CPU, which emulates bfloat16 products slowly; bfloat16 on CUDA."""
    if name == "int8":
        if choose_device(device_name).type != "cpu":
            raise ConfigError("dtype", name, "float32 or bfloat16 on CUDA; int8 products are for CPUs")
        name = "float32"  # everything but weights: activations between products, norms, KV
    if name == "fp8":
        device = choose_device(device_name)
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            raise ConfigError("dtype", name, "int8 on a CPU; fp8 products need CUDA of compute capability 8.9")
        name = "bfloat16"
    if name == "auto":
        name = "bfloat16" if choose_device(device_name).type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
