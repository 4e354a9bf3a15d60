"""Fairness between tenants in front of a live worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve import AsyncClient
from pdserve.client.base import Retries
from pdserve.core.access.key_file import key_hash, make_key
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Start

FLOOD, LIGHT = (make_key(bytes([number] * 32)) for number in range(2))
NUM_FLOOD, NUM_LIGHT = 24, 3
OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("key", [LIGHT, FLOOD], ids=["another tenant", "the same tenant"])
async def test_a_flood_of_one_tenant_does_not_delay_another(
    connect: Connect, start: Start, tmp_path: Path, key: str
) -> None:
    """The second case shows that the order is due to the tenants."""
    file = tmp_path / "keys.json"
    tenants = {name: {"keys": [{"sha256": key_hash(one)}]} for name, one in (("flood", FLOOD), ("light", LIGHT))}
    file.write_text(json.dumps({"tenants": tenants}))
    worker = start(
        "decode_worker", "--model=toy", "--worker-id=one", "--heartbeat-s=0.05", "--toy-step-s=0.01", "--max-batch=1"
    )
    front = await connect(worker, key_file=str(file), slo_ttft_s=600.0, slo_tpot_s=60.0)
    done: list[str] = []

    async def ask(client: AsyncClient, name: str) -> None:
        await client.generate(f"hello {name}", **OPTIONS)
        done.append(name)

    async with AsyncClient(front.server.address, token=FLOOD, retries=Retries(limit=0)) as client:
        flooding = [asyncio.create_task(ask(client, "flood")) for _ in range(NUM_FLOOD)]
        state = front.server.runtime.state
        await until(lambda: state.num_queued >= NUM_FLOOD - 4)
        late = client.with_token(key)
        before = len(done)
        await asyncio.gather(*(asyncio.create_task(ask(late, "light")) for _ in range(NUM_LIGHT)))
        passed = len(done) - before - NUM_LIGHT  # requests of the flood that ended before the last of these
        await asyncio.gather(*flooding)
    if key == LIGHT:
        assert passed <= NUM_FLOOD // 2, "the two take turns"
    else:
        assert passed >= NUM_FLOOD - 4
