"""Which GPU a thread launches on."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread. No-op for a CPU.

    torch follows a tensor's device, Triton does not: it launches on the thread's current device, which is the first one
    until another is set. So each thread that computes sets its own once.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
