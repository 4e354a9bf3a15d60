"""Quotas of tenants in a simulated router."""

from __future__ import annotations

import pytest

from pdserve.core.access.key_file import Tenant
from simulator.model import RequestRow
from tests.unit.simulator.small import asked, cluster, run


def outcomes(rows: list[RequestRow]) -> list[str]:
    return ["rejected" if row.outcome == "rejected" else "served" for row in rows]


def test_a_quota_limits_only_its_tenant() -> None:
    quota = Tenant(name="flood", tokens_per_minute=1200)  # 20 tokens per second.
    requests = [asked(at_s / 2, 100, 100, tenant="flood", max_tokens=100) for at_s in range(60)]
    requests += [asked(31.0, 100, 100, tenant="light")] * 20
    _, rows = run(requests, cluster(tenants=(quota,)))
    flood, light = rows[:60], rows[60:]
    # The bucket holds 100 tokens, and a request takes 200: it must be full again, after 10 s.
    assert [row.arrival_s for row in flood if row.outcome != "rejected"] == pytest.approx([0, 10, 20], abs=1.0)
    assert outcomes(light) == ["served"] * 20
    first = next(row for row in flood if row.outcome == "rejected")
    assert first.retry_after_s == pytest.approx(9.5)
    assert first.ended_s == first.arrival_s
    assert (first.tokens, first.attempts) == (0, 0)


def test_a_rejected_answer_frees_its_slot_with_its_memory() -> None:
    quota = Tenant(name="flood", max_concurrent=2)
    requests = [asked(0.0, 500, 50, tenant="flood", cancel_after_s=0.2) for _ in range(4)]
    requests += [asked(1.0, 100, 10, tenant="flood") for _ in range(4)]
    _, rows = run(requests, cluster(tenants=(quota,)))
    assert [row.outcome for row in rows[:4]].count("cancelled") == 2
    assert outcomes(rows[4:]) == ["served", "served", "rejected", "rejected"]
