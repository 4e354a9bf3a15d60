"""A simulated worker of the size and speed of those that benchmarks.goodput starts on a CPU."""

from __future__ import annotations

from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Role
from simulator.model import NetworkLink, WorkerShape

COST = CostPrior(
    prefill_base_s=0.004,
    prefill_per_token_s=9.5e-5,
    prefill_per_token_context_s=1.2e-7,
    decode_base_s=0.0035,
    decode_per_row_s=2.5e-4,
    decode_per_context_token_s=1e-6,
)


def shape(worker_id: str, role: Role) -> WorkerShape:
    return WorkerShape(
        worker_id=worker_id,
        role=role,
        cost=COST,
        kv_capacity_tokens=80_000,
        kv_bytes_per_token=6144,
        link=NetworkLink(latency_s=1e-3, bytes_per_s=1e9),
        max_batch_tokens=512,
        max_context_tokens=2048,
    )
