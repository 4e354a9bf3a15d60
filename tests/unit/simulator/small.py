"""Clusters and traces small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Role, Slo
from router.state.interface import RouterSettings
from simulator.cluster.world import World
from simulator.model import NetworkLink, RequestRow, SimConfig, TraceRequest, WorkerShape

COST = CostPrior(
    prefill_base_s=0.01,
    prefill_per_token_s=1e-4,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=1e-3,
    decode_per_context_token_s=1e-6,
)
BLOCK_BYTES = 512 * 131_072
LINK = NetworkLink(latency_s=1e-3, bytes_per_s=1e9)
MESSAGE_S = 2e-4
EASY = Slo(ttft_s=100.0, tpot_s=10.0)


@dataclass
class Listed:
    rows: list[TraceRequest]
    name: str = "listed"
    block_tokens: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.rows)


def cluster(prefills: int = 1, decodes: int = 1, *, policy: str = "least-ttft", **settings: Any) -> SimConfig:
    shapes = [WorkerShape(worker_id=f"p{i}", role=Role.PREFILL, cost=COST, link=LINK) for i in range(prefills)]
    shapes += [WorkerShape(worker_id=f"d{i}", role=Role.DECODE, cost=COST, link=LINK) for i in range(decodes)]
    router = RouterSettings(policy=policy, is_strict=True)
    return SimConfig(**{"workers": tuple(shapes), "slo": EASY, "router": router, **settings})


def asked(arrival_s: float, prompt: int, output: int, **more: Any) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, **more)


def run(rows: list[TraceRequest], config: SimConfig, block_tokens: int = 0) -> tuple[World, list[RequestRow]]:
    world = World(Listed(rows, block_tokens=block_tokens), config)
    result = world.run()
    world.check()
    assert world.network.is_quiet, "a transfer has no end"
    for machine in world.machines():
        assert machine.is_idle, "an attempt is held for nobody"
        assert machine.blocks.num_referenced == 0, "a block is held by nobody"
    return world, result.requests
