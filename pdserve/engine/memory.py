"""Whether a model fits, asked before it is loaded: being killed for memory halfway says nothing to anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.config import ModelConfig
from pdserve.engine.linear import Rounding
from pdserve.engine.needs import Needs
from pdserve.engine.parameters import build_weights
from pdserve.engine.sharding import WHOLE, Shard

_GB: Final = 1e9
_PROC: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, rounding: Rounding, shard: Shard = WHOLE) -> int:
    """What a rank's part of the loaded model takes, at most."""
    needs = Needs(config.quantisation, shard)
    build_weights(config, needs)
    item_bytes = dtype.itemsize if rounding == "none" else 1
    return needs.num_matrix_weights * item_bytes + needs.num_table_weights * dtype.itemsize


def check_fits(num_weight_bytes: int, num_kv_bytes: int, num_available_bytes: int | None) -> None:
    """Raises ConfigError with both numbers. None: the system does not say."""
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
    limits = (host_bytes(_PROC), cgroup_bytes(_CGROUP))
    return min((limit for limit in limits if limit is not None), default=None)


def host_bytes(meminfo: Path) -> int | None:
    """MemAvailable: what can be had without swapping, page cache included."""
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_bytes(folder: Path) -> int | None:
    """What a container may still take; pages of files that are cached there can be given back."""
    limit = "".join(_lines(folder / "memory.max"))
    used = "".join(_lines(folder / "memory.current"))
    if not limit.isdigit() or not used.isdigit():
        return None  # "max", or no such container
    cached = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith("inactive_file "))
    return max(0, int(limit) - int(used) + cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
