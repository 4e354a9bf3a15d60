"""Metrics of tenants in front of a live worker, and their limited number of labels."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve import AsyncClient, QuotaExceeded
from pdserve.client.retries import Retries
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.telemetry.metrics import Metrics
from router.service.tenants import BoundedLabels
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start

NAMES = ("acme", "beta", "gamma", "delta")
KEYS = {name: make_key(bytes([number] * 32)) for number, name in enumerate(NAMES)}


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels, in the order of their names."""
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            if sample.name == name:
                found[tuple(value for _, value in sorted(sample.labels.items()))] += sample.value
    return dict(found)


def test_labels_are_limited_and_stay() -> None:
    labels = BoundedLabels(2)
    assert [labels.of(one) for one in ("a", "b", "c", "", "a", "d", "b")] == [
        "a", "b", "other", "default", "a", "other", "b",
    ]  # fmt: skip
    assert BoundedLabels(0).of("a") == "other"


async def test_metrics_show_each_tenant_up_to_a_limit(connect: Connect, decode: Program, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    tenants = {name: {"tokens_per_minute": 100, "keys": [{"sha256": key_hash(key)}]} for name, key in KEYS.items()}
    file.write_text(json.dumps({"tenants": tenants}))
    metrics = Metrics("router")
    front = await connect(
        decode, metrics=metrics, key_file=str(file), token="operator", tenant_labels=2, slo_ttft_s=99.0, slo_tpot_s=9.0
    )
    async with AsyncClient(front.server.address, token="operator", retries=Retries(limit=0)) as client:
        for name in NAMES:
            caller = client.with_token(KEYS[name])
            await caller.generate("x" * 90, max_tokens=10, temperature=0, ignore_eos=True)
            with pytest.raises(QuotaExceeded):
                await caller.generate("x" * 90, max_tokens=10)
        await client.generate("x" * 90, max_tokens=10, temperature=0, ignore_eos=True)
    share = {"acme": 1, "beta": 1, "other": 2, "default": 1}
    assert samples(metrics, "pdserve_tenant_requests_total") == {
        ("served", label): count for label, count in share.items()
    }
    tokens = samples(metrics, "pdserve_tenant_tokens_total")
    assert tokens == {("prompt", label): 90.0 * count for label, count in share.items()} | {
        ("output", label): 10.0 * count for label, count in share.items()
    }
    assert samples(metrics, "pdserve_tenant_ttft_seconds_count") == {(label,): count for label, count in share.items()}
    assert samples(metrics, "pdserve_tenant_quota_rejections_total") == {
        ("tokens_per_minute", label): count for label, count in share.items() if label != "default"
    }
    await until(lambda: samples(metrics, "pdserve_tenant_answers_running") == {(label,): 0.0 for label in share})


# --- fairness between tenants ---------------------------------------------------------------------------------
# In front of a live worker.

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
