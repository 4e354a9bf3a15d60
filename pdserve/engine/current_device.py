"""Sets the GPU on which a thread launches."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread. No-op for a CPU.

    torch launches on a tensor's device. Triton launches on the thread's current device, which is the first one by
    default. So each thread that computes sets its device once.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
