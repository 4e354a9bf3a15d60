"""ClusterService.Watch of a real router, through the SDK."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from pdserve import AsyncClient
from pdserve.build import FULL_VERSION
from pdserve.core.errors import InvalidRequest, Overloaded, ShuttingDown, Unauthenticated
from pdserve.core.live import LiveRequest
from router.service.cluster import MAX_VIEWERS
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program


async def test_200_requests_are_shown_with_the_numbers_that_their_clients_get(
    connect: Connect, decode: Program, prefill: Program
) -> None:
    front = await connect(decode, prefill)
    shown: dict[str, LiveRequest] = {}

    async def watch() -> None:
        async for frame in front.client.watch(0.1):
            shown.update({one.request_id: one for one in frame.requests if one.outcome})

    watching = asyncio.create_task(watch())
    done = []
    for turn in range(10):
        prompts = [f"watched {turn} {number} " + "long " * (number * 9) for number in range(20)]
        done += await asyncio.gather(*(front.client.generate(one, max_tokens=1 + len(one) % 9) for one in prompts))
    await until(lambda: len(shown) == 200)
    watching.cancel()
    for one in done:
        row, timings = shown[one.request_id], one.timings
        assert (row.ttft_s, row.tpot_s or 0.0) == (timings.ttft_s, timings.tpot_s)
        assert (row.prefill_worker, row.decode_worker) == (timings.prefill_worker, timings.decode_worker)
        assert (row.transfer_bytes, row.transfer_s) == (timings.transfer_bytes, timings.transfer_s)
        assert (row.prompt_tokens, row.output_tokens) == (one.usage.prompt_tokens, one.usage.completion_tokens)
        assert row.ended_s is not None
        assert row.ended_s - row.arrived_s == pytest.approx(timings.total_s, abs=1e-9)
        assert sum(each.seconds for each in row.phases) == pytest.approx(timings.total_s, abs=1e-6)
    assert any(row.prefill_worker for row in shown.values())


async def test_frames_state_the_versions(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    async with aclosing(front.client.watch(0.1)) as frames:
        frame = await anext(frames)
    assert [frame.version, *(one.version for one in frame.workers)] == [FULL_VERSION] * 2


async def test_viewers_are_limited_and_leave_when_they_close(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    async with AsyncExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            viewer = await stack.enter_async_context(aclosing(front.client.watch(0.1)))
            await anext(viewer)
        with pytest.raises(Overloaded, match="viewers"):
            await anext(front.client.watch())

    async def is_free() -> bool:
        try:
            async with aclosing(front.client.watch()) as viewer:
                await anext(viewer)
        except Overloaded:
            return False
        return True

    await until(is_free)


@pytest.mark.parametrize("period_s", [-1.0, 0.01, 61.0, float("nan"), float("inf")])
async def test_the_period_is_bounded(connect: Connect, decode: Program, period_s: float) -> None:
    front = await connect(decode)
    with pytest.raises(InvalidRequest, match="period_s"):
        await anext(front.client.watch(period_s))


async def test_only_the_operator_may_watch(connect: Connect, decode: Program) -> None:
    front = await connect(decode, token="secret")
    async with aclosing(front.client.watch()) as viewer:
        assert [one.worker_id for one in (await anext(viewer)).workers] == ["d0"]
    async with AsyncClient(front.server.address, token="wrong") as stranger:
        with pytest.raises(Unauthenticated):
            await anext(stranger.watch())


async def test_a_router_that_stops_ends_the_stream(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    viewer = front.client.watch(60.0)
    await anext(viewer)
    stopping = asyncio.create_task(front.server.stop())
    with pytest.raises(ShuttingDown):
        await anext(viewer)
    await stopping
