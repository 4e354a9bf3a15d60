"""Copies small arrays to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(
    values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of `values`. On CUDA the copy is queued from pinned memory without blocking. From unpinned memory, as
    with `torch.tensor(values, device=...)`, each copy would wait for all work before it, so that the host could not
    prepare a step while another one runs."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if isinstance(values, np.ndarray):  # torch.tensor cannot pin what it makes of an array
        host = torch.from_numpy(np.asarray(values, order="C")).to(dtype).pin_memory()
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=True)
    return host.to(device, non_blocking=True)
