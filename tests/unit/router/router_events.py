"""Events for a RouterState, with defaults."""

from __future__ import annotations

from pdserve.core.types import Role, Sampling, Slo
from router.state.interface import RequestArrived, WorkerConnected

BLOCK = 16


def answer(request_id: str, index: int) -> int:
    """The right token at each output position."""
    return sum(request_id.encode()) * 131 % 1009 * 1000 + index


def hello(worker_id: str, role: Role, generation: int = 1, **facts: object) -> WorkerConnected:
    held: dict[str, object] = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}.{generation}",
        "role": role,
        "endpoint": f"{worker_id}:1",
        "block_size": BLOCK,
        "num_blocks": 64,
        "max_context_tokens": 512,
        "max_batch": 8,
        "max_batch_tokens": 128,
        "inbox_depth": 4,
        "block_bytes": 1024,
    }
    return WorkerConnected(**{**held, **facts})  # type: ignore[arg-type]


def arrival(request_id: str, prompt: int = 100, max_tokens: int = 8, **facts: object) -> RequestArrived:
    held: dict[str, object] = {
        "request_id": request_id,
        "num_prompt_tokens": prompt,
        "sampling": Sampling(max_tokens=max_tokens),
        "slo": Slo(),
    }
    return RequestArrived(**{**held, **facts})  # type: ignore[arg-type]
