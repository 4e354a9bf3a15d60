"""Checks that a model fits into memory before it is loaded: a process that is killed while loading gives no error
message."""

from __future__ import annotations

import math
from typing import Final

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.checkpoint_spec import Needs
from pdserve.engine.config import ModelConfig
from pdserve.engine.host_limits import free_bytes
from pdserve.engine.linear import Rounding, reads_bfloat16
from pdserve.engine.parameters import build_weights
from pdserve.engine.rounding import INT4_BYTES
from pdserve.engine.safetensors_file import Checkpoint
from pdserve.engine.sharding import WHOLE, Shard
from pdserve.engine.weights import rounding_beside

_GB: Final = 1e9
_ITEM_BYTES: Final = {"bfloat16": 2, "int8": 1, "fp8": 1, "int4": INT4_BYTES}  # of a weight, by rounding


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    rounding: Rounding,
    shard: Shard = WHOLE,
    halves_float32: bool = False,
) -> int:
    """An upper bound of the memory of the weights of a rank's part of the model.

    `halves_float32` is the result of `reads_bfloat16_of`.
    """
    needs = Needs(config.quantisation, shard)
    build_weights(config, needs)
    item_bytes = _ITEM_BYTES.get(rounding, dtype.itemsize)
    other_bytes = _ITEM_BYTES.get(rounding_beside(config.quantisation, rounding), item_bytes)
    num_other = needs.num_matrix_weights - needs.num_packed_weights
    in_matrices = math.ceil(needs.num_packed_weights * item_bytes + num_other * other_bytes)
    saved = needs.num_panel_weights * (dtype.itemsize - torch.bfloat16.itemsize) if halves_float32 else 0
    return in_matrices - saved + needs.num_table_weights * dtype.itemsize


def reads_bfloat16_of(
    checkpoint: Checkpoint | None, device: torch.device, dtype: torch.dtype, rounding: Rounding
) -> bool:
    """Whether products in float32 read the checkpoint's matrices in bfloat16 (decision 0026)."""
    if checkpoint is None or device.type != "cpu" or dtype != torch.float32 or rounding != "none":
        return False
    matrices = [one for one in checkpoint.tensors.values() if len(one.shape) > 1]
    return all(one.dtype == "BF16" for one in matrices) and reads_bfloat16()


def check_fits(num_weight_bytes: int, num_kv_bytes: int, num_available_bytes: int | None) -> None:
    """Raises ConfigError with both numbers. None: unknown."""
    if num_available_bytes is not None and num_weight_bytes + num_kv_bytes > num_available_bytes:
        raise ConfigError(
            "model",
            f"{num_weight_bytes / _GB:.2f} GB of weights and {num_kv_bytes / _GB:.2f} GB of KV",
            f"at most the {num_available_bytes / _GB:.2f} GB that are free: a smaller kv_memory_bytes, dtype int8, "
            "or a machine with more memory",
        )


def available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return free_bytes()
