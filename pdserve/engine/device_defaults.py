"""Defaults by device for batch size, chunk size and speculation. Pure.

A step reads the weights once for any number of rows, so a GPU's batches and chunks are larger than a CPU's. Speculation
is off on a GPU, because a step with drafts cannot be launched before the results of the previous step were read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pdserve.config import WorkerConfig
from pdserve.core.types import Role

GPU_BATCH: Final = 256
CPU_BATCH: Final = 64
GPU_PREFILL_CHUNK: Final = 2048
CHUNK: Final = 512  # also for a decode worker on a GPU, because chunks delay the decode rows in the same step


def with_device_defaults(config: WorkerConfig, role: Role, *, is_gpu: bool) -> WorkerConfig:
    """`config` with a value for every setting that was left to the device. Explicit settings are unchanged."""
    chunk = GPU_PREFILL_CHUNK if is_gpu and role is Role.PREFILL else CHUNK
    speculation = config.speculation
    if speculation == "auto":
        speculation = "off" if is_gpu else "ngram"
    return replace(
        config,
        max_batch=config.max_batch or (GPU_BATCH if is_gpu else CPU_BATCH),
        max_batch_tokens=config.max_batch_tokens or chunk,
        speculation=speculation,
    )
