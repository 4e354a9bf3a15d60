"""Quotas in front of live workers: rejections, and clients that try to get more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve import AsyncClient, QuotaExceeded, Unauthenticated
from pdserve.client.retries import Retries
from pdserve.core.access.key_file import MAX_TENANTS, key_hash, make_key
from tests.unit.router_io.conftest import SLOW_STEP_S, Connect, Front, until
from tests.unit.router_io.processes import Program, Start

ACME, BETA = (make_key(bytes([number] * 32)) for number in range(2))
OPERATOR = "the operator's token"
PATIENT: dict[str, Any] = {"token": OPERATOR, "slo_ttft_s": 120.0, "slo_tpot_s": 20.0}


def file_of(folder: Path, **quotas: int) -> str:
    """Tenant acme with these quotas, and beta without any."""
    path = folder / "keys.json"
    acme = {**quotas, "keys": [{"sha256": key_hash(ACME)}]}
    path.write_text(json.dumps({"tenants": {"acme": acme, "beta": {"keys": [{"sha256": key_hash(BETA)}]}}}))
    return str(path)


def presenting(front: Front, token: str) -> AsyncClient:
    return AsyncClient(front.server.address, token=token, retries=Retries(limit=0))


def running(front: Front, tenant: str = "acme") -> int:
    return front.server._tenants.quotas.running(tenant)


async def test_a_used_up_bucket_names_its_quota_and_the_time(connect: Connect, decode: Program, tmp_path: Path) -> None:
    front = await connect(decode, key_file=file_of(tmp_path, tokens_per_minute=1200), **PATIENT)
    async with presenting(front, ACME) as acme, presenting(front, BETA) as beta:
        await acme.generate("x" * 1900, max_tokens=100, temperature=0, ignore_eos=True)
        with pytest.raises(QuotaExceeded) as caught:
            await acme.generate("x" * 60, max_tokens=20)
        assert caught.value.quota == "tokens_per_minute"
        # The bucket held 20 tokens, 2000 were used, and the next request needs a full bucket.
        assert 0.0 < caught.value.retry_after_s <= 2000 / 20
        assert "tokens_per_minute of tenant acme" in caught.value.message
        await beta.generate("x" * 60, max_tokens=20)
        assert await acme.tokenize("hello"), "what costs no tokens needs none"


async def test_generated_tokens_are_charged_and_unused_ones_returned(
    connect: Connect, decode: Program, tmp_path: Path
) -> None:
    front = await connect(decode, key_file=file_of(tmp_path, tokens_per_minute=10**9), **PATIENT)
    quotas = front.server._tenants.quotas
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    async with presenting(front, ACME) as acme:
        for most, n in ((20, 1), (400, 1), (5, 3)):
            options["temperature"] = 0 if n == 1 else 1.0
            quotas._accounts.clear()
            await acme.generate("x" * 60, max_tokens=most, n=n, **options)
            await until(lambda: running(front) == 0)
            account = quotas._accounts["acme"]
            assert account.most - account.counts.level == 60 + n * most
        quotas._accounts.clear()
        done = await acme.generate("x" * 60, max_tokens=4000, stop_token_ids=list(range(60, 120)), **options)
        assert done.finish_reason == "stop"
        account = quotas._accounts["acme"]
        assert account.most - account.counts.level == 60 + done.usage.completion_tokens


async def test_an_invalid_request_costs_nothing(connect: Connect, decode: Program, tmp_path: Path) -> None:
    quota = 6000
    front = await connect(decode, key_file=file_of(tmp_path, tokens_per_minute=quota, max_concurrent=1), **PATIENT)
    async with presenting(front, ACME) as acme:
        for _ in range(3):
            with pytest.raises(Exception, match="temperature"):
                await acme.generate("hello", temperature=1000.0)
    assert (running(front), front.server._tenants.quotas._accounts["acme"].counts.level) == (0, 100)


async def test_answers_in_progress_are_limited(connect: Connect, slow_decode: Program, tmp_path: Path) -> None:
    front = await connect(slow_decode, key_file=file_of(tmp_path, max_concurrent=2), **PATIENT)
    async with presenting(front, ACME) as acme, presenting(front, BETA) as beta:
        streams = [acme.stream("hello", max_tokens=1000, ignore_eos=True) for _ in range(2)]
        for one in streams:
            await anext(one)
        for call in (acme.generate("hello"), acme.tokenize("hello"), acme.detokenize([1])):
            with pytest.raises(QuotaExceeded) as caught:
                await call
            assert caught.value.quota == "max_concurrent"
        await beta.generate("hello", max_tokens=2)
        await streams[0].aclose()
        await until(lambda: running(front) == 1)
        await acme.generate("hello", max_tokens=2)
        await streams[1].aclose()
    await until(lambda: running(front) == 0)


async def test_cancelling_and_calling_again_gains_nothing(connect: Connect, start: Start, tmp_path: Path) -> None:
    """At every moment the workers hold at most `max_concurrent` of the tenant's requests, cancelled ones included."""
    worker = start(
        "decode_worker", "--model=toy", "--worker-id=d9", "--heartbeat-s=0.05", f"--toy-step-s={SLOW_STEP_S}"
    )
    front = await connect(worker, key_file=file_of(tmp_path, max_concurrent=3), **PATIENT)
    state, most, admitted, rejected = front.server.runtime.state, 0, 0, 0

    async def cheat(client: AsyncClient) -> None:
        nonlocal most, admitted, rejected
        for _ in range(60):
            stream = client.stream("hello", max_tokens=1000, ignore_eos=True)
            try:
                await anext(stream)
                admitted += 1
            except QuotaExceeded:
                rejected += 1
            most = max(most, len(state._cluster.requests))
            await stream.aclose()

    async with presenting(front, ACME) as acme:
        await asyncio.gather(*(cheat(acme) for _ in range(12)))
    assert most == 3
    assert admitted >= 12
    assert rejected >= 12
    await until(lambda: front.server.runtime.state.is_empty)
    assert running(front) == 0


async def test_a_lost_worker_frees_the_answers_that_it_held(connect: Connect, start: Start, tmp_path: Path) -> None:
    worker = start(
        "decode_worker", "--model=toy", "--worker-id=d8", "--heartbeat-s=0.05", f"--toy-step-s={SLOW_STEP_S}"
    )
    front = await connect(worker, key_file=file_of(tmp_path, max_concurrent=1), **PATIENT)
    async with presenting(front, ACME) as acme:
        stream = acme.stream("hello", max_tokens=1000, ignore_eos=True, timeout_s=60)
        await anext(stream)
        worker.kill()
        await until(lambda: front.num_workers == 0)
        await stream.aclose()
        await until(lambda: running(front) == 0)


async def test_unknown_keys_cost_no_tenant_anything(connect: Connect, decode: Program, tmp_path: Path) -> None:
    front = await connect(decode, key_file=file_of(tmp_path, max_concurrent=1), **PATIENT)
    unknown = [make_key(number.to_bytes(32, "little")) for number in range(1000, 1400)]
    async with presenting(front, ACME) as acme:
        for batch in range(0, len(unknown), 50):
            clients = [acme.with_token(key) for key in unknown[batch : batch + 50]]
            found = await asyncio.gather(*(one.generate("x" * 10_000) for one in clients), return_exceptions=True)
            assert {type(one) for one in found} == {Unauthenticated}
            await acme.generate("hello", max_tokens=2)
    assert front.server._tenants.quotas._accounts.keys() == {"acme"}


async def test_a_file_with_ten_thousand_tenants_is_served_and_reloaded(
    connect: Connect, decode: Program, tmp_path: Path
) -> None:
    keys = [make_key(number.to_bytes(32, "little")) for number in range(MAX_TENANTS)]
    path = tmp_path / "keys.json"

    def write(used: list[str]) -> None:
        found = {
            f"t{number}": {"max_concurrent": 2, "tokens_per_minute": 6000, "keys": [{"sha256": key_hash(key)}]}
            for number, key in enumerate(used)
        }
        path.write_text(json.dumps({"tenants": found}))

    write(keys)
    front = await connect(decode, key_file=str(path), **PATIENT)
    async with presenting(front, OPERATOR) as client:
        for number in range(0, MAX_TENANTS, 500):
            await client.with_token(keys[number]).generate("hello", max_tokens=2)
        write(keys[:1])
        await front.server._tenants.refresh()
        with pytest.raises(Unauthenticated):
            await client.with_token(keys[500]).generate("hello", max_tokens=2)
        await client.with_token(keys[0]).generate("hello", max_tokens=2)
    await until(lambda: front.server.runtime.state.is_empty)
    assert len(front.server._tenants.quotas._accounts) <= 2
