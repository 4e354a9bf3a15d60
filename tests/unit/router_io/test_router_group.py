"""Routers that share one port: each answers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve import AsyncClient
from pdserve.cli.operate import render
from pdserve.client.retries import Retries
from pdserve.config import RouterConfig
from pdserve.core.errors import (
    ConfigError,
    NotFound,
    QuotaExceeded,
    ShuttingDown,
    Unavailable,
)
from pdserve.core.live import LiveFrame
from pdserve.launch.ports import HeldPorts, free_ports
from pdserve.listening import HELD_ENV
from pdserve.v1 import cluster_pb2
from router.service.router_group import FramesOfRouter, socket_of
from router.service.server import RouterServer
from router.state.history import MAX_ENDED
from tests.support.cluster_secret import TEXT
from tests.unit.router_io.conftest import PATIENT, ConnectTwo, until
from tests.unit.router_io.processes import Program
from tests.unit.router_io.test_quotas_live import ACME, file_of, presenting


async def frame_with(client: AsyncClient, holds: Callable[[LiveFrame], bool]) -> LiveFrame:
    async with asyncio.timeout(60.0), aclosing(client.watch(0.1)) as frames:
        async for frame in frames:
            if holds(frame):
                return frame
    raise AssertionError("the router ended the stream")


async def test_each_explains_the_requests_of_all(connect_two: ConnectTwo, decode: Program) -> None:
    first, second = await connect_two(decode, token="token-of-the-operator")
    done = await second.client.generate("hello", max_tokens=2)
    for client in (first.client, second.client):
        found = await client.explain(done.request_id)
        assert (found.request_id, found.router_id, found.outcome) == (done.request_id, "router-1", "served")
    with pytest.raises(NotFound):
        await first.client.explain("unknown")
    asked = cluster_pb2.ExplainRequest(request_id=done.request_id, only_this_router=True)
    with pytest.raises(Exception, match="no recent request"):
        await first.cluster.Explain(asked, metadata=(("authorization", "Bearer token-of-the-operator"),))


async def test_an_unknown_request_is_unavailable_while_a_router_is_gone(
    connect_two: ConnectTwo, decode: Program, folder: Path
) -> None:
    first, _ = await connect_two(decode, members=4)
    socket_of(folder, 2).touch()  # of a router that was killed; the fourth has none
    with pytest.raises(Unavailable, match="another router does not answer"):
        await first.client.explain("unknown")
    seen = await first.client.topology()
    assert (seen.running_requests, seen.num_routers, seen.num_answered) == (0, 4, 2)
    assert "0 running, 0 queued in 2 of 4 routers, up" in render(seen)


async def test_topology_and_frames_count_the_requests_of_all(connect_two: ConnectTwo, slow_decode: Program) -> None:
    first, second = await connect_two(slow_decode)
    done = await second.client.generate("ended before", max_tokens=1)
    streams = [one.client.stream(f"busy {at}", max_tokens=2000) for at, one in enumerate((first, second, second))]
    for stream in streams:
        await anext(stream)
    for one in (first, second):
        assert (await one.client.topology()).running_requests == 3
        frame = await frame_with(one.client, lambda frame: True)
        assert (frame.running, frame.totals.served) == (3, 1), "the first frame is complete"
        assert (frame.totals.arrived, frame.workers[0].booked) == (4, 3)
        running = [row for row in frame.requests if not row.outcome]
        assert len({row.request_id for row in running}) == len(running) == 3
    ended = await frame_with(first.client, lambda frame: any(row.outcome for row in frame.requests))
    assert done.request_id in {row.request_id for row in ended.requests}
    for stream in streams:
        stream.close()
    await until(second.all_free)
    frame = await frame_with(first.client, lambda frame: frame.totals.cancelled == 3)
    assert (frame.running, frame.queued) == (0, 0)


async def test_a_request_that_ends_is_in_one_frame_of_a_viewer(connect_two: ConnectTwo, decode: Program) -> None:
    first, second = await connect_two(decode)
    seen: list[str] = []

    async def watch() -> None:
        async for frame in first.client.watch(0.1):
            seen.extend(row.request_id for row in frame.requests if row.outcome)

    watching = asyncio.create_task(watch())
    done = []
    for turn in range(20):
        prompts = [(one, f"watched {turn} {number}") for number, one in enumerate((first, second))]
        done += await asyncio.gather(*(one.client.generate(prompt, max_tokens=2) for one, prompt in prompts))
    await until(lambda: len(seen) >= 40)
    watching.cancel()
    assert sorted(seen) == sorted(one.request_id for one in done)


async def test_quotas_hold_for_all_together(connect_two: ConnectTwo, slow_decode: Program, tmp_path: Path) -> None:
    first, second = await connect_two(slow_decode, key_file=file_of(tmp_path, max_concurrent=2))
    async with presenting(first, ACME) as one, presenting(second, ACME) as other:
        streams = [one.stream("first", max_tokens=2000), other.stream("second", max_tokens=2000)]
        for stream in streams:
            await anext(stream)
        for client in (one, other):
            with pytest.raises(QuotaExceeded, match="2 of 2 answers"):
                await client.generate("third", max_tokens=1)
        streams[0].close()

        async def is_free() -> bool:
            try:
                return (await other.generate("third", max_tokens=1)).usage.completion_tokens == 1
            except QuotaExceeded:
                return False

        await until(is_free)
        streams[1].close()


async def test_a_drain_through_one_ends_through_another(connect_two: ConnectTwo, decode: Program) -> None:
    first, second = await connect_two(decode)

    async def drained() -> set[bool]:
        return {(await one.client.topology()).workers[0].is_drained for one in (first, second)}

    async def are(is_drained: bool) -> bool:
        return await drained() == {is_drained}

    await first.client.drain("d0")
    await until(lambda: are(True))
    await second.client.undrain("d0")
    await until(lambda: are(False))


def is_connected(server: RouterServer) -> bool:
    return any(one.is_connected for one in server.runtime.state.snapshot().workers)


async def test_calls_go_to_the_other_routers_while_one_drains(
    folder: Path, slow_decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, [port] = HeldPorts(), free_ports(1)
    held.hold("port", "127.0.0.1", port)
    monkeypatch.setenv(HELD_ENV, str(port))
    servers = [
        RouterServer(
            RouterConfig(
                model="toy",
                port=port,
                cluster_secret=TEXT,
                workers=(slow_decode.address,),
                group=str(folder),
                member=member,
                members=2,
                router_id=f"router-{member}",
                **PATIENT,
            )
        )
        for member in range(2)
    ]
    for server in servers:
        await server.start()
    clients = [AsyncClient(f"127.0.0.1:{port}", retries=Retries(limit=0)) for _ in range(16)]
    try:
        for server in servers:
            await until(partial(is_connected, server))
        streams = [client.stream("busy", max_tokens=200) for client in clients]
        for stream in streams:
            await anext(stream)
        leaving = max(servers, key=lambda one: one.runtime.num_calls)
        assert leaving.runtime.num_calls > 0
        draining = asyncio.create_task(leaving.drain())
        await until(lambda: not leaving.is_healthy)

        async def works(client: AsyncClient) -> bool:
            try:
                return (await client.generate("next", max_tokens=1)).usage.completion_tokens == 1
            except (ShuttingDown, Unavailable):  # until the connection's end is known
                return False

        await asyncio.gather(*(until(partial(works, client)) for client in clients))
        assert not draining.done(), "no call has waited for the end of the drain"
        for stream in streams:
            assert len([one async for one in stream]) > 0
            assert stream.completion.usage.completion_tokens == 200
        await draining
    finally:
        for client in clients:
            await client.close()
        for server in servers:
            await server.stop()
        held.release()


def in_group(folder: Path, member: int = 0, **settings: Any) -> RouterServer:
    return RouterServer(
        RouterConfig(
            model="toy",
            port=0,
            cluster_secret=TEXT,
            group=str(folder),
            member=member,
            members=2,
            router_id=f"router-{member}",
            **settings,
        )
    )


async def test_a_router_takes_connections_once_its_workers_are_attached(
    folder: Path, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_attach = asyncio.Event()
    server = in_group(folder, workers=(decode.address,))
    attached = type(server._workers).are_attached.fget
    monkeypatch.setattr(
        type(server._workers), "are_attached", property(lambda self: may_attach.is_set() and attached(self))
    )
    starting = asyncio.create_task(server.start())
    try:
        async with AsyncClient(f"unix:{socket_of(folder, 0)}", retries=Retries(limit=0)) as other:

            async def knows_its_worker() -> bool:
                try:
                    return any(one.is_connected for one in (await other.topology()).workers)
                except Unavailable:
                    return False

            await until(knows_its_worker)
            assert (server.address, starting.done()) == ("", False)
            may_attach.set()
            async with AsyncClient(await starting, retries=Retries(limit=0)) as client:
                assert (await client.generate("at once", max_tokens=1)).usage.completion_tokens == 1
    finally:
        await server.stop()


async def test_a_router_whose_workers_are_gone_listens_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.service.server.WORKERS_S", 0.1)
    server = in_group(folder, workers=(f"127.0.0.1:{free_ports(1)[0]}",))
    async with AsyncClient(await server.start(), retries=Retries(limit=0)) as client:
        assert (await client.topology()).router_id == "router-0"
    await server.stop()


async def test_a_router_that_is_stopped_while_it_waits_for_workers_does_not_listen(folder: Path) -> None:
    server = in_group(folder)
    starting = asyncio.create_task(server.start())
    await until(lambda: socket_of(folder, 0).exists())
    await server.stop()
    with pytest.raises(ShuttingDown):
        await starting
    assert not server.address


async def test_a_draining_router_is_asked_by_the_others(connect_two: ConnectTwo, slow_decode: Program) -> None:
    first, second = await connect_two(slow_decode)
    done = await second.client.generate("ended before", max_tokens=1)
    stream = second.client.stream("busy", max_tokens=2000)
    await anext(stream)
    draining = asyncio.create_task(second.server.drain())
    await until(lambda: not second.server.is_healthy)
    assert (await first.client.topology()).running_requests == 1
    assert (await first.client.explain(done.request_id)).router_id == "router-1"
    frame = await frame_with(first.client, lambda frame: True)
    assert frame.running == 1
    stream.close()
    await draining
    with pytest.raises(Unavailable, match="another router does not answer"):
        await first.client.explain(done.request_id)


def test_a_number_beyond_the_group_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="member: got 2, expected less than members, which is 2"):
        in_group(folder, 2)


def frame_of(incarnation: str, arrived: int, *ended: str, running: int = 0) -> cluster_pb2.LiveFrame:
    rows = [cluster_pb2.LiveRequest(request_id=one, outcome="served", ended_s=1.0) for one in ended]
    totals = cluster_pb2.LiveTotals(arrived=arrived)
    return cluster_pb2.LiveFrame(running=running, totals=totals, requests=rows, incarnation=incarnation)


def merged(seen: FramesOfRouter) -> tuple[int, int, list[str]]:
    frame = frame_of("viewer", 10, running=4)
    seen.merge_into(frame)
    return frame.running, frame.totals.arrived, [one.request_id for one in frame.requests]


def test_totals_of_a_router_that_ends_are_kept() -> None:
    seen = FramesOfRouter()
    seen.take(frame_of("first", 3, "a", running=2))
    seen.take(frame_of("first", 5, running=2))
    assert merged(seen) == (6, 15, ["a"])
    seen.ended()
    assert merged(seen) == (4, 15, [])
    seen.take(frame_of("second", 1, "a", running=1))
    assert merged(seen) == (5, 16, ["a"]), "the successor may serve a request of the same id"
    seen.ended()
    seen.take(frame_of("third", 2))
    assert merged(seen) == (4, 10 + 5 + 1 + 2, [])


def test_a_new_stream_to_the_same_process_counts_nothing_twice() -> None:
    seen = FramesOfRouter()
    seen.take(frame_of("same", 100, "a", "b"))
    seen.ended()
    seen.take(frame_of("same", 100, "a", "b"))
    assert merged(seen) == (4, 110, ["a", "b"])
    seen.ended()
    seen.take(frame_of("same", 101, "a", "b", "c"))
    assert merged(seen) == (4, 111, ["c"])


async def test_each_process_has_an_incarnation_in_its_frames(connect_two: ConnectTwo, decode: Program) -> None:
    found = set()
    for one in await connect_two(decode):
        async for message in one.cluster.Watch(cluster_pb2.WatchRequest(period_s=0.1, only_this_router=True)):
            found.add(message.frame.incarnation)
            break
    assert len(found - {""}) == 2


def test_what_a_slow_viewer_has_yet_to_see_is_bounded() -> None:
    seen = FramesOfRouter()
    for number in range(3 * MAX_ENDED):
        row = cluster_pb2.LiveRequest(request_id=str(number), outcome="served", ended_s=float(number))
        seen.take(cluster_pb2.LiveFrame(requests=[row]))
    frame = cluster_pb2.LiveFrame()
    seen.merge_into(frame)
    assert [one.request_id for one in frame.requests] == [str(one) for one in range(2 * MAX_ENDED, 3 * MAX_ENDED)]


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"group: got .*, expected a folder of this user with mode 0700"):
        RouterServer(RouterConfig(model="toy", port=0, cluster_secret=TEXT, group=str(tmp_path)))
